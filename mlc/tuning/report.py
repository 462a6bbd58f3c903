"""The result of a tuning run, for people, scripts and the next run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

__all__ = ["GraphReport", "Outcome", "TaskReport", "TuneReport", "finite", "first_of_choices", "latency"]

#: what a task's last comparison came to; see :class:`TaskReport`
Outcome: TypeAlias = Literal["tuned", "default", "earlier", "unconfirmed", "untimed"]

_Choosable = TypeVar("_Choosable", bound="Choosable")


class Choosable(Protocol):
    """Something that may be one of several alternatives."""

    @property
    def choice(self) -> str: ...


@dataclass(frozen=True)
class TaskReport:
    """One task. Seconds are of one call, infinite where nothing was measured.

    ``default_seconds`` is what the untuned schedule takes, ``best_seconds`` what is used from now on. ``verdict``:
    ``tuned`` (a winner that beat the default when timed in turn with it), ``default`` (nothing did),
    ``earlier`` (a schedule that an earlier run found), ``unconfirmed`` (the fastest seen, not timed against others),
    ``untimed`` (candidates were compiled and none was run).
    Tasks with an equal ``choice`` that is not empty are alternatives for the same calls: the fastest is used, and the
    first is used untuned. ``expected_seconds`` is a guess for a task that had no trial, or what arithmetic
    gives one that was not timed, infinite for all others.
    """

    key: str
    name: str
    weight: int
    space: str
    trials: int
    seconds: float
    default_seconds: float
    best_seconds: float
    roofline_seconds: float
    failures: dict[str, int]
    stopped: str
    verdict: Outcome
    choice: str = ""
    expected_seconds: float = math.inf

    @property
    def roofline_fraction(self) -> float:
        """Part of the bound's speed that is reached; above 1 where the documented peak is lower than the real one."""
        return self.roofline_seconds / self.best_seconds if self.best_seconds > 0 else 0.0

    @property
    def speedup(self) -> float:
        """Over the untuned schedule; 1 where one of the two is unknown."""
        if not math.isfinite(self.default_seconds) or not math.isfinite(self.best_seconds):
            return 1.0
        return self.default_seconds / self.best_seconds

    def to_json(self) -> dict[str, Any]:
        """JSON values; unknown times are None."""
        fields = {k: finite(v) for k, v in asdict(self).items()}
        return {**fields, "roofline_fraction": self.roofline_fraction, "speedup": self.speedup}


@dataclass(frozen=True)
class GraphReport:
    """Which graph of the model is kept: its own or one of ``others`` that were tuned beside it.

    Seconds are of runs of whole models that were built and timed in turn: ``own_seconds`` of the model's own graph and
    ``seconds`` of the best other; None where it did not come to that.
    """

    others: int
    substituted: bool
    own_seconds: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class TuneReport:
    """``reason``: ``trials``, ``seconds``, ``finished`` (every task stopped), ``interrupted`` or ``failing`` (the first
    candidates of several tasks all failed alike).

    ``trials`` and ``seconds`` are of this run alone, ``measured`` how many records it wrote. ``graph`` is None where
    nothing could be substituted.
    """

    reason: str
    session: str
    trials: int
    seconds: float
    measured: int
    tasks: tuple[TaskReport, ...]
    graph: GraphReport | None = None

    @property
    def untimed(self) -> bool:
        """Whether candidates were compiled and none was run, since the target's GPU is not here."""
        return any(task.verdict == "untimed" for task in self.tasks)

    @property
    def default_latency(self) -> float | None:
        """Estimated seconds of the whole model untuned; None where a task did not run."""
        return latency(
            (t.choice, t.weight * min(t.default_seconds, t.expected_seconds)) for t in first_of_choices(self.tasks)
        )

    @property
    def best_latency(self) -> float | None:
        """Estimated seconds of the whole model with what was found."""
        return latency((t.choice, t.weight * min(t.best_seconds, t.expected_seconds)) for t in self.tasks)

    @property
    def used(self) -> tuple[TaskReport, ...]:
        """The tasks without the alternatives that are slower than others."""
        best: dict[str, TaskReport] = {}
        for task in self.tasks:
            if task.choice and task.best_seconds < best.get(task.choice, task).best_seconds:
                best[task.choice] = task
            best.setdefault(task.choice or task.key, task)
        return tuple(task for task in self.tasks if best[task.choice or task.key] is task)

    @property
    def failures(self) -> dict[str, int]:
        """Failed candidates by reason, over all tasks."""
        total: dict[str, int] = {}
        for task in self.tasks:
            for reason, count in task.failures.items():
                total[reason] = total.get(reason, 0) + count
        return dict(sorted(total.items()))

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "reason": self.reason, "session": self.session, "trials": self.trials, "seconds": self.seconds,
            "measured": self.measured, "untimed": self.untimed,
            "default_latency": self.default_latency, "best_latency": self.best_latency,
            "failures": self.failures, "tasks": [t.to_json() for t in self.tasks],
            "graph": None if self.graph is None else asdict(self.graph),
        }


def latency(parts: Iterable[tuple[str, float]]) -> float | None:
    """The sum of ``(choice, seconds)``, of each choice that is not empty the least; None where one is unknown."""
    total, least = 0.0, dict[str, float]()
    for choice, seconds in parts:
        if choice:
            least[choice] = min(seconds, least.get(choice, math.inf))
        else:
            total += seconds
    total += sum(least.values())
    return total if math.isfinite(total) else None


def first_of_choices(parts: Iterable[_Choosable]) -> list[_Choosable]:
    """Those with an empty ``choice``, and the first of each choice: what untuned code runs."""
    seen: set[str] = set()
    kept = []
    for part in parts:
        if part.choice not in seen:
            kept.append(part)
        if part.choice:
            seen.add(part.choice)
    return kept


def finite(value: Any) -> Any:
    """The value; None for a number that is infinite or NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
