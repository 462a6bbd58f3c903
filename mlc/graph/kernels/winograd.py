"""Winograd convolution: 3x3 filters at stride 1 in 2.25 or 4 times fewer multiplications.

``F(m x m, 3 x 3)`` computes a tile of ``m x m`` outputs from ``(m+2) x (m+2)`` inputs as
``A'[(G g G') * (B' d B)]A``: both operands are transformed, multiplied point by point (over the channels that is one
matrix product for each of the ``(m+2)^2`` points), and the result is transformed back. Filters are transformed when
the module is built. After Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016); the matrices
come from the interpolation points as in Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd
Convolution for Deep Neural Networks" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.blocked import pad_spatial

__all__ = ["FILTER", "TILES", "Transforms", "applicable", "conv2d_winograd", "error_bound", "transform_weight",
           "transforms"]

#: the filter size, and the output tile sizes ``m`` that are worth their rounding error in float32
FILTER = 3
TILES = (2, 4)

#: Finite interpolation points of ``F(m, 3)``; one more lies at infinity. Points in pairs of opposite sign make rows
#: that share their even and odd parts. The error of 3/4 and 3/2 is a quarter of that of the usual 1 and 2, and below
#: that of every pair tried.
_POINTS = {2: (Fraction(0), Fraction(1), Fraction(-1)),
           4: (Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2))}


@dataclass(frozen=True)
class Transforms:
    """``y = output @ ((filter @ g) * (input @ d))`` for ``m`` outputs of the correlation of ``d`` with ``g``.

    Shapes: ``input`` [m+2, m+2], ``filter`` [m+2, 3], ``output`` [m, m+2]; exact rationals.
    """

    input: tuple[tuple[Fraction, ...], ...]
    filter: tuple[tuple[Fraction, ...], ...]
    output: tuple[tuple[Fraction, ...], ...]


@lru_cache(maxsize=8)
def transforms(m: int) -> Transforms:
    """The three matrices of ``F(m, 3)``, by Toom-Cook interpolation at fixed points."""
    points = list(_POINTS[m])
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
        weight = prod(point - other for other in others)
        rows_in.append((*product(others), Fraction(0)))
        rows_filter.append(tuple(point**k / weight for k in range(FILTER)))
    rows_in.append(product(points))
    rows_filter.append((Fraction(0),) * (FILTER - 1) + (Fraction(1),))
    rows_out = tuple(
        (*(point**k for point in points), Fraction(int(k == m - 1))) for k in range(m)
    )
    assert len(rows_in) == size
    return Transforms(tuple(rows_in), tuple(rows_filter), rows_out)


def applicable(
    channels: int, filters: int, kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether a convolution can be computed this way on whole blocks of channels."""
    return (
        tuple(kernel) == (FILTER, FILTER) and tuple(strides) == tuple(dilation) == (1, 1) and groups == 1
        and channels >= 16 and filters >= 16
    )


def error_bound(m: int, channels: int) -> float:
    """Bound on ``max |error| / max |result|`` for Gaussian operands in float32, over direct summation in float64.

    Rounding grows with the condition of the transforms and the root of the length of the sum; the constants hold
    with a factor of four to spare (``tests/unit/graph/test_winograd.py``).
    """
    return {2: 4e-6, 4: 2e-5}[m] * max(1.0, (channels / 256) ** 0.5)


def transform_weight(weight: np.ndarray, m: int) -> np.ndarray:
    """``[O, I, 3, 3] -> [(m+2)^2 * O/16, I, 16]``, computed in float64; both channel counts padded to blocks of 16."""
    matrix = np.array(transforms(m).filter, dtype=np.float64)
    both = np.kron(matrix, matrix)  # of the flattened filter: [(m+2)^2, 9]
    out, inner = weight.shape[:2]
    weight = np.pad(weight, [(0, -out % 16), (0, -inner % 16), (0, 0), (0, 0)])
    blocks, depth = weight.shape[0] // 16, weight.shape[1]
    result = np.empty((len(both), blocks, depth, 16), np.float32)
    for block in range(blocks):  # one at a time, since all of them in float64 are eight times the filters
        filters = weight[block * 16 : (block + 1) * 16].reshape(16, depth, FILTER**2)
        columns = filters.transpose(2, 1, 0).reshape(FILTER**2, -1)
        result[:, block] = (both @ columns.astype(np.float64)).reshape(-1, depth, 16)
    return result.reshape(-1, depth, 16)


def _combination(coefficients: Sequence[Fraction], values: Sequence[tirx.Expr]) -> tirx.Expr:
    """``sum(c * v)`` as even part plus or minus odd part, so that rows for points of opposite sign share both."""

    def part(start: int) -> tuple[tirx.Expr | None, int]:
        terms = [(c, v) for c, v in list(zip(coefficients, values, strict=True))[start::2] if c]
        if not terms:
            return None, 1
        sign = 1 if terms[-1][0] > 0 else -1
        terms = [(c * sign, v) for c, v in terms]
        terms.sort(key=lambda term: term[0] != 1)
        total = None
        for c, v in terms:
            term = v if c == 1 else v * tirx.const(float(c), "float32")
            total = term if total is None else total + term
        return total, sign

    (even, even_sign), (odd, odd_sign) = part(0), part(1)
    if even is None or odd is None:
        value, sign = (odd, odd_sign) if even is None else (even, even_sign)
        return value if sign > 0 else tirx.const(0.0, "float32") - value
    if even_sign == odd_sign:
        total = even + odd
        return total if even_sign > 0 else tirx.const(0.0, "float32") - total
    return even - odd if even_sign > 0 else odd - even


def _row(
    index: tirx.Var, matrix: Sequence[Sequence[Fraction]], value: Callable[[int], tirx.Expr]
) -> tirx.Expr:
    """``matrix[index] @ [value(0), value(1), ...]`` where ``index`` is a loop that will be unrolled."""
    values = [value(k) for k in range(len(matrix[0]))]
    rows = [_combination(row, values) for row in matrix]
    result = rows[-1]
    for i in range(len(rows) - 2, -1, -1):
        result = tirx.Select(index == i, rows[i], result)
    return result


def conv2d_winograd(data: te.Tensor, weight: te.Tensor, m: int, pads: Sequence[int]) -> te.Tensor:
    """2-D convolution by ``F(m x m, 3 x 3)``: ``[N, C/16, H, W, 16]`` with a weight of :func:`transform_weight`.

    ``pads`` is ``(top, left, bottom, right)``; the result is ``[N, O/16, OH, OW, 16]`` at stride 1.
    """
    matrices = transforms(m)
    n, cb, h, w, c = (int(d) for d in data.shape)
    size = m + FILTER - 1
    panels, _, o = (int(d) for d in weight.shape)
    ob = panels // size**2
    top, left, bottom, right = (int(p) for p in pads)
    oh, ow = h + top + bottom - FILTER + 1, w + left + right - FILTER + 1
    th, tw = -(-oh // m), -(-ow // m)
    # the last tiles may reach past the image
    padded = pad_spatial(data, (top, left, th * m + FILTER - 1 - h - top, tw * m + FILTER - 1 - w - left))
    count = n * th * tw

    def pixel(t: tirx.Var, r: int, x: tirx.Var, b: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        ni, y, z = tirx.indexdiv(t, th * tw), tirx.indexmod(tirx.indexdiv(t, tw), th), tirx.indexmod(t, tw)
        return padded[ni, b, y * m + r, z * m + x, lane]

    columns = te.compute(
        (size, size, count, cb, c),
        lambda i, x, t, b, lane: _row(i, matrices.input, lambda r: pixel(t, r, x, b, lane)), name="columns",
    )
    points = te.compute(
        (size, size, count, cb, c),
        lambda i, j, t, b, lane: _row(j, matrices.input, lambda r: columns[i, r, t, b, lane]), name="points",
    )
    rb, rc = te.reduce_axis((0, cb), name="rb"), te.reduce_axis((0, c), name="rc")
    products = te.compute(
        (size, size, ob, count, o),
        lambda i, j, b, t, lane: te.sum(
            points[i, j, t, rb, rc] * weight[(i * size + j) * ob + b, rb * c + rc, lane], axis=[rb, rc]
        ),
        name="products", attrs={"mlc.op": "conv2d_winograd"},
    )
    rows = te.compute(
        (m, size, ob, count, o),
        lambda i, x, b, t, lane: _row(i, matrices.output, lambda r: products[r, x, b, t, lane]), name="rows",
    )
    tiles = te.compute(
        (m, m, ob, count, o),
        lambda i, j, b, t, lane: _row(j, matrices.output, lambda r: rows[i, r, b, t, lane]), name="tiles",
    )

    def output(ni: tirx.Var, b: tirx.Var, y: tirx.Var, z: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        t = (ni * th + tirx.indexdiv(y, m)) * tw + tirx.indexdiv(z, m)
        return tiles[tirx.indexmod(y, m), tirx.indexmod(z, m), b, t, lane]

    return te.compute((n, ob, oh, ow, o), output, name="conv2d_winograd")
