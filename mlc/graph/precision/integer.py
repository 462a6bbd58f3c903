"""Products of 8-bit operands as integer products.

==========================================================  ======================================================
before                                                      after
==========================================================  ======================================================
``conv2d(dequantize(q, s, z), dequantize(W, t, 0))``        ``float(conv2d(q, W) - z * sum(W)) * (s * t)``
``conv2d_transpose(dequantize(q, s, z), ...)``              the same, ``sum(W)`` over what a pixel sees of it
``matmul(dequantize(q, s, z), dequantize(W, t, 0))``        ``float(matmul(q, W) - z * sum(W)) * (s * t)``
``matmul(dequantize(q, s, z), dequantize(W, t, y))``        ``float(matmul(q, W) - z * sum(W) - y * sum(q) + K z y)
                                                            * (s * t)``
``matmul(dequantize(q, s, z), dequantize(r, t, y))``        ``float(matmul(q, r) - z * sum(r) - y * sum(q) + K z y)
                                                            * (s * t)``
==========================================================  ======================================================

``q`` is uint8, or int8 on GPUs, with one scale, ``W`` a constant with one scale for each output channel, or one for
all. It moves to a zero point of 0 where int8 holds it then, else, in a product of matrices on CPUs, to int8 with its
zero points. Where both operands are activations of uint8, the second one, ``r``, becomes int8. Sums of activations
along the ``K`` products are taken at run time, but for zero points that are zero. Around an image is the zero point,
but on GPUs, where zeros need no copy of the image: there ``sum(W)`` is of what lies inside, an image of constants. What
is added up is exact in int32. So the result is that of exact arithmetic, rounded three times to float32, where the sum
in float32 rounds at every step: nearer to what the model says, and after quantising within one step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.algorithms.registry import fastest
from mlc.graph.algorithms.winograd_integer import seconds
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import Rule, Rules, Scope, dtype_of, op_name, rewrite_pass, shape_of
from mlc.graph.kernels.blocked import PANEL
from mlc.graph.kernels.integer import STEP
from mlc.graph.kernels.transposed import axes
from mlc.graph.precision.affine import Affine, Dequantised, dequantised, spread
from mlc.graph.precision.integer_gpu import priced_on_gpu
from mlc.options import CompileOptions
from mlc.sizes import usual_size
from mlc.target import Target
from schedules.cpu.gemm_matrix import pays as pairs_pay
from schedules.cpu.gemm_tiles import pays as tiles_pay
from schedules.intrin.dot import QUADS
from schedules.intrin.matrix import BYTE_PAIRS

__all__ = ["IntegerProducts", "is_integer_product", "is_signed_product", "priced"]

#: what |sum| stays below, whatever the 8-bit operands are
_INT32 = 2**31
#: part of their peak that tiles of a matrix unit are taken to reach
_TILES_REACHED = 0.5
#: numbers of an image of what a zero point adds to a transposed convolution, or on a GPU to one with a border, at most
_CORRECTIONS = 1 << 18
#: columns of a weight, at least, for which the sum of a row of activations is worth it
_LEAST_COLUMNS = 64
#: how far int8 lies below uint8
_HALF = 128
#: types of activations: those of CPUs' dot products, and of GPUs' tensor cores
_BYTES = ("uint8", "int8")
#: whether a product of dequantised operands is to be one of integers
Worth = Callable[[relax.Call], bool]


def is_integer_product(call: relax.Call) -> bool:
    """Whether the call adds up products of uint8 and int8 in int32."""
    return dtype_of(call) == "int32" and [dtype_of(arg) for arg in call.args[:2]] == ["uint8", "int8"]


def is_signed_product(call: relax.Call) -> bool:
    """Whether the call adds up products of int8 in int32, as GPUs' tensor cores do."""
    return dtype_of(call) == "int32" and all(dtype_of(arg) == "int8" for arg in call.args[:2])


def _activation(expr: relax.Expr, scope: Scope) -> Dequantised | None:
    found = dequantised(expr, scope)
    return found if found is not None and found.dtype in _BYTES and found.affine.single else None


def _weight(expr: relax.Expr, scope: Scope, axis: int) -> tuple[np.ndarray, np.ndarray] | None:
    """``(W, t)``: a constant weight as int8 around zero, and its scale for each index of ``axis`` or for all."""
    found = _constant(expr, scope, axis)
    if found is None:
        return None
    array, affine = found
    centred = array - spread(affine.zero, affine.axis, array.ndim).astype(np.int16)
    if centred.size and (centred.min() < -_HALF or centred.max() >= _HALF):
        return None
    return centred.astype(np.int8), affine.scale


def _constant(expr: relax.Expr, scope: Scope, axis: int) -> tuple[np.ndarray, Affine] | None:
    """A constant weight of bytes, as int16, with one scale for each index of ``axis`` or for all."""
    found = dequantised(expr, scope)
    array = array_of(found.data) if found is not None else None
    if found is None or array is None or array.dtype.itemsize > 1 or array.dtype.kind not in "iu":
        return None
    affine = found.affine
    return (array.astype(np.int16), affine) if affine.single or affine.axis == axis else None


def _moved(expr: relax.Expr, scope: Scope) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """``(W, t, y)``: a constant weight ``[K, N]`` as int8, its scale, and its zero point where that is not 0."""
    found = _constant(expr, scope, 1)
    if found is None:
        return None
    array, affine = found
    half = _HALF if array.size and array.max() >= _HALF else 0
    return (array - half).astype(np.int8), affine.scale, affine.zero - half


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
    zero, x, rank = int(data.affine.zero.item()), data.data, len(shape_of(call))
    top, left, bottom, right = pads = [int(p) for p in attrs.padding]
    shift = spread(-zero * integers.sum(axis=(1, 2, 3), dtype=np.int64), 1, rank)
    if zero and any(pads) and data.dtype == "int8" and _is_fixed(call, _CORRECTIONS):
        shift = -zero * _inside(integers, shape_of(data.data), shape_of(call), attrs)[None]
    elif zero and any(pads):  # the integer that stands for 0.0 is around the image
        x = scope.emit(op.nn.pad(x, [0, 0, 0, 0, top, bottom, left, right], pad_value=float(zero)))
        pads = [0, 0, 0, 0]
    total = scope.emit(op.nn.conv2d(
        x, constant(integers), strides=[int(s) for s in attrs.strides], padding=pads,
        dilation=[int(d) for d in attrs.dilation], groups=int(attrs.groups), out_dtype="int32",
    ))
    return _scaled(total, shift, spread(_scales(data.affine, scale), 1, rank), scope)


def _is_fixed(call: relax.Call, most: int) -> bool:
    """Whether an image of the result has a size that is known, of so many numbers at most."""
    image = shape_of(call)[1:]
    return all(isinstance(extent, int) for extent in image) and prod(image) <= most


def _inside(weight: np.ndarray, images: Sequence[int], result: Sequence[int], attrs: Any) -> np.ndarray:
    """``[O, OH, OW]``: the sum of the weights ``[O, I, KH, KW]`` that meet each window's pixels inside of the image."""
    hits = []
    for axis in range(2):
        step, pad, apart = (int(each[axis]) for each in (attrs.strides, attrs.padding, attrs.dilation))
        places = np.arange(result[2 + axis])[:, None] * step - pad + np.arange(weight.shape[2 + axis]) * apart
        hits.append(((places >= 0) & (places < images[2 + axis])).astype(np.int64))
    return np.einsum("ors,hr,ws->ohw", weight.sum(axis=1, dtype=np.int64), *hits)


def transposed(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A transposed convolution of images. What a zero point adds to a pixel depends on how many inputs it sees, so that
    it is an image of constants, which only a small one is worth."""
    attrs, groups = call.attrs, int(call.attrs.groups)
    if attrs.data_layout != "NCHW" or attrs.kernel_layout != "IOHW":
        return None
    data, weight = _activation(call.args[0], scope), _weight(call.args[1], scope, 1)
    if data is None or data.dtype != "uint8" or weight is None or 1 < groups == shape_of(call.args[0])[1]:
        return None
    (integers, scale), zero = weight, int(data.affine.zero.item())
    integers = _dilated(integers, [*map(int, attrs.dilation)])
    if len(scale) > 1:  # of each channel of a group, which all groups share
        scale = np.tile(scale, groups)
    if np.prod(integers.shape[:1] + integers.shape[2:], dtype=np.int64) * 255 * 128 >= _INT32:
        return None
    known = all(isinstance(extent, int) for extent in shape_of(call.args[0])[2:])
    if zero and not (known and _is_fixed(call, _CORRECTIONS)):
        return None
    strides, padding, extra = ([*map(int, each)] for each in (attrs.strides, attrs.padding, attrs.output_padding))
    total = scope.emit(op.nn.conv2d_transpose(
        data.data, constant(integers), strides=strides, padding=padding, output_padding=extra, groups=groups,
        out_dtype="int32",
    ))
    shift = np.zeros(1, np.int64)
    if zero:
        shift = -zero * _seen(integers, shape_of(call), strides, padding, extra, groups, shape_of(call.args[0]))[None]
    rank = len(shape_of(call))
    return _scaled(total, shift, spread(_scales(data.affine, scale), 1, rank), scope)


def _dilated(weight: np.ndarray, dilation: Sequence[int]) -> np.ndarray:
    """The weight with zeros between the elements of its last two axes."""
    *outer, height, width = weight.shape
    rows, columns = (1 + (size - 1) * step for size, step in zip((height, width), dilation, strict=True))
    found = np.zeros((*outer, rows, columns), weight.dtype)
    found[..., :: dilation[0], :: dilation[1]] = weight
    return found


def _seen(
    weight: np.ndarray, result: Sequence[int], strides: Sequence[int], padding: Sequence[int], extra: Sequence[int],
    groups: int, images: Sequence[int],
) -> np.ndarray:
    """``[O, OH, OW]``: the sum of the weights ``[I, O/groups, KH, KW]`` that each pixel of a transposed convolution
    meets an input of the ``images`` with."""
    summed = weight.reshape(groups, -1, *weight.shape[1:]).sum(axis=1, dtype=np.int64).reshape(-1, *weight.shape[2:])
    (height, width), (sh, sw), (kh, kw) = images[2:], strides, summed.shape[1:]
    rows, columns = ((each - 1) * stride + kernel for each, stride, kernel in ((height, sh, kh), (width, sw, kw)))
    whole = np.zeros((len(summed), rows + extra[0], columns + extra[1]), np.int64)
    for y, x in np.ndindex(kh, kw):
        whole[:, y : y + (height - 1) * sh + 1 : sh, x : x + (width - 1) * sw + 1 : sw] += summed[:, y, x, None, None]
    top, left, *_ = padding
    return whole[:, top : top + result[2], left : left + result[3]]


def product_of_activations(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A product of two activations, as attention has them."""
    left, right = (_activation(arg, scope) if len(shape_of(arg)) > 1 else None for arg in call.args)
    if left is None or right is None or left.dtype != "uint8" or right.dtype != "uint8":
        return None
    depth = shape_of(call.args[0])[-1]
    if 4 * depth * 255 * 128 >= _INT32:  # the product and each of its corrections
        return None
    wide = scope.emit(op.astype(right.data, "int16"))
    signed = scope.emit(op.astype(scope.emit(op.subtract(wide, constant(np.array(_HALF, "int16")))), "int8"))
    zero, other = int(left.affine.zero.item()), int(right.affine.zero.item()) - _HALF
    total = scope.emit(op.matmul(left.data, signed, out_dtype="int32"))
    for integers, axis, factor, shift in ((signed, -2, -zero, depth * zero * other), (left.data, -1, -other, 0)):
        if factor:
            sums = scope.emit(op.sum(scope.emit(op.astype(integers, "int32")), [axis], keepdims=True))
            sums = scope.emit(op.multiply(sums, constant(np.array(factor, "int32"))))
            sums = scope.emit(op.add(sums, constant(np.array(shift, "int32")))) if shift else sums
            total = scope.emit(op.add(total, sums))
    scale = _scales(left.affine, right.affine.scale).reshape(())
    return op.multiply(scope.emit(op.astype(total, "float32")), constant(scale))


def product(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A product with a constant matrix."""
    if len(shape_of(call.args[0])) < 2 or len(shape_of(call.args[1])) != 2:
        return None
    data, weight = _activation(call.args[0], scope), _weight(call.args[1], scope, 1)
    depth, columns = shape_of(call.args[1])
    if data is None or depth * 255 * 128 >= _INT32:
        return None
    found: tuple[np.ndarray, np.ndarray, np.ndarray | None] | None = None if weight is None else (*weight, None)
    many = columns >= _LEAST_COLUMNS and 4 * depth * 255 * 128 < _INT32
    if weight is None and data.dtype == "uint8" and many:
        found = _moved(call.args[1], scope)
    if found is None:
        return None
    integers, scale, zeros = found
    total = scope.emit(op.matmul(data.data, constant(integers), out_dtype="int32"))
    shift = integers.sum(axis=0, dtype=np.int64)
    if zeros is not None:
        sums = scope.emit(op.sum(scope.emit(op.astype(data.data, "int32")), [-1], keepdims=True))
        total = scope.emit(op.subtract(total, scope.emit(op.multiply(sums, constant(zeros.astype(np.int32))))))
        shift = shift - depth * zeros
    shift = -int(data.affine.zero.item()) * shift
    return _scaled(total, shift, _scales(data.affine, scale), scope)


def priced(target: Target, options: CompileOptions) -> Worth:
    """Whether a product is faster in integers than in float32 on that machine, by arithmetic on what it is: float32
    takes more bytes and fewer products at once, but has more algorithms."""
    if target.kind == "cuda":
        return priced_on_gpu(target, options)
    estimate = Estimate(target.tvm, 0.0)

    def of_matrices(call: relax.Call) -> tuple[float, float]:
        (*_, depth), shape = _usual(call.args[0]), _usual(call)
        data, weight, result = (prod(_usual(each)) for each in (*call.args, call))
        constant = array_of(call.args[1]) is not None
        operations = 2.0 * prod(shape) * depth
        rows, columns = (1, 1, *shape)[-2:]  # a vector is one row
        tiles = tiles_pay(rows, columns, -(-depth // STEP), QUADS, target.tvm)
        rate = _TILES_REACHED * estimate.machine.tiles if tiles else estimate.machine.dot
        fixed = all(isinstance(extent, int) for extent in shape_of(call))
        if fixed and pairs_pay(rows, columns, depth, BYTE_PAIRS, target.tvm):
            rate = max(rate, estimate.machine.pairs)
        integers = estimate.kernel(operations / rate, float(weight), float(data + result))
        if not constant:  # which is packed, and both are added up
            integers += estimate.copy(2.0 * weight) + estimate.copy(weight) + estimate.copy(data)
        floats = estimate.kernel(operations, 4.0 * weight, 4.0 * (data + result))
        floats += estimate.copy(5.0 * data) + (0.0 if constant else estimate.copy(5.0 * weight))
        return integers, floats

    def of_images(call: relax.Call) -> tuple[float, float]:
        (n, channels, *size), (filters, _, *kernel), attrs = *map(_usual, call.args), call.attrs
        strides, pads, dilation = (tuple(map(int, each)) for each in (attrs.strides, attrs.padding, attrs.dilation))
        conv = Convolution(n, channels, filters, (size[0], size[1]), (kernel[0], kernel[1]), strides, pads, dilation,
                           int(attrs.groups), PANEL, PANEL)
        integers = seconds(replace(conv, element=1), options, estimate)
        return integers, fastest(conv, options, estimate) + estimate.copy(5.0 * prod((n, channels, *size)))

    def of_phases(call: relax.Call) -> tuple[float, float]:
        (n, channels, *size), (_, _, *kernel), attrs = *map(_usual, call.args), call.attrs
        kernel = [1 + (extent - 1) * int(step) for extent, step in zip(kernel, attrs.dilation, strict=True)]
        strides, pads, extra = ([*map(int, each)] for each in (attrs.strides, attrs.padding, attrs.output_padding))
        rows, columns = axes(size, kernel, strides, pads, extra)
        more = [axis.steps + axis.taps - 1 - axis.size for axis in (rows, columns)]
        conv = Convolution(
            n, channels, rows.stride * columns.stride * _usual(call)[1], (size[0], size[1]), (rows.taps, columns.taps),
            (1, 1), (*more, 0, 0), (1, 1), int(attrs.groups), PANEL, PANEL)
        integers = DIRECT.seconds(replace(conv, element=1), estimate)
        return integers, DIRECT.seconds(conv, estimate) + estimate.copy(5.0 * prod((n, channels, *size)))

    prices = {"relax.nn.conv2d": of_images, "relax.nn.conv2d_transpose": of_phases, "relax.matmul": of_matrices}

    def worth(call: relax.Call) -> bool:
        integers, floats = prices[op_name(call)](call)
        return integers <= floats

    return worth


def _usual(expr: relax.Expr) -> tuple[int, ...]:
    return tuple(map(usual_size, shape_of(expr)))


_RULES: Rules = {
    "relax.nn.conv2d": (convolution,), "relax.nn.conv2d_transpose": (transposed,),
    "relax.matmul": (product, product_of_activations),
}


def IntegerProducts(worth: Worth = lambda _: True) -> tvm.transform.Pass:
    """Module pass: products of 8-bit operands that are ``worth`` it add up integers."""

    def where(rule: Rule) -> Rule:
        def applied(call: relax.Call, scope: Scope) -> relax.Expr | None:
            quantised = scope.call(call.args[0], "dequantize") is not None
            return rule(call, scope) if quantised and worth(call) else None

        return applied

    return rewrite_pass("IntegerProducts", {name: [where(rule) for rule in rules] for name, rules in _RULES.items()})
