"""Scattered elements on GPUs, as what each element of the result finds among the updates.

TVM's own kernels write where the indices say, one update after the other, and have threads of their own, which no space
lays out. What looks for its updates is a reduction as any other, whose result depends on no order of threads::

    y = scatter_elements(x, places, updates, axis)
    -->
    last[i] = max(k for all k where places[k] == i, or -1);   y[i] = last[i] < 0 ? x[i] : updates[last[i]]
    y[i] = x[i] + sum(updates[k] for all k where places[k] == i)        # of the reduction "add"; "mul" ... alike

Of updates of one element the last counts, as in numpy. Of tuples of indices (``scatter_nd``) it is the row's number
that is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax import op

from mlc.graph.ir.rewrite import dtype_of, shape_of
from mlc.graph.ir.views import i64
from mlc.sizes import Size
from schedules.reducers import EXTREMA

__all__ = ["scatter_elements", "scatter_nd"]

_Element = Callable[..., Any]


def scatter_elements(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The rule for ``relax.scatter_elements``."""
    data, places, updates = call.args
    axis, reduction = int(call.attrs.axis) % len(data.ty.shape), str(call.attrs.reduction)
    if not _known(reduction, dtype_of(data)):
        return _own(builder, call)

    def compute(x: te.Tensor, at: te.Tensor, new: te.Tensor) -> te.Tensor:
        extent = x.shape[axis]
        others = [(size, whole) for d, (size, whole) in enumerate(zip(at.shape, x.shape, strict=True)) if d != axis]
        inside = [d for d, (size, whole) in enumerate(others) if not _same(size, whole)]

        def moved(place: Sequence[Any], k: Any) -> list[Any]:
            return [*place[:axis], k, *place[axis + 1 :]]

        def meets(place: Sequence[Any], k: Any) -> Any:
            """Whether the update ``k`` is the element's: rows past the end of the indices have none."""
            rows = [i for d, i in enumerate(place) if d != axis]
            bounds = [rows[d] < others[d][0] for d in inside]
            held = [i if d == axis or not bounds else tirx.min(i, at.shape[d] - 1)
                    for d, i in enumerate(moved(place, k))]
            found = _positive(at(*held), extent).equal(place[axis].astype(at.dtype))
            return tirx.all(found, *bounds) if bounds else found

        def value(place: Sequence[Any], k: Any) -> Any:
            return new(*(i if d == axis or not inside else tirx.min(i, new.shape[d] - 1)
                         for d, i in enumerate(moved(place, k))))

        return _combined(x, at.shape[axis], meets, value, reduction)

    return builder.call_te(compute, data, places, updates, primfunc_name_hint="scatter_elements")


def scatter_nd(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The rule for ``relax.scatter_nd``."""
    data, places, updates = call.args
    shape, given, reduction = shape_of(data), shape_of(places), str(call.attrs.reduction)
    if not _known(reduction, dtype_of(data)) or any(isinstance(size, Size) for size in (*shape, *given)):
        return _own(builder, call)
    count, depth = prod(given[:-1]), given[-1]
    heads, inner = shape[:depth], shape[depth:]
    if not heads or not count:
        return _own(builder, call)

    def numbers(at: te.Tensor) -> te.Tensor:
        def number(k: Any) -> Any:
            whole: Any = tirx.const(0, at.dtype)
            for axis, extent in enumerate(heads):
                whole = whole * tirx.const(extent, at.dtype) + _positive(at(k, axis), tirx.const(extent, at.dtype))
            return whole

        return te.compute((i64(count),), number, name="rows")

    def meets(rows: te.Tensor) -> _Element:
        return lambda place, k: rows(k).equal(place[0].astype(rows.dtype))

    def latest(rows: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((i64(0), i64(count)), name="k")
        return te.compute((i64(flat[0]),), lambda *place: _last(meets(rows), place, k), name="last")

    def replaced(x: te.Tensor, last: te.Tensor, new: te.Tensor) -> te.Tensor:
        shape = [i64(extent) for extent in flat]
        return te.compute(
            shape, lambda i, j: _chosen(x(i, j), last(i), lambda k: new(k, j)), name="scattered")

    def combined(x: te.Tensor, rows: te.Tensor, new: te.Tensor) -> te.Tensor:
        return _combined(x, i64(count), meets(rows), lambda place, k: new(k, *place[1:]), reduction)

    emit, flat = builder.emit, (prod(heads), prod(inner))
    found = emit(builder.call_te(numbers, emit(op.reshape(places, (count, depth))), primfunc_name_hint="scatter_rows"))
    if reduction == "update":  # once for all elements of a row
        found = emit(builder.call_te(latest, found, primfunc_name_hint="scatter_last"))
    given = emit(op.reshape(data, flat)), found, emit(op.reshape(updates, (count, flat[1])))
    compute = replaced if reduction == "update" else combined
    return op.reshape(emit(builder.call_te(compute, *given, primfunc_name_hint="scatter_nd")), shape)


def _own(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return tvm.ir.Op.get(call.op.name).get_attr("FLegalize")(builder, call)


def _known(reduction: str, dtype: str) -> bool:
    return reduction in ("update", "add", "mul") or (reduction in EXTREMA and "float" in dtype)


def _same(one: Any, other: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(one, other))


def _positive(index: Any, extent: Any) -> Any:
    """An index that counts from the end where it is negative."""
    return tirx.Select(index < tirx.const(0, index.ty.dtype), index + extent.astype(index.ty.dtype), index)


def _last(meets: _Element, place: Sequence[Any], k: Any) -> Any:
    """The last of the updates that an element meets, -1 where it meets none. It is of the type of ``k``: of a narrower
    one TVM converts the whole maximum, which no space knows as a reduction then."""
    return te.max(tirx.Select(meets(place, k.var), k.var, tirx.const(-1, k.var.ty.dtype)), axis=[k])


def _chosen(old: Any, last: Any, value: _Element) -> Any:
    return tirx.if_then_else(last < 0, old, value(tirx.max(last, 0)))


def _combined(
    x: te.Tensor, count: Any, meets: _Element, value: _Element, reduction: str
) -> te.Tensor:
    """``x`` with the updates that each element meets."""
    k = te.reduce_axis((i64(0), count), name="k")
    if reduction == "update":
        last = te.compute(x.shape, lambda *place: _last(meets, place, k), name="last")
        return te.compute(x.shape, lambda *place: _chosen(
            x(*place), last(*place), lambda number: value(place, number)), name="scattered")
    combine, neutral = _COMBINATIONS[reduction]
    reducer = te.comm_reducer(lambda a, b: combine(a, b), lambda dtype: tirx.const(neutral, dtype), name=reduction)

    def all_of(*place: Any) -> Any:
        return reducer(tirx.Select(meets(place, k.var), value(place, k.var), tirx.const(neutral, x.dtype)), axis=[k])

    found = te.compute(x.shape, all_of, name="updates")
    return te.compute(x.shape, lambda *place: combine(x(*place), found(*place)), name="scattered")


_COMBINATIONS: dict[str, tuple[Callable[[Any, Any], Any], float]] = {
    "add": (lambda a, b: a + b, 0), "mul": (lambda a, b: a * b, 1), **EXTREMA,
}
