"""Submits batches of candidates to any executor, collects the results, and resubmits what was lost."""

from __future__ import annotations

import heapq
import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from mlc.errors import MeasureError
from mlc.measure.executor import Answer, Executor, Job
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult

__all__ = ["Batch", "Dispatcher"]

#: seconds beyond a job's own limit after which its executor is taken to have lost it: the way there, a slow start
_GRACE = 30.0

OnResult = Callable[[int, MeasureResult], None]


class Batch:
    """Candidates on their way; ``on_result`` is told of each result, with the place of its request, as it comes."""

    def __init__(self, size: int, on_result: OnResult | None = None) -> None:
        self._size, self._on_result = size, on_result
        self._known: dict[int, MeasureResult] = {}

    @property
    def done(self) -> bool:
        """Whether every request has its result."""
        return len(self._known) == self._size

    @property
    def results(self) -> list[MeasureResult]:
        """The results known so far, in the order of the requests."""
        return [self._known[index] for index in sorted(self._known)]

    def settle(self, first: int, results: Sequence[MeasureResult]) -> None:
        """Take the results of the requests from place ``first`` on."""
        for index, result in enumerate(results, first):
            self._known[index] = result
            if self._on_result is not None:
                self._on_result(index, result)


@dataclass
class _Open:
    """A job without results. ``deadline`` is None while it waits here for the executor's capacity."""

    job: Job
    batch: Batch
    first: int  # the place of its first request in the batch
    submissions: int = 0
    deadline: float | None = None


class Dispatcher(AbstractContextManager["Dispatcher"]):
    """Implements :class:`mlc.measure.measurer.Measurer` with any :class:`Executor`; several batches may be under way.

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
        self.executor = executor
        self.lost = 0  # submissions that were given up
        self.dropped = 0  # answers that came twice, too late, or to nothing that was asked
        self._attempts, self._grace, self._clock = attempts, grace, clock
        self._prefix = uuid.uuid4().hex[:12]  # an executor that outlives this process may answer to an earlier one
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._waiting: deque[_Open] = deque()
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of answered jobs are left in it
        self._closed = False

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the executor. Idempotent."""
        self._closed = True
        self.executor.close()

    def measure(self, requests: Sequence[MeasureRequest], on_result: OnResult | None = None) -> list[MeasureResult]:
        """One result for each request, in order; ``on_result`` is told of each as it comes."""
        return self._settled(self.begin(requests, on_result))

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        """Time the candidates in turn on one device, ``rounds`` times each."""
        return self._settled(self.begin_comparison(requests, rounds))

    @property
    def hungry(self) -> bool:
        """Whether a device is about to be idle, so that another batch should begin."""
        return len(self._open) < self.executor.wanted

    def begin(self, requests: Sequence[MeasureRequest], on_result: OnResult | None = None) -> Batch:
        """Like :meth:`measure`, but returns at once; :meth:`advance` continues."""
        grain = max(1, self.executor.grain)
        return self._begin([tuple(requests[i : i + grain]) for i in range(0, len(requests), grain)], 0, on_result)

    def begin_comparison(self, requests: Sequence[MeasureRequest], rounds: int) -> Batch:
        """Like :meth:`compare`, but returns at once."""
        if rounds < 1:
            raise MeasureError(f"candidates are compared in at least one round, got {rounds}")
        return self._begin([tuple(requests)] if requests else [], rounds, None)

    def advance(self) -> None:
        """Submit as much as the executor can use, then wait for an answer or the first deadline.

        Whatever is raised, by Ctrl-C too, what has been answered is told before, and all that is open is abandoned.
        """
        try:
            self._submit()
            if self._open:
                self._take(self.executor.poll(self._patience()))
                self._expire()
        except BaseException:
            self._take(self.executor.poll(0.0))
            self._open.clear()
            self._waiting.clear()
            self._deadlines.clear()
            raise

    def _begin(
        self, groups: Sequence[tuple[MeasureRequest, ...]], rounds: int, on_result: OnResult | None
    ) -> Batch:
        if self._closed:
            raise MeasureError("a measurer cannot be used after it was closed; make a new one")
        batch, first = Batch(sum(map(len, groups)), on_result), 0
        for requests in groups:
            entry = _Open(Job(f"{self._prefix}-{next(self._numbers)}", requests, self.options, rounds), batch, first)
            self._open[entry.job.id] = entry
            self._waiting.append(entry)
            first += len(requests)
        return batch

    def _settled(self, batch: Batch) -> list[MeasureResult]:
        while not batch.done:
            self.advance()
        return batch.results

    def _submit(self) -> None:
        running = len(self._open) - len(self._waiting)
        room = max(0, self.executor.capacity - running)
        chosen = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if chosen:
            self.executor.submit([entry.job for entry in chosen])
        for entry in chosen:
            entry.submissions += 1
            entry.deadline = self._clock() + entry.job.limit + self._grace
            heapq.heappush(self._deadlines, (entry.deadline, entry.job.id))
        if self._open and not chosen and not running:
            raise MeasureError("an executor must be able to take a job, but its capacity is "
                               f"{self.executor.capacity}; give it a device")

    def _patience(self) -> float:
        """Seconds until the first deadline of a job that is under way."""
        while not self._due(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return max(0.0, self._deadlines[0][0] - self._clock())

    def _due(self, deadline: tuple[float, str]) -> bool:
        """Whether a deadline still holds: its job is open and was not submitted again since."""
        entry = self._open.get(deadline[1])
        return entry is not None and entry.deadline == deadline[0]

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline = heapq.heappop(self._deadlines)
            if self._due(deadline):
                self._lost(self._open[deadline[1]])

    def _take(self, answers: Sequence[Answer]) -> None:
        """Settle the jobs that were answered."""
        for answer in answers:
            entry = self._open.get(answer.id)
            if entry is None:
                self.dropped += 1
            elif answer.results is None or len(answer.results) != len(entry.job.requests):
                if entry.deadline is not None:  # else an earlier submission, known to be lost already
                    self._lost(entry)
            else:
                self._settle(entry, answer.results)

    def _lost(self, entry: _Open) -> None:
        self.lost += 1
        entry.deadline = None
        if entry.submissions < self._attempts:
            self._waiting.append(entry)
            return
        failure = MeasureResult(failure="timeout", detail=f"no answer to any of {entry.submissions} submissions")
        self._settle(entry, [replace(failure) for _ in entry.job.requests])

    def _settle(self, entry: _Open, results: Sequence[MeasureResult]) -> None:
        del self._open[entry.job.id]
        if entry.deadline is None and entry in self._waiting:  # a lost submission answered after all
            self._waiting.remove(entry)
        entry.batch.settle(entry.first, results)
