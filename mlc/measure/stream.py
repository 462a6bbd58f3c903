"""Streaming measurement: free workers build the next candidates while one at a time is run.

For devices whose times compiling on the same machine does not disturb, as GPUs, and of whose kernels each takes seconds
to build and a fraction of one to time: nobody waits there until the slowest of a batch is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from mlc.measure.executor import Answer, Job
from mlc.measure.local import Batch, Candidate, LocalMeasurer, code_of
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


@dataclass(eq=False)
class _Comparison:
    """Candidates that are built in one worker and timed in turn there; ``slot`` is that worker's, once it has one, and
    ``timed`` whether the device is theirs."""

    batch: Batch
    rounds: int
    done: Callable[[list[MeasureResult]], None]
    codes: frozenset[int]
    slot: int | None = None
    timed: bool = False


class StreamingMeasurer(LocalMeasurer):
    """A :class:`LocalMeasurer` that also takes candidates one by one, and comparisons.

    A worker that has built a candidate, or what is to be compared, keeps it until its turn to run has come, in the
    order of their coming and comparisons last, and builds no other before. Nothing is computed beside a run, not even a
    reference. Neither :meth:`measure` nor :meth:`compare` may be called while this is :attr:`open`.
    """

    def __init__(self, options: MeasureOptions, workers: int = 2, kind: str = "compiling") -> None:
        super().__init__(options, workers, kind)
        self.workers = workers
        self._coming: list[_Coming] = []
        self._comparisons: list[_Comparison] = []
        self._at_work: Busy = {}
        self._referring: set[Path] = set()  # references that are being computed

    @property
    def open(self) -> bool:
        """Whether a worker has, or is to have, something to do: also the reference that a task's candidates have left
        behind which could not be built. Another job for that worker would be taken to have this one's answer."""
        return bool(self._coming or self._comparisons or self._at_work)

    def begin(self, request: MeasureRequest, done: Callable[[MeasureResult], None]) -> None:
        """Take a candidate; :meth:`advance` goes on with it, and tells ``done`` of its result."""
        batch = self._batch([request], self.options, lambda _index, result: done(result))
        self._coming.append(_Coming(batch, batch.candidates[0]))

    def begin_comparison(
        self, requests: Sequence[MeasureRequest], rounds: int, done: Callable[[list[MeasureResult]], None]
    ) -> None:
        """Like :meth:`compare`, but returns at once: :meth:`advance` continues, and passes the results to ``done``.
        Other workers build for other comparisons meanwhile."""
        codes = frozenset(map(code_of, requests))
        self._comparisons.append(_Comparison(self._comparison(requests), rounds, done, codes))

    def advance(self, timeout: float) -> None:
        """Give idle workers what is to be done, and wait up to ``timeout`` seconds until some of it is.

        Whatever is raised, by Ctrl-C too, all that has no result is dropped.
        """
        try:
            self._pool.advance(self._at_work, self._choose, timeout)
        except BaseException:
            self._coming.clear()
            self._comparisons.clear()
            self._referring.clear()
            raise
        self._coming = [each for each in self._coming if each.open]

    def _choose(self, slot: int) -> Work | None:
        """The next job of the idle worker in a slot."""
        for each in self._coming:
            if each.state is _State.BUILT and not self._pool.living(each.candidate.worker):
                each.state = _State.WAITING
        held = next((each for each in self._coming if each.open and each.state is _State.BUILT
                     and self._slot(each.candidate.worker) == slot), None)
        if held is not None and ((work := self._go_on(held)) is not None or held.open):
            return work
        mine = next((each for each in self._comparisons if each.slot == slot), None)
        if mine is not None:
            return self._compare_on(mine, slot)
        for each in self._coming:
            if each.open and each.state is _State.WAITING:
                return self._refer(each.candidate) or self._build(each)
        free = [each for each in self._comparisons if each.slot is None]
        if not free:
            return None
        mine = max(free, key=lambda each: self._pool.known_in(slot, each.codes))  # a worker keeps what was promising
        mine.slot = slot
        return self._compare_on(mine, slot)

    def _compare_on(self, each: _Comparison, slot: int) -> Work | None:
        """Continue a comparison in its worker, which is idle, unless it has to wait or is finished."""
        batch, candidates = each.batch, each.batch.candidates
        for candidate in batch.open():
            if not candidate.reference.ready and not candidate.reference.problem:
                return self._refer(candidate)
            self._settle_unrun(batch, candidate)
        passed = [c for c in candidates if c.result is None or not c.result.failure]
        for candidate in passed:  # its worker may have died of another
            if self._slot(candidate.worker) != slot:
                return self._build_job(batch, candidate)
        for candidate in batch.open():
            if candidate.worker is not None and candidate.reference.path not in candidate.worker.prepared:
                return self._prepare_job(batch, candidate)
        if not each.timed and (self._running or self._referring or any(map(self._awaits_turn, self._coming))):
            return None
        each.timed = True
        for candidate in batch.open():
            return self._run_job(batch, candidate)
        if not passed:
            self._compared(each)
            return None
        return self._then(self._interleave_job(batch, passed, each.rounds), lambda: self._compared(each))

    def _compared(self, each: _Comparison) -> None:
        self._comparisons.remove(each)
        each.done(each.batch.results())

    def _go_on(self, each: _Coming) -> Work | None:
        """Continue with a candidate that an idle worker has built; it may have its result without a run."""
        candidate, worker = each.candidate, each.candidate.worker
        reference = candidate.reference
        if not reference.ready and not reference.problem:
            return self._refer(candidate)
        if self._settle_unrun(each.batch, candidate):
            return None
        if worker is not None and reference.path not in worker.prepared:
            return self._then(self._prepare_job(each.batch, candidate), lambda: self._after(each, _State.BUILT))
        waiting = filter(self._awaits_turn, self._coming)
        if self._running or self._referring or next(waiting) is not each:
            return None
        each.state = _State.RUNNING
        return self._then(self._run_job(each.batch, candidate), lambda: self._after(each, _State.WAITING))

    @property
    def _running(self) -> bool:
        """Whether something is timed."""
        return any(each.open and each.state is _State.RUNNING for each in self._coming) or any(
            each.timed for each in self._comparisons)

    def _awaits_turn(self, each: _Coming) -> bool:
        """Whether a candidate waits for nothing but that the device is free: to run, or to compute its reference."""
        worker, reference = each.candidate.worker, each.candidate.reference
        if not each.open or each.state is not _State.BUILT or worker is None or not self._pool.living(worker):
            return False
        return not reference.ready or reference.path in worker.prepared

    def _build(self, each: _Coming) -> Work:
        each.state, each.candidate.worker = _State.BUILDING, None
        return self._then(self._build_job(each.batch, each.candidate), lambda: self._after(each, _State.BUILT))

    def _after(self, each: _Coming, state: _State) -> None:
        """Handle the end of a job of a candidate without a result; if its worker died of another candidate, it is built
        again."""
        each.state = state if self._pool.living(each.candidate.worker) else _State.WAITING

    def _refer(self, candidate: Candidate) -> Work | None:
        """The computation of a candidate's reference, unless that is known, or under way, or something is timed: the
        device computes large ones."""
        reference = candidate.reference
        if reference.ready or reference.problem or reference.path in self._referring or self._running:
            return None
        self._referring.add(reference.path)
        return self._then(self._reference_job(candidate.request, reference),
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

    Several batches are under way, so that a candidate is there for each worker that gets free."""

    machine = ""
    grain = 1

    def __init__(self, measurer: StreamingMeasurer) -> None:
        self._measurer = measurer
        self._done: list[Answer] = []

    @property
    def capacity(self) -> int:
        return 2 * self._measurer.workers

    @property
    def wanted(self) -> int:
        return self._measurer.workers + 1

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.rounds:
                self._measurer.begin_comparison(job.requests, job.rounds, partial(self._compared, job.id))
            else:
                (request,) = job.requests  # of which a job has as many as the grain says
                self._measurer.begin(request, partial(self._answered, job.id))

    def _answered(self, number: str, result: MeasureResult) -> None:
        self._done.append(Answer(number, (result,)))

    def _compared(self, number: str, results: list[MeasureResult]) -> None:
        self._done.append(Answer(number, tuple(results)))

    def poll(self, timeout: float) -> list[Answer]:
        if timeout > 0 and not self._done and self._measurer.open:
            self._measurer.advance(timeout)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._measurer.close()
