"""Events of a tuning run, as values; listeners decide how to show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mlc.measure.fleet import DeviceStatus
from mlc.tuning.report import Outcome, TuneReport

__all__ = [
    "BatchCompiled", "BatchMeasured", "Event", "Finished", "FleetChanged", "Listener", "SessionStarted",
    "TaskConfirmed", "TaskPlan", "TaskStopped",
]


@dataclass(frozen=True)
class TaskPlan:
    """A task before anything is measured. ``known`` records of it are in the log.

    Of tasks with an equal ``choice`` that is not empty, the model runs the fastest only. ``calls`` says how often each
    of several graphs of the model calls it, of which the model runs the fastest; empty where there is one graph only.
    """

    key: str
    name: str
    weight: int
    space: str
    knobs: int
    points: int
    roofline_seconds: float
    known: int
    choice: str = ""
    calls: tuple[int, ...] = ()


class _Json:
    """Events as JSON values, told apart by ``event``."""

    def to_json(self) -> dict[str, Any]:
        return {"event": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class SessionStarted(_Json):
    """``trials`` and ``seconds`` are what is left of the budget, ``spent_*`` what a resumed run has used before."""

    session: str
    tasks: tuple[TaskPlan, ...]
    trials: int | None
    seconds: float | None
    spent_trials: int = 0
    spent_seconds: float = 0.0


@dataclass(frozen=True)
class BatchMeasured(_Json):
    """A batch of one task has been measured and recorded.

    Seconds of kernels are per call, None while unknown. ``share`` is the task's part of the whole model's time,
    ``latency`` the whole model's estimated seconds (tasks without a trial by a guess), ``eta`` the seconds until
    the budget ends, None without a budget. ``failures`` are the task's, by reason; ``best_decisions`` are the knobs
    of the best so far.
    """

    task: str
    name: str
    batch: int
    task_trials: int
    trials: int
    best_seconds: float | None
    default_seconds: float | None
    roofline_fraction: float
    share: float
    latency: float | None
    default_latency: float | None
    failures: dict[str, int]
    elapsed: float
    eta: float | None
    best_decisions: dict[str, int]


@dataclass(frozen=True)
class BatchCompiled(_Json):
    """Candidates of one task have been compiled for a GPU that is not here, and recorded.

    ``expected_seconds`` are what the best so far takes by arithmetic, ``latency`` the whole model, None while unknown;
    ``failures`` counts the task's candidates that are refused. The others are as in :class:`BatchMeasured`.
    """

    task: str
    name: str
    task_trials: int
    trials: int
    expected_seconds: float | None
    latency: float | None
    failures: dict[str, int]
    elapsed: float
    eta: float | None
    best_decisions: dict[str, int]


@dataclass(frozen=True)
class TaskStopped(_Json):
    """No more trials for this task: ``flat`` (batches that gained nothing), ``roofline`` (next to its bound),
    ``beaten`` (an alternative is faster), ``exhausted`` (nothing left to try), ``failing``, ``untimed`` (its candidates
    were compiled, for a GPU that is not here) or ``broken: …``."""

    task: str
    name: str
    reason: str
    trials: int
    best_seconds: float | None


@dataclass(frozen=True)
class TaskConfirmed(_Json):
    """The winner was timed in turn with the default and the earlier best; ``verdict`` as in :class:`TaskReport`."""

    task: str
    name: str
    verdict: Outcome
    default_seconds: float | None
    best_seconds: float | None


@dataclass(frozen=True)
class FleetChanged(_Json):
    """The devices that measure, those that are gone or left out too: told when one comes or goes, and now and then."""

    devices: tuple[DeviceStatus, ...]


@dataclass(frozen=True)
class Finished:
    """The run is over; always the last event."""

    report: TuneReport

    def to_json(self) -> dict[str, Any]:
        return {"event": "Finished", **self.report.to_json()}


Event = SessionStarted | BatchMeasured | BatchCompiled | TaskStopped | TaskConfirmed | FleetChanged | Finished
Listener = Callable[[Event], None]
