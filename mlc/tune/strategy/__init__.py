"""Search strategies behind one contract: ask for candidates, tell their results."""

from __future__ import annotations

import random

from mlc.errors import UsageError
from mlc.tune.candidate import TaskSpace
from mlc.tune.strategy.base import Explorer, Scorer, Strategy
from mlc.tune.strategy.evolutionary import EvolutionaryStrategy
from mlc.tune.strategy.grid import GridStrategy
from mlc.tune.strategy.random import RandomStrategy

__all__ = ["STRATEGIES", "EvolutionaryStrategy", "GridStrategy", "RandomStrategy", "Scorer", "Strategy", "create"]

STRATEGIES: dict[str, type[Explorer]] = {
    "evolutionary": EvolutionaryStrategy, "random": RandomStrategy, "grid": GridStrategy,
}


def create(name: str, space: TaskSpace, rng: random.Random, scorer: Scorer) -> Strategy:
    """The strategy called ``name`` for one task."""
    if name not in STRATEGIES:
        raise UsageError(f"the strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](space, rng, scorer)
