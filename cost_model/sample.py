"""A training sample of cost models: one measured candidate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tvm

from cost_model.features import Features, SpaceFeatures, extract

__all__ = ["Sample", "by_group", "sample"]


@dataclass(frozen=True, eq=False)
class Sample:
    """One measured candidate. ``group`` names the task: only samples of one group are ever compared.

    ``seconds`` is infinite where the candidate failed.
    """

    group: str
    features: Features
    seconds: float

    @property
    def failed(self) -> bool:
        return not math.isfinite(self.seconds)


def sample(
    group: str, candidate: tvm.IRModule, target: tvm.target.Target, seconds: float, cold: Sequence[int] = (),
    of_space: SpaceFeatures | None = None,
) -> Sample:
    """The sample of a scheduled function that took ``seconds`` (infinity: it failed); ``cold`` and ``of_space`` as in
    ``extract``."""
    return Sample(group, extract(candidate, target, cold, of_space), seconds)


def by_group(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The samples of each task, in the order of the tasks' names; that of the samples is kept."""
    found: dict[str, list[Sample]] = {}
    for each in samples:
        found.setdefault(each.group, []).append(each)
    return dict(sorted(found.items()))
