"""Matrix products with the output tile in registers: dense layers with packed weights, matmul, batched matmul.

The function holds one contraction block that multiplies two buffers and sums over one axis. The second operand is
packed as ``[N/n, K, n]``, or plain as ``[..., K, N]`` or ``[..., N, K]``, which the function may pack itself; the
first one is ``[..., M, K]`` or ``[..., K, M]``. Everything before the last two output axes is a batch. Blocking after
Goto and van de Geijn (2008).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import analyse
from schedules.cpu.common import InjectiveTile, extent_of, parallel_work, parallelise, schedule_injective, vectorise
from schedules.cpu.gemm_seeds import (
    columns,
    gemm_seeds,
    packable,
    packs,
    padded,
    rows,
    sum_blocks,
    sum_chains,
    sum_parts,
    tallest,
)
from schedules.cpu.gemm_shape import BFLOAT, BYTES, INTEGER, GemmShape, dot_shape, gemm_shape, read
from schedules.cpu.steps import FLOAT, has_dot, with_dots
from schedules.cpu.tiling import (
    accumulate,
    check_tile,
    consumers_inlined,
    divisors,
    find_annotated,
    staged_input,
    vectors_in,
)
from schedules.lockstep import is_fixed
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["GEMM", "GEMM_BFLOAT", "GEMM_BYTES", "GEMM_INTEGER", "Gemm", "Tile"]


@dataclass(frozen=True)
class Tile:
    """The decisions of a candidate: what the knobs of :class:`Gemm` and of what derives from it say."""

    m: int
    n: int
    mb: int
    nb: int
    k: int
    order: int
    inner: int
    prefetch: int
    pack: int
    parts: int = 1
    chains: int = 1
    kb: int = 1
    staged: int = 0


class Gemm(Space):
    """Knobs: ``m`` rows and ``n`` columns of the register tile, ``mb`` row tiles and ``nb`` column tiles of one
    parallel chunk, ``k`` unrolling of the sum, ``order`` which axis varies fastest over the parallel chunks
    (0: columns, 1: rows), ``inner`` which tile loop is inside a chunk (0: columns, 1: rows), ``prefetch`` whether a
    packed weight is fetched one column of tiles ahead, ``pack`` whether the second operand is copied into panels
    before all else.

    Where the result is too small to keep the cores or the registers busy, ``parts`` of the sum run in parallel, and a
    register tile holds ``chains`` sums of every ``chains``-th product. Where panels of the whole sum do not fit the
    second cache, a chunk goes through the sum in ``kb`` blocks.
    """

    name = "cpu.gemm"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = gemm_shape(func)
        return shape is not None and (packable(shape) or not (shape.transposed[1] or shape.n % 4))

    def shape(self, func: tirx.PrimFunc) -> GemmShape | None:
        """The extents of ``func``, if it is a product of this space's kind."""
        return gemm_shape(func)

    def product(self, sch: s_tir.Schedule) -> tuple[SBlockRV, GemmShape]:
        """The block of the product and its extents, in a function that :meth:`matches`."""
        found = read(sch)
        assert found is not None
        return found

    def stage(self, sch: s_tir.Schedule, block: SBlockRV, tile: Tile) -> SBlockRV | None:
        """Fold what comes before the product into it; returns the block that makes an operand, if there must be one."""
        for producer in sch.get_producers(block):
            sch.compute_inline(producer)
        return None

    def place(self, sch: s_tir.Schedule, stage: SBlockRV, chunk: LoopRV, machine: CpuMachine) -> None:
        """Lay out the block of :meth:`stage`; ``chunk`` is the loop in which all of what it makes is used."""
        schedule_injective(sch, stage, machine, InjectiveTile())

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = self.shape(func)
        assert shape is not None
        machine = cpu_machine(target)
        widths, heights = columns(shape, machine), rows(shape)
        always = (
            Knob("m", tuple(heights)),
            Knob("n", tuple(widths)),
            Knob("mb", tuple(sorted({d for r in heights for d in divisors(-(-shape.m // r), 64)}))),
            Knob("nb", tuple(sorted({d for c in widths for d in divisors(-(-shape.n // c), 64)}))),
            Knob("k", tuple(divisors(shape.k, 8))),
            Knob("order", (0, 1)),
            Knob("inner", (0, 1)),
            Knob("prefetch", (0, 1) if shape.weight >= 0 else (0,)),
            Knob("pack", packs(shape, machine)),
        )
        sums = {"parts": sum_parts(shape, machine), "chains": sum_chains(shape, machine),
                "kb": sum_blocks(shape, machine)}
        return (*always, *(Knob(name, values) for name, values in sums.items() if len(values) > 1))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = self.shape(func)
        assert shape is not None
        yield from gemm_seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        names = [knob.name for knob in self.knobs(sch.mod["main"], target)]
        block, shape = self.product(sch)
        machine = cpu_machine(target)
        lanes = machine.lanes(shape.dtype)
        tile = Tile(**{name: pick(name) for name in names})
        stage = self.stage(sch, block, tile)
        _check(tile, shape)
        check_tile(machine, tile.chains * tile.m * -(-tile.n // lanes), tile.k)
        panels = _packed(sch, block, shape, tile.n, padded(shape, machine)) if tile.pack else None
        whole = block
        if tile.parts > 1:  # each part of the sum is a product of its own, of which there is one more batch
            part, _ = sch.split(_sum(sch, block, shape), [tile.parts, None])
            block = sch.rfactor(part, 0)
            result, out = consumers_inlined(sch, whole), _copied(sch, block)
        else:
            out = consumers_inlined(sch, block)
        chains = None
        if tile.chains > 1:
            _, chain = sch.split(_sum(sch, block, shape), [None, tile.chains])
            block, chains = sch.rfactor(chain, 0), block
            sch.set_scope(block, 0, "local")
        parallel, start = _product(sch, block, chains, out, shape, tile, machine)
        chunks = sch.fuse(*parallel)
        if extent_of(sch, chunks) > 1:
            sch.parallel(chunks)
        if stage is not None:
            self.place(sch, stage, start if tile.kb > 1 else chunks, machine)
        starts = [(block, start)]
        if chains is not None:
            starts.append((chains, _added(sch, chains, lanes)))
        if tile.parts > 1:
            *outer, column = sch.get_loops(result)
            sch.compute_at(whole, outer[-1], preserve_unit_loops=True)
            starts.append((whole, _added(sch, whole, lanes)))
            vectorise(sch, column, lanes)
            if tile.parts * shape.batch * shape.m * shape.n >= parallel_work(machine):
                parallelise(sch, outer, machine.cores)
        for summed, loop in starts:
            with_dots(sch, summed, loop, shape.step if summed is block else FLOAT, target)
        if panels is not None:
            schedule_injective(sch, panels, machine, InjectiveTile())


class IntegerGemm(Gemm):
    """Matrix products for blocks annotated ``"dense_integer"``, of activations with packed weights in the forms of
    :mod:`schedules.intrin.dot`. ``k`` counts steps."""

    name = "cpu.gemm_integer"
    op = INTEGER
    tensorizes = "dot_"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = self.shape(func)
        if shape is None:
            return False
        block = next(b for b in analyse(func).blocks if b.annotation == self.op)
        return has_dot(block, shape.step, cpu_machine(target).lanes(shape.dtype), target)

    def shape(self, func: tirx.PrimFunc) -> GemmShape | None:
        return dot_shape(func, self.op)

    def product(self, sch: s_tir.Schedule) -> tuple[SBlockRV, GemmShape]:
        block, shape = find_annotated(sch, (self.op,)), self.shape(sch.mod["main"])
        assert block is not None and shape is not None
        return block, shape

    def stage(self, sch: s_tir.Schedule, block: SBlockRV, tile: Tile) -> SBlockRV | None:
        return staged_input(sch, block) if sch.get_producers(block) else None  # the instruction reads bytes in memory


class ByteGemm(IntegerGemm):
    """Matrix products for blocks annotated ``"dense_bytes"``, whose pairwise sums saturate."""

    name = "cpu.gemm_bytes"
    op = BYTES
    tensorizes = "dot_bytes"


class BfloatGemm(IntegerGemm):
    """Matrix products for blocks annotated ``"dense_bfloat"``, of bfloat16 with packed weights, with steps of two
    products."""

    name = "cpu.gemm_bfloat"
    op = BFLOAT
    tensorizes = "dot_bfloats"


def _sum(sch: s_tir.Schedule, block: SBlockRV, shape: GemmShape) -> LoopRV:
    """The loop over the steps of the sum."""
    return sch.get_loops(block)[-1 - shape.step.axes]


def _check(tile: Tile, shape: GemmShape) -> None:
    if -(-shape.m // tile.m) % tile.mb or -(-shape.n // tile.n) % tile.nb:
        raise InvalidDecision("a parallel chunk must hold whole register tiles")
    if shape.k % (tile.parts * tile.chains * tile.kb * tile.k):
        raise InvalidDecision(f"the parts of a sum of {shape.k} must have one length")
    if tile.kb > 1 and (tile.parts * tile.chains > 1 or shape.m % tile.m or shape.n % tile.n):
        raise InvalidDecision("a chunk that goes through a sum in blocks must hold whole tiles of whole sums")


def _copied(sch: s_tir.Schedule, block: SBlockRV) -> SBlockRV:
    """The block that stores what ``block`` leaves in registers."""
    sch.cache_write(block, 0, "local")
    (out,) = sch.get_consumers(block)
    return out


def _product(
    sch: s_tir.Schedule, block: SBlockRV, chains: SBlockRV | None, out: SBlockRV, shape: GemmShape, tile: Tile,
    machine: CpuMachine,
) -> tuple[list[LoopRV], LoopRV]:
    """Tile ``out`` and compute ``block`` and the sum of its ``chains`` inside; returns the parallel loops, and the
    loop to initialise ``block`` before."""
    *batch, i, j = sch.get_loops(out)
    width = min(machine.lanes(shape.dtype), tile.n)
    tall = tile.mb if is_fixed(sch, i) or tile.kb > 1 else tallest(shape, machine, tile.m, tile.mb)
    chunk_i, outer_i, tile_i = sch.split(i, [None, tall, tile.m])
    chunk_j, outer_j, vectors, vector = sch.split(j, [None, tile.nb, tile.n // width, width])
    chunks = (chunk_i, chunk_j) if tile.order == 0 else (chunk_j, chunk_i)
    tiles = (outer_i, outer_j) if tile.inner == 0 else (outer_j, outer_i)
    sch.reorder(*batch, *chunks, *tiles, tile_i, vectors, vector)
    sch.vectorize(vector)
    sch.unroll(vectors)
    sch.unroll(tile_i)
    if shape.m % tile.m:  # lowering peels the ragged tile, so that full ones test nothing
        sch.annotate(outer_i, "pragma_loop_partition_hint", True)
    if shape.n % tile.n:
        sch.annotate(outer_j, "pragma_loop_partition_hint", True)
    if tile.kb > 1:
        return [*batch, *chunks], _blocked_sum(sch, block, chunks[-1], shape, tile, width)
    if chains is not None:
        sch.compute_at(chains, tiles[-1], preserve_unit_loops=True)
    blocks = tile.n // shape.packed if shape.packed else 0
    fetched = (shape.weight, blocks, blocks) if tile.prefetch and tile.n % shape.packed == 0 else None
    spatial = len(sch.get(block).iter_vars) - 1 - shape.step.axes
    start = accumulate(sch, block, tiles[-1], spatial, width, tile.k, fetched, shape.step)
    return [*batch, *chunks], start


def _blocked_sum(
    sch: s_tir.Schedule, block: SBlockRV, chunk: LoopRV, shape: GemmShape, tile: Tile, width: int
) -> LoopRV:
    """Compute a chunk of ``block`` one part of the sum after the other, each tile by tile: what a part reads of both
    operands stays in the second cache, and so do the sums."""
    sch.compute_at(block, chunk, preserve_unit_loops=True)
    axes = shape.step.axes
    *rest, i, j, k = sch.get_loops(block)[: -axes or None]
    rest = rest[len(rest) + 3 + axes - len(sch.get(block).iter_vars) :]
    outer_i, tile_i = sch.split(i, [None, tile.m])
    outer_j, vectors, vector = sch.split(j, [None, tile.n // width, width])
    part, step, inner = sch.split(k, [tile.kb, None, tile.k])
    tiles = (outer_i, outer_j) if tile.inner == 0 else (outer_j, outer_i)
    sch.reorder(*rest, part, *tiles, step, inner, tile_i, vectors, vector)
    if not shape.step.form:
        sch.vectorize(vector)
    for loop in (inner, tile_i, vectors):
        sch.unroll(loop)
    return part


def _added(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> LoopRV:
    """Add up partial results, a vector at a time; returns the loop over them."""
    iterators = sch.get(block).iter_vars
    loops = sch.get_loops(block)[-len(iterators) :]
    position = next(n for n, each in enumerate(iterators) if each.iter_type == tirx.IterVar.CommReduce)
    summed, column = loops.pop(position), loops[-1]
    count, width = vectors_in(int(sch.get(column).extent), lanes)
    vectors, vector = sch.split(column, [count, width])
    sch.reorder(summed, *loops[:-1], vectors, vector)
    sch.vectorize(vector)
    sch.unroll(summed)
    if count * int(sch.get(loops[-2]).extent if len(loops) > 1 else 1) <= 32:
        for loop in (*loops[-2:-1], vectors):
            sch.unroll(loop)
    return summed


def _packed(sch: s_tir.Schedule, block: SBlockRV, shape: GemmShape, tile: int, whole: bool) -> SBlockRV:
    """Copy the second operand into panels that a register tile reads in one stream; returns the copying block.

    ``B[k, j]   -->   panel[j / tile, k, j % tile]``, with zeros up to whole tiles if ``whole``. The first operand, of
    which single values are broadcast, gains nothing by that, even where it is transposed.
    """
    turned = shape.transposed[1]

    def panel(*index: tirx.Var) -> tuple[tirx.Expr, ...]:
        *batch, k, j = (*index[:-2], index[-1], index[-2]) if turned else index
        return (*batch, tirx.floordiv(j, tile), k, tirx.floormod(j, tile))

    if whole:
        sch.pad_einsum(block, [1] * (len(sch.get_loops(block)) - 2) + [tile, 1])
        (copied,) = sch.get_producers(block)
    else:
        copied = sch.cache_read(block, 1, "global")
    sch.transform_layout(block, ("read", 1), panel)
    return copied


GEMM, GEMM_INTEGER, GEMM_BYTES, GEMM_BFLOAT = Gemm(), IntegerGemm(), ByteGemm(), BfloatGemm()
