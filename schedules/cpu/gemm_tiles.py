"""Matrix products in AMX tiles, of 8-bit integers and of bfloat16, with packed weights.

The functions are those of :mod:`schedules.cpu.gemm`'s dot products, whose packed weights are what a tile holds. A tile
of 16 rows is added to by one instruction in the time of one or two dot products of a vector for each of its rows, but
it is always whole, and what it holds goes through memory before anything else can be done with it. So few rows are
left to dot products, by arithmetic (:func:`pays`), and so are rows that make no whole tiles: the graph pads them where
tiles pay nevertheless. After Intel's "64 and IA-32 Architectures Optimization Reference Manual", chapter on AMX.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm_ffi import structural_equal

from schedules.amx_tiles import mark
from schedules.analysis import analyse, loads
from schedules.cpu.common import InjectiveTile, extent_of, parallelise, schedule_injective, vectorise
from schedules.cpu.gemm_seeds import chunks
from schedules.cpu.gemm_shape import BFLOAT, INTEGER, GemmShape, dot_shape
from schedules.cpu.tiling import consumers_inlined, divisors, find_annotated, staged_input
from schedules.intrin import PREFIX, select, use
from schedules.intrin.tiles import DEPTHS, PASSING, SHAPES, TILE, product, store, zero
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["GEMM_TILES", "pays", "shapes"]

#: cycles of writing a tile's row to the first cache and of reading it again, and of a tile's load by rows a cycle
_STORED, _LOADED = 2.0, 0.5
#: part of their peak that dot products reach (measured on AVX-512: 0.97 and 0.92 to 0.98), and what tiles must gain,
#: whose rates are a manual's
_DOTS, _GAIN = 0.95, 1.25
#: bytes of a step of the sum, and bytes a cycle that rows are gathered at: a vector of 16 channels in two cycles
_WORD, _GATHERED = 4, 8.0
#: how many products are kept apart in a chunk's list of seeds
_SEEDS = 3


def shapes(m: int, n: int, steps: int) -> Iterator[tuple[int, int, int]]:
    """``(tiles of rows, tiles of columns, steps of a tile)`` that ``m`` rows, ``n`` columns and a sum of so many steps
    are made of."""
    for rows, columns in SHAPES:
        if m % (rows * TILE) == 0 and n % (columns * TILE) == 0:
            yield from ((rows, columns, depth) for depth in DEPTHS if steps % depth == 0)


def _cycles(m: int, n: int, steps: int, machine: CpuMachine, tile: tuple[int, int, int]) -> float:
    """Cycles of one core, weights and activations in its caches."""
    rows, columns, depth = tile
    count = rows * columns
    adding = count * TILE / machine.tile_per_cycle
    loading = (rows * TILE + columns * depth) * _LOADED
    step = max(adding, loading, machine.tile_latency)
    return m * n / (count * TILE * TILE) * (steps / depth * step + machine.tile_latency + count * TILE * _STORED)


def pays(m: int, n: int, steps: int, form: str, target: tvm.target.Target, gathered: bool = False) -> bool:
    """Whether a product of ``m`` rows, padded to whole tiles, by ``n`` columns of a packed weight of so many ``steps``
    is faster in tiles than by dot products, also where its rows must be ``gathered`` for tiles alone."""
    machine = cpu_machine(target)
    if not machine.tile_per_cycle or select(product(form, 1, 1, DEPTHS[0]), target) is None:
        return False
    whole = -(-m // TILE) * TILE
    tiles = [_cycles(whole, n, steps, machine, tile) for tile in shapes(whole, n, steps)]
    # pairs of bfloat16 are multiplied as two of float32 where that is faster
    dots = machine.dot_per_cycle if form == "quads" else max(machine.bfloat_per_cycle, machine.fma_per_cycle / 2)
    if not tiles or not dots:
        return bool(tiles)
    each = m * n * steps / (dots * machine.lanes() * _DOTS)
    copied = m * steps * _WORD / _GATHERED if gathered else 0.0
    fetched = n * steps * 4 / machine.l2_rate  # the weight, whichever multiplies it
    return (max(min(tiles), fetched) + copied) * _GAIN <= max(each, fetched)


def _displaced(held: int, passing: int, steps: int, machine: CpuMachine) -> bool:
    """Whether the first cache can hold a group's ``held`` tiles over the whole sum, but not beside the ``passing`` ones
    of the next group: what was read last stays, so that neither would be found there again."""
    tile = TILE * steps * _WORD
    return held * tile <= machine.l1_bytes < (held + passing) * tile


class TiledGemm(Space):
    """Knobs: ``m`` and ``n`` tiles of rows and of columns that are added to at once, ``depth`` steps of the sum in a
    tile, ``mb`` and ``nb`` such groups of tiles in one parallel chunk, ``k`` unrolling of the sum, ``order`` which axis
    varies fastest over the parallel chunks (0: columns, 1: rows), ``inner`` which loop is inside a chunk
    (likewise), and ``passing`` whether what that loop steps through passes the first cache by (1)."""

    name = "cpu.gemm_tiles"
    target_kind = "llvm"
    tensorizes = "tiles_"
    free_sizes = False
    ops = (INTEGER, BFLOAT)

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = self.shape(func)
        if shape is None or shape.packed != TILE or shape.m % TILE or not _readable(func, self.ops):
            return False
        return pays(shape.m, shape.n, shape.k, shape.step.form, target)

    def shape(self, func: tirx.PrimFunc) -> GemmShape | None:
        """The extents of a product of this kind."""
        return next((shape for op in self.ops if (shape := dot_shape(func, op)) is not None), None)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = self.shape(func)
        assert shape is not None
        found = list(shapes(shape.m, shape.n, shape.k))
        rows, columns, depths = (sorted({each[axis] for each in found}) for axis in range(3))
        return (
            Knob("m", tuple(rows)), Knob("n", tuple(columns)), Knob("depth", tuple(depths)),
            Knob("mb", tuple(sorted({d for r in rows for d in divisors(shape.m // (r * TILE), 64)}))),
            Knob("nb", tuple(sorted({d for c in columns for d in divisors(shape.n // (c * TILE), 64)}))),
            Knob("k", tuple(sorted({k for d in depths for k in (1, 2, 4) if shape.k // d % k == 0}))),
            Knob("order", (0, 1)), Knob("inner", (0, 1)), Knob("passing", (0, 1) if DEPTHS[0] in depths else (0,)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = self.shape(func)
        assert shape is not None
        machine = cpu_machine(target)
        scored = []
        for tile in shapes(shape.m, shape.n, shape.k):
            layouts = chunks(shape, machine, tile[0] * TILE, tile[1] * TILE, 1, 1)[:2]
            scored.append((_cycles(shape.m, shape.n, shape.k, machine, tile) * layouts[0][0], tile, layouts))
        scored.sort()
        for _, (m, n, depth), layouts in scored[:_SEEDS]:
            k = max(divisors(shape.k // depth, 2))
            for _, mb, nb, order, inner in layouts:
                held, passing = (n, m) if inner else (m, n)
                yield {"m": m, "n": n, "depth": depth, "mb": mb, "nb": nb, "k": k, "order": order, "inner": inner,
                       "passing": int(depth == DEPTHS[0] and _displaced(held, passing, shape.k, machine))}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        func = sch.mod["main"]
        shape, block = self.shape(func), find_annotated(sch, self.ops)
        assert shape is not None and block is not None
        machine = cpu_machine(target)
        taken = {knob.name: pick(knob.name) for knob in self.knobs(func, target)}
        m, n, depth = taken["m"], taken["n"], taken["depth"]
        if (m, n, depth) not in set(shapes(shape.m, shape.n, shape.k)):
            raise InvalidDecision(f"a product must be whole groups of {m} x {n} tiles of {depth} steps")
        if shape.m // (m * TILE) % taken["mb"] or shape.n // (n * TILE) % taken["nb"] or shape.k // depth % taken["k"]:
            raise InvalidDecision("a parallel chunk must hold whole groups of tiles, and a loop whole steps")
        if taken["passing"] and depth != DEPTHS[0]:
            raise InvalidDecision(f"what passes by must be loaded in tiles of {DEPTHS[0]} steps")
        stage = staged_input(sch, block) if sch.get_producers(block) else None
        copied = sch.cache_write(block, 0, "local")
        out = consumers_inlined(sch, copied) if sch.get_consumers(copied) else None

        *batch, i, j, k, within = sch.get_loops(block)
        chunk_i, outer_i, rows = sch.split(i, [None, taken["mb"], m * TILE])
        chunk_j, outer_j, columns = sch.split(j, [None, taken["nb"], n * TILE])
        step, unrolled, steps = sch.split(k, [None, taken["k"], depth])
        parallel = (chunk_i, chunk_j) if taken["order"] == 0 else (chunk_j, chunk_i)
        tiles = (outer_i, outer_j) if taken["inner"] == 0 else (outer_j, outer_i)
        sch.reorder(*batch, *parallel, *tiles, step, unrolled, rows, columns, steps, within)
        chunk = sch.fuse(*batch, *parallel)
        if extent_of(sch, chunk) > 1:
            sch.parallel(chunk)
        mark(sch, chunk, m, n, depth)
        sch.unroll(unrolled)
        sch.reverse_compute_at(copied, tiles[-1], preserve_unit_loops=True)
        if out is not None:
            _count_pixels(sch, out, sch.get(copied).writes[0].source)
            sch.reverse_compute_at(out, tiles[-1], preserve_unit_loops=True)
            sliced = int(sch.get(out).iter_vars[-1].dom.extent) % (n * TILE) != 0  # of padding nothing is kept
            vectorise(sch, sch.get_loops(out)[-1], machine.lanes(shape.dtype), guarded=sliced)
        passing = PASSING[(2 - taken["inner"]) * taken["passing"]]
        scope = "global" if out is None else "local"
        tensorise_tiles(sch, block, copied, rows, step, shape, (m, n, depth), scope, passing)
        if stage is not None and not _gathered(sch, stage, machine):
            schedule_injective(sch, stage, machine, InjectiveTile())


def tensorise_tiles(
    sch: s_tir.Schedule, block: SBlockRV, copied: SBlockRV, rows: LoopRV, step: LoopRV, shape: GemmShape,
    tile: tuple[int, int, int], scope: str, passing: str = "",
) -> None:
    """Make the loops from ``rows`` on of ``block`` products of tiles, cleared before the loop ``step``, and those of
    the block ``copied``, its result's copy in a buffer of that ``scope``, a store of them. ``passing`` is one of
    :data:`schedules.intrin.tiles.PASSING`."""
    m, n, depth = tile
    whole = sch.blockize(rows)
    cleared = sch.decompose_reduction(whole, step)
    *_, first, _ = sch.get_loops(copied)
    sch.tensorize(cleared, use(PREFIX + zero(shape.dtype, m, n)))
    sch.tensorize(whole, use(PREFIX + product(shape.step.form, m, n, depth, passing)))
    sch.tensorize(first, use(PREFIX + store(shape.dtype, m, n, scope)))


def _gathered(sch: s_tir.Schedule, stage: SBlockRV, machine: CpuMachine) -> bool:
    """Lay out a block that gathers the windows of images in blocks of channels, a pixel's block of channels at a time;
    False for any other block. What lies in a window, or around the image, is then asked once for each of its pixels."""
    block = sch.get(stage)
    images = [region.source for region in block.reads if len(region.source.shape) == 5]
    if len(block.iter_vars) != 3 or len(images) != 1:
        return False
    blocks, lanes = int(images[0].shape[1]), int(images[0].shape[4])
    *rows, depth = sch.get_loops(stage)
    if extent_of(sch, depth) % (blocks * lanes):
        return False
    *_, lane = sch.split(depth, [None, blocks, lanes])
    sch.vectorize(lane)
    parallelise(sch, rows, machine.cores)
    return True


def _readable(func: tirx.PrimFunc, ops: tuple[str, ...]) -> bool:
    """Whether each element of the product is read where it is computed, or in the blocks of a convolution."""
    info = analyse(func)
    block = next(b for b in info.blocks if b.annotation in ops)
    readers = [b for b in info.blocks if any(a.buffer.same_as(block.writes[0]) for a in b.reads) and b is not block]
    return all(_reads(reader.block, block.writes[0]) is not None for reader in readers)


def _reads(reader: s_tir.SBlock, product: tirx.Buffer) -> int | None:
    """0 where a block reads each element of a product at its own place; the pixels of a row of images in blocks of
    channels, ``[n, y * row + x, b * o + c]`` at ``[n, b, y, x, c]``; None for anything else."""
    axes = [axis.var for axis in reader.iter_vars]
    indices = [load.indices for load in loads(reader.body) if load.source.same_as(product)]
    if not indices or any(len(each) != len(indices[0]) or not all(map(structural_equal, each, indices[0]))
                          for each in indices):
        return None
    if len(axes) == len(indices[0]) and all(map(structural_equal, axes, indices[0])):
        return 0
    if len(axes) != 5 or len(indices[0]) != 3:
        return None
    n, b, y, x, c = axes
    row, lanes = (int(reader.iter_vars[axis].dom.extent) for axis in (3, 4))
    zero = tvm.sym.Analyzer()
    wanted = (n, y * row + x, b * lanes + c)
    return row if all(zero.can_prove_equal(a, b) for a, b in zip(indices[0], wanted, strict=True)) else None


def _count_pixels(sch: s_tir.Schedule, out: SBlockRV, product: tirx.Buffer) -> None:
    """Let a block that stores images in blocks of channels run through pixels as the product's rows do."""
    row = _reads(sch.get(out), product)
    if row is None:
        raise InvalidDecision("what reads a product in tiles must do so in its order")
    if row:
        types = str(sch.get(out).iter_vars[0].var.ty)
        joined = tirx.IndexMap.from_func(lambda n, b, y, x, c: (n, b, y * row + x, c), 5, index_dtype=types)
        sch.transform_block_layout(out, joined)


GEMM_TILES = TiledGemm()
