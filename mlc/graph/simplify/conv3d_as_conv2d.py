"""Three-dimensional convolutions and poolings become two-dimensional ones on the slices along the depth, as a batch.

A volume ``x[N, C, D, H, W]`` is seen as images ``x'[D*N, C, H, W]``. What a kernel of depth ``kd`` meets at tap ``t``
is a slice of that batch, padded by images of zeros:

=====================================  ==============================================================
before                                 after
=====================================  ==============================================================
``conv3d(x, K)``                       ``conv2d(concat((x'[t:], ..), axis=1), K')``, taps as channels
``conv3d(x, K)`` with groups           ``conv2d(x'[0:], K[:, :, 0]) + conv2d(x'[1:], K[:, :, 1]) + ..``
``max_pool3d(x)``, ``avg_pool3d(x)``   ``max(y[0:], y[1:], ..)`` of ``y = max_pool2d(x')``; averages
``mean(x)`` over the volume            mean over the depth of means over the images
=====================================  ==============================================================

Everything that is known about images then holds: blocked layouts, packed weights, Winograd. The moves from volumes to
images and back cancel between such operators, past everything elementwise (:mod:`mlc.graph.simplify.sinking`). Depth
comes before the batch, so that a slice along the depth is a piece of the batch of images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of
from mlc.graph.ir.weights import Weight

__all__ = ["SliceVolumes"]

_TO_IMAGES, _TO_VOLUME = [2, 0, 1, 3, 4], [1, 2, 0, 3, 4]


def _images(volume: relax.Expr, scope: Scope) -> relax.Expr:
    """``[N, C, D, H, W] -> [D*N, C, H, W]``."""
    n, channels, depth, *image = shape_of(volume)
    moved = scope.emit(op.permute_dims(volume, _TO_IMAGES))
    return scope.emit(op.reshape(moved, (depth * n, channels, *image)))


def _volume(images: relax.Expr, call: relax.Call, scope: Scope) -> relax.Expr:
    """The images that make the result of ``call`` as the volume that it is."""
    n, channels, depth, *image = shape_of(call)
    cut = scope.emit(op.reshape(scope.emit(images), (depth, n, channels, *image)))
    return op.permute_dims(cut, _TO_VOLUME)


@dataclass(frozen=True)
class _Depth:
    """How a window of ``kernel`` taps slides along the depth of ``n`` volumes."""

    n: int
    size: int
    out: int
    kernel: int
    stride: int
    dilation: int
    before: int

    @property
    def taps(self) -> list[int]:
        """The taps that meet something but padding."""
        return [t for t in range(self.kernel) if any(0 <= self._place(o, t) < self.size for o in range(self.out))]

    def met(self, tap: int) -> list[int]:
        """For each output, the depth index that the tap reads; outside of the volume is padding."""
        return [self._place(o, tap) for o in range(self.out)]

    def counts(self) -> list[int]:
        """For each output, how many taps read no padding."""
        return [sum(0 <= self._place(o, t) < self.size for t in range(self.kernel)) for o in range(self.out)]

    def _place(self, out: int, tap: int) -> int:
        return out * self.stride + tap * self.dilation - self.before


def _depth(call: relax.Call, kernel: int) -> _Depth:
    (n, _, size, *_), (_, _, out, *_), attrs = shape_of(call.args[0]), shape_of(call), call.attrs
    return _Depth(n, size, out, kernel, int(attrs.strides[0]), int(attrs.dilation[0]), int(attrs.padding[0]))


def _windows(images: relax.Expr, depth: _Depth, fill: float, scope: Scope) -> list[relax.Expr]:
    """The slices that each of ``depth.taps`` reads, as a batch of images with the result's depth."""
    met = [depth.met(tap) for tap in depth.taps]
    before = max(0, -min(places[0] for places in met))
    after = max(0, max(places[-1] for places in met) - depth.size + 1)
    if before or after:
        width = [before * depth.n, after * depth.n] + [0] * 6
        images = scope.emit(op.nn.pad(images, width, pad_value=fill))
    return [_slice(images, before + places[0], depth, scope) for places in met]


def _slice(images: relax.Expr, first: int, depth: _Depth, scope: Scope) -> relax.Expr:
    n, stride = depth.n, depth.stride if depth.out > 1 else 1
    begin, end = first * n, (first + (depth.out - 1) * stride + 1) * n
    if (begin, end, stride) == (0, shape_of(images)[0], 1):
        return images
    if n == 1 or stride == 1:
        return scope.emit(op.strided_slice(images, [0], [begin], [end], [stride]))
    chosen = np.arange(begin, end).reshape(-1, n)[::stride].reshape(-1)
    return scope.emit(op.take(images, constant(chosen, "int64"), axis=0))


def convolution(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv3d(x, K) --> conv2d(windows of x, K')`` for constant kernels."""
    attrs, weight = call.attrs, Weight.of(call.args[1], scope)
    if weight is None or (attrs.data_layout, attrs.kernel_layout) != ("NCDHW", "OIDHW"):
        return None
    kernel = weight.array
    depth = _depth(call, kernel.shape[2])
    if not depth.taps:
        return None
    images, groups = _images(call.args[0], scope), int(attrs.groups)
    _, top, left, _, bottom, right = (int(p) for p in attrs.padding)

    def image(data: relax.Expr, elements: np.ndarray) -> relax.Expr:
        return op.nn.conv2d(
            data, weight.with_elements(elements, scope), strides=[int(s) for s in attrs.strides[1:]],
            padding=[top, left, bottom, right], dilation=[int(d) for d in attrs.dilation[1:]], groups=groups,
            out_dtype=attrs.out_dtype,
        )

    windows = _windows(images, depth, 0.0, scope)
    if groups > 1:
        parts = [scope.emit(image(w, kernel[:, :, t])) for t, w in zip(depth.taps, windows, strict=True)]
        return _volume(_combined(parts, op.add, scope), call, scope)
    flat = kernel[:, :, depth.taps].swapaxes(1, 2).reshape(kernel.shape[0], -1, *kernel.shape[3:])
    data = windows[0] if len(windows) == 1 else scope.emit(op.concat(windows, axis=1))
    return _volume(image(data, flat), call, scope)


def _combined(parts: Sequence[relax.Expr], build: Callable[..., relax.Expr], scope: Scope) -> relax.Expr:
    return reduce(lambda a, b: scope.emit(build(a, b)), parts)


def _flat_pool(call: relax.Call, images: relax.Expr) -> relax.Expr:
    """The pooling along rows and columns alone."""
    attrs = call.attrs
    build = op.nn.max_pool2d if call.op.name == "relax.nn.max_pool3d" else op.nn.avg_pool2d
    _, top, left, _, bottom, right = (int(p) for p in attrs.padding)
    return build(
        images, pool_size=[int(k) for k in attrs.pool_size[1:]], strides=[int(s) for s in attrs.strides[1:]],
        padding=[top, left, bottom, right], dilation=[int(d) for d in attrs.dilation[1:]],
        ceil_mode=bool(attrs.ceil_mode), count_include_pad=bool(attrs.count_include_pad),
    )


def pooling(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``max_pool3d(x) --> max(windows of max_pool2d(x))``, and averages likewise."""
    attrs = call.attrs
    depth = _depth(call, int(attrs.pool_size[0]))
    if attrs.layout != "NCDHW" or not dtype_of(call).startswith("float") or min(depth.counts()) == 0:
        return None
    maximum = call.op.name == "relax.nn.max_pool3d"
    if not maximum and bool(attrs.count_include_pad) and bool(attrs.ceil_mode):
        return None  # what lies beyond the padding does not count
    pooled = scope.emit(_flat_pool(call, _images(call.args[0], scope)))
    windows = _windows(pooled, depth, float("-inf") if maximum else 0.0, scope)
    result = _combined(windows, op.maximum if maximum else op.add, scope)
    if not maximum and depth.kernel > 1:
        counts = [depth.kernel] * depth.out if bool(attrs.count_include_pad) else depth.counts()
        same = len(set(counts)) == 1
        each = counts[0] if same else np.repeat(counts, depth.n).reshape(-1, 1, 1, 1)
        result = op.multiply(result, constant(np.float32(1) / np.asarray(each, "float32"), dtype_of(call)))
    return _volume(result, call, scope)


def mean(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``mean(x)`` over the volume ``--> mean(mean(x'))`` where ``x`` is made of images."""
    move = scope.call(call.args[0], "permute_dims")
    cut = scope.call(move.args[0], "reshape") if move is not None else None
    if move is None or cut is None or permutation(move) != _TO_VOLUME or not scope.once(call.args[0]):
        return None
    (depth, n, channels, *image), images = shape_of(cut), cut.args[0]
    axes = call.attrs.axis
    if axes is None or sorted(int(a) % 5 for a in axes) != [2, 3, 4]:
        return None
    if shape_of(images) != (depth * n, channels, *image):
        return None
    flat = scope.emit(op.mean(images, axis=[2, 3], keepdims=True))
    apart = scope.emit(op.reshape(flat, (depth, n, channels)))
    return op.reshape(scope.emit(op.mean(apart, axis=[0])), shape_of(call))


RULES: Rules = {
    "relax.nn.conv3d": (convolution,),
    "relax.nn.max_pool3d": (pooling,),
    "relax.nn.avg_pool3d": (pooling,),
    "relax.mean": (mean,),
}

SliceVolumes = rewrite_pass("SliceVolumes", RULES)
