"""Reductions whose output tile stays in registers: pooling, depthwise and plain convolution, unusual contractions.

The block that writes the result (a fused epilogue, or a copy) is cut into tiles; the reduction is computed at the
innermost tile loop, so that its accumulators live in registers; a padded input is made per chunk of rows, once for
the whole function, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import BlockInfo, FuncInfo, analyse, nest_of
from schedules.cpu.common import (
    InjectiveTile,
    inline_block,
    inline_injective,
    parallel_work,
    parallelise,
    schedule_injective,
    vectorise,
    work,
)
from schedules.cpu.tiling import divisors
from schedules.free import least_function
from schedules.machine import LINE_BYTES, CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = [
    "PAD_CHUNK", "PAD_INLINE", "PAD_ONCE", "WindowAxes", "WindowSpace", "WindowTile", "default_tile", "read_axes",
    "read_window", "schedule_window", "schedule_window_block",
]

#: where a padded input is made: once, per chunk of rows, or nowhere (the condition is in the loop)
PAD_ONCE, PAD_CHUNK, PAD_INLINE = 0, 1, 2
#: multiply-adds or comparisons in registers that are worth one element step of a pass over memory
_STEPS_PER_WORK = 6
#: steps of the innermost reduction that are unrolled
_UNROLLED = 3
#: elements of a chunk of more than 8 rows
_CHUNK = 8 << 10
#: registers of a tile's contiguous axis, and the longest axis that is kept whole where no divisor is useful
_MAX_VECTORS, _MAX_WHOLE = 4, 1024
_MAX_ROWS = 32  # of a chunk


@dataclass(frozen=True)
class WindowTile:
    """``width`` elements of the contiguous axis and ``tile`` of the second one are in registers; ``rows`` of the
    third one are a chunk. ``unroll`` bounds how many innermost reduction steps are unrolled."""

    width: int
    tile: int
    rows: int
    pad: int = PAD_ONCE
    unroll: int = 3
    parallel: bool = True


@dataclass(frozen=True)
class WindowAxes:
    """Positions, among the output's axes, of those that are tiled (None where there are too few), and extents."""

    extents: tuple[int, ...]
    lane: int
    tile: int | None
    row: int | None
    contraction: bool
    padded: bool = False
    pad_in_lane: bool = False  # the padding's condition changes along the contiguous axis, or hides short integers
    pad_shared: bool = False  # several chunks read the same padded input
    #: steps of the sum that slide along the tile and are unrolled, and how many of them the next element is further on,
    #: where floats are multiplied of which none is the same for all lanes
    slide: tuple[int, int] | None = None
    least: int | None = None  # elements of the axis ``tile`` for the smallest of a range of sizes

    def extent(self, position: int | None) -> int:
        return self.extents[position] if position is not None else 1


def read_axes(anchor: BlockInfo) -> WindowAxes | None:
    """The axes of a reduction that can be tiled; None where no output axis is contiguous in what it reads."""
    extents = tuple(anchor.extents[i] for i in anchor.spatial)
    positions = [p for p, extent in enumerate(extents) if extent > 1]
    if anchor.kind != "reduction" or len(anchor.writes) != 1 or not positions:
        return None
    lane = positions[-1]
    strides = [a.strides[anchor.spatial[lane]] for a in anchor.reads]
    if any(s is None or abs(s) > 4 for s in strides) or not any(strides):
        return None
    # a second axis along which the operand that moves with the lanes is used again, else the one beside the lanes
    others = [p for p in positions if p != lane]
    moving = [a for a in anchor.reads if a.depends(anchor.spatial[lane])]
    reusing = [p for p in others if any(not a.depends(anchor.spatial[p]) for a in moving)] or others
    tile = reusing[-1] if reusing else None
    row = next((p for p in reversed(others) if p != tile), None)
    return WindowAxes(extents, lane, tile, row, anchor.contraction, slide=_slide(anchor, lane, tile))


def _slide(anchor: BlockInfo, lane: int, tile: int | None) -> tuple[int, int] | None:
    """See :class:`WindowAxes`."""
    if tile is None or not anchor.contraction or not str(anchor.writes[0].dtype).startswith("float"):
        return None
    if not all(a.depends(anchor.spatial[lane]) for a in anchor.reads):
        return None
    sliding = [a for a in anchor.reads if a.depends(anchor.spatial[tile])]
    if len(sliding) != 1:
        return None
    last = anchor.reduced[-1]
    taps = anchor.extents[last] if anchor.extents[last] <= _UNROLLED else 1
    along, step = sliding[0].strides[anchor.spatial[tile]], sliding[0].strides[last]
    return taps, along // step if along and step and along % step == 0 else taps


def _pads(info: FuncInfo) -> list[BlockInfo]:
    """The conditional producers (padding) that the reduction reads directly."""
    return [b for b in info.producers(info.reductions[0]) if b.kind == "injective" and b.conditional]


def read_window(info: FuncInfo) -> WindowAxes | None:
    """The axes of a function of one reduction with injective blocks of its shape around it; None for any other."""
    if not info.plain or len(info.reductions) != 1 or len(info.outputs) != 1:
        return None
    anchor, out = info.reductions[0], info.outputs[0]
    axes = read_axes(anchor)
    if axes is None or axes.extents != tuple(out.extents[i] for i in out.spatial):
        return None
    after = info.downstream(anchor)
    if out is not anchor and out not in after:
        return None
    pads = _pads(info)
    if not pads:
        return axes
    data = [a for a in anchor.reads if any(a.buffer.same_as(w) for b in pads for w in b.writes)]
    outer = [p for p in range(len(axes.extents)) if p not in (axes.lane, axes.row) and axes.extents[p] > 1]
    shared = any(not a.depends(anchor.spatial[p]) for a in data for p in outer)
    in_lane = any(not any(dim == {anchor.spatial[axes.lane]} for dim in a.dims) for a in data)
    # LLVM multiplies bytes as 16-bit numbers where it sees that they are, which a condition in a loop over taps hides:
    # a 5x5 depthwise convolution takes twice as long
    hides = str(anchor.writes[0].dtype) == "int32" and anchor.extents[anchor.reduced[-1]] > _UNROLLED
    return replace(axes, padded=True, pad_in_lane=in_lane or hides, pad_shared=shared)


def _whole_vectors(width: int, lanes: int) -> float:
    """The part of the vector registers' lanes that ``width`` elements fill; a remainder that is no narrower vector
    costs extra, since LLVM takes it apart."""
    fill = width / (-(-width // lanes) * lanes)
    return fill if width % lanes in (0, lanes // 2, lanes // 4) else 0.6 * fill


def _widths(extent: int, lanes: int) -> list[int]:
    """Useful cuts of the contiguous axis, ascending: divisors, and the whole axis where they are all too small."""
    exact = [d for d in divisors(extent, _MAX_VECTORS * lanes) if d >= min(extent, lanes // 4)]
    if not exact or (max(_whole_vectors(d, lanes) for d in exact) < 0.5 and extent <= _MAX_WHOLE):
        exact.append(extent)
    return sorted(set(exact))


def _tiles(axes: WindowAxes, machine: CpuMachine, lanes: int) -> list[tuple[float, int, int]]:
    """``(cost, width, tile)`` of the register tiles, best first: loads per multiply-add for a contraction, else the
    overhead of short tiles; tiles that would spill are left out."""
    options = []
    for width in _widths(axes.extent(axes.lane), lanes):
        vectors = -(-width // lanes)
        most = 12 if axes.contraction else 8
        for tile in divisors(axes.extent(axes.tile), most if axes.least is None else min(most, axes.least)):
            cost, held = _slid(axes.slide, vectors, tile, machine) if axes.slide else (1 / vectors + 1 / tile, vectors)
            live = vectors * tile + held + 2
            if live > machine.vector_registers and vectors * tile > 1 and vectors <= _MAX_VECTORS:
                continue
            accumulators = vectors * tile
            cost = cost if axes.contraction else 0.2 / accumulators + 0.02 * max(0, accumulators - 4)
            spill = 4.0 if vectors > _MAX_VECTORS else 0.0
            options.append(((cost + 0.2) / _whole_vectors(width, lanes) + spill, width, tile))
    return sorted(options)


def _slid(slide: tuple[int, int], vectors: int, tile: int, machine: CpuMachine) -> tuple[float, int]:
    """Loads and cache lines for each multiply-add where every operand is read in vectors, and the values that are held
    for a later step.

    What two neighbours of a tile read in different steps is read once; a line of several vectors is shared by those of
    them that are in the tile. Measured on AVX2, lines of two vectors, microseconds of tiles of 1 x 7, 2 x 2, 2 x 1:
    19.7, 22.6, 28.7 (36 blocks of 14x14), and at stride 2, 1 x 7, 2 x 4, 2 x 2, 2 x 1: 31.6, 26.7, 25.4, 32.6 (9 blocks
    of 28x28). A tile of 1 x 8 spills, and takes 1.4 times as long as 1 x 7 (9 blocks of 56x56).
    """
    taps, stride = slide
    read = min((tile - 1) * stride + taps, tile * taps)
    lines = read / min(vectors, max(1, LINE_BYTES // machine.vector_bytes))
    return (read + taps + lines) / (taps * tile), tile * taps - read and tile - stride + 1


def _rows(axes: WindowAxes, machine: CpuMachine, tile: int) -> int:
    """The largest chunk of rows that leaves every core four chunks and is a few microseconds of work. Measured on AVX2,
    depthwise convolutions: chunks of 14 rows of 14 pixels take 0.74 and 0.88 of the time of those of 7, of 28 pixels
    0.80 and 0.96, and of 56 pixels 1.01."""
    others = prod(e for p, e in enumerate(axes.extents) if p not in (axes.lane, axes.tile, axes.row))
    if axes.tile is not None and (axes.row is None or axes.tile < axes.row):
        others *= axes.extent(axes.tile) // tile
    wanted = 4 * machine.cores
    height, most = axes.extent(axes.row), max(8, _CHUNK // (axes.extent(axes.lane) * axes.extent(axes.tile)))
    fitting = [r for r in divisors(height, min(_MAX_ROWS, most)) if others * (height // r) >= wanted]
    return fitting[-1] if fitting else 1


def _pad_choices(axes: WindowAxes) -> tuple[int, ...]:
    """Best first. A condition that is the same for all lanes is cheap where it is; one that differs is not."""
    if not axes.padded:
        return (PAD_ONCE,)
    if axes.contraction and axes.pad_shared:
        return (PAD_ONCE, PAD_CHUNK, PAD_INLINE)
    return (PAD_CHUNK, PAD_ONCE, PAD_INLINE) if axes.pad_in_lane else (PAD_INLINE, PAD_CHUNK, PAD_ONCE)


def default_tile(axes: WindowAxes, machine: CpuMachine, lanes: int) -> WindowTile:
    """The tile that arithmetic prefers."""
    _, width, tile = (_tiles(axes, machine, lanes) or [(0.0, 1, 1)])[0]
    return WindowTile(width, tile, _rows(axes, machine, tile), _pad_choices(axes)[0])


class WindowSpace(Space):
    """Knobs: ``width`` and ``tile``, the register tile's elements along the contiguous and the second axis; ``rows``
    of one parallel chunk; ``pad`` where the padded input is made (0: once, 1: per chunk, 2: nowhere); ``unroll``
    how many steps of the reduction are unrolled; ``parallel``."""

    target_kind = "llvm"

    def takes(self, info: FuncInfo) -> bool:
        """Whether this is the space's kind of reduction; ``info`` has exactly one."""
        raise NotImplementedError

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        info = analyse(func)
        return read_window(info) is not None and self.takes(info)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        info, axes, lanes = _read(func, target)
        steps = prod(info.reductions[0].extents[i] for i in info.reductions[0].reduced)
        knobs = [
            Knob("width", tuple(_widths(axes.extent(axes.lane), lanes))),
            Knob("tile", tuple(divisors(axes.extent(axes.tile), 16))),
            Knob("rows", tuple(divisors(axes.extent(axes.row), _MAX_ROWS))),
            Knob("unroll", tuple(sorted({1, min(steps, 3), min(steps, 9)}))),
        ]
        if axes.padded:
            knobs.append(Knob("pad", (PAD_ONCE, PAD_CHUNK, PAD_INLINE)))
        if _amount(info.reductions[0]) >= parallel_work(cpu_machine(target)) // 4:
            knobs.append(Knob("parallel", (0, 1)))
        return tuple(knobs)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        info, axes, lanes = _read(func, target)
        machine = cpu_machine(target)
        knobs = {k.name: k.values for k in self.knobs(func, target)}
        anchor = info.reductions[0]
        parallel = int(_amount(anchor) >= parallel_work(machine))
        unroll = max(u for u in knobs["unroll"] if u <= _UNROLLED)
        for pad in _pad_choices(axes):
            for _, width, tile in _tiles(axes, machine, lanes)[: 3 if pad == _pad_choices(axes)[0] else 1]:
                full = {
                    "width": width, "tile": tile, "rows": _rows(axes, machine, tile), "unroll": unroll,
                    "pad": pad, "parallel": parallel,
                }
                yield {name: value for name, value in full.items() if name in knobs}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        names = {k.name for k in self.knobs(sch.mod["main"], target)}
        tile = WindowTile(
            width=pick("width"), tile=pick("tile"), rows=pick("rows"), unroll=pick("unroll"),
            pad=pick("pad") if "pad" in names else PAD_ONCE,
            parallel=bool(pick("parallel")) if "parallel" in names else False,
        )
        schedule_window(sch, cpu_machine(target), tile)


def _read(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[FuncInfo, WindowAxes, int]:
    info = analyse(func)
    axes = read_window(info)
    assert axes is not None, "a space is only asked about functions that it matches"
    least = least_function(func)
    smallest = None if least is None else read_window(analyse(least))
    if smallest is not None and smallest.tile == axes.tile:
        axes = replace(axes, least=smallest.extent(smallest.tile))
    return info, axes, cpu_machine(target).lanes(str(info.reductions[0].writes[0].dtype))


def _amount(anchor: BlockInfo) -> int:
    return work(anchor.elements, anchor.expensive) // _STEPS_PER_WORK


def schedule_window(sch: s_tir.Schedule, machine: CpuMachine, tile: WindowTile) -> None:
    """Lay out a function that :func:`read_window` understands. Raises where the tile does not fit."""
    info = analyse(sch.mod["main"])
    axes = read_window(info)
    if axes is None:
        raise InvalidDecision("the function must be one reduction with injective blocks of its shape around it")
    anchor = info.reductions[0]
    pads = {b.name for b in _pads(info)}
    stored = inline_injective(sch, info, keep=lambda b: b.name in pads and tile.pad != PAD_INLINE)
    after = {b.name for b in info.downstream(anchor)}
    # a tile has no place for intermediates of its epilogue, so that even those that are slow are computed twice
    if not all(inline_block(sch, b.name) for b in stored if b.name in after):
        raise InvalidDecision("every intermediate of the epilogue must be inlined")
    stored = [b for b in stored if b.name not in after]
    out = None if info.is_output(anchor) else sch.get_sblock(info.outputs[0].name)
    per_chunk = [b.name for b in stored if b.name in pads and tile.pad == PAD_CHUNK]
    for block in stored:
        if block.name not in per_chunk:
            schedule_injective(sch, sch.get_sblock(block.name), machine, InjectiveTile(parallel=tile.parallel))
    schedule_window_block(sch, anchor, axes, machine, tile, out, per_chunk)


def schedule_window_block(
    sch: s_tir.Schedule, anchor: BlockInfo, axes: WindowAxes, machine: CpuMachine, tile: WindowTile,
    out: SBlockRV | None = None, per_chunk: list[str] | None = None,
) -> None:
    """Lay out one reduction and the block ``out`` that reads it (a copy is made where it is None); the blocks called
    ``per_chunk`` are computed for a chunk of rows at a time."""
    lanes = machine.lanes(str(anchor.writes[0].dtype))
    rv = sch.get_sblock(anchor.name)
    if out is None:
        sch.cache_write(rv, 0, "local")
        (out,) = sch.get_consumers(rv)
    else:
        sch.set_scope(rv, 0, "local")
    cores = machine.cores if tile.parallel and _amount(anchor) >= parallel_work(machine) // 8 else 1
    chunk, at, within = _tile_output(sch, out, axes, tile, cores)
    sch.compute_at(rv, at, preserve_unit_loops=True)
    for name in reversed(per_chunk or []):
        _compute_per_chunk(sch, sch.get_sblock(name), chunk, machine)
    _accumulate(sch, rv, len(anchor.extents), lanes, tile.unroll)
    for loop in within[:-1]:
        sch.unroll(loop)
    vectorise(sch, within[-1], lanes, _MAX_VECTORS)


def _tile_output(
    sch: s_tir.Schedule, out: SBlockRV, axes: WindowAxes, tile: WindowTile, cores: int
) -> tuple[LoopRV, LoopRV, list[LoopRV]]:
    """Cut the output block; returns the loop of one chunk of rows, the loop of one tile, and the loops inside it.

    ``n, c, h, w   -->   parallel(n, c / tile, h / rows), rows, w / width, tile, width`` for a tiled ``c``
    """
    for extent, size in (
        (axes.extent(axes.lane), tile.width), (axes.extent(axes.tile), tile.tile), (axes.extent(axes.row), tile.rows),
    ):
        if extent % size:
            raise InvalidDecision(f"a tile must divide its axis, got {size} of {extent}")
    outer: list[LoopRV] = []
    middle: list[LoopRV] = []
    within: list[LoopRV] = []
    for position, loop in enumerate(sch.get_loops(out)):
        if position == axes.lane:
            lane_out, lane_in = sch.split(loop, [None, tile.width])
        elif position == axes.tile:
            tile_out, tile_in = sch.split(loop, [None, tile.tile])
            within.append(tile_in)
            (middle if axes.row is not None and position > axes.row else outer).append(tile_out)
        elif position == axes.row:
            chunk, row = sch.split(loop, [None, tile.rows])
            outer.append(chunk)
            middle.insert(0, row)
        else:
            outer.append(loop)
    within.append(lane_in)
    (middle if outer else outer).append(lane_out)
    sch.reorder(*outer, *middle, *within)
    outer = parallelise(sch, outer, cores)
    return outer[-1], [*outer, *middle][-1], within


def _compute_per_chunk(sch: s_tir.Schedule, block: SBlockRV, chunk: LoopRV, machine: CpuMachine) -> None:
    sch.compute_at(block, chunk, preserve_unit_loops=True)
    nest = nest_of(sch, block)
    lane = len(nest.loops) - 1
    if lane in nest.conditions:
        sch.vectorize(nest.loops[lane].rv)
    else:
        vectorise(sch, nest.loops[lane].rv, machine.lanes(str(nest.writes[0].buffer.dtype)), 2)


def _accumulate(sch: s_tir.Schedule, anchor: SBlockRV, count: int, lanes: int, unroll: int) -> None:
    """Order the reduction's ``count`` innermost loops: its steps, then the tile unrolled, then the lanes."""
    inner = nest_of(sch, anchor).loops[-count:]
    spatial = [loop for loop in inner if loop.kind != "R"]
    steps = [loop for loop in inner if loop.kind == "R"]
    lane = next((loop for loop in reversed(spatial) if loop.extent > 1), spatial[-1])
    rest = [loop for loop in spatial if loop is not lane]
    sch.reorder(*(loop.rv for loop in (*steps, *rest, lane)))
    for loop in rest:
        if loop.extent > 1:
            sch.unroll(loop.rv)
    unrolled = 1
    for loop in reversed(steps):
        unrolled *= loop.extent
        if unrolled > unroll:
            break
        if loop.extent > 1:
            sch.unroll(loop.rv)
    vectorise(sch, lane.rv, lanes, _MAX_VECTORS)
    sch.decompose_reduction(anchor, steps[0].rv)
