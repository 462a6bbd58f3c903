"""Float32 activations rounded to 8 bits times low-bit weights, in integer arithmetic, and the packing of such weights.

Where a model allows activations of 8 bits, each block of a row that meets one scale of the weights becomes int8 around
zero: the largest magnitude is 127. A block's part of a sum is then one of integers, on instructions that add up several
products (``nibbles`` and ``octets`` of :mod:`schedules.intrin.dot`), and exact::

    step * scale * (sum(rounded * integer) - zero * sum(rounded)),   step = max(|x|) / 127

onnxruntime and llama.cpp do the same. Of normal numbers in blocks of 32 results are off by some 5e-3 of their standard
deviation, by rounding to bfloat16 by some 1e-3.

Weights are unsigned, moved by half of their range, and lie in panels of :data:`PANEL` columns of four bytes: bytes of
weights of 4 bits hold rows 0 to 3 of eight in the lower halves and rows 4 to 7 in the upper ones, others four rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.weight_only import PANEL, rows_of_word
from mlc.target import Target
from schedules.intrin import dot, select
from schedules.machine import cpu_machine

__all__ = ["ROUNDED", "by_blocks", "dense_rounded", "half_range", "has_rounded", "pack_bytes"]

#: the product's annotation
ROUNDED = "dense_rounded"

#: the largest integer, and what the largest magnitude is taken for where it is less: that has an inverse
_LARGEST, _SMALLEST = 127.0, 1e-36
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign


def has_rounded(target: Target, bits: int) -> bool:
    """Whether the target has the instructions for weights of so many bits, on whole vectors."""
    form = {4: dot.NIBBLES, 8: dot.OCTETS}[bits]
    return select(dot.dot(form, cpu_machine(target.tvm).lanes()), target.tvm) is not None


def half_range(bits: int) -> int:
    """The offset that makes integers of ``bits`` bits, and their zero points, unsigned."""
    return 1 << (bits - 1)


def pack_bytes(integers: np.ndarray, bits: int, block: int) -> np.ndarray:
    """``[K, N]`` of integers from ``-2**(bits-1)`` to ``2**(bits-1) - 1``, moved by :func:`half_range`, as uint8
    ``[N/32, R, 32, 4]``. Blocks and what fills them up are those of :func:`mlc.graph.kernels.weight_only.pack_words`,
    which raises the same errors."""
    each = rows_of_word(bits)
    depth, columns = integers.shape
    if depth > block and block % each:
        raise ValueError(f"blocks of several must be whole words of {each} rows, got {block}")
    moved = (integers + half_range(bits)).astype(np.uint8)
    filled = np.pad(moved, ((0, -depth % (block if depth > block else each)), (0, -columns % PANEL)))
    fields = filled.reshape(-1, each // 4, 4, filled.shape[1])
    packed = fields[:, 0] if bits == 8 else fields[:, 0] | fields[:, 1] << 4
    return np.ascontiguousarray(packed.reshape(-1, 4, filled.shape[1] // PANEL, PANEL).transpose(2, 0, 3, 1))


def by_blocks(data: te.Tensor, blocks: int, wide: int) -> tuple[Callable[[Any, Any, Any], Any], te.Tensor]:
    """``[..., K]`` as ``blocks`` of ``wide`` elements a row, those beyond ``K`` zero: ``value(row, block, k)``, and the
    largest magnitude of each block ``[..., blocks]`` as the bits of its float32, of which what is no number is the
    largest."""
    *rows, depth = data.shape
    depth = int(depth)

    def value(row: Any, b: Any, k: Any) -> Any:
        k = b * wide + k if blocks > 1 else k
        found = data[(*row, k)]
        whole = blocks * wide <= depth
        return found if whole else tirx.if_then_else(k < depth, found, tirx.const(0.0, "float32"))

    def magnitude(*index: Any) -> Any:
        *row, b = index
        return te.max(tirx.reinterpret("int32", value(row, b, rk)) & tirx.const(_MAGNITUDE, "int32"), axis=[rk])

    rk = te.reduce_axis((0, wide), name="rk")
    return value, te.compute((*rows, blocks), magnitude, name="largest")


def dense_rounded(
    data: te.Tensor, weight: te.Tensor, scale: te.Tensor, zero: te.Tensor | None, bits: int, block: int
) -> te.Tensor:
    """Product of float32 ``[..., M, K]`` with a weight of :func:`pack_bytes` to float32 ``[..., M, N]``, ``N`` whole
    panels.

    ``scale`` and ``zero`` are float32 ``[N/32, ceil(K/block), 32]``; a ``zero`` is moved by :func:`half_range`, and
    left out it is 0 before that. A block with infinities or without numbers makes its row not numbers.
    """
    panels, each, blocks = weight.shape[0], rows_of_word(bits), int(scale.shape[1])
    rows, steps = data.shape[:-1], int(weight.shape[1]) // blocks
    wide = steps * each  # rows of a block, and of its words
    value, largest = by_blocks(data, blocks, wide)

    def number(*index: Any) -> Any:
        return tirx.max(tirx.const(_SMALLEST, "float32"), tirx.reinterpret("float32", largest[index]))

    inverses = te.compute((*rows, blocks), lambda *i: tirx.const(_LARGEST, "float32") / number(*i), name="inverses")
    rounded = te.compute(
        (*rows, blocks, wide),
        lambda *i: tirx.nearbyint(value(i[:-2], *i[-2:]) * inverses[i[:-1]]).astype("int32").astype("int8"),
        name="rounded")
    rt = te.reduce_axis((0, wide), name="rt")
    sums = te.compute((*rows, blocks), lambda *i: te.sum(rounded[(*i, rt)].astype("int32"), axis=[rt]), name="sums")
    step = te.compute((*rows, blocks), lambda *i: number(*i) * tirx.const(1 / _LARGEST, "float32"), name="step")
    fixed = half_range(bits) if zero is None else 1

    def moved(*index: Any) -> Any:
        return sums[index].astype("float32") * (step[index] * tirx.const(float(fixed), "float32"))

    shifts = te.compute((*rows, blocks), moved, name="shifts")
    rs, re = te.reduce_axis((0, steps), name="rs"), te.reduce_axis((0, 4), name="re")

    def part(*index: Any) -> Any:
        *row, b, j = index
        byte, at = weight[j // PANEL, b * steps + rs, j % PANEL, re], rs * each + re
        if bits == 8:
            return te.sum(rounded[(*row, b, at)].astype("int32") * byte.astype("int32"), axis=[rs, re])
        low, high = byte & tirx.const(15, "uint8"), byte >> tirx.const(4, "uint8")
        return te.sum(rounded[(*row, b, at)].astype("int32") * low.astype("int32")
                      + rounded[(*row, b, at + 4)].astype("int32") * high.astype("int32"), axis=[rs, re])

    parts = te.compute((*rows, blocks, panels * PANEL), part, name="parts")
    rb = te.reduce_axis((0, blocks), name="rb")

    def product(*index: Any) -> Any:
        *row, j = index
        place, at = (j // PANEL, rb, j % PANEL), (*row, rb)
        shift = shifts[at] if zero is None else shifts[at] * zero[place]
        return te.sum((parts[(*row, rb, j)].astype("float32") * step[at] - shift) * scale[place], axis=[rb])

    return te.compute((*rows, panels * PANEL), product, name=ROUNDED, attrs={"mlc.op": ROUNDED})
