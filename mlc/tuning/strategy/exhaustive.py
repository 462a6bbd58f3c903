"""Every point of a small space, the most promising first."""

from __future__ import annotations

import random

from mlc.tuning.candidate import Candidate, TaskSpace
from mlc.tuning.strategy.base import Explorer, Scorer

__all__ = ["STRATEGY", "ExhaustiveStrategy"]

#: candidates that are scheduled and ranked together, for each one that is asked for
_WINDOW = 8


class ExhaustiveStrategy(Explorer):
    """Seeds first; then the scorer's favourites of a window that is filled up with points in random order."""

    def __init__(self, space: TaskSpace, rng: random.Random, scorer: Scorer) -> None:
        super().__init__(space, rng, scorer)
        self._window: list[Candidate] = []

    def propose(self, n: int) -> list[Candidate]:
        chosen: list[Candidate] = []
        while self._seeds and len(chosen) < n:
            candidate = self.take(self._seeds.popleft())
            chosen += [candidate] if candidate is not None else []
        if len(chosen) < n:
            self._window += self.rest(_WINDOW * n - len(self._window))
            ranked = self.ranked(self._window)
            self._window = ranked[n - len(chosen) :]
            chosen += ranked[: n - len(chosen)]
        return chosen


STRATEGY = ExhaustiveStrategy
