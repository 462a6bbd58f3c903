"""Every operator as a tensor function: TVM's own definitions, but for those whose shape suits no schedule.

Transcendental functions stay calls here; :func:`schedules.math.expand_math` makes them vector arithmetic after
scheduling, so that tasks, traces and the reference of a measurement speak of ``exp`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.transform import LegalizeOps

from mlc.graph.ir.constants import array_of
from mlc.graph.ir.patterns import INJECTIVE
from mlc.graph.ir.rewrite import dtype_of
from mlc.graph.kernels.resize import is_exact, resize2d
from mlc.graph.lowering.scatters import scatter_elements, scatter_nd
from mlc.sizes import Size, size_of
from mlc.target import Target
from schedules.reducers import EXTREMA

__all__ = ["Legalise", "softmax"]


def softmax(x: te.Tensor, axis: int) -> te.Tensor:
    """``exp(x - max) / sum`` along ``axis``: two reductions, each exponential computed once."""
    axis %= len(x.shape)
    rows = [dim for i, dim in enumerate(x.shape) if i != axis]

    def along(row: tuple[tirx.Var, ...], k: tirx.Var) -> tuple[tirx.Var, ...]:
        return (*row[:axis], k, *row[axis:])

    def row_of(i: tuple[tirx.Var, ...]) -> tuple[tirx.Var, ...]:
        return (*i[:axis], *i[axis + 1 :])

    k = te.reduce_axis((0, x.shape[axis]), name="k")
    peak = te.compute(rows, lambda *r: te.max(x(*along(r, k)), axis=k), name="softmax_max")
    powers = te.compute(x.shape, lambda *i: tirx.exp(x(*i) - peak(*row_of(i))), name="softmax_exp")
    j = te.reduce_axis((0, x.shape[axis]), name="k")
    total = te.compute(rows, lambda *r: te.sum(powers(*along(r, j)), axis=j), name="softmax_sum")
    return te.compute(x.shape, lambda *i: powers(*i) / total(*row_of(i)), name="softmax_norm")


def _softmax(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if dtype_of(call) != "float32":
        return tvm.ir.Op.get("relax.nn.softmax").get_attr("FLegalize")(builder, call)
    return builder.call_te(softmax, call.args[0], int(call.attrs.axis), primfunc_name_hint="softmax")


def _softmax_of_one(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Rows of one element, as attention over a single key has them, reduce nothing: 1 for what is finite, else NaN."""
    if size_of(call.ty.shape.values[int(call.attrs.axis)]) != 1:
        return tvm.ir.Op.get("relax.nn.softmax").get_attr("FLegalize")(builder, call)

    def softmax_of_one(x: te.Tensor) -> te.Tensor:
        def element(*place: tirx.Var) -> tirx.PrimExpr:
            finite = tirx.abs(x(*place)) <= tirx.max_value(x.dtype)
            return tirx.Select(finite, tirx.const(1.0, x.dtype), tirx.const(math.nan, x.dtype))

        return te.compute(x.shape, element, name="softmax_of_one")

    return builder.call_te(softmax_of_one, call.args[0], primfunc_name_hint="softmax")


def extremum(x: te.Tensor, axes: Sequence[int], keepdims: bool, operator: str) -> te.Tensor:
    """The largest (``max``) or least (``min``) elements along ``axes``, of infinities too: TVM's reductions begin with
    the largest finite number, which then is the result."""
    combine, identity = EXTREMA[operator]
    reducer = te.comm_reducer(lambda a, b: combine(a, b), lambda dtype: tirx.const(identity, dtype), name=operator)
    over = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes}
    kept = [axis for axis in range(len(x.shape)) if keepdims or axis not in over]
    shape = [1 if axis in over else x.shape[axis] for axis in kept]

    def element(*indices: tirx.Var) -> tirx.PrimExpr:
        own = dict(zip(kept, indices, strict=True))
        return reducer(x(*(over.get(axis, own.get(axis)) for axis in range(len(x.shape)))), axis=list(over.values()))

    return te.compute(shape, element, name=operator)


def _extremum(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    name = call.op.name
    if not dtype_of(call).startswith("float"):
        return tvm.ir.Op.get(name).get_attr("FLegalize")(builder, call)
    rank = len(call.args[0].ty.shape)
    axes = range(rank) if call.attrs.axis is None else sorted(int(axis) % rank for axis in call.attrs.axis)
    operator = name.removeprefix("relax.")
    return builder.call_te(extremum, call.args[0], list(axes), bool(call.attrs.keepdims), operator,
                           primfunc_name_hint=operator)


def _resize2d(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if not is_exact(call):
        return tvm.ir.Op.get("relax.image.resize2d").get_attr("FLegalize")(builder, call)
    attrs, size = call.attrs, tuple(call.args[1].values)
    return builder.call_te(
        resize2d, call.args[0], size, str(attrs.layout), str(attrs.method),
        str(attrs.coordinate_transformation_mode), str(attrs.rounding_method), primfunc_name_hint="resize2d",
    )


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A kernel of its own loops and of what makes its indices: the pattern that TVM reads off an element whose place
    depends on data is opaque, which would keep both, and what is done with the elements, in kernels of their own."""
    axis, mode = call.attrs.axis, str(call.attrs.mode)
    if mode == "fast" and axis is not None:  # TVM's own says at every use that indices must be in bounds
        return builder.call_te(_elements, *call.args, int(axis), primfunc_name_hint="take",
                               primfunc_attrs={"op_pattern": INJECTIVE})
    return builder.call_te(topi.take, *call.args, axis, mode=mode, primfunc_name_hint="take",
                           primfunc_attrs={"op_pattern": INJECTIVE})


def _elements(x: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """The elements of ``x`` at ``indices``, which are in bounds, of ``axis``."""
    first, count = axis % len(x.shape), len(indices.shape)
    shape = [*x.shape[:first], *indices.shape, *x.shape[first + 1:]]

    def element(*place: tirx.Var) -> tirx.PrimExpr:
        index = indices(*place[first:first + count])
        return x(*place[:first], index, *place[first + count:])

    return te.compute(shape, element, name="T_take")


def _full(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's own asks whether the type's name holds "float" of what is no name when the value is infinite."""
    shape, value = call.args
    number = array_of(value)
    if number is None or not isinstance(shape, relax.ShapeExpr):
        return tvm.ir.Op.get("relax.full").get_attr("FLegalize")(builder, call)
    return builder.call_te(topi.full, list(shape.values), dtype_of(call), number.item(), primfunc_name_hint="full")


def _where(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Of free sizes by the condition itself: TVM's own compares it with a number of 64 bits, of which its pass that
    narrows loops to 32 leaves one side."""
    shapes = [list(arg.ty.shape) for arg in (*call.args, call)]
    free = any(isinstance(size_of(extent), Size) for shape in shapes for extent in shape)
    if not free or dtype_of(call.args[0]) != "bool":
        return tvm.ir.Op.get("relax.where").get_attr("FLegalize")(builder, call)
    return builder.call_te(_chosen, *call.args, shapes[-1], primfunc_name_hint="where",
                           primfunc_attrs={"op_pattern": INJECTIVE})


def _chosen(condition: te.Tensor, one: te.Tensor, other: te.Tensor, shape: Sequence[tirx.Expr]) -> te.Tensor:
    """``condition ? one : other``, each broadcast to ``shape``."""
    def element(*place: tirx.Var) -> tirx.Expr:
        def at(x: te.Tensor) -> tirx.Expr:
            own = place[len(place) - len(x.shape):]
            return x(*(tirx.const(0, "int64") if size_of(extent) == 1 else i
                       for i, extent in zip(own, x.shape, strict=True)))

        return tirx.Select(at(condition), at(one), at(other))

    return te.compute(shape, element, name="T_where")


def _compared(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A float with itself, by which models ask for what is no number, though TVM takes it to equal itself."""
    one, other = call.args
    if not one.same_as(other) or not dtype_of(one).startswith(("float", "bfloat")):
        return tvm.ir.Op.get(call.op.name).get_attr("FLegalize")(builder, call)
    same = call.op.name != "relax.not_equal"

    def itself(x: te.Tensor) -> te.Tensor:
        def element(*place: tirx.Var) -> tirx.PrimExpr:
            nothing = tirx.isnan(x(*place))
            return tirx.Not(nothing) if same else nothing

        return te.compute(x.shape, element, name="itself")

    return builder.call_te(itself, one, primfunc_name_hint="itself")


#: comparisons of which numbers fulfil those with themselves; and the other one
_OF_ITSELF = ("relax.equal", "relax.greater_equal", "relax.less_equal", "relax.not_equal")


def Legalise(target: Target) -> tvm.transform.Pass:
    """Module pass: all operators become calls of tensor functions, but for ``reshape``, which stays a view, and
    ``concat`` and ``strided_slice``, which may need no copy (:mod:`mlc.graph.lowering.concat` and ``slices``)."""
    custom = {"relax.max": _extremum, "relax.min": _extremum, "relax.full": _full,
              **dict.fromkeys(_OF_ITSELF, _compared)}
    if target.kind == "llvm":
        custom |= {"relax.nn.softmax": _softmax, "relax.image.resize2d": _resize2d, "relax.take": _take,
                   "relax.where": _where}
    else:
        custom |= {"relax.nn.softmax": _softmax_of_one, "relax.scatter_elements": scatter_elements,
                   "relax.scatter_nd": scatter_nd}
    return LegalizeOps(custom, skip_ops=["relax.reshape", "relax.concat", "relax.strided_slice"])
