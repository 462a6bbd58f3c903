"""Row-wise reductions: all stages of one row are computed while the row is in the cache.

A *row* is one point of the axes that a reduction leaves; its *columns* are the rest. Two orientations exist. Where
the reduced axis is contiguous, the sum is split over the lanes of a vector (``rfactor``), since a float sum in
program order does not vectorise. Where an output axis is contiguous, that axis is the vector and the reduced one
steps over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import s_tir
from tvm.runtime import DataType
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import Access, Nest, nest_of
from schedules.cpu.common import attempt, divisor, parallel_work, parallelise, vectorise, work
from schedules.lockstep import is_fixed
from schedules.machine import LINE_BYTES, CpuMachine
from schedules.partial_sums import PARTIALS, has_partial_sums
from schedules.prefetch import prefetch_rows

__all__ = ["RowTile", "reduces_along_memory", "schedule_rows"]

#: bytes that rows to come are ahead of the row under way: memory answers in the time that so many lines take
_AHEAD = 64 * LINE_BYTES


@dataclass(frozen=True)
class RowTile:
    """``lanes`` registers hold the partial results of a split sum, which are then folded into ``fold`` (0: not);
    ``vector`` registers a step elsewhere; ``ahead``: rows to come are fetched from memory meanwhile."""

    lanes: int = 2
    fold: int = 4
    vector: int = 2
    parallel: bool = True
    ahead: bool = False


def reduces_along_memory(nest: Nest) -> bool:
    """Whether the inputs of a reduction are contiguous along a reduced loop (and not along an output loop)."""
    spatial = reduced = 0
    steps = [i for i, loop in enumerate(nest.loops) if loop.kind == "R"]
    for access in nest.reads:
        if not any(access.depends(i) for i in steps):
            continue  # the accumulator, or a value of the row
        for loop, stride in zip(nest.loops, access.strides, strict=True):
            if stride == 1 and loop.extent > 1:
                spatial += loop.kind == "S"
                reduced += loop.kind == "R"
    return reduced > 0 and reduced >= spatial


def _fuse_reduced(sch: s_tir.Schedule, block: SBlockRV) -> Nest:
    """Fuse neighbouring reduced loops that run through memory together."""
    nest = nest_of(sch, block)
    position = len(nest.loops) - 2
    while position >= 0:
        outer, inner = nest.loops[position], nest.loops[position + 1]
        together = 1 in (outer.extent, inner.extent) or nest.linear(position, position + 1)
        if outer.kind == inner.kind == "R" and together and is_fixed(sch, outer.rv) >= is_fixed(sch, inner.rv):
            sch.fuse(outer.rv, inner.rv)
            nest = nest_of(sch, block)
        position -= 1
    return nest


def _partial_width(extent: int, lanes: int, registers: int) -> int:
    """How many partial results a sum over ``extent`` elements is split into; 1 where no divisor is useful.

    Only divisors: ``rfactor`` drops the predicate of a ragged split and then reads past the row.
    """
    if extent < 2 * lanes:
        return 1
    for count in range(registers, 0, -1):
        if extent % (count * lanes) == 0:
            return count * lanes
    fill = {d: d / (-(-d // lanes) * lanes) for d in range(4, 4 * lanes + 1) if extent % d == 0}
    return max(fill, key=lambda d: (fill[d], d)) if fill else 1


def split_sum(sch: s_tir.Schedule, block: SBlockRV, lanes: int, tile: RowTile) -> list[SBlockRV]:
    """Split the innermost reduced loop of ``block`` over vector lanes; returns the blocks of partial results.

    The partial results are added up in a second, narrower vector first, since one at a time is a chain of as many
    dependent additions. A loop of free extent is marked for lowering to split (:mod:`schedules.partial_sums`).

    ``s = sum(x[k])   -->   p[l] = sum(x[ko * L + l]); q[m] = sum(p[lo * 4 + m]); s = sum(q[m])``
    """
    nest = _fuse_reduced(sch, block)
    inner = nest.loops[-1]
    fixed = inner.kind == "R" and is_fixed(sch, inner.rv)
    width = _partial_width(inner.extent, lanes, tile.lanes) if fixed else 1
    if width == 1:
        return []
    _, lane = sch.split(inner.rv, [None, width])
    partials = [sch.rfactor(lane, 0)]
    if tile.fold and width >= 4 * tile.fold and width % tile.fold == 0:
        last = nest_of(sch, block).loops[-1]
        _, lane = sch.split(last.rv, [None, tile.fold])
        partials.append(sch.rfactor(lane, 0))
    return partials


def schedule_rows(
    sch: s_tir.Schedule, last: SBlockRV, stages: Sequence[SBlockRV], machine: CpuMachine, tile: RowTile
) -> None:
    """Lay out ``last`` over its rows and compute every one of ``stages`` (producers first) for one row at a time.

    Raises ``ScheduleError`` where a stage cannot be moved to a row.
    """
    blocks = [*stages, last]
    total = sum(_amount(sch, b) for b in blocks)
    cores = machine.cores if tile.parallel and total >= parallel_work(machine) else 1
    placed: list[SBlockRV] = []
    along = across = 0
    for block in blocks:
        nest = nest_of(sch, block)
        if any(loop.kind == "R" for loop in nest.loops):
            contiguous = reduces_along_memory(nest)
            partials = split_sum(sch, block, _lanes(nest, machine), tile) if contiguous else []
            if partials or (contiguous and _is_split_later(sch, block, nest_of(sch, block))):
                placed += partials
                along = max(along, prod(loop.extent for loop in nest.loops))
            else:  # also where a short or prime axis cannot be split: one row a lane beats one at a time
                across = max(across, prod(loop.extent for loop in nest.loops))
        if block is not last:
            placed.append(block)
    rows = _row_loops(sch, last, placed, across > along, machine, tile)
    rows = parallelise(sch, rows, cores)
    if rows:
        for block in reversed(placed):
            sch.compute_at(block, rows[-1], preserve_unit_loops=True)
    for block in placed:
        _inside(sch, block, len(rows), machine, tile)
    _inside(sch, last, len(rows), machine, tile)
    if tile.ahead and rows:
        _fetch_ahead(sch, [*placed, last], len(rows))


def _is_split_later(sch: s_tir.Schedule, block: SBlockRV, nest: Nest) -> bool:
    """Whether lowering splits the innermost loop: what divides a usual size does not divide all."""
    inner = nest.loops[-1]
    return inner.kind == "R" and not is_fixed(sch, inner.rv) and has_partial_sums(sch.get(block))


def _fetch_ahead(sch: s_tir.Schedule, blocks: Sequence[SBlockRV], depth: int) -> None:
    """Let the last stage that reads an input along its rows fetch that input's rows to come.

    The stages of a row take turns at arithmetic and memory, and no out-of-order window spans them.
    """
    fetched: set[int] = set()
    params = list(sch.mod["main"].params)
    for block in reversed(blocks):
        nest = nest_of(sch, block)
        step = len(nest.loops) - 2  # the loop around the vector
        if step < depth or any(loop.kind == "R" for loop in nest.loops) or nest.loops[step].extent < 2:
            continue
        row = max((i for i in range(depth) if nest.loops[i].extent > 1), default=None)
        if row is None:
            continue
        width = nest.loops[step + 1].extent
        found = []
        for access in nest.reads:
            stride = access.strides[row] or 0
            number = next((i for i, param in enumerate(params) if access.buffer.same_as(param)), None)
            if number is not None and number not in fetched and stride > 0 and access.strides[step + 1] == 1:
                found.append((number, stride * -(-_AHEAD // (stride * _bytes(access)))))
        if found:
            size = _bytes(nest.writes[0])
            prefetch_rows(sch, nest.loops[step].rv, found, max(1, width * size // LINE_BYTES))
            fetched.update(number for number, _ in found)


def _bytes(access: Access) -> int:
    return max(1, DataType(str(access.buffer.dtype)).bits // 8)


def _amount(sch: s_tir.Schedule, block: SBlockRV) -> int:
    nest = nest_of(sch, block)
    return work(prod(loop.extent for loop in nest.loops), nest.expensive)


def _lanes(nest: Nest, machine: CpuMachine) -> int:
    return machine.lanes(str(nest.writes[0].buffer.dtype))


def _row_loops(
    sch: s_tir.Schedule, last: SBlockRV, stages: Sequence[SBlockRV], across: bool, machine: CpuMachine, tile: RowTile
) -> list[LoopRV]:
    """Reorder ``last`` into rows, then everything else, and return the rows.

    ``across``: the reductions step over memory, so that vectors lie along a row axis, which then stays inside.
    """
    nest = nest_of(sch, last)
    spatial = [i for i, loop in enumerate(nest.loops) if loop.kind == "S"]
    found = _rows(sch, last, stages) if len(spatial) == len(nest.loops) else None
    rows = spatial if found is None else found
    lane = _row_lane(nest, rows) if across else None
    columns = [nest.loops[i].rv for i in range(len(nest.loops)) if i not in rows]
    outer = [nest.loops[i].rv for i in rows if i != lane]
    if lane is not None:
        extent, lanes = nest.loops[lane].extent, _lanes(nest, machine)
        width = divisor(extent, lanes * tile.vector)
        if extent > lanes * tile.vector and 2 * width >= lanes:
            out, within = sch.split(nest.loops[lane].rv, [None, width])
            outer, columns = [*outer, out], [*columns, within]
        else:
            columns = [*columns, nest.loops[lane].rv]
    if outer or columns:
        sch.reorder(*outer, *columns)
    return outer


def _rows(sch: s_tir.Schedule, block: SBlockRV, stages: Sequence[SBlockRV]) -> list[int] | None:
    """The loops of ``block`` along which the smaller results of ``stages`` differ that it reads; None if it reads none.

    A stage of its own size may have read them for it: then those that run through that stage's result as the stage's
    own rows do.
    """
    nest = nest_of(sch, block)
    elements = prod(loop.extent for loop in nest.loops)
    makers = {region.source: stage for stage in stages for region in sch.get(stage).writes}
    made = [(access, makers[access.buffer]) for access in nest.reads if access.buffer in makers]
    narrow = [access for access, _ in made if prod(int(s) for s in access.buffer.shape) < elements]
    if narrow:
        return [i for i, loop in enumerate(nest.loops) if loop.kind == "S" and any(a.depends(i) for a in narrow)]
    for access, stage in made:
        inner = nest_of(sch, stage)
        rows = _rows(sch, stage, stages) if all(loop.kind == "S" for loop in inner.loops) else None
        if rows is not None:
            steps = {inner.writes[0].strides[i] for i in rows} - {None}
            return [i for i in range(len(nest.loops)) if access.strides[i] in steps]
    return None


def _row_lane(nest: Nest, rows: Sequence[int]) -> int | None:
    """The row axis along which the store is contiguous."""
    return next((i for i in reversed(rows) if nest.writes[0].strides[i] == 1 and nest.loops[i].extent > 1), None)


def _inside(sch: s_tir.Schedule, block: SBlockRV, depth: int, machine: CpuMachine, tile: RowTile) -> None:
    """Vectorise one stage below its ``depth`` row loops, and start its sum outside the reduced loops."""
    nest = nest_of(sch, block)
    lanes = _lanes(nest, machine)
    inner = list(range(depth, len(nest.loops)))
    reduced = [i for i in inner if nest.loops[i].kind == "R"]
    spatial = [i for i in inner if nest.loops[i].kind == "S" and nest.loops[i].extent > 1]
    lane = next((i for i in reversed(spatial) if nest.writes[0].strides[i] == 1), spatial[-1] if spatial else None)
    if lane is None:
        if reduced and int(nest.loops[reduced[-1]].extent) <= 16:
            sch.unroll(nest.loops[reduced[-1]].rv)
    else:
        others = [nest.loops[i].rv for i in spatial if i != lane]
        order = [*others, *(nest.loops[i].rv for i in reduced), nest.loops[lane].rv]
        if len(order) > 1:
            sch.reorder(*order)
        if lane in nest.conditions:
            attempt(lambda: sch.vectorize(nest.loops[lane].rv))
        else:
            vectorise(sch, nest.loops[lane].rv, lanes, max(4, tile.lanes) if reduced else tile.vector)
    if reduced:
        sch.decompose_reduction(block, nest.loops[reduced[0]].rv)
    if lane is None and reduced and reduces_along_memory(nest) and _is_split_later(sch, block, nest):
        sch.annotate(nest.loops[-1].rv, PARTIALS, lanes * tile.lanes)
