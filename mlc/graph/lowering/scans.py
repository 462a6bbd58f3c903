"""Cumulative sums and orders of elements as reductions, which any GPU has schedules for.

What TVM has written out for GPUs are scans and merge sorts that meet in rounds, of which its passes for kernels that we
schedule refuse most. A GPU is through with a row by itself sooner than with the launches that the rounds take::

    y = cumsum(x)                        -->   y[i] = sum(x[k] for all k <= i)
    values, places = topk(x, count)      -->   rank[i] = sum(x[k] goes before x[i] for all k)
                                               places[r] = sum(i for all i where rank[i] == r), r < count
                                               values = gather_elements(x, places)

A long row is summed up in pieces, whose totals are such a row again. Of elements that are equal the first goes first;
NaN is larger than any number, as PyTorch has it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import tvm
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.relax.backend import DispatchSortScan

from mlc.graph.ir.rewrite import bindings, op_name, rebuilt, shape_of
from mlc.target import Target

__all__ = ["DispatchScans"]

#: elements of a row that are summed up anew for each
_SHORT = 2048
_Lowering = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def DispatchScans(target: Target) -> tvm.transform.Pass:
    """Module pass: sorts, searches and cumulative sums and products become calls of tensor functions."""
    if target.kind != "cuda":
        return DispatchSortScan()

    @tvm.transform.module_pass(opt_level=0, name="DispatchScans")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bound = {b.var: b.value for b in bindings(mod["main"])}
        if not any(_lowering(value) for value in bound.values()):
            return DispatchSortScan()(mod)

        def change(builder: relax.BlockBuilder, _var: relax.Var, value: relax.Expr) -> relax.Expr:
            lower = _lowering(value)
            return value if lower is None else lower(builder, value)

        return DispatchSortScan()(rebuilt(mod, bound, change))

    return run


def _lowering(value: relax.Expr) -> _Lowering | None:
    if not isinstance(value, relax.Call) or op_name(value) not in _LOWERINGS:
        return None
    return None if value.attrs.axis is None else _LOWERINGS[op_name(value)]


def _cumsum(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x = call.args[0]
    dtype = str(call.attrs.dtype or x.ty.dtype)
    return _summed(builder, x, int(call.attrs.axis) % len(x.ty.shape), dtype, bool(call.attrs.exclusive))


def _summed(builder: relax.BlockBuilder, x: relax.Expr, axis: int, dtype: str, exclusive: bool) -> relax.Expr:
    extent = shape_of(x)[axis]
    if not isinstance(extent, int) or extent <= _SHORT:
        return builder.call_te(cumulative_sum, x, axis, dtype, exclusive, primfunc_name_hint="cumsum")
    size = min(_SHORT, isqrt(extent - 1) + 1)
    totals = builder.emit(builder.call_te(piece_totals, x, axis, size, dtype, primfunc_name_hint="cumsum_totals"))
    before = builder.emit(_summed(builder, totals, axis, dtype, exclusive=True))
    return builder.call_te(piecewise_sum, x, before, axis, size, dtype, exclusive, primfunc_name_hint="cumsum_pieces")


def cumulative_sum(x: te.Tensor, axis: int, dtype: str, exclusive: bool) -> te.Tensor:
    """The sum of the elements before each along ``axis``, and of itself unless ``exclusive``."""
    k = te.reduce_axis((0, x.shape[axis]), name="k")

    def total(*place: tirx.Var) -> tirx.PrimExpr:
        here = place[axis]
        seen = k < here if exclusive else k <= here
        return te.sum(_term(x, place, axis, k, seen, dtype), axis=k)

    return te.compute(x.shape, total, name="cumsum")


def piece_totals(x: te.Tensor, axis: int, size: int, dtype: str) -> te.Tensor:
    """The sum of each piece of ``size`` elements along ``axis``; the last may be shorter."""
    extent = x.shape[axis]
    shape = [*x.shape[:axis], (extent + size - 1) // size, *x.shape[axis + 1 :]]
    k = te.reduce_axis((0, size), name="k")

    def total(*place: tirx.Var) -> tirx.PrimExpr:
        at = place[axis] * size + k
        return te.sum(_term(x, place, axis, at, at < extent, dtype), axis=k)

    return te.compute(shape, total, name="cumsum_totals")


def piecewise_sum(
    x: te.Tensor, before: te.Tensor, axis: int, size: int, dtype: str, exclusive: bool
) -> te.Tensor:
    """:func:`cumulative_sum` where ``before`` has the sums of all earlier pieces."""
    k = te.reduce_axis((0, size), name="k")

    def inner(*place: tirx.Var) -> tirx.PrimExpr:
        here = place[axis]
        at = here // size * size + k
        seen = at < here if exclusive else at <= here
        return te.sum(_term(x, place, axis, at, seen, dtype), axis=k)

    own = te.compute(x.shape, inner, name="cumsum_inner")

    def whole(*place: tirx.Var) -> tirx.PrimExpr:
        return own(*place) + before(*place[:axis], place[axis] // size, *place[axis + 1 :])

    return te.compute(x.shape, whole, name="cumsum_pieces")


def _term(
    x: te.Tensor, place: tuple[tirx.Var, ...], axis: int, at: tirx.PrimExpr, seen: tirx.PrimExpr, dtype: str
) -> tirx.PrimExpr:
    element = x(*place[:axis], at, *place[axis + 1 :]).astype(dtype)
    return tirx.if_then_else(seen, element, tirx.const(0, dtype))


def _sort(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    axis = int(call.attrs.axis) % len(call.args[0].ty.shape)
    places = _ordered(builder, call.args[0], axis, None, bool(call.attrs.descending), "int32")
    return op.gather_elements(call.args[0], places, axis)


def _argsort(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    axis = int(call.attrs.axis) % len(call.args[0].ty.shape)
    return _ordered(builder, call.args[0], axis, None, bool(call.attrs.descending), str(call.attrs.dtype))


def _topk(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, attrs = call.args[0], call.attrs
    axis, count = int(attrs.axis) % len(x.ty.shape), int(attrs.k)
    places = _ordered(builder, x, axis, count if count > 0 else None, bool(attrs.largest), str(attrs.dtype))
    results = {"indices": places}
    if str(attrs.ret_type) != "indices":
        results["values"] = builder.emit(op.gather_elements(x, places, axis))
    if str(attrs.ret_type) == "both":
        return relax.Tuple([results["values"], places])
    return results[str(attrs.ret_type)]


def _ordered(
    builder: relax.BlockBuilder, x: relax.Expr, axis: int, count: int | None, descending: bool, dtype: str
) -> relax.Expr:
    """Where along ``axis`` the first ``count`` elements of the order stand; all of them where it is None."""
    ranks = builder.emit(builder.call_te(ranked, x, axis, descending, primfunc_name_hint="ranks"))
    most = x.ty.shape[axis] if count is None else count
    return builder.emit(builder.call_te(placed, ranks, axis, most, dtype, primfunc_name_hint="places"))


def ranked(x: te.Tensor, axis: int, descending: bool) -> te.Tensor:
    """How many elements along ``axis`` go before each."""
    k = te.reduce_axis((0, x.shape[axis]), name="k")
    is_float = "float" in str(x.dtype)

    def rank(*place: tirx.Var) -> tirx.PrimExpr:
        one, other = x(*place), x(*place[:axis], k, *place[axis + 1 :])
        small, large = (one, other) if descending else (other, one)
        goes, same = large > small, large == small
        if is_float:
            small_nan, large_nan = tirx.isnan(small), tirx.isnan(large)
            goes = tirx.any(goes, tirx.all(large_nan, tirx.Not(small_nan)))
            same = tirx.any(same, tirx.all(large_nan, small_nan))
        before = tirx.any(goes, tirx.all(same, k < place[axis]))
        return te.sum(before.astype("int32"), axis=k)

    return te.compute(x.shape, rank, name="ranks")


def placed(ranks: te.Tensor, axis: int, count: tirx.PrimExpr, dtype: str) -> te.Tensor:
    """Where the element of each rank below ``count`` stands: the inverse of a permutation."""
    k = te.reduce_axis((0, ranks.shape[axis]), name="k")

    def place_of(*place: tirx.Var) -> tirx.PrimExpr:
        found = ranks(*place[:axis], k, *place[axis + 1 :]).equal(place[axis].astype("int32"))
        return te.sum(tirx.Select(found, k.astype("int32"), tirx.const(0, "int32")), axis=k)

    places = te.compute([*ranks.shape[:axis], count, *ranks.shape[axis + 1 :]], place_of, name="places")
    return places if dtype == "int32" else te.compute(places.shape, lambda *at: places(*at).astype(dtype), name="cast")


_LOWERINGS: dict[str, _Lowering] = {
    "relax.cumsum": _cumsum, "relax.sort": _sort, "relax.argsort": _argsort, "relax.topk": _topk,
}
