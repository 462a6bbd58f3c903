"""Poolings over sliding windows."""

from __future__ import annotations

from fractions import Fraction

from mlc.operators.index import Poly, as_poly, at_least
from mlc.operators.operator import operator
from mlc.operators.scalar import Const, Max, Mul, Reciprocal, Scalar, Size, Sum
from mlc.operators.sliding import Padding, WindowAxis, check_window, inside, pair, window_axis
from mlc.operators.tensor import Requirements, ShapeError, Tensor, text

__all__: list[str] = []

Pair = tuple[Poly | int, Poly | int]


def _axes(
    require: Requirements, name: str, x: Tensor, kernel: Pair, stride: Pair, padding: Padding
) -> tuple[WindowAxis, ...]:
    if x.rank != 4:
        raise ShapeError(f"{name} takes an input of rank 4, but got {text(x)}")
    axes = []
    sides = check_window(padding)
    for extent, window, step, side in zip(x.shape[2:], pair(kernel), pair(stride), sides, strict=True):
        axes.append(window_axis(require, name, extent, window, step, side, as_poly(1)))
        for size in () if isinstance(side, str) else side:
            sentence = f"{name} needs paddings smaller than its window, but got {size} for a window of {window}"
            require.require(at_least(window - 1, size), sentence)
    return tuple(axes)


@operator("max_pool2d", 1, kernel=None, stride=(1, 1), padding="valid")
def max_pool2d(require: Requirements, x: Tensor, kernel: Pair, stride: Pair, padding: Padding) -> Tensor:
    """The largest element of every window of ``[n, c, height, width]``; padding never counts."""
    axes = _axes(require, "max_pool2d", x, kernel, stride, padding)
    names = (require.variable(), require.variable())

    def element(n: Poly, c: Poly, row: Poly, column: Poly) -> Scalar:
        places = [axis.place(y, Poly.symbol(v)) for axis, y, v in zip(axes, (row, column), names, strict=True)]
        conditions = tuple(c for axis, place in zip(axes, places, strict=True) for c in axis.conditions(place))
        return Max(tuple(zip(names, pair(kernel), strict=True)), conditions, x[(n, c, *places)])

    return Tensor((*x.shape[:2], axes[0].size, axes[1].size), element)


@operator("avg_pool2d", 1, kernel=None, stride=(1, 1), padding="valid", count_include_pad=0)
def avg_pool2d(
    require: Requirements, x: Tensor, kernel: Pair, stride: Pair, padding: Padding, count_include_pad: int
) -> Tensor:
    """The mean of every window: of its elements alone, or of all places with zeros for the padding."""
    if count_include_pad not in (0, 1):
        raise ShapeError(f"avg_pool2d needs count_include_pad of 0 or 1, but got {count_include_pad}")
    axes = _axes(require, "avg_pool2d", x, kernel, stride, padding)
    names = (require.variable(), require.variable())
    window = tuple(zip(names, pair(kernel), strict=True))
    rows, columns = pair(kernel)
    plain = bool(count_include_pad) or not any(bound for axis in axes for bound in axis.bounds)

    def element(n: Poly, c: Poly, row: Poly, column: Poly) -> Scalar:
        places = [axis.place(y, Poly.symbol(v)) for axis, y, v in zip(axes, (row, column), names, strict=True)]
        total = Sum(window, inside(axes, places, x[(n, c, *places)]))
        count = Size(rows * columns) if plain else Sum(window, inside(axes, places, Const(Fraction(1))))
        return Mul((total, Reciprocal(count)))

    return Tensor((*x.shape[:2], axes[0].size, axes[1].size), element)
