"""Recognises layer normalisation in the form that exporters write, including the scale and shift after it.

Before::

    d = x - R.mean(x, axis=-1, keepdims=True)
    y = d / R.sqrt(R.mean(d * d, axis=-1, keepdims=True) + epsilon) * gamma + beta

After: ``R.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=epsilon)``. ``d * d`` may be a power, its mean
``R.variance(x)``, the division a product with a reciprocal root, and the axes any trailing ones.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant, scalar_of
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of

__all__ = ["RecogniseLayerNorm"]


def _trailing(name: str, expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, int] | None:
    """``(x, k)`` of a mean or variance over the last ``k`` axes that keeps them."""
    mean = scope.call(expr, name)
    if mean is None or not bool(mean.attrs.keepdims) or mean.attrs.axis is None:
        return None
    rank = len(shape_of(mean.args[0]))
    axes = sorted(int(a) % rank for a in mean.attrs.axis)
    return (mean.args[0], len(axes)) if axes == list(range(rank - len(axes), rank)) else None


def _centred(expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, int] | None:
    """``(x, k)`` of ``x - mean(x)``."""
    difference = scope.call(expr, "subtract")
    mean = _trailing("mean", difference.args[1], scope) if difference is not None else None
    if difference is None or mean is None or not mean[0].same_as(difference.args[0]):
        return None
    return mean


def _squared(expr: relax.Expr, scope: Scope) -> relax.Expr | None:
    """The ``d`` of ``d * d``, ``d ** 2`` or ``square(d)``."""
    call = scope.call(expr, "square")
    if call is not None:
        return call.args[0]
    call = scope.call(expr, "power")
    if call is not None:
        return call.args[0] if scalar_of(call.args[1]) == 2.0 else None
    call = scope.call(expr, "multiply")
    return call.args[0] if call is not None and call.args[0].same_as(call.args[1]) else None


def _variance(expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, int] | None:
    """``(x, k)`` of the mean of ``(x - mean(x)) ** 2``, or of what calls itself a variance."""
    mean = _trailing("mean", expr, scope)
    if mean is None:
        return _trailing("variance", expr, scope)
    squared = _squared(mean[0], scope)
    centred = _centred(squared, scope) if squared is not None else None
    return centred if centred is not None and centred[1] == mean[1] else None


def _normalised(data: relax.Expr, total: relax.Expr, scope: Scope) -> relax.Expr | None:
    """The layer norm of ``data / sqrt(total)``, if it is one."""
    centred, added = _centred(data, scope), scope.call(total, "add")
    if centred is None or added is None:
        return None
    for part, other in (added.args, reversed(added.args)):
        epsilon, variance = scalar_of(other), _variance(part, scope)
        if epsilon is None or variance is None or variance[1] != centred[1] or not variance[0].same_as(centred[0]):
            continue
        shape = shape_of(data)[-centred[1]:]
        ones, zeros = (constant(make(shape, dtype_of(data))) for make in (np.ones, np.zeros))
        return op.nn.layer_norm(centred[0], ones, zeros, axes=list(range(-centred[1], 0)), epsilon=epsilon)
    return None


def divided(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``(x - mean) / sqrt(variance + epsilon)``."""
    root = scope.call(call.args[1], "sqrt")
    return _normalised(call.args[0], root.args[0], scope) if root is not None else None


def multiplied(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``(x - mean) * (1 / sqrt(variance + epsilon))``."""
    for data, factor in (call.args, reversed(call.args)):
        root = scope.call(factor, "rsqrt")
        inverse = scope.call(factor, "divide")
        if root is None and inverse is not None and scalar_of(inverse.args[0]) == 1.0:
            root = scope.call(inverse.args[1], "sqrt")
        result = _normalised(data, root.args[0], scope) if root is not None else None
        if result is not None:
            return result
    return None


def _affine(call: relax.Call, scope: Scope) -> tuple[relax.Call, np.ndarray] | None:
    """The layer norm that ``call`` changes by a constant of the normalised axes, and that constant."""
    for data, other in (call.args, reversed(call.args)):
        norm, array = scope.call(data, "nn.layer_norm"), array_of(other)
        if norm is None or array is None or not scope.once(data):
            continue
        shape = shape_of(norm.args[1])
        while array.ndim > len(shape) and array.shape[0] == 1:
            array = array[0]
        constants = all(array_of(parameter) is not None for parameter in norm.args[1:])
        if constants and array.ndim <= len(shape) and np.broadcast_shapes(array.shape, shape) == shape:
            return norm, array
    return None


def scaled(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``layer_norm(x, g, b) * s --> layer_norm(x, g * s, b * s)``."""
    found = _affine(call, scope)
    return _with_parameters(*found, scale=True) if found is not None else None


def shifted(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``layer_norm(x, g, b) + t --> layer_norm(x, g, b + t)``."""
    found = _affine(call, scope)
    return _with_parameters(*found, scale=False) if found is not None else None


def _with_parameters(norm: relax.Call, array: np.ndarray, scale: bool) -> relax.Call:
    gamma, beta = (np.asarray(array_of(parameter)) for parameter in norm.args[1:])
    new = (gamma * array, beta * array) if scale else (gamma, beta + array)
    args = [norm.args[0], *(constant(a, dtype_of(norm)) for a in new)]
    return relax.Call(norm.op, args, norm.attrs, norm.ty_args)


RULES: Rules = {
    "relax.divide": (divided,),
    "relax.multiply": (multiplied, scaled),
    "relax.add": (shifted,),
}

RecogniseLayerNorm = rewrite_pass("RecogniseLayerNorm", RULES)
