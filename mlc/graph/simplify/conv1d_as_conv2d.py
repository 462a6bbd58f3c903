"""One-dimensional convolutions and poolings become two-dimensional ones on images of height one, and reshapes around
them are removed.

=============================================  ======================================================
before                                         after
=============================================  ======================================================
``conv1d(x[N, C, W], K)``, pooling             ``reshape(conv2d(reshape(x, [N, C, 1, W]), K'))``
``conv2d(x[N, C, H, 1], K[.., k, 1])``         ``reshape(conv2d(reshape(x, [N, C, 1, H]), K'))``
``mean(x[N, C, H, W], [2, 3])``                ``reshape(mean(x, [2, 3], keepdims))``
``image(x[N, H * W, C])``, and back            ``permute_dims(reshape(x, [N, H, W, C]))``
=============================================  ======================================================

Kernels are constant, be it as integers that are dequantised. ``image`` makes ``[N, C, H, W]`` by a transpose and a
reshape after it. Everything that is known about images then holds for them: blocked layouts, register tiles along the
row. Reshapes are views and move on past elementwise operators (:mod:`mlc.graph.simplify.sinking`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import Rules, Scope, rewrite_pass, shape_of
from mlc.graph.ir.weights import Weight

__all__ = ["LiftToImages"]


def _image(data: relax.Expr, scope: Scope) -> relax.Expr:
    n, channels, width = shape_of(data)
    return scope.emit(op.reshape(data, (n, channels, 1, width)))


def _flat(image: relax.Expr, call: relax.Call, scope: Scope) -> relax.Expr:
    return op.reshape(scope.emit(image), shape_of(call))


def _along_row(pads: Sequence[int]) -> list[int]:
    before, after = (int(p) for p in pads) if len(pads) == 2 else (int(pads[0]),) * 2
    return [0, before, 0, after]


def convolution(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv1d(x, K) --> reshape(conv2d(reshape(x), K'))`` for constant kernels."""
    data, attrs, kernel = call.args[0], call.attrs, Weight.of(call.args[1], scope)
    if kernel is None or (attrs.data_layout, attrs.kernel_layout) != ("NCW", "OIW"):
        return None
    image = op.nn.conv2d(
        _image(data, scope), kernel.with_elements(kernel.array[:, :, None], scope), strides=[1, int(attrs.strides[0])],
        padding=_along_row(attrs.padding), dilation=[1, int(attrs.dilation[0])], groups=int(attrs.groups),
        out_dtype=attrs.out_dtype,
    )
    return _flat(image, call, scope)


def transposed(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv1d_transpose(x, K) --> reshape(conv2d_transpose(reshape(x), K'))`` for constant kernels."""
    data, attrs, kernel = call.args[0], call.attrs, Weight.of(call.args[1], scope, 1)
    if kernel is None or (attrs.data_layout, attrs.kernel_layout) != ("NCW", "IOW"):
        return None
    image = op.nn.conv2d_transpose(
        _image(data, scope), kernel.with_elements(kernel.array[:, :, None], scope), strides=[1, int(attrs.strides[0])],
        padding=_along_row(attrs.padding), output_padding=[0, int(attrs.output_padding[0])],
        dilation=[1, int(attrs.dilation[0])], groups=int(attrs.groups), out_dtype=attrs.out_dtype,
    )
    return _flat(image, call, scope)


def pooling(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``max_pool1d(x) --> reshape(max_pool2d(reshape(x)))``, and averages."""
    data, attrs = call.args[0], call.attrs
    if attrs.layout != "NCW":
        return None
    build = op.nn.max_pool2d if scope.call(call, "nn.max_pool1d") is not None else op.nn.avg_pool2d
    image = build(
        _image(data, scope), pool_size=[1, int(attrs.pool_size[0])], strides=[1, int(attrs.strides[0])],
        padding=_along_row(attrs.padding), dilation=[1, int(attrs.dilation[0])], ceil_mode=bool(attrs.ceil_mode),
        count_include_pad=bool(attrs.count_include_pad),
    )
    return _flat(image, call, scope)


def column(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv2d(x[N, C, H, 1], K) --> reshape(conv2d(reshape(x, [N, C, 1, H]), K'))``, the column laid down."""
    data, attrs, kernel = call.args[0], call.attrs, scope.array(call.args[1])
    n, channels, height, width = shape_of(data)
    if kernel is None or (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW") or width != 1 or height == 1:
        return None
    top, left, bottom, right = (int(p) for p in attrs.padding)
    if kernel.shape[3] != 1 or left or right:
        return None
    image = op.nn.conv2d(
        scope.emit(op.reshape(data, (n, channels, 1, height))), constant(kernel.swapaxes(2, 3)),
        strides=[1, int(attrs.strides[0])], padding=[0, top, 0, bottom], dilation=[1, int(attrs.dilation[0])],
        groups=int(attrs.groups), out_dtype=attrs.out_dtype,
    )
    return _flat(image, call, scope)


def mean(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``mean(x[N, C, H, W], [2, 3]) --> reshape(mean(x, [2, 3], keepdims))``."""
    attrs = call.attrs
    if attrs.keepdims or attrs.axis is None or len(shape_of(call.args[0])) != 4:
        return None
    if sorted(int(axis) % 4 for axis in attrs.axis) != [2, 3]:
        return None
    return _flat(op.mean(call.args[0], [2, 3], keepdims=True), call, scope)


def image_of_rows(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``reshape(permute_dims(x[N, P, C], [0, 2, 1]), [N, C, H, W]) --> permute_dims(reshape(x), [0, 3, 1, 2])``."""
    move, shape = scope.call(call.args[0], "permute_dims"), shape_of(call)
    if move is None or not scope.once(call.args[0]) or permutation(move) != [0, 2, 1] or len(shape) != 4:
        return None
    n, channels, *image = shape
    if (n, channels) != shape_of(move)[:2]:
        return None
    return op.permute_dims(scope.emit(op.reshape(move.args[0], (n, *image, channels))), [0, 3, 1, 2])


def rows_of_image(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims(reshape(x, [N, C, H * W]), [0, 2, 1]) --> reshape(permute_dims(x, [0, 2, 3, 1]))``."""
    view = scope.call(call.args[0], "reshape") if permutation(call) == [0, 2, 1] else None
    if view is None or len(shape_of(view.args[0])) != 4 or shape_of(view.args[0])[:2] != shape_of(view)[:2]:
        return None
    return op.reshape(scope.emit(op.permute_dims(view.args[0], [0, 2, 3, 1])), shape_of(call))


RULES: Rules = {
    "relax.reshape": (image_of_rows,),
    "relax.permute_dims": (rows_of_image,),
    "relax.mean": (mean,),
    "relax.nn.conv1d": (convolution,),
    "relax.nn.conv1d_transpose": (transposed,),
    "relax.nn.max_pool1d": (pooling,),
    "relax.nn.avg_pool1d": (pooling,),
    "relax.nn.conv2d": (column,),
}

LiftToImages = rewrite_pass("LiftToImages", RULES)
