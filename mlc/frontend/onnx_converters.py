"""mlc's own ONNX converters, where TVM's are wrong or produce slow code. Each takes Relax expressions and returns one.

A node with several outputs gives a tuple of them, in their order, whether all are used or not. A converter returns
``None`` where the node is not its case; TVM's is used then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlc.frontend import onnx_elementwise as elementwise
from mlc.frontend.onnx_einsum import as_product
from mlc.frontend.onnx_gather_nd import scatter_nd
from mlc.frontend.onnx_grouped import GROUPED, GROUPED_BITS, grouped_mat_mul, grouped_mat_mul_nbits
from mlc.frontend.onnx_integer import conv_integer, mat_mul_integer
from mlc.frontend.onnx_quantised import dequantize_linear, dynamic_quantize_linear, quantize_linear
from mlc.frontend.onnx_recurrent import gru, lstm, rnn
from mlc.frontend.onnx_resize import resize
from mlc.frontend.onnx_roi_align import roi_align
from mlc.frontend.onnx_signal import dft, stft
from mlc.frontend.onnx_sizes import as_tensor
from mlc.frontend.onnx_values import array_of, constant_at, dtype_of, emitter, required_at, text
from mlc.sizes import Size, size_of

__all__ = ["CONVERTERS"]


def _gather(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Indices from -n to n - 1. TVM reads out of bounds for any other; here they are clamped.

    ``Gather(x, i)`` --> ``take(x, where(i < 0, i + n, i), mode="clip")``
    """
    from tvm import relax

    data, indices = inputs[0], inputs[1]
    if not isinstance(data.ty, relax.TensorType) or not isinstance(indices.ty, relax.TensorType):
        return None
    axis = int(attrs.get("axis", 0)) % len(data.ty.shape)
    extent = size_of(data.ty.shape[axis])
    array, constant = array_of(indices), array_of(data)
    if array is not None and (not isinstance(extent, Size) or (array >= 0).all()):
        if not isinstance(extent, Size):
            array = np.where(array < 0, array + extent, array).astype(array.dtype)
        if constant is not None:
            return relax.const(np.take(constant, array, axis=axis, mode="clip"))
        return relax.op.take(data, relax.const(array, str(array.dtype)), axis, mode="clip")
    return relax.op.take(data, _from_begin(bb, indices, extent), axis, mode="clip")


def _gather_elements(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Indices from -n to n - 1 as in :func:`_gather`. TVM makes a tensor of the shape to read n from, where it is free
    or not, which fuses badly, and reads out of bounds for other indices."""
    from tvm import relax

    data, indices = inputs[0], inputs[1]
    axis = int(attrs.get("axis", 0)) % len(data.ty.shape)
    extent, array, dtype = size_of(data.ty.shape[axis]), array_of(indices), dtype_of(indices)
    if array is not None and not isinstance(extent, Size):
        array = np.clip(np.where(array < 0, array + extent, array), 0, extent - 1).astype(array.dtype)
        return relax.op.gather_elements(data, relax.const(array, dtype), axis)
    emit = emitter(bb)
    last = emit("subtract", _extent_of(bb, extent, dtype), relax.const(1, dtype))
    inside = emit("maximum", _from_begin(bb, indices, extent), relax.const(0, dtype))
    return relax.op.gather_elements(data, emit("minimum", inside, last), axis)


def _from_begin(bb: Any, indices: Any, extent: Any) -> Any:
    """Indices from ``-extent`` as such from 0; the extent may be free."""
    from tvm import relax

    emit, dtype = emitter(bb), dtype_of(indices)
    negative = emit("less", indices, relax.const(0, dtype))
    return emit("where", negative, emit("add", indices, _extent_of(bb, extent, dtype)), indices)


def _extent_of(bb: Any, extent: Any, dtype: str) -> Any:
    """A size as a tensor without axes; it may be free."""
    from tvm import relax

    if isinstance(extent, Size):
        return emitter(bb)("astype", as_tensor(bb, extent), dtype)
    return relax.const(extent, dtype)


def _lrn(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Local response normalisation over channels as elementwise arithmetic on shifted copies, which fuse into one.

    ``y = x / (bias + alpha / size * sum(x[c - (size-1)//2 .. c + size//2] ** 2)) ** beta``. TVM makes a 3-d pooling.
    """
    data = inputs[0]
    size, emit = int(attrs["size"]), emitter(bb, dtype_of(data))
    rank, channels = len(data.ty.shape), int(data.ty.shape[1])
    widths = [0, 0, (size - 1) // 2, size // 2] + [0, 0] * (rank - 2)
    padded = emit("nn.pad", emit("multiply", data, data), widths)
    shifted = [emit("strided_slice", padded, axes=[1], begin=[s], end=[s + channels]) for s in range(size)]
    scaled = emit("multiply", functools.reduce(functools.partial(emit, "add"), shifted),
                  float(attrs.get("alpha", 1e-4)) / size)
    base = emit("add", scaled, float(attrs.get("bias", 1.0)))
    beta = float(attrs.get("beta", 0.75))
    raised = elementwise.constant_power(bb, base, beta)
    return emit("divide", data, emit("power", base, beta) if raised is None else raised)


def _col2im(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Patches that lie beside each other are moved, others added up by a transposed convolution with unit filters.

    ``reshape(permute(reshape(x, (n, c, kh, kw, h, w))))``. Raises ``ValueError`` for patches that overlap in images
    of other than two dimensions.
    """
    from tvm import relax

    x, emit = inputs[0], emitter(bb)
    image, patch = required_at(inputs, 1, "image_shape").tolist(), required_at(inputs, 2, "block_shape").tolist()
    rank = len(patch)
    strides, dilations = (list(attrs.get(name, [1] * rank)) for name in ("strides", "dilations"))
    pads = list(attrs.get("pads", [0] * 2 * rank))
    covered = [dilation * (size - 1) + 1 for size, dilation in zip(patch, dilations, strict=True)]
    padded = [extent + low + high for extent, low, high in zip(image, pads, pads[rank:], strict=False)]
    counts = [(extent - size) // stride + 1 for extent, size, stride in zip(padded, covered, strides, strict=True)]
    batch, channels = int(x.ty.shape[0]), int(x.ty.shape[1]) // int(np.prod(patch))
    beside = all(count == 1 or stride == size for count, stride, size in zip(counts, strides, patch, strict=True))
    if beside and covered == patch and not any(pads) and image == [n * k for n, k in zip(counts, patch, strict=True)]:
        split = emit("reshape", x, (batch, channels, *patch, *counts))
        moved = emit("permute_dims", split, [0, 1, *(axis for i in range(rank) for axis in (2 + rank + i, 2 + i))])
        return emit("reshape", moved, (batch, channels, *image))
    if rank != 2:
        raise ValueError(f"patches that overlap must be of an image of two dimensions, got {rank}")
    taps = int(np.prod(patch))
    units = np.tile(np.eye(taps, dtype=dtype_of(x)).reshape(taps, 1, *patch), (channels, 1, 1, 1))
    behind = [extent - (n - 1) * stride - size
              for extent, n, stride, size in zip(padded, counts, strides, covered, strict=True)]
    columns = emit("reshape", x, (batch, channels * taps, *counts))
    return emit("nn.conv2d_transpose", columns, relax.const(units), strides=strides, padding=pads,
                output_padding=behind, dilation=dilations, groups=channels)


def _global_pool(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """TVM's. Raises ``ValueError`` for tensors without an axis to pool over, of which TVM makes a copy."""
    rank = len(inputs[0].ty.shape)
    if rank < 3:
        raise ValueError(f"an image must have at least one axis besides batch and channels, got {rank} axes")


def _conv_transpose(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """TVM's. Raises ``ValueError`` for weights that are not finite: the zeros that its definition puts between the
    inputs, multiplied by them, are none."""
    weight = array_of(inputs[1])
    if weight is not None and not np.isfinite(weight).all():
        raise ValueError("the weights of a transposed convolution must be finite, got infinite ones or NaN")


def _batch_norm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """By elementwise arithmetic where a statistic or a weight is no constant: ``x * factor + (bias - mean * factor)``
    with ``factor = scale / sqrt(variance + epsilon)``. Else TVM's operator, which is folded."""
    if all(array_of(value) is not None for value in inputs[1:5]):
        return None
    x, scale, bias, mean, variance = inputs
    emit, wide = emitter(bb, dtype_of(variance)), [-1, *[1] * (len(x.ty.shape) - 2)]
    root = emit("sqrt", emit("add", variance, float(attrs.get("epsilon", 1e-5))))
    factor = emit("divide", scale, root)
    added = emit("subtract", bias, emit("multiply", mean, factor))
    factor, added = (emit("reshape", value, wide) for value in (factor, added))
    return emit("add", emit("multiply", x, factor), added)


def _cast(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Casts of 8-bit weights that folding has left (:mod:`mlc.frontend.onnx_fold`), so that they are recognised as
    such; others are converted by TVM."""
    from onnx import helper
    from tvm import relax

    integers = array_of(inputs[0]) if isinstance(inputs[0], relax.Expr) else None
    wanted = str(helper.tensor_dtype_to_np_dtype(int(attrs["to"])))
    if integers is None or integers.dtype != np.int8 or wanted not in ("float32", "float16", "bfloat16"):
        return None
    return relax.op.astype(inputs[0], wanted)


def _cumulative_product(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``CumProd(x, axis)``, from the end where ``reverse``, without the element itself where ``exclusive``."""
    x, emit, axis = inputs[0], emitter(bb), int(required_at(inputs, 1, "axis").item())
    axis %= len(x.ty.shape)
    if attrs.get("reverse", 0):
        x = emit("flip", x, axis)
    result = emit("cumprod", x, axis, dtype_of(x), bool(attrs.get("exclusive", 0)))
    return emit("flip", result, axis) if attrs.get("reverse", 0) else result


def _truths(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], operator: str) -> Any:
    """``ReduceMax`` and ``ReduceMin`` of truth values, as of bytes; of others, TVM's."""
    x, emit, axes = inputs[0], emitter(bb), constant_at(inputs, 1, "axes")
    if dtype_of(x) != "bool":
        return None
    given = attrs.get("axes") if axes is None else axes.tolist()
    if not given:
        if attrs.get("noop_with_empty_axes", 0):
            return x
        given = range(len(x.ty.shape))
    found = emit(operator, emit("astype", x, "uint8"), list(given), bool(attrs.get("keepdims", 1)))
    return emit("astype", found, "bool")


def _einsum(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """A matrix product where it is one (:mod:`mlc.frontend.onnx_einsum`), which all that is known of products holds
    for. Sums of 16-bit floating-point numbers in float32, as of all operators."""
    from tvm import relax

    dtype, emit, equation = dtype_of(inputs[0]), emitter(bb), text(attrs, "equation", "")
    if (product := as_product(bb, inputs, equation)) is not None:
        return product
    if dtype not in ("float16", "bfloat16"):
        return None
    wide = bb.normalize(relax.Tuple([emit("astype", x, "float32") for x in inputs]))
    return emit("astype", emit("einsum", wide, equation), dtype)


def _one_hot(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``OneHot(i, depth, (off, on))`` --> ``where(i == arange(depth), on, off)``; indices from -depth to depth - 1."""
    from tvm import relax

    indices, emit = inputs[0], emitter(bb)
    count, (off, on) = int(required_at(inputs, 1, "depth").item()), required_at(inputs, 2, "values")
    rank = len(indices.ty.shape)
    axis = int(attrs.get("axis", -1)) % (rank + 1)
    wrapped = emit("expand_dims", _from_begin(bb, emit("astype", indices, "int32"), count), axis)
    classes = np.arange(count, dtype="int32").reshape([count if i == axis else 1 for i in range(rank + 1)])
    return emit("where", emit("equal", wrapped, relax.const(classes)), relax.const(on), relax.const(off))


def _equal(bb: Any, inputs: Sequence[Any], _attrs: dict[str, Any]) -> Any:
    """Equality of booleans, for which TVM's LLVM code generator has no instruction; others are converted by TVM."""
    if dtype_of(inputs[0]) != "bool":
        return None
    emit = emitter(bb)
    return emit("logical_not", emit("logical_xor", *inputs))


def _eye_like(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``EyeLike`` with a type of its own; otherwise TVM's converter."""
    from onnx import helper
    from tvm import relax

    if "dtype" not in attrs:
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(int(attrs["dtype"]))).name
    shape = [size_of(extent) for extent in inputs[0].ty.shape]
    row, column = (emitter(bb)("arange", 0, getattr(n, "expr", n), 1, "int64") for n in shape)
    ahead = emitter(bb)("add", emitter(bb)("expand_dims", row, 1), relax.const(int(attrs.get("k", 0)), "int64"))
    return emitter(bb)("astype", emitter(bb)("equal", ahead, column), dtype)


def _hardmax(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Along a free axis, of which TVM's operator wants a number: 1 at the first of the largest. Before opset 13 it
    goes over all axes from one on."""
    x, emit = inputs[0], emitter(bb)
    axis = int(attrs.get("axis", -1)) % len(x.ty.shape)
    extent = size_of(x.ty.shape[axis])
    if not isinstance(extent, Size) or attrs["tvm_custom"]["opset"] < 13:
        return None
    places = emit("arange", 0, extent.expr, 1, "int64")
    for each in range(len(x.ty.shape)):
        places = places if each == axis else emit("expand_dims", places, 0 if each < axis else -1)
    return emit("astype", emit("equal", places, emit("argmax", x, axis, True)), dtype_of(x))


def _reverse_sequence(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Of each sequence the first elements, as many as it has, in the opposite order. Lengths beyond the axis are its
    length. Places are of 32 bits: those of 64 would keep the loops from having 32."""
    from tvm import relax, te, tirx

    x, batch, time = inputs[0], int(attrs.get("batch_axis", 1)), int(attrs.get("time_axis", 0))

    def places(lengths: te.Tensor, whole: Any) -> te.Tensor:
        def place(row: Any, step: Any) -> Any:
            now, last = (tirx.Cast("int32", n) for n in (step, whole))
            count = tirx.max(tirx.min(lengths[row], last), 0)
            # as numbers that are no sizes, of which TVM would make 64 bits
            inside = tirx.Cast("float64", step) < tirx.Cast("float64", count)
            return tirx.Select(inside, count - 1 - now, now)

        return te.compute((lengths.shape[0], whole), place, name="places")

    def turned(data: te.Tensor, found: te.Tensor) -> te.Tensor:
        return te.compute(data.shape, lambda *i: data(*i[:time], found(i[batch], i[time]), *i[time + 1 :]),
                          name="reverse_sequence")

    short = bb.emit(relax.op.astype(inputs[1], "int32"))
    found = bb.emit_te(places, short, x.ty.shape[time], primfunc_name_hint="places")
    return bb.call_te(turned, x, found, primfunc_name_hint="reverse_sequence", primfunc_attrs={"op_pattern": 2})


def _rms_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Over all axes, of which TVM's operator makes a tensor function without any. Other cases are TVM's.

    ``x * rsqrt(mean(x * x) + epsilon) * scale``
    """
    (x, scale), emit = inputs[:2], emitter(bb)
    if int(attrs.get("axis", -1)) % len(x.ty.shape) or dtype_of(x) != "float32":
        return None
    mean = emit("mean", emit("multiply", x, x), keepdims=True)
    root = emit("rsqrt", emit("add", mean, float(attrs.get("epsilon", 1e-5))))
    return emit("multiply", emit("multiply", x, root), scale)


def _slice(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Before opset 10, where attributes say what is taken; else TVM's."""
    if "starts" not in attrs:
        return None
    x, starts, ends = inputs[0], list(attrs["starts"]), list(attrs["ends"])
    axes = [int(axis) % len(x.ty.shape) for axis in attrs.get("axes", range(len(starts)))]
    if not len(starts) == len(ends) == len(axes):
        raise ValueError(f"starts, ends and axes must be equally many, got {len(starts)}, {len(ends)} and {len(axes)}")
    extents = [size_of(x.ty.shape[axis]) for axis in axes]
    if not any(isinstance(extent, Size) for extent in extents):
        bounds = [slice(start, end).indices(n) for start, end, n in zip(starts, ends, extents, strict=True)]
        starts, ends = [start for start, _, _ in bounds], [max(start, end) for start, end, _ in bounds]
    return emitter(bb)("strided_slice", x, axes=axes, begin=starts, end=ends)


def _pad(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Around (``mode="wrap"``) goes what negative numbers leave; TVM wraps what was there before, and pads then."""
    from tvm import topi

    pads = array_of(inputs[1]) if text(attrs, "mode", "constant") == "wrap" else None
    if pads is None or (pads >= 0).all():
        return None
    x = inputs[0]
    rank = len(x.ty.shape)
    axes = array_of(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else np.arange(rank)
    around = np.zeros((2, rank), int)
    around[:, axes] = pads.reshape(2, -1)
    kept = [slice(-min(before, 0), int(size) + min(after, 0))
            for before, after, size in zip(*around.tolist(), x.ty.shape, strict=True)]
    x = emitter(bb)("strided_slice", x, axes=list(range(rank)), begin=[each.start for each in kept],
                    end=[each.stop for each in kept])
    return bb.emit_te(topi.nn.circular_pad, x, *np.maximum(around, 0).tolist())


def _space_to_depth(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Channels outermost (``mode="CRD"``); TVM's converter passes over the mode."""
    if text(attrs, "mode", "DCR") == "DCR":
        return None
    n, c, h, w = (int(extent) for extent in inputs[0].ty.shape)
    size = int(attrs["blocksize"])
    emit = emitter(bb)
    tiles = emit("reshape", inputs[0], (n, c, h // size, size, w // size, size))
    moved = emit("permute_dims", tiles, [0, 1, 3, 5, 2, 4])
    return emit("reshape", moved, (n, c * size * size, h // size, w // size))


def _tile(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """A broadcast where only axes of length 1 are repeated; of others, TVM's kernel."""
    repeats, shape = array_of(inputs[1]), list(inputs[0].ty.shape)
    if repeats is None or any(count != 1 and not (count > 1 and size_of(size) == 1)
                              for size, count in zip(shape, repeats, strict=True)):
        return None
    whole = [size if count == 1 else int(count) for size, count in zip(shape, repeats, strict=True)]
    return emitter(bb)("broadcast_to", inputs[0], whole)


def _top_k(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``TopK(x, k)`` --> indices of a stable sort, the first k, and the elements there: one result a kernel."""
    from tvm import relax

    x, emit, count = inputs[0], emitter(bb), constant_at(inputs, 1, "k")
    axis = int(attrs.get("axis", -1)) % len(x.ty.shape)
    k = int(attrs["k"] if count is None else count.item())
    keys, dtype = x, dtype_of(x)
    if dtype in ("int8", "int16", "uint8", "uint16", "bfloat16"):  # TVM's sort knows other numbers only
        keys = emit("astype", x, "float32" if dtype == "bfloat16" else "int32")
    elif dtype == "uint32":
        keys = emit("astype", x, "int64")
    elif dtype == "uint64":  # the least becomes the least that is signed
        keys = emit("bitwise_xor", emit("astype", x, "int64"), relax.const(np.iinfo("int64").min, "int64"))
    order = emit("argsort", keys, axis, bool(attrs.get("largest", 1)), "int64")
    indices = emit("strided_slice", order, axes=[axis], begin=[0], end=[k])
    return relax.Tuple([emit("gather_elements", x, indices, axis), indices])


CONVERTERS: dict[str, elementwise.Converter] = {
    "BatchNormalization": _batch_norm,
    "BitCast": elementwise.bit_cast,
    "BitShift": elementwise.bit_shift,
    "Cast": _cast,
    "Clip": elementwise.clip,
    "Col2Im": _col2im,
    "ConvInteger": conv_integer,
    "ConvTranspose": _conv_transpose,
    "Cosh": functools.partial(elementwise.hyperbolic, sign=1),
    "CumProd": _cumulative_product,
    "DFT": dft,
    "DequantizeLinear": dequantize_linear,
    "Dropout": elementwise.dropout,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "Einsum": _einsum,
    "Equal": _equal,
    "EyeLike": _eye_like,
    "Elu": functools.partial(elementwise.elu, alpha=1.0, gamma=1.0),
    "GRU": gru,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GlobalAveragePool": _global_pool,
    "GlobalLpPool": _global_pool,
    "GlobalMaxPool": _global_pool,
    GROUPED: grouped_mat_mul,
    GROUPED_BITS: grouped_mat_mul_nbits,
    "Hardmax": _hardmax,
    "IsInf": elementwise.is_inf,
    "LRN": _lrn,
    "LSTM": lstm,
    "MatMulInteger": mat_mul_integer,
    "Max": elementwise.chain("maximum"),
    "Mean": elementwise.mean,
    "Min": elementwise.chain("minimum"),
    "Mod": elementwise.modulo,
    "OneHot": _one_hot,
    "PRelu": elementwise.prelu,
    "Pad": _pad,
    "Pow": elementwise.power,
    "QuantizeLinear": quantize_linear,
    "RMSNormalization": _rms_normalization,
    "RNN": rnn,
    "ReduceMax": functools.partial(_truths, operator="max"),
    "ReduceMin": functools.partial(_truths, operator="min"),
    "Resize": resize,
    "RoiAlign": roi_align,
    "ReverseSequence": _reverse_sequence,
    "ScatterND": scatter_nd,
    "Sinh": functools.partial(elementwise.hyperbolic, sign=-1),
    "STFT": stft,
    "Selu": functools.partial(elementwise.elu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "Sign": elementwise.sign,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Sum": elementwise.chain("add"),
    "ThresholdedRelu": elementwise.thresholded_relu,
    "Tile": _tile,
    "TopK": _top_k,
}
