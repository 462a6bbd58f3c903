"""The space that matches everything: every block is scheduled on its own, as far as TVM proves that to be safe.

Injective blocks are inlined where that pays, then each remaining block is scheduled alone: vectorised, and parallel
where there is enough work. A block that cannot be understood (a sort, a scan, a call into a library) stays as it is,
and so does everything in a function that is no sequence of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import analyse, is_empty, nest_of
from schedules.cpu.common import attempt, extent_of, has_block, inline_injective, parallel_work, vectorise, work
from schedules.cpu.rows import RowTile
from schedules.cpu.standalone import schedule_block
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["FALLBACK"]


class Fallback(Space):
    """Knobs: ``vector`` registers a step, ``lanes`` registers of a sum's partial results, ``parallel``."""

    name = "cpu.fallback"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return True

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return (Knob("vector", (1, 2, 4)), Knob("lanes", (1, 2, 4)), Knob("parallel", (0, 1)))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        yield {"vector": 2, "lanes": 2, "parallel": 1}
        yield {"vector": 1, "lanes": 4, "parallel": 1}
        yield {"vector": 1, "lanes": 1, "parallel": 0}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        vector, lanes, parallel = pick("vector"), pick("lanes"), bool(pick("parallel"))
        func = sch.mod["main"]
        if not isinstance(func.body, s_tir.SBlockRealize) or is_empty(func):
            return
        info, machine = analyse(func), cpu_machine(target)
        if info.plain:
            inline_injective(sch, info)
            rows = RowTile(lanes=lanes, vector=vector, parallel=parallel)
            for block in info.blocks:
                if has_block(sch, block.name):
                    # where it fails half-way, what was done so far is legal and stays
                    with suppress(s_tir.ScheduleError, InvalidDecision):
                        schedule_block(sch, block, machine, rows)
            return
        for rv in sch.get_child_blocks(sch.get_sblock(str(func.body.block.name_hint))):
            with suppress(s_tir.ScheduleError):
                _outer(sch, rv, machine, vector, parallel)


def _outer(sch: s_tir.Schedule, block: SBlockRV, machine: CpuMachine, vector: int, parallel: bool) -> None:
    """Parallel outer and vectorised inner loops for one block among others that are not understood."""
    nest = nest_of(sch, block)
    leading: list[LoopRV] = []
    for loop in nest.loops:
        if loop.kind != "S" or extent_of(sch, loop.rv) == 0:
            break
        leading.append(loop.rv)
    if not leading:
        return
    amount = prod(loop.extent for loop in nest.loops)
    *outer, last = leading
    # memory of the block's own is one for all lanes
    innermost = len(leading) == len(nest.loops) and not sch.get(block).alloc_buffers
    if outer and parallel and machine.cores > 1 and work(amount, nest.expensive) >= parallel_work(machine):
        attempt(lambda: sch.parallel(sch.fuse(*outer) if len(outer) > 1 else outer[0]))
    if innermost:
        vectorise(sch, last, machine.lanes(str(nest.writes[0].buffer.dtype)), vector)


FALLBACK = Fallback()
