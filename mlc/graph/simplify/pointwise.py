"""Pointwise convolutions are moved to where there are the fewest pixels, and two in a row are merged.

==================================================  ====================================================
before                                              after
==================================================  ====================================================
``conv1x1(resize(x), W)``                           ``resize(conv1x1(x, W))`` where ``x`` has fewer pixels
``conv1x1(concat((resize(x), y)), [U V])``          ``resize(conv1x1(x, U)) + conv1x1(y, V)``
``conv1x1(image(x @ V + b), W)``                    ``image(x @ VW + bW)``, if that is less to compute
==================================================  ====================================================

A resize by neighbours or linear weights treats all channels alike, and a convolution of one tap all pixels: they
commute. Heads of segmentation and detection networks resize the maps of several stages to the largest one's size, join
them, and mix the channels of all; most of that work is on pixels that are means of a few others. ``image`` makes
``[N, C, H, W]`` of one row for each pixel.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, op_name, rewrite_pass, shape_of
from mlc.graph.kernels.resize import is_exact

__all__ = ["MovePointwise"]

#: multiply-adds of a product in the time in which one element is resized (measured: 0.18 ns, and 115 a ns)
_PRODUCTS_PER_RESIZE = 20


def _weight(call: relax.Call) -> np.ndarray | None:
    """The matrix ``[O, C]`` of a convolution of images that mixes the channels of each pixel, by constants."""
    attrs, weight = call.attrs, array_of(call.args[1])
    if weight is None or dtype_of(call) != "float32" or int(attrs.groups) != 1:
        return None
    if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW") or weight.shape[2:] != (1, 1):
        return None
    still = {int(s) for s in attrs.strides} == {1} and not any(int(p) for p in attrs.padding)
    return weight[:, :, 0, 0] if still else None


def _mixed(data: relax.Expr, weight: np.ndarray) -> relax.Expr:
    return op.nn.conv2d(data, constant(weight[:, :, None, None], "float32"))


def _enlarged(expr: relax.Expr, outputs: int, scope: Scope) -> relax.Call | None:
    """The resize that alone makes ``expr``, if its source's channels should be made ``outputs`` before it."""
    resize = scope.call(expr, "image.resize2d")
    if resize is None or not scope.once(expr) or resize.attrs.layout != "NCHW" or not is_exact(resize):
        return None
    channels = shape_of(expr)[1]
    before, after = math.prod(shape_of(resize.args[0])[2:]), math.prod(shape_of(expr)[2:])
    saved = channels * outputs * (after - before)
    return resize if saved > max(0, _PRODUCTS_PER_RESIZE * (outputs - channels) * after) else None


def before_resize(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv1x1(resize(x), W) --> resize(conv1x1(x, W))``."""
    weight = _weight(call)
    resize = _enlarged(call.args[0], len(weight), scope) if weight is not None else None
    if weight is None or resize is None:
        return None
    mixed = scope.emit(_mixed(resize.args[0], weight))
    return relax.Call(resize.op, [mixed, *resize.args[1:]], resize.attrs, resize.ty_args)


def before_concat(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv1x1(concat((resize(x), y)), [U V]) --> conv1x1(y, V) + conv1x1(resize(x), U)``."""
    weight, concat = _weight(call), scope.call(call.args[0], "concat")
    parts = scope.value(concat.args[0]) if concat is not None and scope.once(call.args[0]) else None
    if weight is None or concat is None or not isinstance(parts, relax.Tuple) or concat.attrs.axis != 1:
        return None
    ends = np.cumsum([shape_of(part)[1] for part in parts.fields])
    pieces = list(zip(parts.fields, np.split(weight, ends[:-1], axis=1), strict=True))
    apart = [_enlarged(part, len(weight), scope) is not None for part, _ in pieces]
    if not any(apart):
        return None
    kept = [piece for piece, moves in zip(pieces, apart, strict=True) if not moves]
    terms = [piece for piece, moves in zip(pieces, apart, strict=True) if moves]
    if kept:
        data = [part for part, _ in kept]
        joined = data[0] if len(data) == 1 else scope.emit(op.concat(data, 1))
        terms.insert(0, (joined, np.concatenate([matrix for _, matrix in kept], axis=1)))
    total, *others = (scope.emit(_mixed(part, matrix)) for part, matrix in terms)
    for other in others:
        total = scope.emit(op.add(total, other))
    return total


def after_product(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv1x1(image(x @ V + b), W) --> image(x @ VW + bW)``."""
    weight = _weight(call)
    rows = _rows(call.args[0], scope) if weight is not None else None
    if weight is None or rows is None:
        return None
    total = scope.call(rows, "add")
    bias = array_of(total.args[1]) if total is not None else None
    inner = total.args[0] if total is not None else rows
    product = scope.call(inner, "matmul")
    first = array_of(product.args[1]) if product is not None and scope.once(inner) else None
    if product is None or first is None or first.ndim != 2 or shape_of(inner) != shape_of(rows):
        return None
    if total is not None and bias is None:
        return None
    second = weight.T.astype("float64")
    if first.shape[0] * second.shape[1] >= first.size + second.size or dtype_of(product) != "float32":
        return None
    result = scope.emit(op.matmul(product.args[0], constant(first.astype("float64") @ second, "float32")))
    if bias is not None:
        spread = np.broadcast_to(bias, (*bias.shape[:-1], len(second))).astype("float64")
        result = scope.emit(op.add(result, constant(spread @ second, "float32")))
    n, _, height, width = shape_of(call)
    pixels = scope.emit(op.reshape(result, (n, height, width, second.shape[1])))
    return op.permute_dims(pixels, [0, 3, 1, 2])


def _rows(image: relax.Expr, scope: Scope) -> relax.Expr | None:
    """``x[.., C]``, one row for each pixel, of an ``image[N, C, H, W]`` that nothing but moving them makes of it."""
    n, channels, turned = *shape_of(image)[:2], False
    while scope.once(image) and (move := scope.call(image, "reshape", "permute_dims")) is not None:
        image, shape = move.args[0], shape_of(move.args[0])
        if op_name(move) == "relax.permute_dims":
            rank = len(shape)
            if turned or permutation(move) != [0, rank - 1, *range(1, rank - 1)]:
                return None
            turned = True
        elif (shape[-1:] != (channels,)) if turned else (shape[:2] != (n, channels)):
            return None
    return image if turned and scope.once(image) else None


RULES: Rules = {"relax.nn.conv2d": (before_resize, before_concat, after_product)}

MovePointwise = rewrite_pass("MovePointwise", RULES)
