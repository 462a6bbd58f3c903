"""A simulated executor of remote, unreliable devices in virtual time, for tests of an executor's users."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlc.measure.executor import Answer, Job
from mlc.measure.measurer import MeasureResult

__all__ = ["Clock", "Misfortune", "RemoteExecutor"]


class Clock:
    """Seconds that pass only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Misfortune:
    """Probabilities of what befalls one submission. An answer takes up to ``delay`` virtual seconds.

    ``silent``: no answer ever comes. ``told``: an answer without results. ``torn``: one with too few of them.
    ``twice``: the answer comes again, later. ``late``: it takes ``delay`` again and another 1000 s.
    """

    delay: float = 5.0
    silent: float = 0.0
    told: float = 0.0
    torn: float = 0.0
    twice: float = 0.0
    late: float = 0.0


class RemoteExecutor:
    """Implements :class:`mlc.measure.executor.Executor`. ``run`` gives a job's results; ``submitted`` is what came."""

    def __init__(
        self, run: Callable[[Job], Sequence[MeasureResult]], clock: Clock, misfortune: Misfortune, seed: int,
        capacity: int = 4, grain: int = 1,
    ) -> None:
        self.submitted: list[Job] = []
        self.most_at_once = 0
        self.closed = False
        self._run, self._clock, self._misfortune, self._capacity = run, clock, misfortune, capacity
        self._grain = grain
        self._rng = random.Random(seed)
        self._order = itertools.count()
        self._coming: list[tuple[float, int, Answer]] = []  # a heap by the time of arrival
        self._under_way: set[str] = set()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def wanted(self) -> int:
        return self._capacity

    @property
    def machine(self) -> str:
        return ""

    @property
    def grain(self) -> int:
        return self._grain

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.submitted.append(job)
            self._under_way.add(job.id)
            self.most_at_once = max(self.most_at_once, len(self._under_way))
            self._befall(job)

    def _befall(self, job: Job) -> None:
        luck, rng = self._misfortune, self._rng
        if rng.random() < luck.silent:
            return
        answer = Answer(job.id, tuple(self._run(job)))
        if rng.random() < luck.told:
            answer = Answer(job.id, None)
        elif rng.random() < luck.torn:
            answer = Answer(job.id, (answer.results or ())[:-1])
        self._arrive(answer, 1000.0 if rng.random() < luck.late else 0.0)
        if rng.random() < luck.twice:
            self._arrive(answer, rng.random() * 100.0)

    def _arrive(self, answer: Answer, later: float) -> None:
        when = self._clock.now + self._rng.random() * self._misfortune.delay + later
        heapq.heappush(self._coming, (when, next(self._order), answer))

    def poll(self, timeout: float) -> list[Answer]:
        deadline = self._clock.now + timeout
        if self._coming and self._coming[0][0] <= deadline:
            self._clock.now = max(self._clock.now, self._coming[0][0])
        else:
            self._clock.now = deadline
        arrived = []
        while self._coming and self._coming[0][0] <= self._clock.now:
            arrived.append(heapq.heappop(self._coming)[2])
        self._under_way -= {answer.id for answer in arrived}
        self._rng.shuffle(arrived)
        return arrived

    def close(self) -> None:
        self.closed = True
        self._coming.clear()
