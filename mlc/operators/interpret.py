"""The reference evaluation: expressions of elements, computed over grids of indices.

Every index variable is an axis of its own, so that an expression is evaluated for all indices at once. Reads outside
of a tensor are errors unless a condition around them excludes them, as the specifications promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.operators.arithmetic import Arithmetic, Array
from mlc.operators.index import LOOKUP, Condition, Poly
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum, Within
from mlc.operators.tensor import Tensor

__all__ = ["elementwise", "interpret"]


def interpret(
    tensor: Tensor, inputs: Mapping[str, Array], arithmetic: Arithmetic, sizes: Mapping[str, int] | None = None
) -> Array:
    """All elements of ``tensor``, whose inputs have the values ``inputs`` and whose size symbols those of ``sizes``."""
    values: dict[str, Any] = dict(sizes or {})
    shape = tuple(int(size.evaluate(values)) for size in tensor.shape)
    indices = []
    for axis, extent in enumerate(shape):
        values[f"#{axis}"] = np.arange(extent).reshape(-1, *(1,) * (len(shape) - axis - 1))
        indices.append(Poly.symbol(f"#{axis}"))
    grid = _Grid(inputs, arithmetic, values, len(shape))
    values[LOOKUP] = grid.looked_up
    found = grid.value(tensor.element(*indices), np.array(True))
    return np.broadcast_to(found, shape).astype(arithmetic.dtype)


def elementwise(scalar: Callable[..., Scalar], inputs: Sequence[Array], arithmetic: Arithmetic) -> Any:
    """What ``scalar`` makes of one element of each input, for all elements; inputs broadcast as numpy's do."""
    names = [f"in{place}" for place in range(len(inputs))]
    whole = _Whole(dict(zip(names, inputs, strict=True)), arithmetic, {})
    return whole.value(scalar(*(Read(name, ()) for name in names)), np.array(True))


@dataclass
class _Grid:
    """``values`` are arrays of indices; ``rank`` axes are in use, and a further variable takes an axis before them."""

    inputs: Mapping[str, Array]
    arithmetic: Arithmetic
    values: dict[str, Any]
    rank: int = 0

    def value(self, scalar: Scalar, live: Array) -> Any:
        """The values of an expression where ``live``; anything elsewhere."""
        number = self.arithmetic
        match scalar:
            case Const(value):
                return number.constant(value)
            case Size(poly):
                return number.integers(np.asarray(poly.evaluate(self.values)))
            case Read(tensor, indices):
                return self._read(self.inputs[tensor], indices, live)
            case Add(terms):
                return self._fold(number.add, terms, live)
            case Mul(factors):
                return self._fold(number.mul, factors, live)
            case Reciprocal(value):
                return number.reciprocal(self.value(value, live))
            case Call("max", args):
                return self._fold(number.maximum, args, live)
            case Call(function, (argument,)):
                return number.call(function, self.value(argument, live))
            case Select(conditions, then, otherwise):
                chosen = self._hold(conditions)
                return np.where(chosen, self.value(then, live & chosen), self.value(otherwise, live & ~chosen))
            case Within(index, extent, value):
                place = np.asarray(index.evaluate(self.values))
                inside = (place >= 0) & (place < extent.evaluate(self.values))
                return np.where(inside, self.value(value, live & inside), number.undefined)
            case Sum(variables, body):
                return number.total(self._over(variables, (), body, live), tuple(range(len(variables))))
            case Max(variables, conditions, body):
                return number.largest(self._over(variables, conditions, body, live), tuple(range(len(variables))))
        raise TypeError(f"{scalar} is no expression")

    def _fold(self, combine: Any, parts: tuple[Scalar, ...], live: Array) -> Any:
        total = self.value(parts[0], live)
        for part in parts[1:]:
            total = combine(total, self.value(part, live))
        return total

    def _hold(self, conditions: tuple[Condition, ...]) -> Array:
        held = np.array(True)
        for condition in conditions:
            held = held & condition.evaluate(self.values)
        return held

    def _read(self, array: Array, indices: tuple[Poly, ...], live: Array) -> Any:
        places = []
        for index, extent in zip(indices, array.shape, strict=True):
            place = np.asarray(index.evaluate(self.values))
            if np.any(live & ((place < 0) | (place >= extent))):
                raise IndexError(f"the index {index} leaves an axis of {extent} elements")
            places.append(np.clip(place, 0, extent - 1))
        return array[tuple(places)]

    def looked_up(self, tensor: str, indices: Sequence[Any]) -> Array:
        """Elements of a tensor of integers; any where the indices leave it."""
        array = self.inputs[tensor]
        places = (np.clip(index, 0, extent - 1) for index, extent in zip(indices, array.shape, strict=True))
        return np.asarray(array[tuple(places)]).astype(np.int64)

    def _over(
        self, variables: tuple[tuple[str, Poly], ...], conditions: tuple[Condition, ...], body: Scalar, live: Array
    ) -> Array:
        """The body with one new leading axis for every variable; what the conditions exclude is the lowest number."""
        extents = [int(extent.evaluate(self.values)) for _, extent in variables]
        inner = _Grid(self.inputs, self.arithmetic, dict(self.values), self.rank + len(variables))
        for place, ((name, _), extent) in enumerate(zip(variables, extents, strict=True)):
            inner.values[name] = np.arange(extent).reshape(-1, *(1,) * (inner.rank - place - 1))
        chosen = inner._hold(conditions)
        found = inner.value(body, live & chosen)
        if conditions:
            found = np.where(chosen, found, self.arithmetic.lowest)
        shape = np.broadcast_shapes(np.shape(found), (*extents, *(1,) * self.rank))
        return np.broadcast_to(found, shape)


class _Whole(_Grid):
    """Reads whole arrays at once."""

    def _read(self, array: Array, indices: tuple[Poly, ...], live: Array) -> Any:
        return array
