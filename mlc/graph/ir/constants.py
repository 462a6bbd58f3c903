"""Relax constants as numpy arrays and back, with at most one copy of the data."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import GenericConst

__all__ = ["array_of", "constant", "number_of", "scalar_of", "tensor_of"]


def tensor_of(expr: relax.Expr) -> tvm.runtime.Tensor | None:
    """The tensor of a Relax constant; None for any other expression."""
    return expr.value if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor) else None


def array_of(expr: relax.Expr) -> np.ndarray | None:
    """The array a Relax constant holds, sharing its memory (do not write to it); None for any other expression.

    Types that numpy does not know (bfloat16, float8) give None as well.
    """
    tensor = tensor_of(expr)
    if tensor is None:
        return None
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None


def scalar_of(expr: relax.Expr) -> float | None:
    """The value of a constant with one element, whatever its rank."""
    array = array_of(expr)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


def number_of(expr: relax.Expr) -> float | None:
    """The value of a number that an operator takes as such, as ``clip`` its bounds."""
    return float(expr.value) if isinstance(expr, tirx.IntImm | tirx.FloatImm) else None


def constant(array: np.ndarray, dtype: str | None = None) -> relax.Expr:
    """A Relax constant with the array's elements, cast to ``dtype``; strided views are copied once, directly."""
    kind = np.dtype(dtype or array.dtype)
    if kind.kind == "V":  # of ml_dtypes, whose memory numpy does not share
        return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array, kind)))
    data = tvm.runtime.empty(array.shape, str(kind))
    if array.size:
        np.copyto(np.from_dlpack(data), array, casting="unsafe")
    return relax.const(data)
