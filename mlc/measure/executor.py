"""The interface of executors: :class:`mlc.measure.local_executor.LocalExecutor` for this machine,
:class:`mlc.measure.fleet.Fleet` for many.

An executor takes jobs and gives answers, in whatever order they come. It may lose a job with the device that had it,
and answer one twice: :class:`mlc.measure.dispatch.Dispatcher` submits again what is lost and takes each answer once.
What a new kind of device needs is the methods of :class:`Executor`; ``Job`` and ``Answer`` hold plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult

__all__ = ["Answer", "Executor", "Job"]


@dataclass(frozen=True)
class Job:
    """What one device does in one go: the candidates of ``requests``, each built, checked, and timed.

    ``rounds`` of 0 times them one after another as ``options`` say; otherwise they are timed in turn, so many times
    each. ``limit`` are the seconds after which an executor may give the job up; waiting for a device does not count.
    """

    id: str
    requests: tuple[MeasureRequest, ...]
    options: MeasureOptions
    rounds: int = 0

    @property
    def limit(self) -> float:
        return len(self.requests) * (self.options.timeout + self.rounds * self.options.timeout / 4)


@dataclass(frozen=True)
class Answer:
    """``results`` has one entry for each request of the job ``id``; None says that the job is known to be lost."""

    id: str
    results: tuple[MeasureResult, ...] | None


class Executor(Protocol):
    """Runs jobs at least once each, as far as its devices live."""

    @property
    def capacity(self) -> int:
        """How many jobs it is worth submitting at once; those submitted beyond may wait long."""

    @property
    def wanted(self) -> int:
        """Jobs that must be under way so that no device is about to be idle, at most :attr:`capacity`. With 1 a batch
        is measured before the next is proposed."""

    @property
    def machine(self) -> str:
        """The description of its devices, as in a record; empty for this machine."""

    @property
    def grain(self) -> int:
        """Candidates that one job should hold, the last of a batch perhaps fewer."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take ``jobs`` and return. A job may be submitted again under its id, whatever became of it before.

        Raises :class:`mlc.errors.MeasureError` where no job can ever be done.
        """

    def poll(self, timeout: float) -> list[Answer]:
        """The answers since the last call, in any order, waiting up to ``timeout`` seconds for the first. With a
        ``timeout`` of 0, nothing is begun or waited for. Raises as :meth:`submit` does."""

    def close(self) -> None:
        """Give the devices back; what is under way is abandoned. Idempotent."""
