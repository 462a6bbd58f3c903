"""The kernels that real networks spend their time in, each with an independent float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import te, tirx

from mlc.graph.ir.channels import ChannelBlocks, merged_groups
from mlc.graph.kernels.blocked import conv2d_nchwc, dense_packed
from mlc.graph.kernels.transposed import axes, conv2d_transpose_nchwc
from mlc.target import Target
from tests.performance.few_bits import few_bits
from tests.performance.kernel import BLOCK, Kernel, blocked, plain, shifted
from tests.performance.streams import depthwise, softmax, streams

__all__ = ["kernels", "tuner_kernels"]

_GEMM, _CONV = 0.90, 0.85  # what part of the roofline each kind is to reach


def kernels() -> Iterator[Kernel]:
    """All of them, in the order of the table."""
    yield from _products()
    yield from _convolutions()
    yield from _grouped()
    yield from _transposed()
    yield from few_bits()
    yield from streams()


def tuner_kernels() -> Iterator[Kernel]:
    """The seven that tuners are compared on: products of plain matrices, the rest as a compiled model has it."""
    yield _matmul("gemm 512", 1, 512, 512, 512)
    yield _matmul("gemm 128x3072x768", 1, 128, 3072, 768)
    yield _conv("conv 3x3 64->64 @56", 64, 64, 56, 3, 1)
    yield _conv("conv 1x1 256->64 @56", 256, 64, 56, 1, 1)
    yield _conv("conv 3x3 256->256 @14", 256, 256, 14, 3, 1)
    yield depthwise(144, 56, 1)
    yield softmax("softmax 1536x128", (1536, 128))


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
    """``x @ w + b`` with a packed weight; columns padded to whole panels as :mod:`mlc.graph.layout.packing` does."""
    panels = -(-n // BLOCK)

    def build(_target: Target) -> tirx.PrimFunc:
        x, w = te.placeholder((m, k), name="x"), te.placeholder((panels, k, BLOCK), name="w")
        bias, product = te.placeholder((panels * BLOCK,), name="bias"), dense_packed(x, w)
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


def _label(ic: int, oc: int, size: int, kernel: int, stride: int) -> str:
    return f"{kernel}x{kernel} s{stride} {ic}->{oc} @{size}"


def _block(channels: int) -> int:
    return BLOCK if channels % BLOCK == 0 else channels


def _conv(
    name: str, ic: int, oc: int, size: int, kernel: int, stride: int, goal: float | None = None, groups: int = 1
) -> Kernel:
    """Convolution, bias and ReLU in the blocked layout, padded by half its window.

    Groups narrower than a block share one, as :func:`mlc.graph.ir.channels.block_diagonal` has it. The products with
    the zeros between them take time but are no part of ``flops``; random numbers stand for those zeros here.
    """
    pad, out = kernel // 2, -(-size // stride)
    inner, zero = _block(ic), tirx.const(0.0, "float32")
    parts = groups // merged_groups(groups, ChannelBlocks(ic), ChannelBlocks(oc)) if groups > 1 else 1

    def build(_target: Target) -> tirx.PrimFunc:
        x = te.placeholder((1, ic // inner, size, size, inner), name="x")
        w = te.placeholder((oc // BLOCK, ic // parts // inner, kernel, kernel, inner, BLOCK), name="w")
        bias = te.placeholder((1, oc // BLOCK, 1, 1, BLOCK), name="bias")
        y = conv2d_nchwc(x, w, (stride, stride), (pad,) * 4, (1, 1), parts)
        relu = te.compute(y.shape, lambda n, o, h, v, c: te.max(y[n, o, h, v, c] + bias[0, o, 0, 0, c], zero))
        return te.create_prim_func([x, w, bias, relu])

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        image = np.pad(plain(x), ((0, 0), (0, 0), (pad, pad), (pad, pad)))[0]
        weight = w.transpose(0, 5, 1, 4, 2, 3).reshape(oc, ic // parts, kernel, kernel)
        y = np.zeros((oc, out, out))
        for i, j, group in np.ndindex(kernel, kernel, parts):
            made, read = (slice(group * each // parts, (group + 1) * each // parts) for each in (oc, ic))
            y[made] += np.tensordot(weight[made, :, i, j], shifted(image[read], i, j, stride, out), 1)
        return np.maximum(blocked(y[None]) + bias, 0)

    return Kernel(name, build, reference, 2.0 * oc * out * out * ic // groups * kernel * kernel, goal)


def _grouped() -> Iterator[Kernel]:
    for size, channels in ((56, 128), (28, 256), (14, 512), (7, 1024)):
        yield _conv(f"resnext 3x3 32 groups {channels} @{size}", channels, channels, size, 3, 1, groups=32)


def _transposed() -> Iterator[Kernel]:
    for ic, oc, size in ((512, 256, 4), (256, 128, 8), (128, 64, 16)):
        yield _conv_transpose(ic, oc, size)


def _conv_transpose(ic: int, oc: int, size: int) -> Kernel:
    """A 4x4 kernel at stride 2 that doubles the image, taken apart into the kernels of its four phases."""
    rows, columns = axes((size, size), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0))

    def build(_target: Target) -> tirx.PrimFunc:
        x = te.placeholder((1, ic // BLOCK, size, size, BLOCK), name="x")
        w = te.placeholder((4 * oc // BLOCK, ic // BLOCK, 2, 2, BLOCK, BLOCK), name="w")
        return te.create_prim_func([x, w, conv2d_transpose_nchwc(x, w, rows, columns, 1)])

    def reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        phases = w.reshape(2, 2, oc // BLOCK, ic // BLOCK, 2, 2, BLOCK, BLOCK)
        taps = ((3, 1), (2, 0))  # what an even and an odd output see: of input h - 1, then h; of h, then h + 1
        y = np.zeros((oc, 2 * size + 2, 2 * size + 2))
        for p, q, t, s in np.ndindex(2, 2, 2, 2):
            weight = phases[p, q, :, :, t, s].transpose(0, 3, 1, 2).reshape(oc, ic)
            i, j = taps[p][t], taps[q][s]
            y[:, i : i + 2 * size : 2, j : j + 2 * size : 2] += np.tensordot(weight, plain(x)[0], 1)
        return blocked(y[None, :, 1:-1, 1:-1])

    return Kernel(f"dcgan 4x4 s2 {ic}->{oc} @{size}", build, reference, 2.0 * ic * oc * 16 * size * size)
