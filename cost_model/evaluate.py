"""Evaluation of a cost model: how well it ranks candidates of tasks that it was not trained on.

What counts for tuning is whether a good candidate is among the few that are measured, so beside the pairs in the
right order it is asked how far the best of the first one and of the first eight is from the task's best.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from cost_model.sample import Sample, by_group

__all__ = ["Quality", "Ranking", "cross_validate", "quality", "roofline"]

#: times closer than this are equal: a pair of them has no right order, and either may be called the best
CLOSE = 0.05
_FEWEST = 8  # candidates of different speed that a task must have to be asked about
_DRAWS = 50  # random orders

#: samples of one task -> scores, higher is faster
Scorer = Callable[[Sequence[Sample]], np.ndarray]


@dataclass(frozen=True)
class Quality:
    """Means over tasks. ``pairs``: part of the pairs in the right order. ``top1``, ``top8``: part of the tasks where
    the best of the first 1 or 8 is within 5% of the task's best. ``regret1``, ``regret8``: by how much it is slower.
    """

    tasks: int
    pairs: float
    top1: float
    top8: float
    regret1: float
    regret8: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Ranking:
    """Means over tasks, and the standard deviation of these means over the deals into folds."""

    mean: Quality
    spread: Quality

    def to_json(self) -> dict[str, Any]:
        return {**self.mean.to_json(), "spread": self.spread.to_json() | {"tasks": self.mean.tasks}}


def roofline(samples: Sequence[Sample]) -> np.ndarray:
    """The analytic estimate's scores."""
    return -np.log2([max(s.features.seconds, 1e-9) for s in samples])


def quality(scores: np.ndarray, seconds: np.ndarray) -> Quality:
    """The quality of a ranking of one task; ``seconds`` are infinite for candidates that failed."""
    faster = seconds[:, None] < seconds[None, :] * (1.0 - CLOSE)
    ahead = scores[:, None] - scores[None, :]
    right = ((ahead > 0) & faster).sum() + 0.5 * ((ahead == 0) & faster).sum()
    order = np.argsort(-scores, kind="stable")
    best, ceiling = float(seconds.min()), float(seconds[np.isfinite(seconds)].max())
    first = [min(float(seconds[order[:n]].min()), ceiling) / best - 1.0 for n in (1, 8)]
    return Quality(
        1, float(right / faster.sum()) if faster.any() else 1.0, float(first[0] <= CLOSE), float(first[1] <= CLOSE),
        first[0], first[1],
    )


def cross_validate(
    samples: Sequence[Sample], train: Callable[[list[Sample], int], Scorer], *, folds: int = 6, seed: int = 0,
    repeats: int = 1, origins: Mapping[str, Collection[str]] | None = None, fewest: int = _FEWEST,
) -> dict[str, Ranking]:
    """``learned``, ``roofline`` and ``random``, over tasks of which ``train`` has seen no sample.

    ``train`` takes samples and a seed. Tasks are dealt into ``folds`` at random, ``repeats`` times anew; each fold is
    asked about once, by a model of the others. ``origins`` says where tasks come from (the models that contain them):
    then each origin is a fold, and a task that another one shares with it is not trained on either. Tasks with fewer
    than ``fewest`` candidates of different speed only teach: the best eight of ten say little. Raises ``ValueError``
    for fewer than two tasks that can be asked about.
    """
    groups = {k: g for k, g in by_group(samples).items() if len({s.seconds for s in g if not s.failed}) >= fewest}
    if len(groups) < 2:
        raise ValueError(f"an evaluation needs two tasks with at least {fewest} candidates each, got {len(groups)}")
    deals = []
    for number in range(seed, seed + repeats):
        parts = _by_origin(groups, origins) if origins is not None else _dealt(groups, folds, number)
        found: dict[str, list[Quality]] = {"learned": [], "roofline": [], "random": []}
        rng = np.random.default_rng(number)
        for hidden, asked in parts:
            scorer = train([s for s in samples if s.group not in hidden], number)
            for name in asked:
                group = groups[name]
                seconds = np.array([s.seconds for s in group])
                found["learned"].append(quality(scorer(group), seconds))
                found["roofline"].append(quality(roofline(group), seconds))
                found["random"].append(_mean([quality(rng.random(len(group)), seconds) for _ in range(_DRAWS)]))
        deals.append({kind: _mean(each) for kind, each in found.items()})
    return {kind: Ranking(_mean([d[kind] for d in deals], len(groups)), _spread([d[kind] for d in deals]))
            for kind in deals[0]}


#: the groups that a model must not see, and those that it is asked about
_Part = tuple[Collection[str], Collection[str]]


def _dealt(names: Collection[str], folds: int, seed: int) -> Sequence[_Part]:
    folds = min(folds, len(names))
    numbers = np.random.default_rng(seed).permutation(len(names)) % folds
    parts = [[name for name, number in zip(names, numbers, strict=True) if number == fold] for fold in range(folds)]
    return [(part, part) for part in parts]


def _by_origin(names: Collection[str], origins: Mapping[str, Collection[str]]) -> Sequence[_Part]:
    found = sorted({origin for name in names for origin in origins.get(name, ())})
    parts = []
    for origin in found:
        hidden = [name for name in origins if origin in origins[name]]
        parts.append((hidden, [name for name in names if name in hidden]))
    if len(parts) < 2:
        raise ValueError(f"an evaluation by origin needs tasks of two of them, got {len(parts)}")
    return parts


def _values(found: Sequence[Quality], reduce: Callable[[list[float]], float]) -> list[float]:
    return [reduce([getattr(q, name) for q in found]) for name in ("pairs", "top1", "top8", "regret1", "regret8")]


def _mean(found: Sequence[Quality], tasks: int = 1) -> Quality:
    return Quality(tasks, *_values(found, fmean))


def _spread(found: Sequence[Quality]) -> Quality:
    return Quality(len(found), *_values(found, pstdev))
