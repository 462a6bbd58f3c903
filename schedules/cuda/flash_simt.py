"""Attention in float32 as one kernel, by plain multiply-adds: every product and sum is float32's own.

Half a warp takes four queries, its lanes every sixteenth key and some of the features. Scores stay in registers until
they are weights, which go through shared memory to the other lanes of the half warp, and no further.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import barrier, loop, when
from schedules.cuda.heads import Heads
from schedules.cuda.online import Online, Tiles

__all__ = ["SimtFlash", "SimtTiles"]

#: lanes that share queries, queries of a thread, and elements that one access takes
_LANES, _ROWS, _VECTOR = 16, 4, 4
_SERIAL, _VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.VECTORIZED


class SimtTiles(Tiles):
    """Tiles of float32."""

    rows = 2 * _ROWS
    kept = 4

    def registers(self, heads: Heads) -> int:
        """Scores, sums, the rows of four features or keys, and some more."""
        columns, features = self.keys // _LANES, self.padded(heads.features) // _LANES
        return _ROWS * (columns + features) + _VECTOR * (_ROWS + columns) + features + 4 * _ROWS + 40


class SimtFlash(Online):
    """The kernel of float32."""

    rows = _ROWS
    joined = (1, 2, 4, 8)

    def __init__(self, func: tirx.PrimFunc, heads: Heads, tiles: SimtTiles) -> None:
        super().__init__(func, heads, tiles)
        self.columns, self.each = tiles.keys // _LANES, self.features // _LANES
        #: features that lie side by side in a thread
        self.side = next(v for v in (_VECTOR, 2, 1) if self.each % v == 0)
        self.left = self.registers(_ROWS * _VECTOR, "float32", "left")
        self.right = self.registers(self.columns * _VECTOR, "float32", "right")
        self.row = self.registers(self.each, "float32", "row")
        self.row_w = tiles.stride(tiles.keys, heads.bits)
        self.kept = self.ring + tiles.stages * self.stage  # where weights lie

    def query(self, row: Any) -> Any:
        return self.thread // _LANES * _ROWS + row

    def _own(self) -> Any:
        return self.thread % _LANES

    def each_score(self, visit: Any) -> tirx.Stmt:
        return loop(_ROWS, lambda r: loop(self.columns, lambda c: visit(
            r * self.columns + c, r, c * _LANES + self._own())))

    def each_sum(self, visit: Any) -> tirx.Stmt:
        return loop(_ROWS, lambda r: loop(self.each, lambda c: visit(r * self.each + c, r, self._feature(c))))

    def sum_of(self, row: Any, number: Any) -> Any:
        return row * self.each + number

    def _feature(self, number: Any) -> Any:
        """Which feature a thread's feature of this number is."""
        return number // self.side * (_LANES * self.side) + self._own() * self.side + number % self.side

    def _read(self, registers: tirx.Buffer, to: Any, at: Any, count: int = _VECTOR) -> tirx.Stmt:
        return loop(count, lambda v: self.set(registers, to + v, self.memory[at + v]), _VECTORIZED)

    def multiply_keys(self, at: Any) -> list[Any]:
        def four(d: Any) -> list[Any]:
            return [
                loop(_ROWS, lambda r: self._read(
                    self.left, r * _VECTOR, self.query(r) * self.row_k + d * _VECTOR)),
                loop(self.columns, lambda c: self._read(
                    self.right, c * _VECTOR, at + (c * _LANES + self._own()) * self.row_k + d * _VECTOR)),
                loop(_VECTOR, lambda v: self.each_score(lambda i, r, _: self.set(
                    self.scores, i,
                    self.scores[i] + self.left[r * _VECTOR + v] * self.right[i % self.columns * _VECTOR + v]))),
            ]

        return [loop(ceil_div(self.heads.depth, _VECTOR), four, _SERIAL)]

    def keep(self, index: Any, row: Any, column: Any) -> tirx.Stmt:
        return self.set(self.memory, self.kept + self.query(row) * self.row_w + column, self.scores[index])

    def multiply_values(self, at: Any) -> list[Any]:
        def key(j: Any, v: Any) -> list[Any]:
            begin = at + (j * _VECTOR + v) * self.row_v
            return [
                loop(self.each // self.side, lambda g: self._read(
                    self.row, g * self.side, begin + g * (_LANES * self.side) + self._own() * self.side, self.side)),
                self.each_sum(lambda i, r, _: self.set(
                    self.sums, i, self.sums[i] + self.left[r * _VECTOR + v] * self.row[i % self.each])),
            ]

        def four(j: Any) -> list[Any]:
            return [
                loop(_ROWS, lambda r: self._read(
                    self.left, r * _VECTOR, self.kept + self.query(r) * self.row_w + j * _VECTOR)),
                loop(_VECTOR, lambda v: key(j, v)),
            ]

        return [barrier(), loop(self.tiles.keys // _VECTOR, four, _SERIAL)]

    def store(self, row: Any) -> tirx.Stmt:
        features, side = self.heads.features, self.heads.neighbours(self.side)

        def some(g: Any) -> tirx.Stmt:
            first = self._feature(g * side)
            kind = _VECTORIZED if side > 1 else _SERIAL
            stored = loop(side, lambda v: self.element(row, row * self.each + g * side + v, first + v), kind)
            return stored if features == self.features else when(first < features, stored)

        return loop(self.each // side, some)
