"""Attention on tensor cores as one kernel, by ``mma.sync`` (sm_80 and later), of 16-bit floats.

Each warp takes 16 queries, whose fragments stay in registers. Scores of a tile live in the registers that the products
leave them in, which after the exponentials are those that the second product reads: no score ever leaves its thread.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import call, i32, loop, when
from schedules.cuda.heads import Heads
from schedules.cuda.online import Online, Tiles
from schedules.intrin import mma

__all__ = ["Flash", "FlashTiles", "Fragments"]

_TILE = mma.TILE


class FlashTiles(Tiles):
    """Tiles whose products are those of fragments."""

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

    def store(self, row: Any) -> tirx.Stmt:
        features, pairs = self.heads.features, self.heads.neighbours(2) == 2

        def pair(n: Any) -> tirx.Stmt:
            column, index = n * 8 + self.lane % 4 * 2, n * 4 + row * 2
            if not pairs:
                return loop(2, lambda e: when(column + e < features, self.element(row, index + e, column + e)))
            both = loop(2, lambda e: self.element(row, index + e, column + e), tirx.ForKind.VECTORIZED)
            return both if features % 8 == 0 else when(column < features, both)

        return loop(ceil_div(features, 8), pair)


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
