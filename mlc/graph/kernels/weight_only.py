"""Products of float32 with weights of 4 or 8 bits, which become float32 in registers, and the packing of such weights.

A weight is ``(integer - zero) * scale`` with a scale, and where it is not zero a zero point, for each column and each
block of rows. Its integers, signed, lie in 32-bit words: of 8 rows one word for 4 bits, of 4 rows for 8 bits, the
first row in the lowest bits. So a vector of words holds several rows of a vector of columns, and two shifts and a
conversion make float32 of one of them. Words and scales lie in panels of :data:`PANEL` columns that a register tile
reads in one stream.
"""

from __future__ import annotations

import numpy as np
from tvm import te, tirx

__all__ = ["PANEL", "WEIGHT_ONLY", "dense_weight_only", "pack_columns", "pack_words", "rows_of_word"]

#: columns of one panel. Measured at 4096 x 4096 on AVX-512: streams of 128 bytes are read faster than of 64
PANEL = 32
#: the product's annotation
WEIGHT_ONLY = "dense_weight_only"

_WORD = 32


def rows_of_word(bits: int) -> int:
    """How many rows' integers of ``bits`` bits one word holds."""
    return _WORD // bits


def pack_columns(array: np.ndarray) -> np.ndarray:
    """``[R, N]`` as ``[N/32, R, 32]``, with columns of zeros up to whole panels."""
    rows, columns = array.shape
    array = np.pad(array, ((0, 0), (0, -columns % PANEL)))
    return np.ascontiguousarray(array.reshape(rows, -1, PANEL).transpose(1, 0, 2))


def pack_words(integers: np.ndarray, bits: int) -> np.ndarray:
    """``[K, N]`` of integers from ``-2**(bits-1)`` to ``2**(bits-1) - 1`` as uint32 ``[N/32, K/r, 32]``, where ``r`` is
    :func:`rows_of_word`; rows of zeros fill the last words."""
    each = rows_of_word(bits)
    depth, columns = integers.shape
    fields = np.pad(integers.astype(np.int32), ((0, -depth % each), (0, 0))).reshape(-1, each, columns)
    words = np.zeros((len(fields), columns), np.uint32)
    for row in range(each):
        words |= (fields[:, row].view(np.uint32) & np.uint32((1 << bits) - 1)) << np.uint32(bits * row)
    return pack_columns(words)


def dense_weight_only(
    data: te.Tensor, words: te.Tensor, scale: te.Tensor, zero: te.Tensor | None, bits: int, block: int
) -> te.Tensor:
    """Product of float32 ``[..., M, K]`` with a weight of :func:`pack_words` to float32 ``[..., M, N]``, ``N`` whole
    panels.

    ``scale`` and ``zero`` are float32 ``[N/32, ceil(K/block), 32]``. ``K`` may end within a word, whose other rows are
    not read.
    """
    panels, each, depth = words.shape[0], rows_of_word(bits), data.shape[-1]

    def weight(pi, ki, ji):  # type: ignore[no-untyped-def]
        up = tirx.Cast("int32", _WORD - bits - ki % each * bits)  # to the upper end; then down with its sign
        number = ((words[pi, ki // each, ji].astype("int32") << up) >> (_WORD - bits)).astype("float32")
        if zero is not None:
            number = number - zero[pi, ki // block, ji]
        return number * scale[pi, ki // block, ji]

    unpacked = te.compute((panels, depth, PANEL), weight, name="unpacked")
    rk = te.reduce_axis((0, depth), name="rk")

    def product(*index):  # type: ignore[no-untyped-def]
        *rows, j = index
        return te.sum(data[(*rows, rk)] * unpacked[j // PANEL, rk, j % PANEL], axis=rk)

    shape = (*data.shape[:-1], panels * PANEL)
    return te.compute(shape, product, name="dense_weight_only", attrs={"mlc.op": WEIGHT_ONLY})
