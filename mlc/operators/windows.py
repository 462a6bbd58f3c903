"""Poolings over sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from mlc.operators.gather import gathered, numbers
from mlc.operators.index import Poly, as_poly, at_least
from mlc.operators.operator import operator
from mlc.operators.relax import Relax, Shape, Shapes, integers
from mlc.operators.scalar import Const, Max, Mul, Reciprocal, Scalar, Size, Sum
from mlc.operators.sliding import Padding, WindowAxis, check_window, explicit, inside, pair, window_axis
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


def _read(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    """None for other layouts, for dilations, and for a number of windows that is rounded up."""
    kernel, stride, padding = integers(attrs.pool_size), integers(attrs.strides), integers(attrs.padding)
    plain = attrs.layout == "NCHW" and attrs.out_layout in ("NCHW", "") and set(integers(attrs.dilation)) == {1}
    if not plain or len(padding) != 4:
        return None
    whole = [(shapes[0][2 + i] + padding[i] + padding[2 + i] - kernel[i]) // stride[i] + 1 for i in range(2)]
    return {"kernel": kernel, "stride": stride, "padding": padding} if tuple(whole) == shape[2:] else None


def _write(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    padding = explicit(given, shapes[0][2:], given["kernel"])
    return {"pool_size": list(given["kernel"]), "strides": list(given["stride"]), "padding": list(padding)}


def _max_pool2d(number: Any, shape: Shape, inputs: Any, given: Mapping[str, Any]) -> Any:
    windows = gathered(inputs[0], numbers(given["kernel"]), shape, given, (1, 1), number.lowest)
    return np.asarray(number.largest(windows, (2,))).reshape(shape)


@operator(
    "max_pool2d", 1, {"kernel": None, "stride": (1, 1), "padding": "valid"},
    relax=Relax("nn.max_pool2d", _read, _write), quick=_max_pool2d, folds=False,
)
def max_pool2d(require: Requirements, x: Tensor, kernel: Pair, stride: Pair, padding: Padding) -> Tensor:
    """The largest element of every window of ``[n, c, height, width]``; padding never counts."""
    axes = _axes(require, "max_pool2d", x, kernel, stride, padding)
    names = (require.variable(), require.variable())

    def element(n: Poly, c: Poly, row: Poly, column: Poly) -> Scalar:
        places = [axis.place(y, Poly.symbol(v)) for axis, y, v in zip(axes, (row, column), names, strict=True)]
        conditions = tuple(c for axis, place in zip(axes, places, strict=True) for c in axis.conditions(place))
        return Max(tuple(zip(names, pair(kernel), strict=True)), conditions, x[(n, c, *places)])

    return Tensor((*x.shape[:2], axes[0].size, axes[1].size), element)


def _avg_pool2d(number: Any, shape: Shape, inputs: Any, given: Mapping[str, Any]) -> Any:
    (x,) = inputs
    kernel = numbers(given["kernel"])
    total = np.asarray(number.total(gathered(x, kernel, shape, given, (1, 1), 0), (2,))).reshape(shape)
    if given["count_include_pad"]:
        count: Any = np.asarray(kernel[0] * kernel[1])
    else:
        elements = np.ones((1, 1, *x.shape[2:]), dtype=np.int64)
        count = gathered(elements, kernel, (1, 1, *shape[2:]), given, (1, 1), 0).sum(2).reshape(1, 1, *shape[2:])
    return number.mul(total, number.reciprocal(number.integers(count)))


def _read_mean(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    given = _read(attrs, shapes, shape)
    return None if given is None else {**given, "count_include_pad": int(attrs.count_include_pad)}


def _write_mean(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {**_write(given, shapes, shape), "count_include_pad": bool(given["count_include_pad"])}


@operator(
    "avg_pool2d", 1, {"kernel": None, "stride": (1, 1), "padding": "valid", "count_include_pad": 0},
    relax=Relax("nn.avg_pool2d", _read_mean, _write_mean), quick=_avg_pool2d,
)
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
