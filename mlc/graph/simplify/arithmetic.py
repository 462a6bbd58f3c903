"""Cheaper arithmetic with constants: no division, no general power.

========================  =============================
before                    after
========================  =============================
``x - c``                 ``x + (-c)``
``x / c``                 ``x * (1 / c)``
``x ** 2``                ``x * x``
``x ** 0.75``             ``sqrt(x) * sqrt(sqrt(x))``
``x ** -1``               ``1 / x``
========================  =============================

Only floating-point tensors are touched. A reciprocal is taken where it is finite and not denormal; products of
roots differ from the power by rounding, and at minus infinity (not a number instead of infinity).
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant, scalar_of
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, is_constant, rewrite_pass

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
    """What must be multiplied to make ``base ** exponent``."""
    whole, quarters = int(exponent), round((exponent % 1) * 4)
    factors = [base] * whole
    if quarters:
        root = scope.emit(op.sqrt(base))
        factors += [root] if quarters & 2 else []
        factors += [scope.emit(op.sqrt(root))] if quarters & 1 else []
    return factors


RULES: Rules = {
    "relax.subtract": (subtract_constant,),
    "relax.divide": (divide_by_constant,),
    "relax.power": (power_as_product,),
}

CheaperArithmetic = rewrite_pass("CheaperArithmetic", RULES)
