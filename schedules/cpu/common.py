"""Shared helpers of the CPU spaces: inlining, vectorising a loop of any length, the nest of one injective block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import (
    BlockInfo,
    FuncInfo,
    Nest,
    choices,
    expensive_calls,
    expression_size,
    loads,
    nest_of,
    reads_wide_indices,
    stores_wide_positions,
)
from schedules.lockstep import is_fixed
from schedules.machine import CpuMachine

__all__ = [
    "InjectiveTile", "attempt", "collapse", "divisor", "extent_of", "has_block", "inline_block",
    "inline_injective", "is_transposed", "parallel_work", "parallelise", "schedule_injective", "vectorise", "work",
]

#: element steps of a pass over memory that one core takes in a cycle: two cores are done half of the time earlier
_STEPS_PER_CYCLE = 7.8
#: how many element steps one transcendental call or division is worth
_CALL_COST = 3
#: elements that the serial part of a parallel nest should have at least
_MIN_INNER = 256
#: pieces of a concatenation up to which each that is one iteration gets code of its own, without branches
_MAX_PIECES = 32
#: nodes beyond which an expression is stored once instead of being duplicated by inlining
_MAX_EXPRESSION = 2000
#: choices beyond which it is, too: TVM simplifies those inside each other in exponential time
_MAX_CHOICES = 4


def attempt(action: Callable[[], object]) -> bool:
    """Carry out one schedule primitive if it is legal; a refused one leaves the schedule as it was."""
    try:
        action()
    except s_tir.ScheduleError:
        return False
    return True


def divisor(extent: int, limit: int) -> int:
    """The largest divisor of ``extent`` that is at most ``limit``."""
    return next(d for d in range(min(extent, max(1, limit)), 0, -1) if extent % d == 0)


def work(elements: int, expensive: int) -> int:
    """Rough cost of a loop nest in element steps."""
    return elements * (1 + _CALL_COST * expensive)


def parallel_work(machine: CpuMachine) -> int:
    """Element steps below which handing them to several threads costs more than it saves."""
    return round(_STEPS_PER_CYCLE * machine.launch_cycles)


def extent_of(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """The loop's extent; 0 where it is symbolic."""
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else 0


def vectorise(sch: s_tir.Schedule, loop: LoopRV, lanes: int, multiple: int = 1, guarded: bool = False) -> None:
    """Vectorise a spatial loop of any extent, up to ``multiple`` registers of ``lanes`` elements at a time.

    A ragged extent (or a loop that is ``guarded`` by a predicate already) is split with a hint that makes lowering
    peel the last, partial iteration, so that the body stays free of per-lane conditions. A symbolic extent stays as
    it is; LLVM vectorises such loops. Where loaded integers of 64 bits are indices, or results are made of the loop's
    variable, no iteration can be peeled: that variable stays at 64 bits, and TVM peels with 32. The vector then
    divides the extent.
    """
    extent = extent_of(sch, loop)
    if extent <= 1:
        return
    width = lanes * multiple
    while width > lanes and extent % width:
        width //= 2
    bodies = [sch.get(block).body for block in sch.get_child_blocks(loop)] if guarded or extent % width else ()
    if any(reads_wide_indices(body) or stores_wide_positions(body) for body in bodies):
        width, guarded = divisor(extent, width), False
    if extent <= width:
        sch.vectorize(loop)
        return
    outer, inner = sch.split(loop, [None, width])
    sch.vectorize(inner)
    if guarded or extent % width:
        sch.annotate(outer, "pragma_loop_partition_hint", True)


def parallelise(sch: s_tir.Schedule, loops: Sequence[LoopRV], cores: int) -> list[LoopRV]:
    """Fuse the fewest of ``loops`` (outermost first, perfectly nested) that keep every core busy and run them in
    parallel. Returns the loops that there are now; with one core or one iteration nothing changes. A loop of free
    extent keeps none busy where that is short, since there may be but one iteration."""
    extents = [extent_of(sch, loop) for loop in loops]
    if cores < 2 or prod(extents) < 2:
        return list(loops)
    count, size = 0, 1
    for loop, extent in zip(loops, extents, strict=True):
        count, size = count + 1, size * (extent if is_fixed(sch, loop) or extent >= 8 * cores else 1)
        if size >= 8 * cores or (size >= cores and size % cores == 0):
            break
    fused = sch.fuse(*loops[:count]) if count > 1 else loops[0]
    sch.parallel(fused)
    return [fused, *loops[count:]]


def has_block(sch: s_tir.Schedule, name: str) -> bool:
    """Whether a block of this name still stands under the root."""
    return any(str(sch.get(b).name_hint) == name for b in sch.get_child_blocks(sch.get_sblock("root")))


def occurrences(sch: s_tir.Schedule, consumer: SBlockRV, buffer: Any) -> int:
    """How many loads of ``buffer`` the block's body holds now."""
    return sum(load.source.same_as(buffer) for load in loads(sch.get(consumer).body))


def inline_block(sch: s_tir.Schedule, name: str) -> bool:
    """Inline the block of this name into its readers if that is legal."""
    return attempt(lambda: sch.compute_inline(sch.get_sblock(name)))


def _consumers(sch: s_tir.Schedule, info: FuncInfo, block: BlockInfo) -> list[tuple[BlockInfo, int]]:
    """The blocks that read ``block`` now, each with its number of loads."""
    blocks = {other.name: other for other in info.blocks}
    found = {str(sch.get(rv).name_hint): rv for rv in sch.get_consumers(sch.get_sblock(block.name))}
    counted = [(blocks[name], occurrences(sch, rv, block.writes[0])) for name, rv in found.items() if name in blocks]
    return [(other, count) for other, count in counted if count]


def _worth_inlining(sch: s_tir.Schedule, info: FuncInfo, block: BlockInfo) -> bool:
    consumers = _consumers(sch, info, block)
    copies = sum(count for _, count in consumers)
    rv = sch.get_sblock(block.name)
    body = sch.get(rv).body
    if copies > 1 and (copies * expression_size(body) > _MAX_EXPRESSION or choices(body) > _MAX_CHOICES):
        return False
    if not expensive_calls(body):
        return True
    return len(consumers) == 1 and consumers[0][0].elements <= 2 * block.elements


def inline_injective(
    sch: s_tir.Schedule, info: FuncInfo, keep: Callable[[BlockInfo], bool] = lambda _: False
) -> list[BlockInfo]:
    """Inline every injective intermediate that is not cheaper to store; returns those that stay.

    Stored are: what ``keep`` says, slow expressions that would be computed more than twice as often (a row's
    ``rsqrt`` in every element of the row), and expressions that duplication would make huge.

    ``C = A + b; D = relu(C)   -->   D = relu(A + b)``
    """
    stored = []
    for block in info.blocks:
        if block.kind != "injective" or info.is_output(block):
            continue
        if keep(block) or not _worth_inlining(sch, info, block) or not inline_block(sch, block.name):
            stored.append(block)
    return stored


@dataclass(frozen=True)
class InjectiveTile:
    """How one injective nest is laid out: ``vector`` registers a step; where reads run along another axis than the
    store, ``tile`` elements of that axis a step, and ``across`` puts the vector along the reads instead."""

    vector: int = 2
    tile: int = 8
    across: bool = True
    parallel: bool = True


def is_transposed(nest: Nest) -> bool:
    """Whether the innermost stored axis is not the one along which the inputs are contiguous."""
    store, load = _lane_loops(nest)
    return load is not None and store is not None


def _lane_loops(nest: Nest) -> tuple[int | None, int | None]:
    """The loop along which the store is contiguous, and another one along which more of the input is."""
    store = next((i for i in range(len(nest.loops) - 1, -1, -1) if nest.writes[0].strides[i] == 1), None)
    if store is None:
        return None, None
    votes: dict[int, int] = {}
    for access in nest.reads:
        if access.strides[store] in (0, 1):
            continue
        for i, loop in enumerate(nest.loops):
            if access.strides[i] == 1 and loop.extent > 1:
                votes[i] = votes.get(i, 0) + 1
    return store, (max(votes, key=lambda i: (votes[i], i)) if votes else None)


def _unbend(sch: s_tir.Schedule, block: SBlockRV) -> Nest:
    """Split loops at the period of a division or remainder in an index, so that every stride is constant.

    ``A[c // 16, c % 16]   -->   A[co, ci]`` with ``c = co * 16 + ci``
    """
    nest = nest_of(sch, block)
    for _ in range(len(nest.loops)):
        bends = [
            (i, period) for access in nest.accesses for i, period in enumerate(access.periods)
            if period > 1 and nest.loops[i].extent % period == 0 and i not in nest.conditions | nest.bare
        ]
        if not bends:
            return nest
        position, period = bends[0]
        sch.split(nest.loops[position].rv, [None, period])
        nest = nest_of(sch, block)
    return nest


def collapse(sch: s_tir.Schedule, block: SBlockRV, cores: int = 1) -> tuple[Nest, list[list[int]]]:
    """Fuse neighbouring loops wherever no index keeps a division; loops of extent 1 go with their neighbour.

    Returns the nest and, for each of its loops, the extents that were fused. With more than one core, a nest that
    would become a single loop is left as two, so that the outer one can run in parallel without a division.
    """
    nest = _unbend(sch, block)
    groups: list[list[int]] = []
    last: int | None = None  # the group's innermost loop of more than one iteration
    for i, loop in enumerate(nest.loops):
        if groups and (loop.extent == 1 or last is None or nest.linear(last, i)):
            groups[-1].append(i)
        else:
            groups.append([i])
        last = last if loop.extent == 1 else i
    extents = [[nest.loops[i].extent for i in group] for group in groups]
    if cores > 1 and len(groups) == 1:
        cut = _even_cut(extents[0], cores)
        groups, extents = [groups[0][:cut], groups[0][cut:]], [extents[0][:cut], extents[0][cut:]]
        groups, extents = [g for g in groups if g], [e for e in extents if e]
    for group in groups:
        if len(group) > 1:
            sch.fuse(*(nest.loops[i].rv for i in group))
    return (nest if len(groups) == len(nest.loops) else nest_of(sch, block)), extents


def _even_cut(extents: Sequence[int], cores: int) -> int:
    """Before which loop to cut a nest into a parallel and a serial part; 0 where it stays whole."""
    for wanted in (8 * cores, cores):
        for cut in range(1, len(extents)):
            if prod(extents[:cut]) >= wanted and prod(extents[cut:]) >= _MIN_INNER:
                return cut
    return 0


def _aligned(width: int, extents: Sequence[int], lanes: int) -> int:
    """The widest step up to ``width`` that no boundary of the fused ``extents`` cuts unevenly: TVM could not put the
    index of such a step together again, and would divide for every lane. Where a quarter of a register is still cut,
    one register.
    """
    sizes = [prod(extents[i:]) for i in range(1, len(extents))]
    steps = (width >> n for n in range(width.bit_length()))
    even = (step for step in steps if all(size % step == 0 or step % size == 0 for size in sizes))
    return next((step for step in even if 4 * step >= lanes), min(width, lanes))


def schedule_injective(sch: s_tir.Schedule, block: SBlockRV, machine: CpuMachine, tile: InjectiveTile) -> None:
    """Lay out one injective block that stands alone under the root.

    Loops that run through memory together are fused; the contiguous axis is vectorised; a transposition is tiled;
    the outer loops run in parallel where the work pays for waking the threads.
    """
    before = nest_of(sch, block)
    if not before.loops:
        return
    elements = prod(loop.extent for loop in before.loops)
    cores = machine.cores if tile.parallel and work(elements, before.expensive) >= parallel_work(machine) else 1
    nest, parts = collapse(sch, block, cores)
    lanes = machine.lanes(str(nest.writes[0].buffer.dtype))
    store, load = _lane_loops(nest)
    if store is not None and load is not None:
        _transpose(sch, nest, store, load, lanes, cores, tile)
        return
    lane = _lane(nest, store, lanes)
    if store is not None and lane != store:
        _shuffle(sch, nest, store, lane, lanes, cores)
        return
    loops = [loop.rv for i, loop in enumerate(nest.loops) if i != lane]
    inner, extent, ragged = nest.loops[lane].rv, nest.loops[lane].extent, False
    if lane != len(nest.loops) - 1:
        sch.reorder(*loops, inner)
    width = _aligned(lanes * tile.vector, parts[lane], lanes)
    if cores > 1 and elements // extent < cores and extent >= 2 * lanes:
        count, ragged = _chunks(extent, cores, width)
        chunk, inner = sch.split(inner, [None, -(-extent // count)] if ragged else [count, None])
        loops.append(chunk)
    if lane in nest.conditions:
        sch.vectorize(inner)
    else:
        vectorise(sch, inner, min(lanes, width), max(1, width // lanes), guarded=ragged)
    pieces = [nest.loops[i].rv for i in sorted(nest.conditions - {lane})
              if nest.loops[i].extent <= min(_MAX_PIECES, len(nest.reads))]
    if loops:
        left = parallelise(sch, loops, cores)
        if any(left[-1].same_as(loop) for loop in pieces):
            sch.unroll(left[-1])


def _lane(nest: Nest, store: int | None, lanes: int) -> int:
    """The loop to vectorise: along the store, unless reads jump about there (a channel shuffle) and not elsewhere."""
    lane = len(nest.loops) - 1 if store is None else store
    if all(access.strides[lane] is not None for access in nest.accesses):
        return lane
    steady = [
        i for i, loop in enumerate(nest.loops)
        if loop.extent >= lanes and i not in nest.conditions and all(a.strides[i] is not None for a in nest.accesses)
    ]
    return max(steady, key=lambda i: nest.loops[i].extent, default=lane)


def _shuffle(sch: s_tir.Schedule, nest: Nest, store: int, lane: int, lanes: int, cores: int) -> None:
    """Step along ``lane`` in short stretches inside the stored axis, so that a stretch's lines stay in the cache
    until every position of the stored axis is written."""
    extent = nest.loops[lane].extent
    length = divisor(extent, 2 * lanes)
    outer, inner = sch.split(nest.loops[lane].rv, [None, length if length >= lanes // 2 else lanes])
    others = [loop.rv for i, loop in enumerate(nest.loops) if i not in (store, lane)]
    sch.reorder(*others, outer, nest.loops[store].rv, inner)
    sch.vectorize(inner)
    parallelise(sch, [*others, outer], cores)


def _chunks(extent: int, cores: int, width: int) -> tuple[int, bool]:
    """Into how many parallel chunks a long loop is cut, and whether the last one is shorter than the others.

    Whole vectors are best, long chunks with a tail next.
    """
    counts = [c for c in range(cores, min(64 * cores, max(cores, extent // width)) + 1) if extent % c == 0]
    whole = [c for c in counts if (extent // c) % width == 0]
    if whole:
        return min(whole, key=lambda c: abs(c - 8 * cores)), False
    if counts and extent // counts[0] >= 4 * width:
        return counts[0], False
    return 4 * cores, True


def _transpose(
    sch: s_tir.Schedule, nest: Nest, store: int, load: int, lanes: int, cores: int, tile: InjectiveTile
) -> None:
    """Tile the two contiguous axes of a transposition so that both the loads' and the stores' lines are used up."""
    s, r = nest.loops[store], nest.loops[load]
    s_size = divisor(s.extent, lanes)
    r_size = divisor(r.extent, tile.tile)
    s_out, s_in = sch.split(s.rv, [None, s_size if 2 * s_size >= min(lanes, s.extent) else min(lanes, s.extent)])
    r_out, r_in = sch.split(r.rv, [None, r_size if 2 * r_size >= min(tile.tile, r.extent) else tile.tile])
    others = [loop.rv for i, loop in enumerate(nest.loops) if i not in (store, load)]
    outer = [s_out, r_out] if store < load else [r_out, s_out]
    order = [s_in, r_in] if tile.across else [r_in, s_in]
    sch.reorder(*others, *outer, *order)
    sch.vectorize(order[1])
    if extent_of(sch, order[0]) <= 16:
        sch.unroll(order[0])
    parallelise(sch, [*others, *outer], cores)
