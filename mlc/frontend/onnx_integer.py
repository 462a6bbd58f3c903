"""ONNX ``MatMulInteger`` and ``ConvInteger``: products of unsigned data and signed weights, summed in int32.

The instructions for products of bytes take one unsigned and one signed factor. Data of int8 is moved up by 128 and its
zero point with it, weights of uint8 are moved down. The zero points leave the product::

    sum((x - zx) * (w - zw)) = sum(x * w) - zx * sum(w) - zw * sum(x) + n * zx * zw

where what depends on constants alone is one constant, so that a static model adds a number for each output channel.
All of it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, dtype_of, input_at, text
from mlc.sizes import size_of

__all__ = ["conv_integer", "mat_mul_integer"]

_BYTES = ("int8", "uint8")
_HALF = 128  # from the least int8 to zero


class _Arithmetic:
    """int32 arithmetic on expressions, in numpy where both sides are constant."""

    def __init__(self, bb: Any) -> None:
        self._bb = bb

    def emit(self, operator: Callable[..., Any], *args: Any, **attrs: Any) -> Any:
        return self._bb.emit(operator(*args, **attrs))

    def wide(self, value: Any) -> Any:
        """``value`` as int32."""
        from tvm import relax

        array = array_of(value)
        if array is not None:
            return relax.const(array.astype("int32"))
        return value if dtype_of(value) == "int32" else self.emit(relax.op.astype, value, "int32")

    def shaped(self, value: Any, shape: Sequence[int]) -> Any:
        from tvm import relax

        array = array_of(value)
        return relax.const(array.reshape(shape)) if array is not None else self.emit(relax.op.reshape, value, shape)

    def moved(self, value: Any, dtype: str) -> Any:
        """Bytes of the other sign as ``dtype``, each moved by 128."""
        from tvm import relax

        by = _HALF if dtype == "uint8" else -_HALF
        array = array_of(value)
        if array is not None:
            return relax.const((array.astype("int16") + by).astype(dtype))
        wider = self.emit(relax.op.astype, value, "int16")
        added = self.emit(relax.op.add, wider, relax.const(by, "int16"))
        return self.emit(relax.op.astype, added, dtype)

    def sum(self, value: Any, axes: Sequence[int], keepdims: bool) -> Any:
        """The sum of bytes as int32."""
        from tvm import relax

        array = array_of(value)
        if array is not None:
            return relax.const(np.asarray(array.sum(tuple(axes), dtype="int32", keepdims=keepdims)))
        return self.emit(relax.op.sum, self.wide(value), list(axes), keepdims=keepdims)

    def times(self, a: Any, b: Any) -> Any:
        """``a * b``; None, which is zero, where one of them is."""
        from tvm import relax

        if a is None or b is None:
            return None
        first, second = array_of(a), array_of(b)
        if first is not None and second is not None:
            return relax.const(np.asarray(first * second))
        return self.emit(relax.op.multiply, a, b)

    def plus(self, a: Any, b: Any, sign: int = 1) -> Any:
        """``a + sign * b``, where None is zero."""
        from tvm import relax

        if b is None:
            return a
        second = array_of(b)
        if sign < 0 and second is not None:
            b, second, sign = relax.const(-second), -second, 1
        if a is None:
            return b if sign > 0 else self.emit(relax.op.negative, b)
        first = array_of(a)
        if first is not None and second is not None:
            return relax.const(np.asarray(first + sign * second))
        return self.emit(relax.op.add if sign > 0 else relax.op.subtract, a, b)


def _operand(arithmetic: _Arithmetic, name: str, value: Any, zero_point: Any, wanted: str) -> tuple[Any, Any]:
    """The bytes as ``wanted`` and their zero point as int32, None where there is none."""
    from tvm import relax

    if dtype_of(value) not in _BYTES:
        raise ValueError(f"{name} must be of int8 or uint8, got {dtype_of(value)}")
    if zero_point is not None and dtype_of(zero_point) != dtype_of(value):
        raise ValueError(f"the zero point of {name} must be of its type, {dtype_of(value)}, got {dtype_of(zero_point)}")
    offset = None if zero_point is None else arithmetic.wide(zero_point)
    if dtype_of(value) != wanted:
        value = arithmetic.moved(value, wanted)
        offset = arithmetic.plus(offset, relax.const(_HALF if wanted == "uint8" else -_HALF, "int32"))
    return value, offset


def _corrected(
    arithmetic: _Arithmetic, product: Any, count: Any, offsets: tuple[Any, Any],
    sum_of_data: Callable[[], Any], sum_of_weights: Callable[[], Any],
) -> Any:
    """The product of ``count`` terms a sum without its zero points, those of the data and of the weights."""
    from tvm import relax

    of_data, of_weights = offsets
    if of_data is not None:
        if of_weights is not None and not isinstance(count, int):
            raise ValueError("a sum of a free number of terms must have one zero point at most, but both operands do")
        moved = None if of_weights is None else arithmetic.times(of_weights, relax.const(count, "int32"))
        weights = arithmetic.plus(sum_of_weights(), moved, -1)
        product = arithmetic.plus(product, arithmetic.times(of_data, weights), -1)
    if of_weights is not None:
        product = arithmetic.plus(product, arithmetic.times(of_weights, sum_of_data()), -1)
    return product


def mat_mul_integer(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``(a - a_zero_point) @ (b - b_zero_point)`` in int32.

    The zero point of ``a`` is one number or one for each row, that of ``b`` one or one for each column. Raises
    ``ValueError`` for other types than bytes and zero points of other shapes.
    """
    from tvm import relax

    arithmetic = _Arithmetic(bb)
    a, za = _operand(arithmetic, "A", inputs[0], input_at(inputs, 2), "uint8")
    b, zb = _operand(arithmetic, "B", inputs[1], input_at(inputs, 3), "int8")
    rows, columns = ([size_of(extent) for extent in value.ty.shape] for value in (a, b))
    za = _fitted(arithmetic, "A", za, rows[:-1], -1 if len(columns) > 1 else None)
    zb = _fitted(arithmetic, "B", zb, columns[:-2] + columns[-1:] if len(columns) > 1 else [],
                 -2 if len(rows) > 1 else None)
    product = arithmetic.emit(relax.op.matmul, a, b, out_dtype="int32")
    return _corrected(
        arithmetic, product, rows[-1], (za, zb),
        lambda: arithmetic.sum(a, [len(rows) - 1], len(columns) > 1),
        lambda: arithmetic.sum(b, [max(len(columns) - 2, 0)], len(rows) > 1),
    )


def _fitted(arithmetic: _Arithmetic, name: str, zero_point: Any, extents: list[int], summed: int | None) -> Any:
    """The zero point in a shape that broadcasts over the product: one number, or one for each of ``extents``, with an
    axis of length 1 at ``summed`` for the one that was summed over; None where it is zero."""
    if zero_point is None:
        return None
    shape = [int(extent) for extent in zero_point.ty.shape]
    if math.prod(shape) == 1:
        wanted = []
    elif math.prod(shape) == math.prod(extents) or (extents and shape == extents[-1:]):
        wanted = list(extents) if math.prod(shape) == math.prod(extents) else shape
        if summed is not None:
            wanted.insert(len(wanted) + 1 + summed, 1)
    else:
        whose = f"have the shape {extents}" if extents else "have no dimensions"
        raise ValueError(f"the zero point of {name} must be one number or {whose}, got {shape}")
    known = array_of(zero_point)
    return None if known is not None and not known.any() else arithmetic.shaped(zero_point, wanted)


def conv_integer(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The convolution of ``x - x_zero_point`` with ``w - w_zero_point`` in int32; the border is of the zero point.

    The data's zero point is one number, the weights' one or one for each output channel. Raises ``ValueError`` for
    other zero points and types, and for images of more than three dimensions.
    """
    from tvm import relax

    arithmetic = _Arithmetic(bb)
    x, zx = _operand(arithmetic, "x", inputs[0], input_at(inputs, 2), "uint8")
    w, zw = _operand(arithmetic, "w", inputs[1], input_at(inputs, 3), "int8")
    filters = [int(extent) for extent in w.ty.shape]
    rank = len(filters) - 2
    if rank not in (1, 2, 3):
        raise ValueError(f"the images must have one to three dimensions, got {rank}")
    over_channels = [1, filters[0], *[1] * rank]
    zx = _fitted(arithmetic, "x", zx, [], None)
    zw = _fitted(arithmetic, "w", zw, filters[:1], None)
    if zw is not None and len(zw.ty.shape):
        zw = arithmetic.shaped(zw, over_channels)
    strides, dilations = (list(attrs.get(name, [1] * rank)) for name in ("strides", "dilations"))
    groups = int(attrs.get("group", 1))
    pads = _pads([size_of(extent) for extent in x.ty.shape][2:], filters[2:], strides, dilations, attrs)
    x = _padded(arithmetic, x, pads, zx)

    def convolved(weights: Any) -> Any:
        operator = getattr(relax.op.nn, f"conv{rank}d")
        return arithmetic.emit(operator, x, weights, strides=strides, padding=[0] * rank, dilation=dilations,
                               groups=groups, out_dtype="int32")

    def sum_of_windows() -> Any:
        summed = convolved(relax.const(np.ones((groups, *filters[1:]), "int8")))
        return summed if groups == 1 else arithmetic.emit(relax.op.repeat, summed, filters[0] // groups, axis=1)

    return _corrected(
        arithmetic, convolved(w), math.prod(filters[1:]), (zx, zw), sum_of_windows,
        lambda: arithmetic.shaped(arithmetic.sum(w, range(1, len(filters)), False), over_channels),
    )


def _pads(
    image: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], attrs: dict[str, Any]
) -> list[tuple[int, int]]:
    """Elements before and after each dimension of the image."""
    rank, mode = len(image), text(attrs, "auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = [int(pad) for pad in attrs.get("pads", [0] * 2 * rank)]
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if mode == "VALID":
        return [(0, 0)] * rank
    result = []
    for extent, size, stride, dilation in zip(image, kernel, strides, dilations, strict=True):
        total = max((-(-extent // stride) - 1) * stride + dilation * (size - 1) + 1 - extent, 0)
        less, more = total // 2, total - total // 2
        result.append((less, more) if mode == "SAME_UPPER" else (more, less))
    return result


def _padded(arithmetic: _Arithmetic, x: Any, pads: Sequence[tuple[int, int]], zero_point: Any) -> Any:
    """Images with a border of the zero point: of a constant, ``pad``; else ``where(inside, pad, zero_point)``."""
    from tvm import relax

    if not any(map(any, pads)):
        return x
    widths = [(0, 0), (0, 0), *pads]
    flat = [width for pair in widths for width in pair]
    known = np.zeros((), "int32") if zero_point is None else array_of(zero_point)
    if known is not None:
        return arithmetic.emit(relax.op.nn.pad, x, flat, pad_value=int(known))
    bordered = arithmetic.emit(relax.op.nn.pad, x, flat)
    extents = [size_of(extent) for extent in x.ty.shape][2:]
    if all(isinstance(extent, int) for extent in extents):
        inside = relax.const(np.pad(np.ones((1, 1, *extents), "bool"), widths))
    else:
        ones = arithmetic.emit(relax.op.ones, relax.ShapeExpr([1, 1, *list(x.ty.shape)[2:]]), "uint8")
        inside = arithmetic.emit(relax.op.astype, arithmetic.emit(relax.op.nn.pad, ones, flat), "bool")
    border = arithmetic.emit(relax.op.astype, zero_point, "uint8")
    return arithmetic.emit(relax.op.where, inside, bordered, border)
