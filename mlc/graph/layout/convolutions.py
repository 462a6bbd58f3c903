"""The convolutions of a graph, as the choice of layouts and the blocked kernels see them."""

from __future__ import annotations

import numpy as np
from tvm import relax

from mlc.graph.estimate import Convolution
from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.ir.constants import array_of
from mlc.graph.ir.rewrite import dtype_of, op_name, shape_of
from mlc.graph.kernels.transposed import Axis, axes
from mlc.graph.precision.integer import is_integer_product

__all__ = ["CONVOLUTIONS", "TRANSPOSED", "convolution", "is_depthwise", "is_image", "name_of", "phases",
           "transposed_axes", "weight_of", "with_zeros"]

TRANSPOSED = "relax.nn.conv2d_transpose"
CONVOLUTIONS = ("relax.nn.conv2d", TRANSPOSED)
#: of images: floats, what integer products take and make, and what it is cast to and from
_TYPES = ("float32", "float16", "bfloat16", "uint8", "int8", "int32")


def name_of(expr: relax.Expr) -> str:
    """The operator's name, empty for anything but a call of one."""
    return op_name(expr) if isinstance(expr, relax.Call) else ""


def is_image(expr: relax.Expr) -> bool:
    """Whether the expression is a tensor of rank 4 of a type that blocked kernels take or make."""
    ty = expr.ty
    return isinstance(ty, relax.TensorType) and ty.ndim == 4 and dtype_of(expr) in _TYPES


def weight_of(call: relax.Call) -> np.ndarray | None:
    """The weight of a convolution that blocked kernels can compute, else None."""
    data, weight = call.args
    attrs, transposed = call.attrs, name_of(call) == TRANSPOSED
    plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == ("IOHW" if transposed else "OIHW") and is_image(data)
    if transposed and (any(int(d) > 1 for d in attrs.dilation) or int(attrs.groups) == shape_of(data)[1]):
        return None
    floats = dtype_of(data) == dtype_of(weight) == dtype_of(call) == "float32"
    if not floats and not is_integer_product(call):
        return None
    return array_of(weight) if plain else None


def is_depthwise(call: relax.Call) -> bool:
    """Whether every channel is convolved by itself."""
    groups = int(call.attrs.groups)
    return groups > 1 and groups == shape_of(call.args[0])[1] == shape_of(call.args[1])[0]


def transposed_axes(call: relax.Call) -> tuple[Axis, Axis]:
    """Rows and columns of a transposed convolution of images."""
    attrs, (_, _, *size), (_, _, *kernel) = call.attrs, shape_of(call.args[0]), shape_of(call.args[1])
    strides, pads, extra = ([int(v) for v in each] for each in (attrs.strides, attrs.padding, attrs.output_padding))
    return axes(size, kernel, strides, pads, extra)


def convolution(call: relax.Call, inner: ChannelBlocks | None = None, out: ChannelBlocks | None = None) -> Convolution:
    """The convolution's sizes; padding channels count in a blocked layout."""
    n, channels, *size = shape_of(call.args[0])
    filters, _, *kernel = shape_of(call.args[1])
    attrs = call.attrs
    strides, pads, dilation = (tuple(int(v) for v in each) for each in (attrs.strides, attrs.padding, attrs.dilation))
    groups = inner.lanes if inner and is_depthwise(call) else int(attrs.groups)
    return Convolution(
        n, inner.lanes if inner else channels, out.lanes if out else filters, (size[0], size[1]),
        (kernel[0], kernel[1]), strides, pads, dilation, groups, inner.size if inner else 1,
        out.size if out else 1, _element(call),
    )


def _element(call: relax.Call) -> int:
    """Bytes of what is multiplied."""
    return 1 if is_integer_product(call) else 4


def phases(call: relax.Call, inner: ChannelBlocks, out: ChannelBlocks) -> Convolution:
    """The sizes of all phases of a transposed convolution together: each phase is a set of filters."""
    n, _, *size = shape_of(call.args[0])
    rows, columns = transposed_axes(call)
    filters, groups = rows.stride * columns.stride * out.lanes, int(call.attrs.groups)
    more = [axis.steps + axis.taps - 1 - axis.size for axis in (rows, columns)]
    return Convolution(
        n, inner.lanes, filters, (size[0], size[1]), (rows.taps, columns.taps), (1, 1), (*more, 0, 0), (1, 1), groups,
        inner.size, out.size, _element(call),
    )


def with_zeros(call: relax.Call) -> Convolution:
    """The sizes that the plain kernel of a transposed convolution has: it convolves an image of mostly zeros."""
    (n, channels, *_), (_, filters, *out), kernel = shape_of(call.args[0]), shape_of(call), shape_of(call.args[1])[2:]
    size = (out[0] + kernel[0] - 1, out[1] + kernel[1] - 1)  # a dilated kernel has as many elements
    return Convolution(
        n, channels, filters, size, (kernel[0], kernel[1]), (1, 1), (0,) * 4, (1, 1), int(call.attrs.groups), 1, 1)
