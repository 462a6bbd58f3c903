"""Products of float32 activations with 4-bit codes that are looked up in a table of 16 numbers in registers.

A register tile goes through the sum block by block, as in :mod:`schedules.cpu.gemm_weight_only`; each vector of words
is looked up once for all of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import analyse, remembered
from schedules.cpu.common import InjectiveTile, extent_of, schedule_injective
from schedules.cpu.few_bits import FewBits, chunks, heights
from schedules.cpu.gemm_weight_only import PARTS, WeightOnlyGemm, in_registers, tiled_parts
from schedules.cpu.tiling import check_tile
from schedules.intrin import select, use
from schedules.intrin.lookup import FIELDS, lookup
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision

__all__ = ["GEMM_LOOKUP"]

#: the names of the blocks that the sum reads: numbers of the table, and activations filled up to whole words
_NUMBERS, _PLACED = "numbers", "placed"
#: numbers of the table; vectors for words, what is made of them, and the value that a row's products share
_TABLE, _OTHERS = 16, 3
#: Rows from which on LLVM keeps the loop over a panel's vectors. It would unroll it for fewer, and look up all vectors
#: before it multiplies the first, so that most wait on the stack (AVX2)
_TALL = 3
#: rows of the tallest tile: others have no registers left for a word's numbers, which are looked up before the first is
#: multiplied
_TALLEST = 8
#: multiply-adds in the time of a lookup, and what a last tile of fewer rows costs beside its own time
_LOOKUP, _RAGGED = 4.0, 1.1


@remembered
def _shape(func: tirx.PrimFunc) -> FewBits | None:
    info = analyse(func)
    product = next((block for block in info.blocks if block.annotation == LookupGemm.op), None)
    if product is None:
        return None
    parts = next((block for block in info.producers(product) if block.name == PARTS), None)
    if parts is None or not any(block.name == _NUMBERS for block in info.producers(parts)):
        return None
    *_, steps, fields = parts.extents
    *rows, columns = (product.extents[i] for i in product.spatial)
    (blocks,) = (product.extents[i] for i in product.reduced)
    numbers = next(access.buffer for access in parts.reads if access.buffer.name == _NUMBERS)
    return FewBits(prod(rows), columns, blocks, steps, fields, int(numbers.shape[-1]))


class LookupGemm(WeightOnlyGemm):
    """Knobs are those of :class:`WeightOnlyGemm`."""

    name = "cpu.gemm_lookup"
    op = "dense_lookup"
    tensorizes = "lookup"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = self.shape(func)
        return shape is not None and _intrinsic(min(shape.panel, cpu_machine(target).lanes()), target) is not None

    def shape(self, func: tirx.PrimFunc) -> FewBits | None:
        return _shape(func)

    def widths(self, shape: FewBits, machine: CpuMachine) -> list[int]:
        """A panel, whose words are one stream."""
        return [shape.panel]

    def check(self, machine: CpuMachine, m: int, vectors: int, unroll: int) -> None:
        check_tile(machine, m, unroll)
        if m > _TALLEST:
            raise InvalidDecision(f"a tile must have at most {_TALLEST} rows beside what it looks up, got {m}")

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        """Register tiles by what a vector of words takes: its lookups once, and a multiply-add for each row."""
        shape, machine, options = self.shape(func), cpu_machine(target), []
        assert shape is not None
        for m in (height for height in heights(shape) if height <= _TALLEST):
            full, left = divmod(shape.rows, m)
            cost = full * (_LOOKUP + m) + (_LOOKUP + left) * bool(left)
            options.append((cost * (_RAGGED if left else 1.0), -m))
        options.sort()
        for _, height in options[:4]:
            for mb, nb, order, inner in chunks(shape, machine, -height, shape.panel):
                yield {"m": -height, "n": shape.panel, "mb": mb, "nb": nb, "k": 1, "order": order, "inner": inner}

    def activations(
        self, sch: s_tir.Schedule, named: Mapping[str, SBlockRV], shape: FewBits, machine: CpuMachine
    ) -> Callable[[], None]:
        placed = None
        for producer in sch.get_producers(named[PARTS]):
            name = str(sch.get(producer).name_hint)
            if name == _PLACED:
                placed = producer
            elif name != _NUMBERS:
                _inline(sch, producer)
        for producer in sch.get_producers(placed) if placed is not None else ():
            _inline(sch, producer)

        def finish() -> None:
            if placed is not None:
                schedule_injective(sch, placed, machine, InjectiveTile())

        return finish

    def parts(self, sch: s_tir.Schedule, parts: SBlockRV, at: LoopRV, k: int, lanes: int) -> LoopRV:
        steps, row, vectors, vector, field = tiled_parts(sch, parts, at, k, lanes)
        sch.reorder(vectors, field, row, vector)
        in_registers(sch, [field, row], vector)
        return steps

    def begin(
        self, sch: s_tir.Schedule, parts: SBlockRV, steps: LoopRV, shape: FewBits, target: tvm.target.Target
    ) -> None:
        """Look up a vector of words before it is multiplied."""
        numbers = next(b for b in sch.get_producers(parts) if str(sch.get(b).name_hint) == _NUMBERS)
        *_, step, vectors, _field, row, vector = sch.get_loops(parts)
        lanes, m, count = (extent_of(sch, loop) for loop in (vector, row, vectors))
        sch.compute_at(numbers, vectors, preserve_unit_loops=True)
        sch.set_scope(numbers, 0, "local")
        *_, field, _lane = sch.get_loops(numbers)
        sch.decompose_reduction(parts, steps)
        name = _intrinsic(lanes, target)
        if name is None:
            raise InvalidDecision(f"the target must have {lookup(lanes)}, a lookup of {lanes} lanes")
        sch.tensorize(field, use(name))
        machine = cpu_machine(target)
        held = _TABLE // lanes + _OTHERS
        if max(count * FIELDS, m * count + FIELDS) + held <= machine.vector_registers:
            sch.unroll(vectors)
        elif m < _TALL:
            sch.fuse(steps, step, vectors)


def _intrinsic(lanes: int, target: tvm.target.Target) -> str | None:
    return select(lookup(lanes), target)


def _inline(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Fold a block, and what it reads, into what reads it."""
    while before := sch.get_producers(block):
        for producer in before:
            sch.compute_inline(producer)
    sch.compute_inline(block)


GEMM_LOOKUP = LookupGemm()
