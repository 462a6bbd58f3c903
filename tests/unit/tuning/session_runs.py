"""Runs of a session on a fake measurer, in a space whose best point is known."""

from __future__ import annotations

from collections.abc import Sequence

from tuning_tasks import TARGET, matmul

from mlc.graph.task import Task
from mlc.log import TuningLog
from mlc.testing.measuring import FakeMeasurer, decided
from mlc.tuning import TuneOptions, TuneReport, tune_tasks
from mlc.tuning.events import Event

BEST = (8, 32, 4)

DEFAULT = (1, 16, 1)


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Event]:
        return [e for e in self.events if isinstance(e, kind)]


def tune(
    log: TuningLog, measurer: FakeMeasurer, tasks: Sequence[Task] = (), **options: object
) -> tuple[TuneReport, Listener]:
    listener = Listener()
    chosen = TuneOptions(**{"trials": 40, **options})  # type: ignore[arg-type]
    report = tune_tasks(list(tasks) or [matmul(64, 64, 32)], TARGET, log, chosen, measurer, listener)
    return report, listener


def points(measurer: FakeMeasurer) -> list[tuple[int, ...]]:
    return [decided(request.trace) for request in measurer.log]
