"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlc.operators.gather import gathered, numbers
from mlc.operators.index import Poly, as_poly, divides, equal, integer
from mlc.operators.operator import operator
from mlc.operators.relax import Relax, Shape, Shapes, integers
from mlc.operators.scalar import Mul, Scalar, Sum
from mlc.operators.sliding import Padding, check_window, explicit, inside, pair, window_axis
from mlc.operators.tensor import Requirements, ShapeError, Tensor, text

__all__: list[str] = []


def _matrices(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    """None for vectors, and for batches that broadcast."""
    a, b = shapes
    fits = len(a) == len(b) >= 2 and tuple(a[:-2]) == tuple(b[:-2])
    return {} if fits else None


@operator(
    "matmul", 2, relax=Relax("matmul", _matrices), taso="matmul", products=lambda a, b: b[-2],
    quick=lambda number, shape, inputs, given: number.matmul(*inputs),
)
def matmul(require: Requirements, a: Tensor, b: Tensor) -> Tensor:
    """``[m, k] × [k, n]``, one for each place of any number of equal batch axes before."""
    if a.rank != b.rank or a.rank < 2:
        raise ShapeError(f"matmul takes two operands of one rank, 2 or more, but got {text(a)} and {text(b)}")
    sentence = f"matmul needs equal inner sizes (and batches), but got {text(a)} and {text(b)}"
    require.require(equal(a.shape[-1], b.shape[-2]), sentence)
    for left, right in zip(a.shape[:-2], b.shape[:-2], strict=True):
        require.require(equal(left, right), sentence)
    k = require.variable()

    def element(*indices: Poly) -> Scalar:
        *batch, row, column = indices
        inner = Poly.symbol(k)
        return Sum(((k, a.shape[-1]),), Mul((a[(*batch, row, inner)], b[(*batch, inner, column)])))

    return Tensor((*a.shape[:-1], b.shape[-1]), element)


def _conv2d(number: Any, shape: Shape, inputs: Any, given: Mapping[str, Any]) -> Any:
    x, w = inputs
    groups, (n, outputs) = integer(given["groups"]), shape[:2]
    windows = gathered(x, w.shape[2:], shape, given, numbers(given["dilation"]), 0)
    # [n, group, outputs, channels * window] by [n, group, channels * window, spots]
    filters = w.reshape(groups, outputs // groups, -1)
    images = windows.reshape(n, *filters.shape[:-2], filters.shape[-1], -1)
    return number.matmul(np.broadcast_to(filters, (n, *filters.shape)), images).reshape(shape)


def _read(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == "OIHW" and attrs.out_layout in ("NCHW", "")
    if not plain:
        return None
    return {"stride": integers(attrs.strides), "padding": integers(attrs.padding),
            "dilation": integers(attrs.dilation), "groups": int(attrs.groups)}


def _write(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    padding = explicit(given, shapes[0][2:], shapes[1][2:])
    return {"strides": list(given["stride"]), "padding": list(padding), "dilation": list(given["dilation"]),
            "groups": int(given["groups"])}


@operator(
    "conv2d", 2, {"stride": (1, 1), "padding": "valid", "dilation": (1, 1), "groups": 1},
    relax=Relax("nn.conv2d", _read, _write), products=lambda x, w: w[1] * w[2] * w[3], quick=_conv2d, folds=False,
)
def conv2d(
    require: Requirements,
    x: Tensor,
    w: Tensor,
    stride: tuple[Poly | int, Poly | int],
    padding: Padding,
    dilation: tuple[Poly | int, Poly | int],
    groups: Poly | int,
) -> Tensor:
    """``x`` is ``[n, c, height, width]``, ``w`` is ``[o, c / groups, kernel height, kernel width]``.

    Output channel ``o`` reads the input channels of its group, ``o // (O / groups)``.
    """
    if x.rank != 4 or w.rank != 4:
        raise ShapeError(f"conv2d takes an input and a filter of rank 4, but got {text(x)} and {text(w)}")
    outputs, channels, *kernel = w.shape
    groups = as_poly(groups)
    require.require(
        equal(channels * groups, x.shape[1]),
        f"conv2d needs {channels} filter channels in {groups} groups to make the input's {x.shape[1]} channels",
    )
    require.require(divides(groups, outputs), f"conv2d needs {groups} groups to divide {outputs} output channels")
    axes = [
        window_axis(require, "conv2d", *sizes)
        for sizes in zip(x.shape[2:], kernel, pair(stride), check_window(padding), pair(dilation), strict=True)
    ]
    c, r, s = require.variable(), require.variable(), require.variable()
    per_group = outputs // groups

    def element(n: Poly, o: Poly, row: Poly, column: Poly) -> Scalar:
        channel = Poly.symbol(c)
        if groups != 1:
            channel = (o // per_group) * channels + channel
        places = [axis.place(y, Poly.symbol(v)) for axis, y, v in zip(axes, (row, column), (r, s), strict=True)]
        value = inside(axes, places, x[(n, channel, *places)])
        body = Mul((value, w[(o, Poly.symbol(c), Poly.symbol(r), Poly.symbol(s))]))
        return Sum(((c, channels), (r, kernel[0]), (s, kernel[1])), body)

    return Tensor((x.shape[0], outputs, axes[0].size, axes[1].size), element)
