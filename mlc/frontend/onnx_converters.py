"""Our own converters where TVM's are unsafe or make slow code. Each takes Relax expressions and returns one.

A node with several outputs gives a tuple of them, in their order, whether all are used or not. A converter returns
``None`` where the node is not its case; TVM's is used then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_integer import conv_integer, mat_mul_integer
from mlc.frontend.onnx_quantised import dequantize_linear, dynamic_quantize_linear, quantize_linear
from mlc.frontend.onnx_recurrent import gru, lstm, rnn
from mlc.frontend.onnx_resize import resize
from mlc.frontend.onnx_signal import dft, stft
from mlc.frontend.onnx_sizes import as_tensor
from mlc.frontend.onnx_values import array_of, constant_at, dtype_of, input_at, required_at, text
from mlc.sizes import Size, size_of

__all__ = ["CONVERTERS", "Converter"]

Converter = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # block builder, inputs, attributes


def _chain(name: str) -> Converter:
    """``Sum(a, b, c)`` --> ``a + b + c``. TVM stacks broadcast copies and reduces them, which hides a residual add."""

    def convert(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
        from tvm import relax

        operator = getattr(relax.op, name)
        return functools.reduce(lambda a, b: bb.normalize(operator(a, b)), inputs)

    return convert


def _mean(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    from tvm import relax

    total = _chain("add")(bb, inputs, attrs)
    return relax.op.divide(total, relax.const(float(len(inputs)), dtype_of(total)))


def _dropout(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The identity outside training; its mask is refused before conversion."""
    training = constant_at(inputs, 2, "training_mode")
    if training is not None and training.any():
        raise ValueError("training_mode must be false")
    return inputs[0]


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
    if array is not None:
        array = np.where(array < 0, array + extent, array).astype(array.dtype)
        if constant is not None:
            return relax.const(np.take(constant, array, axis=axis, mode="clip"))
        return relax.op.take(data, relax.const(array, str(array.dtype)), axis, mode="clip")
    dtype = dtype_of(indices)
    negative = bb.normalize(relax.op.less(indices, relax.const(0, dtype)))
    if isinstance(extent, Size):
        many = bb.normalize(relax.op.astype(as_tensor(bb, extent), dtype))
    else:
        many = relax.const(extent, dtype)
    shifted = bb.normalize(relax.op.add(indices, many))
    return relax.op.take(data, bb.normalize(relax.op.where(negative, shifted, indices)), axis, mode="clip")


def _pow(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``x ** 3`` --> ``x * x * x`` and the like: LLVM calls libm once per element for a power.

    The exponent may have another type than the base, which is the result's; TVM's operator wants one type.
    """
    from tvm import relax

    base, exponent = inputs
    dtype, values = dtype_of(base), array_of(exponent)
    if values is not None and dtype.startswith("float") and values.size == 1 and values.ndim <= len(base.ty.shape):
        found = _constant_power(bb, base, float(values.reshape(())))
        if found is not None:
            return found
    if dtype == dtype_of(exponent):
        return None
    common = np.promote_types(dtype, dtype_of(exponent)).name
    both = [bb.normalize(relax.op.astype(value, common)) for value in inputs]
    return relax.op.astype(bb.normalize(relax.op.power(*both)), dtype)


def _constant_power(bb: Any, base: Any, exponent: float) -> Any:
    from tvm import relax

    if exponent == 2.0:
        return relax.op.multiply(base, base)
    if exponent == 3.0:
        return relax.op.multiply(bb.normalize(relax.op.multiply(base, base)), base)
    if exponent == 0.5:
        return relax.op.sqrt(base)
    if exponent == 0.75:  # the usual exponent of local response normalisation
        root = bb.normalize(relax.op.sqrt(base))
        return relax.op.multiply(root, bb.normalize(relax.op.sqrt(root)))
    return None


def _lrn(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Local response normalisation over channels as elementwise arithmetic on shifted copies, which fuse into one.

    ``y = x / (bias + alpha / size * sum(x[c - (size-1)//2 .. c + size//2] ** 2)) ** beta``. TVM makes a 3-d pooling.
    """
    from tvm import relax

    data = inputs[0]
    size, dtype = int(attrs["size"]), dtype_of(data)
    rank, channels = len(data.ty.shape), int(data.ty.shape[1])
    widths = [0, 0, (size - 1) // 2, size // 2] + [0, 0] * (rank - 2)
    squares = bb.normalize(relax.op.multiply(data, data))
    padded = bb.normalize(relax.op.nn.pad(squares, widths))
    shifted = [
        bb.normalize(relax.op.strided_slice(padded, axes=[1], begin=[s], end=[s + channels])) for s in range(size)
    ]
    total = functools.reduce(lambda a, b: bb.normalize(relax.op.add(a, b)), shifted)
    scale = relax.const(float(attrs.get("alpha", 1e-4)) / size, dtype)
    bias = relax.const(float(attrs.get("bias", 1.0)), dtype)
    base = bb.normalize(relax.op.add(bb.normalize(relax.op.multiply(total, scale)), bias))
    beta = float(attrs.get("beta", 0.75))
    power = _constant_power(bb, base, beta)
    if power is None:
        power = relax.op.power(base, relax.const(beta, dtype))
    return relax.op.divide(data, bb.normalize(power))


def _clip(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Constant bounds as operators of the graph. TVM makes tensor functions of them, which no layout passes through.

    ``Clip(x, lo, hi)`` --> ``minimum(maximum(x, lo), hi)``; a bound that is missing or NaN does not bound.
    """
    from tvm import relax

    given = [input_at(inputs, position) for position in (1, 2)]
    arrays = [array_of(bound) for bound in given]
    if any(bound is not None and array is None for bound, array in zip(given, arrays, strict=True)):
        return None
    bounds = [attrs.get(name) if array is None else array.item()
              for name, array in zip(("min", "max"), arrays, strict=True)]
    result, dtype = inputs[0], dtype_of(inputs[0])
    for bound, operator in zip(bounds, (relax.op.maximum, relax.op.minimum), strict=True):
        if bound is not None and not np.isnan(bound):
            result = bb.normalize(operator(result, relax.const(bound, dtype)))
    return result


def _col2im(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Patches that lie beside each other are moved, others added up by a transposed convolution with unit filters.

    ``reshape(permute(reshape(x, (n, c, kh, kw, h, w))))``. Raises ``ValueError`` for patches that overlap in images
    of other than two dimensions.
    """
    from tvm import relax

    x = inputs[0]
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
        split = bb.normalize(relax.op.reshape(x, (batch, channels, *patch, *counts)))
        pairs = [axis for i in range(rank) for axis in (2 + rank + i, 2 + i)]
        moved = bb.normalize(relax.op.permute_dims(split, [0, 1, *pairs]))
        return relax.op.reshape(moved, (batch, channels, *image))
    if rank != 2:
        raise ValueError(f"patches that overlap must be of an image of two dimensions, got {rank}")
    taps = int(np.prod(patch))
    units = np.tile(np.eye(taps, dtype=dtype_of(x)).reshape(taps, 1, *patch), (channels, 1, 1, 1))
    rest = [extent - (n - 1) * stride - size
            for extent, n, stride, size in zip(padded, counts, strides, covered, strict=True)]
    columns = bb.normalize(relax.op.reshape(x, (batch, channels * taps, *counts)))
    return relax.op.nn.conv2d_transpose(columns, relax.const(units), strides=strides, padding=pads,
                                        output_padding=rest, dilation=dilations, groups=channels)


def _is_inf(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """One sign of infinity; TVM's converter passes over the attributes that say which."""
    from tvm import relax

    x = inputs[0]
    signs = [attrs.get("detect_positive", 1), attrs.get("detect_negative", 1)]
    if all(signs):
        return None
    if not any(signs):
        return relax.op.zeros(x.ty.shape, "bool")
    return relax.op.equal(x, relax.const(np.inf if signs[0] else -np.inf, dtype_of(x)))


def _sign(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """NaN of NaN; TVM's operator is made of comparisons and gives 0."""
    from tvm import relax

    x = inputs[0]
    if not dtype_of(x).startswith(("float", "bfloat")):
        return None
    unordered = bb.normalize(relax.op.isnan(x))
    return relax.op.where(unordered, x, bb.normalize(relax.op.sign(x)))


def _batch_norm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """By elementwise arithmetic where a statistic or a weight is no constant: ``x * factor + (bias - mean * factor)``
    with ``factor = scale / sqrt(variance + epsilon)``. Else TVM's operator, which is folded."""
    from tvm import relax

    if all(array_of(value) is not None for value in inputs[1:5]):
        return None
    x, scale, bias, mean, variance = inputs
    epsilon = relax.const(float(attrs.get("epsilon", 1e-5)), dtype_of(variance))

    def emit(operator: Callable[..., Any], *args: Any) -> Any:
        return bb.normalize(operator(*args))

    op, wide = relax.op, [-1, *[1] * (len(x.ty.shape) - 2)]
    root = emit(op.sqrt, emit(op.add, variance, epsilon))
    factor = emit(op.divide, scale, root)
    added = emit(op.subtract, bias, emit(op.multiply, mean, factor))
    factor, added = (emit(op.reshape, value, wide) for value in (factor, added))
    return op.add(emit(op.multiply, x, factor), added)


def _cumulative_product(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``CumProd(x, axis)``, from the end where ``reverse``, without the element itself where ``exclusive``."""
    from tvm import relax

    x, axis = inputs[0], int(required_at(inputs, 1, "axis").item())
    axis %= len(x.ty.shape)
    if attrs.get("reverse", 0):
        x = bb.normalize(relax.op.flip(x, axis))
    result = relax.op.cumprod(x, axis, dtype_of(x), bool(attrs.get("exclusive", 0)))
    return relax.op.flip(bb.normalize(result), axis) if attrs.get("reverse", 0) else result


def _truths(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], operator: str) -> Any:
    """``ReduceMax`` and ``ReduceMin`` of truth values, as of bytes; of others, TVM's."""
    from tvm import relax

    x, axes = inputs[0], constant_at(inputs, 1, "axes")
    if dtype_of(x) != "bool":
        return None
    given = attrs.get("axes") if axes is None else axes.tolist()
    if not given:
        if attrs.get("noop_with_empty_axes", 0):
            return x
        given = range(len(x.ty.shape))
    found = getattr(relax.op, operator)(bb.normalize(relax.op.astype(x, "uint8")), list(given),
                                        bool(attrs.get("keepdims", 1)))
    return relax.op.astype(bb.normalize(found), "bool")


def _mod(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The remainder of floating-point numbers with the sign of the divisor: C's, and the divisor added where the signs
    differ. TVM subtracts a multiple of the divisor, which makes NaN of an infinite one."""
    from tvm import relax

    x, y = inputs
    if attrs.get("fmod", 0) or dtype_of(x) not in ("float16", "float32", "float64"):
        return None

    def emit(operator: Callable[..., Any], *args: Any) -> Any:
        return bb.normalize(operator(*args))

    op, zero = relax.op, relax.const(0.0, dtype_of(x))
    rest = emit(op.mod, x, y)
    other = emit(op.logical_xor, emit(op.less, rest, zero), emit(op.less, y, zero))
    wrong = emit(op.logical_and, emit(op.not_equal, rest, zero), other)
    return op.where(wrong, emit(op.add, rest, y), rest)


def _bit_cast(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The same bits as another type of as many."""
    from onnx import helper
    from tvm import relax, te, tirx

    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(int(attrs["to"]))).name
    x = inputs[0]
    if "bool" in (dtype, dtype_of(x)):  # which are bytes
        return relax.op.astype(x, dtype)
    return bb.call_te(
        lambda a: te.compute(a.shape, lambda *i: tirx.reinterpret(dtype, a(*i)), name="bit_cast"), x,
        primfunc_name_hint="bit_cast")


def _einsum(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Sums of 16-bit floating-point numbers in float32, as of all operators."""
    from tvm import relax

    dtype = dtype_of(inputs[0])
    if dtype not in ("float16", "bfloat16"):
        return None
    wide = [bb.normalize(relax.op.astype(x, "float32")) for x in inputs]
    found = bb.normalize(relax.op.einsum(bb.normalize(relax.Tuple(wide)), text(attrs, "equation", "")))
    return relax.op.astype(found, dtype)


def _elu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], alpha: float, gamma: float) -> Any:
    """``gamma * where(x > 0, x, alpha * (exp(x) - 1))`` in 16 bits, where TVM's converter mixes types."""
    from tvm import relax

    op, x, dtype = relax.op, inputs[0], dtype_of(inputs[0])
    if dtype in ("float32", "float64"):
        return None
    below, factor = (relax.const(float(attrs.get(name, number)), dtype)
                     for name, number in (("alpha", alpha), ("gamma", gamma)))
    curve = bb.normalize(op.subtract(bb.normalize(op.exp(x)), relax.const(1.0, dtype)))
    positive = bb.normalize(op.greater(x, relax.const(0.0, dtype)))
    result = op.where(positive, x, bb.normalize(op.multiply(curve, below)))
    return result if gamma == 1.0 else op.multiply(bb.normalize(result), factor)


def _prelu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``where(x < 0, slope * x, x)`` in bfloat16, which TVM's operator does not take."""
    from tvm import relax

    op, (x, slope) = relax.op, inputs
    if dtype_of(x) != "bfloat16":
        return None
    negative = bb.normalize(op.less(x, relax.const(0.0, dtype_of(x))))
    return op.where(negative, bb.normalize(op.multiply(x, slope)), x)


def _thresholded_relu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``where(x > alpha, x, 0)``. TVM multiplies by the comparison, which makes NaN of an infinity."""
    from tvm import relax

    x, dtype = inputs[0], dtype_of(inputs[0])
    above = bb.normalize(relax.op.greater(x, relax.const(float(attrs.get("alpha", 1.0)), dtype)))
    return relax.op.where(above, x, relax.const(0.0, dtype))


def _bit_shift(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """As numpy shifts by a negative number or by all bits and more: nothing is left but the sign, to the right. What
    a CPU's instruction makes of such a number depends on the CPU and on the vector's width."""
    from tvm import relax

    (x, by), dtype = inputs, dtype_of(inputs[0])
    left = text(attrs, "direction", "") == "LEFT"
    array, amounts = array_of(x), array_of(by)
    if array is not None and amounts is not None:
        return relax.const((np.left_shift if left else np.right_shift)(array, amounts), dtype)

    def emit(operator: Callable[..., Any], *args: Any) -> Any:
        return bb.normalize(operator(*args))

    info = np.iinfo(dtype)
    zero = relax.const(0, dtype)
    inside = emit(relax.op.less, by, relax.const(info.bits, dtype))
    if info.min < 0:
        inside = emit(relax.op.logical_and, inside, emit(relax.op.greater_equal, by, zero))
        if not left:
            return relax.op.right_shift(x, emit(relax.op.where, inside, by, relax.const(info.bits - 1, dtype)))
    shift = relax.op.left_shift if left else relax.op.right_shift
    return relax.op.where(inside, emit(shift, x, emit(relax.op.where, inside, by, zero)), zero)


def _hyperbolic(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], sign: int) -> Any:
    """``Sinh`` (``sign`` -1) and ``Cosh`` (1), which TVM's code generators lack: ``(exp(x) + sign exp(-x)) / 2``.

    The difference of a sine loses its digits where x is small; there it is ``x + x^3/3! + x^5/5! + x^7/7!``, which
    is wrong by less than 2e-9 of it up to 1/4.
    """
    from tvm import relax

    x = inputs[0]

    def emit(operator: Callable[..., Any], *args: Any) -> Any:
        found = [relax.const(arg, dtype_of(x)) if isinstance(arg, float) else arg for arg in args]
        return bb.normalize(operator(*found))

    op = relax.op
    powers = emit(op.exp, x), emit(op.exp, emit(op.negative, x))
    result = emit(op.multiply, emit(op.add if sign > 0 else op.subtract, *powers), 0.5)
    if sign > 0:
        return result
    square = emit(op.multiply, x, x)
    series = emit(op.add, emit(op.multiply, square, 1 / 5040), 1 / 120)
    for coefficient in (1 / 6, 1.0):
        series = emit(op.add, emit(op.multiply, series, square), coefficient)
    return emit(op.where, emit(op.less, square, 1 / 16), emit(op.multiply, x, series), result)


def _one_hot(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``OneHot(i, depth, (off, on))`` --> ``where(i == arange(depth), on, off)``; indices from -depth to depth - 1."""
    from tvm import relax

    indices = inputs[0]
    count, (off, on) = int(required_at(inputs, 1, "depth").item()), required_at(inputs, 2, "values")
    rank = len(indices.ty.shape)
    axis = int(attrs.get("axis", -1)) % (rank + 1)
    whole = bb.normalize(relax.op.astype(indices, "int32"))
    negative = bb.normalize(relax.op.less(whole, relax.const(0, "int32")))
    shifted = bb.normalize(relax.op.add(whole, relax.const(count, "int32")))
    wrapped = bb.normalize(relax.op.expand_dims(bb.normalize(relax.op.where(negative, shifted, whole)), axis))
    classes = np.arange(count, dtype="int32").reshape([count if i == axis else 1 for i in range(rank + 1)])
    chosen = bb.normalize(relax.op.equal(wrapped, relax.const(classes)))
    return relax.op.where(chosen, relax.const(on), relax.const(off))


def _rms_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Over all axes, of which TVM's operator makes a tensor function without any. Other cases are TVM's.

    ``x * rsqrt(mean(x * x) + epsilon) * scale``
    """
    from tvm import relax

    x, scale = inputs[:2]
    if int(attrs.get("axis", -1)) % len(x.ty.shape) or dtype_of(x) != "float32":
        return None
    squares = bb.normalize(relax.op.multiply(x, x))
    mean = bb.normalize(relax.op.mean(squares, keepdims=True))
    added = bb.normalize(relax.op.add(mean, relax.const(float(attrs.get("epsilon", 1e-5)), "float32")))
    normalised = bb.normalize(relax.op.multiply(x, bb.normalize(relax.op.rsqrt(added))))
    return relax.op.multiply(normalised, scale)


def _space_to_depth(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Channels outermost (``mode="CRD"``); TVM's converter passes over the mode."""
    from tvm import relax

    if text(attrs, "mode", "DCR") == "DCR":
        return None
    n, c, h, w = (int(extent) for extent in inputs[0].ty.shape)
    size = int(attrs["blocksize"])
    tiles = bb.normalize(relax.op.reshape(inputs[0], (n, c, h // size, size, w // size, size)))
    moved = bb.normalize(relax.op.permute_dims(tiles, [0, 1, 3, 5, 2, 4]))
    return relax.op.reshape(moved, (n, c * size * size, h // size, w // size))


def _top_k(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``TopK(x, k)`` --> indices of a stable sort, the first k, and the elements there: one result a kernel."""
    from tvm import relax

    x, count = inputs[0], constant_at(inputs, 1, "k")
    axis = int(attrs.get("axis", -1)) % len(x.ty.shape)
    k = int(attrs["k"] if count is None else count.item())
    keys, dtype = x, dtype_of(x)
    if dtype in ("int8", "int16", "uint8", "uint16", "bfloat16"):  # TVM's sort knows other numbers only
        keys = bb.normalize(relax.op.astype(x, "float32" if dtype == "bfloat16" else "int32"))
    elif not dtype.startswith(("float", "int")):
        raise ValueError(f"the elements must be floating-point numbers or signed or short integers, got {dtype}")
    order = bb.normalize(relax.op.argsort(keys, axis, bool(attrs.get("largest", 1)), "int64"))
    indices = bb.normalize(relax.op.strided_slice(order, axes=[axis], begin=[0], end=[k]))
    return relax.Tuple([bb.normalize(relax.op.gather_elements(x, indices, axis)), indices])


CONVERTERS: dict[str, Converter] = {
    "BatchNormalization": _batch_norm,
    "BitCast": _bit_cast,
    "BitShift": _bit_shift,
    "Clip": _clip,
    "Col2Im": _col2im,
    "ConvInteger": conv_integer,
    "Cosh": functools.partial(_hyperbolic, sign=1),
    "CumProd": _cumulative_product,
    "DFT": dft,
    "DequantizeLinear": dequantize_linear,
    "Dropout": _dropout,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "Einsum": _einsum,
    "Elu": functools.partial(_elu, alpha=1.0, gamma=1.0),
    "GRU": gru,
    "Gather": _gather,
    "IsInf": _is_inf,
    "LRN": _lrn,
    "LSTM": lstm,
    "MatMulInteger": mat_mul_integer,
    "Max": _chain("maximum"),
    "Mean": _mean,
    "Min": _chain("minimum"),
    "Mod": _mod,
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pow": _pow,
    "QuantizeLinear": quantize_linear,
    "RMSNormalization": _rms_normalization,
    "RNN": rnn,
    "ReduceMax": functools.partial(_truths, operator="max"),
    "ReduceMin": functools.partial(_truths, operator="min"),
    "Resize": resize,
    "Sinh": functools.partial(_hyperbolic, sign=-1),
    "STFT": stft,
    "Selu": functools.partial(_elu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "Sign": _sign,
    "SpaceToDepth": _space_to_depth,
    "Sum": _chain("add"),
    "ThresholdedRelu": _thresholded_relu,
    "TopK": _top_k,
}
