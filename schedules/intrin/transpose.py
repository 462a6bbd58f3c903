"""Transposition of a square tile of 32-bit elements in vector registers.

A vector of a column would be loaded element by element; here rows are loaded whole and ``log2`` rounds of two-operand
shuffles turn them, a quarter of a shuffle an element at 16 lanes. After the classic scheme for SSE and AVX registers:
pairs of elements within 128 bits first, then blocks of 128 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.intrin import PREFIX, Intrinsic, declare

__all__ = ["transpose"]

#: elements of the blocks that shuffles move whole
_BLOCK = 4


def transpose(lanes: int) -> str:
    """The name of the intrinsic that transposes ``lanes`` x ``lanes`` float32: ``B[j, i] = A[i, j]``."""
    return f"{PREFIX}transpose{lanes}_f32"


def network(lanes: int) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    """The rounds of shuffles; each gives all rows of the next round as ``(first, second, picks)``.

    A pick below ``lanes`` takes an element of row ``first``, others one of row ``second``.
    """
    def within(picks: Sequence[int]) -> tuple[int, ...]:
        """``picks`` of the 2 x 4 elements of each pair of 128-bit blocks."""
        return tuple(
            block + p if p < _BLOCK else lanes + block + p - _BLOCK for block in range(0, lanes, _BLOCK) for p in picks
        )

    low, high = within((0, 4, 1, 5)), within((2, 6, 3, 7))
    pair_low, pair_high = within((0, 1, 4, 5)), within((2, 3, 6, 7))
    singles = [(i - i % 2, i - i % 2 + 1, high if i % 2 else low) for i in range(lanes)]
    pairs = []
    for i in range(lanes):  # row 4g + c holds column c of its blocks' rows 4g .. 4g + 3
        group, column = i - i % _BLOCK, i % _BLOCK
        first = group + column // 2
        pairs.append((first, first + 2, pair_high if column % 2 else pair_low))
    rounds = [singles, pairs]
    size = lanes // _BLOCK
    # row g * 4 + c is now a row of size blocks, which remain to be transposed against the size rows of equal c
    distance = 1
    while distance < size:
        evens = _blocks(lanes, lambda k: 2 * k)
        odds = _blocks(lanes, lambda k: 2 * k + 1)
        half = size // 2
        step = []
        for i in range(lanes):
            g, c = divmod(i, _BLOCK)
            source = 2 * (g % half)
            step.append((source * _BLOCK + c, (source + 1) * _BLOCK + c, odds if g >= half else evens))
        rounds.append(step)
        distance *= 2
    return rounds


def _blocks(lanes: int, place: Callable[[int], int]) -> tuple[int, ...]:
    """Every block ``place(k)`` of two rows of blocks, for all ``k``, element by element."""
    return tuple(place(k) * _BLOCK + e for k in range(lanes // _BLOCK) for e in range(_BLOCK))


def _transposition(lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle) -> None:
        a = T.match_buffer(x, (lanes, lanes), "float32", strides=[T.int32(), 1], offset_factor=1)
        b = T.match_buffer(y, (lanes, lanes), "float32", strides=[T.int32(), 1], offset_factor=1)
        with T.sblock("root"):
            T.reads(a[0:lanes, 0:lanes])
            T.writes(b[0:lanes, 0:lanes])
            for j, i in T.grid(lanes, lanes):
                with T.sblock("transpose"):
                    vj, vi = T.axis.remap("SS", [j, i])
                    b[vj, vi] = a[vi, vj]

    return description


def _shuffled(lanes: int, description: tirx.PrimFunc) -> tirx.PrimFunc:
    block = description.body.block
    source, target = block.reads[0].source, block.writes[0].source
    steps: list[tirx.Stmt] = []

    def bound(value: Any) -> tirx.Var:
        variable = tirx.Var("row", f"float32x{lanes}")
        steps.append(tirx.Bind(variable, value))
        return variable

    def row(i: int) -> list[Any]:
        return [i, tirx.Ramp(0, 1, lanes)]

    rows = [bound(tirx.BufferLoad(source, row(i))) for i in range(lanes)]
    for step in network(lanes):
        rows = [bound(tirx.Shuffle([rows[first], rows[second]], list(picks))) for first, second, picks in step]
    steps += [tirx.BufferStore(target, value, row(i)) for i, value in enumerate(rows)]
    shuffled = s_tir.SBlock([], block.reads, block.writes, "root", tirx.SeqStmt(steps))
    return description.with_body(s_tir.SBlockRealize([], True, shuffled))


for _lanes in (4, 8, 16):
    declare(Intrinsic(
        transpose(_lanes), ("float32", "float32"), ((),), partial(_transposition, _lanes), partial(_shuffled, _lanes),
        lambda a, _: a.T, "unpck|shuf|perm|trn|zip|ext|ins",
    ))
