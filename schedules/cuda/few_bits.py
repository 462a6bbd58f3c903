"""Few rows times weights of 2, 4 or 8 bits, each of which is read once and never written as a float.

A schedule lays the result out in blocks and marks the sum with their tiles; what no primitive does, a word's integers
as fragments of tensor cores, is written in the lowering (:func:`expanded`, :mod:`schedules.cuda.few_bits_kernel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import ceil, prod
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules import intrin
from schedules.cuda import memory_time
from schedules.cuda.common import CudaSpace, bring_inside, ceil_div, cheapest, require
from schedules.cuda.few_bits_form import MARK, FewBits, few_bits_of
from schedules.cuda.few_bits_kernel import FewBitsTile, Streamed
from schedules.cuda.few_bits_products import Fragments, MultiplyAdds
from schedules.cuda.packed import LANES, STEP, WORDS
from schedules.cuda.product import marked, plain
from schedules.intrin import mma
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["FewBitsProduct", "expanded"]

_SEEDS = 4
#: rows of a product at most: of more, weights become floats too often
_MOST_ROWS = 256
#: registers of a thread beside sums, weights and what it fetches
_OVERHEAD_REGISTERS = 40
#: groups of eight rows that are many, and rows whose activations are fetched at once
_MANY, _AT_ONCE = 4, 8
#: rows of a block without tensor cores: of more, the compiler fetches so many activations ahead that it spills
_MOST_ROWS_PLAIN = 8
#: and such rows times tiles that are fetched at once, likewise
_MOST_AHEAD = 16
#: registers of a thread, reckoned, that are surely no more than there are
_MOST_REGISTERS = 192
#: multiply-adds of 16-bit floats that ``mma.sync`` does in a cycle at most, and that one instruction is
_TENSOR_LANES, _INSTRUCTION = 1024, 16 * 8 * STEP
#: instructions that a multiprocessor issues in a cycle, and bytes that its first cache gives
_ISSUED, _CACHE_RATE = 4, 128
#: instructions of a pair of weights, by a mask, a shift of every other and a multiply-add, and of a zero point's
_PAIR, _ZERO = 2.5, 1.0
#: of a weight without tensor cores: a mask, two multiply-adds
_WEIGHT = 3.0
#: how much longer arithmetic takes than it would alone, since a multiprocessor has few warps that wait for activations
_EXPOSED = 1.3
#: seconds until what a block has written can be read by another
_TOLD = 1.2e-6
#: bytes that a warp fetches of a tile
_TILE_BYTES = 4 * WORDS * LANES


class FewBitsProduct(CudaSpace):
    """Products of so few rows with packed weights that a thread's registers hold all sums of its columns. Knobs are
    those of :class:`schedules.cuda.few_bits_kernel.FewBitsTile`."""

    name = "cuda.few_bits"
    free_sizes = False

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        found = few_bits_of(func) if _may_be(func) else None
        return found is not None and found.m <= _MOST_ROWS and super().matches(func, target)

    def recognises(self, func: tirx.PrimFunc) -> bool:
        return few_bits_of(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        rows = tuple(rows for rows in (8, 16, 32, 64) if rows == 8 or rows < 2 * _known(func).m)
        return (
            Knob("rows", rows), Knob("columns", (1, 2, 4)), Knob("beside", (1, 2, 4, 8)),
            Knob("together", (1, 2, 4, 8, 16)), Knob("parts", (1, 2, 3, 4, 6, 8, 16)), Knob("ahead", (1, 2, 4)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        found, gpu, wide = _known(func), gpu_machine(target), _on_tensor_cores(_known(func), target)
        knobs = {knob.name: knob.values for knob in self.knobs(func, target)}
        return cheapest(FewBitsTile, knobs, lambda t: _misfit(t, found, gpu, wide),
                        lambda t: seconds(t, found, gpu, wide), _SEEDS)

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        found, gpu, tile = _known(func), gpu_machine(target), FewBitsTile(**decisions)
        wide = _on_tensor_cores(found, target)
        misfit = _misfit(tile, found, gpu, wide)
        require(misfit is None, str(misfit))
        return seconds(tile, found, gpu, wide, resident)

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint | None:
        found, tile = _known(func), FewBitsTile(**decisions)
        wide = _on_tensor_cores(found, target)
        fetched = tile.warps * tile.columns * min(tile.ahead, _share(tile, found)) * _TILE_BYTES
        return Footprint.of(gpu_machine(target), tile.threads, _registers(tile, found, wide),
                            tile.shared_bytes(found), 1, fetched, tensor_cores=wide)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        found, gpu = _known(sch.mod["main"]), gpu_machine(target)
        tile = FewBitsTile(**{field.name: pick(field.name) for field in fields(FewBitsTile)})
        wide = _on_tensor_cores(found, target)
        misfit = _misfit(tile, found, gpu, wide)
        require(misfit is None, str(misfit))
        _mark(sch, tile, wide)


def _may_be(func: tirx.PrimFunc) -> bool:
    return any(str(param.dtype) == "uint32" for param in func.params)


def _known(func: tirx.PrimFunc) -> FewBits:
    found = few_bits_of(func)
    if found is None:
        raise InvalidDecision("the function must hold one product with packed weights")
    return found


def _on_tensor_cores(found: FewBits, target: tvm.target.Target) -> bool:
    kind = mma.kind_of(found.dtype, "float32")
    return kind is not None and intrin.select(mma.product(kind), target) is not None


def _kernel(wide: bool) -> type[Streamed]:
    return Fragments if wide else MultiplyAdds


def _registers(tile: FewBitsTile, found: FewBits, wide: bool) -> int:
    """Of a thread, about."""
    packing, rows = found.packing, tile.height(found)
    fetched = tile.ahead * tile.columns * (WORDS + tile.scale_words(found))
    if wide:
        # the compiler fetches all activations of a tile, and of many rows those of the next, whatever room is left
        groups, depth = Fragments.groups_of(rows), Fragments.depth_of(found, rows)
        tiles = 2 if groups >= _MANY and tile.ahead > 1 else 1
        used = groups * (tiles * packing.held // 2 + 4) + depth // 4
    else:
        used = packing.run * (2 * tile.columns + min(rows, _AT_ONCE))
    return _kernel(wide).count(found, tile) + fetched + used + _OVERHEAD_REGISTERS


def _misfit(tile: FewBitsTile, found: FewBits, gpu: GpuMachine, wide: bool) -> str | None:
    """Why a tile can't run on a GPU, or None."""
    if tile.threads > gpu.threads_per_block:
        return f"a block must have at most {gpu.threads_per_block} threads, got {tile.threads}"
    along_n, along_k = found.packing.tiles
    if tile.parts * tile.together > 1 and (tile.parts - 1) * tile.steps(found) + tile.together > along_k:
        return f"each warp must have a tile along k, got {tile.parts} parts of {tile.together} warps for {along_k}"
    if tile.columns * tile.beside > max(1, along_n):
        return f"a block must have no more tiles of columns than there are, got {tile.columns * tile.beside}"
    if tile.ahead > _share(tile, found):
        return f"a warp must have as many tiles as it fetches at once, got {tile.ahead}"
    if not wide and tile.rows > _MOST_ROWS_PLAIN:
        return f"a thread must have at most {_MOST_ROWS_PLAIN} rows without tensor cores, got {tile.rows}"
    if not wide and tile.ahead * min(tile.rows, found.m) > _MOST_AHEAD:
        return f"a thread must fetch few tiles at once for several rows without tensor cores, got {tile.ahead}"
    registers, shared = _registers(tile, found, wide), tile.shared_bytes(found)
    if registers > _MOST_REGISTERS:
        return f"a thread must have at most {_MOST_REGISTERS} registers, got {registers}"
    if not gpu.resident(tile.threads, registers, shared):
        return f"a block must fit a multiprocessor, got {registers} registers for each of {tile.threads} threads"
    return None


#: bytes of an access
_ACCESS = 16


def _share(tile: FewBitsTile, found: FewBits) -> int:
    """Tiles along ``k`` of a warp at most."""
    return ceil_div(tile.steps(found), tile.together)


def seconds(tile: FewBitsTile, found: FewBits, gpu: GpuMachine, wide: bool, resident: int = 0) -> float:
    """How long a product takes: until weights have come from memory, or have become floats and been multiplied,
    whichever is longer. Reckoned from data sheets, not measured."""
    registers, shared = _registers(tile, found, wide), tile.shared_bytes(found)
    resident = resident or max(1, gpu.resident(tile.threads, registers, shared))
    places, bands, (along_n, along_k) = tile.places(found), tile.bands(found), found.packing.tiles
    blocks = places * tile.parts
    running = min(blocks, gpu.multiprocessors * resident)
    data = found.m * found.k * (4 if found.dtype == "float32" else 2)
    packed = sum(map(_bytes, found.weights.parameters))
    memory = packed + data + found.m * found.n * found.result_bytes
    joined = 8 * tile.parts * found.m * found.n if tile.parts > 1 else 0
    cached = (places // bands - 1) * data + (bands - 1) * packed + joined
    under_way = running * tile.warps * tile.columns * min(tile.ahead, _share(tile, found)) * _TILE_BYTES
    used = min(blocks, gpu.multiprocessors)
    uneven = ceil(blocks / gpu.multiprocessors) * gpu.multiprocessors / blocks if blocks > used else 1.0
    rounds = ceil_div(tile.steps(found), tile.together * tile.ahead) * tile.together * tile.ahead / tile.steps(found)
    busy = _EXPOSED * uneven * rounds * bands * along_n * along_k / used * _cycles(tile, found, gpu, wide) / gpu.hz
    joining = 60.0 + 12.0 * tile.together * tile.height(found) * tile.block_columns / 4 / tile.threads
    fetched = memory_time.seconds(gpu, blocks=blocks, resident=resident, under_way=under_way, memory=memory,
                                  cached=cached, cycles=joining)
    told = _TOLD + tile.parts * 0.05e-6 if tile.parts > 1 else 0.0
    return float((fetched**4 + busy**4) ** 0.25 + told)


def _bytes(buffer: tirx.Buffer) -> int:
    return prod(int(extent) for extent in buffer.shape) * int(tvm.runtime.DataType(str(buffer.dtype)).bits) // 8


def _cycles(tile: FewBitsTile, found: FewBits, gpu: GpuMachine, wide: bool) -> float:
    """Of a multiprocessor, for a tile of columns and one along ``k``."""
    packing, zero, height = found.packing, found.weights.zero is not None, tile.height(found)
    size = 4 if found.dtype == "float32" else 2
    if not wide:
        weights = 2 * packing.held
        rows = height * (weights + packing.held * size / _ACCESS / tile.columns)
        cached = height * 4 * packing.held * size * 8 / tile.columns / _CACHE_RATE
        return max((weights * (_WEIGHT + zero) + rows) / _ISSUED, weights * (height + 2) * LANES / gpu.lanes,
                   cached / 2)
    groups = Fragments.groups_of(height)
    products = groups * packing.held // 4
    sums = packing.tile_depth // Fragments.depth_of(found, height) * groups * 8
    issued = packing.held * (_PAIR + zero) + products + sums + groups * packing.held * size / _ACCESS / tile.columns
    cached = (groups * 32 * packing.held * size / tile.columns + _TILE_BYTES) / _CACHE_RATE
    return max(issued / _ISSUED, products * _INSTRUCTION / min(_TENSOR_LANES, gpu.tensor_lanes), cached)


def _mark(sch: s_tir.Schedule, tile: FewBitsTile, wide: bool) -> None:
    """Lay the result out in blocks of columns, with all that it is made of inside, and mark the sum.

    Until it is expanded, the function computes what the kernel does, a block's sums one after another.
    """
    root = sch.get_sblock("root")
    main = next(block for block in sch.get_child_blocks(root) if _sums(sch, block))
    sch.annotate(main, MARK, [*(getattr(tile, field.name) for field in fields(FewBitsTile)), int(wide)])
    (out,) = sch.get_output_blocks(root)
    spatial = sum(v.iter_type != tirx.IterVar.CommReduce for v in sch.get(out).iter_vars)
    *rows, columns = sch.get_loops(out)[:spatial]
    outer, inner = sch.split(columns, [None, tile.block_columns])
    sch.reorder(outer, *rows, inner)
    sch.bind(outer, "blockIdx.x")  # the kernel has blocks for some rows each
    _, thread = sch.split(sch.fuse(*rows, inner), [None, tile.threads])
    sch.bind(thread, "threadIdx.x")
    bring_inside(sch, out, outer)


def _sums(sch: s_tir.Schedule, block: Any) -> bool:
    return any(v.iter_type == tirx.IterVar.CommReduce for v in sch.get(block).iter_vars)


def expanded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its product's kernel written out where the schedule has marked one, else as it is."""
    mark = marked(func, MARK)
    unscheduled = plain(func, MARK) if mark is not None else None
    found = few_bits_of(unscheduled) if unscheduled is not None else None
    if mark is None or found is None:
        return func
    *numbers, wide = mark
    tensor = bool(wide) and found.dtype != "float32"
    return _kernel(tensor)(func, found, FewBitsTile(*numbers)).function()
