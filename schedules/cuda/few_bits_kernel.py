"""Few rows times packed weights, as one kernel that reads each weight once and makes floats of it in registers.

A warp takes some tiles of 16 columns (:mod:`schedules.cuda.packed`) and every so many tiles along ``k``; it has fetched
some of these when it computes with the first. Warps of a block share columns, and then sums meet in shared memory, or
lie beside each other, and then the activations that they read are in the first cache. Where too few blocks would run,
a sum is cut over several, the last of which adds the parts up (:mod:`schedules.cuda.joined`). Sums have the same order
in every run.

How a tile is multiplied is in :mod:`schedules.cuda.few_bits_products`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import Registers, barrier, i32, i64, kernel, loop, sequence, when
from schedules.cuda.few_bits_form import FewBits
from schedules.cuda.joined import last_of
from schedules.cuda.packed import COLUMNS, LANES, WORDS

__all__ = ["FewBitsTile", "Streamed"]

_SERIAL, _VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.VECTORIZED
_ACCESS_BYTES = 16
#: floats between two rows of sums and the next two in shared memory: lanes keep columns of every other row at once, all
#: in other banks, and fetch 128 bytes of neighbouring columns at once, of one row or of such two
_PADDING = 8
#: sums that a thread adds up at a time
_PIECE = 4


@dataclass(frozen=True)
class FewBitsTile:
    """A block has so many ``rows``, a warp so many ``columns``, in tiles of 16; warps with others are ``beside`` it,
    and with the same ``together`` with it in a block; ``parts`` are blocks that share a sum; ``ahead``, tiles along
    ``k`` that a warp fetches at once."""

    rows: int
    columns: int
    beside: int
    together: int
    parts: int
    ahead: int

    @property
    def warps(self) -> int:
        return self.beside * self.together

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def block_columns(self) -> int:
        return COLUMNS * self.columns * self.beside

    def place(self, warp: Any, rows: int, row: Any, column: Any) -> Any:
        """Where a warp's sum is in shared memory, of blocks of so many ``rows``."""
        pairs = warp * ceil_div(rows, 2) + row // 2
        return pairs * (2 * self.block_columns + _PADDING) + row % 2 * self.block_columns + column

    def height(self, product: FewBits) -> int:
        """Rows of a block that has most."""
        return min(self.rows, product.m)

    def shared_bytes(self, product: FewBits) -> int:
        return 4 * self.together * ceil_div(self.height(product), 2) * (2 * self.block_columns + _PADDING)

    def bands(self, product: FewBits) -> int:
        """Blocks that have the same columns and other rows."""
        return ceil_div(product.m, self.rows)

    def places(self, product: FewBits) -> int:
        """Blocks that have results of their own."""
        return self.bands(product) * ceil_div(product.packing.tiles[0], self.columns * self.beside)

    def steps(self, product: FewBits) -> int:
        """Tiles along ``k`` of a part."""
        return ceil_div(product.packing.tiles[1], self.parts)

    def scale_words(self, product: FewBits) -> int:
        """Registers of a tile's scales and zero points."""
        bits = sum(int(tvm.runtime.DataType(str(each.dtype)).bits) for each in product.weights.parameters[1:])
        return ceil_div(2 * product.packing.granules * bits, 32)


class Streamed:
    """The kernel under construction; how a tile is multiplied is the subclass's."""

    def __init__(self, func: tirx.PrimFunc, product: FewBits, tile: FewBitsTile) -> None:
        self.func, self.product, self.tile, self.packing = func, product, tile, product.packing
        registers = self.registers = Registers()
        self.rows = tile.height(product)
        self.data = registers(self.fetched(product, self.rows), product.dtype, "data")
        self.memory = registers.shared(tile.shared_bytes(product) // 4, "float32")
        self.sums = registers(self.count(product, tile), "float32", "sums")
        self.words = registers(tile.ahead * tile.columns * WORDS, "uint32", "words")
        self.scales = [registers(tile.ahead * tile.columns * self.packing.granules * 2, str(each.dtype), name)
                       for each, name in zip(product.weights.parameters[1:], ("scales", "zeros"), strict=False)]
        self.total = registers(_PIECE, "float32", "total")
        self.places, self.steps = tile.places(product), tile.steps(product)
        self.handed: list[tirx.Buffer] = []
        if tile.parts > 1:
            room = tile.parts * self.places * self.rows * tile.block_columns
            self.handed = [tirx.decl_buffer((room,), "float32", "parts")]

    # what subclasses say

    @staticmethod
    def count(product: FewBits, tile: FewBitsTile) -> int:
        """Sums of a thread."""
        raise NotImplementedError

    @staticmethod
    def fetched(product: FewBits, rows: int) -> int:
        """Activations that a thread holds at a time, for so many rows."""
        raise NotImplementedError

    def multiply(self, k_tile: Any, ahead: Any) -> list[Any]:
        """Add the products of a tile along ``k``, which is the ``ahead``-th of those that were fetched."""
        raise NotImplementedError

    def put(self, to: Callable[[Any, Any, Any], tirx.Stmt]) -> list[Any]:
        """Hand on what a warp's sums are of each row and column, as ``to(row, column, sum)``."""
        raise NotImplementedError

    # the kernel

    def function(self) -> tirx.PrimFunc:
        return kernel(self.func, self.places * self.tile.parts, self.tile.threads, self.registers.buffers, self._body,
                      self.handed)

    def _body(self, block: Any, thread: Any) -> list[Any]:
        tile = self.tile
        self.thread, self.lane, warp = thread, thread % LANES, thread // LANES
        self.place, self.slice = (block, i32(0)) if tile.parts == 1 else (block % self.places, block // self.places)
        self.along, self.beside = warp % tile.together, warp // tile.together
        # blocks that read the same weights run together, so that these come from memory once
        bands = tile.bands(self.product)
        self.columns_of, self.first_row = (self.place, i32(0)) if bands == 1 else (
            self.place // bands, self.place % bands * tile.rows)
        self.begin = self.slice * self.steps
        each = tile.together * tile.ahead
        return [
            loop(int(self.sums.shape[0]), lambda i: self.set(self.sums, i, 0.0)),
            # TVM takes registers that are accessed as vectors alone for an array of these, whose places the
            # instruction would count
            self.set(self.data, 0, 0.0),
            loop(ceil_div(self.steps, each), self._round, _SERIAL),
            *self.put(self._keep), barrier(), *self._finish(),
        ]

    def set(self, buffer: tirx.Buffer, index: Any, value: Any) -> tirx.Stmt:
        """``buffer[index] = value``."""
        stored = tirx.const(value, str(buffer.dtype)) if isinstance(value, int | float) else value
        return tirx.BufferStore(buffer, stored, [index])

    def _round(self, number: Any) -> list[Any]:
        """Fetch some tiles along ``k``, and multiply by them."""
        def at(ahead: Any) -> Any:
            return self.begin + (number * self.tile.ahead + ahead) * self.tile.together + self.along

        return [
            loop(self.tile.ahead, lambda u: self._where(at(u), sequence(self._fetch(at(u), u)))),
            loop(self.tile.ahead, lambda u: self._where(at(u), sequence(self.multiply(at(u), u)))),
        ]

    def _where(self, k_tile: Any, body: tirx.Stmt) -> tirx.Stmt:
        """``body`` where the part has such a tile."""
        tiles, each = self.packing.tiles[1], self.tile.together * self.tile.ahead
        if self.steps % each:
            body = when(k_tile < self.begin + self.steps, body)
        return body if tiles % self.steps == 0 and tiles == self.steps * self.tile.parts else when(k_tile < tiles, body)

    def column_tile(self, number: Any) -> Any:
        """The tile of columns of a warp with that number, the last one where there is none."""
        tile, tiles = self.tile, self.packing.tiles[0]
        found = (self.columns_of * tile.beside + self.beside) * tile.columns + number
        return found if tiles % (tile.columns * tile.beside) == 0 else tirx.min(found, i32(tiles - 1))

    def _fetch(self, k_tile: Any, ahead: Any) -> list[Any]:
        words, columns = self.product.weights.words, self.tile.columns

        def a_tile(c: Any) -> list[Any]:
            at, first = [i64(self.column_tile(c)), i64(k_tile), i64(self.lane)], (ahead * columns + c) * WORDS
            fetched = loop(WORDS, lambda e: self.set(
                self.words, first + e, tirx.BufferLoad(words, [*at, i64(e)])), _VECTORIZED)
            return [fetched, *self._fetch_scales(c, k_tile, (ahead * columns + c) * 2 * self.packing.granules)]

        return [loop(columns, a_tile)]

    def _fetch_scales(self, column: Any, k_tile: Any, first: Any) -> list[Any]:
        """Those of a tile's granules, for both of a lane's columns."""
        packing, fetches = self.packing, []
        at, lane = i64(self.column_tile(column)), i64(self.lane // 4)
        for given, held in zip(self.product.weights.parameters[1:], self.scales, strict=True):
            count = 2 * packing.together
            wide = min(count, _ACCESS_BYTES * 8 // int(tvm.runtime.DataType(str(given.dtype)).bits))
            for s in range(0, packing.granules, packing.together):
                group = i64(self._group(k_tile, s))
                for piece in range(0, count, wide):
                    def one(
                        e: Any, given: Any = given, held: Any = held, to: int = s * 2 + piece, piece: int = piece,
                        group: Any = group,
                    ) -> tirx.Stmt:
                        place = [at, group, lane, i64(piece + e) // 2, i64(piece + e) % 2]
                        return self.set(held, first + to + e, tirx.BufferLoad(given, place))

                    fetches.append(loop(wide, one, _VECTORIZED))
        return fetches

    def _group(self, k_tile: Any, granule: int) -> Any:
        """The group of blocks in which the scale of a tile's granule lies."""
        packing = self.packing
        if packing.blocks == 1:
            return i32(0)
        if packing.block == packing.granule:
            return k_tile
        found = (k_tile * packing.tile_depth + granule * packing.granule) // packing.block
        return tirx.min(found, i32(packing.blocks - 1))  # behind the last row

    def fetch_rows(self, row: Any, k: Any, to: tirx.Buffer, first: Any) -> list[Any]:
        """Fetch a run of activations from ``k`` on; zeros behind the last, since zero times any weight is zero."""
        packing, data = self.packing, self.product.data
        bits = int(tvm.runtime.DataType(self.product.dtype).bits)
        wide = min(packing.run, _ACCESS_BYTES * 8 // bits)
        wide = wide if data.aligned(wide, packing.depth) else 1
        whole = packing.depth == packing.tiles[1] * packing.tile_depth

        def piece(n: Any) -> tirx.Stmt:
            fetched = loop(wide, lambda e: self.set(
                to, first + n * wide + e, data.at(row, k + n * wide + e)), _VECTORIZED)
            nothing = loop(wide, lambda e: self.set(to, first + n * wide + e, 0.0))
            return fetched if whole else tirx.IfThenElse(k + n * wide < packing.depth, fetched, nothing)

        return [loop(packing.run // wide, piece)]

    def first_k(self, k_tile: Any, run: int) -> Any:
        """Where a lane's run of a tile begins."""
        packing = self.packing
        return k_tile * packing.tile_depth + run * 4 * packing.run + self.lane % 4 * packing.run

    # sums

    def _keep(self, row: Any, column: Any, value: Any) -> tirx.Stmt:
        """Write a warp's sum to shared memory."""
        column = self.beside * (COLUMNS * self.tile.columns) + column
        return self.set(self.memory, self.tile.place(self.along, self.rows, row, column), value)

    def _pieces(self, visit: Callable[[Any, Any, Any], list[Any]]) -> tirx.Stmt:
        """Deal the block's results out to its threads, some neighbours to each: ``visit(number, row, column)``."""
        wide = self.tile.block_columns // _PIECE
        count, threads = self.rows * wide, self.tile.threads

        def one(n: Any) -> tirx.Stmt:
            number = n * threads + self.thread
            visited = sequence(visit(number, number // wide, number % wide * _PIECE))
            return visited if count % threads == 0 else when(number < count, visited)

        return loop(ceil_div(count, threads), one)

    def _finish(self) -> list[Any]:
        tile, m = self.tile, self.rows

        def in_block(row: Any, column: Any) -> tirx.Stmt:
            return self._total(tile.together, lambda n, e: self.memory[tile.place(n, m, row, column) + e])

        if tile.parts == 1:
            return [self._pieces(lambda _n, row, column: [in_block(row, column), self._store(row, column)])]
        size = m * tile.block_columns
        (parts,) = self.handed

        def place(part: Any, number: Any, e: Any) -> Any:
            return (part * self.places + self.place) * size + number * _PIECE + e

        written = self._pieces(lambda number, row, column: [in_block(row, column), loop(
            _PIECE, lambda e: self.set(parts, place(self.slice, number, e), self.total[e]), _VECTORIZED)])
        joined = self._pieces(lambda number, row, column: [
            self._total(tile.parts, lambda n, e: parts[place(n, number, e)]), self._store(row, column)])
        return [written, when(last_of(tile.parts, self.places, self.place), joined)]

    def _total(self, count: int, part: Callable[[Any, Any], Any]) -> tirx.Stmt:
        """Add up neighbouring sums of all warps, or of all parts, in their order."""
        return tirx.SeqStmt([
            loop(_PIECE, lambda e: self.set(self.total, e, 0.0)),
            loop(count, lambda n: loop(
                _PIECE, lambda e: self.set(self.total, e, self.total[e] + part(n, e)), _VECTORIZED)),
        ])

    def _store(self, row: Any, column: Any) -> tirx.Stmt:
        first, product = self.columns_of * self.tile.block_columns + column, self.product
        at_row = self.first_row + row
        wide = product.neighbours(_PIECE)
        whole = product.n % self.tile.block_columns == 0

        def piece(n: Any) -> tirx.Stmt:
            stored = loop(wide, lambda e: product.store(
                (i64(0), i64(at_row), i64(first + n * wide + e)), self.total[n * wide + e]), _VECTORIZED)
            return stored if whole else when(first + n * wide < product.n, stored)

        stored = loop(_PIECE // wide, piece)
        return stored if product.m % self.rows == 0 else when(at_row < product.m, stored)

    def row_of(self, number: Any) -> Any:
        """A row of the activations for one of the block's; what it is beyond the last does not matter, since no row of
        the result depends on it."""
        row, most = self.first_row + number, self.product.m
        return row if most % self.covered == 0 else tirx.min(row, i32(most - 1))

    @property
    def covered(self) -> int:
        """Rows that a block computes, whether there are so many or not."""
        return self.rows
