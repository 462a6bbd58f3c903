"""The contract of every executor: one result per request, in the same order, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mlc.graph.task import Task

__all__ = ["MeasureOptions", "MeasureRequest", "MeasureResult", "Measurer"]


@dataclass(frozen=True)
class MeasureOptions:
    """How long and how often a candidate is run, see :mod:`mlc.measure.timing`. Times are in seconds."""

    threads: int
    repeats: int = 3
    most_repeats: int = 9  # where noise hides which of two is faster
    min_repeat_seconds: float = 0.01
    warmup_runs: int = 1
    timeout: float = 10.0  # build and run of one candidate, after which its worker is killed
    rtol: float = 1e-3  # against the largest magnitude of the reference output
    cutoff: float = 0.0  # seconds: a first run slower than this is timed once only; 0 switches it off


@dataclass(frozen=True)
class MeasureRequest:
    """``func`` is the task's function and ``trace`` the candidate's trace, both as JSON text.

    A candidate without a trace is given as ``scheduled``, a function with the same parameters. With neither, ``func``
    is itself the candidate (it carries ``tirx.is_scheduled``). The reference output is always that of the unscheduled
    ``func``, so that a candidate in the last form is only checked for finite, repeatable output.

    ``constants`` are the positions of the parameters that hold weights, and ``constant_bytes`` is how much of them the
    model reads before it reads one again (see :class:`mlc.graph.task.Task`): weights are as cold as that when a time is
    taken. ``best`` is the time in seconds to beat, or 0: a clearly slower candidate is not timed for long. ``baseline``
    is the trace of the candidate that this task's times are normalised by on this machine (empty: none), and
    ``baseline_seconds`` its time, or 0 if it is still unknown; see :class:`mlc.measure.timing.Pace`.
    """

    task_key: str
    func: str
    target: str  # JSON of the tvm target
    trace: str
    scheduled: str = ""
    constants: tuple[int, ...] = ()
    constant_bytes: int = 0
    best: float = 0.0
    baseline: str = ""
    baseline_seconds: float = 0.0

    @staticmethod
    def of(task: Task, trace: str) -> MeasureRequest:
        """A candidate of ``task``, with weights as cold as the task's model leaves them."""
        from mlc.graph.task import to_json  # lazily: importing TVM takes seconds, and a request is plain data

        return MeasureRequest(task.key, to_json(task.func), task.target.attrs, trace, constants=task.constants,
                              constant_bytes=task.constant_bytes)


@dataclass(frozen=True)
class MeasureResult:
    """``failure`` as in :class:`mlc.log.record.Record`; ``code_hash`` identifies equal lowered code.

    ``slowness`` is how many times slower than its best the machine was during the measurement (see
    :mod:`mlc.measure.gauge`), or 1 if ``times`` are relative to a baseline and so independent of it. ``machine`` is
    empty for this machine; ``device`` names the device of a fleet.
    """

    times: tuple[float, ...] = ()
    failure: str = ""
    detail: str = ""
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    slowness: float = 1.0
    code_hash: str = ""
    machine: str = ""
    device: str = field(default="", compare=False)  # results are equal whichever device measured them


class Measurer(Protocol):
    """Builds and runs candidates, in processes that may crash, hang or return garbage."""

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: Callable[[int, MeasureResult], None] | None = None
    ) -> list[MeasureResult]:
        """One result per request, in order. ``on_result`` is called as each one is known."""

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        """Time the requests interleaved, ``rounds`` times each, in one worker. They are candidates of one task, or of
        tasks that are alternatives to each other in a model."""

    def close(self) -> None:
        """Stop every worker. Idempotent."""
