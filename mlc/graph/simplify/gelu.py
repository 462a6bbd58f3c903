"""Recognises the Gaussian error linear unit (GELU) in the form that exporters write.

Before, in any order of the factors and with the constants anywhere among them::

    0.5 * x * (1 + erf(x / sqrt(2)))
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))

After: ``R.nn.gelu(x)`` and ``R.nn.gelu_tanh(x)``.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import scalar_of
from mlc.graph.ir.rewrite import Rules, Scope, rewrite_pass, shape_of

__all__ = ["RecogniseGelu"]

_TOLERANCE = 1e-4  # exporters round the constants


@dataclass
class _Product:
    """``coefficient * x ** n * y ** m ...``."""

    coefficient: float = 1.0
    factors: Counter[relax.Var] = field(default_factory=Counter)


def _close(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=_TOLERANCE)


def _product(expr: relax.Expr, scope: Scope) -> _Product:
    """``expr`` taken apart at its multiplications, divisions by a number and whole powers."""
    number = scalar_of(expr)
    if number is not None:
        return _Product(number)
    product = scope.call(expr, "multiply")
    if product is not None:
        return _multiplied(product, scope)
    call = scope.call(expr, "divide", "power")
    operand = scalar_of(call.args[1]) if call is not None else None
    if call is None or not operand:
        return _Product(1.0, Counter({expr: 1}))
    base = _product(call.args[0], scope)
    if scope.call(call, "divide") is not None:
        return _Product(base.coefficient / operand, base.factors)
    if operand in (2.0, 3.0):
        factors = Counter({var: count * int(operand) for var, count in base.factors.items()})
        return _Product(base.coefficient**operand, factors)
    return _Product(1.0, Counter({expr: 1}))


def _multiplied(call: relax.Call, scope: Scope) -> _Product:
    left, right = (_product(arg, scope) for arg in call.args)
    return _Product(left.coefficient * right.coefficient, left.factors + right.factors)


def _plus_one(expr: relax.Expr, scope: Scope, function: str) -> relax.Expr | None:
    """The ``u`` of ``1 + function(u)``."""
    total = scope.call(expr, "add")
    if total is None:
        return None
    for arg, other in (total.args, reversed(total.args)):
        inner = scope.call(arg, function)
        if inner is not None and scalar_of(other) == 1.0:
            return inner.args[0]
    return None


def _is_erf_argument(expr: relax.Expr, x: relax.Var, scope: Scope) -> bool:
    product = _product(expr, scope)
    return product.factors == Counter({x: 1}) and _close(product.coefficient, math.sqrt(0.5))


def _is_tanh_argument(expr: relax.Expr, x: relax.Var, scope: Scope) -> bool:
    """Whether ``expr`` is ``k * (x + 0.044715 x^3)``, written so or multiplied out."""
    outer = _product(expr, scope)
    if len(outer.factors) != 1:
        return False
    total = scope.call(next(iter(outer.factors)), "add")
    if total is None or next(iter(outer.factors.values())) != 1:
        return False
    found = {}
    for arg in total.args:
        term = _product(arg, scope)
        found[term.factors[x] if len(term.factors) == 1 else 0] = term.coefficient * outer.coefficient
    scale = math.sqrt(2 / math.pi)
    return set(found) == {1, 3} and _close(found[1], scale) and _close(found[3], scale * 0.044715)


def recognise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A product that is a GELU."""
    product = _multiplied(call, scope)
    if not _close(product.coefficient, 0.5) or set(product.factors.values()) != {1} or len(product.factors) != 2:
        return None
    first, second = product.factors
    for x, gate in ((first, second), (second, first)):
        if shape_of(x) != shape_of(call):
            continue
        u = _plus_one(gate, scope, "erf")
        if u is not None and _is_erf_argument(u, x, scope):
            return op.nn.gelu(x)
        u = _plus_one(gate, scope, "tanh")
        if u is not None and _is_tanh_argument(u, x, scope):
            return op.nn.gelu_tanh(x)
    return None


RULES: Rules = {"relax.multiply": (recognise,)}

RecogniseGelu = rewrite_pass("RecogniseGelu", RULES)
