"""Every block scheduled on its own, in program order, for blocks that cannot share a loop nest."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from schedules.analysis import BlockInfo, nest_of
from schedules.cpu.common import InjectiveTile, divisor, parallel_work, schedule_injective
from schedules.cpu.rows import RowTile, schedule_rows
from schedules.cpu.window import default_tile, read_axes, schedule_window_block
from schedules.machine import CpuMachine

__all__ = ["schedule_block", "schedule_reduction"]


def schedule_reduction(sch: s_tir.Schedule, block: SBlockRV, machine: CpuMachine, tile: RowTile) -> None:
    """Lay out one reduction that stands alone under the root; a long sum over few rows is shared out first.

    ``s = sum(x[k])   -->   parallel: p[c] = sum(x[c * K + k]); s = sum(p[c])``
    """
    nest = nest_of(sch, block)
    rows = prod(loop.extent for loop in nest.loops if loop.kind == "S")
    reduced = [loop for loop in nest.loops if loop.kind == "R"]
    total = rows * prod(loop.extent for loop in reduced)
    if tile.parallel and rows < machine.cores and total >= parallel_work(machine):
        for loop in reduced:  # the outermost that divides well, so that vectors remain whole further in
            chunks = divisor(loop.extent, 8 * machine.cores)
            if chunks >= machine.cores:
                outer, _ = sch.split(loop.rv, [chunks, None])
                schedule_rows(sch, sch.rfactor(outer, 0), [], machine, tile)
                break
    schedule_rows(sch, block, [], machine, tile)


def schedule_block(sch: s_tir.Schedule, block: BlockInfo, machine: CpuMachine, tile: RowTile) -> None:
    """Lay out one block that stands alone under the root, by its kind."""
    rv = sch.get_sblock(block.name)
    if block.kind != "reduction":
        plain = InjectiveTile(vector=tile.vector, tile=8, across=True, parallel=tile.parallel)
        schedule_injective(sch, rv, machine, plain)
        return
    axes = read_axes(block) if block.windowed or block.contraction else None
    if axes is None:
        schedule_reduction(sch, rv, machine, tile)
        return
    best = default_tile(axes, machine, machine.lanes(str(block.writes[0].dtype)))
    schedule_window_block(sch, block, axes, machine, replace(best, parallel=tile.parallel))
