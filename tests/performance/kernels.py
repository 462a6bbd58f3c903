"""The kernels that real networks spend their time in, each with an independent float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax import op

from mlc.graph.blocked import conv2d_nchwc, dense_packed, depthwise_nchwc
from mlc.graph.pipeline import optimise
from mlc.graph.rewrite import bindings, op_name
from mlc.target import Target
from mlc.testing.programs import program

__all__ = ["Kernel", "kernels", "tuner_kernels"]

_BLOCK = 16  # channels of a block of NCHW[c]c, columns of a packed panel
_GEMM, _CONV, _STREAM = 0.90, 0.85, 0.80  # what part of the roofline each kind is to reach


@dataclass(frozen=True)
class Kernel:
    """One tensor function to time.

    ``build`` gives it for a target; ``reference`` maps its inputs, in float64, to its output. ``flops`` is the number
    of multiplications and additions that the result needs, 0 for a kernel that only moves data; ``goal`` is the part
    of the roofline to reach, if one is set. The inputs at ``cold`` come from memory, not from a cache, in each call.
    """

    name: str
    build: Callable[[Target], tirx.PrimFunc]
    reference: Callable[..., np.ndarray]
    flops: float = 0.0
    goal: float | None = None
    cold: tuple[int, ...] = ()


def kernels() -> Iterator[Kernel]:
    """All of them, in the order of the table."""
    yield from _products()
    yield from _convolutions()
    yield from _rows()
    yield from _movement()


def tuner_kernels() -> Iterator[Kernel]:
    """The seven that tuners are compared on: products of plain matrices, the rest as a compiled model has it."""
    yield _matmul("gemm 512", 1, 512, 512, 512)
    yield _matmul("gemm 128x3072x768", 1, 128, 3072, 768)
    yield _conv("conv 3x3 64->64 @56", 64, 64, 56, 3, 1)
    yield _conv("conv 1x1 256->64 @56", 256, 64, 56, 1, 1)
    yield _conv("conv 3x3 256->256 @14", 256, 256, 14, 3, 1)
    yield _depthwise(144, 56, 1)
    yield _relax("softmax 1536x128", {"x": (1536, 128)}, lambda x: op.nn.softmax(x, axis=-1), _softmax)


# -- matrix products


def _products() -> Iterator[Kernel]:
    for size in (512, 768, 1024):
        yield _dense(f"gemm {size}, packed weight", size, size, size, goal=_GEMM)
        yield _matmul(f"gemm {size}, two activations", 1, size, size, size, goal=_GEMM)
    for m, k, n in ((128, 768, 768), (128, 768, 3072), (128, 3072, 768)):
        yield _dense(f"bert {m}x{k}x{n}", m, k, n, goal=_GEMM)
        yield _dense(f"bert {m}x{k}x{n}, cold weight", m, k, n, goal=_GEMM, cold=True)
    yield _dense("gpt-2 head 128x768x50257, cold weight", 128, 768, 50257, goal=_GEMM, cold=True)
    yield _matmul("attention scores 12x128x64x128", 12, 128, 64, 128)
    yield _matmul("attention values 12x128x128x64", 12, 128, 128, 64)
    for k, n in ((4096, 4096), (9216, 4096), (4096, 1000), (768, 3072)):
        yield _dense(f"vector 1x{k}x{n}", 1, k, n, goal=_GEMM)
    yield _dense("vector 1x768x3072, cold weight", 1, 768, 3072, goal=_GEMM, cold=True)
    yield _dense("few outputs 16x4096x16", 16, 4096, 16)
    yield _matmul("prime 127x253x509", 1, 127, 253, 509)
    yield _dense("odd 197x192x576", 197, 192, 576)
    yield _matmul("transposed A 512", 1, 512, 512, 512, transposed="A")
    yield _matmul("transposed B 512", 1, 512, 512, 512, transposed="B")
    yield _matmul("transposed A and B 512", 1, 512, 512, 512, transposed="AB")


def _dense(name: str, m: int, k: int, n: int, goal: float | None = None, cold: bool = False) -> Kernel:
    """``x @ w + b`` with a packed weight; columns are padded to whole panels as :mod:`mlc.graph.packing` does."""
    panels = -(-n // _BLOCK)

    def build(_target: Target) -> tirx.PrimFunc:
        x, w = te.placeholder((m, k), name="x"), te.placeholder((panels, k, _BLOCK), name="w")
        bias, product = te.placeholder((panels * _BLOCK,), name="bias"), dense_packed(x, w)
        return te.create_prim_func([x, w, bias, te.compute(product.shape, lambda i, j: product[i, j] + bias[j])])

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return x @ w.transpose(1, 0, 2).reshape(k, -1) + bias

    return Kernel(name, build, reference, 2.0 * m * k * n, goal, (1,) if cold else ())


def _matmul(
    name: str, batch: int, m: int, k: int, n: int, goal: float | None = None, transposed: str = ""
) -> Kernel:
    """A product of two activations, either of which may be read transposed."""
    left = (batch, k, m) if "A" in transposed else (batch, m, k)
    right = (batch, n, k) if "B" in transposed else (batch, k, n)

    def build(_target: Target) -> tirx.PrimFunc:
        a, b, r = te.placeholder(left, name="a"), te.placeholder(right, name="b"), te.reduce_axis((0, k), name="r")

        def product(x, i, j):  # type: ignore[no-untyped-def]
            row = a[x, r, i] if "A" in transposed else a[x, i, r]
            return te.sum(row * (b[x, j, r] if "B" in transposed else b[x, r, j]), axis=[r])

        return te.create_prim_func([a, b, te.compute((batch, m, n), product, name="matmul")])

    def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.swapaxes(1, 2) if "A" in transposed else a) @ (b.swapaxes(1, 2) if "B" in transposed else b)

    return Kernel(name, build, reference, 2.0 * batch * m * k * n, goal)


# -- convolutions


def _convolutions() -> Iterator[Kernel]:
    yield _conv("resnet stem 7x7 s2 3->64 @224", 3, 64, 224, 7, stride=2)
    seen = set()
    for size, width in ((56, 64), (28, 128), (14, 256), (7, 512)):
        inside, before = 4 * width, 2 * width
        layers = [(width, width, size, 3, 1), (width, inside, size, 1, 1), (inside, width, size, 1, 1)]
        if size == 56:
            layers += [(64, 64, 56, 1, 1)]
        else:
            larger = 2 * size
            layers += [(before, width, larger, 1, 2), (before, inside, larger, 1, 2), (width, width, larger, 3, 2)]
        for layer in layers:
            if layer not in seen:
                seen.add(layer)
                yield _conv(f"resnet {_label(*layer)}", *layer, goal=_CONV)
    for layer in ((64, 64, 224, 3, 1), (128, 128, 112, 3, 1), (256, 256, 56, 3, 1), (512, 512, 28, 3, 1)):
        yield _conv(f"vgg {_label(*layer)}", *layer, goal=_CONV)
    for channels, size, stride in ((144, 56, 1), (96, 112, 2), (96, 112, 1)):
        yield _depthwise(channels, size, stride)


def _label(ic: int, oc: int, size: int, kernel: int, stride: int) -> str:
    return f"{kernel}x{kernel} s{stride} {ic}->{oc} @{size}"


def _block(channels: int) -> int:
    return _BLOCK if channels % _BLOCK == 0 else channels


def _plain(x: np.ndarray) -> np.ndarray:
    """``[N, C/c, H, W, c] --> [N, C, H, W]``."""
    n, blocks, h, w, c = x.shape
    return x.transpose(0, 1, 4, 2, 3).reshape(n, blocks * c, h, w)


def _blocked(x: np.ndarray) -> np.ndarray:
    n, channels, h, w = x.shape
    return x.reshape(n, channels // _BLOCK, _BLOCK, h, w).transpose(0, 1, 3, 4, 2)


def _conv(name: str, ic: int, oc: int, size: int, kernel: int, stride: int, goal: float | None = None) -> Kernel:
    """Convolution, bias and ReLU in the blocked layout, padded by half its window."""
    pad, out = kernel // 2, -(-size // stride)
    inner, zero = _block(ic), tirx.const(0.0, "float32")

    def build(_target: Target) -> tirx.PrimFunc:
        x = te.placeholder((1, ic // inner, size, size, inner), name="x")
        w = te.placeholder((oc // _BLOCK, ic // inner, kernel, kernel, inner, _BLOCK), name="w")
        bias = te.placeholder((1, oc // _BLOCK, 1, 1, _BLOCK), name="bias")
        y = conv2d_nchwc(x, w, (stride, stride), (pad,) * 4, (1, 1), 1)
        relu = te.compute(y.shape, lambda n, o, h, v, c: te.max(y[n, o, h, v, c] + bias[0, o, 0, 0, c], zero))
        return te.create_prim_func([x, w, bias, relu])

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        image = np.pad(_plain(x), ((0, 0), (0, 0), (pad, pad), (pad, pad)))[0]
        weight = w.transpose(0, 5, 1, 4, 2, 3).reshape(oc, ic, kernel, kernel)
        y = np.zeros((oc, out, out))
        for i, j in np.ndindex(kernel, kernel):
            y += np.tensordot(weight[:, :, i, j], _shifted(image, i, j, stride, out), 1)
        return np.maximum(_blocked(y[None]) + bias, 0)

    return Kernel(name, build, reference, 2.0 * oc * out * out * ic * kernel * kernel, goal)


def _shifted(image: np.ndarray, i: int, j: int, stride: int, out: int) -> np.ndarray:
    """What tap ``(i, j)`` of a window sees of an image ``[C, H, W]`` at all its places."""
    return image[:, i : i + stride * (out - 1) + 1 : stride, j : j + stride * (out - 1) + 1 : stride]


def _depthwise(channels: int, size: int, stride: int) -> Kernel:
    out, zero = -(-size // stride), tirx.const(0.0, "float32")

    def build(_target: Target) -> tirx.PrimFunc:
        x = te.placeholder((1, channels // _BLOCK, size, size, _BLOCK), name="x")
        w = te.placeholder((channels // _BLOCK, 1, 3, 3, 1, _BLOCK), name="w")
        bias = te.placeholder((1, channels // _BLOCK, 1, 1, _BLOCK), name="bias")
        y = depthwise_nchwc(x, w, (stride, stride), (1, 1, 1, 1), (1, 1))
        relu = te.compute(y.shape, lambda n, o, h, v, c: te.max(y[n, o, h, v, c] + bias[0, o, 0, 0, c], zero))
        return te.create_prim_func([x, w, bias, relu])

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        image = np.pad(_plain(x), ((0, 0), (0, 0), (1, 1), (1, 1)))[0]
        weight = w[:, 0, :, :, 0, :].transpose(0, 3, 1, 2).reshape(channels, 3, 3)
        y = sum(weight[:, i, j, None, None] * _shifted(image, i, j, stride, out) for i, j in np.ndindex(3, 3))
        return np.maximum(_blocked(np.asarray(y)[None]) + bias, 0)

    return Kernel(f"depthwise 3x3 s{stride} {channels} @{size}", build, reference, goal=_STREAM)


# -- rows: softmax and normalisation


def _rows() -> Iterator[Kernel]:
    for label, shape, goal in (("in cache", (12, 128, 128), None), ("out of cache", (64, 512, 512), _STREAM)):
        yield _relax(f"softmax {_dims(shape)}, {label}", {"x": shape}, lambda x: op.nn.softmax(x, axis=-1),
                     _softmax, goal)
    for label, shape, goal in (("in cache", (128, 768), None), ("out of cache", (16384, 1024), _STREAM)):
        inputs = {"x": shape, "gamma": shape[-1:], "beta": shape[-1:]}
        yield _relax(f"layer norm {_dims(shape)}, {label}", inputs,
                     lambda x, gamma, beta: op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=1e-5),
                     _layer_norm, goal)


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta


# -- pooling and movement


def _movement() -> Iterator[Kernel]:
    layout = f"NCHW{_BLOCK}c"
    image, deep = (1, 4, 112, 112, _BLOCK), (1, 128, 7, 7, _BLOCK)

    def windows(x: np.ndarray, kernel: int, stride: int, pad: int, fill: float) -> np.ndarray:
        x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=fill)
        return np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]

    yield _relax("max pool 3x3 s2 64 @112", {"x": image},
                 lambda x: op.nn.max_pool2d(x, [3, 3], [2, 2], [1, 1, 1, 1], layout=layout, out_layout=layout),
                 lambda x: windows(x, 3, 2, 1, -np.inf).max((-1, -2)))
    yield _relax("avg pool 3x3 s1 64 @112", {"x": image},
                 lambda x: op.nn.avg_pool2d(x, [3, 3], [1, 1], [0, 0, 0, 0], layout=layout, out_layout=layout),
                 lambda x: windows(x, 3, 1, 0, 0.0).mean((-1, -2)))
    yield _relax("global pool 2048 @7", {"x": deep}, lambda x: op.mean(x, axis=[2, 3], keepdims=True),
                 lambda x: x.mean((2, 3), keepdims=True))
    yield _relax("resize x2 nearest 64 @56", {"x": (1, 64, 56, 56)},
                 lambda x: op.image.resize2d(x, (112, 112), layout="NCHW", method="nearest_neighbor",
                                             coordinate_transformation_mode="asymmetric", rounding_method="floor"),
                 lambda x: x.repeat(2, 2).repeat(2, 3))
    for size in (1024, 4096):
        yield _relax(f"transpose {size}x{size}", {"x": (size, size)}, lambda x: op.permute_dims(x, [1, 0]),
                     lambda x: x.T)
    yield _relax("transpose heads 128x12x64", {"x": (128, 12, 64)}, lambda x: op.permute_dims(x, [1, 0, 2]),
                 lambda x: x.transpose(1, 0, 2))
    half = (1, 8, 56, 56, _BLOCK)
    yield _relax("concat channels 2x128 @56", {"x": half, "y": half}, lambda x, y: op.concat([x, y], axis=1),
                 lambda x, y: np.concatenate([x, y], 1))
    yield _relax("add 16 M elements", {"x": (4096, 4096), "y": (4096, 4096)}, op.add, np.add)


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _relax(
    name: str, inputs: dict[str, tuple[int, ...]], body: Callable[..., relax.Expr],
    reference: Callable[..., np.ndarray], goal: float | None = None,
) -> Kernel:
    def build(target: Target) -> tirx.PrimFunc:
        return _only_function(inputs, lambda _builder, params: [body(*params)], target)

    return Kernel(name, build, reference, goal=goal)


def _only_function(
    inputs: dict[str, tuple[int, ...]], body: Callable[..., Sequence[relax.Expr]], target: Target
) -> tirx.PrimFunc:
    """The one tensor function that the graph passes make of a program.

    It takes the inputs in their order; raises ``ValueError`` where there are several functions.
    """
    mod = optimise(program({key: (shape, "float32") for key, shape in inputs.items()}, body), target)
    calls = [b.value for b in bindings(mod["main"]) if op_name(b.value) == "relax.call_tir"]
    if len(calls) != 1 or list(calls[0].args[1].fields) != list(mod["main"].params):
        raise ValueError(f"a kernel must be one function of its inputs, got:\n{mod['main'].script()}")
    return mod[calls[0].args[0]]


def bytes_of(func: tirx.PrimFunc) -> int:
    """The bytes of all arguments: what a kernel must move at least."""
    return sum(
        prod(int(d) for d in p.shape) * tvm.runtime.DataType(str(p.dtype)).bits // 8 for p in func.params
    )
