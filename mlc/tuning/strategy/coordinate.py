"""Coordinate descent from the seeds: changes one knob at a time of the best point that was measured.

All changes of one knob are scheduled and ranked by the cost model, the best of them measured. When those of the best
point are used up, the next best point's follow; a point is left behind as soon as a better one is known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mlc.measure.measurer import MeasureResult
from mlc.tuning.candidate import Candidate, Point, TaskSpace
from mlc.tuning.strategy.base import Explorer, Scorer

__all__ = ["STRATEGY", "CoordinateStrategy"]


class CoordinateStrategy(Explorer):
    """``ask`` returns the seeds, then one-knob changes of the best points under the scorer, then what is left."""

    def __init__(self, space: TaskSpace, rng: random.Random, scorer: Scorer) -> None:
        super().__init__(space, rng, scorer)
        self._expanded: set[Point] = set()
        self._moves: dict[Point, list[Candidate]] = {}

    def propose(self, n: int) -> list[Candidate]:
        chosen: list[Candidate] = []
        if not self.measured:
            while self._seeds and len(chosen) < n:
                candidate = self.take(self._seeds.popleft())
                chosen += [candidate] if candidate is not None else []
        for origin in [m.point for m in self.measured]:
            if len(chosen) >= n:
                break
            chosen += self._from(origin, n - len(chosen))
        return chosen + self.rest(n - len(chosen))

    def tell(self, candidates: Sequence[Candidate], results: Sequence[MeasureResult]) -> None:
        super().tell(candidates, results)
        best = {m.point for m in self.measured[:1]}
        # moves of points that were overtaken stay known, but their schedules need not be kept
        for origin in [p for p in self._moves if p not in best]:
            self._tried.difference_update(c.point for c in self._moves[origin])
            self._schedules.difference_update(c.code for c in self._moves[origin])
            self._expanded.discard(origin)
            del self._moves[origin]

    def _from(self, origin: Point, n: int) -> list[Candidate]:
        """The ``n`` most promising moves from ``origin`` that are left."""
        if origin not in self._expanded:
            self._expanded.add(origin)
            found = [self.take((*origin[:i], value, *origin[i + 1 :]))
                     for i, knob in enumerate(self.space.knobs) for value in knob.values]
            self._moves[origin] = [c for c in found if c is not None]
        ranked = self.ranked(self._moves.get(origin, []))
        self._moves[origin] = ranked[n:]
        return ranked[:n]


STRATEGY = CoordinateStrategy
