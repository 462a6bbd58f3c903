"""What a tuning run found, for a table, a script, or the next run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TaskReport", "TuneReport", "latency"]


@dataclass(frozen=True)
class TaskReport:
    """One task. Seconds are of one call, infinite where nothing was measured.

    ``default_seconds`` is what the untuned schedule takes, ``best_seconds`` what is used from now on. ``verdict``:
    ``tuned`` (a winner that beat the default when timed in turn with it), ``default`` (nothing did),
    ``earlier`` (a schedule that an earlier run found), ``unconfirmed`` (the fastest seen, not timed against others).
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
    verdict: str

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
        fields = {k: _finite(v) for k, v in asdict(self).items()}
        return {**fields, "roofline_fraction": self.roofline_fraction, "speedup": self.speedup}


@dataclass(frozen=True)
class TuneReport:
    """``reason``: ``trials``, ``seconds``, ``finished`` (every task stopped) or ``interrupted``.

    ``trials`` and ``seconds`` are of this run alone, ``measured`` how many records it wrote.
    """

    reason: str
    session: str
    trials: int
    seconds: float
    measured: int
    tasks: tuple[TaskReport, ...]

    @property
    def default_latency(self) -> float | None:
        """Estimated seconds of the whole model untuned; None while a task's time is unknown."""
        return latency((t.weight, t.default_seconds) for t in self.tasks)

    @property
    def best_latency(self) -> float | None:
        """Estimated seconds of the whole model with what was found."""
        return latency((t.weight, t.best_seconds) for t in self.tasks)

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
            "measured": self.measured, "default_latency": self.default_latency, "best_latency": self.best_latency,
            "failures": self.failures, "tasks": [t.to_json() for t in self.tasks],
        }


def latency(parts: Any) -> float | None:
    """The sum of ``weight * seconds``, or None where one of the seconds is unknown."""
    total = sum(weight * seconds for weight, seconds in parts)
    return total if math.isfinite(total) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
