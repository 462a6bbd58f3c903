"""Products of 8-bit operands as integer products.

==========================================================  ======================================================
before                                                      after
==========================================================  ======================================================
``conv2d(dequantize(q, s, z), dequantize(W, t, 0))``        ``float(conv2d(q, W) - z * sum(W)) * (s * t)``
``matmul(dequantize(q, s, z), dequantize(W, t, 0))``        ``float(matmul(q, W) - z * sum(W)) * (s * t)``
==========================================================  ======================================================

``q`` is uint8 with one scale, ``W`` a constant with one scale for each output channel, or one for all; what is added
up is exact in int32. So the result is that of exact arithmetic, rounded three times to float32, where the sum in
float32 rounds at every step: nearer to what the model says, and after quantising within one step of it.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of
from mlc.graph.precision.affine import Affine, Dequantised, dequantised, spread

__all__ = ["IntegerProducts", "is_integer_product"]

#: what |sum| stays below, whatever the 8-bit operands are
_INT32 = 2**31


def is_integer_product(call: relax.Call) -> bool:
    """Whether the call adds up products of uint8 and int8 in int32."""
    return dtype_of(call) == "int32" and [dtype_of(arg) for arg in call.args[:2]] == ["uint8", "int8"]


def _activation(expr: relax.Expr, scope: Scope) -> Dequantised | None:
    found = dequantised(expr, scope)
    return found if found is not None and found.dtype == "uint8" and found.affine.single else None


def _weight(expr: relax.Expr, scope: Scope, axis: int) -> tuple[np.ndarray, np.ndarray] | None:
    """``(W, t)``: a constant weight as int8 around zero, and its scale for each index of ``axis`` or for all."""
    found = dequantised(expr, scope)
    array = array_of(found.data) if found is not None else None
    if found is None or array is None or array.dtype.itemsize > 1 or array.dtype.kind not in "iu":
        return None
    affine = found.affine
    if not affine.single and affine.axis != axis:
        return None
    centred = array.astype(np.int16) - spread(affine.zero, affine.axis, array.ndim).astype(np.int16)
    if centred.size and (centred.min() < -128 or centred.max() > 127):
        return None
    return centred.astype(np.int8), affine.scale


def _scaled(total: relax.Expr, shift: np.ndarray, scale: np.ndarray, scope: Scope) -> relax.Expr:
    """``float(total + shift) * scale``."""
    if shift.any():
        total = scope.emit(op.add(total, constant(shift.astype(np.int32))))
    return op.multiply(scope.emit(op.astype(total, "float32")), constant(scale))


def _scales(activation: Affine, scale: np.ndarray) -> np.ndarray:
    """Products of scales, of which there may be one or one for each channel; None of them vanishes."""
    return (activation.scale.astype(np.float64) * scale).astype(np.float32)


def convolution(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A convolution of images."""
    attrs = call.attrs
    if attrs.data_layout != "NCHW" or attrs.kernel_layout != "OIHW":
        return None
    data, weight = _activation(call.args[0], scope), _weight(call.args[1], scope, 0)
    if data is None or weight is None:
        return None
    integers, scale = weight
    if np.prod(integers.shape[1:], dtype=np.int64) * 255 * 128 >= _INT32:
        return None
    zero, x = int(data.affine.zero.item()), data.data
    top, left, bottom, right = pads = [int(p) for p in attrs.padding]
    if zero and any(pads):  # the integer that stands for 0.0 is around the image
        x = scope.emit(op.nn.pad(x, [0, 0, 0, 0, top, bottom, left, right], pad_value=float(zero)))
        pads = [0, 0, 0, 0]
    total = scope.emit(op.nn.conv2d(
        x, constant(integers), strides=[int(s) for s in attrs.strides], padding=pads,
        dilation=[int(d) for d in attrs.dilation], groups=int(attrs.groups), out_dtype="int32",
    ))
    shift = -zero * integers.sum(axis=(1, 2, 3), dtype=np.int64)
    rank = len(shape_of(call))
    return _scaled(total, spread(shift, 1, rank), spread(_scales(data.affine, scale), 1, rank), scope)


def product(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A product with a constant matrix."""
    if len(shape_of(call.args[0])) < 2 or len(shape_of(call.args[1])) != 2:
        return None
    data, weight = _activation(call.args[0], scope), _weight(call.args[1], scope, 1)
    if data is None or weight is None or weight[0].shape[0] * 255 * 128 >= _INT32:
        return None
    integers, scale = weight
    total = scope.emit(op.matmul(data.data, constant(integers), out_dtype="int32"))
    shift = -int(data.affine.zero.item()) * integers.sum(axis=0, dtype=np.int64)
    return _scaled(total, shift, _scales(data.affine, scale), scope)


RULES: Rules = {"relax.nn.conv2d": (convolution,), "relax.matmul": (product,)}

IntegerProducts = rewrite_pass("IntegerProducts", RULES)
