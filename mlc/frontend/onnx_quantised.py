"""ONNX ``QuantizeLinear``, ``DequantizeLinear`` and ``DynamicQuantizeLinear`` as ONNX defines them.

With one scale, or one for each index of an axis, they are ``relax.quantize`` and ``relax.dequantize`` of a float32
scale, which round half to even and saturate before they convert. What these cannot say is made of plain operators:
a scale for each block, and quotients that are rounded to 16 bits. Integers of 4 and 2 bits are held in 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mlc.frontend.onnx_values import array_of, dtype_of, emitter, input_at
from mlc.sizes import size_of

__all__ = ["dequantize_linear", "dynamic_quantize_linear", "quantize_linear", "unpacked", "wrong_scale"]

_INTEGERS = ("int8", "uint8", "int16", "uint16")
_FLOATS = ("float32", "float16", "bfloat16")
#: least and largest value of the types that are held in 8 bits
_NARROW = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def wrong_scale(scale: np.ndarray, positive: bool = True) -> float | None:
    """The first scale that is not finite or, where it must be, not ``positive``; None where all are right."""
    wide = scale.astype("float64").ravel()
    wrong = wide[~np.isfinite(wide) | ((wide <= 0) & positive)]
    return float(wrong[0]) if wrong.size else None


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of ``bits`` bits in each byte, the lowest first, along the last axis."""
    shifts = np.arange(0, 8, bits, dtype="uint8")
    numbers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:-1], -1)


@dataclass(frozen=True)
class _Parameters:
    """The scale and zero point of a node. ``block`` is 0 where the scale has at most one dimension, along ``axis``."""

    scale: Any
    zero_point: Any
    axis: int
    block: int

    @property
    def rank(self) -> int:
        return len(self.scale.ty.shape)


def quantize_linear(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``saturate(round(x / scale) + zero_point)``, with the quotient in the wider of the types of ``x`` and ``scale``
    where ``precision`` names no other.

    Raises ``ValueError`` for parameters that ONNX forbids and for types that are not implemented.
    """
    from tvm import relax

    x = inputs[0]
    wanted = _output_type(attrs, input_at(inputs, 2))
    stored = _stored(wanted)
    given = _parameters(bb, x, inputs, attrs, stored, positive=True)
    source, divided = dtype_of(x), _precision(x, inputs[1], attrs)
    x, cut = _whole_blocks(bb, x, given)
    if given.block or divided != "float32":
        result = _quantised_by_parts(bb, x, given, divided, wanted, stored)
    else:
        if source != "float32":
            x = bb.normalize(relax.op.astype(x, "float32"))
        result = relax.op.quantize(x, given.scale, given.zero_point, given.axis, stored)
    if wanted in _NARROW and not given.block:
        result = relax.op.clip(bb.normalize(result), *_NARROW[wanted])
    return cut(result)


def dequantize_linear(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``(x - zero_point) * scale`` in float32, converted to the type of ``scale`` or to ``output_dtype``.

    That conversion is part of the operator where it can be, and no cast as a model has it: where 16-bit floats are
    only stored, weights stay integers.

    The scale of a block may be negative, as onnxruntime's quantiser of weights in 4 bits makes it so that the least
    integer is used, or zero, for a block of zeros. Of the attributes that no file has, those of a node that stands for
    another, ``table`` says that the integers of blocks are codes, and it is ``table[x] * scale``; ``fractional`` that
    the zero points of blocks are float32. Raises ``ValueError`` as :func:`quantize_linear` does.
    """
    from tvm import relax

    x = inputs[0]
    if dtype_of(x) not in (*_INTEGERS, "int32"):
        raise ValueError(f"what is dequantised must be integers of at most 16 bits or int32, got {dtype_of(x)}")
    zeros = "float32" if attrs.get("fractional") else dtype_of(x)
    given = _parameters(bb, x, inputs, attrs, zeros, positive=not attrs.get("block_size"))
    if dtype_of(inputs[1]) == "bfloat16":
        given = _as_blocks(x, given)
    x, cut = _whole_blocks(bb, x, given)
    wanted = _type_named(attrs["output_dtype"]) if attrs.get("output_dtype") else dtype_of(inputs[1])
    if wanted not in _FLOATS:
        raise ValueError(f"the result must be one of {', '.join(_FLOATS)}, got {wanted}")
    if given.block and attrs.get("table"):
        result = _looked_up_blocks(bb, x, given, np.array(attrs["table"], "float32"))
    elif given.block:
        narrow = wanted == dtype_of(inputs[1]) and zeros != "float32" and _exact(x, given, wanted)
        result = _dequantised_blocks(bb, x, given, wanted if narrow else "float32")
    else:  # which relax does not say of bfloat16
        made = wanted if wanted == "float16" else "float32"
        result = bb.normalize(relax.op.dequantize(x, given.scale, given.zero_point, given.axis, made))
    result = cut(result)
    return result if dtype_of(result) == wanted else relax.op.astype(result, wanted)


def dynamic_quantize_linear(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The bytes, their scale and zero point: the range of ``x``, widened to hold zero, cut in 255 steps.

    As the reference evaluator, the scale of all zeros is 1/255.
    """
    from tvm import relax

    op, x = relax.op, inputs[0]
    if dtype_of(x) != "float32":
        raise ValueError(f"what is quantised must be float32, got {dtype_of(x)}")

    def emit(operator: Callable[..., Any], *args: Any) -> Any:
        return bb.emit(operator(*(relax.const(arg, "float32") if isinstance(arg, float) else arg for arg in args)))

    largest = emit(op.maximum, emit(op.max, x), 0.0)
    least = emit(op.minimum, emit(op.min, x), 0.0)
    extent = emit(op.subtract, largest, least)
    some = emit(op.where, emit(op.equal, extent, 0.0), relax.const(1.0, "float32"), extent)
    scale = emit(op.divide, some, 255.0)
    offset = emit(op.divide, emit(op.negative, least), scale)
    bounded = emit(op.minimum, emit(op.maximum, offset, 0.0), 255.0)
    zero_point = bb.emit(op.astype(emit(op.round, bounded), "uint8"))
    quantised = bb.emit(op.quantize(x, scale, zero_point, _any_axis(x), "uint8"))
    return relax.Tuple([quantised, scale, zero_point])


# Types


def _type_named(number: int) -> str:
    """The name of an element type of ONNX."""
    from onnx import helper

    return str(helper.tensor_dtype_to_np_dtype(int(number)))


def _stored(dtype: str) -> str:
    """The type that holds the elements; raises ``ValueError`` where there is none."""
    if dtype not in (*_INTEGERS, *_NARROW):
        raise ValueError(f"the result must be integers of at most 16 bits, got {dtype}")
    return dtype if dtype in _INTEGERS else "uint8" if dtype.startswith("u") else "int8"


def _output_type(attrs: dict[str, Any], zero_point: Any) -> str:
    """The type of the zero point, or ``output_dtype``, which must agree; uint8 if neither is given."""
    if not attrs.get("output_dtype"):
        return "uint8" if zero_point is None else dtype_of(zero_point)
    wanted = _type_named(attrs["output_dtype"])
    if zero_point is not None and dtype_of(zero_point) != _stored(wanted):
        raise ValueError(f"its zero point must be of the type of its result, {wanted}, got {dtype_of(zero_point)}")
    return wanted


def _precision(x: Any, scale: Any, attrs: dict[str, Any]) -> str:
    """The type of the quotient of ``x`` and ``scale``."""
    if attrs.get("precision"):
        named = _type_named(attrs["precision"])
        if named not in _FLOATS:
            raise ValueError(f"precision must be one of {', '.join(_FLOATS)}, got {named}")
        return named
    types = {dtype_of(x), dtype_of(scale)} - {"int32"}
    return types.pop() if len(types) == 1 else "float32"


# Parameters


def _parameters(
    bb: Any, x: Any, inputs: Sequence[Any], attrs: dict[str, Any], stored: str, positive: bool
) -> _Parameters:
    """The node's parameters, the scale in float32, of one element without dimensions; raises ``ValueError``."""
    from tvm import relax

    shape = [size_of(extent) for extent in x.ty.shape]
    scale, zero_point = inputs[1], input_at(inputs, 2)
    if dtype_of(scale) not in _FLOATS:
        raise ValueError(f"its scale must be one of {', '.join(_FLOATS)}, got {dtype_of(scale)}")
    extents = [int(extent) for extent in scale.ty.shape]
    axis, block = int(attrs.get("axis", 1)), int(attrs.get("block_size", 0))
    constant = array_of(scale)
    wrong = None if constant is None else wrong_scale(constant, positive)
    if wrong is not None:
        raise ValueError(f"its scale must be finite{' and positive' * positive}, got {wrong:g}")
    if int(np.prod(extents)) == 1 and not block:
        axis = _any_axis(x)
    else:
        _check_shape(shape, extents, axis, block)
        axis %= len(shape)
    if zero_point is None:
        zero_point = relax.const(np.zeros(extents, stored))
    if dtype_of(zero_point) != stored:
        raise ValueError(f"its zero point must be of the type of what is quantised, {stored}, "
                         f"got {dtype_of(zero_point)}")
    offsets = [int(extent) for extent in zero_point.ty.shape]
    if offsets != extents and not int(np.prod(offsets)) == int(np.prod(extents)) == 1:
        raise ValueError(f"its zero point must have the shape of its scale, {extents}, got {offsets}")
    values = array_of(zero_point)
    if stored == "int32" and values is not None and values.any():
        raise ValueError("a zero point of type int32 must be 0")
    scale, zero_point = (_plain(bb, value, not block) for value in (scale, zero_point))
    if dtype_of(scale) != "float32":
        scale = _converted(bb, scale, "float32")
    return _Parameters(scale, zero_point, axis, block)


def _check_shape(shape: list[int], scale: list[int], axis: int, block: int) -> None:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"its axis must be from {-len(shape)} to {len(shape) - 1}, got {axis}")
    axis %= len(shape)
    if not block:
        if scale != [shape[axis]]:
            raise ValueError(f"its scale must have one element, or the {shape[axis]} of axis {axis}, "
                             f"got the shape {scale}")
        return
    if block < 0:
        raise ValueError(f"its block_size must not be negative, got {block}")
    wanted = [-(-extent // block) if i == axis else extent for i, extent in enumerate(shape)]
    if scale != wanted:
        raise ValueError(f"its scale must have one element a block, the shape {wanted}, got {scale}")


def _plain(bb: Any, value: Any, single: bool) -> Any:
    """``value``; where it has one element that stands for all (``single``), without dimensions."""
    from tvm import relax

    if not single or not value.ty.shape or int(np.prod([int(extent) for extent in value.ty.shape])) != 1:
        return value
    array = array_of(value)
    return relax.const(array.reshape(())) if array is not None else bb.normalize(relax.op.reshape(value, ()))


def _converted(bb: Any, value: Any, dtype: str) -> Any:
    """``astype(value, dtype)``; of a constant, a constant."""
    from tvm import relax

    array = array_of(value)
    return relax.const(array.astype(dtype)) if array is not None else bb.normalize(relax.op.astype(value, dtype))


def _reshaped(bb: Any, value: Any, shape: Sequence[int]) -> Any:
    from tvm import relax

    array = array_of(value)
    return relax.const(array.reshape(shape)) if array is not None else bb.normalize(relax.op.reshape(value, shape))


def _any_axis(x: Any) -> int:
    """An axis for an operator whose scale has none."""
    return 0 if len(x.ty.shape) else -1


# By plain operators


def _blocks(shape: Sequence[int], axis: int, block: int) -> tuple[list[int], list[int]]:
    """The shapes of the data with an axis for the blocks and one inside of them, and of one number for each block."""
    counts = [*shape[:axis], shape[axis] // block]
    return [*counts, block, *shape[axis + 1:]], [*counts, 1, *shape[axis + 1:]]


def _whole_blocks(bb: Any, x: Any, given: _Parameters) -> tuple[Any, Callable[[Any], Any]]:
    """``x`` with zeros up to whole blocks, since the last may be shorter, and what cuts the result to its shape."""
    from tvm import relax

    shape = [size_of(extent) for extent in x.ty.shape]
    more = -shape[given.axis] % given.block if given.block else 0
    if not more:
        return x, lambda result: result
    widths = [(0, more if axis == given.axis else 0) for axis in range(len(shape))]
    array = array_of(x)
    whole = relax.const(np.pad(array, widths)) if array is not None else bb.normalize(
        relax.op.nn.pad(x, [width for pair in widths for width in pair], pad_value=0))
    axes = list(range(len(shape)))
    return whole, lambda result: bb.normalize(
        relax.op.strided_slice(bb.normalize(result), axes, [0] * len(shape), shape))


def _beside(bb: Any, x: Any, given: _Parameters, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """The data, the scale and the zero point (of ``dtype``) in shapes that broadcast."""
    from tvm import relax

    shape = [size_of(extent) for extent in x.ty.shape]
    data, parameters = x, []
    if given.block:
        whole, single = _blocks(shape, given.axis, given.block)
        data = bb.normalize(relax.op.reshape(x, whole))
    elif given.rank:
        single = [extent if i == given.axis else 1 for i, extent in enumerate(shape)]
    else:
        single = []
    for value in (given.scale, given.zero_point):
        parameters.append(_reshaped(bb, _converted(bb, value, dtype), single))
    return data, parameters[0], parameters[1]


def _quantised_by_parts(bb: Any, x: Any, given: _Parameters, divided: str, wanted: str, stored: str) -> Any:
    """``astype(clip(round(x / scale) + zero_point))``, the quotient rounded to the type ``divided``.

    A quotient of 16-bit numbers is that of float32 rounded once more, which changes nothing: float32 has more than
    twice their digits.
    """
    emit, shape = emitter(bb), [size_of(extent) for extent in x.ty.shape]
    data, scale, zero_point = _beside(bb, x, given)
    if divided != "float32":
        scale = _converted(bb, _converted(bb, scale, divided), "float32")
        if dtype_of(data) != divided:
            data = emit("astype", data, divided)
    quotient = emit("divide", _converted(bb, data, "float32"), scale)
    if divided != "float32":
        quotient = emit("astype", emit("astype", quotient, divided), "float32")
    moved = emit("round", quotient)
    offsets = array_of(zero_point)
    if offsets is None or offsets.any():
        moved = emit("add", moved, zero_point)
    least, largest = _NARROW.get(wanted) or (np.iinfo(stored).min, np.iinfo(stored).max)
    result = emit("astype", emit("clip", moved, int(least), int(largest)), stored)
    return emit("reshape", result, shape) if given.block else result


def _exact(x: Any, given: _Parameters, dtype: str) -> bool:
    """Whether ``x`` is constant and less its zero points exact in ``dtype``, so that only the product is rounded."""
    arrays = [array_of(each) for each in (x, given.zero_point)]
    magnitudes = [np.abs(array.astype("int64")).max(initial=0) for array in arrays if array is not None]
    return len(magnitudes) == 2 and sum(magnitudes) <= 2 ** (ml_dtypes.finfo(dtype).nmant + 1)


def _as_blocks(x: Any, given: _Parameters) -> _Parameters:
    """Of a constant matrix with a scale for each index of an axis: the same as one block along the other axis, so that
    it stays integers where relax has no dequantised numbers of the scale's type."""
    scale, zero_point = array_of(given.scale), array_of(given.zero_point)
    if given.block or array_of(x) is None or scale is None or zero_point is None:
        return given
    if scale.size < 2 or len(x.ty.shape) != 2:
        return given
    from tvm import relax

    other = 1 - given.axis
    scale, zero_point = (relax.const(np.expand_dims(each, other)) for each in (scale, zero_point))
    return _Parameters(scale, zero_point, other, int(x.ty.shape[other]))


def _dequantised_blocks(bb: Any, x: Any, given: _Parameters, dtype: str) -> Any:
    """``reshape((astype(reshape(x)) - zero_point) * scale)`` in ``dtype``; of weights, ``x`` stays the constant of
    integers."""
    emit, shape = emitter(bb), [size_of(extent) for extent in x.ty.shape]
    data, scale, zero_point = _beside(bb, x, given, dtype)
    wide = emit("astype", data, dtype)
    offsets = array_of(zero_point)
    if offsets is None or offsets.any():
        wide = emit("subtract", wide, zero_point)
    return emit("reshape", emit("multiply", wide, scale), shape)


def _looked_up_blocks(bb: Any, x: Any, given: _Parameters, table: np.ndarray) -> Any:
    """``reshape(take(table, reshape(x)) * scale)``; the codes stay a constant of bytes."""
    from tvm import relax

    emit, shape = emitter(bb), [size_of(extent) for extent in x.ty.shape]
    data, scale, _ = _beside(bb, x, given)
    numbers = bb.normalize(relax.op.take(relax.const(table), emit("astype", data, "int32"), axis=0, mode="clip"))
    return emit("reshape", emit("multiply", numbers, scale), shape)
