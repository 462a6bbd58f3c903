"""Search strategies behind one contract: ask for candidates, tell their results."""

from __future__ import annotations

import random

from mlc.errors import UsageError
from mlc.tuning.candidate import TaskSpace
from mlc.tuning.strategy.base import Explorer, Scorer, Strategy
from mlc.tuning.strategy.coordinate import CoordinateStrategy
from mlc.tuning.strategy.evolutionary import EvolutionaryStrategy
from mlc.tuning.strategy.exhaustive import ExhaustiveStrategy
from mlc.tuning.strategy.grid import GridStrategy
from mlc.tuning.strategy.random import RandomStrategy

__all__ = [
    "STRATEGIES", "CoordinateStrategy", "EvolutionaryStrategy", "ExhaustiveStrategy", "GridStrategy", "RandomStrategy",
    "Scorer", "Strategy", "create",
]

STRATEGIES: dict[str, type[Explorer]] = {
    "evolutionary": EvolutionaryStrategy, "coordinate": CoordinateStrategy, "exhaustive": ExhaustiveStrategy,
    "random": RandomStrategy, "grid": GridStrategy,
}


def create(name: str, space: TaskSpace, rng: random.Random, scorer: Scorer, budget: int | None = None) -> Strategy:
    """The strategy called ``name`` for one task.

    Where ``budget`` trials of it are enough for every point, the evolutionary one gives way to the exhaustive one.
    """
    if name not in STRATEGIES:
        raise UsageError(f"the strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    if name == "evolutionary" and budget is not None and space.size <= budget:
        name = "exhaustive"
    return STRATEGIES[name](space, rng, scorer)
