"""Symbolic tensors: a shape and, for every index, the expression of the element there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from operator import mul

from mlc.operators.index import Condition, Poly, as_poly
from mlc.operators.scalar import Read, Scalar

__all__ = ["Requirements", "ShapeError", "Tensor", "product", "tensor_input", "text"]


class ShapeError(ValueError):
    """Operands do not fit an operator: one line with what must hold and what came."""


@dataclass(frozen=True)
class Tensor:
    """``element(indices)`` is the value at ``indices``, one polynomial for each axis of ``shape``."""

    shape: tuple[Poly, ...]
    element: Callable[..., Scalar]

    def __getitem__(self, indices: tuple[Poly | int, ...]) -> Scalar:
        return self.element(*(as_poly(i) for i in indices))

    @property
    def rank(self) -> int:
        return len(self.shape)


def tensor_input(name: str, shape: Sequence[Poly | int]) -> Tensor:
    """A tensor whose elements are those of the input ``name``."""
    return Tensor(tuple(as_poly(s) for s in shape), lambda *indices: Read(name, tuple(indices)))


def product(sizes: Sequence[Poly]) -> Poly:
    """The number of elements of a shape."""
    return reduce(mul, sizes, as_poly(1))


def text(shape: Tensor | Sequence[Poly | int]) -> str:
    """A shape as people write it: ``[2, c, h]``."""
    return f"[{', '.join(map(str, shape.shape if isinstance(shape, Tensor) else shape))}]"


@dataclass
class Requirements:
    """Collects what an operator demands of sizes, and hands out fresh index variables.

    A demand that is a constant is decided at once: a false one raises :class:`ShapeError`. The others are kept in
    ``conditions``, each with the sentence that explains it: they are what makes a graph well-formed.
    """

    conditions: list[tuple[Condition, str]] = field(default_factory=list)
    _names: count[int] = field(default_factory=count)

    def require(self, condition: Condition, sentence: str) -> None:
        value = condition.poly.constant
        if value is None:
            self.conditions.append((condition, sentence))
        elif not (value == 0 if condition.relation == "==" else value >= 0):
            raise ShapeError(sentence)

    def variable(self) -> str:
        """The name of an index variable that nothing else uses; starts with ``$``."""
        return f"${next(self._names)}"
