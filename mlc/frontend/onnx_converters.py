"""Our own converters where TVM's are unsafe or make slow code. Each takes Relax expressions and returns one.

A converter returns ``None`` where the node is not its case; TVM's is used then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_resize import resize

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
    """The identity outside training; its mask and its training mode are refused before conversion."""
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
    """``x ** 3`` --> ``x * x * x`` and the like: LLVM calls libm once per element for a power."""
    import tvm

    base, exponent = inputs
    if not isinstance(exponent, tvm.ir.GenericConst) or not _dtype(base).startswith("float"):
        return None
    values = exponent.value.numpy()
    if values.size != 1 or values.ndim > len(base.ty.shape):
        return None
    return _constant_power(bb, base, float(values.reshape(())))


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


def _dtype(expr: Any) -> str:
    return str(expr.ty.dtype)


CONVERTERS: dict[str, Converter] = {
    "Clip": _clip,
    "Dropout": _dropout,
    "Gather": _gather,
    "LRN": _lrn,
    "Max": _chain("maximum"),
    "Mean": _mean,
    "Min": _chain("minimum"),
    "Pow": _pow,
    "Resize": resize,
    "Sum": _chain("add"),
}
