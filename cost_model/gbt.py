"""The learned cost model: gradient-boosted trees that rank the candidates of a task, on top of the analytic estimate.

That is the analytic estimate or, where there is one, what a pre-trained model makes of it. It enters as every sample's
base margin, so trees only learn where it errs: without data the ranking is the estimate's. It enters with weight, and
trees grow in number with the samples: with a plain margin and 50 trees, eight measured candidates of a task made the
ranking of its others worse than the estimate alone (0.64 of the pairs in order against 0.74, GEMM and convolution tasks
on a noisy machine); with these settings they do not. Ranking for tuning is after Chen et al., "Learning to optimize
tensor programs" (2018).
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import tirx

from cost_model.features import FEATURES, LOOP_FEATURES, Features, SpaceFeatures, extract
from cost_model.model import Sample
from cost_model.pretrained import Pretrained
from cost_model.roofline import estimate

if TYPE_CHECKING:
    import xgboost

__all__ = ["RankingModel"]

_FORMAT = 2
#: weight of the analytic estimate, in units of the ranking loss for each factor of two
_PRIOR_WEIGHT = 2.0
#: the most trees, and the cores that training may use
_ROUNDS, _THREADS = 60, 1


class RankingModel:
    """XGBoost's ranking over :data:`cost_model.features.FEATURES`, grouped by task.

    ``capacity`` bounds the samples that are kept and trained on (the newest of them). Equal samples in equal order give
    equal models. ``explore`` standard deviations of the pre-trained model's prediction are added to a score: what is
    uncertain is worth a trial.
    """

    def __init__(
        self, *, seed: int = 0, capacity: int = 3000, pretrained: Pretrained | None = None, explore: float = 0.0
    ) -> None:
        self._pretrained, self._explore = pretrained, explore
        self._seed = seed
        self._capacity = capacity
        self._samples: list[Sample] = []
        self._booster: xgboost.Booster | None = None
        self._width = len(FEATURES)  # of the rows that it was trained on

    @property
    def samples(self) -> int:
        """How many samples the model has learned from."""
        return len(self._samples)

    def score(
        self, func: tirx.PrimFunc, target: tvm.target.Target, candidates: Sequence[tvm.IRModule],
        cold: Sequence[int] = (), of_space: Sequence[SpaceFeatures | None] = (),
    ) -> np.ndarray:
        if not candidates:
            return np.zeros(0)
        bound = math.log2(estimate(func, target))  # the same for all: without data scores are 0 at the roofline
        weight = 1.0 if self._booster is None else _PRIOR_WEIGHT
        each = zip(candidates, of_space or [None] * len(candidates), strict=True)
        return self.rank([extract(c, target, cold, known) for c, known in each]) + weight * bound

    def rank(self, features: Sequence[Features]) -> np.ndarray:
        """Scores of candidates of one task from their features alone."""
        base, deviation = self._base(features)
        bonus = self._explore * deviation
        if self._booster is None:
            return base + bonus
        import xgboost

        rows = np.stack([f.vector[:self._width] for f in features])
        data = xgboost.DMatrix(rows, base_margin=_PRIOR_WEIGHT * base, nthread=_THREADS)
        learned = np.asarray(self._booster.predict(data, output_margin=True), dtype=np.float64)
        return learned + _PRIOR_WEIGHT * bonus

    def _base(self, features: Sequence[Features]) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of speed without what this model has learned, and how uncertain they are."""
        seconds = np.array([max(f.seconds, 1e-9) for f in features])
        if self._pretrained is None:
            return -np.log2(seconds), np.zeros(len(features))
        return self._pretrained.predict(np.stack([f.vector for f in features]), seconds)

    def fit(self, samples: Sequence[Sample]) -> None:
        if samples:
            self._samples = [*self._samples, *samples][-self._capacity :]
            self._train()

    def known(self, group: str) -> int:
        return sum(s.group == group for s in self._samples)

    def _train(self) -> None:
        # the order of arrival decides nothing but which samples are dropped: groups must be contiguous
        ordered = sorted(self._samples, key=lambda s: s.group)
        groups = sorted({s.group for s in ordered})
        if not _comparable(ordered):
            self._booster = None
            return
        import xgboost

        number = {group: i for i, group in enumerate(groups)}
        rows = np.stack([s.features.vector for s in ordered])
        # entries of which nothing is said would take their part of the columns that each tree draws
        self._width = len(FEATURES) if rows[:, len(LOOP_FEATURES):].any() else len(LOOP_FEATURES)
        data = xgboost.DMatrix(
            rows[:, :self._width], label=_relevance(ordered),
            qid=np.array([number[s.group] for s in ordered]), nthread=_THREADS,
            base_margin=_PRIOR_WEIGHT * self._base([s.features for s in ordered])[0],
        )
        # few samples, few trees: see the head of this file
        rounds = min(_ROUNDS, max(4, len(ordered)))
        self._booster = xgboost.train(self._parameters(), data, num_boost_round=rounds)

    def _parameters(self) -> dict[str, Any]:
        return {
            "objective": "rank:pairwise", "lambdarank_pair_method": "mean",
            "lambdarank_num_pair_per_sample": 8, "max_depth": 6, "eta": 0.2, "min_child_weight": 0.1,
            "colsample_bytree": 0.5, "lambda": 2.0, "tree_method": "hist", "max_bin": 64,
            "base_score": 0.0, "nthread": _THREADS, "seed": self._seed, "verbosity": 0,
        }

    def save(self) -> bytes:
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, format=_FORMAT, names=np.array(FEATURES),
            groups=np.array([s.group for s in self._samples], dtype=np.str_),
            vectors=np.array([s.features.vector for s in self._samples], dtype=np.float32),
            priors=np.array([s.features.seconds for s in self._samples], dtype=np.float64),
            seconds=np.array([s.seconds for s in self._samples], dtype=np.float64),
        )
        return buffer.getvalue()

    def load(self, blob: bytes) -> None:
        try:
            with np.load(io.BytesIO(blob), allow_pickle=False) as stored:
                fields = {name: stored[name] for name in stored.files}
        except Exception as error:  # numpy and zipfile raise whatever a damaged archive makes them
            raise ValueError(f"a stored cost model must be an archive that save() made: {error}") from error
        if str(fields.get("format")) != str(_FORMAT) or tuple(fields.get("names", ())) != FEATURES:
            raise ValueError("a stored cost model must have been trained on this version's features; train it anew")
        try:
            samples = [
                Sample(str(group), Features(vector, float(prior)), float(seconds))
                for group, vector, prior, seconds in zip(
                    fields["groups"], fields["vectors"], fields["priors"], fields["seconds"], strict=True
                )
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a stored cost model must hold samples, but does not: {error}") from error
        self._samples = samples
        self._booster = None
        if self._samples:
            self._train()  # not stored: what is below it may have been trained anew since


def _comparable(samples: Sequence[Sample]) -> bool:
    """Whether some group has two samples of different speed: else there is nothing to rank."""
    fastest: dict[str, float] = {}
    for s in samples:
        if s.group in fastest and fastest[s.group] != s.seconds:
            return True
        fastest.setdefault(s.group, s.seconds)
    return False


def _relevance(samples: Sequence[Sample]) -> np.ndarray:
    """The fastest of a group has 1, one that takes twice as long 0.5, a failure 0."""
    best: dict[str, float] = {}
    for s in samples:
        best[s.group] = min(best.get(s.group, math.inf), s.seconds)
    return np.array(
        [0.0 if s.failed else best[s.group] / s.seconds for s in samples], dtype=np.float32
    )
