"""Loop variables and shapes as 32-bit integers.

Relax gives tensor functions 64-bit shapes. Lowering narrows indices that fit, but by then gives loops new variables,
and TVM loses what a schedule said about the old ones: a ragged tile is no longer peeled, and every element of its
full tiles is tested. Functions whose indices fit are therefore narrowed before they are scheduled.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad

from mlc.sizes import bounds_of, in_scope
from schedules.analysis import walk
from schedules.free import variables

__all__ = ["narrowed"]

_LIMIT = 2**31 - 1


def narrowed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with 32-bit indices; unchanged where it works on 64-bit data or a tensor is too large.

    ``for i: int64 in range(64): B[i] = A[i]   -->   for i: int32 in range(64): B[i] = A[i]``
    """
    if not _wide_indices(func) or _wide_values(func):
        return func
    return tirx.transform.ForceNarrowIndexToInt32()(tvm.IRModule({"main": func}))["main"]


def _wide_indices(func: tirx.PrimFunc) -> bool:
    found = [False]

    def visit(loop: tirx.For) -> None:
        found[0] = found[0] or str(loop.loop_var.ty) == "int64"

    walk(func.body, (tirx.For, visit))
    return found[0]


def _wide_values(func: tirx.PrimFunc) -> bool:
    """Whether a tensor holds 64-bit integers or more elements than 32 bits count, or a value is made 64 bits wide."""
    buffers = list(func.params)
    found = [False]
    # functions without free sizes keep the keys by which logs know them; of numbers, TVM itself narrows all alike
    counts = _Counts(func) if variables(func) else None

    def block(node: s_tir.SBlock) -> None:
        buffers.extend(node.alloc_buffers)

    def cast(node: tirx.Cast) -> None:
        wide = "int64" in (str(node.ty), str(node.value.ty))
        found[0] = found[0] or (wide and not (counts is not None and counts.hold(node)))

    walk(func.body, (s_tir.SBlock, block), (tirx.Cast, cast))
    return found[0] or not all(_small(buffer) for buffer in buffers)


class _Counts:
    """Numbers made of indices and free sizes alone that become floats or have 32 bits: what a mean divides by, how many
    elements a window has inside an image, a place that is compared with data."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._analyzer, self._known = tvm.sym.Analyzer(), set(in_scope())

        def bind(var: tirx.Var, least: Any, extent: Any) -> None:
            if isinstance(least, tirx.IntImm) and (most := bounds_of(extent)[1]) <= _LIMIT:
                self._known.add(str(var.name))
                self._analyzer.bind(var, tvm.ir.Range.from_min_extent(least, tirx.const(most, str(var.ty))))

        def axes(block: s_tir.SBlock) -> None:
            for each in block.iter_vars:
                bind(each.var, each.dom.min, each.dom.extent)

        walk(func.body, (s_tir.SBlock, axes),
             (tirx.For, lambda loop: bind(loop.loop_var, loop.min, loop.extent)))
        for var in variables(func):
            if str(var.name) in in_scope():
                low, high = bounds_of(var)
                self._analyzer.bind(var, tvm.ir.Range(tirx.const(low, str(var.ty)), tirx.const(high + 1, str(var.ty))))

    def hold(self, cast: tirx.Cast) -> bool:
        """Whether a conversion is of such a number, one that 32 bits hold, or of a truth value."""
        if str(cast.value.ty) == "bool":
            return True
        if not str(cast.ty).startswith(("float", "int32")):
            return False
        inside: list[Any] = []
        walk(cast.value, (TensorLoad, inside.append), (Call, inside.append), (tirx.Var, inside.append))
        if not all(isinstance(each, tirx.Var) and str(each.name) in self._known for each in inside):
            return False
        bound = self._analyzer.const_int_bound(cast.value)
        return int(bound.min_value) >= -_LIMIT and int(bound.max_value) <= _LIMIT


def _small(buffer: tirx.Var) -> bool:
    """Whether the parameter is a tensor of narrow elements with a shape that 32 bits hold, or a free size."""
    if isinstance(buffer.ty, tvm.ir.PrimType):
        return str(buffer.name) in in_scope()
    sizes = [int(s) if isinstance(s, tirx.IntImm) else min(bounds_of(s)[1], _LIMIT) for s in buffer.shape]
    return math.prod(sizes) < _LIMIT and str(buffer.dtype) not in ("int64", "uint64")
