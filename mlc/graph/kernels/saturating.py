"""Exact 8-bit integer products by an instruction whose pairwise sums saturate (``pmaddubsw``): weights are split so
that none does.

``pmaddubsw`` multiplies bytes at 1.4 times the rate of ``pmaddwd``, but the sum of two products ends at 16 bits, which
it leaves where two weights of one sign add up to more than 128. So a weight becomes a sum of two: one without such
pairs for the instruction, and what exceeds them (:func:`split`), one weight in a hundred where they are normally
distributed. That remainder is sparse: :func:`remainder` adds it up a column at a time, along vectors of rows.

``x @ W   -->   dense_bytes(x, W1) + remainder(x, W2)``, both exact
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.blocked import convolved
from mlc.graph.kernels.integer import dot_form, pack_dense
from mlc.target import Target
from schedules.intrin import dot, select
from schedules.machine import cpu_machine

__all__ = ["ROWS", "Split", "conv2d_nchwc_bytes", "dense_bytes", "has_bytes", "pack_remainder", "remainder", "split"]

#: the annotation of the block that adds up a sparse weight's products
REMAINDER = "remainder"
#: what the rows of :func:`remainder` are a multiple of
ROWS = 16
#: what the magnitudes of two weights of one sign may add up to: 255 * 128 < 2**15
_LARGEST_PAIR = 128


def has_bytes(target: Target) -> bool:
    """Whether bytes are multiplied in pairs that saturate, and no better instruction takes them."""
    lanes = cpu_machine(target.tvm).lanes("int32")
    return dot_form(target) == dot.WORDS and select(dot.dot(dot.BYTES, lanes), target.tvm) is not None


@dataclass(frozen=True, eq=False)
class Split:
    """An int8 weight ``[K, N]`` as a sum of two: ``kept`` and the sparse ``rest``."""

    kept: np.ndarray
    rest: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray) -> Split:
        """The weight, split."""
        return cls(*split(weight))

    @cached_property
    def panels(self) -> np.ndarray:
        """The weights that :func:`dense_bytes` reads."""
        return pack_dense(self.kept, dot.QUADS)

    @cached_property
    def packed_rest(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The weights that :func:`remainder` reads."""
        return pack_remainder(self.rest)


def split(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(W1, W2)`` of int8 ``[K, N]``, ``W = W1 + W2``: in no column two weights of ``W1`` at ``2k`` and ``2k + 1``
    whose products with any uint8 add up to what 16 bits do not hold; ``W2`` is zero but for one weight of each pair
    that has been reduced."""
    depth, columns = weight.shape
    pairs = np.pad(weight.astype(np.int16), ((0, depth % 2), (0, 0))).reshape(-1, 2, columns)
    whole = pairs.sum(axis=1)
    alike = (pairs[:, 0] < 0) == (pairs[:, 1] < 0)
    excess = np.where(alike, np.sign(whole) * np.maximum(np.abs(whole) - _LARGEST_PAIR, 0), 0)
    rest = np.zeros_like(pairs)
    first = np.abs(pairs[:, 0]) >= np.abs(pairs[:, 1])  # the larger one holds the excess
    rest[:, 0], rest[:, 1] = np.where(first, excess, 0), np.where(first, 0, excess)
    both = (pairs - rest, rest)
    first_part, second = (each.reshape(-1, columns)[:depth].astype(np.int8) for each in both)
    return first_part, second


def pack_remainder(rest: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(starts, places, values)`` of a sparse int8 ``[K, N]``: column ``n`` is not zero at ``places[s:e]`` (int32),
    where it is ``values[s:e]`` (int16), ``s, e = starts[n : n + 2]`` (int32). The last two are filled up to a multiple
    of ``N``, so that weights of one shape are mostly read by one function."""
    column, row = np.nonzero(rest.T)
    starts = np.searchsorted(column, np.arange(rest.shape[1] + 1))
    fill = (0, -len(row) % rest.shape[1])
    places, values = (np.pad(each, fill) for each in (row.astype(np.int32), rest[row, column].astype(np.int16)))
    return starts.astype(np.int32), places, values


def dense_bytes(data: te.Tensor, weight: te.Tensor, rest: te.Tensor | None = None) -> te.Tensor:
    """Product of uint8 ``[..., M, K]``, ``K`` a multiple of 4, with int8 ``[N/16, K/4, 16, 4]`` to int32
    ``[..., M, N]``; sums of two products saturate to 16 bits. ``rest``, a :func:`remainder` of all rows, is added."""
    panels, steps, width, size = weight.shape
    rk, rp = te.reduce_axis((0, steps), name="rk"), te.reduce_axis((0, size // 2), name="rp")

    def product(*index: tirx.Var) -> tirx.Expr:
        *rows, j = index
        panel, lane = tirx.floordiv(j, width), tirx.floormod(j, width)
        return te.sum(_pair(data, (*rows, rk * size), weight, (panel, rk, lane), rp * 2), axis=[rk, rp])

    shape = (*data.shape[:-1], panels * width)
    sums = te.compute(shape, product, name="dense_bytes", attrs={"mlc.op": "dense_bytes"})
    if rest is None:
        return sums

    def total(*index: tirx.Var) -> tirx.Expr:
        row = tirx.const(0, "int32")
        for place, extent in zip(index[:-1], shape[:-1], strict=True):
            row = row * extent + place
        return sums[index] + rest[index[-1], row]

    return te.compute(shape, total, name="with_remainder")


def conv2d_nchwc_bytes(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Convolution of uint8 ``[N, IC/i, H, W, i]`` with int8 ``[OC/o, IC/i, KH, KW, i/4, o, 4]`` to int32
    ``[N, OC/o, OH, OW, o]``; sums of two products saturate to 16 bits."""
    *_, steps, lanes, size = weight.shape
    rq, rp = te.reduce_axis((0, steps), name="rq"), te.reduce_axis((0, size // 2), name="rp")

    def product(place: Sequence[Any], _group: Any, block: Sequence[Any], lane: Any) -> tirx.Expr:
        return _pair(data, (*place, rq * size), weight, (*block, rq, lane), rp * 2)

    return convolved(data, weight, lanes, (1, 1), (1, 1), 1, [rq, rp], product, "conv2d_nchwc_bytes",
                     name="conv2d_bytes")


def _pair(
    data: te.Tensor, place: Sequence[Any], weight: te.Tensor, block: Sequence[Any], first: tirx.Expr
) -> tirx.Expr:
    """The sum of two products of neighbours, the ``first`` of a step, saturated to 16 bits."""
    *outer, step = place
    terms = [data[(*outer, step + first + k)].astype("int32") * weight[(*block, first + k)].astype("int32")
             for k in range(2)]
    low, high = (tirx.const(end, "int32") for end in (-(2**15), 2**15 - 1))
    return tirx.max(tirx.min(terms[0] + terms[1], high), low)


def remainder(depth: int, rows: int, columns: int, count: int) -> tirx.PrimFunc:
    """The function of uint8 ``[K, M]`` and the three arrays of :func:`pack_remainder`, of ``count`` values, to int32
    ``[N, M]``: the product of the sparse weight's columns with all rows, a multiple of :data:`ROWS`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as I

    tile = next(width for width in (4 * ROWS, 3 * ROWS, 2 * ROWS, ROWS) if rows % width == 0)
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name("remainder")
        I.func_attr({"tirx.noalias": True})
        x = I.arg("x", I.buffer((depth, rows), "uint8"))
        starts = I.arg("starts", I.buffer((columns + 1,), "int32"))
        places = I.arg("places", I.buffer((count,), "int32"))
        values = I.arg("values", I.buffer((count,), "int16"))
        y = I.arg("y", I.buffer((columns, rows), "int32"))
        with I.grid(columns, rows // tile) as loops, I.sblock("remainder"):
            n, m = (I.axis.spatial(extent, loop) for extent, loop in zip((columns, rows // tile), loops, strict=True))
            mine = slice(m * tile, (m + 1) * tile)
            I.sblock_attr({"mlc.op": REMAINDER})
            I.reads(x[0:depth, mine], starts[n : n + 2], places[0:count], values[0:count])
            I.writes(y[n, mine])
            sums = I.sblock_alloc_buffer((tile,), "int32", scope="local")
            with I.vectorized(0, tile) as lane:
                I.buffer_store(sums, tirx.const(0, "int32"), [lane])
            with I.serial(starts[n], starts[n + 1]) as each, I.vectorized(0, tile) as lane:
                factor = values[each].astype("int32")
                value = x[places[each], m * tile + lane].astype("int32")
                I.buffer_store(sums, sums[lane] + value * factor, [lane])
            with I.vectorized(0, tile) as lane:
                I.buffer_store(y, sums[lane], [n, m * tile + lane])
    return builder.get()
