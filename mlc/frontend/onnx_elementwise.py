"""mlc's own converters of elementwise operators; :mod:`mlc.frontend.onnx_converters` explains what a converter is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, constant_at, dtype_of, emitter, input_at, text
from mlc.sizes import size_of

__all__ = [
    "Converter", "bit_cast", "bit_shift", "chain", "clip", "constant_power", "dropout", "elu", "hyperbolic",
    "is_inf", "mean", "modulo", "power", "prelu", "sign", "thresholded_relu",
]

Converter = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # block builder, inputs, attributes


def chain(name: str) -> Converter:
    """``Sum(a, b, c)`` --> ``a + b + c``. TVM stacks broadcast copies and reduces them, which hides a residual add."""

    def convert(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
        return functools.reduce(functools.partial(emitter(bb), name), inputs)

    return convert


def mean(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    total = chain("add")(bb, inputs, attrs)
    return emitter(bb, dtype_of(total))("divide", total, float(len(inputs)))


def dropout(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The identity outside training; its mask is refused before conversion."""
    training = constant_at(inputs, 2, "training_mode")
    if training is not None and training.any():
        raise ValueError("training_mode must be false")
    return inputs[0]


def clip(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
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


def power(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``x ** 3`` --> ``x * x * x`` and the like: LLVM calls libm once per element for a power.

    The exponent may have another type than the base, which is the result's; TVM's operator wants one type.
    """
    (base, exponent), emit = inputs, emitter(bb)
    dtype, values = dtype_of(base), array_of(exponent)
    if values is not None and dtype.startswith("float") and values.size == 1 and values.ndim <= len(base.ty.shape):
        found = constant_power(bb, base, float(values.reshape(())))
        if found is not None:
            return found
    if dtype == dtype_of(exponent) and dtype.startswith(("float", "bfloat")):
        return None
    common = dtype if dtype == dtype_of(exponent) else np.promote_types(dtype, dtype_of(exponent)).name
    both = [emit("astype", value, common) for value in inputs]
    whole = np.dtype(common).kind in "iu"
    return emit("astype", _whole_power(bb, *both) if whole else emit("power", *both), dtype)


def _whole_power(bb: Any, base: Any, exponent: Any) -> Any:
    """The power of whole numbers: the product of the squares that the exponent's bits name. A negative exponent leaves
    something of 1 and -1 alone; of others more than 63 leave nothing of 64 bits."""
    from tvm import relax

    emit, dtype = emitter(bb), dtype_of(base)

    def number(value: int) -> Any:
        return relax.const(value, dtype)

    bits = 6
    size = exponent if dtype.startswith("uint") else emit("abs", exponent)
    odd = emit("mod", size, number(2))  # which -1 hangs on
    left = emit("minimum", size, emit("add", number(62), odd))
    result, square = number(1), base
    for bit in range(bits):
        taken = emit("equal", emit("mod", left, number(2)), number(1))
        result = emit("where", taken, emit("multiply", result, square), result)
        if bit < bits - 1:
            left, square = emit("floor_divide", left, number(2)), emit("multiply", square, square)
    if dtype.startswith("uint"):
        return result
    own = emit("equal", emit("multiply", base, base), number(1))
    kept = emit("logical_or", emit("greater_equal", exponent, number(0)), own)
    return emit("where", kept, result, number(0))


def constant_power(bb: Any, base: Any, exponent: float) -> Any:
    """The power without libm's function; None for an exponent that is not one of the usual ones."""
    emit = emitter(bb)
    if exponent == 2.0:
        return emit("multiply", base, base)
    if exponent == 3.0:
        return emit("multiply", emit("multiply", base, base), base)
    if exponent == 0.5:
        return emit("sqrt", base)
    if exponent == 0.75:  # the usual exponent of local response normalisation
        root = emit("sqrt", base)
        return emit("multiply", root, emit("sqrt", root))
    return None


def sign(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """NaN of NaN; TVM's operator is made of comparisons and gives 0."""
    x, emit = inputs[0], emitter(bb)
    return emit("where", emit("isnan", x), x, emit("sign", x)) if dtype_of(x).startswith(("float", "bfloat")) else None


def is_inf(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """One sign of infinity; TVM's converter passes over the attributes that say which."""
    from tvm import relax

    x = inputs[0]
    signs = [attrs.get("detect_positive", 1), attrs.get("detect_negative", 1)]
    if all(signs):
        return None
    if not any(signs):
        return relax.op.zeros(x.ty.shape, "bool")
    return relax.op.equal(x, relax.const(np.inf if signs[0] else -np.inf, dtype_of(x)))


def modulo(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The remainder of floating-point numbers with the sign of the divisor: C's, and the divisor added where the signs
    differ. TVM subtracts a multiple of the divisor, which makes NaN of an infinite one."""
    x, y = inputs
    if attrs.get("fmod", 0) or dtype_of(x) not in ("float16", "float32", "float64"):
        return None
    emit = emitter(bb, dtype_of(x))
    remainder = emit("mod", x, y)
    differ = emit("logical_xor", emit("less", remainder, 0.0), emit("less", y, 0.0))
    wrong = emit("logical_and", emit("not_equal", remainder, 0.0), differ)
    return emit("where", wrong, emit("add", remainder, y), remainder)


def hyperbolic(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], sign: int) -> Any:
    """``Sinh`` (``sign`` -1) and ``Cosh`` (1), which TVM's code generators lack: ``(exp(x) + sign exp(-x)) / 2``.

    The difference of a sine loses its digits where x is small; there it is ``x + x^3/3! + x^5/5! + x^7/7!``, which
    is wrong by less than 2e-9 of it up to 1/4.
    """
    x, emit = inputs[0], emitter(bb, dtype_of(inputs[0]))
    powers = emit("exp", x), emit("exp", emit("negative", x))
    result = emit("multiply", emit("add" if sign > 0 else "subtract", *powers), 0.5)
    if sign > 0:
        return result
    square = emit("multiply", x, x)
    series = emit("add", emit("multiply", square, 1 / 5040), 1 / 120)
    for coefficient in (1 / 6, 1.0):
        series = emit("add", emit("multiply", series, square), coefficient)
    return emit("where", emit("less", square, 1 / 16), emit("multiply", x, series), result)


def elu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], alpha: float, gamma: float) -> Any:
    """``gamma * where(x > 0, x, alpha * (exp(x) - 1))`` in 16 bits, where TVM's converter mixes types."""
    x, emit = inputs[0], emitter(bb, dtype_of(inputs[0]))
    if dtype_of(x) in ("float32", "float64"):
        return None
    below = emit("multiply", emit("subtract", emit("exp", x), 1.0), float(attrs.get("alpha", alpha)))
    result = emit("where", emit("greater", x, 0.0), x, below)
    return result if gamma == 1.0 else emit("multiply", result, float(attrs.get("gamma", gamma)))


def prelu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``where(x < 0, slope * x, x)`` of what TVM's operator does not take: bfloat16, tensors without channels, slopes
    that are neither one nor one for each channel, and those that are not known to be finite, by which it multiplies 0
    as well."""
    (x, slope), emit = inputs, emitter(bb, dtype_of(inputs[0]))
    if dtype_of(slope) != dtype_of(x):
        raise ValueError(f"its slope must be of the type of its input, {dtype_of(x)}, got {dtype_of(slope)}")
    known, rank = array_of(slope), len(x.ty.shape)
    if dtype_of(x) != "bfloat16" and rank > 1 and known is not None and np.isfinite(known).all():
        channels = [1, size_of(x.ty.shape[1]), *[1] * (rank - 2)]
        if known.size == 1 or [1] * (rank - known.ndim) + list(known.shape) == channels:
            return None
    return emit("where", emit("less", x, 0.0), emit("multiply", x, slope), x)


def thresholded_relu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``where(x > alpha, x, 0)``. TVM multiplies by the comparison, which makes NaN of an infinity."""
    x, emit = inputs[0], emitter(bb, dtype_of(inputs[0]))
    return emit("where", emit("greater", x, float(attrs.get("alpha", 1.0))), x, 0.0)


def bit_cast(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """Reinterpret the bits as another type of the same size."""
    from onnx import helper
    from tvm import relax, te, tirx

    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(int(attrs["to"]))).name
    x = inputs[0]
    if "bool" in (dtype, dtype_of(x)):  # which are bytes
        return relax.op.astype(x, dtype)
    return bb.call_te(
        lambda a: te.compute(a.shape, lambda *i: tirx.reinterpret(dtype, a(*i)), name="bit_cast"), x,
        primfunc_name_hint="bit_cast")


def bit_shift(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """As numpy shifts by a negative number or by all bits and more: nothing is left but the sign, to the right. What
    a CPU's instruction makes of such a number depends on the CPU and on the vector's width."""
    from tvm import relax

    (x, by), dtype, emit = inputs, dtype_of(inputs[0]), emitter(bb)
    left = text(attrs, "direction", "") == "LEFT"
    array, amounts = array_of(x), array_of(by)
    if array is not None and amounts is not None:
        return relax.const((np.left_shift if left else np.right_shift)(array, amounts), dtype)
    info, zero = np.iinfo(dtype), relax.const(0, dtype)
    inside = emit("less", by, relax.const(info.bits, dtype))
    if info.min < 0:
        inside = emit("logical_and", inside, emit("greater_equal", by, zero))
        if not left:
            return emit("right_shift", x, emit("where", inside, by, relax.const(info.bits - 1, dtype)))
    shifted = emit("left_shift" if left else "right_shift", x, emit("where", inside, by, zero))
    return emit("where", inside, shifted, zero)
