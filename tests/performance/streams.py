"""Kernels that move more than they compute: depthwise convolution, normalisation, pooling, resizing, transposition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import te, tirx
from tvm.relax import op

from mlc.graph.kernels.blocked import depthwise_nchwc
from mlc.target import Target
from tests.performance.kernel import BLOCK, STREAM, Kernel, blocked, dims, of_graph, plain, shifted

__all__ = ["depthwise", "softmax", "streams"]

_LAYOUT = f"NCHW{BLOCK}c"
_MANY = 32  # images that no cache holds


def streams() -> Iterator[Kernel]:
    """All of them, in the order of the table."""
    yield from _depthwise_convolutions()
    yield from _rows()
    yield from _pools()
    yield from _resizes()
    yield from _movement()


def _batched(channels: int, batch: int) -> str:
    return str(channels) if batch == 1 else f"{batch}x{channels}"


def _depthwise_convolutions() -> Iterator[Kernel]:
    """Those of MobileNetV2, in the cache and out of it."""
    for channels, size, stride in ((144, 56, 1), (96, 112, 2), (96, 112, 1)):
        yield depthwise(channels, size, stride)
    for stride in (1, 2):
        yield depthwise(144, 56, stride, _MANY)


def depthwise(channels: int, size: int, stride: int, batch: int = 1) -> Kernel:
    """Depthwise convolution, bias and ReLU in the blocked layout."""
    out, zero = -(-size // stride), tirx.const(0.0, "float32")

    def build(_target: Target) -> tirx.PrimFunc:
        x = te.placeholder((batch, channels // BLOCK, size, size, BLOCK), name="x")
        w = te.placeholder((channels // BLOCK, 1, 3, 3, 1, BLOCK), name="w")
        bias = te.placeholder((1, channels // BLOCK, 1, 1, BLOCK), name="bias")
        y = depthwise_nchwc(x, w, (stride, stride), (1, 1, 1, 1), (1, 1))
        relu = te.compute(y.shape, lambda n, o, h, v, c: te.max(y[n, o, h, v, c] + bias[0, o, 0, 0, c], zero))
        return te.create_prim_func([x, w, bias, relu])

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        image = np.pad(plain(x), ((0, 0), (0, 0), (1, 1), (1, 1)))
        weight = w[:, 0, :, :, 0, :].transpose(0, 3, 1, 2).reshape(channels, 3, 3)
        y = sum(weight[:, i, j, None, None] * shifted(image, i, j, stride, out) for i, j in np.ndindex(3, 3))
        return np.maximum(blocked(np.asarray(y)) + bias, 0)

    label = f"depthwise 3x3 s{stride} {_batched(channels, batch)} @{size}"
    return Kernel(label, build, reference, goal=STREAM)


# -- rows: softmax and normalisation




def _rows() -> Iterator[Kernel]:
    """Softmax and normalisation along the last axis."""
    for label, shape, goal in (("in cache", (12, 128, 128), None), ("out of cache", (64, 512, 512), STREAM)):
        yield softmax(f"softmax {dims(shape)}, {label}", shape, goal)
    for label, shape, goal in (("in cache", (128, 768), None), ("out of cache", (16384, 1024), STREAM)):
        inputs = {"x": shape, "gamma": shape[-1:], "beta": shape[-1:]}
        yield of_graph(f"layer norm {dims(shape)}, {label}", inputs,
                       lambda x, gamma, beta: op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=1e-5),
                       _layer_norm, goal)


def softmax(name: str, shape: tuple[int, ...], goal: float | None = None) -> Kernel:
    """Softmax along the last axis."""
    return of_graph(name, {"x": shape}, lambda x: op.nn.softmax(x, axis=-1), _softmax, goal)


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta


# -- pooling, resizing, movement


def _pools() -> Iterator[Kernel]:
    """Pooling, in the cache and out of it."""
    for batch, blocks, size in ((1, 4, 112), (_MANY, 16, 56)):
        image, label = {"x": (batch, blocks, size, size, BLOCK)}, _batched(blocks * BLOCK, batch)
        goal = None if batch == 1 else STREAM
        yield of_graph(f"max pool 3x3 s2 {label} @{size}", image,
                       lambda x: op.nn.max_pool2d(x, [3, 3], [2, 2], [1, 1, 1, 1], layout=_LAYOUT, out_layout=_LAYOUT),
                       lambda x: _windows(x, 3, 2, 1, -np.inf).max((-1, -2)), goal)
        yield of_graph(f"avg pool 3x3 s1 {label} @{size}", image,
                       lambda x: op.nn.avg_pool2d(x, [3, 3], [1, 1], [0, 0, 0, 0], layout=_LAYOUT, out_layout=_LAYOUT),
                       lambda x: _windows(x, 3, 1, 0, 0.0).mean((-1, -2)), goal)
    for batch, blocks, size in ((1, 128, 7), (_MANY, 16, 56)):
        yield of_graph(f"global pool {_batched(blocks * BLOCK, batch)} @{size}",
                       {"x": (batch, blocks, size, size, BLOCK)}, lambda x: op.mean(x, axis=[2, 3], keepdims=True),
                       lambda x: x.mean((2, 3), keepdims=True), None if batch == 1 else STREAM)


def _windows(x: np.ndarray, kernel: int, stride: int, pad: int, fill: float) -> np.ndarray:
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]


def _resizes() -> Iterator[Kernel]:
    """Images of twice the size, blocked in the cache and out of it, and plain."""
    nearest = {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}
    linear = {"method": "linear", "coordinate_transformation_mode": "half_pixel"}
    for batch, channels in ((1, 64), (8, 256)):
        for label, attrs, reference in (("nearest", nearest, _repeated), ("bilinear", linear, _interpolated)):
            yield of_graph(f"resize x2 {label} {_batched(channels, batch)} @56",
                           {"x": (batch, channels // BLOCK, 56, 56, BLOCK)},
                           lambda x, attrs=attrs: op.image.resize2d(x, (112, 112), layout=_LAYOUT, **attrs),
                           reference, None if batch == 1 else STREAM)
    for label, attrs, reference in (("nearest", nearest, _repeated), ("bilinear", linear, _interpolated)):
        yield of_graph(f"resize x2 {label} 64 @56, plain", {"x": (1, 64, 56, 56)},
                       lambda x, attrs=attrs: op.image.resize2d(x, (112, 112), layout="NCHW", **attrs), reference)


def _repeated(x: np.ndarray) -> np.ndarray:
    return x.repeat(2, 2).repeat(2, 3)


def _interpolated(x: np.ndarray) -> np.ndarray:
    size = x.shape[2]
    places = (np.arange(2 * size) + 0.5) / 2 - 0.5
    weights = np.stack([np.interp(places, np.arange(size), line) for line in np.eye(size)])
    return np.asarray(np.einsum("nchw...,hy,wx->ncyx...", x, weights, weights, optimize=True))


def _movement() -> Iterator[Kernel]:
    """Transposition, concatenation, addition."""
    for size in (1024, 4096):
        yield of_graph(f"transpose {size}x{size}", {"x": (size, size)}, lambda x: op.permute_dims(x, [1, 0]),
                       lambda x: x.T)
    yield of_graph("transpose heads 128x12x64", {"x": (128, 12, 64)}, lambda x: op.permute_dims(x, [1, 0, 2]),
                 lambda x: x.transpose(1, 0, 2))
    half = (1, 8, 56, 56, BLOCK)
    yield of_graph("concat channels 2x128 @56", {"x": half, "y": half}, lambda x, y: op.concat([x, y], axis=1),
                 lambda x, y: np.concatenate([x, y], 1))
    yield of_graph("add 16 M elements", {"x": (4096, 4096), "y": (4096, 4096)}, op.add, np.add)
