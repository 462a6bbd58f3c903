"""Few rows times packed weights, as one kernel that reads each weight once and makes floats of it in registers.

A warp takes some tiles of 16 columns (:mod:`schedules.cuda.packed`) and every so many tiles along ``k``; it has fetched
some of these when it computes with the first. Warps of a block share columns, and then sums meet in shared memory, or
lie beside each other, and then the activations that they read are in the first cache. Where too few blocks would run,
a sum is cut over several, the last of which adds the parts up (:mod:`schedules.cuda.joined`). Sums have the same order
in every run.

16-bit floats are multiplied on tensor cores (``mma.sync``), of one row too: a weight then costs half of two
instructions, a mask and a multiply-add of two halves, where multiply-adds would each cost one more for every row.
Weights are the instruction's A, so that 16 columns are its rows, and eight rows of activations its columns. Integers
are multiplied, which 16-bit floats hold exactly, and a block's part of a sum is multiplied by its scale in float32.
Others are multiplied as float32, each weight ``(integer - zero) * scale`` rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import Registers, barrier, call, i32, i64, kernel, loop, over_lanes, sequence, when
from schedules.cuda.few_bits_form import FewBits
from schedules.cuda.joined import last_of
from schedules.cuda.packed import COLUMNS, LANES, STEP, WORDS
from schedules.cuda.unpacking import pair_of, twice, weight_of
from schedules.intrin import mma

__all__ = ["FewBitsTile", "Fragments", "MultiplyAdds", "Streamed"]

_SERIAL, _VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.VECTORIZED
_ACCESS_BYTES = 16
#: floats between rows of sums in shared memory beyond their columns: neither rows nor columns of a fragment meet
_PADDING = 4
#: sums that a thread adds up at a time
_PIECE = 4
#: rows of activations that an instruction multiplies, and how many times as many are many
_GROUP, _MANY_GROUPS = 8, 4


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

    @property
    def stride(self) -> int:
        """Floats between rows in shared memory."""
        return self.block_columns + _PADDING

    def height(self, product: FewBits) -> int:
        """Rows of a block that has most."""
        return min(self.rows, product.m)

    def shared_bytes(self, product: FewBits) -> int:
        return 4 * self.together * self.height(product) * self.stride

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
        at = (self.along * self.rows + row) * self.tile.stride + self.beside * (COLUMNS * self.tile.columns)
        return self.set(self.memory, at + column, value)

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
            return self._total(tile.together, lambda n, e: self.memory[(n * m + row) * tile.stride + column + e])

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


class Fragments(Streamed):
    """The kernel of ``mma.sync``: a lane has the sums of its two columns and of two rows of each eight."""

    def __init__(self, func: tirx.PrimFunc, product: FewBits, tile: FewBitsTile) -> None:
        super().__init__(func, product, tile)
        self.groups, self.depth = self.groups_of(self.rows), self.depth_of(product, self.rows)
        self.weights = self.registers(self.depth // 4, "uint32", "weights")
        self.part = self.registers(self.groups * 4, "float32", "part")
        self.middle = self.registers(2, "uint32", "middle")

    @staticmethod
    def groups_of(rows: int) -> int:
        """Of eight rows."""
        return ceil_div(rows, _GROUP)

    @staticmethod
    def depth_of(product: FewBits, rows: int) -> int:
        """Numbers along ``k`` that are multiplied before their sums are scaled: those of a scale in a tile, or of many
        rows a run's, so that registers hold the activations."""
        packing = product.packing
        return packing.granule if Fragments.groups_of(rows) < _MANY_GROUPS else min(packing.granule, 4 * packing.run)

    @staticmethod
    def count(product: FewBits, tile: FewBitsTile) -> int:
        return tile.columns * Fragments.groups_of(tile.height(product)) * 4

    @staticmethod
    def fetched(product: FewBits, rows: int) -> int:
        return Fragments.groups_of(rows) * Fragments.depth_of(product, rows) // 4

    @property
    def covered(self) -> int:
        return self.groups * _GROUP

    def multiply(self, k_tile: Any, ahead: Any) -> list[Any]:
        packing, depth, made = self.packing, self.depth, list[Any]()
        held, run = depth // 4, packing.run  # of a lane: numbers, and neighbours among them
        for first in range(0, packing.held, held):
            for n in range(0, held, run):
                k = self.first_k(k_tile, (first + n) // run)
                made.append(loop(self.groups, lambda m, n=n, k=k: self.fetch_rows(
                    self.row_of(m * _GROUP + self.lane // 4), k, self.data, m * held + n)))
            made.append(loop(self.tile.columns, lambda c, first=first: [
                *self._unpack(ahead, c, first), *self._products(ahead, c, first)]))
        return made

    def _scale(self, ahead: Any, column: Any, first: int) -> Any:
        """Where the scale of a lane's first column is kept, for its numbers from ``first`` on."""
        granule = first * 4 // self.packing.granule
        return ((ahead * self.tile.columns + column) * self.packing.granules + granule) * 2

    def _unpack(self, ahead: Any, column: Any, first: int) -> list[Any]:
        """Make some of both columns' weights, without their scales."""
        packing, dtype, made = self.packing, self.product.dtype, list[Any]()
        words, zero = (ahead * self.tile.columns + column) * WORDS, len(self.scales) > 1
        if zero:
            made.append(loop(2, lambda h: self.set(
                self.middle, h, twice(self.scales[1][self._scale(ahead, column, first) + h], dtype))))
        for pair in range(self.depth // 8):
            word, place = divmod(first // 2 + pair, packing.per_word // 2)
            made.append(loop(2, lambda h, pair=pair, word=word, place=place: self.set(
                self.weights, 2 * pair + h, pair_of(
                    self.words[words + h * 2 + word], place, packing.bits, dtype, self.middle[h] if zero else None))))
        return made

    def _products(self, ahead: Any, column: Any, first: int) -> list[Any]:
        groups, depth = self.groups, self.depth
        scale = self._scale(ahead, column, first)
        return [
            loop(groups * 4, lambda i: self.set(self.part, i, 0.0)),
            loop(depth // STEP, lambda j: loop(
                groups, lambda m: self._multiply(j * 4, m * (depth // 4) + j * 4, m * 4))),
            loop(groups, lambda m: loop(4, lambda i: self._add(column * groups + m, m, i, scale))),
        ]

    def _add(self, to: Any, group: Any, i: Any, scale: Any) -> tirx.Stmt:
        scaled = self.part[group * 4 + i] * self.scales[0][scale + i // 2].astype("float32")
        return self.set(self.sums, to * 4 + i, self.sums[to * 4 + i] + scaled)

    def _multiply(self, a: Any, b: Any, to: Any) -> tirx.Stmt:
        kind = next(kind for kind in mma.KINDS if kind.operand == self.product.dtype)
        return call("tirx.ptx_legacy.mma", "m16n8k16", "row", "col", kind.ptx, kind.ptx, "fp32", self.weights.data, a,
                    self.data.data, b, self.part.data, to, False, dtype="float32")

    def put(self, to: Callable[[Any, Any, Any], tirx.Stmt]) -> list[Any]:
        groups, rows = self.groups, self.rows

        def one(c: Any, m: Any, i: Any) -> tirx.Stmt:
            row, column = m * _GROUP + self.lane % 4 * 2 + i % 2, c * COLUMNS + self.lane // 4 + i // 2 * 8
            kept = to(row, column, self.sums[(c * groups + m) * 4 + i])
            return kept if rows % _GROUP == 0 else when(row < rows, kept)

        return [loop(self.tile.columns, lambda c: loop(groups, lambda m: loop(4, lambda i: one(c, m, i))))]


class MultiplyAdds(Streamed):
    """The kernel without tensor cores: a lane adds up its runs of two columns, for all rows; four lanes' sums are one
    column's."""

    def __init__(self, func: tirx.PrimFunc, product: FewBits, tile: FewBitsTile) -> None:
        super().__init__(func, product, tile)
        self.weights = self.registers(tile.columns * 2 * self.packing.run, "float32", "weights")

    @staticmethod
    def count(product: FewBits, tile: FewBitsTile) -> int:
        return tile.columns * 2 * tile.height(product)

    @staticmethod
    def fetched(product: FewBits, rows: int) -> int:
        return product.packing.run

    def multiply(self, k_tile: Any, ahead: Any) -> list[Any]:
        packing = self.packing
        made: list[Any] = []
        for run in range(packing.held // packing.run):
            made += self._unpack(ahead, run)
            made.append(loop(self.rows, lambda m, run=run: [
                *self.fetch_rows(self.row_of(m), self.first_k(k_tile, run), self.data, i32(0)),
                loop(packing.run, lambda e: loop(self.tile.columns * 2, lambda n: self._add(m, n, e))),
            ]))
        return made

    def _unpack(self, ahead: Any, run: int) -> list[Any]:
        packing, columns = self.packing, self.tile.columns
        granule = run * 4 * packing.run // packing.granule
        made = []
        for e in range(packing.run):
            word, inside = divmod(run * packing.run + e, packing.per_word)
            bit = inside % 2 * 16 + inside // 2 * packing.bits

            def one(n: Any, word: int = word, bit: int = bit, e: int = e) -> tirx.Stmt:
                of_tile = ahead * columns + n // 2
                scale = (of_tile * packing.granules + granule) * 2 + n % 2
                zero = self.scales[1][scale].astype("float32") if len(self.scales) > 1 else None
                value = weight_of(self.words[of_tile * WORDS + n % 2 * 2 + word], bit, packing.bits, zero)
                return self.set(self.weights, n * packing.run + e, value * self.scales[0][scale].astype("float32"))

            made.append(loop(columns * 2, one))
        return made

    def _add(self, row: Any, number: Any, e: Any) -> tirx.Stmt:
        at = row * (self.tile.columns * 2) + number
        product = self.data[e].astype("float32") * self.weights[number * self.packing.run + e]
        return self.set(self.sums, at, self.sums[at] + product)

    def put(self, to: Callable[[Any, Any, Any], tirx.Stmt]) -> list[Any]:
        count = self.tile.columns * 2
        joined = loop(self.rows * count, lambda n: [
            self.set(self.sums, n, self.sums[n] + over_lanes(self.sums[n], distance)) for distance in (1, 2)])

        def one(m: Any, n: Any) -> tirx.Stmt:
            column = n // 2 * COLUMNS + self.lane // 4 + n % 2 * 8
            return when(self.lane % 4 == m % 4, to(m, column, self.sums[m * count + n]))

        return [joined, loop(self.rows, lambda m: loop(count, lambda n: one(m, n)))]
