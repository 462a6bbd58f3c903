"""Scales and shifts by constants: collected in the form ``x * s + t``, and scales folded into weights.

========================================  ==============================================
before                                    after
========================================  ==============================================
``(x * a) * b``                           ``x * (a * b)``
``(x + a) + b``                           ``x + (a + b)``
``((x + a) + y) + b``                     ``(x + y) + (a + b)``, products likewise
``a - (x + b)``, ``a - (b - x)``          ``(a - b) - x``, ``x + (a - b)``
``(a - x) + b``, ``a / (x * b)``          ``(a + b) - x``, ``(a / b) / x``
``(x + a) * b``                           ``x * b + (a * b)``
``conv(x, W) * s`` (``s`` per channel)    ``conv(x, W * s)``
``matmul(x, W) * s`` (``s`` per column)   ``matmul(x, W * s)``
``conv(x * s, W)``, ``matmul(x * s, W)``  the same, with ``W`` scaled along its input side
========================================  ==============================================

Every intermediate result must have no other use, so that no work is done twice; the constants that are merged must
not grow by being broadcast against each other; weights must be constants. Convolutions are 1-D to 3-D, plain,
grouped or transposed, in any layout that spells out its channel axis.

Weights that 16 bits hold stay such: scales other than powers of two are not folded into them, and cost a multiplication
for each result, which a bias makes a multiply-add. Depthwise weights are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.halves import is_narrow
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, is_constant, op_name, rewrite_pass, shape_of
from mlc.graph.simplify.arithmetic import is_float

__all__ = ["FoldAffine"]

CONVS = ("nn.conv1d", "nn.conv2d", "nn.conv3d")
TRANSPOSED = ("nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
LINEAR = (*CONVS, *TRANSPOSED, "matmul")


def constant_side(call: relax.Call) -> tuple[relax.Expr, np.ndarray] | None:
    """``(x, c)`` of ``x op c`` or ``c op x`` for a floating-point constant ``c`` that does not broadcast ``x``."""
    for value, other in (call.args, reversed(call.args)):
        array = array_of(other)
        if array is not None and not is_constant(value) and is_float(call) and shape_of(value) == shape_of(call):
            return value, array
    return None


def _merged(left: np.ndarray, right: np.ndarray, function: Callable[..., np.ndarray]) -> np.ndarray | None:
    """``function(left, right)`` unless that has more elements than both."""
    try:
        size = np.broadcast(left, right).size
    except ValueError:
        return None
    return function(left, right) if size <= max(left.size, right.size) else None


def _gather(inner: str, merge: Callable[..., np.ndarray]):  # type: ignore[no-untyped-def]
    """``(x op a) op b --> x op merge(a, b)`` for ``op`` = ``inner``."""
    build = getattr(op, inner)

    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        outer = constant_side(call)
        if outer is None or not scope.once(outer[0]):
            return None
        first = scope.call(outer[0], inner)
        side = constant_side(first) if first is not None else None
        both = _merged(side[1], outer[1], merge) if side is not None else None
        return build(side[0], constant(both, dtype_of(call))) if side is not None and both is not None else None

    return rule


def _gather_past(inner: str, merge: Callable[..., np.ndarray]):  # type: ignore[no-untyped-def]
    """``((x op a) op y) op b --> (x op y) op merge(a, b)``, but for ``x`` that a product makes: it takes ``a`` in."""
    build = getattr(op, inner)

    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        outer = constant_side(call)
        middle = scope.call(outer[0], inner) if outer is not None and scope.once(outer[0]) else None
        if outer is None or middle is None:
            return None
        for changed, other in (tuple(middle.args), tuple(reversed(middle.args))):
            first = scope.call(changed, inner) if scope.once(changed) else None
            side = constant_side(first) if first is not None else None
            if side is None or is_constant(other) or scope.call(side[0], *LINEAR) is not None:
                continue
            both = _merged(side[1], outer[1], merge)
            if both is not None:
                return build(scope.emit(build(side[0], other)), constant(both, dtype_of(call)))
        return None

    return rule


def subtracted(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``a - (x + b) --> (a - b) - x`` and ``a - (b - x) --> x + (a - b)``."""
    outer, inner = array_of(call.args[0]), scope.call(call.args[1], "add", "subtract")
    if outer is None or inner is None or not scope.once(call.args[1]) or not is_float(call):
        return None
    side = constant_side(inner)
    both = _merged(outer, side[1], np.subtract) if side is not None else None
    if side is None or both is None or shape_of(side[0]) != shape_of(call):
        return None
    if op_name(inner) == "relax.subtract":  # of which the constant is the first: x - b has become x + (-b)
        return op.add(side[0], constant(both, dtype_of(call)))
    return op.subtract(constant(both, dtype_of(call)), side[0])


def added_to_difference(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``(a - x) + b --> (a + b) - x``."""
    outer = constant_side(call)
    inner = scope.call(outer[0], "subtract") if outer is not None and scope.once(outer[0]) else None
    first = array_of(inner.args[0]) if inner is not None else None
    if outer is None or inner is None or first is None or shape_of(inner.args[1]) != shape_of(call):
        return None
    both = _merged(first, outer[1], np.add)
    return op.subtract(constant(both, dtype_of(call)), inner.args[1]) if both is not None else None


def divided_by_multiple(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``a / (x * b) --> (a / b) / x`` where that quotient is finite."""
    outer, inner = array_of(call.args[0]), scope.call(call.args[1], "multiply")
    side = constant_side(inner) if inner is not None and scope.once(call.args[1]) and is_float(call) else None
    if outer is None or side is None or shape_of(side[0]) != shape_of(call):
        return None
    with np.errstate(all="ignore"):
        both = _merged(outer, side[1], np.divide)
    if both is None or not np.isfinite(both).all():
        return None
    return op.divide(constant(both, dtype_of(call)), side[0])


def scale_before_shift(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``(x + a) * b --> x * b + (a * b)``."""
    outer = constant_side(call)
    if outer is None or not scope.once(outer[0]):
        return None
    shift = scope.call(outer[0], "add")
    side = constant_side(shift) if shift is not None else None
    both = _merged(side[1], outer[1], np.multiply) if side is not None else None
    if side is None or both is None:
        return None
    scaled = scope.emit(op.multiply(side[0], constant(outer[1])))
    return op.add(scaled, constant(both, dtype_of(call)))


@dataclass(frozen=True)
class _Side:
    """One side of a linear operator with constant weights: where its channels are, in the tensor and in the weights."""

    rank: int  # of the data or of the result
    channel_axis: int
    weight_axis: int
    other_axis: int  # the weights' axis of the other side, cut into ``groups`` where weight_axis holds one group only
    groups: int = 1


def _sides(call: relax.Call) -> tuple[_Side, _Side] | None:
    """The data's and the result's side of a convolution or product."""
    name = str(call.op.name).removeprefix("relax.")
    rank_in, rank_out = len(shape_of(call.args[0])), len(shape_of(call))
    if name == "matmul":
        axes = len(shape_of(call.args[1]))
        if axes < 2:
            return None
        return _Side(rank_in, rank_in - 1, axes - 2, axes - 1), _Side(rank_out, rank_out - 1, axes - 1, axes - 2)
    attrs = call.attrs
    layout_in, kernel = str(attrs.data_layout), str(attrs.kernel_layout)
    layout_out = str(attrs.out_layout) or layout_in
    if len(layout_in) != rank_in or len(layout_out) != rank_out or len(kernel) != rank_in:
        return None  # a blocked layout
    i, o, groups = kernel.index("I"), kernel.index("O"), int(attrs.groups)
    return _Side(rank_in, layout_in.index("C"), i, o, groups), _Side(rank_out, layout_out.index("C"), o, i, groups)


def per_channel(array: np.ndarray, side: _Side) -> np.ndarray | None:
    """One number per channel (or one for all) if ``array`` varies along the channel axis only."""
    shape = [1] * (side.rank - array.ndim) + list(array.shape)
    varies = [axis for axis, dim in enumerate(shape) if dim != 1]
    return array.reshape(-1) if varies in ([], [side.channel_axis]) else None


def scaled_weight(weight: np.ndarray, side: _Side, scale: np.ndarray) -> np.ndarray:
    """The weights that make the operator see (or give) its channels times ``scale``."""
    if scale.size in (1, weight.shape[side.weight_axis]):
        spread = [1] * weight.ndim
        spread[side.weight_axis] = scale.size
        return weight * scale.reshape(spread)
    # the axis holds the channels of one group; which group is told by the other axis
    view = np.moveaxis(weight, (side.other_axis, side.weight_axis), (0, 1))
    grouped = view.reshape(side.groups, -1, *view.shape[1:])
    spread = [side.groups, 1, view.shape[1]] + [1] * (view.ndim - 2)
    result = (grouped * scale.reshape(spread)).reshape(view.shape)
    return np.moveaxis(result, (0, 1), (side.other_axis, side.weight_axis))


def _with_scale(
    call: relax.Call, data: relax.Expr, weight: np.ndarray, side: _Side, scale: np.ndarray
) -> relax.Call | None:
    """The operator on ``data`` with scaled weights, unless 16 bits hold the weights and not their multiples."""
    depthwise = 1 in (weight.shape[side.weight_axis], weight.shape[side.other_axis])
    if not depthwise and (np.frexp(scale)[0] % 0.5).any() and is_narrow(weight):
        return None
    args = [data, constant(scaled_weight(weight, side, scale), dtype_of(call.args[1])), *call.args[2:]]
    return relax.Call(call.op, args, call.attrs, call.ty_args)


def scale_after(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv(x, W) * s --> conv(x, W * s)``."""
    outer = constant_side(call)
    linear = scope.call(outer[0], *LINEAR) if outer is not None else None
    if outer is None or linear is None or not scope.once(outer[0]):
        return None
    weight, sides = array_of(linear.args[1]), _sides(linear)
    scale = per_channel(outer[1], sides[1]) if sides is not None else None
    if weight is None or sides is None or scale is None:
        return None
    return _with_scale(linear, linear.args[0], weight, sides[1], scale)


def scale_before(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv(x * s, W) --> conv(x, W * s)``."""
    weight, sides = array_of(call.args[1]), _sides(call)
    product = scope.call(call.args[0], "multiply")
    side = constant_side(product) if product is not None else None
    if weight is None or sides is None or side is None or not scope.once(call.args[0]):
        return None
    scale = per_channel(side[1], sides[0])
    return _with_scale(call, side[0], weight, sides[0], scale) if scale is not None else None


RULES: Rules = {
    "relax.add": (_gather("add", np.add), _gather_past("add", np.add), added_to_difference),
    "relax.subtract": (subtracted,),
    "relax.multiply": (
        scale_after, _gather("multiply", np.multiply), _gather_past("multiply", np.multiply), scale_before_shift,
    ),
    "relax.divide": (divided_by_multiple,),
    **{f"relax.{name}": (scale_before,) for name in LINEAR},
}

FoldAffine = rewrite_pass("FoldAffine", RULES)
