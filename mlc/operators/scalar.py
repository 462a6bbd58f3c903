"""What one element of a tensor is: an expression over elements of other tensors.

The language of specifications. It is over the reals (rounding is not modelled); a function that is not polynomial is a
:class:`Call` of a name, about which only the laws of :mod:`mlc.operators.laws` are known. An expression is defined
where all is that it evaluates: every :class:`Reciprocal` of what is not 0, every call of what is in the function's
domain, every element that is read. Nothing makes up for a part that is not: ``0 * (1/x)`` is not defined where ``x``
is 0. A :class:`Select` evaluates what it selects alone, and an index that data give has to lie in its axis
(:class:`Within`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from mlc.operators.index import Condition, Poly

__all__ = ["Add", "Call", "Const", "Max", "Mul", "Read", "Reciprocal", "Scalar", "Select", "Size", "Sum", "Within"]


@dataclass(frozen=True)
class Const:
    """A rational number."""

    value: Fraction


@dataclass(frozen=True)
class Read:
    """The element of an input tensor at indices, which lie inside its shape wherever the value counts."""

    tensor: str
    indices: tuple[Poly, ...]


@dataclass(frozen=True)
class Size:
    """A size or index as a number (the divisor of a mean)."""

    poly: Poly


@dataclass(frozen=True)
class Add:
    terms: tuple[Scalar, ...]


@dataclass(frozen=True)
class Mul:
    factors: tuple[Scalar, ...]


@dataclass(frozen=True)
class Reciprocal:
    """``1 / value``; not defined where the value is 0."""

    value: Scalar


@dataclass(frozen=True)
class Select:
    """``then`` where all conditions hold, else ``otherwise``; what is not selected is not evaluated."""

    conditions: tuple[Condition, ...]
    then: Scalar
    otherwise: Scalar


@dataclass(frozen=True)
class Within:
    """``value``; not defined where ``index``, which data give, is none of 0 to ``extent`` less one."""

    index: Poly
    extent: Poly
    value: Scalar


@dataclass(frozen=True)
class Sum:
    """The sum of ``body`` over index variables from 0 to their extents less one. Variables are unique in a graph."""

    variables: tuple[tuple[str, Poly], ...]
    body: Scalar


@dataclass(frozen=True)
class Max:
    """The largest ``body`` over index variables, of those where ``conditions`` hold (at least one does)."""

    variables: tuple[tuple[str, Poly], ...]
    conditions: tuple[Condition, ...]
    body: Scalar


@dataclass(frozen=True)
class Call:
    """A function of the reals by name, such as ``exp``; ``relu`` and binary ``max`` among them."""

    function: str
    args: tuple[Scalar, ...]


Scalar: TypeAlias = Const | Read | Size | Add | Mul | Reciprocal | Select | Within | Sum | Max | Call
