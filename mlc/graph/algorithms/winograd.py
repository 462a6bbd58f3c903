"""Winograd convolution: 3x3 filters at stride 1, dilated or not, in 2.25 or 4 times fewer multiplications.

``F(m x m, 3 x 3)`` computes a tile of ``m x m`` outputs from ``(m+2) x (m+2)`` inputs as
``A'[(G g G') * (B' d B)]A``: both operands are transformed, multiplied point by point (over the channels that is one
matrix product for each of the ``(m+2)^2`` points), and the result is transformed back. Filters are transformed when
the module is built. A dilated filter reads every ``d``-th row and column: it is a plain filter on each of the ``d * d``
images of such rows and columns. Tiles are taken from where these lie; the result is moved to where it belongs.

After Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016); the matrices come from the
interpolation points as in Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep
Neural Networks" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from tvm import te, tirx

from mlc.graph.algorithms.filters import BLOCK, FILTER, Transforms, transform_weight, transforms
from mlc.graph.algorithms.registry import Algorithm
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.kernels.blocked import pad_spatial, windows
from schedules.cpu.winograd import DILATED, SINGLE

__all__ = ["ALGORITHMS", "Winograd", "conv2d_winograd", "convolved"]

#: parts of the peak that the products of the points reach, and the transforms: these have no multiply-adds, and every
#: value is loaded and stored
_MULTIPLYING, _ADDING = 0.8, 0.1


@dataclass(frozen=True)
class Arithmetic:
    """What a convolution by transforms computes in: the types of the transformed input and of the transformed result,
    ``"mlc.op"`` of the products, and what makes the result of what is transformed back.

    The products are of the type of ``result`` or, where that is unsigned, of signed integers of its size, which wrap.
    """

    transforms: Transforms
    inner: str
    result: str
    op: str
    finish: Callable[[tirx.Expr], tirx.Expr]


def _constant(value: Fraction, dtype: str) -> tirx.Expr:
    if dtype.startswith("uint"):
        return tirx.const(int(value) % 2 ** int(dtype[4:]), dtype)
    return tirx.const(float(value) if dtype.startswith("float") else int(value), dtype)


def _combination(coefficients: Sequence[Fraction], values: Sequence[tirx.Expr], dtype: str) -> tirx.Expr:
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
            term = v if c == 1 else v * _constant(c, dtype)
            total = term if total is None else total + term
        return total, sign

    (even, even_sign), (odd, odd_sign) = part(0), part(1)
    if even is None or odd is None:
        value, sign = (odd, odd_sign) if even is None else (even, even_sign)
        return value if sign > 0 else _constant(Fraction(0), dtype) - value
    if even_sign == odd_sign:
        total = even + odd
        return total if even_sign > 0 else _constant(Fraction(0), dtype) - total
    return even - odd if even_sign > 0 else odd - even


def _row(
    index: tirx.Var, matrix: Sequence[Sequence[Fraction]], dtype: str, value: Callable[[int], tirx.Expr]
) -> tirx.Expr:
    """``matrix[index] @ [value(0), value(1), ...]`` where ``index`` is a loop that will be unrolled."""
    values = [value(k) for k in range(len(matrix[0]))]
    rows = [_combination(row, values, dtype) for row in matrix]
    result = rows[-1]
    for i in range(len(rows) - 2, -1, -1):
        result = tirx.Select(index == i, rows[i], result)
    return result


def conv2d_winograd(
    data: te.Tensor, weight: te.Tensor, m: int, pads: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> te.Tensor:
    """2-D convolution by ``F(m x m, 3 x 3)``: ``[N, C/16, H, W, 16]`` with a weight of :func:`transform_weight`.

    ``pads`` is ``(top, left, bottom, right)``; the result is ``[N, O/16, OH, OW, 16]`` at stride 1.
    """
    arithmetic = Arithmetic(transforms(m), "float32", "float32", "conv2d_winograd", lambda value: value)
    return convolved(data, weight, m, pads, dilation, arithmetic)


def convolved(
    data: te.Tensor, weight: te.Tensor, m: int, pads: Sequence[int], dilation: Sequence[int], arithmetic: Arithmetic
) -> te.Tensor:
    """:func:`conv2d_winograd` in any ``arithmetic``; of integers, weights are ``[(m+2)^2 * O/16, I/2, 16, 2]``."""
    matrices, inner, result = arithmetic.transforms, arithmetic.inner, arithmetic.result
    n, *fixed = data.shape
    cb, h, w, c = map(int, fixed)
    size = m + FILTER - 1
    panels, o = int(weight.shape[0]), int(weight.shape[2])
    ob = panels // size**2
    top, left, bottom, right = (int(p) for p in pads)
    dy, dx = map(int, dilation)
    oh, ow = windows(h + top + bottom, FILTER, 1, dy), windows(w + left + right, FILTER, 1, dx)
    th, tw = -(-oh // (m * dy)), -(-ow // (m * dx))
    # the last tiles may reach past the image
    below, beside = (th * m + FILTER - 1) * dy - h - top, (tw * m + FILTER - 1) * dx - w - left
    padded = pad_spatial(data, (top, left, below, beside))
    images = n * (dy * dx)
    count = images * th * tw

    def pixel(t: tirx.Var, r: int, x: tirx.Var, b: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        image, y, z = tirx.indexdiv(t, th * tw), tirx.indexmod(tirx.indexdiv(t, tw), th), tirx.indexmod(t, tw)
        if (dy, dx) == (1, 1):
            return padded[image, b, y * m + r, z * m + x, lane].astype(inner)
        first_y, first_x = tirx.indexmod(tirx.indexdiv(image, dx), dy), tirx.indexmod(image, dx)
        place = (y * m + r) * dy + first_y, (z * m + x) * dx + first_x
        return padded[(tirx.indexdiv(image, dy * dx), b, *place, lane)].astype(inner)

    columns = te.compute(
        (size, size, count, cb, c),
        lambda i, x, t, b, lane: _row(i, matrices.input, inner, lambda r: pixel(t, r, x, b, lane)), name="columns",
    )
    points = te.compute(
        (size, size, count, cb, c),
        lambda i, j, t, b, lane: _row(j, matrices.input, inner, lambda r: columns[i, r, t, b, lane]), name="points",
    )
    step = int(weight.shape[3]) if len(weight.shape) > 3 else 1
    rb, rc = te.reduce_axis((0, cb), name="rb"), te.reduce_axis((0, c // step), name="rc")
    rs = [te.reduce_axis((0, step), name="rs")] if step > 1 else []
    summed = result.removeprefix("u")

    def product(i: tirx.Var, j: tirx.Var, b: tirx.Var, t: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        place = rc * step + rs[0] if rs else rc
        factor = weight[((i * size + j) * ob + b, rb * (c // step) + rc, lane, *rs)]
        return te.sum(points[i, j, t, rb, place].astype(summed) * factor.astype(summed), axis=[rb, rc, *rs])

    products = te.compute(
        (size, size, ob, count, o), product, name="products",
        attrs={
            "mlc.op": arithmetic.op, **({} if isinstance(n, tirx.IntImm) else {SINGLE: 1}),
            **({} if (dy, dx) == (1, 1) else {DILATED: 1}),
        },
    )
    rows = te.compute(
        (m, size, ob, count, o),
        lambda i, x, b, t, lane: _row(i, matrices.output, result,
                                      lambda r: products[r, x, b, t, lane].astype(result)), name="rows",
    )
    tiles = te.compute(
        (m, m, ob, count, o),
        lambda i, j, b, t, lane: arithmetic.finish(_row(j, matrices.output, result, lambda r: rows[i, r, b, t, lane])),
        name="tiles",
    )

    def output(ni: tirx.Var, b: tirx.Var, y: tirx.Var, z: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        t = (ni * th + tirx.indexdiv(y, m)) * tw + tirx.indexdiv(z, m)
        return tiles[tirx.indexmod(y, m), tirx.indexmod(z, m), b, t, lane]

    if (dy, dx) == (1, 1):
        return te.compute((n, ob, oh, ow, o), output, name="conv2d_winograd")
    apart = te.compute((images, ob, -(-oh // dy), -(-ow // dx), o), output, name="apart")

    def moved(ni: tirx.Var, b: tirx.Var, y: tirx.Var, z: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        image = (ni * dy + tirx.indexmod(y, dy)) * dx + tirx.indexmod(z, dx)
        return apart[image, b, tirx.indexdiv(y, dy), tirx.indexdiv(z, dx), lane]

    return te.compute((n, ob, oh, ow, o), moved, name="conv2d_winograd")


class Winograd(Algorithm):
    """``F(m x m, 3 x 3)`` on whole blocks of channels.

    Its rounding error grows with the condition of the transforms and the root of the length of the sum. ``additions``
    are those of the transforms for each point of a tile and channel, of the input and of the output.
    """

    family, op = "winograd", "conv2d_winograd"

    def __init__(self, m: int, additions: tuple[float, float], error: float) -> None:
        self.name, self._m, self._additions, self._error = f"winograd_{m}x{m}", m, additions, error

    def applicable(self, conv: Convolution) -> bool:
        return self.fits(conv) and conv.element == 4

    def fits(self, conv: Convolution) -> bool:
        """Whether there is a kernel for a convolution of these sizes, of elements of any type."""
        return (
            conv.kernel == (FILTER, FILTER) and tuple(conv.strides) == (1, 1)
            and conv.groups == 1 and conv.channels >= BLOCK and conv.filters >= BLOCK
            and conv.block_in == conv.block_out == BLOCK
            and conv.fixed  # the kernels are made for one number of tiles an image
        )

    def weight_shape(self, conv: Convolution) -> tuple[int, ...]:
        return self._points * (conv.filters // BLOCK), conv.channels, BLOCK

    def pack(self, weight: np.ndarray, conv: Convolution) -> np.ndarray:
        return transform_weight(weight, self._m)

    def kernel(self, data: te.Tensor, weight: te.Tensor, conv: Convolution) -> te.Tensor:
        return conv2d_winograd(data, weight, self._m, conv.pads, conv.dilation)

    def seconds(self, conv: Convolution, estimate: Estimate) -> float:
        tiles = (-(-extent // (self._m * d)) * d for extent, d in zip(conv.out, conv.dilation, strict=True))
        vectors = conv.n * math.prod(tiles) * self._points
        inner, outer = self._additions
        additions = vectors * (conv.channels * inner + conv.filters * outer)
        products = vectors * conv.channels * conv.filters
        rate, element = (estimate.machine.dot, 2.0) if conv.element == 1 else (1.0, 4.0)
        operations = 2.0 * products / rate / _MULTIPLYING + additions / _ADDING
        images = conv.image_bytes
        if max(conv.dilation) > 1:  # the result is read and written once more
            images += 2.0 * conv.element * conv.n * conv.filters * math.prod(conv.out)
        weights = element * self._points * conv.filters * conv.channels
        # where a call decides how many images there are, each of them is multiplied by itself
        return estimate.kernel(operations, weights * (1 if isinstance(conv.n, int) else conv.n), images)

    def error_bound(self, conv: Convolution) -> float:
        return self._error * max(1.0, (conv.channels / 256) ** 0.5)

    @property
    def _points(self) -> int:
        return (self._m + FILTER - 1) ** 2


#: the output tiles that are worth their rounding error in float32
ALGORITHMS = (Winograd(2, (2.0, 1.5), 4e-6), Winograd(4, (4.0, 2.8), 2e-5))
