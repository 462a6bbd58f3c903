"""Slices without a copy: a part of a tensor that lies in one piece is read where it is.

Where every axis before the one that is cut has length 1, a slice is a contiguous piece: some channels in
``NCHW[c]c`` at batch 1, some columns of one row, some rows of a matrix. Such a ``strided_slice`` is left in ``main``,
and :mod:`mlc.artifact.memory` makes it a view. All others become kernels that copy, and so does the only reader of a
tensor: what cuts padded columns off a product is fused into it with the epilogue that follows. So does what only
elementwise arithmetic reads (the gates of a recurrent step): it reads the whole in place for less than a view costs.
"""

from __future__ import annotations

import math
from collections import Counter

import tvm
from tvm import relax

from mlc.graph.ir.movement import SLICE, window
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, op_name, rebuilt, shape_of
from mlc.graph.lowering.concat import ALIGNMENT, origin
from mlc.graph.lowering.epilogues import Epilogues
from mlc.target import Target

__all__ = ["PlaceSlices", "offset_of"]

_CONCAT = "relax.concat"


def offset_of(value: relax.Expr) -> int | None:
    """Where a slice that lies in one piece begins, in bytes; None for one that does not, or not where vectors can."""
    cut = window(value)
    if cut is None:
        return None
    axis, begin, _ = cut
    shape = shape_of(value.args[0])
    if math.prod(shape[:axis]) != 1:
        return None
    offset = begin * math.prod(shape[axis + 1 :]) * tvm.DataType(dtype_of(value)).itemsize
    return offset if isinstance(offset, int) and offset % ALIGNMENT == 0 else None


def PlaceSlices(target: Target) -> tvm.transform.Pass:
    """Module pass over operators of which all but slices, concatenations and reshapes are lowered: leaves the slices
    that need no copy, lowers the others.

    Only of tensors that kernels make: an input's memory is the caller's. An output of the model is a tensor of its
    own.
    """

    @tvm.transform.module_pass(opt_level=0, name="PlaceSlices")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not any(isinstance(b.value, relax.Call) and op_name(b.value) == SLICE for b in bindings(mod["main"])):
            return mod
        return _placed(mod, target.kind == "llvm")

    return run


def _placed(mod: tvm.IRModule, views: bool) -> tvm.IRModule:
    func = mod["main"]
    bound: dict[relax.Var, relax.Expr] = {b.var: b.value for b in bindings(func)}
    outputs = _outputs(func, bound)
    readers = Counter(leaf for value in bound.values() for leaf in relax.analysis.free_vars(value))
    kept: set[relax.Var] = set()
    places = Epilogues(mod)
    lower = tvm.ir.Op.get(SLICE).get_attr("FLegalize")

    def placed(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        before = bound[var]
        if not isinstance(before, relax.Call) or op_name(before) != SLICE:
            return value
        source = origin(before.args[0], bound)
        made = isinstance(bound.get(source), relax.Call) and op_name(bound[source]) in ("relax.call_tir", _CONCAT)
        view = views and var not in outputs and readers[before.args[0]] > 1
        reader = places.sole_reader(var)
        view = view and (reader is None or not places.apart(reader))
        if view and offset_of(before) is not None and (made or source in kept):
            kept.add(var)
            return value
        return lower(builder, value)

    return rebuilt(mod, bound, placed)


def _outputs(func: relax.Function, bound: dict[relax.Var, relax.Expr]) -> set[relax.Expr]:
    """What the result is made of, and what that is a view of."""
    pending, found = list(leaves(func.body.body)), set[relax.Expr]()
    while pending:
        var = pending.pop()
        value = bound.get(var)
        if isinstance(value, relax.Tuple | relax.TupleGetItem):
            pending += leaves(value)
        found |= {var, origin(var, bound)}
    return found
