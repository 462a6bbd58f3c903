"""The default: a population of the best points bred by mutation and crossing, chosen by the cost model.

More points are scheduled and scored than are measured, since scheduling costs milliseconds and measuring tenths
of seconds. What was scheduled and not chosen is kept and scored again by the next, better model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from mlc.measure.measurer import MeasureResult
from mlc.tune.candidate import Candidate, Point, TaskSpace
from mlc.tune.strategy.base import Explorer, Scorer

__all__ = ["EvolutionaryStrategy"]

#: candidates scheduled anew for each one that is asked for
POOL = 5
#: points drawn for each one that is scheduled: many are invalid or known
_DRAWS = 8
#: the best measured points, which breed
_PARENTS = 12
#: candidates that are kept for the next time
_RESERVE = 96
#: a space up to this size is searched to its end
_ENUMERABLE = 20_000
#: parts of a batch: by uniform draws, and by crossing two parents
_RANDOM, _CROSSED = 0.1, 0.25
#: part of a batch that is chosen without the model, so that it also learns where it believes nothing is to be found
EPSILON = 0.1


class EvolutionaryStrategy(Explorer):
    """``ask`` returns the first seeds, then the best of the pool under the scorer."""

    def __init__(self, space: TaskSpace, rng: random.Random, scorer: Scorer) -> None:
        super().__init__(space, rng, scorer)
        self._reserve: dict[Point, Candidate] = {}
        self._leftover: Iterator[Point] | None = None

    def propose(self, n: int) -> list[Candidate]:
        if n < 1:
            return []
        chosen: list[Candidate] = []
        if not self.measured:
            while self._seeds and len(chosen) < n:
                self._append(chosen, self._seeds.popleft())
        if len(chosen) < n:
            self._fill(POOL * (n - len(chosen)))
            chosen += self._choose(n - len(chosen))
        return chosen

    def tell(self, candidates: Sequence[Candidate], results: Sequence[MeasureResult]) -> None:
        super().tell(candidates, results)
        for candidate in candidates:
            self._reserve.pop(candidate.point, None)

    def _append(self, chosen: list[Candidate], point: Point) -> None:
        candidate = self.take(point)
        if candidate is not None:
            chosen.append(candidate)

    def _fill(self, count: int) -> None:
        """Schedule up to ``count`` new points into the reserve."""
        added: list[Candidate] = []
        while self._seeds and len(added) < count:
            self._append(added, self._seeds.popleft())
        parents = [m.point for m in self.measured[:_PARENTS]]
        for _ in range(_DRAWS * count):
            if len(added) >= count:
                break
            self._append(added, self._breed(parents))
        if len(added) < count and self.space.size <= _ENUMERABLE:
            self._enumerate(added, count)
        self._reserve.update((c.point, c) for c in added)

    def _breed(self, parents: list[Point]) -> Point:
        if not parents or self.rng.random() < _RANDOM:
            return self.space.sample(self.rng)
        if len(parents) > 1 and self.rng.random() < _CROSSED:
            a, b = self.rng.sample(parents, 2)
            return self.space.cross(a, b, self.rng)
        # the better a parent, the more often it breeds
        weights = [1.0 / (rank + 1) for rank in range(len(parents))]
        return self.space.neighbour(self.rng.choices(parents, weights)[0], self.rng)

    def _enumerate(self, added: list[Candidate], count: int) -> None:
        if self._leftover is None:
            points = list(self.space.points())
            self.rng.shuffle(points)
            self._leftover = iter(points)
        while len(added) < count:
            point = next(self._leftover, None)
            if point is None:
                return
            self._append(added, point)

    def _choose(self, n: int) -> list[Candidate]:
        pool = list(self._reserve.values())
        if not pool:
            return []
        scores = self.scorer(pool)
        ranked = sorted(range(len(pool)), key=lambda i: (-float(scores[i]), pool[i].point))
        blind = sum(self.rng.random() < EPSILON for _ in range(min(n, len(pool))))
        picked = ranked[: n - blind]
        rest = ranked[n - blind :]
        picked += self.rng.sample(rest, min(blind, len(rest)))
        kept = [i for i in ranked if i not in set(picked)][:_RESERVE]
        # what falls out of the reserve is never built again: its score was low under every model so far
        self._reserve = {pool[i].point: pool[i] for i in kept}
        return [pool[i] for i in picked]
