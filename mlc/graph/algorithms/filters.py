"""Weights of 3x3 convolutions for Winograd's algorithm: its matrices, and the transform of a weight.

No compiler is needed for it, so that a file may hold the filters as the model has them, and who loads it transforms
them. So they are added and multiplied in one order, whatever the machine: what is made of a weight is the same to the
bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

__all__ = ["BLOCK", "FILTER", "TRANSFORMED", "Filters", "Transforms", "transform_weight", "transforms"]

#: the filter size
FILTER = 3
#: channels of a block
BLOCK = 16

#: Finite interpolation points of ``F(m, 3)``; one more lies at infinity. Points in pairs of opposite sign make rows
#: that share their even and odd parts. The error of 3/4 and 3/2 is a quarter of that of the usual 1 and 2, and below
#: that of every pair tried.
_POINTS = {2: (Fraction(0), Fraction(1), Fraction(-1)),
           4: (Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2))}

#: side of an output tile by the name of the algorithm
TRANSFORMED = {f"winograd_{m}x{m}": m for m in _POINTS}


@dataclass(frozen=True)
class Transforms:
    """``y = output @ ((filter @ g) * (input @ d))`` for ``m`` outputs of the correlation of ``d`` with ``g``.

    Shapes: ``input`` [m+2, m+2], ``filter`` [m+2, 3], ``output`` [m, m+2]; exact rationals.
    """

    input: tuple[tuple[Fraction, ...], ...]
    filter: tuple[tuple[Fraction, ...], ...]
    output: tuple[tuple[Fraction, ...], ...]


@lru_cache(maxsize=8)
def transforms(m: int, points: tuple[Fraction, ...] | None = None) -> Transforms:
    """The three matrices of ``F(m, 3)``, by Toom-Cook interpolation at ``points``, or those that round least."""
    points = _POINTS[m] if points is None else points
    size = m + FILTER - 1

    def product(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """Coefficients of the polynomial with these roots, the constant first."""
        coefficients = [Fraction(1)]
        for root in roots:
            coefficients = [s - root * c for s, c in zip([Fraction(0), *coefficients], [*coefficients, Fraction(0)],
                                                         strict=True)]
        return tuple(coefficients)

    rows_in, rows_filter = [], []
    for i, point in enumerate(points):
        others = points[:i] + points[i + 1 :]
        weight = math.prod(point - other for other in others)
        rows_in.append((*product(others), Fraction(0)))
        rows_filter.append(tuple(point**k / weight for k in range(FILTER)))
    rows_in.append(product(points))
    rows_filter.append((Fraction(0),) * (FILTER - 1) + (Fraction(1),))
    rows_out = tuple(
        (*(point**k for point in points), Fraction(int(k == m - 1))) for k in range(m)
    )
    assert len(rows_in) == size
    return Transforms(tuple(rows_in), tuple(rows_filter), rows_out)


@dataclass(frozen=True, eq=False)
class Filters:
    """A weight ``[O, I, 3, 3]`` as the model has it, float32 with whole blocks of channels, and the name in
    :data:`TRANSFORMED` of what it is transformed for."""

    weight: np.ndarray
    algorithm: str


def transform_weight(weight: np.ndarray, m: int, out: np.ndarray | None = None) -> np.ndarray:
    """``[O, I, 3, 3] -> [(m+2)^2 * O/16, I, 16]``, computed in float64; both channel counts padded to blocks.

    ``out`` is where the float32 result goes, contiguous and of its size; left out, memory of its own.
    """
    rows = [[float(value) for value in row] for row in transforms(m).filter]
    weight = np.pad(weight, [*((0, -channels % BLOCK) for channels in weight.shape[:2]), (0, 0), (0, 0)])
    blocks, depth = weight.shape[0] // BLOCK, weight.shape[1]
    shape = (len(rows), len(rows), blocks, depth, BLOCK)
    result = np.empty(shape, np.float32) if out is None else out.reshape(shape)
    for block in range(blocks):  # one at a time, since all of them in float64 are eight times the filters
        filters = weight[block * BLOCK : (block + 1) * BLOCK].transpose(2, 3, 1, 0).astype(np.float64, order="C")
        for i, row in enumerate(rows):
            columns = _combined(row, filters)
            for j, other in enumerate(rows):
                result[i, j, block] = _combined(other, columns)
    return result.reshape(-1, depth, BLOCK)


def _combined(factors: Sequence[float], arrays: Iterable[np.ndarray]) -> np.ndarray:
    """``sum(f * a)``, the first term first."""
    first, *others = [factor * array for factor, array in zip(factors, arrays, strict=True) if factor]
    for term in others:
        first += term
    return first
