"""The pretrained model: a correction of the analytic estimate, trained once on other tasks, and shipped.

Boosted trees over :data:`cost_model.features.LOOP_FEATURES` predict by what factor the estimate errs, relative to the
other candidates of its task: the logarithm of the measured speed less its mean over the task, less a part of the
estimate's. A few members are trained with other random parts of the samples and features for each tree (Friedman,
"Stochastic gradient boosting", 2002); their disagreement says how uncertain a prediction is, their mean is better
than each. Members that saw bootstrap samples of the tasks ranked worse: there are few tasks.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cost_model.features import LOOP_FEATURES
from cost_model.sample import Sample, by_group

if TYPE_CHECKING:
    import xgboost

__all__ = ["Pretrained"]

_FORMAT = 2
#: weight of the estimate's logarithm; the trees add the rest
_PRIOR_PART = 0.5
#: a candidate this many times slower than its task's fastest is as bad as any slower one
_WORST = 8.0
_MEMBERS, _ROUNDS = 4, 190
_TASK_WEIGHT = 24.0  # what the candidates of one task weigh together


class Pretrained:
    """Scores are base 2 logarithms of speed, comparable within a task."""

    def __init__(self, boosters: Sequence[xgboost.Booster]) -> None:
        self._boosters = tuple(boosters)

    @staticmethod
    def train(samples: Sequence[Sample], *, seed: int = 0, threads: int = 1) -> Pretrained:
        """Learn from the measured candidates of several tasks; equal samples in equal order give equal models.

        Raises ``ValueError`` where no task has two candidates of different speed.
        """
        import xgboost

        groups = [g for g in by_group(samples).values() if len({s.seconds for s in g if not s.failed}) > 1]
        if not groups:
            raise ValueError("a cost model needs at least one task with two candidates of different speed, got none")
        data = xgboost.DMatrix(
            np.stack([s.features.vector[:len(LOOP_FEATURES)] for g in groups for s in g]),
            label=np.concatenate([_target(g) for g in groups]), weight=np.concatenate([_weight(g) for g in groups]),
            nthread=threads,
        )
        seeds = range(_MEMBERS * seed, _MEMBERS * (seed + 1))
        return Pretrained([xgboost.train(_parameters(s, threads), data, num_boost_round=_ROUNDS) for s in seeds])

    def predict(self, vectors: np.ndarray, estimates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score and its standard deviation over the members, for rows of features and estimates in seconds."""
        import xgboost

        data = xgboost.DMatrix(vectors[:, :len(LOOP_FEATURES)], nthread=1)
        each = np.stack([b.predict(data).astype(np.float64) for b in self._boosters])
        return each.mean(0) - _PRIOR_PART * np.log2(np.maximum(estimates, 1e-9)), each.std(0)

    def save(self) -> bytes:
        """The model as bytes for :meth:`load`."""
        buffer = io.BytesIO()
        raw = [np.frombuffer(bytes(booster.save_raw("ubj")), np.uint8) for booster in self._boosters]
        fields: dict[str, Any] = {f"member{i}": data for i, data in enumerate(raw)}
        fields |= {"format": np.array(_FORMAT), "features": np.array(_digest())}
        np.savez_compressed(buffer, checksum=np.array(_checksum(fields)), **fields)
        return buffer.getvalue()

    @staticmethod
    def load(blob: bytes) -> Pretrained:
        """Load what :meth:`save` wrote; raises ``ValueError`` with the reason for anything else, and for other
        features."""
        import xgboost

        try:
            with np.load(io.BytesIO(blob), allow_pickle=False) as stored:
                fields = {name: stored[name] for name in stored.files}
        except Exception as error:  # numpy and zipfile raise whatever a damaged archive makes them
            raise ValueError(f"a cost model must be an archive that `mlc log train` made: {error}") from error
        if str(fields.get("format")) != str(_FORMAT):
            raise ValueError(f"a cost model must have format {_FORMAT}, got {fields.get('format', 'none')}; "
                             "`mlc log train` makes a new one")
        if str(fields.pop("checksum", None)) != _checksum(fields):
            raise ValueError("a cost model must match its checksum, but is damaged; `mlc log train` makes a new one")
        if str(fields.get("features")) != _digest():
            raise ValueError(f"a cost model must have been trained on this version's features ({_digest()}), got "
                             f"{fields.get('features')}; `mlc log train` makes a new one")
        members = [fields[name] for name in sorted(name for name in fields if name.startswith("member"))]
        try:
            return Pretrained([xgboost.Booster({"nthread": 1}, model_file=bytearray(m.tobytes())) for m in members])
        except xgboost.core.XGBoostError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"a cost model must hold trees that xgboost reads: {reason}") from error


def _checksum(fields: Mapping[str, np.ndarray]) -> str:
    """A checksum over every field, with its name and type."""
    state = hashlib.sha256()
    for name, values in sorted(fields.items()):
        state.update(f"{name} {values.dtype} {values.shape}\n".encode())
        state.update(values.tobytes())
    return state.hexdigest()


def _target(group: Sequence[Sample]) -> np.ndarray:
    """The regression target: what the trees must add to the estimate, with the mean over the task subtracted."""
    best = min(s.seconds for s in group)
    speed = -np.log2([min(s.seconds, _WORST * best) for s in group])
    estimate = -np.log2([max(s.features.seconds, 1e-9) for s in group])
    return np.asarray((speed - speed.mean()) - _PRIOR_PART * (estimate - estimate.mean()), dtype=np.float32)


def _weight(group: Sequence[Sample]) -> np.ndarray:
    """Sample weights proportional to speed, since the order of slow candidates matters little; every task has the same
    total."""
    best = min(s.seconds for s in group)
    weight = np.array([best / min(s.seconds, _WORST * best) for s in group])
    return weight * (_TASK_WEIGHT / weight.sum())


def _parameters(seed: int, threads: int) -> dict[str, Any]:
    return {
        "objective": "reg:squarederror", "max_depth": 5, "eta": 0.06, "min_child_weight": 4.0,
        "colsample_bytree": 0.3, "subsample": 0.7, "lambda": 2.0, "tree_method": "hist", "max_bin": 64,
        "base_score": 0.0, "nthread": threads, "seed": seed, "verbosity": 0,
    }


def _digest() -> str:
    """Which features, in which order."""
    return hashlib.blake2b("\n".join(LOOP_FEATURES).encode(), digest_size=8).hexdigest()


