"""Attention as one kernel of warpgroups with jobs of their own (``sm_90a``), of 16-bit floats.

One thread of the first warpgroup copies boxes of queries, keys and values, the others take 64 queries each. Keys and
values have a ring of their own, so that either is given back as soon as it has been multiplied. Scores and sums stay in
registers, and weights, which lie there as scores do, are the left operand of the second product. Scores of the next
tile and the sums of this one are under way together, and while the latter are, a warpgroup makes weights of the former;
two warpgroups keep the tensor cores busy while either does, by chance, or because they take turns: one begins with its
products when the other has begun with its own. What boxes have outside of the tensors is zero, and no score lets it
through. After Shah et al., "FlashAttention-3" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from schedules.cuda import hopper
from schedules.cuda.common import ceil_div
from schedules.cuda.emit import barrier, i32, loop, when
from schedules.cuda.flash import FlashTiles, Fragments
from schedules.cuda.heads import Heads
from schedules.cuda.lines import Lines
from schedules.cuda.online import WARP, Tiles

__all__ = ["WarpgroupFlash", "WarpgroupTiles"]

_WARPS = hopper.WARPGROUP // WARP
#: rows and depth of one product
_ROWS, _DEPTH = 64, 16
#: elements of a swizzled row
_WIDE = hopper.SWIZZLE_BYTES // 2
_BYTES = 2
#: that a thread has at most when a block of three warpgroups begins, and from how many on two of these take over what
#: the third, which copies, leaves: together no more than all begin with, or they would wait for ever
_BEGIN, _HANDED_ON, _FEW, _MANY = 168, 160, 24, 240
#: registers of a thread's elements of a mask that are fetched at once, and of their places: with 128 keys and features
#: the compiler for sm_90a spilled without room for them
_MASK = 32
#: warpgroups that take turns, and the number of the first one's barrier; 0 is that of all threads
_PAIR, _TURN = 2, 1
#: the part of what becomes of scores that products do not hide where warpgroups take turns: from Shah et al., whose
#: products were 1.1 times as fast for it; else :attr:`Tiles.exposed`
_IN_TURN = 0.4
_SERIAL = tirx.ForKind.SERIAL


@dataclass(frozen=True)
class WarpgroupTiles(Tiles):
    """``warps`` that multiply, four of a warpgroup; ``turns``: whether two of these take turns."""

    turns: int = 0

    helpers = _WARPS
    issued = FlashTiles.issued
    most_registers = 232
    most_lanes = 1 << 16

    @property
    def numbers(self) -> list[int]:
        return [*super().numbers, *((1, self.turns) if self.turns else ())]

    def exposed(self, steps: int) -> float:
        by_chance = super().exposed(steps)
        return by_chance - (by_chance - _IN_TURN) * self.turns * (1 - 1 / steps)  # nobody waits with the first tile

    def misfit(self, heads: Heads) -> str | None:
        if not self.turns:
            return None
        if self.readers != _PAIR:
            return f"{_PAIR} warpgroups take turns, got {self.readers}"
        # with the first tile nobody waits
        return None if heads.keys > self.keys else f"turns need more than one tile of keys, got {heads.keys} keys"

    @property
    def readers(self) -> int:
        return self.warps // _WARPS

    @staticmethod
    def wide(extent: int) -> int:
        """Features as shared memory holds them."""
        return ceil_div(extent, _WIDE) * _WIDE

    def registers(self, heads: Heads) -> int:
        """Scores and their halves, the result's sums, and some more; with a mask also what of it is on its way."""
        masked = 0 if heads.mask is None else _MASK
        return self.keys // 2 + self.keys // 4 + self.padded(heads.features) // 2 + 48 + masked

    def launched_registers(self, heads: Heads) -> int:
        return min(self.registers(heads), _BEGIN if self.readers > 1 else self.most_registers)

    def hands_on(self, heads: Heads) -> bool:
        """Whether registers go from the warpgroup that copies to those that multiply."""
        return self.readers > 1 and self.registers(heads) >= _HANDED_ON

    def query_bytes(self, heads: Heads) -> int:
        return self.queries * self.wide(heads.depth) * _BYTES

    def key_bytes(self, heads: Heads) -> int:
        """Of a tile of keys."""
        return self.keys * self.wide(heads.depth) * _BYTES

    def value_bytes(self, heads: Heads) -> int:
        return self.keys * self.wide(heads.features) * _BYTES

    def shared_bytes(self, heads: Heads) -> int:
        """Queries and the ring behind the next place where their pattern may begin, and barriers."""
        ring = self.stages * (self.key_bytes(heads) + self.value_bytes(heads) + 32)
        return hopper.PATTERN_BYTES + self.query_bytes(heads) + ring + 8

    def elements(self, heads: Heads) -> int:
        return self.shared_bytes(heads) // _BYTES


class WarpgroupFlash(Fragments):
    """The kernel under construction."""

    tiles: WarpgroupTiles

    def __init__(self, func: tirx.PrimFunc, heads: Heads, tiles: WarpgroupTiles) -> None:
        super().__init__(func, heads, tiles)
        lines = heads.lines
        assert lines is not None
        self.lines = dict(zip("qkv", lines, strict=True))
        self.maps = {side: hopper.tensor_map(f"{side}_map") for side in self.lines}
        self.base_address, self.steps = tirx.Var("base_address", "int32"), tirx.Var("steps", "int32")
        self.at_keys = self.base_address + tiles.query_bytes(heads)
        self.at_values = self.at_keys + tiles.stages * tiles.key_bytes(heads)
        self.asked = self.at_values + tiles.stages * tiles.value_bytes(heads)  # the barrier of the queries
        full = self.asked + 8
        self.full = {"k": full, "v": full + 8 * tiles.stages}
        self.empty = {side: at + 16 * tiles.stages for side, at in self.full.items()}

    def function(self) -> tirx.PrimFunc:
        made = super().function()
        rows = {"q": self.tiles.queries, "k": self.tiles.keys, "v": self.tiles.keys}
        told = [
            step for side, lines in self.lines.items() for step in hopper.encode(
                self.maps[side], tirx.address_of(lines.first), self.heads.dtype, lines.sizes, lines.strides,
                (_WIDE, rows[side], 1))
        ]
        return made.with_body(tirx.SeqStmt([*told, made.body]))

    def _body(self, block: Any, thread: Any) -> list[Any]:
        heads, tiles = self.heads, self.tiles
        count = ceil_div(heads.queries, tiles.queries)
        self.thread, self.lane, self.warp = thread, thread % WARP, thread // WARP - _WARPS
        self.batch = heads.at(block % heads.count)
        place = block // heads.count
        # the last queries see the most keys, so they begin first
        self.first = (place if heads.causal is None else count - 1 - place) * tiles.queries
        self.begun = i32(0)
        copy = when(thread == 0, tirx.SeqStmt(self._bring()))
        multiply = tirx.SeqStmt(self._attend())
        if tiles.hands_on(heads):
            copy = tirx.SeqStmt([hopper.limit_registers(_FEW, more=False), copy])
            multiply = tirx.SeqStmt([hopper.limit_registers(_MANY, more=True), multiply])
        return [
            tirx.Bind(self.base_address, hopper.aligned_base(self.memory)),
            tirx.Bind(self.steps, self._steps()),
            when(thread == 0, tirx.SeqStmt([
                hopper.init_barrier(self.asked, 1),
                loop(tiles.stages, lambda s: [
                    step for side in "kv" for step in (hopper.init_barrier(self.full[side] + 8 * s, 1),
                                                       hopper.init_barrier(self.empty[side] + 8 * s, tiles.warps))
                ]),
                hopper.fence_barriers(),
            ])),
            barrier(),
            tirx.IfThenElse(thread < hopper.WARPGROUP, copy, multiply),
        ]

    # the warpgroup that copies

    def _bring(self) -> list[Any]:
        heads, tiles = self.heads, self.tiles

        def tile(j: Any) -> list[Any]:
            return [step for side, at, size in (("k", self.at_keys, tiles.key_bytes(heads)),
                                                ("v", self.at_values, tiles.value_bytes(heads)))
                    for step in (
                        hopper.wait_barrier(self._stage(self.empty[side], j), 1 - self._phase(j)),
                        hopper.expect(self._stage(self.full[side], j), size),
                        *self._boxes(side, self._stage(at, j, size), j * tiles.keys, tiles.keys,
                                     self._stage(self.full[side], j)),
                    )]

        return [
            hopper.expect(self.asked, tiles.query_bytes(heads)),
            *self._boxes("q", self.base_address, self.first, tiles.queries, self.asked),
            loop(self.steps, tile, _SERIAL),
        ]

    def _stage(self, at: Any, j: Any, size: int = 8) -> Any:
        """Of what each stage has, ``size`` bytes apart, that of tile ``j``."""
        return at + j % self.tiles.stages * size

    def _phase(self, j: Any) -> Any:
        return j // self.tiles.stages % 2

    def _boxes(self, side: str, to: Any, row: Any, rows: int, full: Any) -> list[tirx.Stmt]:
        """Begin to copy rows, 64 columns at a time."""
        lines: Lines = self.lines[side]
        count = ceil_div(lines.columns, _WIDE)
        head = lines.at(self.batch)
        return [hopper.fetch_box(to + n * rows * hopper.SWIZZLE_BYTES, self.maps[side], (i32(n * _WIDE), row, head),
                                 full) for n in range(count)]

    # the warpgroups that multiply

    def _attend(self) -> list[Any]:
        heads = self.heads
        last = self.steps - 1
        tiles = tirx.SeqStmt([
            self._landed("k", i32(0)), hopper.fence_sums(), *self._score(i32(0)), hopper.commit_products(),
            hopper.wait_sums(0, self.scores), self._given_back("k", i32(0)),
            *self._weigh(i32(0)), self.each_score(self.keep),
            *([when(tirx.all(self._group == 1, last > 0), self._give_turn())] if self.tiles.turns else []),
            loop(last, self._tile, _SERIAL, start=1),
            self._landed("v", last), hopper.fence_sums(), *self._add(last), hopper.commit_products(),
            hopper.wait_sums(0, self.sums),
        ])
        return [
            loop(self.rows, lambda r: [self.set(self.peak, r, float("-inf")), self.set(self.total, r, 0.0)]),
            self.each_sum(lambda i, _r, _f: self.set(self.sums, i, 0.0)),
            hopper.wait_barrier(self.asked, i32(0)),
            # where the first queries of all see no key there may be no tile
            tiles if heads.causal is None or heads.causal >= 0 else when(self.steps > 0, tiles),
            *self._join(self.total, lambda a, b: a + b),
            *self._store(),
        ]

    def _tile(self, j: Any) -> list[Any]:
        """Scores of tile ``j`` beside the sums of the one before, whose values were asked for before these keys: to
        wait for them between the products would make the compiler put these one after the other."""
        products = [hopper.fence_sums(), *self._score(j), hopper.commit_products(), *self._add(j - 1),
                    hopper.commit_products()]
        return [
            self._landed("k", j), self._landed("v", j - 1),
            *(self._in_turn(j, products) if self.tiles.turns else products),
            hopper.wait_sums(1, self.scores), self._given_back("k", j),
            *self._weigh(j),
            hopper.settle_first(self.total[0] + self.total[1], self.base_address),
            hopper.wait_sums(0, self.sums), self._given_back("v", j - 1),
            self._rescaled(), self.each_score(self.keep),
        ]

    @property
    def _group(self) -> Any:
        """The number of the warpgroup among those that multiply."""
        return self.warp // _WARPS

    def _in_turn(self, j: Any, products: list[Any]) -> list[Any]:
        """Begin with the products of tile ``j`` when the other warpgroup has begun with its own, and let it then go on:
        so one makes weights while the other's products are under way. Nothing is right or wrong by it. The second group
        has the last turn, which it gives to nobody."""
        given = when(tirx.any(self._group == 0, j < self.steps - 1), self._give_turn())
        return [hopper.take_turn(_TURN + self._group, self._both), *products, given]

    def _give_turn(self) -> tirx.Stmt:
        return hopper.give_turn(_TURN + (_PAIR - 1) - self._group, self._both)

    @property
    def _both(self) -> int:
        """Threads of a pair of warpgroups."""
        return _PAIR * hopper.WARPGROUP

    def _weigh(self, j: Any) -> list[Any]:
        """Scores become weights."""
        return [*self._logits(j * self.tiles.keys), *self._peaks(), self.each_score(lambda i, r, _: self._power(i, r))]

    def _landed(self, side: str, j: Any) -> tirx.Stmt:
        return hopper.wait_barrier(self._stage(self.full[side], j), self._phase(j))

    def _given_back(self, side: str, j: Any) -> tirx.Stmt:
        return when(self.lane == 0, hopper.arrive(self._stage(self.empty[side], j)))

    def _score(self, j: Any) -> list[Any]:
        """Begin to multiply queries and keys of tile ``j``."""
        heads, tiles = self.heads, self.tiles
        queries = self.base_address + self._group * (_ROWS * hopper.SWIZZLE_BYTES)
        keys = self._stage(self.at_keys, j, tiles.key_bytes(heads))

        def along(at: Any, rows: int, depth: int) -> Any:
            return at + depth // _WIDE * rows * hopper.SWIZZLE_BYTES + depth % _WIDE * _BYTES

        return [
            hopper.multiply(self.scores, 0, tiles.keys, heads.dtype, along(queries, tiles.queries, depth),
                            along(keys, tiles.keys, depth), (0, 0), i32(int(depth > 0)))
            for depth in range(0, self.depth, _DEPTH)
        ]

    def _add(self, j: Any) -> list[Any]:
        """Begin to add the products of weights and the values of tile ``j`` to the sums."""
        heads, tiles = self.heads, self.tiles
        values = self._stage(self.at_values, j, tiles.value_bytes(heads))
        return [
            hopper.multiply_registers(self.sums, self.features, self.weights, key // 2,
                                      values + key * hopper.SWIZZLE_BYTES, tiles.keys * hopper.SWIZZLE_BYTES, i32(1))
            for key in range(0, tiles.keys, _DEPTH)
        ]
