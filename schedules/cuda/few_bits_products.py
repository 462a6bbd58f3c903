"""How few rows are multiplied by weights that are unpacked in registers: on tensor cores, or without.

16-bit floats are multiplied on tensor cores (``mma.sync``), of one row too: a weight then costs half of two
instructions, a mask and a multiply-add of two halves, where multiply-adds would each cost one more for every row.
Weights are the instruction's A, so that 16 columns are its rows, and eight rows of activations its columns. Integers
are multiplied, which 16-bit floats hold exactly, and a block's part of a sum is multiplied by its scale in float32.
Others are multiplied as float32, each weight ``(integer - zero) * scale`` rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import call, i32, loop, over_lanes, when
from schedules.cuda.few_bits_form import FewBits
from schedules.cuda.few_bits_kernel import FewBitsTile, Streamed
from schedules.cuda.packed import COLUMNS, STEP, WORDS
from schedules.cuda.unpacking import pair_of, twice, weight_of
from schedules.intrin import mma

__all__ = ["Fragments", "MultiplyAdds"]

#: rows of activations that an instruction multiplies, and how many times as many are many
_GROUP, _MANY_GROUPS = 8, 4


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
        held = self.depth // 4  # numbers of a lane
        return [step for first in range(0, self.packing.held, held) for step in (
            *self._fetch_activations(k_tile, first, held), self._multiply_some(ahead, first))]

    def _fetch_activations(self, k_tile: Any, first: int, count: int) -> list[Any]:
        """So many that meet a lane's numbers from ``first`` on."""
        run = self.packing.run

        def a_run(group: Any, n: int) -> list[Any]:
            row, k = self.row_of(group * _GROUP + self.lane // 4), self.first_k(k_tile, (first + n) // run)
            return self.fetch_rows(row, k, self.data, group * count + n)

        return [loop(self.groups, partial(a_run, n=n)) for n in range(0, count, run)]

    def _multiply_some(self, ahead: Any, first: int) -> tirx.Stmt:
        return loop(self.tile.columns, lambda c: [*self._unpack(ahead, c, first), *self._products(ahead, c, first)])

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

        def one(h: Any, pair: int) -> tirx.Stmt:
            word, place = divmod(first // 2 + pair, packing.per_word // 2)
            found = self.words[words + h * 2 + word]
            return self.set(self.weights, 2 * pair + h, pair_of(
                found, place, packing.bits, dtype, self.middle[h] if zero else None))

        return [*made, *(loop(2, partial(one, pair=pair)) for pair in range(self.depth // 8))]

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
            made.append(loop(self.rows, partial(self._multiply_row, k=self.first_k(k_tile, run))))
        return made

    def _multiply_row(self, row: Any, k: Any) -> list[Any]:
        return [
            *self.fetch_rows(self.row_of(row), k, self.data, i32(0)),
            loop(self.packing.run, lambda e: loop(self.tile.columns * 2, lambda n: self._add(row, n, e))),
        ]

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
