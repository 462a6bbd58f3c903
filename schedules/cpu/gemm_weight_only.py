"""Products of float32 activations with low-bit weights that become float32 just before the multiply-add.

With few rows the weights' bytes are all that counts: each vector of them is unpacked where it is used, and read once.
With more rows a register tile unpacks a vector for all of its rows. A tile goes through the sum block by block: it adds
up a block's products of integers, and then that times the block's scale to its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import BlockInfo, analyse, remembered
from schedules.cpu.common import InjectiveTile, extent_of, parallel_work, parallelise, schedule_injective
from schedules.cpu.few_bits import FewBits, chunks, heights, widths
from schedules.cpu.tiling import SHARED_SET, apart, check_tile, consumers_inlined, divisors, find_annotated
from schedules.machine import LINE_BYTES, CpuMachine, cpu_machine
from schedules.prefetch import prefetch_rows
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = [
    "AHEAD", "GEMM_WEIGHT_ONLY", "PARTS", "STREAM", "WeightOnlyGemm", "fold_producers", "in_registers", "tiled_parts",
]

#: the names of the blocks that the product reads
PARTS, _PLACED, _TOTALS = "parts", "placed", "totals"
#: The time that multiply-adds do not hide of unpacking a vector, a mask and a conversion, and of loading a value that a
#: tile's columns share, in multiply-adds, by the number of registers. Measured at 32 to 128 rows on AVX-512: 8 x 2 runs
#: at 0.8 to 0.9 of 4 x 4. To unpack a column of tiles ahead of all rows, into the second cache, takes 1.0 to 1.6 times
#: as long as to unpack in registers, on AVX2 as well: a tile of four rows or more hides most of that, and what is
#: unpacked has eight times the bytes.
_UNPACK, _BROADCAST = {16: 1.0, 32: 0.25}, {16: 0.3, 32: 0.4}
#: Time of a tile that leaves no registers for the words of two steps, where LLVM holds them in any of 32: 6 x 4 spills
_CROWDED = 1.1
#: registers for a broadcast value and what is on its way from a word to a multiply-add
_TEMPORARY = 2
#: the time of adding a block's sum to the result, on its way through memory, in multiply-adds
_ADDED = 3.0
#: Vectors of words that the body of the loop over them may hold at one row; the arithmetic of several hides the moves.
#: LLVM loads them all before it unpacks the first: 16 vectors spill and take 1.19 times the time of 8 (AVX-512), and 4
#: take 1.07 times that of 8 (AVX2)
_HELD_WORDS = 8
#: what a last tile of fewer rows costs beside its own time
_RAGGED = 1.1
#: How many bytes ahead of a tile its weights are fetched: the prefetcher alone is not far enough, since between the
#: loads of a block and of the next are more instructions than the processor looks ahead. Measured on Zen 5, a row by
#: 4096 x 4096 of 4 bits from memory: 0.75 of the time of a tile of four panels without (AVX-512), 0.84 (AVX2, one
#: panel); 4 kB to 32 kB are alike
AHEAD = 8192
#: what another panel that a tile of a row reads costs: of one stream as many fetches reach further ahead
STREAM = 1.05
#: cache lines of a block at most, of which each is asked for at once
_MOST_LINES = 64
#: bytes of a column's word of weights
_WORD = 4


@remembered
def _shape(func: tirx.PrimFunc) -> FewBits | None:
    info = analyse(func)
    product = next((block for block in info.blocks if block.annotation == WeightOnlyGemm.op), None)
    if product is None:
        return None
    named = {block.name: block for block in info.producers(product)}
    if PARTS not in named or set(named) - {PARTS, _TOTALS}:
        return None
    *_, steps, fields = named[PARTS].extents
    *rows, columns = (product.extents[i] for i in product.spatial)
    (blocks,) = (product.extents[i] for i in product.reduced)
    return FewBits(prod(rows), columns, blocks, steps, fields, _panel(named[PARTS]))


def _panel(parts: BlockInfo) -> int:
    return next(int(a.buffer.shape[-1]) for a in parts.reads if str(a.buffer.dtype) == "uint32")


class WeightOnlyGemm(Space):
    """Knobs: ``m`` rows and ``n`` columns of the register tile, ``mb`` row tiles and ``nb`` column tiles of one
    parallel chunk, ``k`` words that are unrolled, ``order`` which axis varies fastest over the parallel chunks (0:
    columns, 1: rows), ``inner`` which tile loop is inside a chunk (0: columns, 1: rows)."""

    name = "cpu.gemm_weight_only"
    target_kind = "llvm"
    op = "dense_weight_only"
    #: bytes ahead of a tile that weights are fetched; 0: not at all
    ahead = AHEAD

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return self.shape(func) is not None

    def shape(self, func: tirx.PrimFunc) -> FewBits | None:
        """The extents of ``func``, if it is a product of this space's kind."""
        return _shape(func)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = self.shape(func)
        assert shape is not None
        tall, wide = heights(shape), self.widths(shape, cpu_machine(target))
        return (
            Knob("m", tuple(tall)),
            Knob("n", tuple(wide)),
            Knob("mb", tuple(sorted({d for m in tall for d in divisors(-(-shape.rows // m), 64)}))),
            Knob("nb", tuple(sorted({d for n in wide for d in divisors(shape.columns // n, 64)}))),
            Knob("k", tuple(divisors(shape.steps, 4))),
            Knob("order", (0, 1)),
            Knob("inner", (0, 1)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = self.shape(func)
        assert shape is not None
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        shape, machine = self.shape(sch.mod["main"]), cpu_machine(target)
        assert shape is not None
        m, n, mb, nb, k, order, inner = (pick(name) for name in ("m", "n", "mb", "nb", "k", "order", "inner"))
        if -(-shape.rows // m) % mb or shape.columns // n % nb:
            raise InvalidDecision("a parallel chunk must hold whole register tiles")
        lanes = min(n, machine.lanes())
        self.check(machine, m, n // lanes, k * shape.fields // shape.taken)
        product = find_annotated(sch, (self.op,))
        assert product is not None
        named = {str(sch.get(block).name_hint): block for block in sch.get_producers(product)}
        parts = named[PARTS]
        finish = self.activations(sch, named, shape, machine)
        out = consumers_inlined(sch, product)

        *batch, i, j = sch.get_loops(out)
        chunk_i, outer_i, row = sch.split(i, [None, mb, m])
        chunk_j, outer_j, vectors, vector = sch.split(j, [None, nb, n // lanes, lanes])
        grid = (chunk_i, chunk_j) if order == 0 else (chunk_j, chunk_i)
        tiles = (outer_i, outer_j) if inner == 0 else (outer_j, outer_i)
        sch.reorder(*batch, *grid, *tiles, row, vectors, vector)
        in_registers(sch, [row, vectors], vector)
        if shape.rows % m:  # lowering peels the ragged tile, so that full ones test nothing
            sch.annotate(outer_i, "pragma_loop_partition_hint", True)
        block = _product(sch, product, tiles[-1], lanes)
        self.fetch(sch, block, shape, n)
        steps = self.parts(sch, parts, block, k, lanes)
        chunk = sch.fuse(*batch, *grid)
        if extent_of(sch, chunk) > 1 and shape.rows * shape.columns * shape.depth >= parallel_work(machine):
            sch.parallel(chunk)
        finish()
        sch.decompose_reduction(product, block)
        self.begin(sch, parts, steps, shape, target)

    def widths(self, shape: FewBits, machine: CpuMachine) -> list[int]:
        """The columns that a register tile may have."""
        return widths(shape, machine)

    def check(self, machine: CpuMachine, m: int, vectors: int, unroll: int) -> None:
        """Raise :class:`InvalidDecision` for a tile that does not fit the registers."""
        check_tile(machine, m * vectors, unroll)

    def activations(
        self, sch: s_tir.Schedule, named: Mapping[str, SBlockRV], shape: FewBits, machine: CpuMachine
    ) -> Callable[[], None]:
        """Fold what makes the activations into the blocks that prepare them; returns what lays those out, to be called
        after the tile is made. ``named`` are the blocks that the product reads."""
        parts, totals = named[PARTS], named.get(_TOTALS)
        placed = next((b for b in sch.get_producers(parts) if str(sch.get(b).name_hint) == _PLACED), None)
        for reader in (parts, placed, totals):
            fold_producers(sch, reader, placed)

        def finish() -> None:
            for block, start in _totals(sch, totals, shape, machine) if totals is not None else ():
                sch.decompose_reduction(block, start)
            if placed is not None:
                schedule_injective(sch, placed, machine, InjectiveTile())

        return finish

    def fetch(self, sch: s_tir.Schedule, block: LoopRV, shape: FewBits, n: int) -> None:
        """Fetch weights ahead of a tile of ``n`` columns, in its loop over the blocks of the sum."""
        weight, item = next((i, size) for i, param in enumerate(sch.mod["main"].params)
                            if (size := {"uint8": 1, "uint32": 4}.get(str(param.dtype))))
        rows = shape.steps * shape.panel * _WORD  # bytes of a block of a panel
        lines = rows // LINE_BYTES
        if self.ahead and n % shape.panel == 0 and lines <= _MOST_LINES:
            places = [(at * shape.blocks * rows + self.ahead) // item for at in range(n // shape.panel)]
            prefetch_rows(sch, block, [(weight, place) for place in places], lines)

    def parts(self, sch: s_tir.Schedule, parts: SBlockRV, at: LoopRV, k: int, lanes: int) -> LoopRV:
        """A tile of the part of a block of the sum, computed at the loop over blocks; returns the loop to initialise it
        before."""
        steps, row, vectors, vector, field = tiled_parts(sch, parts, at, k, lanes)
        sch.reorder(field, row, vectors, vector)
        in_registers(sch, [field, row, vectors], vector)
        return steps

    def begin(
        self, sch: s_tir.Schedule, parts: SBlockRV, steps: LoopRV, shape: FewBits, target: tvm.target.Target
    ) -> None:
        """Set the sums of a block to zero before the loop over its ``steps``."""
        sch.decompose_reduction(parts, steps)


def fold_producers(sch: s_tir.Schedule, reader: SBlockRV | None, kept: SBlockRV | None) -> None:
    """Fold what makes the activations into a block that reads them; ``kept`` stays a block."""
    if reader is None:
        return
    while before := [b for b in sch.get_producers(reader) if kept is None or not sch.get(b).same_as(sch.get(kept))]:
        for producer in before:
            sch.compute_inline(producer)


def in_registers(sch: s_tir.Schedule, loops: list[LoopRV], vector: LoopRV) -> None:
    sch.vectorize(vector)
    for loop in loops:
        sch.unroll(loop)


def _product(sch: s_tir.Schedule, product: SBlockRV, at: LoopRV, lanes: int) -> LoopRV:
    """A register tile of the product; returns the loop over the blocks of its sum."""
    sch.compute_at(product, at, preserve_unit_loops=True)
    *_, row, column, block = sch.get_loops(product)
    vectors, vector = sch.split(column, [None, lanes])
    sch.reorder(block, row, vectors, vector)
    in_registers(sch, [row, vectors], vector)
    return block


def tiled_parts(
    sch: s_tir.Schedule, parts: SBlockRV, at: LoopRV, k: int, lanes: int
) -> tuple[LoopRV, LoopRV, LoopRV, LoopRV, LoopRV]:
    """Compute a block's part of a tile at that loop, ``k`` words unrolled; returns the loops over the others, over
    rows, vectors and a vector's lanes, and over what is within a word."""
    sch.compute_at(parts, at, preserve_unit_loops=True)
    sch.set_scope(parts, 0, "local")
    *_, row, one, column, steps, field = sch.get_loops(parts)
    vectors, vector = sch.split(column, [None, lanes])
    steps, step = sch.split(steps, [None, k])
    sch.reorder(one, steps, step, row, vectors, vector, field)
    sch.unroll(step)
    return steps, row, vectors, vector, field


def _totals(
    sch: s_tir.Schedule, totals: SBlockRV, shape: FewBits, machine: CpuMachine
) -> list[tuple[SBlockRV, LoopRV]]:
    """Add up the activations of a block, whole vectors first; returns what is added up, each with the loop over it."""
    *rows, block, summed = sch.get_loops(totals)
    lanes, starts = machine.lanes(), []
    if extent_of(sch, summed) % lanes == 0:
        _, lane = sch.split(summed, [None, lanes])
        vectors = sch.rfactor(lane, len(sch.get(totals).iter_vars) - 1)
        sch.set_scope(vectors, 0, "local")
        *rows, block, summed = sch.get_loops(totals)
        sch.compute_at(vectors, block, preserve_unit_loops=True)
        *_, lane, step = sch.get_loops(vectors)
        sch.reorder(step, lane)
        sch.vectorize(lane)
        starts.append((vectors, step))
    if shape.rows * shape.depth >= parallel_work(machine):
        parallelise(sch, [*rows, block], machine.cores)
    return [*starts, (totals, summed)]


def _seeds(shape: FewBits, machine: CpuMachine) -> Iterator[Decisions]:
    """Register tiles by the arithmetic of a field: multiply-adds, and unpacking of each vector."""
    lanes, options = machine.lanes(), []
    unpack, broadcast = (times.get(machine.vector_registers, times[16]) for times in (_UNPACK, _BROADCAST))
    for m in heights(shape):
        for n in widths(shape, machine):
            vectors = -(-n // lanes)
            if m * vectors + vectors + _TEMPORARY > machine.vector_registers:
                continue
            cost = 0.0
            for height in {m: shape.rows // m, shape.rows % m: 1} if shape.rows % m else {m: shape.rows // m}:
                tiles = 1 if height == shape.rows % m else shape.rows // m
                busy = machine.fma_per_cycle * machine.fma_latency
                step = max(height * vectors + unpack * vectors, busy) + broadcast * height
                step += _ADDED * height * vectors / (shape.steps * shape.fields)
                cost += step * tiles
            if machine.vector_registers >= 32 and (m + 2) * vectors + _TEMPORARY > machine.vector_registers:
                cost *= _CROWDED
            if not apart(machine, m, shape.depth * shape.item):
                cost *= SHARED_SET
            cost *= STREAM ** (-(-n // shape.panel) - 1) if m == 1 else 1.0
            options.append((cost * (shape.columns // n) * (_RAGGED if shape.rows % m else 1.0), -n, m))
    options.sort()
    for _, width, m in options[:4]:
        n = -width
        k = max(d for d in divisors(shape.steps, 2) if d == 1 or m > 1 or d * n <= _HELD_WORDS * lanes)
        for mb, nb, order, inner in chunks(shape, machine, m, n):
            yield {"m": m, "n": n, "mb": mb, "nb": nb, "k": k, "order": order, "inner": inner}


GEMM_WEIGHT_ONLY = WeightOnlyGemm()
