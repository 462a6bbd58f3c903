"""How well a model ranks candidates of tasks that it has not seen.

What counts for tuning is whether a good candidate is among the few that are measured, so beside the pairs in the
right order it is asked how far the best of the first one and of the first eight is from the task's best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np

from cost_model.sample import Sample, by_group

__all__ = ["Quality", "cross_validate", "quality", "roofline"]

#: times closer than this are equal: a pair of them has no right order, and either may be called the best
CLOSE = 0.05
_FEWEST = 8  # good candidates that a task must have to be asked about
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


def roofline(samples: Sequence[Sample]) -> np.ndarray:
    """The analytic estimate's scores."""
    return -np.log2([max(s.features.seconds, 1e-9) for s in samples])


def quality(scores: np.ndarray, seconds: np.ndarray) -> Quality:
    """Of one task; ``seconds`` are infinite where a candidate failed."""
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
    samples: Sequence[Sample], train: Callable[[list[Sample], int], Scorer], *, folds: int = 6, seed: int = 0
) -> dict[str, Quality]:
    """``learned``, ``roofline`` and ``random``, over tasks of which ``train`` has seen no sample.

    ``train`` takes samples and a seed. Tasks are dealt into ``folds`` at random; each fold is asked about once, by a
    model of the others. Raises ``ValueError`` for fewer than two tasks that can be asked about.
    """
    groups = {k: g for k, g in by_group(samples).items() if len({s.seconds for s in g if not s.failed}) >= _FEWEST}
    if len(groups) < 2:
        raise ValueError(f"an evaluation needs two tasks with at least {_FEWEST} candidates each, got {len(groups)}")
    names, rng = list(groups), np.random.default_rng(seed)
    folds = min(folds, len(names))
    dealt = dict(zip(names, rng.permutation(len(names)) % folds, strict=True))
    found: dict[str, list[Quality]] = {"learned": [], "roofline": [], "random": []}
    for fold in range(folds):
        scorer = train([s for s in samples if dealt.get(s.group, -1) != fold], seed)
        for name in (n for n in names if dealt[n] == fold):
            group = groups[name]
            seconds = np.array([s.seconds for s in group])
            found["learned"].append(quality(scorer(group), seconds))
            found["roofline"].append(quality(roofline(group), seconds))
            found["random"].append(_mean([quality(rng.random(len(group)), seconds) for _ in range(_DRAWS)], 1))
    return {kind: _mean(each, len(each)) for kind, each in found.items()}


def _mean(found: Sequence[Quality], tasks: int) -> Quality:
    fields = ("pairs", "top1", "top8", "regret1", "regret8")
    return Quality(tasks, *(fmean(getattr(q, name) for q in found) for name in fields))
