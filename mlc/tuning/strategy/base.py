"""The contract of a strategy, and what all strategies share: seeds are proposed first, and nothing twice."""

from __future__ import annotations

import abc
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from mlc.measure.measurer import MeasureResult
from mlc.tuning.candidate import Candidate, Point, TaskSpace

__all__ = ["ENUMERABLE", "Explorer", "Measured", "Scorer", "Strategy"]

#: scores of candidates, higher is faster
Scorer = Callable[[Sequence[Candidate]], np.ndarray]

#: a space up to this size is searched to its end
ENUMERABLE = 20_000
#: draws for each candidate in a larger one: many points are invalid or known
_DRAWS = 20


class Strategy(Protocol):
    """Proposes candidates of one task and learns their results. It neither builds, times nor prints.

    Its proposals depend on the seed, the scorer and the results that it was told, in order, and not on the clock.
    """

    def ask(self, n: int) -> list[Candidate]:
        """Up to ``n`` new candidates, most promising first; none when there is nothing left to try."""

    def tell(self, candidates: Sequence[Candidate], results: Sequence[MeasureResult]) -> None:
        """Results of candidates that were asked for, or that an earlier run measured."""


@dataclass(frozen=True)
class Measured:
    """A point that worked, with its median seconds."""

    point: Point
    seconds: float


class Explorer(abc.ABC):
    """Base class of the strategies. The default candidate, which untuned code uses, is always proposed first."""

    def __init__(self, space: TaskSpace, rng: random.Random, scorer: Scorer) -> None:
        self.space = space
        self.rng = rng
        self.scorer = scorer
        self.measured: list[Measured] = []  # fastest first
        self._tried: set[Point] = set()
        self._schedules: set[int] = set()
        self._programs: set[str] = set()
        self._seeds: deque[Point] = deque(space.starts())
        self._leftover: Iterator[Point] | None = None

    def ask(self, n: int) -> list[Candidate]:
        if n < 1:
            return []
        default = self.space.default
        if default is None or not self.fresh(default.point):
            return self.propose(n)
        self._tried.add(default.point)
        self._schedules.add(default.code)
        return [default, *self.propose(n - 1)]

    def tell(self, candidates: Sequence[Candidate], results: Sequence[MeasureResult]) -> None:
        for candidate, result in zip(candidates, results, strict=True):
            self._tried.add(candidate.point)
            if result.failure or not result.times:
                continue
            if result.code_hash:
                if result.code_hash in self._programs:
                    continue  # the same machine code by another route breeds nothing new
                self._programs.add(result.code_hash)
            self.measured.append(Measured(candidate.point, _median(result.times)))
        self.measured.sort(key=lambda m: (m.seconds, m.point))

    @abc.abstractmethod
    def propose(self, n: int) -> list[Candidate]:
        """Up to ``n`` candidates that were never returned before; none when there are none left."""

    def fresh(self, point: Point) -> bool:
        """Whether ``point`` was never proposed."""
        return point not in self._tried

    def take(self, point: Point) -> Candidate | None:
        """The candidate at a new point; None if the point was proposed before, is invalid, or gives the same schedule
        as an earlier one."""
        if not self.fresh(point):
            return None
        self._tried.add(point)
        candidate = self.space.realise(point)
        if candidate is None or candidate.code in self._schedules:
            return None
        self._schedules.add(candidate.code)
        return candidate

    def rest(self, count: int) -> list[Candidate]:
        """Up to ``count`` candidates at random points that were never proposed; in a space that is not huge, eventually
        all."""
        if self.space.size > ENUMERABLE:
            drawn = (self.take(self.space.sample(self.rng)) for _ in range(_DRAWS * count))
            return list(islice((c for c in drawn if c is not None), count))
        if self._leftover is None:
            points = list(self.space.points())
            self.rng.shuffle(points)
            self._leftover = iter(points)
        found: list[Candidate] = []
        while len(found) < count and (point := next(self._leftover, None)) is not None:
            candidate = self.take(point)
            found += [candidate] if candidate is not None else []
        return found

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """``candidates`` by score, the best first."""
        if not candidates:
            return []
        scores = self.scorer(candidates)
        order = sorted(range(len(candidates)), key=lambda i: (-float(scores[i]), candidates[i].point))
        return [candidates[i] for i in order]


def _median(times: Sequence[float]) -> float:
    ordered = sorted(times)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return math.fsum(ordered[middle - 1 : middle + 1]) / 2
