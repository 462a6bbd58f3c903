"""Attention as one kernel whose scores never reach memory: on tensor cores, or in exact float32 without them.

A schedule says which queries a block of threads takes and marks the scores with the tiles; what no primitive does, the
maximum and the total kept up to date from tile to tile of keys, is written in the lowering (:func:`expanded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import tvm
from tvm import s_tir, tirx

from schedules import intrin
from schedules.analysis import remembered, walk
from schedules.cuda import hopper
from schedules.cuda.common import CudaSpace, bring_inside, ceil_div, require
from schedules.cuda.flash import Flash, FlashTiles
from schedules.cuda.flash_simt import SimtFlash, SimtTiles
from schedules.cuda.flash_tf32 import TensorFloatFlash, TensorFloatTiles
from schedules.cuda.flash_wgmma import WarpgroupFlash, WarpgroupTiles
from schedules.cuda.heads import GROUPS_MARK, MARK, Heads, boxed, grouped, heads_of
from schedules.cuda.online import Online, Tiles
from schedules.free import free_function
from schedules.intrin import mma
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["MOST_FEATURES", "Attention", "ExactAttention", "TensorFloatAttention", "WarpgroupAttention", "available",
           "expanded"]

#: features of a head: what a thread's registers hold the sums of
MOST_FEATURES = 128
_SEEDS = 4
#: cycles until a copy from the second cache lands, and one from memory
_LATENCY, _FAR = 600, 1000
#: queries that fill a warpgroup, and features that are worth a swizzled row
_LEAST_QUERIES, _LEAST_FEATURES = 64, 33
#: splits of keys at most, blocks that they may give each multiprocessor, and keys of one at least
_MOST_SPLITS, _BLOCKS, _LEAST_KEYS = 128, 4, 32
#: cycles of a tile's barrier and of joining what lanes know of a query, in which other blocks get on
_STEP = 40


def available(target: tvm.target.Target) -> bool:
    """Whether a ``cuda`` target has what these kernels are made of: asynchronous copies came with the products of
    tensor cores that are used here."""
    return intrin.select(mma.product(mma.KINDS[0]), target) is not None


class Attention(CudaSpace):
    """Attention of 16-bit floats on tensor cores. Knobs: ``warps`` of a block, ``keys`` of a tile, ``stages`` of tiles
    that are kept or under way; and where queries are too few for the GPU, ``splits`` of their keys."""

    name = "cuda.attention"
    written_out = True
    opcodes: tuple[str, ...] = ("HMMA",)
    tiles: type[Tiles] = FlashTiles
    kernel: type[Online] = Flash
    mark = MARK
    choices: tuple[Knob, ...] = (
        Knob("warps", (1, 2, 4, 8)), Knob("keys", (16, 32, 64, 128)), Knob("stages", (2, 3, 4)))

    def recognises(self, func: tirx.PrimFunc) -> bool:
        heads = heads_of(func)
        return heads is not None and max(heads.depth, heads.features) <= MOST_FEATURES and self.accepts(heads)

    def accepts(self, heads: Heads) -> bool:
        """Whether heads of this type are this space's."""
        return mma.kind_of(heads.dtype, "float32") is not None

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return available(target) and super().matches(func, target)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        splits = self._splits(_known(func), gpu_machine(target)) if _has_known_grid(func) else (1,)
        return (*self.choices, Knob("splits", splits)) if len(splits) > 1 else self.choices

    def _splits(self, heads: Heads, gpu: GpuMachine) -> tuple[int, ...]:
        """Into how many parts keys may be cut: no more than give each multiprocessor a few blocks, of no fewer than the
        smallest tile's keys."""
        blocks = heads.count * ceil_div(heads.queries, self.tiles.rows)
        most = min(_MOST_SPLITS, _BLOCKS * gpu.multiprocessors // blocks, heads.keys // _LEAST_KEYS)
        even = (gpu.multiprocessors * n // blocks for n in range(1, _BLOCKS + 1))  # as many blocks as run at once
        return tuple(sorted({1, *(1 << n for n in range(8)), *even} & set(range(1, most + 1)) | {1}))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        heads, gpu, knobs = _known(func), gpu_machine(target), self.knobs(func, target)
        names = [knob.name for knob in knobs]
        choices = (dict(zip(names, choice, strict=True)) for choice in product(*(knob.values for knob in knobs)))
        fitting = [tiles for choice in choices if _misfit(tiles := self.tiles(**choice), heads, gpu) is None]
        for tiles in sorted(fitting, key=lambda t: estimate(t, heads, gpu))[:_SEEDS]:
            yield {name: getattr(tiles, name) for name in names}

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        gpu, tiles, heads = gpu_machine(target), self.tiles(**decisions), _known(func)
        misfit = _misfit(tiles, heads, gpu)
        require(misfit is None, str(misfit))
        return estimate(tiles, heads, gpu, resident) / gpu.hz

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint:
        gpu, tiles, heads = gpu_machine(target), self.tiles(**decisions), _known(func)
        stage = tiles.keys * (heads.depth + heads.features) * heads.bits // 8
        return Footprint.of(gpu, tiles.launched, tiles.launched_registers(heads), tiles.shared_bytes(heads),
                            tiles.stages, stage, tensor_cores="FFMA" not in self.opcodes)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        heads = _known(sch.mod["main"])
        tiles = self.tiles(**{knob.name: pick(knob.name) for knob in self.knobs(sch.mod["main"], target)})
        misfit = _misfit(tiles, heads, gpu_machine(target))
        require(misfit is None, str(misfit))
        _mark(sch, tiles, self.mark)


class WarpgroupAttention(Attention):
    """Attention of 16-bit floats by ``wgmma``, where boxes can be copied of what is read and queries are enough. Knobs:
    also ``turns``, whether two warpgroups begin with their products in turn."""

    name = "cuda.attention_wgmma"
    opcodes = ("HGMMA",)
    tiles = WarpgroupTiles
    kernel = WarpgroupFlash
    mark = GROUPS_MARK
    choices = (Knob("warps", (4, 8)), Knob("keys", (64, 96, 128)), Knob("stages", (2, 3, 4)), Knob("turns", (0, 1)))

    def recognises(self, func: tirx.PrimFunc) -> bool:
        heads = heads_of(func)
        fixed = free_function(func) is None  # boxes are of tensors whose sizes are numbers
        return fixed and heads is not None and super().recognises(func) and heads.queries >= _LEAST_QUERIES and (
            min(heads.depth, heads.features) >= _LEAST_FEATURES) and boxed(func, heads)

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return hopper.available(target) and super().matches(func, target) and _is_faster(func, str(target))

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return self.choices

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        require(hopper.available(target), f"attention of warpgroups needs sm_90a, got {target.attrs['arch']}")
        super().schedule(sch, target, pick)


class TensorFloatAttention(Attention):
    """Attention of float32 on tensor cores, where the function says that its operands may be rounded to tf32."""

    name = "cuda.attention_tf32"
    tiles = TensorFloatTiles
    kernel = TensorFloatFlash

    def accepts(self, heads: Heads) -> bool:
        return heads.dtype == "float32" and heads.tf32


class ExactAttention(Attention):
    """Attention of float32, by plain multiply-adds."""

    name = "cuda.attention_f32"
    opcodes = ("FFMA",)
    tiles = SimtTiles
    kernel = SimtFlash
    choices = (Knob("warps", (1, 2, 4, 8)), Knob("keys", (16, 32, 64)), Knob("stages", (2, 3)))

    def accepts(self, heads: Heads) -> bool:
        return heads.dtype == "float32" and not heads.tf32



@remembered
def _is_faster(func: tirx.PrimFunc, named: str) -> bool:
    """Whether warpgroups are reckoned faster than ``mma.sync``, which more blocks share the queries and keys of."""
    target, heads = tvm.target.Target(named), _known(func)
    gpu, best = gpu_machine(target), dict[str, float]()
    for space in (WarpgroupAttention(), Attention()):
        seed = next(space.seeds(func, target), None)
        best[space.name] = float("inf") if seed is None else estimate(space.tiles(**seed), heads, gpu)
    return best[WarpgroupAttention.name] <= best[Attention.name]


def _known(func: tirx.PrimFunc) -> Heads:
    """The attention as its kernel takes it."""
    heads, free = heads_of(func), free_function(func)
    if heads is None:
        raise InvalidDecision("the function must hold one attention")
    return grouped(heads) if free is None or _has_known_grid(func) else heads


def _has_known_grid(func: tirx.PrimFunc) -> bool:
    """Whether heads and queries are as many in each call."""
    free = free_function(func)
    heads = heads_of(func if free is None else free)
    return heads is not None and all(isinstance(size, int) for size in (*heads.extents, heads.queries))


def _misfit(tiles: Tiles, heads: Heads, gpu: GpuMachine) -> str | None:
    """Why tiles can't run on a GPU, or None."""
    misfit = tiles.misfit(heads)
    if misfit is not None:
        return misfit
    if tiles.shared_bytes(heads) > gpu.shared_bytes:
        return f"the tiles must fit {gpu.shared_bytes} bytes, got {tiles.shared_bytes(heads)}"
    if tiles.registers(heads) > tiles.most_registers:
        return f"a thread must have at most {tiles.most_registers} registers, got {tiles.registers(heads)}"
    registers = tiles.launched_registers(heads)
    if not gpu.resident(tiles.launched, registers, tiles.shared_bytes(heads)):
        return f"a block must fit a multiprocessor, got {tiles.launched} threads of {registers} registers"
    return None


def estimate(tiles: Tiles, heads: Heads, gpu: GpuMachine, resident: int = 0) -> float:
    """Cycles: products, shared memory or copies, whichever is slowest, and exponentials, of all tiles of keys, longer
    where few warps hide latencies, times the rounds of blocks. Reckoned from data sheets, not measured."""
    blocks = heads.count * ceil_div(heads.queries, tiles.queries) * tiles.splits
    registers = tiles.launched_registers(heads)
    resident = resident or max(1, gpu.resident(tiles.launched, registers, tiles.shared_bytes(heads)))
    exact = blocks / gpu.multiprocessors
    here = min(resident, max(1, round(exact)))
    points, features = tiles.queries * tiles.keys, heads.depth + heads.features
    exactly = heads.dtype == "float32" and not heads.tf32
    products = points * features / (gpu.lanes if exactly else min(tiles.most_lanes, gpu.tensor_lanes) * 16 / heads.bits)
    # a warp, or a warpgroup, reads every key and value; of float32, four queries share what is read
    fetched = tiles.readers * tiles.keys * features * heads.bits / 8 / 128 * (1.5 if exactly else 1.0)
    copied = tiles.keys * features * heads.bits / 8 / (gpu.l2_rate / gpu.multiprocessors / gpu.hz)
    special = points * (1 / 16 + tiles.issued / gpu.lanes) + tiles.queries * heads.features / gpu.lanes  # sums rescaled
    idle = max(1.0, 8 / (here * tiles.warps)) ** 0.5
    tiles_of_keys = ceil_div(ceil_div(heads.keys, tiles.keys), tiles.splits)
    step = (max(products, fetched, copied) + special * tiles.exposed(tiles_of_keys)) * idle + _STEP
    steps = float(tiles_of_keys)
    if heads.causal is not None:
        steps *= min(1.0, 0.5 + 0.5 * tiles.queries / heads.queries)
    rounds = ceil_div(blocks, gpu.multiprocessors) if exact < 4 else exact + 0.5
    once = heads.queries <= tiles.queries  # keys and values are read by one block alone
    late = max(0.0, (_FAR if once else _LATENCY) / (tiles.stages - 1) - here * step) / here
    # the last block of a place reads four splits at a time, twice, behind two fences
    joining = (2 * ceil_div(tiles.splits, 4) + 2) * _LATENCY if tiles.splits > 1 else 0.0
    least = heads.count * heads.keys * features * heads.bits / 8 / (gpu.memory_rate / gpu.hz)
    cycles = rounds * (steps * (step + late) + 2 * _LATENCY / here)
    return (least**4 + cycles**4) ** 0.25 + joining  # near the memory's rate, neither hides all of the other


def _mark(sch: s_tir.Schedule, tiles: Tiles, mark: str) -> None:
    """Lay the result out in blocks of threads, with all that it is made of inside, and mark the scores.

    Until it is expanded, the function computes what the kernel does, all scores of a block's queries at once.
    """
    heads, root = heads_of(sch.mod["main"]), sch.get_sblock("root")
    assert heads is not None
    scores = next(block for block in sch.get_child_blocks(root) if "mlc.op" in sch.get(block).annotations)
    sch.annotate(scores, mark, tiles.numbers)
    (out,) = sch.get_output_blocks(root)
    loops = sch.get_loops(out)
    variables = [iterator.var for iterator in sch.get(out).iter_vars]
    row, column = (next(n for n, var in enumerate(variables) if var.same_as(own)) for own in heads.rows)
    outer, inner = sch.split(loops[row], [None, tiles.queries])
    front = [loop for n, loop in enumerate(loops) if n not in (row, column)]
    sch.reorder(*front, outer, inner, loops[column])
    at = sch.fuse(*front, outer)
    sch.bind(at, "blockIdx.x")
    _, thread = sch.split(sch.fuse(inner, loops[column]), [None, tiles.threads])
    sch.bind(thread, "threadIdx.x")
    bring_inside(sch, out, at)


def expanded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its attention's kernel written out where the schedule has marked one, else as it is."""
    marks: list[tuple[str, list[int]]] = []

    def look(block: s_tir.SBlock) -> None:
        for mark in (MARK, GROUPS_MARK):
            if mark in block.annotations:
                marks.append((mark, [int(v) for v in block.annotations[mark]]))

    walk(func.body, (s_tir.SBlock, look))
    heads = heads_of(func) if marks else None
    if heads is None:
        return func
    mark, numbers = marks[0]
    spaces = (Attention, WarpgroupAttention, TensorFloatAttention, ExactAttention)
    space = next(each for each in spaces if each.mark == mark and each().accepts(heads))
    return space.kernel(func, grouped(heads), space.tiles(*numbers)).function()
