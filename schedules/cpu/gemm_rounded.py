"""Products of activations rounded to 8 bits with low-bit weights, in integer arithmetic.

The activations are rounded first, block by block, each a row's part that meets one scale. A register tile then goes
through the sum block by block, as in :mod:`schedules.cpu.gemm_weight_only`: dot products add up a block in integers,
which become float32 and are added to the result times both scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import analyse, remembered
from schedules.cpu.common import extent_of, parallel_work, parallelise
from schedules.cpu.few_bits import FewBits, chunks, heights, widths
from schedules.cpu.gemm_weight_only import PARTS, WeightOnlyGemm, fold_producers, tiled_parts
from schedules.cpu.steps import Step, with_dots
from schedules.cpu.tiling import divisors, vectors_in
from schedules.intrin import select
from schedules.intrin.dot import NIBBLES, OCTETS, dot
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions

__all__ = ["GEMM_ROUNDED", "HALVES", "OTHERS", "RoundedGemm"]

#: the names of the blocks that make the activations, in order, of which the first reads them
_STAGES = ("largest", "inverses", "rounded", "sums", "step", "shifts")
#: Of a dot product's time, that of unpacking the vector of weights that all rows of a tile share, and of loading the
#: value that all of its columns share; others' units do both (measured on AVX-512, tiles of 8 to 16 sums)
_UNPACK, _BROADCAST = 0.25, 0.2
#: dot products in the time of adding a block's sum to the result, and in that of the way through memory where registers
#: do not hold both
_ADDED, _AWAY = 2.0, 0.5
#: registers for a vector's two halves, and for constants and a broadcast value
HALVES, OTHERS = 2, 3
#: what a last tile of fewer rows costs beside its own time
_RAGGED = 1.03
#: activations that a word of weights meets, by form
_FORMS = {8: NIBBLES, 4: OCTETS}


@remembered
def _shape(func: tirx.PrimFunc, op: str, integers: str) -> FewBits | None:
    """The extents of a product annotated ``op`` that reads activations as the block of that name makes them."""
    info = analyse(func)
    product = next((block for block in info.blocks if block.annotation == op), None)
    if product is None:
        return None
    named = {block.name: block for block in info.producers(product)}
    if PARTS not in named:
        return None
    made = {block.name: block for block in info.producers(named[PARTS])}
    if integers not in made:
        return None
    *_, steps, _ = named[PARTS].extents
    *rows, columns = (product.extents[i] for i in product.spatial)
    (blocks,) = (product.extents[i] for i in product.reduced)
    panel = next(int(a.buffer.shape[-2]) for a in named[PARTS].reads if str(a.buffer.dtype) == "uint8")
    return FewBits(prod(rows), columns, blocks, steps, made[integers].extents[-1] // steps, panel, taken=4)


class RoundedGemm(WeightOnlyGemm):
    """Knobs are those of :class:`WeightOnlyGemm`."""

    name = "cpu.gemm_rounded"
    op = "dense_rounded"
    tensorizes = "dot_"
    #: the block that makes the integers that products read
    integers = "rounded"
    ahead = 0  # so few instructions lie between loads that the processor itself looks far enough

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = self.shape(func)
        if shape is None:
            return False
        lanes = min(shape.panel, cpu_machine(target).lanes())
        return select(dot(_FORMS[shape.fields], lanes), target) is not None

    def shape(self, func: tirx.PrimFunc) -> FewBits | None:
        return _shape(func, self.op, self.integers)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        """Register tiles by the arithmetic of a block of the sum."""
        shape, machine, options = self.shape(func), cpu_machine(target), []
        assert shape is not None
        for m in heights(shape):
            for n in widths(shape, machine):
                vectors = -(-n // machine.lanes())
                if self.registers(m, vectors) > machine.vector_registers:
                    continue
                full, left = divmod(shape.rows, m)
                rows = {m: full, left: 1} if left else {m: full}
                cost = sum(count * self.tile_cost(shape, machine, height, vectors) for height, count in rows.items())
                options.append((cost * (shape.columns // n) * (_RAGGED if left else 1.0), -n, m))
        options.sort()
        for _, width, m in options[:4]:
            for mb, nb, order, inner in chunks(shape, machine, m, -width):
                yield {"m": m, "n": -width, "mb": mb, "nb": nb, "k": max(divisors(shape.steps, 4)), "order": order,
                       "inner": inner}

    def registers(self, m: int, vectors: int) -> int:
        """How many vectors a tile needs at least."""
        return (m + HALVES) * vectors + OTHERS

    def tile_cost(self, shape: FewBits, machine: CpuMachine, m: int, vectors: int) -> float:
        """The time of a block of the sum, in dot products of a vector."""
        sums, each = m * vectors, shape.fields // shape.taken
        products = max(sums, machine.fma_per_cycle * machine.fma_latency) + _UNPACK * vectors + _BROADCAST * m
        added = _ADDED + (_AWAY if 2 * sums + OTHERS > machine.vector_registers else 0.0)
        return shape.steps * each * products + sums * added

    def activations(
        self, sch: s_tir.Schedule, named: Mapping[str, SBlockRV], shape: FewBits, machine: CpuMachine
    ) -> Callable[[], None]:
        found = {name: sch.get_sblock(name) for name in _STAGES}
        fold_producers(sch, found["largest"], None)
        fold_producers(sch, found["rounded"], found["inverses"])
        return lambda: _rounded(sch, found, shape, machine)

    def parts(self, sch: s_tir.Schedule, parts: SBlockRV, at: LoopRV, k: int, lanes: int) -> LoopRV:
        steps, row, vectors, *_ = tiled_parts(sch, parts, at, k, lanes)
        sch.unroll(row)
        sch.unroll(vectors)
        return steps

    def begin(
        self, sch: s_tir.Schedule, parts: SBlockRV, steps: LoopRV, shape: FewBits, target: tvm.target.Target
    ) -> None:
        with_dots(sch, parts, steps, Step(_FORMS[shape.fields], axes=1), target)


def _rounded(sch: s_tir.Schedule, found: Mapping[str, SBlockRV], shape: FewBits, machine: CpuMachine) -> None:
    """Round the activations of a block after the other, whole vectors at a time."""
    first, *others = (found[name] for name in _STAGES)
    *rows, block, within = sch.get_loops(first)
    for other in others:
        sch.reverse_compute_at(other, block, preserve_unit_loops=True)
    sch.set_scope(found["inverses"], 0, "local")
    *_, element = sch.get_loops(found["rounded"])
    _, width = vectors_in(extent_of(sch, element), machine.lanes())
    _, vector = sch.split(element, [None, width])
    sch.vectorize(vector)
    *_, added = sch.get_loops(found["sums"])
    if shape.rows * shape.depth >= parallel_work(machine):
        parallelise(sch, [*rows, block], machine.cores)
    sch.decompose_reduction(first, within)
    sch.decompose_reduction(found["sums"], added)


GEMM_ROUNDED = RoundedGemm()
