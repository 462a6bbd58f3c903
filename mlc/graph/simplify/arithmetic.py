"""Cheaper arithmetic: no division by constants, no general power, no negation that another operator can absorb.

========================  =============================
before                    after
========================  =============================
``x - c``                 ``x + (-c)``
``x / c``                 ``x * (1 / c)``
``x ** 2``                ``x * x``
``x ** 0.75``             ``sqrt(x) * sqrt(sqrt(x))``
``x ** -1``               ``1 / x``
``1 / (1 / x)``           ``x``
``a - (-b)``              ``a + b``
``a + (-b)``              ``a - b``
``(-a) * (-b)``           ``a * b``
``a * y + b * y``         ``(a + b) * y``
========================  =============================

The factor that products of a sum share is found on either side. Only floating-point tensors are touched. A
reciprocal is taken where it is finite and not denormal; products of roots differ from the power by rounding, and at
minus infinity (not a number instead of infinity).
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant, scalar_of
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, is_constant, rewrite_pass, shape_of

__all__ = ["CheaperArithmetic"]

_MAX_EXPONENT = 4


def is_float(expr: relax.Expr) -> bool:
    return dtype_of(expr).startswith(("float", "bfloat"))


def subtract_constant(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``x - c --> x + (-c)``."""
    value, other = call.args
    array = array_of(other)
    if array is None or is_constant(value) or not is_float(call):
        return None
    return op.add(value, constant(-array, dtype_of(other)))


def divide_by_constant(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``x / c --> x * (1 / c)``."""
    value, other = call.args
    array = array_of(other)
    if array is None or not is_float(call):
        return None
    with np.errstate(all="ignore"):
        inverse = (1.0 / array.astype("float64")).astype(array.dtype)
    if not np.isfinite(inverse).all() or (np.abs(inverse) < np.finfo(array.dtype).tiny).any():
        return None
    return op.multiply(value, constant(inverse))


def power_as_product(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``x ** c`` for ``c`` a multiple of a quarter, up to 4, as products of ``x`` and its roots."""
    exponent = scalar_of(call.args[1])
    if exponent is None or not is_float(call) or not (exponent * 4).is_integer():
        return None
    if exponent == 0 or abs(exponent) > _MAX_EXPONENT:
        return None
    product, *others = _factors(call.args[0], abs(exponent), scope)
    for factor in others:
        product = scope.emit(op.multiply(product, factor))
    return product if exponent > 0 else op.divide(relax.const(1.0, dtype_of(product)), product)


def _factors(base: relax.Expr, exponent: float, scope: Scope) -> list[relax.Expr]:
    """The factors whose product is ``base ** exponent``."""
    whole, quarters = int(exponent), round((exponent % 1) * 4)
    factors = [base] * whole
    if quarters:
        root = scope.emit(op.sqrt(base))
        factors += [root] if quarters & 2 else []
        factors += [scope.emit(op.sqrt(root))] if quarters & 1 else []
    return factors


def reciprocal_twice(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``1 / (1 / x) --> x``."""
    inner = scope.call(call.args[1], "divide")
    if inner is None or shape_of(inner.args[1]) != shape_of(call):
        return None
    return inner.args[1] if scalar_of(call.args[0]) == scalar_of(inner.args[0]) == 1.0 else None


def subtract_negated(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``a - (-b) --> a + b``."""
    inner = scope.call(call.args[1], "negative")
    return op.add(call.args[0], inner.args[0]) if inner is not None else None


def add_negated(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``a + (-b) --> a - b``, and ``(-a) + b --> b - a``."""
    left, right = call.args
    for value, other in ((left, right), (right, left)):
        inner = scope.call(other, "negative")
        if inner is not None:
            return op.subtract(value, inner.args[0])
    return None


def multiply_negated(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``(-a) * (-b) --> a * b``."""
    left, right = (scope.call(arg, "negative") for arg in call.args)
    return op.multiply(left.args[0], right.args[0]) if left is not None and right is not None else None


def common_factor(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``a * y + b * y --> (a + b) * y``; differences likewise."""
    left, right = (scope.call(arg, "multiply") if scope.once(arg) else None for arg in call.args)
    if left is None or right is None or not is_float(call):
        return None
    for a, y in (tuple(left.args), tuple(reversed(left.args))):
        for b, z in (tuple(right.args), tuple(reversed(right.args))):
            if y.same_as(z) and not is_constant(y) and shape_of(a) == shape_of(b):
                return op.multiply(scope.emit(relax.Call(call.op, [a, b], call.attrs)), y)
    return None


RULES: Rules = {
    "relax.add": (add_negated, common_factor),
    "relax.subtract": (subtract_constant, subtract_negated, common_factor),
    "relax.multiply": (multiply_negated,),
    "relax.divide": (divide_by_constant, reciprocal_twice),
    "relax.power": (power_as_product,),
}

CheaperArithmetic = rewrite_pass("CheaperArithmetic", RULES)
