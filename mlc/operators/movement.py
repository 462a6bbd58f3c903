"""Operators that only move elements: transpose, reshape, expand, concat, slice, pad, enlarge."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from mlc.operators.index import Poly, as_poly, at_least, equal, integer, less
from mlc.operators.operator import operator
from mlc.operators.relax import Relax, Shape, Shapes, integers
from mlc.operators.scalar import Const, Scalar, Select
from mlc.operators.tensor import Requirements, ShapeError, Tensor, product, text

__all__ = ["axis_of", "padded"]

ZERO = Const(Fraction(0))


def axis_of(name: str, x: Tensor, axis: Poly | int) -> int:
    """The axis as a number from 0; negative ones count from the end."""
    value = as_poly(axis).constant
    if value is None or not -x.rank <= value < x.rank:
        raise ShapeError(f"{name} needs an axis from {-x.rank} to {x.rank - 1} for {text(x)}, but got {axis}")
    return value % x.rank


def _axes(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any]:
    """Of a ``permute_dims``; all in reverse where it names none."""
    rank = len(shape)
    axes = range(rank)[::-1] if attrs.axes is None else attrs.axes
    return {"perm": tuple(int(axis) % rank for axis in axes)}


@operator(
    "transpose", 1, {"perm": None}, movement=True,
    relax=Relax("permute_dims", _axes, lambda given, *_: {"axes": list(given["perm"])}),
    quick=lambda number, shape, inputs, given: inputs[0].transpose(given["perm"]),
)
def transpose(require: Requirements, x: Tensor, perm: tuple[int, ...]) -> Tensor:
    """Axis ``i`` of the result is axis ``perm[i]`` of ``x``."""
    if sorted(perm) != list(range(x.rank)):
        raise ShapeError(f"transpose needs a permutation of the {x.rank} axes of {text(x)}, but got {tuple(perm)}")

    def element(*indices: Poly) -> Scalar:
        places = [as_poly(0)] * x.rank
        for index, axis in zip(indices, perm, strict=True):
            places[axis] = index
        return x[tuple(places)]

    return Tensor(tuple(x.shape[axis] for axis in perm), element)


def _same_shape(given: Any, shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"shape": shape}


@operator(
    "reshape", 1, {"shape": None}, movement=True,
    relax=Relax("reshape", _same_shape, _same_shape),
    quick=lambda number, shape, inputs, given: inputs[0].reshape(shape),
)
def reshape(require: Requirements, x: Tensor, shape: tuple[Poly | int, ...]) -> Tensor:
    """The elements in row-major order under another shape."""
    sizes = tuple(map(as_poly, shape))
    for size in sizes:
        require.require(at_least(size, 1), f"reshape needs sizes of at least 1, but got {size}")
    require.require(
        equal(product(x.shape), product(sizes)),
        f"reshape keeps the number of elements, but {text(x)} has {product(x.shape)} and {text(sizes)} has "
        f"{product(sizes)}",
    )
    # for elements alone: shapes are asked for far more often
    blocks = cache(lambda: _blocks(x.shape, sizes))

    def element(*indices: Poly) -> Scalar:
        places: list[Poly] = []
        for old, new in blocks():
            places += _unravel(_ravel(indices[new], sizes[new]), x.shape[old])
        return x[tuple(places)]

    return Tensor(sizes, element)


def _blocks(old: Sequence[Poly], new: Sequence[Poly]) -> list[tuple[slice, slice]]:
    """Runs of axes with equal numbers of elements, as short as can be told, in order."""
    found: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        ends = sorted(((a, b) for a in range(i, len(old) + 1) for b in range(j, len(new) + 1)), key=sum)
        end = next((e for e in ends if sum(e) > i + j and product(old[i : e[0]]) == product(new[j : e[1]])), None)
        a, b = end or (len(old), len(new))
        found.append((slice(i, a), slice(j, b)))
        i, j = a, b
    return found


def _ravel(indices: Sequence[Poly], sizes: Sequence[Poly]) -> Poly:
    flat = as_poly(0)
    for index, size in zip(indices, sizes, strict=True):
        flat = flat * size + index
    return flat


def _unravel(flat: Poly, sizes: Sequence[Poly]) -> list[Poly]:
    """The indices of element number ``flat``; the first needs no remainder, since ``flat`` is in range."""
    places: list[Poly] = []
    inner = as_poly(1)
    for place, size in reversed(list(enumerate(sizes))):
        quotient = flat // inner
        outermost = product(sizes[:place]) == 1
        places.insert(0, as_poly(0) if size == 1 else quotient if outermost else quotient % size)
        inner = inner * size
    return places


def _same_rank(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    return {"shape": shape} if len(shapes[0]) == len(shape) else None


@operator(
    "expand", 1, {"shape": None}, movement=True,
    relax=Relax("broadcast_to", _same_rank, _same_shape),
    quick=lambda number, shape, inputs, given: np.broadcast_to(inputs[0], shape),
)
def expand(require: Requirements, x: Tensor, shape: tuple[Poly | int, ...]) -> Tensor:
    """The elements repeated along axes of which ``x`` has one; its size there is the literal 1."""
    sizes = tuple(map(as_poly, shape))
    if len(sizes) != x.rank:
        raise ShapeError(f"expand needs one size for each axis of {text(x)}, but got {text(sizes)}")
    for old, new in zip(x.shape, sizes, strict=True):
        needed = at_least(new, 1) if old == 1 else equal(old, new)
        require.require(needed, f"expand needs the sizes of {text(x)} where they are not 1, but got {text(sizes)}")

    def element(*indices: Poly) -> Scalar:
        return x[tuple(as_poly(0) if old == 1 else i for old, i in zip(x.shape, indices, strict=True))]

    return Tensor(sizes, element)


@operator(
    "concat", 2, {"axis": None}, movement=True, relax=Relax("concat", write=lambda given, *_: {"axis": given["axis"]}),
    quick=lambda number, shape, inputs, given: np.concatenate(inputs, given["axis"]),
)
def concat(require: Requirements, a: Tensor, b: Tensor, axis: int) -> Tensor:
    """``a``, then ``b``, along an axis; the other sizes are equal."""
    if a.rank != b.rank:
        raise ShapeError(f"concat needs operands of equal rank, but got {text(a)} and {text(b)}")
    axis = axis_of("concat", a, axis)
    for place, (left, right) in enumerate(zip(a.shape, b.shape, strict=True)):
        if place != axis:
            require.require(
                equal(left, right), f"concat on axis {axis} needs equal other sizes, but got {text(a)} and {text(b)}"
            )

    def element(*indices: Poly) -> Scalar:
        behind = (*indices[:axis], indices[axis] - a.shape[axis], *indices[axis + 1 :])
        return Select((less(indices[axis], a.shape[axis]),), a[indices], b[behind])

    return Tensor((*a.shape[:axis], a.shape[axis] + b.shape[axis], *a.shape[axis + 1 :]), element)


def _cut(number: Any, shape: Shape, inputs: Any, given: Any) -> Any:
    where = [slice(None)] * inputs[0].ndim
    where[given["axis"]] = slice(integer(given["begin"]), integer(given["end"]))
    return inputs[0][tuple(where)]


def _bounds(given: Any, shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"axes": [given["axis"]], "begin": [given["begin"]], "end": [given["end"]]}


@operator(
    "slice", 1, {"axis": None, "begin": None, "end": None}, movement=True,
    relax=Relax("strided_slice", write=_bounds), quick=_cut,
)
def slice_(require: Requirements, x: Tensor, axis: int, begin: Poly | int, end: Poly | int) -> Tensor:
    """The elements from ``begin`` to before ``end`` along an axis, at least one."""
    axis = axis_of("slice", x, axis)
    begin, end = as_poly(begin), as_poly(end)
    sentence = f"slice needs 0 <= begin < end <= {x.shape[axis]}, but got {begin} and {end}"
    require.require(at_least(begin, 0), sentence)
    require.require(less(begin, end), sentence)
    require.require(at_least(x.shape[axis], end), sentence)

    def element(*indices: Poly) -> Scalar:
        return x[(*indices[:axis], indices[axis] + begin, *indices[axis + 1 :])]

    return Tensor((*x.shape[:axis], end - begin, *x.shape[axis + 1 :]), element)


def padded(x: Any, before: Sequence[int], shape: Shape, fill: Any = 0) -> Any:
    """An array of ``shape`` with ``x`` behind the given numbers of elements of each axis, and ``fill`` around it."""
    found = np.full(shape, fill, dtype=x.dtype)
    found[tuple(slice(low, low + size) for low, size in zip(before, x.shape, strict=True))] = x
    return found


def _widths(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    widths = integers(attrs.pad_width)
    if str(attrs.pad_mode) != "constant" or float(attrs.pad_value) != 0.0 or min(widths) < 0:
        return None
    return {"before": widths[::2], "after": widths[1::2]}


@operator(
    "pad", 1, {"before": None, "after": None}, movement=True,
    relax=Relax("nn.pad", _widths, lambda given, *_: {
        "pad_width": [width for both in zip(given["before"], given["after"], strict=True) for width in both]
    }),
    quick=lambda number, shape, inputs, given: padded(inputs[0], list(map(integer, given["before"])), shape),
)
def pad(require: Requirements, x: Tensor, before: tuple[Poly | int, ...], after: tuple[Poly | int, ...]) -> Tensor:
    """Zeros before and after the elements of every axis."""
    if len(before) != x.rank or len(after) != x.rank:
        raise ShapeError(f"pad needs one size for each axis of {text(x)}, but got {before} and {after}")
    sides = [(as_poly(low), as_poly(high)) for low, high in zip(before, after, strict=True)]
    for side in (size for both in sides for size in both):
        require.require(at_least(side, 0), f"pad needs sizes of at least 0, but got {side}")

    def element(*indices: Poly) -> Scalar:
        places = tuple(index - low for index, (low, _) in zip(indices, sides, strict=True))
        conditions = []
        for place, size, (low, high) in zip(places, x.shape, sides, strict=True):
            conditions += [at_least(place, 0)] if low != 0 else []
            conditions += [less(place, size)] if high != 0 else []
        return Select(tuple(conditions), x[places], ZERO) if conditions else x[places]

    return Tensor(tuple(size + low + high for size, (low, high) in zip(x.shape, sides, strict=True)), element)


def _centred(number: Any, shape: Shape, inputs: Any, given: Any) -> Any:
    (w,) = inputs
    return padded(w, [(large - 1) // 2 - (small - 1) // 2 for large, small in zip(shape, w.shape, strict=True)], shape)


@operator("enlarge", 1, {"kernel": None}, movement=True, quick=_centred)
def enlarge(require: Requirements, w: Tensor, kernel: tuple[Poly | int, Poly | int]) -> Tensor:
    """A filter ``[o, c, r, s]`` with zeros around it, so that its centre stays the centre under padding "same"."""
    if w.rank != 4:
        raise ShapeError(f"enlarge takes a filter of rank 4, but got {text(w)}")
    before, after = [as_poly(0)] * 2, [as_poly(0)] * 2
    for large, small in zip(map(as_poly, kernel), w.shape[2:], strict=True):
        require.require(
            at_least(large, small), f"enlarge needs a kernel of at least {text(w.shape[2:])}, but got {tuple(kernel)}"
        )
        low = (large - 1) // 2 - (small - 1) // 2
        before.append(low)
        after.append(large - small - low)
    return pad(require, w, tuple(before), tuple(after))
