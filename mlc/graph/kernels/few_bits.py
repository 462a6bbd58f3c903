"""Products with weights of 2, 4 or 8 bits on GPUs, and the packing of such weights.

A weight is ``(integer - zero) * scale`` with a scale, and where there is one a zero point, for each column and each
block of rows. Integers are unsigned, moved by half of their range, and so are zero points; how they lie in memory is
:mod:`schedules.cuda.packed`'s. The function says what the model does, weight by weight: how few rows are multiplied
without a weight ever in memory is :mod:`schedules.cuda.few_bits`', and what becomes of many rows is chosen in
:mod:`mlc.graph.lowering.unpacked`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from schedules.cuda.few_bits_form import PRODUCT, WEIGHTS
from schedules.cuda.packed import COLUMNS, Packing

__all__ = ["dense_few_bits", "middle", "pack_integers", "pack_scales", "unpacked_weights"]


def middle(bits: int) -> int:
    """The offset that makes integers of ``bits`` bits, and their zero points, unsigned."""
    return 1 << (bits - 1)


def pack_integers(integers: np.ndarray, packing: Packing) -> np.ndarray:
    """``[K, N]`` of integers from ``-2**(bits-1)`` to ``2**(bits-1) - 1`` as the words of a packing, uint32; zeros fill
    up the last tiles."""
    along_n, along_k = packing.tiles
    fill = [(0, tiles * each - size) for tiles, each, size in zip(
        (along_k, along_n), (packing.tile_depth, COLUMNS), integers.shape, strict=True)]
    moved = np.pad((integers.astype(np.int16) + middle(packing.bits)).astype(np.uint8), fill)
    split = moved.reshape(along_k, -1, 4, packing.run, along_n, 2, COLUMNS // 2)
    pairs = split.transpose(4, 0, 6, 2, 5, 1, 3).reshape(*packing.words_shape, packing.per_word // 2, 2)
    words = np.zeros(packing.words_shape, np.uint32)
    for number in range(packing.per_word // 2):
        for half in range(2):
            words |= pairs[..., number, half].astype(np.uint32) << np.uint32(16 * half + packing.bits * number)
    return words


def pack_scales(array: np.ndarray, packing: Packing) -> np.ndarray:
    """``[blocks, N]`` as scales or zero points of a packing, of the same type, filled up with zeros."""
    packed = np.zeros(packing.scales_shape, array.dtype)
    block, column = np.meshgrid(*map(np.arange, array.shape), indexing="ij", sparse=True)
    packed[tuple(np.broadcast_arrays(*packing.scale_place(column, block)))] = array
    return packed


def unpacked_weights(
    words: te.Tensor, scale: te.Tensor, zero: te.Tensor | None, packing: Packing, dtype: str
) -> te.Tensor:
    """The weights ``[N, K]`` in ``dtype``, each computed in float32 and rounded once."""
    mask = tirx.const((1 << packing.bits) - 1, "uint32")

    def weight(column: Any, k: Any) -> Any:
        at, bit = packing.place(column, k)
        number = ((words[tuple(at)] >> bit.astype("uint32")) & mask).astype("float32")
        place = tuple(packing.scale_place(column, k // packing.block))
        moved = number - (zero[place].astype("float32") if zero is not None
                          else tirx.const(float(middle(packing.bits)), "float32"))
        return (moved * scale[place].astype("float32")).astype(dtype)

    attrs = {"mlc.op": WEIGHTS, "bits": packing.bits, "block": packing.block}
    return te.compute((packing.columns, packing.depth), weight, name="weights", attrs=attrs)


def dense_few_bits(
    data: te.Tensor, words: te.Tensor, scale: te.Tensor, zero: te.Tensor | None, columns: int, bits: int, block: int
) -> te.Tensor:
    """Product of ``[..., M, K]`` of 16-bit floats or float32 with weights of :func:`pack_integers`, in the same type
    and added up in float32: ``[..., M, N]`` of float32.

    ``scale`` and ``zero`` are :func:`pack_scales`' of any type of floats; a ``zero`` is moved by :func:`middle`, and
    left out it is 0 before that.
    """
    *rows, depth = data.shape
    weights = unpacked_weights(words, scale, zero, Packing(bits, block, columns, int(depth)), data.dtype)
    k = te.reduce_axis((0, depth), name="k")

    def product(*index: Any) -> Any:
        *row, j = index
        return te.sum(data[(*row, k)].astype("float32") * weights[j, k].astype("float32"), axis=[k])

    return te.compute((*rows, columns), product, name=PRODUCT, attrs={"mlc.op": PRODUCT})
