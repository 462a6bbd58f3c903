"""One way from a batch of candidates to its results, whatever runs them: submit, wait, submit again what is lost."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlc.errors import MeasureError
from mlc.measure.executor import Answer, Executor, Job
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult

__all__ = ["Dispatcher"]

#: seconds beyond a job's own limit after which its executor is taken to have lost it: the way there, a slow start
_GRACE = 30.0

OnResult = Callable[[int, MeasureResult], None]


@dataclass
class _Open:
    """A job without results. ``deadline`` is None while it waits here for the executor's capacity."""

    job: Job
    first: int  # the place of its first request in the batch
    submissions: int = 0
    deadline: float | None = None


class Dispatcher:
    """Implements :class:`mlc.measure.measurer.Measurer` with any :class:`Executor`.

    A job whose executor says that it is lost, or says nothing until its deadline, is submitted again, ``attempts``
    times in all; a candidate that is lost each time has failed (``timeout``). Only the first results of a job count,
    whichever submission they answer; answers to nothing that is open are dropped. ``clock`` tells seconds.
    """

    def __init__(
        self, executor: Executor, options: MeasureOptions, *, attempts: int = 3, grace: float = _GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if attempts < 1:
            raise MeasureError(f"a job must be submitted at least once, got {attempts} attempts")
        self.options = options
        self.lost = 0  # submissions that were given up
        self.dropped = 0  # answers that came twice, too late, or to nothing that was asked
        self._executor, self._attempts, self._grace, self._clock = executor, attempts, grace, clock
        self._prefix = uuid.uuid4().hex[:12]  # an executor that outlives this process may answer to an earlier one
        self._numbers = itertools.count()
        self._closed = False

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the executor. Idempotent."""
        self._closed = True
        self._executor.close()

    def measure(self, requests: Sequence[MeasureRequest], on_result: OnResult | None = None) -> list[MeasureResult]:
        """One result for each request, in order; ``on_result`` is told of each as it comes."""
        return self._settle([(request,) for request in requests], 0, on_result)

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        """Time the candidates in turn on one device, ``rounds`` times each."""
        if rounds < 1:
            raise MeasureError(f"candidates are compared in at least one round, got {rounds}")
        return self._settle([tuple(requests)] if requests else [], rounds, None)

    def _settle(
        self, groups: Sequence[tuple[MeasureRequest, ...]], rounds: int, on_result: OnResult | None
    ) -> list[MeasureResult]:
        if self._closed:
            raise MeasureError("a measurer cannot be used after it was closed; make a new one")
        results: dict[int, MeasureResult] = {}

        def settle(entry: _Open, found: Sequence[MeasureResult]) -> None:
            for index, result in enumerate(found, entry.first):
                results[index] = result
                if on_result is not None:
                    on_result(index, result)

        batch = _Batch(self, groups, rounds, settle)
        try:
            while batch.open:
                batch.advance()
        except BaseException:  # an interrupt must not cost what has been measured
            batch.take(self._executor.poll(0.0))
            raise
        return [results[index] for index in range(len(results))]


class _Batch:
    """The jobs of one call."""

    def __init__(
        self, of: Dispatcher, groups: Sequence[tuple[MeasureRequest, ...]], rounds: int,
        settle: Callable[[_Open, Sequence[MeasureResult]], None],
    ) -> None:
        self._of, self._settle = of, settle
        self.open: dict[str, _Open] = {}
        first = 0
        for requests in groups:
            job = Job(f"{of._prefix}-{next(of._numbers)}", requests, of.options, rounds)
            self.open[job.id] = _Open(job, first)
            first += len(requests)
        self._waiting = deque(self.open.values())

    def advance(self) -> None:
        """Submit as much as the executor can use, then wait for an answer or the first deadline."""
        of = self._of
        running = [entry for entry in self.open.values() if entry.deadline is not None]
        room = max(0, of._executor.capacity - len(running))
        chosen = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if chosen:
            of._executor.submit([entry.job for entry in chosen])
            for entry in chosen:
                entry.submissions += 1
                entry.deadline = of._clock() + entry.job.limit + of._grace
        deadlines = [entry.deadline for entry in self.open.values() if entry.deadline is not None]
        if not deadlines:
            raise MeasureError("an executor must be able to take a job, but its capacity is "
                               f"{of._executor.capacity}; give it a device")
        self.take(of._executor.poll(max(0.0, min(deadlines) - of._clock())))
        now = of._clock()
        for entry in [e for e in self.open.values() if e.deadline is not None and e.deadline <= now]:
            self._lost(entry)

    def take(self, answers: Sequence[Answer]) -> None:
        """Settle the jobs that were answered."""
        for answer in answers:
            entry = self.open.get(answer.id)
            if entry is None:
                self._of.dropped += 1
            elif answer.results is None or len(answer.results) != len(entry.job.requests):
                if entry.deadline is not None:  # else an earlier submission, known to be lost already
                    self._lost(entry)
            else:
                self._close(entry, answer.results)

    def _lost(self, entry: _Open) -> None:
        self._of.lost += 1
        entry.deadline = None
        if entry.submissions < self._of._attempts:
            self._waiting.append(entry)
            return
        failure = MeasureResult(failure="timeout", detail=f"no answer to any of {entry.submissions} submissions")
        self._close(entry, [replace(failure) for _ in entry.job.requests])

    def _close(self, entry: _Open, results: Sequence[MeasureResult]) -> None:
        del self.open[entry.job.id]
        if entry in self._waiting:  # a lost submission answered after all, before the next one
            self._waiting.remove(entry)
        self._settle(entry, results)
