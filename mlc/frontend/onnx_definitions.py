"""Standard operators, or uses of them, that TVM does not convert, composed of operators that it does convert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.frontend.onnx_attention import attention
from mlc.frontend.onnx_control import branches, loop, scan
from mlc.frontend.onnx_expand import Expand, Nodes
from mlc.frontend.onnx_sequence_lens import sequences
from mlc.frontend.onnx_unique import unique

if TYPE_CHECKING:
    import onnx

__all__ = ["definition_of"]

_INT64 = 7  # onnx.TensorProto.INT64


def _lp_normalization(nodes: Nodes) -> str:
    """``x / norm(x)`` along an axis, 0 where the norm is 0."""
    (x,), given = nodes.inputs(1), nodes.attributes()
    operator = f"ReduceL{given.get('p', 2)}"
    norm = nodes.reduced(operator, x, [int(given.get("axis", -1))])
    zero = nodes.constant(0.0, x)
    return str(nodes("Where", nodes("Equal", norm, zero), zero, nodes("Div", x, norm)))


def _tensor_scatter(nodes: Nodes) -> str:
    """``past_cache, update, write_indices``: each sequence of a batch has its update from its index on; where it is
    circular, on from the beginning behind the end."""
    past, update, begin = nodes.inputs(3)
    given, shape = nodes.attributes(), nodes.known_shape(past, "past cache")
    axis = int(given.get("axis", -2)) % len(shape)
    length = nodes.known_shape(update, "update")[axis]
    place = nodes.constant(_along(np.arange(shape[axis]), axis, len(shape)))
    if begin:
        first = nodes("Reshape", nodes("Cast", begin, to=_INT64), nodes.constant([-1, *[1] * (len(shape) - 1)]))
        place = str(nodes("Sub", place, first))
    if given.get("mode", b"linear") == b"circular":
        place = str(nodes("Mod", place, nodes.constant([shape[axis]])))
    inside = nodes("And", nodes("GreaterOrEqual", place, nodes.constant([0])),
                   nodes("Less", place, nodes.constant([length])))
    source = nodes("Clip", place, nodes.constant(np.array(0)), nodes.constant(np.array(length - 1)))
    written = nodes("GatherElements", update, nodes("Expand", source, nodes.constant(list(shape))), axis=axis)
    return str(nodes("Where", inside, written, past))


def _compress(nodes: Nodes) -> str:
    """``input, condition``: what lies at the places where the condition holds, which may be shorter or longer."""
    x, condition = nodes.inputs(2)
    axis, shape = nodes.attributes().get("axis"), nodes.shape_of(x)
    most = nodes.dimension(x, int(axis)) if axis is not None else None if shape is None else prod(shape)
    if axis is None:
        x, axis = str(nodes("Reshape", x, nodes.constant([-1]))), 0
    given, known = nodes.dimension(condition, 0), nodes.constant_of(condition)
    if known is not None and isinstance(most, int):
        return str(nodes("Gather", x, nodes.constant(np.flatnonzero(known[:most])), axis=int(axis)))
    if most is None or (given != most and not (isinstance(given, int) and isinstance(most, int) and given < most)):
        places = nodes("Range", nodes.constant(np.array(0)), nodes.size(condition, 0), nodes.constant(np.array(1)))
        condition = nodes("And", condition, nodes("Less", places, nodes.size(x, int(axis))))
    chosen = nodes("Reshape", nodes("NonZero", condition), nodes.constant([-1]))
    return str(nodes("Gather", x, chosen, axis=int(axis)))


def _batch_norm(nodes: Nodes) -> list[str]:
    """``X, scale, B, input_mean, input_var`` in training: normalised by the batch's own mean and variance, and the
    running ones, of which ``momentum`` stays."""
    x, scale, bias, mean, variance = nodes.inputs(5)
    given, rank = nodes.attributes(), len(nodes.known_shape(nodes.node.input[0], "input"))
    axes, wide = [axis for axis in range(rank) if axis != 1], [1, -1, *[1] * (rank - 2)]

    def channels(value: str) -> str:
        return str(nodes("Reshape", value, nodes.constant(wide)))

    own = nodes.reduced("ReduceMean", x, axes)
    centred = str(nodes("Sub", x, own))
    spread = nodes.reduced("ReduceMean", str(nodes("Mul", centred, centred)), axes)
    root = nodes("Sqrt", nodes("Add", spread, nodes.constant(float(given.get("epsilon", 1e-5)), x)))
    result = nodes("Add", nodes("Mul", nodes("Div", centred, root), channels(scale)), channels(bias))
    momentum = float(given.get("momentum", 0.9))
    running = [nodes("Add", nodes("Mul", old, nodes.constant(momentum, old)),
                     nodes("Mul", nodes("Reshape", new, nodes.constant([-1])), nodes.constant(1 - momentum, old)))
               for old, new in ((mean, own), (variance, spread))]
    return [str(result), *map(str, running)]


def _dropout(nodes: Nodes) -> list[str]:
    """``data, ratio, training_mode`` where nothing is dropped: outside of training, or with a ratio of 0."""
    x, ratio, training = nodes.inputs(3)
    if training and np.any(nodes.known(training, "training mode")):
        share = nodes.known(ratio, "ratio") if ratio else np.array(0.5)
        if np.any(share):
            raise nodes.refused("its results are random in training; export the model for inference")
    kept = np.ones(nodes.known_shape(x, "data"), bool)
    return [str(nodes("Identity", x)), nodes.constant(kept)]


def _conv_transpose(nodes: Nodes) -> str:
    """With ``output_shape``, from which the padding follows; the odd element of it lies before the image but for
    ``SAME_UPPER``, and what is lacking is added behind it."""
    given = nodes.attributes()
    inside, kernel = (nodes.known_shape(name, what)[2:]
                      for name, what in zip(nodes.node.input, ("input", "weight"), strict=False))
    wanted = given.pop("output_shape")[-len(inside):]
    upper = given.pop("auto_pad", b"NOTSET") == b"SAME_UPPER"
    ones = [1] * len(inside)
    strides, dilations = (given.get(name, ones) for name in ("strides", "dilations"))
    extra = given.get("output_padding", [0] * len(inside))
    total = [s * (n - 1) + e + (k - 1) * d + 1 - w
             for s, n, e, k, d, w in zip(strides, inside, extra, kernel, dilations, wanted, strict=True)]
    few = [max(0, pad) // 2 if upper else ceil(max(0, pad) / 2) for pad in total]
    given["pads"] = [*few, *(max(0, pad) - first for pad, first in zip(total, few, strict=True))]
    given["output_padding"] = [e + max(0, -pad) for e, pad in zip(extra, total, strict=True)]
    return str(nodes("ConvTranspose", *nodes.node.input, **given))


def _max_pool(nodes: Nodes) -> list[str]:
    """With the place of each maximum among the input's elements, the first of equal ones: the taps of the window are
    compared one after the other."""
    (x,), given = nodes.inputs(1), nodes.attributes()
    kernel = given["kernel_shape"]
    rank = len(kernel)
    shape, result = ([0, *(nodes.fixed_size(value, axis, what) for axis in range(1, 2 + rank))]
                     for value, what in ((x, "input"), (nodes.node.output[0], "output")))  # any number of images
    strides, dilations = (given.get(name, [1] * rank) for name in ("strides", "dilations"))
    before = list(given.get("pads", [0] * rank)[:rank])
    if given.get("ceil_mode", 0):  # no window begins behind the image, which onnx's inference of shapes leaves out
        result[2:] = [min(count, (size + begin - 1) // stride + 1)
                      for count, size, begin, stride in zip(result[2:], shape[2:], before, strides, strict=True)]
    reach = [(n - 1) * s + (k - 1) * d + 1
             for n, s, k, d in zip(result[2:], strides, kernel, dilations, strict=True)]
    if (same := given.get("auto_pad", b"NOTSET")).startswith(b"SAME"):
        total = [max(0, r - n) for r, n in zip(reach, shape[2:], strict=True)]
        before = [pad // 2 if same == b"SAME_UPPER" else ceil(pad / 2) for pad in total]
    after = [max(0, r - n - b) for r, n, b in zip(reach, shape[2:], before, strict=True)]
    dtype = nodes.dtype_of(x)
    least = np.array(np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf, dtype)
    pads = [0, 0, *before, 0, 0, *after]
    padded = str(nodes("Pad", x, nodes.constant(pads), nodes.constant(least))) if any(pads) else x
    numbers = np.arange(np.prod(shape[2:]))
    grid = numbers.reshape(shape[:1:-1]).T if given.get("storage_order", 0) else numbers.reshape(shape[2:])
    places = np.pad(grid, list(zip(before, after, strict=True)))
    best = where = ""
    for tap in np.ndindex(*kernel):
        begin = [t * d for t, d in zip(tap, dilations, strict=True)]
        end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, result[2:], strides, strict=True)]
        value = nodes("Slice", padded, *(nodes.constant(list(numbers))
                                         for numbers in (begin, end, range(2, 2 + rank), strides)))
        place = nodes.constant(places[tuple(map(slice, begin, end, strides))])
        if best:
            larger = nodes("Greater", value, best)
            best, where = str(nodes("Where", larger, value, best)), str(nodes("Where", larger, place, where))
        else:
            best, where = str(value), str(place)
    pixels = int(np.prod(shape[2:]))
    channel = nodes.constant(_along(np.arange(shape[1]) * pixels, 1, 2 + rank))
    image = nodes("Mul", nodes.counted(x, 0, 2 + rank), nodes.constant([shape[1] * pixels]))
    return [best, str(nodes("Add", nodes("Add", where, channel), image))]


def _deform_conv(nodes: Nodes) -> str:
    """``X, W, offset, B, mask``: each tap of the window lies where its offset says, between pixels; beyond the image
    all is 0. The samples of all taps are channels of a convolution of 1x1."""
    x, weight, offset, bias, mask = nodes.inputs(5)
    given = nodes.attributes()
    shape, rank = nodes.known_shape(weight, "weight"), nodes.rank_of(x, "input")
    if rank != 4:
        raise nodes.refused(f"its images must have two dimensions, got {rank - 2}")
    channels, *image = (nodes.fixed_size(x, axis, "input") for axis in (1, 2, 3))  # any number of images
    kernel, result = shape[2:], [nodes.fixed_size(offset, axis, "offset") for axis in (2, 3)]
    taps, groups = int(np.prod(kernel)), int(given.get("offset_group", 1))
    strides, dilations = (given.get(name, [1, 1]) for name in ("strides", "dilations"))
    pads = given.get("pads", [0] * 4)
    # where each tap lies without its offset: (2, taps, height, width), rows and columns
    tap, place = np.indices(kernel).reshape(2, taps, 1, 1), np.indices(result)[:, None]
    start = np.stack([place[i] * strides[i] + tap[i] * dilations[i] - pads[i] for i in range(2)])
    moved = nodes("Add", nodes("Reshape", offset, nodes.constant([-1, taps, 2, *result])),
                  nodes.constant(start.transpose(1, 0, 2, 3).astype(nodes.dtype_of(x))))
    # GridSample wants columns before rows, from -1 at an image's edge to 1
    turned = nodes("Transpose", nodes("Gather", moved, nodes.constant([1, 0]), axis=2), perm=[0, 1, 3, 4, 2])
    size = np.array(image[::-1], nodes.dtype_of(x))
    grid = nodes("Sub", nodes("Mul", turned, nodes.constant(2 / size)), nodes.constant(1 - 1 / size))
    flat = nodes("Reshape", grid, nodes.constant([-1, taps * result[0], result[1], 2]))
    grouped = nodes("Reshape", x, nodes.constant([-1, channels // groups, *image]))
    mode = "linear" if nodes.opset >= 20 else "bilinear"
    samples = nodes("GridSample", grouped, flat, mode=mode, padding_mode="zeros", align_corners=0)
    if mask:
        share = nodes("Reshape", mask, nodes.constant([-1, 1, taps * result[0], result[1]]))
        samples = nodes("Mul", samples, share)
    columns = nodes("Reshape", samples, nodes.constant([-1, channels * taps, *result]))
    filters = nodes("Reshape", weight, nodes.constant([shape[0], shape[1] * taps, 1, 1]))
    inputs = [columns, filters, *([bias] if bias else [])]
    return str(nodes("Conv", *inputs, kernel_shape=[1, 1], group=int(given.get("group", 1))))


def _along(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """A vector along one axis of ``rank``."""
    return values.reshape([-1 if i == axis else 1 for i in range(rank)])


def _has(name: str) -> Callable[[onnx.NodeProto], bool]:
    return lambda node: any(a.name == name and (a.i or a.ints) for a in node.attribute)


def _gives(count: int) -> Callable[[onnx.NodeProto], bool]:
    return lambda node: len([o for o in node.output if o]) >= count


def _takes(place: int) -> Callable[[onnx.NodeProto], bool]:
    return lambda node: len(node.input) > place and bool(node.input[place])


def _always(node: onnx.NodeProto) -> bool:
    return True


#: operator --> for which of its nodes, and what these are made of
_DEFINITIONS: Mapping[str, tuple[Callable[[Any], bool], Expand]] = {
    "Attention": (_always, attention),
    "BatchNormalization": (_has("training_mode"), _batch_norm),
    "Compress": (_always, _compress),
    "ConvTranspose": (_has("output_shape"), _conv_transpose),
    "DeformConv": (_always, _deform_conv),
    "Dropout": (_gives(2), _dropout),
    "GRU": (_takes(4), sequences),
    "If": (_always, branches),
    "Loop": (_always, loop),
    "LSTM": (_takes(4), sequences),
    "LpNormalization": (_always, _lp_normalization),
    "MaxPool": (_gives(2), _max_pool),
    "RNN": (_takes(4), sequences),
    "Scan": (_always, scan),
    "TensorScatter": (_always, _tensor_scatter),
    "Unique": (_always, unique),
}


def definition_of(node: onnx.NodeProto) -> Expand | None:
    """The definition of a node of the standard domain in terms of others; None if it is converted directly, or not at
    all."""
    applies, expand = _DEFINITIONS.get(node.op_type, (lambda _node: False, None))
    return expand if applies(node) else None
