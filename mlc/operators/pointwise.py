"""Operators that work element by element: arithmetic of two tensors, functions of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from mlc.operators.index import Poly, as_poly, equal
from mlc.operators.laws import Laws
from mlc.operators.operator import operator
from mlc.operators.relax import Relax
from mlc.operators.scalar import Add, Call, Const, Mul, Reciprocal, Scalar
from mlc.operators.tensor import Requirements, ShapeError, Tensor, text

__all__ = ["function", "negated", "pointwise"]


def pointwise(name: str, scalar: Callable[..., Scalar], *, arity: int = 1, relax: str = "", **traits: Any) -> None:
    """Enter an operator of which an element is ``scalar`` of the elements of its inputs. ``relax`` is its name in
    Relax, empty for none; further ``traits`` are those of :class:`~mlc.operators.Operator`."""
    define = _function(scalar) if arity == 1 else _combination(name, scalar)
    called = Relax(relax) if relax else None
    operator(name, arity, scalar=scalar, pointwise=True, relax=called, **traits)(define)


def function(name: str, real: Callable[[Any], Any], laws: Laws, **traits: Any) -> None:
    """Enter a function of the reals that is not polynomial: ``real`` are its values in float64."""
    def value(number: Any, shape: Any, inputs: Any, given: Any) -> Any:
        return number.call(name, inputs[0])

    pointwise(name, lambda x: Call(name, (x,)), real=real, laws=laws, partial=bool(laws.domain), quick=value, **traits)


def _function(scalar: Callable[[Scalar], Scalar]) -> Callable[..., Tensor]:
    def define(require: Requirements, x: Tensor) -> Tensor:
        return Tensor(x.shape, lambda *indices: scalar(x[indices]))

    return define


def _combination(name: str, scalar: Callable[[Scalar, Scalar], Scalar]) -> Callable[..., Tensor]:
    def define(require: Requirements, a: Tensor, b: Tensor) -> Tensor:
        """A size that is the literal 1 broadcasts, and so does an operand of rank 0."""
        if a.rank != b.rank and a.rank and b.rank:
            raise ShapeError(f"{name} needs operands of equal rank or one of rank 0, but got {text(a)} and {text(b)}")
        left, right = a.shape or b.shape, b.shape or a.shape
        shape = []
        for m, n in zip(left, right, strict=True):
            if m != 1 and n != 1:
                require.require(equal(m, n), f"{name} needs equal sizes or ones, but got {text(a)} and {text(b)}")
            shape.append(n if m == 1 else m)

        def at(operand: Tensor, indices: tuple[Poly, ...]) -> Scalar:
            return operand[tuple(as_poly(0) if s == 1 else i for s, i in zip(operand.shape, indices, strict=False))]

        return Tensor(tuple(shape), lambda *indices: scalar(at(a, indices), at(b, indices)))

    return define


def negated(value: Scalar) -> Scalar:
    return Mul((Const(Fraction(-1)), value))


def _by(method: str) -> Callable[..., Any]:
    """Evaluation by one step of an arithmetic."""
    return lambda number, shape, inputs, given: getattr(number, method)(*inputs)


# -- two tensors

pointwise("add", lambda a, b: Add((a, b)), arity=2, relax="add", taso="ewadd", quick=_by("add"), numpy=np.add,
          commutative=True, neutral=0, tame=True)
pointwise("sub", lambda a, b: Add((a, negated(b))), arity=2, relax="subtract", quick=_by("sub"), numpy=np.subtract,
          neutral=0, tame=True)
pointwise("mul", lambda a, b: Mul((a, b)), arity=2, relax="multiply", taso="ewmul", quick=_by("mul"),
          numpy=np.multiply, commutative=True, neutral=1, tame=True)
pointwise("div", lambda a, b: Mul((a, Reciprocal(b))), arity=2, relax="divide", neutral=1, partial=True)
pointwise("maximum", lambda a, b: Call("max", (a, b)), arity=2, relax="maximum", numpy=np.maximum, commutative=True,
          idempotent=True, tame=True)
# the smaller one by the larger one, so that there is one function to have laws about
pointwise("minimum", lambda a, b: negated(Call("max", (negated(a), negated(b)))), arity=2, relax="minimum",
          numpy=np.minimum, commutative=True, idempotent=True, tame=True)


# -- functions of one element


def _sigmoid(a: Any) -> Any:
    return np.exp(-np.logaddexp(0.0, -np.asarray(a)))


_erf = np.frompyfunc(math.erf, 1, 1)

function(
    "relu", lambda a: np.maximum(a, 0.0),
    Laws("relu(x) = max(x, 0): max is monotone in each argument, at least 0 with 0, and max(max(x, 0), 0) = max(x, 0)",
         monotone=True, idempotent=True, nonnegative=True, zero=True, contracts=True),
    relax="nn.relu", taso="relu", tame=True,
)
function(
    "sigmoid", _sigmoid,
    Laws("1 / (1 + exp(-x)) is positive and grows as exp(-x) falls; the derivative, itself times 1 less itself, is at "
         "most 1/4", monotone=True, nonnegative=True, positive=True, gentle=True, at_most_one=True),
    relax="sigmoid", tame=True,
)
function(
    "tanh", np.tanh,
    Laws("sinh is odd, cosh even; the derivative 1 / cosh^2 is positive and at most 1", monotone=True, odd=True,
         zero=True, contracts=True, gentle=True, at_most_one=True),
    relax="tanh", tame=True,
)
function(
    "exp", np.exp,
    Laws("exp is positive and its own derivative, which grows: it is above its tangent x + 1 at 0",
         monotone=True, nonnegative=True, positive=True, exceeds=True),
    relax="exp",
)
function(
    "log", np.log,
    Laws("the derivative 1 / x is positive on the domain; log(x) <= x - 1, its tangent at 1",
         monotone=True, contracts=True, domain="> 0"),
    relax="log",
)
function(
    "sqrt", np.sqrt,
    Laws("the nonnegative root; the inverse of a growing function on x >= 0",
         monotone=True, nonnegative=True, domain=">= 0"),
    relax="sqrt", numpy=np.sqrt,
)
function(
    "erf", lambda a: np.asarray(_erf(a), dtype=np.float64),
    Laws("the integral from 0 of a positive even function", monotone=True, odd=True, zero=True,
         at_most_one=True),
    relax="erf", tame=True,
)
pointwise("rsqrt", lambda x: Reciprocal(Call("sqrt", (x,))), relax="rsqrt", partial=True)
pointwise("neg", negated, relax="negative", quick=_by("neg"), numpy=np.negative, involution=True,
          tame=True)
pointwise("reciprocal", Reciprocal, partial=True)
