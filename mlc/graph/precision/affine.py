"""Affine quantisation: ``(q - zero) * scale``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from mlc.graph.ir.constants import array_of
from mlc.graph.ir.rewrite import Scope, dtype_of, shape_of

__all__ = ["Affine", "Dequantised", "affine_of", "dequantised", "quantised", "spread"]


@dataclass(frozen=True, eq=False)
class Affine:
    """``(q - zero) * scale`` for integers ``q``.

    ``scale`` (float32, positive, finite) and ``zero`` (int64) are arrays of one element, or of one for each index of
    ``axis``.
    """

    scale: np.ndarray
    zero: np.ndarray
    axis: int

    @property
    def single(self) -> bool:
        """Whether one scale and one zero point are those of the whole tensor."""
        return self.scale.size == self.zero.size == 1

    def same(self, other: Affine) -> bool:
        """Whether equal integers stand for equal numbers; of whole tensors alone."""
        return self.single and other.single and self.scale.item() == other.scale.item() and (
            self.zero.item() == other.zero.item()
        )


def affine_of(call: relax.Call) -> Affine | None:
    """How a ``quantize`` or ``dequantize`` call reads its integers; None unless scales and zero points are constants
    of float32 and integers that arithmetic can trust."""
    scale, zero = array_of(call.args[1]), array_of(call.args[2])
    if scale is None or zero is None or scale.ndim > 1 or zero.ndim > 1 or scale.dtype != np.float32:
        return None
    if zero.dtype.kind not in "iu" or not np.isfinite(scale).all() or not (scale >= np.finfo(np.float32).tiny).all():
        return None
    rank = len(shape_of(call))
    return Affine(scale.reshape(-1), zero.reshape(-1).astype(np.int64), int(call.attrs.axis) % max(1, rank))


@dataclass(frozen=True, eq=False)
class Dequantised:
    """The float32 numbers that the integers ``data`` stand for."""

    data: relax.Expr
    affine: Affine

    @property
    def dtype(self) -> str:
        """The integers' type."""
        return dtype_of(self.data)


def dequantised(expr: relax.Expr, scope: Scope) -> Dequantised | None:
    """The integers that ``expr`` is dequantised from, if it is."""
    call = scope.call(expr, "dequantize")
    affine = affine_of(call) if call is not None and dtype_of(call) == "float32" else None
    return Dequantised(call.args[0], affine) if call is not None and affine is not None else None


def quantised(expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, Affine] | None:
    """The expression that ``expr`` is quantised from, and its parameters; None if it is not quantised."""
    call = scope.call(expr, "quantize")
    affine = affine_of(call) if call is not None and dtype_of(call.args[0]) == "float32" else None
    return (call.args[0], affine) if call is not None and affine is not None else None


def spread(array: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """``array`` of one axis with the shape in which it broadcasts along ``axis`` of a tensor; one element as a
    scalar."""
    if array.size == 1:
        return array.reshape(())
    return array.reshape([array.size if i == axis else 1 for i in range(rank)])
