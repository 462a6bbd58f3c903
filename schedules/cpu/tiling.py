"""The register-tiled contraction: what GEMM and direct convolution share.

A contraction block accumulates into a small tile of vectors that LLVM keeps in registers; the block that writes
the result (the fused epilogue, or a copy) is tiled, and the contraction is computed at its innermost tile loop.
This is the micro-kernel of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tvm import s_tir

from schedules.cpu.steps import FLOAT, Step
from schedules.machine import CpuMachine
from schedules.prefetch import prefetch_ahead
from schedules.space import InvalidDecision

__all__ = [
    "OP_ANNOTATION", "SHARED_SET", "accumulate", "accumulator_budget", "apart", "check_tile", "consumers_inlined",
    "divisors", "find_annotated", "staged_input", "tile_fits", "vectors_in",
]

OP_ANNOTATION = "mlc.op"


def divisors(extent: int, limit: int) -> list[int]:
    """The divisors of ``extent`` up to ``limit``, ascending."""
    return [d for d in range(1, min(extent, limit) + 1) if extent % d == 0]


def find_annotated(sch: s_tir.Schedule, ops: Sequence[str]) -> s_tir.schedule.SBlockRV | None:
    """The block whose ``mlc.op`` annotation is one of ``ops``."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        annotations = sch.get(block).annotations
        if OP_ANNOTATION in annotations and str(annotations[OP_ANNOTATION]) in ops:
            return block
    return None


def consumers_inlined(sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> s_tir.schedule.SBlockRV:
    """Fold the elementwise consumers of ``block`` into one and return it; a local copy where there is none.

    ``C = A @ B; R = X * 2; D = C + R; E = relu(D)   -->   C = A @ B; E = relu(C + X * 2)``
    """
    last = block
    while True:
        consumers = sch.get_consumers(last)
        if not consumers:
            break
        pending = [c for c in consumers if sch.get_consumers(c)]
        if len(consumers) == 1 or not pending:
            following = consumers[0]
            if last is not block:
                sch.compute_inline(last)
            last = following
        else:  # several readers (x * sigmoid(x)): inline the ones that are themselves read
            sch.compute_inline(pending[0])
    if last is block:
        sch.cache_write(block, 0, "local")
        (last,) = sch.get_consumers(block)
        return last
    while beside := [p for p in sch.get_producers(last) if not sch.get(p).same_as(sch.get(block))]:
        for producer in beside:
            sch.compute_inline(producer)
    sch.set_scope(block, 0, "local")
    return last


def staged_input(sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> s_tir.schedule.SBlockRV:
    """The block that makes the input of ``block``, with every block before it folded in.

    ``B = A * scale; C = relu(B); D = pad(C)   -->   D = pad(relu(A * scale))``
    """
    (stage,) = sch.get_producers(block)
    while before := sch.get_producers(stage):
        for producer in before:
            sch.compute_inline(producer)
    return stage


def vectors_in(extent: int, lanes: int) -> tuple[int, int]:
    """How an innermost axis is cut into vectors: ``(count, width)`` with ``count * width == extent``."""
    width = next(w for w in (lanes, lanes // 2, lanes // 4, 1) if w and extent % w == 0)
    return extent // width, width


def accumulator_budget(machine: CpuMachine) -> int:
    """Registers for accumulators plus the operand vectors that are live beside them.

    Measured on AVX-512: a tile of 26 with two weight vectors ran at 60% of one with 24, since LLVM hoists
    broadcasts and then spills; with 16 registers, 12 and two is the largest that does not spill.
    """
    return machine.vector_registers - (6 if machine.vector_registers >= 32 else 2)


def tile_fits(machine: CpuMachine, rows: int, vectors: int, chains: int = 1, step: Step = FLOAT) -> bool:
    """Whether a tile of ``rows`` broadcast values by ``vectors`` stays in registers with the operands it needs.

    Measured: 8x3, 6x4 and 12x2 of 32 registers run at one speed, 26x1 spills. With 16 registers LLVM keeps the vectors
    of a step and one broadcast value beside the accumulators: 6x2 and 4x3 are the largest, 2x6 runs at 0.65 of them.
    Vectors that one row alone reads are operands in memory. ``chains`` sums are held for each element.
    """
    accumulators, wide = rows * vectors * chains, machine.vector_registers >= 32
    if accumulators > machine.vector_registers * 3 // 4 or not step.fits(machine, accumulators, vectors):
        return False
    return min(rows * chains, vectors) <= 4 if wide else rows == 1 or accumulators + vectors < machine.vector_registers


#: time of a tile whose rows of A are too many for the set of the first cache that they share
SHARED_SET = 1.5


def apart(machine: CpuMachine, rows: int, row_bytes: int) -> bool:
    """Whether the lines that ``rows`` of A are read from all find a place in the first cache: rows a multiple of a way
    apart share one set of at least eight lines."""
    places = machine.way_bytes // gcd(machine.way_bytes, row_bytes)
    return rows <= max(8, machine.l1_bytes // machine.way_bytes) * places


#: multiply-adds of one unrolled loop body: beyond this the build takes seconds and the code leaves the µop cache
_MAX_BODY = 512


def check_tile(machine: CpuMachine, accumulators: int, unroll: int) -> None:
    """Raise :class:`InvalidDecision` for a tile that must spill most of its accumulators, or is too much code."""
    if accumulators > machine.vector_registers * 5 // 4:
        raise InvalidDecision(f"{accumulators} accumulators do not fit {machine.vector_registers} registers")
    if accumulators * unroll > _MAX_BODY:
        raise InvalidDecision(f"a loop body of {accumulators * unroll} multiply-adds is too long")


def accumulate(
    sch: s_tir.Schedule,
    block: s_tir.schedule.SBlockRV,
    at: s_tir.schedule.LoopRV,
    spatial: int,
    lanes: int,
    unroll_reduction: int,
    fetched: tuple[int, int, int] | None = None,
    step: Step = FLOAT,
) -> s_tir.schedule.LoopRV:
    """Compute ``block`` at loop ``at`` with its tile in registers; returns the loop to initialise it before.

    ``spatial`` is the number of the block's data-parallel axes, the last of which is cut into vectors of ``lanes``;
    the others are unrolled. The innermost axis of the sum outside a ``step`` is unrolled ``unroll_reduction`` times.
    ``fetched`` is a parameter's number, how many of its blocks a tile reads and how many further the next tile's lie,
    to be fetched meanwhile. The caller ends with ``sch.decompose_reduction(block, loop)``, which
    :func:`schedules.cpu.steps.with_dots` does for any step, after which TVM refuses primitives on the enclosing loops.
    """
    sch.compute_at(block, at, preserve_unit_loops=True)
    loops = sch.get_loops(block)
    depth = len(sch.get_loops(block)) - len(sch.get(block).iter_vars)
    tile = loops[depth : depth + spatial]
    reduction = loops[depth + spatial : len(loops) - step.axes]
    count, width = vectors_in(int(sch.get(tile[-1]).extent), lanes)
    vectors, vector = sch.split(tile[-1], [count, width])
    inner_extent = int(sch.get(reduction[-1]).extent)
    if inner_extent % unroll_reduction:
        raise InvalidDecision(f"the reduction axis of {inner_extent} must be a multiple of {unroll_reduction}")
    outer, inner = sch.split(reduction[-1], [None, unroll_reduction])
    sch.reorder(*reduction[:-1], outer, inner, *tile[:-1], vectors, vector)
    if not step.form:
        sch.vectorize(vector)
    for loop in (inner, *tile[:-1], vectors):
        sch.unroll(loop)
    if fetched is not None:
        prefetch_ahead(sch, outer, *fetched)
    return reduction[0] if len(reduction) > 1 else outer
