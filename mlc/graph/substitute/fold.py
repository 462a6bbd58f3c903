"""Folds terms of constants: weights that substitutions join, slice or pad are computed at compile time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlc.operators import OPERATORS
from mlc.operators.arithmetic import REAL, SINGLE
from mlc.operators.evaluate import evaluate
from mlc.substitution.terms import Term

__all__ = ["fold", "foldable"]


def foldable(op: str) -> bool:
    """Whether :func:`fold` takes the operator; constants that others make are not taken."""
    return op in OPERATORS and OPERATORS[op].folds


def fold(term: Term, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The array that the operator makes of ``arrays``, which are its inputs: float32, or indices that are moved."""
    known = OPERATORS[term.op]
    wide = not (known.pointwise or known.movement)  # rounded once
    with np.errstate(all="ignore"):
        if known.numpy is not None:
            result = known.numpy(*arrays)
        elif wide:
            [result] = evaluate(term.op, [a.astype("float64") for a in arrays], dict(term.attributes), REAL)
        else:
            [result] = evaluate(term.op, arrays, dict(term.attributes), SINGLE)
    assert math.prod(result.shape) == math.prod(term.shape), f"{term.op} must make {term.shape}, got {result.shape}"
    moved = bool(arrays) and np.issubdtype(arrays[0].dtype, np.integer)
    return np.ascontiguousarray(result.reshape(term.shape), dtype=arrays[0].dtype if moved else "float32")
