"""Every point of the space in order, as a baseline; exhaustive if the budget is large enough."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mlc.tuning.candidate import Candidate, Point, TaskSpace
from mlc.tuning.strategy.base import Explorer, Scorer

__all__ = ["STRATEGY", "GridStrategy"]


class GridStrategy(Explorer):
    """Walks the product of the knobs' values, the last knob fastest."""

    def __init__(self, space: TaskSpace, rng: random.Random, scorer: Scorer) -> None:
        super().__init__(space, rng, scorer)
        self._points: Iterator[Point] = space.points()

    def propose(self, n: int) -> list[Candidate]:
        chosen: list[Candidate] = []
        while len(chosen) < n:
            point = next(self._points, None)
            if point is None:
                break
            candidate = self.take(point)
            if candidate is not None:
                chosen.append(candidate)
        return chosen


STRATEGY = GridStrategy
