"""Matrix products with instructions that multiply two rows by two columns: ``usmmla`` and ``bfmmla`` of aarch64.

The functions are those of :mod:`schedules.cpu.gemm`'s dot products, with weights packed in deeper steps. One
instruction adds twice the products of a dot product to as many sums, ``[[c00, c01], [c10, c11]]``. A register tile
holds its sums that way over the whole of the sum; what reads them takes rows of vectors out of it, which LLVM makes
permutations of registers. Rows must make whole pairs: the graph pads them.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import analyse
from schedules.cpu.common import InjectiveTile, extent_of, schedule_injective
from schedules.cpu.gemm import IntegerGemm, Tile
from schedules.cpu.gemm_shape import BFLOAT, INTEGER, GemmShape, dot_shape
from schedules.cpu.tiling import check_tile, consumers_inlined, find_annotated
from schedules.intrin import select, use
from schedules.intrin.matrix import BYTE_PAIRS, COLUMNS, DEPTHS, ROWS, product
from schedules.machine import cpu_machine
from schedules.space import InvalidDecision, Pick

__all__ = ["GEMM_MATRIX", "pays"]

#: part of their peak that both instructions reach, and what pairs must gain, whose rates are a manual's
_REACHED, _GAIN = 0.85, 1.25
#: bytes of a step of the sum
_STEP = 8
#: time of joining two rows' operands, which a tile's columns share, over that of a product
_JOINED = 1 / 8


def pays(m: int, n: int, depth: int, form: str, target: tvm.target.Target) -> bool:
    """Whether a product of ``m`` rows, padded to whole pairs, by ``n`` columns of a packed weight of so many rows is
    faster two rows at a time than by dot products."""
    machine = cpu_machine(target)
    if m < ROWS or not machine.matrix_per_cycle or select(product(form), target) is None:
        return False
    steps, item = -(-depth // DEPTHS[form][1]), _STEP // DEPTHS[form][1]
    # pairs of bfloat16 are multiplied as two of float32 where that is faster
    dots = machine.dot_per_cycle if form == BYTE_PAIRS else max(machine.bfloat_per_cycle, machine.fma_per_cycle / 2)
    if not dots:
        return True
    each = m * n * steps * 2 / (dots * machine.lanes() * _REACHED)  # which take half of a step
    pairs = -(-m // ROWS) * -(-n // COLUMNS) * steps * (1 + _JOINED) / (machine.matrix_per_cycle * _REACHED)
    fetched = n * depth * item / machine.l2_rate  # the weight, whichever multiplies it
    return max(pairs, fetched) * _GAIN <= max(each, fetched)


class MatrixGemm(IntegerGemm):
    """Knobs are those of :class:`~schedules.cpu.gemm.Gemm`; ``k`` counts steps of eight bytes of each row."""

    name = "cpu.gemm_matrix"
    tensorizes = "matrix_"
    free_sizes = False
    ops = (INTEGER, BFLOAT)

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = self.shape(func)
        if shape is None or shape.step.rows != ROWS or shape.m % ROWS:
            return False
        if select(product(shape.step.form), target) is None:
            return False
        block = next(b for b in analyse(func).blocks if b.annotation in self.ops)
        return block.reduces[-shape.step.axes :] == (True,) * shape.step.axes

    def shape(self, func: tirx.PrimFunc) -> GemmShape | None:
        return next((shape for op in self.ops if (shape := dot_shape(func, op)) is not None), None)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        func = sch.mod["main"]
        shape, block = self.shape(func), find_annotated(sch, self.ops)
        assert shape is not None and block is not None
        machine = cpu_machine(target)
        tile = Tile(**{knob.name: pick(knob.name) for knob in self.knobs(func, target)})
        lanes = machine.lanes(shape.dtype)
        if -(-shape.m // tile.m) % tile.mb or shape.n // tile.n % tile.nb or shape.k % tile.k:
            raise InvalidDecision("a parallel chunk must hold whole register tiles, and a loop whole steps")
        check_tile(machine, tile.m * -(-tile.n // lanes), tile.k)
        stage = self.stage(sch, block, tile)
        out = consumers_inlined(sch, block)
        _in_pairs(sch, block)

        *batch, i, j = sch.get_loops(out)
        width = min(lanes, tile.n)
        chunk_i, outer_i, pairs, row = sch.split(i, [None, tile.mb, tile.m // ROWS, ROWS])
        chunk_j, outer_j, vectors, vector = sch.split(j, [None, tile.nb, tile.n // width, width])
        grid = (chunk_i, chunk_j) if tile.order == 0 else (chunk_j, chunk_i)
        tiles = (outer_i, outer_j) if tile.inner == 0 else (outer_j, outer_i)
        sch.reorder(*batch, *grid, *tiles, pairs, row, vectors, vector)
        sch.vectorize(vector)
        for loop in (pairs, row, vectors):
            sch.unroll(loop)
        if shape.m % tile.m:  # lowering peels the ragged tile, so that full ones test nothing
            sch.annotate(outer_i, "pragma_loop_partition_hint", True)
        sch.compute_at(block, tiles[-1], preserve_unit_loops=True)
        *_, row_pairs, column_pairs, row, column, steps, within = sch.get_loops(block)
        start, step = sch.split(steps, [None, tile.k])
        sch.reorder(start, step, column_pairs, row_pairs, row, column, within)
        for loop in (step, row_pairs, column_pairs):
            sch.unroll(loop)
        chunk = sch.fuse(*batch, *grid)
        if extent_of(sch, chunk) > 1:
            sch.parallel(chunk)
        if stage is not None:
            schedule_injective(sch, stage, machine, InjectiveTile())
        _tensorised(sch, sch.blockize(row), start, shape, target)


def _in_pairs(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Make pairs of rows and of columns axes of their own, and two by two sums lie one after the other: a vector."""

    def place(*index: tirx.Var) -> tuple[tirx.Expr, ...]:
        *batch, i, j = index
        return (*batch, tirx.floordiv(i, ROWS), tirx.floordiv(j, COLUMNS), tirx.floormod(i, ROWS),
                tirx.floormod(j, COLUMNS))

    axes = [axis.var for axis in sch.get(block).iter_vars]
    types, *_ = (str(axis.ty) for axis in axes)
    mapped = tirx.IndexMap.from_func(lambda *index: [*place(*index[:-2]), *index[-2:]], len(axes), index_dtype=types)
    sch.transform_block_layout(block, mapped)
    sch.transform_layout(block, ("write", 0), place)


def _tensorised(
    sch: s_tir.Schedule, whole: SBlockRV, start: LoopRV, shape: GemmShape, target: tvm.target.Target
) -> None:
    """Set the sums to zero before the loop ``start``, and make each block of them an instruction's."""
    initial = sch.decompose_reduction(whole, start)
    (zeros,) = sch.get_child_blocks(initial)
    *_, row, column = sch.get_loops(zeros)
    sch.vectorize(sch.fuse(row, column))
    (products,) = sch.get_child_blocks(whole)
    name = select(product(shape.step.form), target)
    if name is None:
        raise InvalidDecision(f"the target must have {product(shape.step.form)}, a product of pairs")
    sch.tensorize(sch.get_loops(products)[0], use(name))


GEMM_MATRIX = MatrixGemm()
