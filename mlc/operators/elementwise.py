"""Binary operators on equal shapes: add, sub, mul, div, maximum, minimum."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from mlc.operators.index import Poly, as_poly, equal
from mlc.operators.operator import operator
from mlc.operators.scalar import Add, Call, Const, Mul, Reciprocal, Scalar
from mlc.operators.tensor import Requirements, ShapeError, Tensor, text

__all__ = ["negated"]


def negated(value: Scalar) -> Scalar:
    return Mul((Const(Fraction(-1)), value))


def _enter(name: str, combine: Callable[[Scalar, Scalar], Scalar], *, partial: bool = False) -> None:
    @operator(name, 2, partial=partial)
    def define(require: Requirements, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise; a size that is the literal 1 broadcasts, and so does an operand of rank 0."""
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

        return Tensor(tuple(shape), lambda *indices: combine(at(a, indices), at(b, indices)))


_enter("add", lambda a, b: Add((a, b)))
_enter("sub", lambda a, b: Add((a, negated(b))))
_enter("mul", lambda a, b: Mul((a, b)))
_enter("div", lambda a, b: Mul((a, Reciprocal(b))), partial=True)
_enter("maximum", lambda a, b: Call("max", (a, b)))
# the smaller one by the larger one, so that there is one function to have laws about
_enter("minimum", lambda a, b: negated(Call("max", (negated(a), negated(b)))))
