"""Requantisation of an integer product's result, expanded to arithmetic that scales and shifts can be folded into.

``quantize(relu(float(total) * a), s, z)``   -->   ``integer(clip(int32(round(relu(float(total) * a) * (1 / s) + z))))``

The right side is one multiply-add and a rounding to an integer once constants are folded, and comparisons of integers
that the last conversion does (where what is rounded could leave int32, they come before); a division takes as long as
sixteen multiplications. It differs from the left side by float32's rounding, before quantising, as the sum
itself differs from the model's: the result by one step at most. Other quantising stays as it is, and is bit-exact: sums
and means of integers often lie half-way between two steps, where any other rounding would show.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of
from mlc.graph.precision.affine import affine_of, spread

__all__ = ["ExpandRequantisation"]

_INTEGERS = ("uint8", "int8")
#: from where on a number is not surely an int32, rounding errors of what says so included
_INT32 = 2.0**31 * 0.999
#: operators of an epilogue that the scale of what they give moves past, or that stop nothing
_EPILOGUE = ("add", "clip", "maximum", "minimum", "multiply", "nn.relu", "permute_dims", "reshape", "subtract")


def quantise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(x) --> integer(clip(round(x * (1 / s) + z)))`` in the epilogue of a product of integers."""
    affine, dtype = affine_of(call), dtype_of(call)
    if affine is None or dtype not in _INTEGERS or not _of_product(call.args[0], scope):
        return None
    rank = len(shape_of(call))
    scale = (1 / spread(affine.scale, affine.axis, rank).astype(np.float64)).astype(np.float32)
    zero = spread(affine.zero.astype(np.float32), affine.axis, rank)
    x = scope.emit(op.multiply(call.args[0], constant(scale)))
    x = scope.emit(op.add(x, constant(zero))) if zero.any() else x
    rounded = scope.emit(op.round(x))
    if _largest(x, scope) < _INT32:
        rounded = scope.emit(op.astype(rounded, "int32"))
    limits = np.iinfo(dtype)
    return op.astype(scope.emit(op.clip(rounded, float(limits.min), float(limits.max))), dtype)


def _largest(expr: relax.Expr, scope: Scope) -> float:
    """An upper bound on the magnitude of ``expr``, the epilogue of a product."""
    call = scope.call(expr, "astype", "dequantize", "nn.conv2d", "matmul", *_EPILOGUE)
    if call is None or dtype_of(expr) not in ("float32", "int32"):
        array = array_of(expr)
        return float(np.abs(array.astype(np.float64)).max(initial=0.0)) if array is not None else float("inf")
    name = str(call.op.name).removeprefix("relax.")
    if name in ("nn.conv2d", "matmul"):
        weight = shape_of(call.args[1])
        return 255.0**2 * (np.prod(weight[1:], dtype=float) if name == "nn.conv2d" else float(weight[-2]))
    if name == "dequantize":
        affine, integers = affine_of(call), array_of(call.args[0])
        if affine is None or integers is None:
            return float("inf")
        return (np.abs(integers.astype(float)).max(initial=0.0) + np.abs(affine.zero).max()) * affine.scale.max()
    first, *others = (_largest(arg, scope) for arg in call.args if isinstance(arg.ty, relax.TensorType))
    return first * math.prod(others) if name == "multiply" else first + sum(others)


def _of_product(expr: relax.Expr, scope: Scope) -> bool:
    """Whether nothing but arithmetic with constants lies between a product of integers and ``expr``."""
    while (call := scope.call(expr, "astype", *_EPILOGUE)) is not None:
        expr, *others = call.args
        if str(call.op.name) == "relax.astype":
            return dtype_of(expr) == "int32"
        if not all(_is_constant(other, scope) for other in others):
            return False
    return False


def _is_constant(expr: relax.Expr, scope: Scope) -> bool:
    """Whether the expression will be folded, as a bias that is dequantised and reshaped; numbers and shapes count."""
    call = scope.call(expr, "dequantize", "reshape", "astype")
    if call is not None:
        return all(_is_constant(arg, scope) for arg in call.args)
    return not isinstance(expr.ty, relax.TensorType) or array_of(expr) is not None


RULES: Rules = {"relax.quantize": (quantise,)}

ExpandRequantisation = rewrite_pass("ExpandRequantisation", RULES)
