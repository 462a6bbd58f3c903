"""Search strategies behind one contract: ask for candidates, tell their results.

A strategy is a file of this package, by whose name users ask for it, and is found by that alone: a class ``STRATEGY``
that derives from :class:`mlc.tuning.strategy.base.Explorer`. Nothing here imports TVM before one is created: the
command line's parser asks for the names.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from mlc.errors import UsageError

if TYPE_CHECKING:
    import random

    from mlc.tuning.candidate import TaskSpace
    from mlc.tuning.strategy.base import Explorer, Scorer, Strategy

__all__ = ["check_name", "create", "strategy_named", "strategy_names"]


def strategy_names() -> tuple[str, ...]:
    """The names of all strategies, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"))


def check_name(name: str) -> None:
    """Raises :class:`UsageError` where no strategy is called so."""
    if name not in strategy_names():
        raise UsageError(f"the strategy must be one of {', '.join(strategy_names())}, got {name!r}")


def strategy_named(name: str) -> type[Explorer]:
    """The class of a strategy; raises :class:`UsageError` where there is none."""
    check_name(name)
    found: type[Explorer] = import_module(f"{__name__}.{name}").STRATEGY
    return found


def create(name: str, space: TaskSpace, rng: random.Random, scorer: Scorer, budget: int | None = None) -> Strategy:
    """The strategy called ``name`` for one task.

    Where ``budget`` trials of it are enough for every point, the evolutionary one gives way to the exhaustive one.
    """
    if name == "evolutionary" and budget is not None and space.size <= budget:
        name = "exhaustive"
    return strategy_named(name)(space, rng, scorer)
