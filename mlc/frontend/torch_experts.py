"""What PyTorch's and transformers' mixtures of experts call that ONNX lacks: histograms and products of groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mlc.frontend.onnx_grouped import DOMAIN, GROUPED, define_operators

__all__ = ["expert_translations"]


def expert_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``; transformers' operator where it has been imported."""
    found: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.aten.histc.default: _histogram}
    for library, name in (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback")):
        operator = getattr(getattr(torch.ops, library), name, None)
        if operator is not None:
            found[operator.default] = _grouped
    return found


def _grouped(x: Any, matrices: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows in groups that end at ``offs``, each times the matrix of its group."""
    if offs is None or bias is not None or len(x.shape) != 2 or len(matrices.shape) != 3 or out_dtype is not None:
        raise ValueError("a grouped product must be of a matrix whose rows are in groups, one for each of the others, "
                         "without a bias, of their type")
    define_operators()
    return getattr(_opset(), GROUPED)(x, matrices, offs)


@functools.cache
def _opset() -> Any:
    from onnxscript.values import Opset

    return Opset(DOMAIN, 1)


def _histogram(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """How many elements lie in each of ``bins`` parts of ``min`` to ``max``, both included; others count nowhere. Where
    these are equal, from the least element to the largest."""
    from onnxscript import opset18

    op: Any = opset18
    flat = op.Reshape(x, [-1])
    low, high = op.CastLike(float(min), x), op.CastLike(float(max), x)
    if min == max:
        low, high = op.ReduceMin(flat, keepdims=0), op.ReduceMax(flat, keepdims=0)
        single, one = op.Equal(low, high), op.CastLike(1.0, x)
        low, high = op.Where(single, op.Sub(low, one), low), op.Where(single, op.Add(high, one), high)
    part = op.Div(op.Sub(flat, low), op.Sub(high, low))
    place = op.Cast(op.Floor(op.Mul(part, op.CastLike(float(bins), x))), to=_INT64)
    place = op.Min(place, op.Constant(value_int=bins - 1))
    inside = op.And(op.GreaterOrEqual(flat, low), op.LessOrEqual(flat, high))
    return op.CastLike(_counted(op, op.Where(inside, place, op.Constant(value_int=bins)), bins), x)


def _counted(op: Any, places: Any, bins: int) -> Any:
    """How many of the places are each number below ``bins``."""
    classes = op.Constant(value_ints=list(range(bins)))
    same = op.Equal(op.Unsqueeze(places, [1]), op.Unsqueeze(classes, [0]))
    return op.ReduceSum(op.Cast(same, to=_INT64), [0], keepdims=0)


_INT64 = 7  # onnx.TensorProto.INT64
