"""All points from the last to the first."""

from __future__ import annotations

from itertools import islice

from mlc.tuning.candidate import Candidate
from mlc.tuning.strategy.base import Explorer


class BackwardsStrategy(Explorer):
    def propose(self, n: int) -> list[Candidate]:
        new = (found for point in reversed(list(self.space.points())) if (found := self.take(point)) is not None)
        return list(islice(new, n))


STRATEGY = BackwardsStrategy
