"""The kernels of models of few bits, each with an independent reference: products of 8-bit integers and of bfloat16,
compared with what the machine's dot products do, and of float32 with weights of 4 and 8 bits, which are read from
memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.bfloat import conv2d_nchwc_bfloat, dense_bfloat
from mlc.graph.kernels.digits import dense_digits, has_digits
from mlc.graph.kernels.integer import conv2d_nchwc_integer, dense_integer, dot_form
from mlc.graph.kernels.rounded import dense_rounded, half_range
from mlc.graph.kernels.weight_only import PANEL, dense_weight_only, moved_by, rows_of_word
from mlc.target import Target
from schedules.intrin.dot import QUADS
from tests.performance.kernel import BLOCK, Kernel, blocked, plain, shifted

__all__ = ["few_bits"]

_DOTS, _WEIGHTS = 0.85, 0.80  # what part of the roofline each kind is to reach
#: (channels, filters, size, kernel, stride) of ResNet-50's layers
_RESNET = (
    (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (128, 128, 28, 3, 1), (512, 128, 28, 1, 1),
    (256, 256, 14, 3, 1), (256, 1024, 14, 1, 1), (512, 512, 7, 3, 1), (2048, 512, 7, 1, 1),
)


def few_bits() -> Iterator[Kernel]:
    """All of them, in the order of the table."""
    for kind in ("dot", "bfloat"):
        for size in (512, 1024):
            yield _dense(kind, size, size, size)
        yield _dense(kind, 128, 768, 3072)
        for layer in _RESNET:
            yield _conv(kind, *layer)
    for bits in (4, 8):
        yield _vector(bits, 4096, 4096)
        yield _vector(bits, 2048, 5632)
        yield _rounded(bits, 1, 4096, 4096)
        yield _rounded(bits, 32, 2048, 5632)


def _step(kind: str, target: Target) -> tuple[int, str, str, str]:
    """The products of a step, the types of activations and weights, and of the result."""
    if kind == "bfloat":
        return 2, "bfloat16", "bfloat16", "float32"
    return (4, "uint8", "int8", "uint8") if dot_form(target) == QUADS else (2, "uint8", "int16", "uint8")


def _finished(sums: te.Tensor, dtype: str) -> te.Tensor:
    """Integers become what the next kernel reads: rounded, shifted and clipped, all of it exact."""
    if dtype == "float32":
        return sums
    return te.compute(sums.shape, lambda *i: tirx.max(tirx.min((sums(*i) + 512) >> 10, 255), 0).astype(dtype))


def _clipped(sums: np.ndarray, kind: str) -> np.ndarray:
    return sums if kind == "bfloat" else np.clip(np.floor((sums + 512) / 1024), 0, 255)


def _name(kind: str) -> str:
    return "bf16" if kind == "bfloat" else "int8"


def _dense(kind: str, m: int, k: int, n: int) -> Kernel:
    def build(target: Target) -> tirx.PrimFunc:
        size, left, right, result = _step(kind, target)
        x, w = te.placeholder((m, k), left, "x"), te.placeholder((n // BLOCK, k // size, BLOCK, size), right, "w")
        sums = dense_bfloat(x, w) if kind == "bfloat" else dense_integer(x, w)
        return te.create_prim_func([x, w, _finished(sums, result)])

    def reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return _clipped(x @ w.transpose(1, 3, 0, 2).reshape(k, n), kind)

    return Kernel(f"{_name(kind)} gemm {m}x{k}x{n}", build, reference, 2.0 * m * k * n, _DOTS, kind=kind)


def _conv(kind: str, ic: int, oc: int, size: int, kernel: int, stride: int) -> Kernel:
    """In the blocked layout; bfloat16 comes padded, as its kernel has it."""
    pad, out = kernel // 2, -(-size // stride)
    before = 2 * pad if kind == "bfloat" else 0

    def build(target: Target) -> tirx.PrimFunc:
        each, left, right, result = _step(kind, target)
        x = te.placeholder((1, ic // BLOCK, size + before, size + before, BLOCK), left, "x")
        w = te.placeholder((oc // BLOCK, ic // BLOCK, kernel, kernel, BLOCK // each, BLOCK, each), right, "w")
        strides, one = (stride, stride), (1, 1)
        sums = (conv2d_nchwc_bfloat(x, w, strides, one, 1) if kind == "bfloat"
                else conv2d_nchwc_integer(x, w, strides, (pad,) * 4, one, 1, 0))
        return te.create_prim_func([x, w, _finished(sums, result)])

    def reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        image = plain(x)[0]
        if not before:
            image = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        weight = w.transpose(0, 5, 1, 4, 6, 2, 3).reshape(oc, ic, kernel, kernel)
        y = np.zeros((oc, out, out))
        for i, j in np.ndindex(kernel, kernel):
            y += np.tensordot(weight[:, :, i, j], shifted(image, i, j, stride, out), 1)
        return _clipped(blocked(y[None]), kind)

    return Kernel(f"{_name(kind)} resnet {kernel}x{kernel} s{stride} {ic}->{oc} @{size}", build, reference,
                  2.0 * oc * out * out * ic * kernel * kernel, _DOTS, kind=kind)


def _vector(bits: int, k: int, n: int, block: int = 32) -> Kernel:
    """One row by a weight in blocks, which comes from memory: the kernel that a model gets."""
    each = rows_of_word(bits)

    def build(target: Target) -> tirx.PrimFunc:
        x, scale = te.placeholder((1, k), name="x"), te.placeholder((n // PANEL, k // block, PANEL), name="scale")
        digits = has_digits(target, bits, 1, block)
        packed, product = ((((4,), "uint8"), dense_digits) if digits else (((), "uint32"), dense_weight_only))
        words = te.placeholder((n // PANEL, k // each, PANEL, *packed[0]), packed[1], "words")
        return te.create_prim_func([x, words, scale, product(x, words, scale, None, bits, block)])

    def reference(x: np.ndarray, words: np.ndarray, scale: np.ndarray) -> np.ndarray:
        if words.ndim == 4:
            integers = _integers(words, bits)
        else:
            fields = words.astype(np.int64)[:, :, None] >> (bits * np.arange(each))[:, None] & (1 << bits) - 1
            integers = fields - moved_by(bits) if bits == 4 else (fields ^ 128) - 128
        weight = integers.reshape(n // PANEL, k, PANEL) * np.repeat(scale, block, axis=1)
        return x @ weight.transpose(1, 0, 2).reshape(k, n)

    return Kernel(f"{bits}-bit vector 1x{k}x{n}, cold weight", build, reference, 2.0 * k * n, _WEIGHTS, (1, 2))


def _integers(packed: np.ndarray, bits: int) -> np.ndarray:
    """Bytes ``[N/32, R, 32, 4]`` as ``[N/32, K, 32]`` integers around 0."""
    halves = [packed] if bits == 8 else [packed.astype(np.int64) % 16, packed.astype(np.int64) // 16]
    integers = np.stack(halves, 2).transpose(0, 1, 2, 4, 3)
    return integers.reshape(len(packed), -1, PANEL) - half_range(bits)


def _rounded(bits: int, m: int, k: int, n: int, block: int = 32) -> Kernel:
    """Rows that are rounded to 8 bits; one of them by a weight that comes from memory."""
    each = rows_of_word(bits)

    def build(_target: Target) -> tirx.PrimFunc:
        x = te.placeholder((m, k), name="x")
        weight = te.placeholder((n // PANEL, k // each, PANEL, 4), "uint8", "w")
        scale = te.placeholder((n // PANEL, k // block, PANEL), name="scale")
        return te.create_prim_func([x, weight, scale, dense_rounded(x, weight, scale, None, bits, block)])

    def reference(x: np.ndarray, packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
        weight = _integers(packed, bits) * np.repeat(scale, block, axis=1)
        blocks = x.astype(np.float32).reshape(m, -1, block)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        steps = np.rint(blocks * (np.float32(127) / largest)) * largest.astype(np.float64) / 127
        return steps.reshape(m, k) @ weight.transpose(1, 0, 2).reshape(k, n)

    name = f"{bits}-bit weights {m}x{k}x{n}, rows of 8 bits"
    cold, goal = ((1, 2), _WEIGHTS) if m == 1 else ((), None)
    return Kernel(name + ", cold weight" * (m == 1), build, reference, 2.0 * m * k * n, goal, cold, "dot")
