"""Candidates that come one by one: every free worker builds the next, while one at a time runs.

For devices whose times compiling on the same machine does not disturb, as GPUs, and of whose kernels each takes seconds
to build and a fraction of one to time: nobody waits there until the slowest of a batch is built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from mlc.measure.executor import Answer, Job
from mlc.measure.local import Batch, Candidate, LocalMeasurer
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult
from mlc.measure.pool import Busy
from mlc.measure.pool import Job as Work
from mlc.measure.process import WorkerProcess
from mlc.measure.protocol import Message

__all__ = ["StreamingExecutor", "StreamingMeasurer"]

_State = Enum("_State", ["WAITING", "BUILDING", "BUILT", "RUNNING"])


@dataclass(eq=False)
class _Coming:
    """A candidate, the only one of its batch, until it has its result."""

    batch: Batch
    candidate: Candidate
    state: _State = _State.WAITING

    @property
    def open(self) -> bool:
        return self.candidate.result is None


class StreamingMeasurer(LocalMeasurer):
    """A :class:`LocalMeasurer` that also takes candidates one by one.

    A worker that has built a candidate keeps it until its turn to run has come, in the order of their coming, and
    builds no other before. Nothing is computed beside a run, not even a reference. Neither :meth:`measure` nor
    :meth:`compare` may be called while this is :attr:`open`.
    """

    def __init__(self, options: MeasureOptions, workers: int = 2, kind: str = "compiling") -> None:
        super().__init__(options, workers, kind)
        self.workers = workers
        self._coming: list[_Coming] = []
        self._at_work: Busy = {}
        self._referring: set[Path] = set()  # references that are being computed

    @property
    def open(self) -> bool:
        """Whether a worker has, or is to have, something to do: also the reference that a task's candidates have left
        behind which could not be built. Another job for that worker would be taken to have this one's answer."""
        return bool(self._coming or self._at_work)

    def begin(self, request: MeasureRequest, done: Callable[[MeasureResult], None]) -> None:
        """Take a candidate; :meth:`advance` goes on with it, and tells ``done`` of its result."""
        batch = self._batch([request], self.options, lambda _index, result: done(result))
        self._coming.append(_Coming(batch, batch.candidates[0]))

    def advance(self, timeout: float) -> None:
        """Give idle workers what is to be done, and wait up to ``timeout`` seconds until some of it is.

        Whatever is raised, by Ctrl-C too, all that has no result is dropped.
        """
        try:
            self._pool.advance(self._at_work, self._choose, timeout)
        except BaseException:
            self._coming.clear()
            self._referring.clear()
            raise
        self._coming = [each for each in self._coming if each.open]

    def _choose(self, slot: int) -> Work | None:
        """What the idle worker in a slot is to do."""
        for each in self._coming:
            if each.state is _State.BUILT and not self._pool.living(each.candidate.worker):
                each.state = _State.WAITING
        held = next((each for each in self._coming if each.open and each.state is _State.BUILT
                     and self._slot(each.candidate.worker) == slot), None)
        if held is not None and ((work := self._go_on(held)) is not None or held.open):
            return work
        for each in self._coming:
            if each.open and each.state is _State.WAITING:
                return self._refer(each) or self._build(each)
        return None

    def _go_on(self, each: _Coming) -> Work | None:
        """What comes next of a candidate that an idle worker has built; it may have its result without."""
        candidate, worker = each.candidate, each.candidate.worker
        reference = candidate.reference
        if not reference.ready and not reference.problem:
            return self._refer(each)
        if self._settle_unrun(each.batch, candidate):
            return None
        if worker is not None and reference.path not in worker.prepared:
            return self._then(self._prepare_job(each.batch, candidate), lambda: self._after(each, _State.BUILT))
        waiting = (other for other in self._coming if other.open and self._awaits_turn(other))
        if self._running or self._referring or next(waiting) is not each:
            return None
        each.state = _State.RUNNING
        return self._then(self._run_job(each.batch, candidate), lambda: self._after(each, _State.WAITING))

    @property
    def _running(self) -> bool:
        """Whether a candidate is timed."""
        return any(each.open and each.state is _State.RUNNING for each in self._coming)

    def _awaits_turn(self, each: _Coming) -> bool:
        """Whether a candidate waits for nothing but that the device is free: to run, or to compute its reference."""
        worker, reference = each.candidate.worker, each.candidate.reference
        if each.state is not _State.BUILT or worker is None or not self._pool.living(worker):
            return False
        return not reference.ready or reference.path in worker.prepared

    def _build(self, each: _Coming) -> Work:
        each.state, each.candidate.worker = _State.BUILDING, None
        return self._then(self._build_job(each.batch, each.candidate), lambda: self._after(each, _State.BUILT))

    def _after(self, each: _Coming, state: _State) -> None:
        """What becomes of a candidate without a result once a job is done; where its worker has died of it, it is built
        again."""
        each.state = state if self._pool.living(each.candidate.worker) else _State.WAITING

    def _refer(self, each: _Coming) -> Work | None:
        """The computation of a candidate's reference, unless that is known, or under way, or a candidate is timed: the
        device computes large ones."""
        reference = each.candidate.reference
        if reference.ready or reference.problem or reference.path in self._referring or self._running:
            return None
        self._referring.add(reference.path)
        return self._then(self._reference_job(each.candidate.request, reference),
                          lambda: self._referring.discard(reference.path))

    @staticmethod
    def _then(work: Work, then: Callable[[], None]) -> Work:
        """The job, with more to do after it."""
        def done(worker: WorkerProcess, answer: Message) -> None:
            work.done(worker, answer)
            then()

        return replace(work, done=done)


class StreamingExecutor:
    """Implements :class:`mlc.measure.executor.Executor` with a :class:`StreamingMeasurer`, which loses nothing.

    Several batches are under way, so that a candidate is there for each worker that gets free. Jobs of several
    candidates, comparisons above all, wait until nothing else is open, and are done by themselves.
    """

    machine = ""
    grain = 1

    def __init__(self, measurer: StreamingMeasurer) -> None:
        self._measurer = measurer
        self._whole: deque[Job] = deque()
        self._done: list[Answer] = []

    @property
    def capacity(self) -> int:
        return 2 * self._measurer.workers

    @property
    def wanted(self) -> int:
        return self._measurer.workers + 1

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.rounds or len(job.requests) != 1:
                self._whole.append(job)
            else:
                self._measurer.begin(job.requests[0], partial(self._answered, job.id))

    def _answered(self, number: str, result: MeasureResult) -> None:
        self._done.append(Answer(number, (result,)))

    def poll(self, timeout: float) -> list[Answer]:
        try:
            if timeout > 0 and not self._done:
                self._go_on(timeout)
        except BaseException:
            self._whole.clear()  # nobody waits for them any more
            raise
        done, self._done = self._done, []
        return done

    def _go_on(self, timeout: float) -> None:
        if self._measurer.open:
            self._measurer.advance(timeout)
        elif self._whole:
            job = self._whole.popleft()
            results = (self._measurer.compare(job.requests, job.rounds) if job.rounds
                       else self._measurer.measure(job.requests))
            self._done.append(Answer(job.id, tuple(results)))

    def close(self) -> None:
        self._whole.clear()
        self._measurer.close()
