"""The interface of cost models: score candidates of one function, train on measurements, be stored; and the analytic
model."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tvm
from tvm import tirx

from cost_model.features import SpaceFeatures
from cost_model.roofline import estimate, prior
from cost_model.sample import Sample, sample

__all__ = ["CostModel", "RooflineModel", "Sample", "prior_scores", "sample"]


class CostModel(Protocol):
    """Scores are comparable between candidates of one function; higher is faster."""

    def score(
        self, func: tirx.PrimFunc, target: tvm.target.Target, candidates: Sequence[tvm.IRModule],
        cold: Sequence[int] = (), of_space: Sequence[SpaceFeatures | None] = (),
    ) -> np.ndarray:
        """One float64 for each scheduled candidate of ``func``. Equal calls give equal scores.

        ``cold`` are the positions of parameters that no cache holds when a call begins, ``of_space`` is what each one's
        space says of it, where it says anything.
        """

    def fit(self, samples: Sequence[Sample]) -> None:
        """Learn from ``samples`` in addition to those known already."""

    def known(self, group: str) -> int:
        """How many samples of a group the model has learned from."""

    def save(self) -> bytes:
        """Everything that :meth:`load` needs to score and to go on learning."""

    def load(self, blob: bytes) -> None:
        """Take over what another model of the same class saved; raises ``ValueError`` for anything else."""


class RooflineModel:
    """The analytic estimate alone: the honest control for a model that learns."""

    def score(
        self, func: tirx.PrimFunc, target: tvm.target.Target, candidates: Sequence[tvm.IRModule],
        cold: Sequence[int] = (), of_space: Sequence[SpaceFeatures | None] = (),
    ) -> np.ndarray:
        each = zip(candidates, of_space or [None] * len(candidates), strict=True)
        seconds = [prior(c, target, cold) if known is None else known.seconds for c, known in each]
        return prior_scores(func, target, seconds)

    def fit(self, samples: Sequence[Sample]) -> None:
        """Nothing to learn."""

    def known(self, group: str) -> int:
        return sys.maxsize  # every sample is as good as known

    def save(self) -> bytes:
        return b""

    def load(self, blob: bytes) -> None:
        if blob:
            raise ValueError("the roofline model has no state, but was given some")


def prior_scores(func: tirx.PrimFunc, target: tvm.target.Target, seconds: Sequence[float]) -> np.ndarray:
    """``log2(bound / estimate)`` of estimates in seconds: 0 for a candidate that reaches the roofline, -1 for one at
    half of it."""
    bound = estimate(func, target)
    return np.array([math.log2(bound / max(each, 1e-9)) for each in seconds], dtype=np.float64)
