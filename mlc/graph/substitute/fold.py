"""What a term of constants is: weights that substitutions join, cut or pad are made when the model is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mlc.graph.substitute.terms import Term

__all__ = ["fold", "foldable"]

_Arrays = Sequence[np.ndarray]


def _slice(term: Term, x: np.ndarray) -> np.ndarray:
    window = [slice(None)] * x.ndim
    window[term["axis"]] = slice(term["begin"], term["end"])
    return x[tuple(window)]


def _centred(term: Term, w: np.ndarray) -> np.ndarray:
    """Zeros around a filter, the larger half after it where they are odd in number."""
    widths = [(0, 0), (0, 0)]
    for large, small in zip(term["kernel"], w.shape[2:], strict=True):
        low = (large - 1) // 2 - (small - 1) // 2
        widths.append((low, large - small - low))
    return np.pad(w, widths)


def _identity_kernel(term: Term) -> np.ndarray:
    channels, inputs, rows, columns = term.shape
    kernel = np.zeros(term.shape, "float32")
    kernel[range(channels), np.arange(channels) % inputs, (rows - 1) // 2, (columns - 1) // 2] = 1.0
    return kernel


def _reduced(function: Callable[..., np.ndarray]) -> Callable[[Term, np.ndarray], np.ndarray]:
    return lambda term, x: function(x, axis=tuple(term["axes"]), keepdims=bool(term["keepdims"]))


_FOLDS: dict[str, Callable[..., np.ndarray]] = {
    "concat": lambda term, a, b: np.concatenate([a, b], axis=term["axis"]),
    "slice": _slice,
    "transpose": lambda term, x: x.transpose(term["perm"]),
    "reshape": lambda term, x: x.reshape(term.shape),
    "pad": lambda term, x: np.pad(x, list(zip(term["before"], term["after"], strict=True))),
    "enlarge": _centred,
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: a / b,
    "maximum": lambda _, a, b: np.maximum(a, b),
    "minimum": lambda _, a, b: np.minimum(a, b),
    "matmul": lambda _, a, b: a @ b,
    "neg": lambda _, x: -x,
    "relu": lambda _, x: np.maximum(x, 0.0),
    "exp": lambda _, x: np.exp(x),
    "log": lambda _, x: np.log(x),
    "sqrt": lambda _, x: np.sqrt(x),
    "rsqrt": lambda _, x: 1.0 / np.sqrt(x),
    "tanh": lambda _, x: np.tanh(x),
    "sigmoid": lambda _, x: 1.0 / (1.0 + np.exp(-x)),
    "reciprocal": lambda _, x: 1.0 / x,
    "sum": _reduced(np.sum),
    "mean": _reduced(np.mean),
    "max": _reduced(np.max),
    "ones": lambda term: np.ones(term.shape, "float32"),
    "scalar": lambda term: np.asarray(float(term["value"]), "float32"),
    "identity_matrix": lambda term: np.eye(term.shape[0], dtype="float32"),
    "identity_kernel": _identity_kernel,
}


def foldable(op: str) -> bool:
    """Whether :func:`fold` knows the operator; constants that others make are not taken."""
    return op in _FOLDS


def fold(term: Term, arrays: _Arrays) -> np.ndarray:
    """The float32 array that the operator makes of ``arrays``, which are its inputs."""
    wide = term.op in ("matmul", "sum", "mean")  # rounded once
    with np.errstate(all="ignore"):
        result = _FOLDS[term.op](term, *(a.astype("float64") if wide else a for a in arrays))
    assert math.prod(result.shape) == math.prod(term.shape), f"{term.op} must make {term.shape}, got {result.shape}"
    return np.ascontiguousarray(result.reshape(term.shape), dtype="float32")
