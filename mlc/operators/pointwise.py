"""Functions of one element: relu, sigmoid, tanh, exp, log, sqrt, rsqrt, erf, neg, reciprocal."""

from __future__ import annotations

from collections.abc import Callable

from mlc.operators.elementwise import negated
from mlc.operators.operator import operator
from mlc.operators.scalar import Call, Reciprocal, Scalar
from mlc.operators.tensor import Requirements, Tensor

__all__ = ["POINTWISE"]


def _call(function: str) -> Callable[[Scalar], Scalar]:
    return lambda value: Call(function, (value,))


#: those that are not defined everywhere
PARTIAL = ("log", "sqrt", "rsqrt", "reciprocal")
#: what each pointwise operator makes of one element
POINTWISE: dict[str, Callable[[Scalar], Scalar]] = {
    **{name: _call(name) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "erf")},
    "rsqrt": lambda value: Reciprocal(Call("sqrt", (value,))),
    "neg": negated,
    "reciprocal": Reciprocal,
}


def _enter(name: str, function: Callable[[Scalar], Scalar]) -> None:
    @operator(name, 1, partial=name in PARTIAL)
    def define(require: Requirements, x: Tensor) -> Tensor:
        return Tensor(x.shape, lambda *indices: function(x[indices]))


for _name, _function in POINTWISE.items():
    _enter(_name, _function)
