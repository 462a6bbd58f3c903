"""Our own converters where TVM's are unsafe or make slow code. Each takes Relax expressions and returns one.

A node with several outputs gives a tuple of them, in their order, whether all are used or not. A converter returns
``None`` where the node is not its case; TVM's is used then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_recurrent import gru, lstm, rnn
from mlc.frontend.onnx_resize import resize
from mlc.frontend.onnx_signal import dft, stft

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
    return relax.op.divide(total, relax.const(float(len(inputs)), _dtype(total)))


def _dropout(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The identity outside training; its mask is refused before conversion."""
    import tvm

    training = inputs[2] if len(inputs) > 2 else None
    if training is not None and not (isinstance(training, tvm.ir.GenericConst) and not training.value.numpy().any()):
        raise ValueError("training_mode must be the constant false")
    return inputs[0]


def _gather(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Indices from -n to n - 1. TVM reads out of bounds for any other; here they are clamped.

    ``Gather(x, i)`` --> ``take(x, where(i < 0, i + n, i), mode="clip")``
    """
    import tvm
    from tvm import relax

    data, indices = inputs[0], inputs[1]
    if not isinstance(data.ty, relax.TensorType) or not isinstance(indices.ty, relax.TensorType):
        return None
    axis = int(attrs.get("axis", 0)) % len(data.ty.shape)
    extent = int(data.ty.shape[axis])
    if isinstance(indices, tvm.ir.GenericConst):
        array = indices.value.numpy()
        array = np.where(array < 0, array + extent, array).astype(array.dtype)
        if isinstance(data, tvm.ir.GenericConst):
            return relax.const(np.take(data.value.numpy(), array, axis=axis, mode="clip"))
        return relax.op.take(data, relax.const(array, str(array.dtype)), axis, mode="clip")
    dtype = _dtype(indices)
    negative = bb.normalize(relax.op.less(indices, relax.const(0, dtype)))
    shifted = bb.normalize(relax.op.add(indices, relax.const(extent, dtype)))
    return relax.op.take(data, bb.normalize(relax.op.where(negative, shifted, indices)), axis, mode="clip")


def _pow(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``x ** 3`` --> ``x * x * x`` and the like: LLVM calls libm once per element for a power.

    The exponent may have another type than the base, which is the result's; TVM's operator wants one type.
    """
    import tvm
    from tvm import relax

    base, exponent = inputs
    dtype = _dtype(base)
    if isinstance(exponent, tvm.ir.GenericConst) and dtype.startswith("float"):
        values = exponent.value.numpy()
        if values.size == 1 and values.ndim <= len(base.ty.shape):
            found = _constant_power(bb, base, float(values.reshape(())))
            if found is not None:
                return found
    if dtype == _dtype(exponent):
        return None
    common = np.promote_types(dtype, _dtype(exponent)).name
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
    size, dtype = int(attrs["size"]), _dtype(data)
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
    import tvm
    from tvm import relax

    given = [inputs[i] if i < len(inputs) else None for i in (1, 2)]
    if not all(bound is None or isinstance(bound, tvm.ir.GenericConst) for bound in given):
        return None
    bounds = [attrs.get(name) if bound is None else bound.value.numpy().item()
              for name, bound in zip(("min", "max"), given, strict=True)]
    result, dtype = inputs[0], _dtype(inputs[0])
    for bound, operator in zip(bounds, (relax.op.maximum, relax.op.minimum), strict=True):
        if bound is not None and not np.isnan(bound):
            result = bb.normalize(operator(result, relax.const(bound, dtype)))
    return result


def _col2im(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Patches that lie beside each other are moved, others added up by a transposed convolution with unit filters.

    ``reshape(permute(reshape(x, (n, c, kh, kw, h, w))))``. Raises ``ValueError`` for patches that overlap in images
    of other than two dimensions.
    """
    import tvm
    from tvm import relax

    x, *sizes = inputs
    if not all(isinstance(size, tvm.ir.GenericConst) for size in sizes):
        raise ValueError("the sizes of the image and of its patches must be constants")
    image, patch = ([int(extent) for extent in size.value.numpy()] for size in sizes)
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
    units = np.tile(np.eye(taps, dtype=_dtype(x)).reshape(taps, 1, *patch), (channels, 1, 1, 1))
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
    return relax.op.equal(x, relax.const(np.inf if signs[0] else -np.inf, _dtype(x)))


def _hyperbolic(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], sign: int) -> Any:
    """``Sinh`` (``sign`` -1) and ``Cosh`` (1), which TVM's code generators lack: ``(exp(x) + sign exp(-x)) / 2``.

    The difference of a sine loses its digits where x is small; there it is ``x + x^3/3! + x^5/5! + x^7/7!``, which
    is wrong by less than 2e-9 of it up to 1/4.
    """
    from tvm import relax

    x = inputs[0]

    def emit(operator: Callable[..., Any], *args: Any) -> Any:
        found = [relax.const(arg, _dtype(x)) if isinstance(arg, float) else arg for arg in args]
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
    import tvm
    from tvm import relax

    indices, depth, values = inputs
    if not all(isinstance(constant, tvm.ir.GenericConst) for constant in (depth, values)):
        raise ValueError("depth and values must be constants")
    count, (off, on) = int(depth.value.numpy().item()), values.value.numpy()
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
    if int(attrs.get("axis", -1)) % len(x.ty.shape) or _dtype(x) != "float32":
        return None
    squares = bb.normalize(relax.op.multiply(x, x))
    mean = bb.normalize(relax.op.mean(squares, keepdims=True))
    added = bb.normalize(relax.op.add(mean, relax.const(float(attrs.get("epsilon", 1e-5)), "float32")))
    normalised = bb.normalize(relax.op.multiply(x, bb.normalize(relax.op.rsqrt(added))))
    return relax.op.multiply(normalised, scale)


def _space_to_depth(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Channels outermost (``mode="CRD"``); TVM's converter passes over the mode."""
    from tvm import relax

    mode = attrs.get("mode", "DCR")
    if (mode.decode() if isinstance(mode, bytes) else mode) == "DCR":
        return None
    n, c, h, w = (int(extent) for extent in inputs[0].ty.shape)
    size = int(attrs["blocksize"])
    tiles = bb.normalize(relax.op.reshape(inputs[0], (n, c, h // size, size, w // size, size)))
    moved = bb.normalize(relax.op.permute_dims(tiles, [0, 1, 3, 5, 2, 4]))
    return relax.op.reshape(moved, (n, c * size * size, h // size, w // size))


def _top_k(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``TopK(x, k)`` --> indices of a stable sort, the first k, and the elements there: one result a kernel."""
    import tvm
    from tvm import relax

    x = inputs[0]
    axis = int(attrs.get("axis", -1)) % len(x.ty.shape)
    if len(inputs) > 1 and not isinstance(inputs[1], tvm.ir.GenericConst):
        raise ValueError("k must be a constant")
    k = int(inputs[1].value.numpy().item()) if len(inputs) > 1 else int(attrs["k"])
    keys, dtype = x, _dtype(x)
    if dtype in ("int8", "int16", "uint8", "uint16"):  # TVM's sort knows wider numbers only
        keys = bb.normalize(relax.op.astype(x, "int32"))
    elif not dtype.startswith(("float", "int")):
        raise ValueError(f"the elements must be floating-point numbers or signed or short integers, got {dtype}")
    order = bb.normalize(relax.op.argsort(keys, axis, bool(attrs.get("largest", 1)), "int64"))
    indices = bb.normalize(relax.op.strided_slice(order, axes=[axis], begin=[0], end=[k]))
    return relax.Tuple([bb.normalize(relax.op.gather_elements(x, indices, axis)), indices])


def _dtype(expr: Any) -> str:
    return str(expr.ty.dtype)


CONVERTERS: dict[str, Converter] = {
    "Clip": _clip,
    "Col2Im": _col2im,
    "Cosh": functools.partial(_hyperbolic, sign=1),
    "DFT": dft,
    "Dropout": _dropout,
    "GRU": gru,
    "Gather": _gather,
    "IsInf": _is_inf,
    "LRN": _lrn,
    "LSTM": lstm,
    "Max": _chain("maximum"),
    "Mean": _mean,
    "Min": _chain("minimum"),
    "OneHot": _one_hot,
    "Pow": _pow,
    "RMSNormalization": _rms_normalization,
    "RNN": rnn,
    "Resize": resize,
    "Sinh": functools.partial(_hyperbolic, sign=-1),
    "STFT": stft,
    "SpaceToDepth": _space_to_depth,
    "Sum": _chain("add"),
    "TopK": _top_k,
}
