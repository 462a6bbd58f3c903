"""Winograd convolution of 8-bit integers whose results are exact.

With whole numbers as interpolation points the input's transform is one of whole numbers, and the filter's becomes one
when each of its rows is multiplied by a number, ``s``. Both transformed operands fit 16 bits, which is what ``pmaddwd``
multiplies: the width that 8-bit operands leave idle there. The output's transform, of rows multiplied by ``L / s``,
gives ``L**2`` times the result, ``L`` being the least common multiple of all ``s``.

All sums after the products are those of whole numbers modulo ``2**32``. ``L**2`` is ``odd * 2**shift``; a product with
the inverse of ``odd`` modulo ``2**32`` takes out the one, an arithmetic shift the other. So the result is exact where
it fits ``32 - shift`` bits, which the weights of a model say (:func:`largest_sum`).

======= ============ ===== ===== ======================================================
tile    points       L     bits  largest values of the transformed input and filter
======= ============ ===== ===== ======================================================
``2x2`` 0, 1, -1     2     30    1,020 and 1,152
``4x4`` 0, +-1, +-2  24    26    25,500 and 6,272
======= ============ ===== ===== ======================================================

No model is computed in another way where it does not fit, but by the direct kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from tvm import te, tirx

from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.algorithms.filters import FILTER, Transforms, transforms
from mlc.graph.algorithms.winograd import Arithmetic, Winograd, convolved
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import BLOCK
from mlc.options import CompileOptions

__all__ = ["conv2d_winograd_integer", "integer_tile", "largest_sum", "seconds", "transform_integers"]

_POINTS = {2: (0, 1, -1), 4: (0, 1, -1, 2, -2)}
#: by the side of an output tile: additions of the transforms as of :class:`Winograd`; of the input's, half as many
#: vectors of 16-bit numbers
_PRICED = {2: Winograd(2, (1.0, 1.5), 0.0), 4: Winograd(4, (2.0, 2.8), 0.0)}
#: the largest activation
_LARGEST = 255


@lru_cache(maxsize=8)
def _matrices(m: int) -> tuple[Transforms, int]:
    """The transforms in whole numbers, and ``L``: ``L**2 * y = output @ ((filter @ g) * (input @ d))``."""
    plain = transforms(m, tuple(map(Fraction, _POINTS[m])))
    scales = [math.lcm(*(value.denominator for value in row)) for row in plain.filter]
    common = math.lcm(*scales)
    rows = tuple(tuple(value * scale for value in row) for row, scale in zip(plain.filter, scales, strict=True))
    back = tuple(tuple(value * common / scale for value, scale in zip(row, scales, strict=True))
                 for row in plain.output)
    return Transforms(plain.input, rows, back), common


def _unscaled(m: int) -> tuple[int, int]:
    """The inverse of the odd factor of ``L**2`` modulo ``2**32``, and the exponent of the other one."""
    square = _matrices(m)[1] ** 2
    shift = (square & -square).bit_length() - 1
    return pow(square >> shift, -1, 2**32), shift


def largest_sum(weight: np.ndarray) -> int:
    """The largest magnitude of a convolution of any uint8 with int8 ``[O, I, KH, KW]``."""
    wide = weight.astype(np.int64).reshape(len(weight), -1)
    return _LARGEST * int(max(np.maximum(wide, 0).sum(axis=1).max(), np.maximum(-wide, 0).sum(axis=1).max()))


def transform_integers(weight: np.ndarray, m: int) -> np.ndarray:
    """int8 ``[O, I, 3, 3]`` as int16 ``[(m+2)^2 * O/16, I/2, 16, 2]``; both channel counts padded to blocks."""
    matrix = np.array([[int(value) for value in row] for row in _matrices(m)[0].filter])
    out, inner = weight.shape[:2]
    padded = np.pad(weight.astype(np.int16), [(0, -out % BLOCK), (0, -inner % BLOCK), (0, 0), (0, 0)])
    points = np.einsum("ia,jb,ocab->ijoc", matrix, matrix, padded, optimize=True)
    points = points.reshape(len(matrix) ** 2 * (padded.shape[0] // BLOCK), BLOCK, -1, 2)
    return np.ascontiguousarray(points.transpose(0, 2, 1, 3).astype(np.int16))


def conv2d_winograd_integer(data: te.Tensor, weight: te.Tensor, m: int, pads: Sequence[int]) -> te.Tensor:
    """2-D convolution by ``F(m x m, 3 x 3)``: uint8 ``[N, C/16, H, W, 16]``, padded with zeros, with a weight of
    :func:`transform_integers` to int32 ``[N, O/16, OH, OW, 16]`` at stride 1."""
    inverse, shift = _unscaled(m)

    def finish(total: tirx.Expr) -> tirx.Expr:
        multiple = total if inverse == 1 else total * tirx.const(inverse, "uint32")
        return multiple.astype("int32") >> tirx.const(shift, "int32")

    arithmetic = Arithmetic(_matrices(m)[0], "int16", "uint32", "conv2d_winograd_integer", finish)
    return convolved(data, weight, m, pads, (1, 1), arithmetic)


def seconds(conv: Convolution, options: CompileOptions, estimate: Estimate) -> float:
    """The estimated seconds of an integer convolution with the tile that :func:`integer_tile` chooses, if its sums
    cannot overflow."""
    return min(_priced(conv, options, estimate, 0).values())


def integer_tile(conv: Convolution, options: CompileOptions, estimate: Estimate, weight: np.ndarray) -> int:
    """The side of the output tile by which a convolution of integers is fastest and exact, 0 for the direct kernel."""
    priced = _priced(conv, options, estimate, largest_sum(weight))
    return min(priced, key=lambda m: (priced[m], m))


def _priced(conv: Convolution, options: CompileOptions, estimate: Estimate, largest: int) -> dict[int, float]:
    """Seconds by the tile, 0 for none. Where dot products take bytes those of words do half as much."""
    found = {0: DIRECT.seconds(conv, estimate)}
    possible = estimate.words and max(conv.dilation) == 1
    for m, each in _PRICED.items():
        forbidden = options.forbidden & {each.name, each.family}
        if possible and not forbidden and each.fits(conv) and largest < 2 ** (31 - _unscaled(m)[1]):
            found[m] = each.seconds(conv, estimate)
    return found


assert all(len(points) == m + FILTER - 2 for m, points in _POINTS.items())
