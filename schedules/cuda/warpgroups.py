"""A matrix product as one kernel of warpgroups with jobs of their own (``sm_90a``).

One thread of the first warpgroup copies boxes of A and B into a ring of stages, the others multiply: each takes 64 or
128 rows of the block's tile, all of its columns, and keeps its sums in registers. A stage has two barriers: it is full
when its boxes have landed, and empty when each warp that multiplies has done with it. A group of products is under way
while the next is issued, so a stage is given back one step late. Results of 16 bits are made in registers, written to
boxes of 16 rows and 64 columns (``stmatrix``) and copied from there, the next box made meanwhile. Where they can't be,
sums go through shared memory, 16 rows and 32 columns of a warp at a time, to stores of 16 bytes with the epilogue
folded in. A block that takes several tiles has the boxes of the next on their way while it stores. Two blocks may be a
cluster: each copies a half of B's tile for both, and gives a stage back to both. The structure is that of CUTLASS's
warp-specialised kernels (``KernelTmaWarpSpecializedCooperative``), and of Shah et al., "FlashAttention-3" (2024), for
the registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from schedules.cuda import hopper
from schedules.cuda.common import ceil_div
from schedules.cuda.emit import Registers, barrier, count_of, i32, i64, kernel, loop, store_piece, when
from schedules.cuda.image import Image
from schedules.cuda.product import Operand, Product

__all__ = ["FEW_REGISTERS", "MANY_REGISTERS", "ROWS", "GroupTile", "Warpgroups"]

#: rows and depth of one product
ROWS, _DEPTH = 64, 16
#: elements of a swizzled row
_WIDE = hopper.SWIZZLE_BYTES // 2
#: of a warp's part of the tile at a time: rows, columns, and floats between its rows in shared memory, 8 more than the
#: banks so that no two rows of a store meet, and 4 more before the lower half, so that no two of a load do
_SLICE_ROWS, _SLICE, _SLICE_STEP, _SLICE_GAP = 16, 32, 40, 4
_SLICE_FLOATS = _SLICE_ROWS * _SLICE_STEP + _SLICE_GAP
#: bytes of a box of 16 rows of results, and how many a warp has
_BOX_BYTES, _BOXES = _SLICE_ROWS * hopper.SWIZZLE_BYTES, 2
#: bytes that a thread stores at once at most
_PIECE = 16
_LANES, _WARPS = 32, hopper.WARPGROUP // 32
#: that a thread has at most when a block of three warpgroups begins, from how many sums on two of these take over what
#: the third, which copies, leaves, and how many a thread of either has then: together no more than all begin with, or
#: they would wait for ever, and no fewer, since an epilogue like GELU's takes some 60 beside the sums
_BEGIN, _HANDED_ON, FEW_REGISTERS, MANY_REGISTERS = 168, 96, 40, 232
_SERIAL, _VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.VECTORIZED


@dataclass(frozen=True)
class GroupTile:
    """The tile of a block in elements, the warpgroups that multiply, the stages of the ring, the clusters along ``m``
    that are numbered before the next along ``n``, whether results are stored in boxes, and the blocks of a cluster,
    neighbours along ``m`` that have a tile of B in common."""

    block_m: int
    block_n: int
    block_k: int
    consumers: int
    stages: int
    panel: int
    boxed: int
    cluster: int

    @property
    def threads(self) -> int:
        return (1 + self.consumers) * hopper.WARPGROUP

    @property
    def parts(self) -> int:
        """Products of 64 rows of a warpgroup."""
        return self.block_m // (self.consumers * ROWS)

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.parts * self.block_n // 2

    @property
    def registers(self) -> int:
        """Of a thread when the kernel begins, about: the sums and what addresses and the epilogue take, as far as a
        block of three warpgroups may have them."""
        return min(self.sums + 64, _BEGIN if self.consumers == 2 else 255)

    @property
    def hands_on(self) -> bool:
        """Whether registers go from the warpgroup that copies to those that multiply."""
        return self.consumers == 2 and self.sums >= _HANDED_ON

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * self.block_k * 2

    @property
    def store_bytes(self) -> int:
        """Of all warps' boxes of results or slices of sums: the ring's pattern may begin behind them."""
        warps = self.consumers * _WARPS
        if self.boxed:
            return warps * _BOXES * _BOX_BYTES
        return ceil_div(warps * _SLICE_FLOATS * 4, hopper.PATTERN_BYTES) * hopper.PATTERN_BYTES

    @property
    def shared_bytes(self) -> int:
        """Boxes or slices and the ring behind the next place where its pattern may begin, and barriers."""
        return self.store_bytes + hopper.PATTERN_BYTES + self.stages * (self.stage_bytes + 16)

    def tiles(self, product: Product) -> Any:
        along_m = count_of(self.rows(product), self.block_m * self.cluster) * self.cluster
        return product.batch * along_m * ceil_div(product.n, self.block_n)

    def rows(self, product: Product) -> Any:
        """Of the product, as they are dealt out to tiles: of an image, whole tiles of as many pixels as a box has or
        more."""
        if isinstance(product.a, Operand):
            return product.m
        return product.a.boxes(self.block_m, boxed=bool(self.boxed)).count * self.block_m


class Warpgroups:
    """The kernel under construction: ``grid`` blocks share the tiles out among themselves, with 0 one each."""

    def __init__(self, func: tirx.PrimFunc, product: Product, tile: GroupTile, grid: int) -> None:
        self.func, self.product, self.tile = func, product, tile
        self.grid = grid or tile.tiles(product)
        self.registers = Registers()
        self.memory = self.registers.shared(tile.shared_bytes // 4, "float32")
        self.sums = self.registers(tile.sums, "float32", "sums")
        self.stage, self.phase, self.turn = (self.registers(1, "int32", name) for name in ("stage", "phase", "turn"))
        self.maps = {side: hopper.tensor_map(f"{side}_map") for side in "abc"}
        self.results = product.results if tile.boxed else None
        per_piece = _PIECE // product.result_bytes
        self.held = self.registers(min(8, per_piece), str(product.result.buffer.dtype), "held")
        self.ring = tirx.Var("ring", "int32")
        self.full = self.ring + tile.stages * tile.stage_bytes
        self.empty = self.full + 8 * tile.stages
        self.steps = ceil_div(product.depth, tile.block_k)
        self.rows = tile.rows(product)

    def function(self) -> tirx.PrimFunc:
        made = kernel(self.func, self.grid, self.tile.threads, self.registers.buffers, self._body)
        told = [step for side, operand, rows in self._sides() for step in self._encode(side, operand, rows)]
        if self.results is not None:
            told += self._encode_results(self.results)
        return made.with_body(tirx.SeqStmt([*told, made.body]))

    def _sides(self) -> tuple[tuple[str, Operand | Image, int], tuple[str, Operand, int]]:
        return ("a", self.product.a, self.tile.block_m), ("b", self.product.b, self.tile.block_n)

    def _encode(self, side: str, operand: Any, rows: int) -> list[tirx.Stmt]:
        return hopper.encode(self.maps[side], tirx.address_of(operand.first), self.product.dtype, operand.sizes,
                             operand.strides, self._box(operand, rows))

    def _encode_results(self, results: Operand) -> list[tirx.Stmt]:
        box = (_WIDE, _SLICE_ROWS, 1)[: len(results.sizes)]
        return hopper.encode(self.maps["c"], tirx.address_of(results.first), str(results.buffer.dtype), results.sizes,
                             results.strides, box)

    def _box(self, operand: Operand, rows: int) -> tuple[int, ...]:
        """Of a tile of so many rows the piece that is copied at a time, innermost first."""
        box = (_WIDE, (self.tile.block_k if operand.across else rows) // self._shares(operand))
        return (*box, 1) if operand.batch > 1 else box

    def _shares(self, operand: Operand | Image) -> int:
        """How many blocks copy a part each of an operand's tile, for all of them."""
        return self.tile.cluster if operand is self.product.b else 1

    def _body(self, block: Any, thread: Any) -> list[Any]:
        tile = self.tile
        self.block, self.thread = block, thread
        copy = when(thread == 0, self._each_tile(self._copy_tile))
        multiply = self._each_tile(self._multiply_tile)
        if tile.boxed:
            multiply = tirx.SeqStmt([multiply, when(thread % _LANES == 0, hopper.wait_stores(0))])
        clustered = tile.cluster > 1
        if tile.hands_on:
            copy = tirx.SeqStmt([hopper.limit_registers(FEW_REGISTERS, more=False), copy])
            multiply = tirx.SeqStmt([hopper.limit_registers(MANY_REGISTERS, more=True), multiply])
        return [
            tirx.Bind(self.ring, hopper.aligned_base(self.memory) + tile.store_bytes),
            when(thread == 0, tirx.SeqStmt([
                loop(tile.stages, lambda s: [
                    hopper.init_barrier(self.full + 8 * s, 1),
                    hopper.init_barrier(self.empty + 8 * s, tile.cluster * tile.consumers * _WARPS),
                ]),
                hopper.fence_barriers(),
            ])),
            hopper.meet_cluster(tile.cluster) if clustered else barrier(),
            self._set(self.stage, 0), self._set(self.phase, 0), self._set(self.turn, 0),
            tirx.IfThenElse(thread < hopper.WARPGROUP, copy, multiply),
            # what one block copies and counts is in the other's memory
            *([hopper.meet_cluster(tile.cluster)] if clustered else []),
        ]

    @staticmethod
    def _set(register: tirx.Buffer, value: Any) -> tirx.Stmt:
        return tirx.BufferStore(register, i32(value) if isinstance(value, int) else value, [i32(0)])

    def _each_tile(self, visit: Callable[[Any, Any, Any], tirx.Stmt]) -> tirx.Stmt:
        tiles = self.tile.tiles(self.product)
        if not isinstance(tiles, int) or self.grid == tiles:
            return visit(*self._place(self.block))
        rounds = (i32(tiles - 1) - self.block) // self.grid + 1
        return loop(rounds, lambda n: visit(*self._place(self.block + n * self.grid)), _SERIAL)

    def _place(self, number: Any) -> tuple[Any, Any, Any]:
        """The batch and the first row and column of a tile: panels of :attr:`GroupTile.panel` clusters along ``m``, the
        last one narrower."""
        tile, product = self.tile, self.product
        rows = tile.cluster * tile.block_m
        along_m, along_n = count_of(self.rows, rows), ceil_div(product.n, tile.block_n)
        rank, number = (number % tile.cluster, number // tile.cluster) if tile.cluster > 1 else (i32(0), number)
        batch, within = number // (along_m * along_n), number % (along_m * along_n)
        known = isinstance(along_m, int)
        panel = min(tile.panel, along_m) if known else tile.panel
        first, inside = within // (panel * along_n) * panel, within % (panel * along_n)
        wide = i32(panel) if known and along_m % panel == 0 else tirx.min(i32(along_m) - first, i32(panel))
        return batch, (first + inside % wide) * rows + rank * tile.block_m, inside // wide * tile.block_n

    def _advance(self) -> list[tirx.Stmt]:
        """To the next stage, and behind the last to the first one's next phase."""
        following, stage, phase = self.stage[0] + 1, self.stage[0], self.phase[0]
        return [
            self._set(self.phase, tirx.Select(following == self.tile.stages, 1 - phase, phase)),
            self._set(self.stage, tirx.Select(following == self.tile.stages, i32(0), stage + 1)),
        ]

    # the warpgroup that copies

    def _copy_tile(self, batch: Any, row: Any, column: Any) -> tirx.Stmt:
        def step(k: Any) -> list[Any]:
            full = self.full + 8 * self.stage[0]
            copies, at = [], self.ring + self.stage[0] * self.tile.stage_bytes
            for (side, operand, rows), first in zip(self._sides(), (row, column), strict=True):
                copies += self._copy(side, operand, rows, at, (batch, first, k * self.tile.block_k), full)
                at = at + rows * self.tile.block_k * 2
            return [
                hopper.wait_barrier(self.empty + 8 * self.stage[0], 1 - self.phase[0]),
                hopper.expect(full, self._landing), *copies, *self._advance(),
            ]

        return loop(self.steps, step, _SERIAL)

    @property
    def _landing(self) -> int:
        """Bytes that a stage's boxes have."""
        return self.tile.stage_bytes

    def _copy(self, side: str, operand: Any, rows: int, to: Any, at: Any, full: Any) -> list[tirx.Stmt]:
        """Begin to copy an operand's tile, box after box."""
        batch, row, depth = at
        count = (rows if operand.across else self.tile.block_k) // _WIDE
        size = rows * self.tile.block_k * 2 // count
        shares = self._shares(operand)
        if shares > 1:  # this block's part of each box, for all
            part, lines = self.block % shares, (self.tile.block_k if operand.across else rows) // shares
            to, row, depth = to + part * (size // shares), *(
                (row, depth + part * lines) if operand.across else (row + part * lines, depth))
        copies = []
        for n in range(count):
            places = (row + n * _WIDE, depth) if operand.across else (depth + n * _WIDE, row)
            copies.append(hopper.fetch_box(to + n * size, self.maps[side],
                                           (*places, batch) if operand.batch > 1 else places, full, shares))
        return copies

    # the warpgroups that multiply

    def _multiply_tile(self, batch: Any, row: Any, column: Any) -> tirx.Stmt:
        lane, warp = self.thread % _LANES, self.thread // _LANES - _WARPS
        previous = tirx.Select(self.stage[0] == 0, i32(self.tile.stages - 1), self.stage[0] - 1)
        cluster = self.tile.cluster
        given_back = when(lane < cluster, hopper.arrive_at(self.empty + 8 * previous, lane)) if cluster > 1 else when(
            lane == 0, hopper.arrive(self.empty + 8 * previous))

        def step(k: Any) -> list[Any]:
            return [
                hopper.wait_barrier(self.full + 8 * self.stage[0], self.phase[0]),
                hopper.fence_sums(), *self._products(warp // _WARPS, k), hopper.commit_products(),
                hopper.wait_products(1), when(k > 0, given_back), *self._advance(),
            ]

        return tirx.SeqStmt([
            loop(self.steps, step, _SERIAL), hopper.wait_products(0), given_back,
            *(self._store(part, batch, row, column, warp, lane) for part in range(self.tile.parts)),
        ])

    def _products(self, group: Any, k: Any) -> list[tirx.Stmt]:
        tile, product = self.tile, self.product
        at_a = self.ring + self.stage[0] * tile.stage_bytes
        at_b = at_a + tile.block_m * tile.block_k * 2
        # between 64 rows of an operand that runs across k, and of one along it
        leading, rows = tile.block_k * hopper.SWIZZLE_BYTES, ROWS * hopper.SWIZZLE_BYTES
        made = []
        for depth in range(0, tile.block_k, _DEPTH):
            for part in range(tile.parts):
                number = group * tile.parts + part  # of 64 rows
                a = at_a + number * (leading if product.a.across else rows)
                made.append(hopper.multiply(
                    self.sums, part * (tile.block_n // 2), tile.block_n, product.dtype,
                    a + self._along_k(product.a, tile.block_m, depth),
                    at_b + self._along_k(product.b, tile.block_n, depth),
                    (leading if product.a.across else 0, leading if product.b.across else 0),
                    i32(1) if depth else tirx.Cast("int32", k > 0),
                ))
        return made

    @staticmethod
    def _along_k(operand: Operand | Image, rows: int, depth: int) -> int:
        """Bytes from a tile's begin to its element ``depth`` along ``k``."""
        if operand.across:
            return depth * hopper.SWIZZLE_BYTES
        return depth // _WIDE * rows * hopper.SWIZZLE_BYTES + depth % _WIDE * 2

    def _row(self, row: Any) -> tuple[Any, Any]:
        """The row of the result that a row of the tiles is, and whether there is one."""
        return row, row < self.product.m

    def _nearest(self, row: Any) -> Any:
        """The same, or some other where there is none."""
        most = self.product.m
        return row if isinstance(most, int) and most % self.tile.block_m == 0 else tirx.min(row, i32(most - 1))

    def _result_box(self, batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        """Where the box of results lies that begins with these."""
        return (column, row, batch) if self.product.batch > 1 else (column, row)

    def _store(self, part: int, batch: Any, row: Any, column: Any, warp: Any, lane: Any) -> tirx.Stmt:
        group = warp // _WARPS
        first = row + (group * self.tile.parts + part) * ROWS + warp % _WARPS * _SLICE_ROWS
        store = self._store_slices if self.results is None else self._store_boxes
        return store(part, batch, first, column, warp, lane)

    def _store_boxes(self, part: int, batch: Any, row: Any, column: Any, warp: Any, lane: Any) -> tirx.Stmt:
        """Copy a part's results box after box, each from the place that the last but one was copied from."""
        tile, product = self.tile, self.product
        kept = self.ring - tile.store_bytes + warp * (_BOXES * _BOX_BYTES) + self.turn[0] * _BOX_BYTES
        # beyond the last row or column nothing is stored, but what the sums are added to must be there
        most_n = None if product.n % tile.block_n == 0 else product.n

        def made(j: int, pair: Any, i: Any, r: Any) -> tirx.Stmt:
            """Two neighbours of a row of the matrix ``i``, ``r``: 8 columns on, 8 rows on."""
            at_m, at_n = self._nearest(row + lane // 4 + 8 * r), column + j * _WIDE + pair * 16 + i * 8 + lane % 4 * 2
            at_n = at_n if most_n is None else tirx.min(at_n, i32(most_n - 2))
            held = i32(part * (tile.block_n // 2) + j * (_WIDE // 2)) + pair * 8 + i * 4 + r * 2
            return loop(2, lambda e: tirx.BufferStore(
                self.held, product.made_of((i64(batch), i64(at_m), i64(at_n + e)), self.sums[held + e]),
                [i * 4 + r * 2 + e]), _VECTORIZED)

        def a_pair(j: int, pair: Any) -> list[tirx.Stmt]:
            piece = tirx.bitwise_xor(pair * 2 + lane // 16, lane % 8)
            to = kept + (lane % 8 + lane // 8 % 2 * 8) * hopper.SWIZZLE_BYTES + piece * _PIECE
            return [loop(2, lambda i: loop(2, lambda r: made(j, pair, i, r))), hopper.store_matrices(to, self.held)]

        def a_box(j: int) -> list[tirx.Stmt]:
            copy = hopper.store_box(self.maps["c"], self._result_box(batch, row, column + j * _WIDE), kept)
            return [
                # the other lanes wait for the first one by writing matrices, which a warp does together
                when(lane == 0, hopper.wait_stores(_BOXES - 1)),
                loop(_WIDE // 16, lambda pair: a_pair(j, pair)),
                hopper.fence_copies(), hopper.meet_warp(),
                when(lane == 0, tirx.SeqStmt([copy, hopper.commit_stores()])), self._set(self.turn, 1 - self.turn[0]),
            ]

        return tirx.SeqStmt([step for j in range(tile.block_n // _WIDE) for step in a_box(j)])

    def _store_slices(self, part: int, batch: Any, row: Any, column: Any, warp: Any, lane: Any) -> tirx.Stmt:
        """Store a part's sums, slice after slice: a warp's lanes hold 2 neighbours of 8 rows, and store 16 bytes of 4
        rows, or of 8."""
        tile, product = self.tile, self.product
        kept = warp * _SLICE_FLOATS
        most = min(8, max(4, _PIECE // product.result_bytes))
        width = product.neighbours(most)
        wide = width if width == 8 else 4
        meet = hopper.meet_warp()

        def put(j: Any, i: Any, r: Any) -> tirx.Stmt:
            to = kept + (lane // 4 + 8 * r) * _SLICE_STEP + r * _SLICE_GAP + i * 8 + lane % 4 * 2
            held = i32(part * (tile.block_n // 2)) + j * (_SLICE // 2) + i * 4 + r * 2
            return loop(2, lambda e: tirx.BufferStore(self.memory, self.sums[held + e], [to + e]), _VECTORIZED)

        def take(j: Any, g: Any) -> tirx.Stmt:
            if wide == 8:  # the lanes that are served together take half of a row, and of the row that is 8 further
                line, half = g * 4 + lane // 8, lane // 4 % 2
                line, gap = line + half * 8, half * _SLICE_GAP
            else:
                line = g * (_LANES * wide // _SLICE) + lane // (_SLICE // wide)
                gap = line // 8 * _SLICE_GAP
            beside = lane % (_SLICE // wide) * wide
            at_n, source = column + j * _SLICE + beside, kept + line * _SLICE_STEP + gap + beside
            at_m, there = self._row(row + line)

            def place(e: Any) -> tuple[Any, Any, Any]:
                return i64(batch), i64(at_m), i64(at_n + e)

            def one(e: Any) -> tirx.Stmt:
                return product.store(place(e), self.memory[source + e])

            def hold(e: Any) -> tirx.Stmt:
                return tirx.BufferStore(self.held, product.made_of(place(e), self.memory[source + e]), [e])

            if width == 8:
                halves = loop(2, lambda h: loop(4, lambda e: hold(h * 4 + e), _VECTORIZED))
                whole = store_piece(product.place(place(0)), self.held)
                return when(tirx.all(there, at_n < product.n), tirx.SeqStmt([halves, whole]))
            if width == 4:
                return when(tirx.all(there, at_n < product.n), loop(width, one, _VECTORIZED))
            return when(there, loop(wide, lambda e: when(at_n + e < product.n, one(e))))

        def a_slice(j: Any) -> list[tirx.Stmt]:
            return [
                loop(_SLICE // 8, lambda i: loop(2, lambda r: put(j, i, r))), meet,
                loop(_SLICE_ROWS * _SLICE // (_LANES * wide), lambda g: take(j, g)),
            ]

        # the last slice's readers and the next tile's writers are apart by the products between them
        count = tile.block_n // _SLICE
        body = [step for j in range(count) for step in (*([meet] if j or part else []), *a_slice(i32(j)))]
        return tirx.SeqStmt(body)
