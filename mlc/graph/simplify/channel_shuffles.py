"""Channel shuffles move past operators that treat each channel separately, so that two of them meet and merge.

A shuffle is ``reshape(permute_dims(reshape(x, [N, g, c, H, W]), [0, 2, 1, 3, 4]), [N, g * c, H, W])``.

=====================================  =====================================================
before                                 after
=====================================  =====================================================
``depthwise_conv2d(shuffle(x), W)``    ``shuffle(depthwise_conv2d(x, W'))``
``shuffle(x) + t``, ``shuffle(x) * s``  ``shuffle(x + t')``, ``shuffle(x * s')``
=====================================  =====================================================

``W'``, ``t'`` and ``s'`` are the constants with their channels in the order of ``x``. Nothing else may use what the
shuffle gives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import Rules, Scope, rewrite_pass, shape_of
from mlc.graph.simplify.affine import constant_side

__all__ = ["SinkShuffles", "shuffle_source"]


def shuffle_source(expr: relax.Expr, call: Callable[[relax.Expr, str], relax.Call | None]) -> (
    tuple[relax.Expr, int] | None
):
    """``(x, g)`` where ``expr`` is a shuffle of ``x`` with ``g`` groups; ``call(e, name)`` is the call that makes
    ``e`` if it is of the operator ``name``, else None."""
    last, shape = call(expr, "reshape"), shape_of(expr)
    swap = call(last.args[0], "permute_dims") if last is not None and len(shape) == 4 else None
    if swap is None or permutation(swap) != [0, 2, 1, 3, 4]:
        return None
    n, groups, each, *image = shape_of(swap.args[0])
    first = call(swap.args[0], "reshape")
    if first is None or (n, groups * each, *image) != shape or shape_of(first.args[0]) != shape:
        return None
    return first.args[0], groups


def _shuffled(expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, int] | None:
    """``(x, g)`` of a shuffle of ``x`` with ``g`` groups that nothing else uses."""
    return shuffle_source(expr, lambda e, name: scope.call(e, name) if scope.once(e) else None)


def _shuffle(expr: relax.Expr, groups: int, scope: Scope) -> relax.Expr:
    n, channels, *image = shape_of(expr)
    cut = scope.emit(op.reshape(expr, (n, groups, channels // groups, *image)))
    return op.reshape(scope.emit(op.permute_dims(cut, [0, 2, 1, 3, 4])), (n, channels, *image))


def _unshuffled(array: np.ndarray, axis: int, groups: int) -> np.ndarray:
    """The array whose shuffle along ``axis`` is ``array``."""
    channels = array.shape[axis]
    cut = array.reshape(*array.shape[:axis], channels // groups, groups, *array.shape[axis + 1 :])
    return np.swapaxes(cut, axis, axis + 1).reshape(array.shape)


def after_depthwise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``depthwise_conv2d(shuffle(x), W) --> shuffle(depthwise_conv2d(x, W'))``."""
    weight, attrs = array_of(call.args[1]), call.attrs
    if weight is None or str(attrs.data_layout) != "NCHW" or str(attrs.kernel_layout) != "OIHW":
        return None
    channels = shape_of(call.args[0])[1]
    if not int(attrs.groups) == channels == weight.shape[0] or str(attrs.out_layout) not in ("", "NCHW"):
        return None
    found = _shuffled(call.args[0], scope)
    if found is None:
        return None
    data, groups = found
    conv = relax.Call(call.op, [data, constant(_unshuffled(weight, 0, groups))], attrs, call.ty_args)
    return _shuffle(scope.emit(conv), groups, scope)


def _after(build: Callable[..., relax.Expr]) -> Callable[[relax.Call, Scope], relax.Expr | None]:
    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        side = constant_side(call)
        found = _shuffled(side[0], scope) if side is not None else None
        if side is None or found is None:
            return None
        (data, groups), array = found, side[1]
        shape = (1,) * (4 - array.ndim) + array.shape
        if shape[1] != 1:
            array = _unshuffled(array.reshape(shape), 1, groups)
        return _shuffle(scope.emit(build(data, constant(array))), groups, scope)

    return rule


RULES: Rules = {
    "relax.nn.conv2d": (after_depthwise,),
    "relax.add": (_after(op.add),),
    "relax.multiply": (_after(op.multiply),),
}

SinkShuffles = rewrite_pass("SinkShuffles", RULES)
