"""Packed weights made floats in memory, for products of so many rows that tensor cores are better fed from there.

Each warp takes tiles as they lie (:mod:`schedules.cuda.packed`): one access of 16 bytes a lane, whose runs of
neighbours along ``k`` four lanes store side by side. What no primitive does is written in the lowering
(:func:`expanded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.cuda import memory_time
from schedules.cuda.common import CudaSpace, bind_flat, ceil_div, require
from schedules.cuda.emit import Registers, i64, kernel, loop, sequence, when
from schedules.cuda.few_bits_form import WEIGHTS_MARK, Packed, weights_of
from schedules.cuda.packed import COLUMNS, LANES, WORDS
from schedules.cuda.product import marked, plain
from schedules.cuda.unpacking import weight_of
from schedules.machine import gpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick

__all__ = ["FewBitsWeights", "expanded"]

_VECTORIZED = tirx.ForKind.VECTORIZED
_ACCESS_BYTES = 16
#: registers of a thread beside the words that it has fetched
_OTHER_REGISTERS = 40


class FewBitsWeights(CudaSpace):
    """Packed weights alone. Knobs: ``warps`` of a block, and ``tiles`` along ``k`` that each fetches at once."""

    name = "cuda.few_bits_weights"
    free_sizes = False

    def recognises(self, func: tirx.PrimFunc) -> bool:
        return weights_of(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return Knob("warps", (4, 8)), Knob("tiles", (1, 2, 4))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        choices = [{"warps": warps, "tiles": tiles} for warps, tiles in product((4, 8), (1, 2, 4))]
        yield from sorted(choices, key=lambda choice: self.price(func, target, choice) or 0.0)[:4]

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        found, gpu = _known(func), gpu_machine(target)
        threads = decisions["warps"] * LANES
        resident = resident or max(1, gpu.resident(threads, _OTHER_REGISTERS + decisions["tiles"] * (WORDS + 4), 0))
        tiles, traffic = prod(found.packing.tiles), memory_time.traffic_of(func)
        blocks = ceil_div(tiles, decisions["warps"] * decisions["tiles"])
        running = min(blocks, gpu.multiprocessors * resident)
        return memory_time.seconds(
            gpu, blocks=blocks, resident=resident, under_way=running * threads * decisions["tiles"] * _ACCESS_BYTES,
            memory=traffic.read, cached=0.0) + traffic.written / gpu.memory_rate

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        _known(sch.mod["main"])
        warps, tiles = pick("warps"), pick("tiles")
        require(warps * LANES <= gpu_machine(target).threads_per_block, "a block must fit a multiprocessor")
        (block,) = sch.get_child_blocks(sch.get_sblock("root"))
        sch.annotate(block, WEIGHTS_MARK, [warps, tiles])
        bind_flat(sch, sch.get_loops(block), warps * LANES)


def _known(func: tirx.PrimFunc) -> Packed:
    found = weights_of(func)
    if found is None:
        raise InvalidDecision("the function must unpack weights and do nothing else")
    return found


def expanded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its kernel written out where a schedule has marked one, else as it is."""
    mark = marked(func, WEIGHTS_MARK)
    unscheduled = plain(func, WEIGHTS_MARK) if mark is not None else None
    found = weights_of(unscheduled) if unscheduled is not None else None
    return func if mark is None or found is None else _Unpacking(func, found, *mark).function()


class _Unpacking:
    """The kernel under construction."""

    def __init__(self, func: tirx.PrimFunc, weights: Packed, warps: int, tiles: int) -> None:
        self.func, self.weights, self.warps, self.tiles = func, weights, warps, tiles
        self.packing, self.out = weights.packing, func.params[-1]
        registers = self.registers = Registers()
        self.words = registers(tiles * WORDS, "uint32", "words")
        self.held = registers(self.packing.run, str(self.out.dtype), "held")

    def function(self) -> tirx.PrimFunc:
        count = prod(self.packing.tiles)
        return kernel(self.func, ceil_div(count, self.warps * self.tiles), self.warps * LANES, self.registers.buffers,
                      self._body)

    def _body(self, block: Any, thread: Any) -> list[Any]:
        self.lane = thread % LANES
        first = (block * self.warps + thread // LANES) * self.tiles
        return [loop(self.tiles, lambda t: self._where(first + t, self._fetch(first + t, t))),
                loop(self.tiles, lambda t: self._where(first + t, sequence(self._store(first + t, t))))]

    def _where(self, number: Any, body: tirx.Stmt) -> tirx.Stmt:
        count = prod(self.packing.tiles)
        return body if count % (self.warps * self.tiles) == 0 else when(number < count, body)

    def _place(self, number: Any) -> tuple[Any, Any]:
        along_k = self.packing.tiles[1]
        return number // along_k, number % along_k

    def _fetch(self, number: Any, t: Any) -> tirx.Stmt:
        at = [*map(i64, self._place(number)), i64(self.lane)]
        return loop(WORDS, lambda e: tirx.BufferStore(
            self.words, tirx.BufferLoad(self.weights.words, [*at, i64(e)]), [t * WORDS + e]), _VECTORIZED)

    def _store(self, number: Any, t: Any) -> list[Any]:
        """Of both columns of a lane, run after run."""
        packing, (column_tile, k_tile) = self.packing, self._place(number)

        def a_run(h: Any, run: int) -> list[Any]:
            column = column_tile * COLUMNS + h * 8 + self.lane // 4
            k = k_tile * packing.tile_depth + run * 4 * packing.run + self.lane % 4 * packing.run
            made = [self._hold(t, h, run, e, column, k) for e in range(packing.run)]
            return [when(tirx.all(column < packing.columns, k < packing.depth), tirx.SeqStmt([
                *made, self._stored(column, k)]))]

        return [loop(2, partial(a_run, run=run)) for run in range(packing.held // packing.run)]

    def _hold(self, t: Any, h: Any, run: int, e: int, column: Any, k: Any) -> tirx.Stmt:
        packing = self.packing
        word, inside = divmod(run * packing.run + e, packing.per_word)
        block = tirx.min(k // packing.block, packing.blocks - 1) if packing.blocks > 1 else k * 0
        place = [i64(index) for index in packing.scale_place(column, block)]
        scale, *zero = (tirx.BufferLoad(each, place).astype("float32") for each in self.weights.parameters[1:])
        value = weight_of(self.words[t * WORDS + h * 2 + word], inside % 2 * 16 + inside // 2 * packing.bits,
                          packing.bits, zero[0] if zero else None)
        return tirx.BufferStore(self.held, (value * scale).astype(str(self.out.dtype)), [e])

    def _stored(self, column: Any, k: Any) -> tirx.Stmt:
        packing = self.packing
        bits = int(tvm.runtime.DataType(str(self.out.dtype)).bits)
        wide = min(packing.run, _ACCESS_BYTES * 8 // bits)
        wide = wide if packing.depth % wide == 0 else 1

        def piece(n: Any) -> tirx.Stmt:
            stored = loop(wide, lambda e: tirx.BufferStore(
                self.out, self.held[n * wide + e], [i64(column), i64(k + n * wide + e)]), _VECTORIZED)
            return stored if packing.depth % packing.run == 0 else when(k + n * wide < packing.depth, stored)

        return loop(packing.run // wide, piece)
