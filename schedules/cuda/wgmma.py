"""Matrix products on Hopper's tensor cores by ``wgmma`` (``sm_90a``): 16-bit floats added up in float32.

A schedule lays the result out in tiles and marks the sum with them; what no primitive does, warpgroups that copy and
others that multiply, is written in the lowering (:func:`expanded`, :mod:`schedules.cuda.warpgroups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from itertools import product as every
from math import ceil
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.analysis import remembered
from schedules.cuda.common import CudaSpace, bring_inside, ceil_div, require
from schedules.cuda.hopper import available
from schedules.cuda.mma import TensorCoreGemm
from schedules.cuda.product import MARK, Operand, Product, marked, plain, product_of
from schedules.cuda.warp_tile import WarpTile
from schedules.cuda.warp_tile import estimate as cut_estimate
from schedules.cuda.warpgroups import ROWS, GroupTile, Warpgroups
from schedules.cuda.windows import WindowGroups
from schedules.free import free_function
from schedules.intrin import mma
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["KNOBS", "WarpgroupGemm", "expanded"]

_SEEDS = 4
#: sums of a thread at most: with the addresses of its products and the epilogue they fill its registers
_MOST_SUMS = 128
#: least rows, columns and depth that are worth a tile
_LEAST = 64
#: how many times as fast ``mma.sync`` with a cut sum must be reckoned to be preferred: an outside model of the H200 has
#: warpgroups 1.2 to 1.7 times faster where both are reckoned within this of each other
_MARGIN = 1.3
#: cycles until a box from the second cache lands
_LATENCY = 800
#: cycles of a step by which two blocks are apart that give stages back to each other
_MEETING = 50
#: cycles until a stage that is fetched while others are has landed, and how many times the second cache's rate boxes
#: come at, since blocks that run together fetch the same ones
_LANDING, _SHARED_FETCHES = 1290, 1.4
#: bytes that shared memory moves in a cycle
_SHARED_RATE = 128
#: how much faster more blocks than run at once must be reckoned outside of clusters to come first: it is clusters of
#: them that were measured, at the speed of cuBLAS
_UNTRIED = 1.06

#: ``persistent``: a block for each multiprocessor goes from tile to tile, instead of a block for each tile; ``boxed``:
#: results are copied in boxes, where they can be; ``cluster``: so many blocks along ``m`` copy a tile of B for all
KNOBS = (
    Knob("block_m", (64, 128, 256)),
    Knob("block_n", (64, 128, 192, 256)),
    Knob("block_k", (64, 128)),
    Knob("consumers", (1, 2)),
    Knob("stages", (3, 4, 5, 6)),
    Knob("panel", (1, 4, 8, 16)),
    Knob("boxed", (0, 1)),
    Knob("cluster", (1, 2)),
    Knob("persistent", (0, 1)),
)


class WarpgroupGemm(CudaSpace):
    """Products whose operands boxes can be copied of: rows that lie multiples of 16 bytes apart, or windows of images
    whose channels lie together (:mod:`schedules.cuda.image`)."""

    name = "cuda.wgmma"
    written_out = True
    opcodes = ("HGMMA",)

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return available(target) and super().matches(func, target) and not _is_cut(func, str(target))

    def recognises(self, func: tirx.PrimFunc) -> bool:
        product, free = product_of(func), free_function(func)
        if product is None or (free is not None and product_of(free) is None):
            return False
        return min(product.m, product.n, product.k) >= _LEAST

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        boxed, known = _known(func).results is not None, free_function(func) is None
        return tuple(Knob(knob.name, (0,)) if (knob.name == "boxed" and not boxed) or (
            knob.name == "persistent" and not known) else knob for knob in KNOBS)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        product, gpu = _known(func), gpu_machine(target)
        knobs = {k.name: k.values for k in self.knobs(func, target)} | {"panel": (8,)}
        choices = [dict(zip(knobs, choice, strict=True)) for choice in every(*knobs.values())]
        fitting = [c for c in choices if _misfit(_tile(c), gpu) is None]
        best: dict[tuple[int, int], Decisions] = {}  # of each tile

        def preference(choice: Decisions) -> float:
            tile = _tile(choice)
            untried = tile.cluster == 1 and tile.tiles(product) > gpu.multiprocessors
            return estimate(tile, bool(choice["persistent"]), product, gpu) * (_UNTRIED if untried else 1.0)

        for choice in sorted(fitting, key=preference):
            best.setdefault((choice["block_m"], choice["block_n"]), choice)
        yield from islice(best.values(), _SEEDS)

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        gpu, tile = gpu_machine(target), _tile(decisions)
        misfit = _misfit(tile, gpu)
        require(misfit is None, str(misfit))
        return estimate(tile, bool(decisions["persistent"]), _known(func), gpu, resident) / gpu.hz

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint:
        gpu, tile = gpu_machine(target), _tile(decisions)
        return Footprint.of(gpu, tile.threads, tile.registers, tile.shared_bytes, tile.stages, tile.stage_bytes,
                            cluster=tile.cluster, tensor_cores=True)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        require(available(target), f"products of warpgroups need sm_90a, got {target.attrs['arch']}")
        product, gpu = _known(sch.mod["main"]), gpu_machine(target)
        decisions = {knob.name: pick(knob.name) for knob in KNOBS}
        known = free_function(sch.mod["main"]) is None
        tile = _tile(decisions)
        misfit = _misfit(tile, gpu)
        require(misfit is None, str(misfit))
        tiles = tile.tiles(product)
        at_once = gpu.multiprocessors // tile.cluster * tile.cluster
        require(at_once > 0, f"a cluster must fit the GPU, got {gpu.multiprocessors} multiprocessors")
        grid = min(tiles, at_once) if decisions["persistent"] else tiles
        _mark(sch, product, tile, grid if known else 0)


def _tile(decisions: Decisions) -> GroupTile:
    return GroupTile(**{field.name: decisions[field.name] for field in fields(GroupTile)})


@remembered
def _is_cut(func: tirx.PrimFunc, named: str) -> bool:
    """Whether a product is better cut along its sum, since its tiles would leave most of the GPU idle, or an image's
    are mostly zeros: so ``mma.sync`` is reckoned faster."""
    target = tvm.target.Target(named)
    product, kind, gpu = _known(func), mma.kind_of(_known(func).dtype, "float32"), gpu_machine(target)
    cut = next(TensorCoreGemm().seeds(func, target), None)
    if kind is None or cut is None or (cut["split_k"] == 1 and product.depth == product.k):
        return False
    best = next(WarpgroupGemm().seeds(func, target))
    ours = estimate(_tile(best), bool(best["persistent"]), product, gpu)
    return ours > _MARGIN * cut_estimate(WarpTile(**cut), product.contraction, kind, gpu)


def _known(func: tirx.PrimFunc) -> Product:
    product = product_of(func)
    if product is None:
        raise InvalidDecision("the function must hold one product of 16-bit floats whose operands lie in boxes")
    return product


def _misfit(tile: GroupTile, gpu: GpuMachine) -> str | None:
    """Why a tile can't run on a GPU, or None."""
    if tile.block_m % (tile.consumers * ROWS):
        return f"each warpgroup must have a multiple of {ROWS} rows, got {tile.block_m} for {tile.consumers}"
    if tile.sums > _MOST_SUMS:
        return f"a thread must have at most {_MOST_SUMS} sums, got {tile.sums}"
    if tile.shared_bytes > gpu.shared_bytes:
        return f"the stages must fit {gpu.shared_bytes} bytes, got {tile.shared_bytes}"
    return None


def estimate(tile: GroupTile, persistent: bool, product: Product, gpu: GpuMachine, resident: int = 0) -> float:
    """Cycles of a product: whichever of tensor cores, shared memory and second cache is slowest, or how
    long a stage takes to land, times the rounds of blocks. The form is reckoned from data sheets; what meeting, landing
    and fetching together cost is fitted to 42 products and convolutions on an H200."""
    steps, tiles = ceil_div(product.depth, tile.block_k), tile.tiles(product)
    resident = resident or max(1, gpu.resident(tile.threads, tile.registers, tile.shared_bytes))
    exact = tiles / gpu.multiprocessors
    here = min(resident, ceil(exact))
    products = tile.block_m * tile.block_n * tile.block_k / gpu.tensor_lanes
    # each 64 rows read all columns; the first product of a step waits for a barrier
    fetched = tile.block_m // ROWS * (ROWS + tile.block_n) * tile.block_k * 2
    shared = (fetched + tile.stage_bytes) / _SHARED_RATE
    rate = _SHARED_FETCHES * gpu.l2_rate / gpu.multiprocessors / gpu.hz
    # the blocks of a cluster that have rows read a part each of B's tile from the second cache, and wait for each other
    helping = min(tile.cluster, ceil_div(tile.rows(product), tile.block_m))
    common = tile.block_n * tile.block_k * 2 * (helping - 1) / helping
    copied = (tile.stage_bytes - common) / rate
    # one stage is multiplied, and the one before is given back while it is
    late = _LANDING / (here * (tile.stages - 2))
    # one warpgroup alone leaves the tensor cores idle between its groups
    alone = 1.0 if here * tile.consumers > 1 else 1.15
    step = max(products * alone, shared, copied, late) + 20 + _MEETING * (tile.cluster - 1)
    # sums, or results of 16 bits, are written to shared memory and read from there
    stored = 2 * tile.block_m * tile.block_n * (2 if tile.boxed else 4) / _SHARED_RATE
    ends = _LATENCY * (0.5 if persistent and exact > 1 else 1.0) + stored
    rounds = ceil(exact) if exact < 4 else exact + 0.5  # the tail matters less the more rounds there are
    return rounds * (steps * step * (1 + 0.02 / tile.stages) + ends / here)


def _mark(sch: s_tir.Schedule, product: Product, tile: GroupTile, grid: int) -> None:
    """Lay the result out in tiles, with all that it is made of inside, and mark the sum.

    Until it is expanded, the function computes what the kernel does, a tile's sums one after another. A ``grid`` of 0
    has a block for each tile.
    """
    root = sch.get_sblock("root")
    main = next(block for block in sch.get_child_blocks(root) if _sums(sch, block))
    sch.annotate(main, MARK, [*(getattr(tile, field.name) for field in fields(GroupTile)), grid])
    (out,) = sch.get_output_blocks(root)
    spatial = sum(v.iter_type != tirx.IterVar.CommReduce for v in sch.get(out).iter_vars)
    loops = sch.get_loops(out)[:spatial]
    roles = [role for role in product.contraction.roles if role != "k"]
    if len(roles) != len(loops):  # the result is laid out otherwise, but for its columns
        roles = ["m"] * (len(loops) - 1) + ["n"]
    by_role = [[loop for loop, its in zip(loops, roles, strict=True) if its == role] for role in "bmn"]
    m_o, *ranks, m_i = sch.split(
        _fused(sch, by_role[1]), [None, *([tile.cluster] if tile.cluster > 1 else []), tile.block_m])
    n_o, n_i = sch.split(_fused(sch, by_role[2]), [None, tile.block_n])
    sch.reorder(*by_role[0], m_o, n_o, *ranks, m_i, n_i)
    at = sch.fuse(*by_role[0], m_o, n_o, *ranks)
    if 0 < grid < int(sch.get(at).extent):  # a kernel of an image's boxes has more tiles
        rounds, block = sch.split(at, [None, grid])
        sch.reorder(block, rounds)
        sch.bind(block, "blockIdx.x")
        at = rounds
    else:
        sch.bind(at, "blockIdx.x")
    _, thread = sch.split(sch.fuse(m_i, n_i), [None, tile.threads])
    sch.bind(thread, "threadIdx.x")
    bring_inside(sch, out, at)


def _sums(sch: s_tir.Schedule, block: Any) -> bool:
    return any(v.iter_type == tirx.IterVar.CommReduce for v in sch.get(block).iter_vars)


def _fused(sch: s_tir.Schedule, loops: list[Any]) -> Any:
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def expanded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its product's kernel written out where the schedule has marked one, else as it is."""
    mark = marked(func)
    unscheduled = plain(func) if mark is not None else None
    product = product_of(unscheduled) if unscheduled is not None else None
    if mark is None or product is None:
        return func
    *numbers, grid = mark
    tile = GroupTile(*numbers)
    if product.results is None:  # a trace may say what no space proposes
        tile = replace(tile, boxed=0)
    groups = Warpgroups if isinstance(product.a, Operand) else WindowGroups
    return groups(func, product, tile, grid).function()
