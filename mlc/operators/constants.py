"""Tensors without inputs: scalar, ones, the identity matrix and the kernel of the identity convolution."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from mlc.operators.index import Condition, Poly, as_poly, at_least, divides, equal
from mlc.operators.operator import operator
from mlc.operators.scalar import Const, Scalar, Select, Size
from mlc.operators.sliding import pair
from mlc.operators.tensor import Requirements, Tensor

__all__: list[str] = []

ZERO, ONE = Const(Fraction(0)), Const(Fraction(1))


@operator("scalar", 0, {"value": None})
def scalar(require: Requirements, value: Fraction | int | Poly) -> Tensor:
    """A rational number, or a size as a number, of rank 0."""
    if isinstance(value, Poly):
        size = value
        return Tensor((), lambda: Size(size))
    number = Fraction(value)
    return Tensor((), lambda: Const(number))


def _ones(number: Any, shape: tuple[int, ...], inputs: Any, given: Any) -> Any:
    return np.ones(shape, dtype=number.dtype)


@operator("ones", 0, {"shape": None}, quick=_ones)
def ones(require: Requirements, shape: tuple[Poly | int, ...]) -> Tensor:
    sizes = tuple(map(as_poly, shape))
    for size in sizes:
        require.require(at_least(size, 1), f"ones needs sizes of at least 1, but got {size}")
    return Tensor(sizes, lambda *indices: ONE)


def _identity(number: Any, shape: tuple[int, ...], inputs: Any, given: Any) -> Any:
    return np.eye(shape[0], dtype=number.dtype)


@operator("identity_matrix", 0, {"size": None}, quick=_identity)
def identity_matrix(require: Requirements, size: Poly | int) -> Tensor:
    size = as_poly(size)
    require.require(at_least(size, 1), f"identity_matrix needs a size of at least 1, but got {size}")
    return Tensor((size, size), lambda row, column: Select((equal(row, column),), ONE, ZERO))


@operator("identity_kernel", 0, {"channels": None, "kernel": None, "groups": 1})
def identity_kernel(
    require: Requirements, channels: Poly | int, kernel: tuple[Poly | int, Poly | int], groups: Poly | int
) -> Tensor:
    """The filter whose convolution with stride 1 and padding "same" returns its input: 1 at the centre, else 0."""
    channels, groups, sizes = as_poly(channels), as_poly(groups), pair(kernel)
    require.require(divides(groups, channels), f"identity_kernel needs {groups} groups to divide {channels} channels")
    for size in (channels, groups, *sizes):
        require.require(at_least(size, 1), f"identity_kernel needs sizes of at least 1, but got {size}")
    inputs = channels // groups

    def element(o: Poly, c: Poly, row: Poly, column: Poly) -> Scalar:
        conditions: list[Condition] = [equal(o if groups == 1 else o % inputs, c)]
        for place, size in zip((row, column), sizes, strict=True):
            conditions += [equal(place, (size - 1) // 2)] if size != 1 else []
        return Select(tuple(conditions), ONE, ZERO)

    return Tensor((channels, inputs, *sizes), element)
