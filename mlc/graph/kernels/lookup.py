"""Float32 products with weights that are codes into a table of 16 numbers, such as bitsandbytes' FP4 and NF4.

A weight is ``table[code] * scale`` with a scale for each column and each block of rows, so that a block's part of a
sum is ``scale * sum(x * table[code])``. Codes lie in memory, in the words of :mod:`mlc.graph.kernels.weight_only`, and
are looked up in registers (:mod:`schedules.intrin.lookup`), once for all rows of a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from cost_model.machine import machine
from mlc.graph.kernels.weight_only import PANEL, moved_by, pack_words, rows_of_word
from mlc.target import Target
from schedules.intrin import select
from schedules.intrin.lookup import element, lookup
from schedules.machine import cpu_machine

__all__ = ["CODES", "LOOKUP", "dense_lookup", "has_lookup", "pack_codes"]

#: the product's annotation, and how many numbers a table holds
LOOKUP, CODES = "dense_lookup", 16
_BITS = 4
#: Rows that share what a tile looks up; and what a lookup takes, and a row beside its multiply-add, by the lanes of a
#: vector, in multiply-adds. Measured on Zen 2, 1 to 16 rows: shuffles of bytes; values that rows share are loads of
#: their own there. Others are counted
_TILE, _LOOKUP = 8, {16: (2.0, 0.25), 8: (4.0, 0.8), 4: (4.0, 0.25)}
#: how much longer codes may take: numbers are eight times the bytes, in the file and in memory
_WORTH = 2.0


def has_lookup(target: Target, rows: int, numbers: int, others: int) -> bool:
    """Whether a product of so many rows by the codes of ``numbers`` is worth its time on the target, beside that by
    these as float32; ``others`` are the numbers of all such products.

    Codes cost instructions, once for each tile's rows. Of either the bytes come from main memory where all do not stay
    in half of the last cache.
    """
    lanes = min(PANEL, cpu_machine(target.tvm).lanes())
    if select(lookup(lanes), target.tvm) is None:
        return False
    at, (once, each) = machine(target.tvm), _LOOKUP[lanes]
    by_codes, by_numbers = (2.0 * numbers * adds / at.flops
                            for adds in (once * -(-rows // _TILE) + (1 + each) * rows, rows))

    def read(bytes_: float) -> float:
        cached = bytes_ * others <= at.levels[-1].size / 2
        return bytes_ * numbers / (at.cores * at.levels[-2].refill if cached else at.bandwidth)

    return max(by_codes, read(_BITS / 8)) < _WORTH * max(by_numbers, read(4))


def pack_codes(codes: np.ndarray, block: int) -> np.ndarray:
    """``[K, N]`` of codes from 0 to 15 as uint32 ``[N/32, R, 32]``; blocks and what fills them up are those of
    :func:`~mlc.graph.kernels.weight_only.pack_words`, which raises the same errors."""
    return pack_words(codes.astype(np.int8) - np.int8(moved_by(_BITS)), _BITS, block)


def dense_lookup(
    data: te.Tensor, words: te.Tensor, scale: te.Tensor, table: te.Tensor, block: int
) -> te.Tensor:
    """Product of float32 ``[..., M, K]`` with a weight of :func:`pack_codes` to float32 ``[..., M, N]``, ``N`` whole
    panels.

    ``scale`` is float32 ``[N/32, ceil(K/block), 32]``, ``table`` float32 ``[16]``.
    """
    panels, each, blocks = words.shape[0], rows_of_word(_BITS), int(scale.shape[1])
    *rows, depth = data.shape
    depth, steps = int(depth), int(words.shape[1]) // blocks
    whole = blocks * steps * each  # rows of all words

    def filled(*index: Any) -> Any:
        return tirx.if_then_else(index[-1] < depth, data[index], tirx.const(0.0, "float32"))

    placed = te.compute((*rows, whole), filled, name="placed") if whole > depth else data

    def number(panel: Any, step: Any, field: Any, lane: Any) -> Any:
        return element(lambda at: table[at], words[panel, step, lane], field)

    numbers = te.compute((panels, blocks * steps, each, PANEL), number, name="numbers")
    rs, rf = te.reduce_axis((0, steps), name="rs"), te.reduce_axis((0, each), name="rf")

    def part(*index: Any) -> Any:
        *row, b, j = index
        step = b * steps + rs
        return te.sum(placed[(*row, step * each + rf)] * numbers[j // PANEL, step, rf, j % PANEL], axis=[rs, rf])

    parts = te.compute((*rows, blocks, panels * PANEL), part, name="parts")
    rb = te.reduce_axis((0, blocks), name="rb")

    def product(*index: Any) -> Any:
        *row, j = index
        return te.sum(parts[(*row, rb, j)] * scale[j // PANEL, rb, j % PANEL], axis=[rb])

    return te.compute((*rows, panels * PANEL), product, name=LOOKUP, attrs={"mlc.op": LOOKUP})
