"""Gather: rows of a tensor at indices that data give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlc.operators.index import Lookup, Poly
from mlc.operators.movement import axis_of
from mlc.operators.operator import operator
from mlc.operators.relax import Relax, Shape, Shapes
from mlc.operators.scalar import Read, Scalar, Select, Within
from mlc.operators.tensor import Requirements, ShapeError, Tensor

__all__: list[str] = []


def _read(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    """None where an index outside of the axis means an element nonetheless."""
    if attrs.axis is None or str(attrs.mode) not in ("clip", "fast"):
        return None
    return {"axis": int(attrs.axis) % len(shapes[0])}


def _write(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"axis": int(given["axis"]), "mode": "clip"}


def _taken(number: Any, shape: Shape, inputs: Any, given: Mapping[str, Any]) -> Any:
    x, indices = inputs
    places, axis = np.asarray(indices).astype(np.int64), int(given["axis"]) % x.ndim
    inside = (places >= 0) & (places < x.shape[axis])
    found = np.take(x, np.where(inside, places, 0), axis=axis)
    if inside.all():
        return found
    return np.where(inside.reshape(inside.shape + (1,) * (x.ndim - axis - 1)), found, number.undefined)


@operator("gather", 2, {"axis": 0}, movement=True, relax=Relax("take", _read, _write), quick=_taken)
def gather(require: Requirements, x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """The elements of ``x`` at ``indices`` of an axis: ``[a, n, c]`` at ``[s, t]`` of axis 1 is ``[a, s, t, c]``.

    ``indices`` are an input of integers that may be moved or gathered themselves: opaque, from 0 to n - 1. An element
    is not defined where its index is another.
    """
    axis = axis_of("gather", x, axis)

    def element(*places: Poly) -> Scalar:
        before, rest = places[:axis], places[axis:]
        at, behind = rest[:indices.rank], rest[indices.rank:]
        return _at(indices[at], lambda index: Within(index, x.shape[axis], x[(*before, index, *behind)]))

    return Tensor((*x.shape[:axis], *indices.shape, *x.shape[axis + 1:]), element)


def _at(index: Scalar, of: Callable[[Poly], Scalar]) -> Scalar:
    """``of`` an index, which is an element of an input: one or another, or one at such an index."""
    match index:
        case Read(tensor, places):
            return of(Poly.atom(Lookup(tensor, places)))
        case Select(conditions, then, otherwise):
            return Select(conditions, _at(then, of), _at(otherwise, of))
        case Within(place, extent, value):
            return Within(place, extent, _at(value, of))
    raise ShapeError("gather takes indices that are those of an input, moved or gathered, and computes none")
