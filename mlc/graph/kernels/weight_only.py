"""Float32 activations times weights of 2, 4 or 8 bits that become float32 in registers, and the packing of such
weights.

A weight is ``(integer - zero) * scale`` with a scale, and where it is not zero a zero point, for each column and each
block of rows. So a block's part of a sum is ``scale * (sum(x * integer) - zero * sum(x))``: scales and zero points are
taken once for each block, not for each weight.

Integers lie in fields of 32-bit words, of 16, 8 or 4 rows one word, the first row in the lowest bits. Words and scales
lie in panels of :data:`PANEL` columns that a register tile reads in one stream.

Those of 2 and 4 bits are kept as they are in their place: a mask leaves ``integer * 2**(bits * row)``, which float32
holds exactly, and the activation that it meets is multiplied by ``2**-(bits * row)`` beforehand. A mask, a conversion
and a multiply-add are all that a vector of weights takes. For that they and their zero points are unsigned, moved by
half of their range. Moved by 128, small integers of 8 bits would lose digits: these stay signed and take two shifts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

__all__ = ["PANEL", "WEIGHT_ONLY", "dense_weight_only", "moved_by", "pack_columns", "pack_words", "rows_of_word"]

#: columns of one panel. Measured at 4096 x 4096 on AVX-512: streams of 128 bytes are read faster than of 64
PANEL = 32
#: the product's annotation
WEIGHT_ONLY = "dense_weight_only"

_WORD = 32


def rows_of_word(bits: int) -> int:
    """How many rows' integers of ``bits`` bits one word holds."""
    return _WORD // bits


def moved_by(bits: int) -> int:
    """The offset that makes integers of ``bits`` bits, and their zero points, unsigned (0 for 8 bits, which stay
    signed)."""
    return 1 << (bits - 1) if bits < 8 else 0


def pack_columns(array: np.ndarray) -> np.ndarray:
    """``[R, N]`` as ``[N/32, R, 32]``, with columns of zeros up to whole panels."""
    rows, columns = array.shape
    array = np.pad(array, ((0, 0), (0, -columns % PANEL)))
    return np.ascontiguousarray(array.reshape(rows, -1, PANEL).transpose(1, 0, 2))


def pack_words(integers: np.ndarray, bits: int, block: int) -> np.ndarray:
    """``[K, N]`` of integers from ``-2**(bits-1)`` to ``2**(bits-1) - 1``, moved by :func:`moved_by`, as uint32
    ``[N/32, R, 32]``.

    Each ``block`` of rows begins a word; several blocks must be of whole words (:func:`rows_of_word`). Zeros fill the
    last word or block.
    """
    each = rows_of_word(bits)
    depth, columns = integers.shape
    if depth > block and block % each:
        raise ValueError(f"blocks of several must be whole words of {each} rows, got {block}")
    moved = integers.astype(np.int64) + moved_by(bits) & (1 << bits) - 1
    fields = np.pad(moved, ((0, -depth % (block if depth > block else each)), (0, 0))).reshape(-1, each, columns)
    words = np.zeros((len(fields), columns), np.uint32)
    for row in range(each):
        words |= fields[:, row].astype(np.uint32) << np.uint32(bits * row)
    return pack_columns(words)


def dense_weight_only(
    data: te.Tensor, words: te.Tensor, scale: te.Tensor, zero: te.Tensor | None, bits: int, block: int
) -> te.Tensor:
    """Product of float32 ``[..., M, K]`` with a weight of :func:`pack_words` to float32 ``[..., M, N]``, ``N`` whole
    panels.

    ``scale`` and ``zero`` are float32 ``[N/32, ceil(K/block), 32]``; a ``zero`` is moved by :func:`moved_by`, and left
    out it is 0 before that. Sums of rows with infinities are not numbers.
    """
    panels, each, blocks = words.shape[0], rows_of_word(bits), int(scale.shape[1])
    *rows, depth = data.shape
    depth, steps = int(depth), int(words.shape[1]) // blocks
    taken, whole = min(block, depth), blocks * steps * each  # rows of a block, and of all words

    def value(row: Any, k: Any, end: int) -> Any:
        found = data[(*row, k)]
        return found if end <= depth else tirx.if_then_else(k < depth, found, tirx.const(0.0, "float32"))

    def scaled(*index: Any) -> Any:
        """The activation over the place of the integer that it meets; the last one of a word is shifted down."""
        *row, k = index
        found = value(row, k, whole)
        if not moved_by(bits):
            return found
        factor = tirx.const(1.0, "float32")
        for field in range(1, each - 1):
            factor = tirx.Select(k % each == field, tirx.const(2.0 ** -(field * bits), "float32"), factor)
        return found * factor

    def integer(panel: Any, step: Any, lane: Any, field: Any) -> Any:
        word = words[panel, step, lane]
        if not moved_by(bits):  # to the upper end; then down with its sign
            up = (_WORD - bits - field * bits).astype("uint32").astype("int32")  # 32 bits where indices have 64
            return (word.astype("int32") << up) >> (_WORD - bits)
        mask = tirx.const((1 << bits) - 1, "uint32") << (field * bits).astype("uint32")
        last = word >> tirx.const(_WORD - bits, "uint32")
        return tirx.Select(field == each - 1, last, word & mask).astype("int32")

    placed = data
    if moved_by(bits) or whole > depth:
        placed = te.compute((*rows, whole), scaled, name="placed")
    rs, rf = te.reduce_axis((0, steps), name="rs"), te.reduce_axis((0, each), name="rf")

    def part(*index: Any) -> Any:
        *row, b, j = index
        step = b * steps + rs
        number = integer(j // PANEL, step, j % PANEL, rf).astype("float32")
        return te.sum(placed[(*row, step * each + rf)] * number, axis=[rs, rf])

    parts = te.compute((*rows, blocks, panels * PANEL), part, name="parts")
    rb, totals = te.reduce_axis((0, blocks), name="rb"), None
    if zero is not None or moved_by(bits):
        rk = te.reduce_axis((0, taken), name="rk")
        totals = te.compute(
            (*rows, blocks), lambda *i: te.sum(value(i[:-1], i[-1] * taken + rk, blocks * taken), axis=[rk]),
            name="totals")

    def product(*index: Any) -> Any:
        *row, j = index
        place, found = (j // PANEL, rb, j % PANEL), parts[(*row, rb, j)]
        if totals is not None:
            moved = zero[place] if zero is not None else tirx.const(float(moved_by(bits)), "float32")
            found = found - moved * totals[(*row, rb)]
        return te.sum(found * scale[place], axis=[rb])

    return te.compute((*rows, panels * PANEL), product, name=WEIGHT_ONLY, attrs={"mlc.op": WEIGHT_ONLY})
