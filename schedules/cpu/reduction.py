"""Reductions and normalisations (softmax, layer norm, mean, argmax, global pooling), with what is fused around them.

The whole function is one pass over the rows that the reductions leave (see :mod:`schedules.cpu.rows`): a row is
read, reduced and written while it is in the first cache. With fewer rows than cores, each block stands alone and
long sums are shared out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import tvm
from tvm import s_tir, tirx

from schedules.analysis import BlockInfo, FuncInfo, analyse
from schedules.cpu.common import has_block, inline_block, inline_injective, parallel_work, work
from schedules.cpu.rows import RowTile, schedule_rows
from schedules.cpu.standalone import schedule_block
from schedules.machine import cpu_machine
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["REDUCTION"]


class Reduction(Space):
    """Knobs: ``lanes`` registers of partial results of a sum, ``fold`` the width of a second, narrower step (0: none),
    ``vector`` registers a step in the other stages, ``recompute`` (1: slow intermediates are computed again where
    they are read, not stored), ``ahead`` (1: rows to come are fetched from memory while one is computed),
    ``parallel``."""

    name = "cpu.reduction"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        info = analyse(func)
        return (
            info.plain and len(info.outputs) == 1 and bool(info.reductions)
            and not any(b.windowed for b in info.reductions)
            and (len(info.reductions) == 1 or not any(b.contraction for b in info.reductions))
        )

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        info = analyse(func)
        knobs = [Knob("lanes", (1, 2, 4)), Knob("fold", (0, 4, 8)), Knob("vector", (1, 2, 4))]
        if any(b.expensive and len(info.consumers(b)) > 1 for b in info.blocks if b.kind == "injective"):
            knobs.append(Knob("recompute", (0, 1)))
        machine = cpu_machine(target)
        if _touched(func) >= machine.l1_bytes:
            knobs.append(Knob("ahead", (0, 1)))
        if _work(info) >= parallel_work(machine) // 4:
            knobs.append(Knob("parallel", (0, 1)))
        return tuple(knobs)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        names = {k.name for k in self.knobs(func, target)}
        parallel = _work(analyse(func)) >= parallel_work(cpu_machine(target))
        # a sum over a free axis is not cut into equal parts for every size: it is left to one core
        for shared in (1, 0) if parallel else (0,):
            for lanes, fold, vector in ((2, 4, 2), (4, 8, 2), (1, 4, 1), (4, 4, 4)):
                full = {"lanes": lanes, "fold": fold, "vector": vector, "recompute": 0, "ahead": 1, "parallel": shared}
                yield {name: value for name, value in full.items() if name in names}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        func = sch.mod["main"]
        names = {k.name for k in self.knobs(func, target)}
        info, machine = analyse(func), cpu_machine(target)
        lanes, fold, vector = pick("lanes"), pick("fold"), pick("vector")
        recompute = bool(pick("recompute")) if "recompute" in names else False
        ahead = bool(pick("ahead")) if "ahead" in names else False
        parallel = bool(pick("parallel")) if "parallel" in names else False
        tile = RowTile(lanes=lanes, fold=fold, vector=vector, parallel=parallel, ahead=ahead)
        inline_injective(sch, info)
        if recompute:
            for block in _repeated(info):
                if has_block(sch, block.name):
                    inline_block(sch, block.name)
        stages = [b for b in info.blocks if has_block(sch, b.name) and not info.is_output(b)]
        last = info.outputs[0]
        if parallel and _rows(info) < machine.cores:
            for block in (*stages, last):
                schedule_block(sch, block, machine, tile)
            return
        schedule_rows(sch, sch.get_sblock(last.name), [sch.get_sblock(b.name) for b in stages], machine, tile)


def _touched(func: tirx.PrimFunc) -> int:
    """Bytes of all inputs and outputs."""
    return sum(
        prod(int(extent) for extent in param.shape) * tvm.runtime.DataType(str(param.dtype)).bits // 8
        for param in func.params
    )


def _work(info: FuncInfo) -> int:
    return sum(work(b.elements, b.expensive) for b in info.blocks)


def _rows(info: FuncInfo) -> int:
    """How many independent rows there are: the least that any reduction leaves."""
    return min(prod(b.extents[i] for i in b.spatial) for b in info.reductions)


def _repeated(info: FuncInfo) -> list[BlockInfo]:
    return [
        b for b in info.blocks
        if b.kind == "injective" and not info.is_output(b) and b.elements >= max(r.elements for r in info.reductions)
    ]


REDUCTION = Reduction()
