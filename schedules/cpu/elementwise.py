"""Elementwise chains and data movement: broadcasts, transposes, layout changes, concatenation, gather, slices, pads.

Every block of the function is injective. Producers are inlined, so that each output is one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx

from schedules.analysis import analyse, remembered
from schedules.cpu.common import (
    PARALLEL_WORK,
    InjectiveTile,
    collapse,
    inline_injective,
    is_transposed,
    schedule_injective,
    work,
)
from schedules.machine import cpu_machine
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["ELEMENTWISE"]


class Elementwise(Space):
    """Knobs: ``vector`` registers a step, ``parallel`` (only where there is enough work to doubt it), and for
    transpositions ``tile`` elements along the reads and ``across`` (1: the vector runs along the reads)."""

    name = "cpu.elementwise"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        info = analyse(func)
        return info.plain and all(b.kind == "injective" for b in info.blocks)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        transposed, amount = _look(func)
        knobs = [Knob("vector", (1, 2, 4))]
        if transposed:
            knobs += [Knob("tile", (4, 8, 16, 32)), Knob("across", (0, 1))]
        if amount >= PARALLEL_WORK // 4:
            knobs.append(Knob("parallel", (0, 1)))
        return tuple(knobs)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        names = {k.name for k in self.knobs(func, target)}
        parallel = int(_look(func)[1] >= PARALLEL_WORK)
        tiles = ((2, 8, 1), (2, 16, 0), (4, 16, 1)) if "tile" in names else ((2, 0, 0), (4, 0, 0), (1, 0, 0))
        for vector, tile, across in tiles:
            full = {"vector": vector, "tile": tile, "across": across, "parallel": parallel}
            yield {name: value for name, value in full.items() if name in names}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        func = sch.mod["main"]
        names = {k.name for k in self.knobs(func, target)}
        info = analyse(func)
        tile = InjectiveTile(
            vector=pick("vector"),
            tile=pick("tile") if "tile" in names else 1,
            across=bool(pick("across")) if "across" in names else False,
            parallel=bool(pick("parallel")) if "parallel" in names else False,
        )
        stored = inline_injective(sch, info)
        machine = cpu_machine(target)
        for block in (*stored, *info.outputs):
            schedule_injective(sch, sch.get_sblock(block.name), machine, tile)


@remembered
def _look(func: tirx.PrimFunc) -> tuple[bool, int]:
    """After inlining: whether any output is transposed, and the work of the largest one in element steps."""
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="none", error_render_level="fast")
    info = analyse(func)
    inline_injective(sch, info)
    nests = [collapse(sch, sch.get_sblock(block.name))[0] for block in info.outputs]
    amount = max(work(b.elements, n.expensive) for b, n in zip(info.outputs, nests, strict=True))
    return any(is_transposed(n) for n in nests), amount


ELEMENTWISE = Elementwise()
