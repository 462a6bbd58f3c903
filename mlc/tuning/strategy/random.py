"""Uniform sampling without a cost model: the baseline for learned strategies."""

from __future__ import annotations

from mlc.tuning.candidate import Candidate
from mlc.tuning.strategy.base import Explorer

__all__ = ["STRATEGY", "RandomStrategy"]

#: draws for one candidate before the space counts as used up
_PATIENCE = 200


class RandomStrategy(Explorer):
    """Distinct valid points, each equally likely."""

    def propose(self, n: int) -> list[Candidate]:
        chosen: list[Candidate] = []
        for _ in range(_PATIENCE * n):
            if len(chosen) == n:
                break
            candidate = self.take(self.space.sample(self.rng))
            if candidate is not None:
                chosen.append(candidate)
        return chosen


STRATEGY = RandomStrategy
