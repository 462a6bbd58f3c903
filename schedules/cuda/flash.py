"""Attention on tensor cores as one kernel, by ``mma.sync`` (sm_80 and later), of 16-bit floats.

Each warp takes 16 queries, whose fragments stay in registers. Scores of a tile live in the registers that the products
leave them in, which after the exponentials are those that the second product reads: no score ever leaves its thread.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import call, i32, i64, loop, over_lanes, power_of_two, store_piece, when
from schedules.cuda.heads import Heads
from schedules.cuda.online import Online, Tiles
from schedules.intrin import mma

__all__ = ["Flash", "FlashTiles", "Fragments"]

_TILE = mma.TILE
_PIECE_BYTES = 16


class FlashTiles(Tiles):
    """Tiles whose products are those of fragments."""

    issued = 5

    def registers(self, heads: Heads) -> int:
        """Scores and their halves, the result's sums, the queries, two fragments, and some more."""
        scores, sums = self.keys // 2, self.padded(heads.features) // 2
        return scores + scores // 2 + sums + self.padded(heads.depth) // 4 + 8 + 36


class Fragments(Online):
    """A kernel of 16-bit floats whose scores and sums lie as products of fragments leave them: of a warp's 16 queries
    each thread has two, and of 8 keys or features two neighbours."""

    rows = 2
    joined = (1, 2)

    def __init__(self, func: tirx.PrimFunc, heads: Heads, tiles: Tiles) -> None:
        super().__init__(func, heads, tiles)
        self.weights = self.registers(tiles.keys // 2, heads.dtype, "weights")
        if self._side > 2:
            self.given = self.registers(1, "float32", "given")
        if self._side == 8:
            self.held = self.registers(8, str(heads.result.buffer.dtype), "held")

    def power(self, exponent: Any) -> Any:
        """In one instruction: a weight is rounded to 16 bits anyway."""
        return power_of_two(exponent)

    def query(self, row: Any) -> Any:
        return self.warp * _TILE + self.lane // 4 + row * 8

    def each_score(self, visit: Any) -> tirx.Stmt:
        return self._each(self.tiles.keys, visit)

    def each_sum(self, visit: Any) -> tirx.Stmt:
        return self._each(self.features, visit)

    def sum_of(self, row: Any, number: Any) -> Any:
        return number // 2 * 4 + row * 2 + number % 2

    def _each(self, columns: int, visit: Any) -> tirx.Stmt:
        pair = self.lane % 4 * 2
        return loop(columns // 8, lambda n: loop(2, lambda r: loop(2, lambda e: visit(
            n * 4 + r * 2 + e, r, n * 8 + pair + e))))

    def keep(self, index: Any, row: Any, column: Any) -> tirx.Stmt:
        return self.set(self.weights, index, tirx.Cast(self.heads.dtype, self.scores[index]))

    @property
    def _side(self) -> int:
        """Neighbouring features that one store takes, of 16 bytes where those of the result can be aligned so; 1 where
        not even pairs can."""
        heads = self.heads
        most = _PIECE_BYTES * 8 // int(tvm.runtime.DataType(str(heads.result.buffer.dtype)).bits)
        found = heads.neighbours(most)
        return found if found > 1 else heads.neighbours(2)

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """Of a row's sums, where blocks of 8 features that lanes exchange begin and how many they are: as many as a
        store takes pairs, of which the last ones may be fewer."""
        found, begin, end = [], 0, ceil_div(self.features, 8)
        for count in (4, 2, 1):
            while 2 * count <= max(2, self._side) and begin + count <= end:
                found.append((begin, count))
                begin += count
        return found

    def regrouped(self) -> list[Any]:
        """Four lanes have two neighbouring features each of every 8. They exchange until each has as many neighbours as
        a store takes: the first half of the lanes gives the second half of the blocks for the first one's."""
        def exchange(first: int, second: int, distance: int) -> tirx.Stmt:
            low = self.lane // distance % 2 == 0

            def one(r: Any, e: Any) -> list[Any]:
                kept, given = (n * 4 + r * 2 + e for n in (first, second))
                return [
                    self.set(self.given, 0, over_lanes(
                        tirx.Select(low, self.sums[given], self.sums[kept]), distance)),
                    self.set(self.sums, kept, tirx.Select(low, self.sums[kept], self.given[0])),
                    self.set(self.sums, given, tirx.Select(low, self.given[0], self.sums[given])),
                ]

            return loop(self.rows, lambda r: loop(2, lambda e: one(r, e)))

        return [
            exchange(begin + n, begin + n + distance, distance)
            for begin, count in self._blocks for distance in (1, 2) if distance < count
            for n in range(count) if n // distance % 2 == 0
        ]

    def store(self, row: Any) -> tirx.Stmt:
        features = self.heads.features

        def some(begin: int, count: int) -> tirx.Stmt:
            """What lanes have of ``count`` blocks: of the one with the lane's number, all 8 features, or of two the
            half that the lane's second bit says; without an exchange, its own pair."""
            mine = self.lane % 4
            column = (begin + mine % count) * 8 + mine // count * (2 * count)

            def index(e: Any) -> Any:
                return (begin + e // 2) * 4 + row * 2 + e % 2

            def element(e: Any) -> tirx.Stmt:
                return self.element(row, index(e), column + e)

            wide = 2 * count
            if self._side == 1:
                return loop(wide, lambda e: when(column + e < features, element(e)))
            whole = self._piece(row, index, column) if wide == 8 else loop(wide, element, tirx.ForKind.VECTORIZED)
            return whole if features % (8 * count) == 0 else when(column < features, whole)

        stored = [some(*block) for block in self._blocks]
        return stored[0] if len(stored) == 1 else tirx.SeqStmt(stored)

    def _piece(self, row: Any, index: Any, column: Any) -> tirx.Stmt:
        """Store eight neighbours of 16 bits at once."""
        query = i64(self.first + self.query(row))

        def hold(e: Any) -> tirx.Stmt:
            value = self.sums[index(e)] * self.scale[row]
            return self.set(self.held, e, self.heads.made_of(self.batch, query, i64(column + e), value))

        halves = loop(2, lambda h: loop(4, lambda e: hold(h * 4 + e), tirx.ForKind.VECTORIZED))
        return tirx.SeqStmt([halves, store_piece(self.heads.place(self.batch, query, i64(column)), self.held)])


class Flash(Fragments):
    """The kernel of ``mma.sync``."""

    @property
    def kind(self) -> mma.Kind:
        """Of the operands."""
        return next(kind for kind in mma.KINDS if kind.operand == self.heads.dtype)

    def __init__(self, func: tirx.PrimFunc, heads: Heads, tiles: FlashTiles) -> None:
        super().__init__(func, heads, tiles)
        self.queries = self.registers(self.depth // 2, heads.dtype, "queries")
        self.fragment = self.registers(8, heads.dtype, "fragment")

    def _load(self, fragment: tirx.Buffer, to: Any, at: Any, side: str, transposed: bool, stride: int) -> tirx.Stmt:
        offset = at + mma.fetch_offset(self.kind, side, transposed, self.lane, stride)
        return call("tirx.ptx_legacy.ldmatrix", transposed, 4, ".b16", fragment.data, to, self.memory.access_ptr("r"),
                    offset, dtype=self.heads.dtype)

    def load_queries(self) -> list[Any]:
        at = self.warp * (_TILE * self.row_k)
        return [loop(self.depth // _TILE, lambda d: self._load(
            self.queries, d * 8, at + d * _TILE, "a", False, self.row_k))]

    def _multiply(self, a: tirx.Buffer, at: Any, sums: tirx.Buffer, to: Any) -> list[Any]:
        """Add the products of a fragment of A with :attr:`fragment` to 16 by 16 sums."""
        kind, shape = self.kind, f"m16n8k{self.kind.depth}"
        return [
            call("tirx.ptx_legacy.mma", shape, "row", "col", kind.ptx, kind.ptx, "fp32", a.data, at,
                 self.fragment.data, i32(kind.held // 2 * half), sums.data, to + 4 * half, False, dtype="float32")
            for half in range(2)
        ]

    def multiply_keys(self, at: Any) -> list[Any]:
        return [loop(self.depth // _TILE, lambda d: loop(self.tiles.keys // _TILE, lambda u: [
            self._load(self.fragment, 0, at + u * (_TILE * self.row_k) + d * _TILE, "b", False, self.row_k),
            *self._multiply(self.queries, d * 8, self.scores, u * 8),
        ]))]

    def multiply_values(self, at: Any) -> list[Any]:
        return [loop(self.tiles.keys // _TILE, lambda u: loop(self.features // _TILE, lambda f: [
            self._load(self.fragment, 0, at + u * (_TILE * self.row_v) + f * _TILE, "b", True, self.row_v),
            *self._multiply(self.weights, u * 8, self.sums, f * 8),
        ]))]
