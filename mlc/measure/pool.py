"""A pool of worker processes: keeps them busy and replaces those that die."""

from __future__ import annotations

import math
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlc.errors import MeasureError
from mlc.measure.process import WorkerProcess
from mlc.measure.protocol import Broken, Message

__all__ = ["Busy", "Job", "Pool"]

_START_SECONDS = 120.0  # for a worker to import TVM on a machine that is busy
_START_ATTEMPTS = 3


@dataclass(frozen=True)
class Job:
    """``done`` takes the worker and its answer. If the worker died or took more than ``limit`` seconds, the answer
    is a failure (``crash`` or ``timeout``) and the worker is gone. Only the worker in ``slot`` does it, where one is
    named."""

    message: Message
    limit: float
    done: Callable[[WorkerProcess, Message], None]
    slot: int | None = None


#: what the workers in which slots do, and when they are given up
Busy = dict[int, tuple[Job, float]]


class Pool:
    """``size`` slots for workers. They start at once, in the background; one that died is replaced when needed.

    ``folder`` is where they have their temporary files, ``kind`` what they can do, see
    :data:`mlc.measure.worker.RUNNERS`.
    """

    def __init__(self, size: int, threads_each: int, folder: Path, kind: str = "compiling") -> None:
        self._threads_each, self._folder, self._kind = threads_each, folder, kind
        self._slots: list[WorkerProcess | None] = []
        self._failed_starts = 0
        self._close = weakref.finalize(self, _kill_all, self._slots)
        self._slots.extend(WorkerProcess(threads_each, folder, kind) for _ in range(size))

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def close(self) -> None:
        """Kill every worker. Idempotent."""
        self._close()

    def interrupt(self) -> None:
        """Kill what the workers do, from any thread: who serves hears that they crashed, and may close the pool."""
        for worker in self._slots:
            if worker is not None:
                worker.interrupt()

    def living(self, worker: WorkerProcess | None) -> bool:
        """Whether ``worker`` is still one of the pool's, with what it holds."""
        return worker is not None and worker in self._slots and worker.alive

    def slot_of(self, worker: WorkerProcess) -> int:
        """The slot of ``worker``, for jobs that need what it holds."""
        return self._slots.index(worker)

    def slot_with(self, codes: frozenset[int]) -> int:
        """The slot whose worker has run the most of some candidates."""
        return max(range(len(self._slots)), key=lambda slot: self.known_in(slot, codes))

    def known_in(self, slot: int, codes: frozenset[int]) -> int:
        """How many of some candidates the worker in a slot has run."""
        worker = self._slots[slot]
        return len(worker.ran & codes) if worker is not None and worker.alive else 0

    def serve(self, jobs: Iterable[Job], slots: Sequence[int] | None = None) -> None:
        """Do all ``jobs`` on the workers in ``slots`` (default: all), one job a worker at a time.

        Raises :class:`MeasureError` only where no worker can be started. Whatever else is raised, by a ``done`` or
        by Ctrl-C, leaves no worker with half a job.
        """
        waiting, chosen = deque(jobs), range(len(self._slots)) if slots is None else slots
        busy: Busy = {}
        try:
            while waiting or busy:
                free = []  # for which there is a job
                for slot in chosen:
                    job = next((job for job in waiting if job.slot in (None, slot)), None)
                    if job is None:
                        continue
                    free.append(slot)
                    if slot not in busy and self._idle(slot):
                        waiting.remove(job)
                        self._begin(slot, job, busy)
                self._wait(list(dict.fromkeys([*busy, *free])), busy)
        except BaseException:
            for slot in busy:
                self._drop(slot)
            raise

    def advance(self, busy: Busy, choose: Callable[[int], Job | None], timeout: float) -> None:
        """One step of work that has no end: give each idle worker the job that ``choose`` has for its slot, if any, and
        wait up to ``timeout`` seconds for the first answer, death or deadline among the ``busy``, which are kept there.

        Raises as :meth:`serve`, and leaves no worker with half a job then.
        """
        try:
            for slot in range(len(self._slots)):
                if slot not in busy and self._idle(slot) and (job := choose(slot)) is not None:
                    self._begin(slot, job, busy)
            starting = [slot for slot, worker in enumerate(self._slots) if worker is not None and not worker.ready]
            self._wait(list(dict.fromkeys([*busy, *starting])), busy, timeout)
        except BaseException:
            for slot in busy:
                self._drop(slot)
            busy.clear()
            raise

    def settle(self) -> None:
        """Wait for workers that are still starting: their imports would disturb whatever is timed."""
        while starting := [i for i, worker in enumerate(self._slots) if worker is not None and not worker.ready]:
            self._wait(starting, {})

    def _worker(self, slot: int) -> WorkerProcess:
        worker = self._slots[slot]
        if worker is None:
            worker = self._slots[slot] = WorkerProcess(self._threads_each, self._folder, self._kind)
        return worker

    def _idle(self, slot: int) -> bool:
        """Whether the worker, which has no job, can take one. One that died between jobs is replaced, without blame."""
        worker = self._worker(slot)
        if worker.ready and not worker.alive:
            self._drop(slot)
            worker = self._worker(slot)
        return worker.ready

    def _begin(self, slot: int, job: Job, busy: Busy) -> None:
        busy[slot] = (job, time.monotonic() + job.limit)
        try:
            self._worker(slot).send({**job.message, "limit": job.limit})
        except Broken:
            self._ended(slot, busy)

    def _wait(self, slots: Sequence[int], busy: Busy, most: float = math.inf) -> None:
        """Wait for the first answer, death, or deadline among ``slots``, at ``most`` so many seconds, and deal with all
        there are."""
        deadlines = {}
        with selectors.DefaultSelector() as selector:
            for slot in slots:
                worker = self._worker(slot)
                if slot in busy or not worker.ready:
                    deadlines[slot] = busy[slot][1] if slot in busy else worker.started + _START_SECONDS
                    selector.register(worker, selectors.EVENT_READ, slot)
            if not deadlines:  # what was begun has ended already
                return
            patience = min(most, max(0.0, min(deadlines.values()) - time.monotonic()))
            for key, _ in selector.select(patience):
                self._hear(key.data, busy)
                deadlines.pop(key.data)
        for slot, deadline in deadlines.items():
            if time.monotonic() >= deadline:
                self._overdue(slot, busy)

    def _hear(self, slot: int, busy: Busy) -> None:
        worker = self._worker(slot)
        try:
            answer = worker.receive()
        except Broken:
            self._ended(slot, busy)
            return
        if answer is None:
            return
        if worker.ready:
            job, _ = busy.pop(slot)
            job.done(worker, answer)
        else:
            worker.ready = True
            self._failed_starts = 0

    def _ended(self, slot: int, busy: Busy) -> None:
        worker = self._worker(slot)
        how = worker.bury()
        self._slots[slot] = None
        if slot in busy:
            job, _ = busy.pop(slot)
            job.done(worker, {"failure": "crash", "detail": f"the worker ended with {how}"})
        else:
            self._start_failed(how)

    def _overdue(self, slot: int, busy: Busy) -> None:
        worker = self._worker(slot)
        self._drop(slot)
        if slot in busy:
            job, _ = busy.pop(slot)
            job.done(worker, {"failure": "timeout", "detail": f"no answer after {job.limit:.3g} s"})
        else:
            self._start_failed(f"no sign of life for {_START_SECONDS:.0f} s")

    def _start_failed(self, how: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _START_ATTEMPTS:
            raise MeasureError(f"workers must be able to start, but {_START_ATTEMPTS} in a row ended at once ({how}); "
                               "`mlc doctor` says what is wrong with the installation")

    def _drop(self, slot: int) -> None:
        worker, self._slots[slot] = self._slots[slot], None
        if worker is not None:
            worker.kill()


def _kill_all(slots: list[WorkerProcess | None]) -> None:
    for slot, worker in enumerate(slots):
        slots[slot] = None
        if worker is not None:
            worker.kill()
