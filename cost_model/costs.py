"""The analytic cost of one loop nest on a machine: issue slots, registers, cache traffic and parallel load balance.

The CPU part follows the usual bottleneck analysis of a register-tiled kernel (Williams, Waterman and Patterson's
roofline, 2009, with one roof for each cache level; footprints as in Ansor, Zheng et al., 2020): the body is what
runs between two back edges of the innermost real loop, everything unrolled and vectorised.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from cost_model.machine import Machine
from cost_model.nests import Access, Nest
from schedules.machine import LINE_BYTES, TILE_LANES, CpuMachine, GpuMachine

__all__ = ["NestCost", "nest_cost"]

#: loops that LLVM vectorises by itself reach about this part of an explicit vector's rate
_AUTO_VECTOR = 0.6
#: cycles of a back edge with its compare and address updates: no core takes more than one such branch a cycle
_LOOP_CYCLES = 1.0


@dataclass(frozen=True)
class NestCost:
    """Seconds and the quantities behind them, which are the learned model's features.

    ``traffic`` holds bytes that cross into each cache level from below, ``memory`` the seconds this takes.
    The ``body`` figures count instructions of one pass through the innermost real loop.
    """

    seconds: float
    compute: float
    launch: float
    memory: tuple[float, ...]
    traffic: tuple[float, ...]
    parallel: float = 1.0  # chunks
    balance: float = 1.0  # part of the cores' time that has work
    grain: float = 0.0  # operations of one chunk
    regions: float = 0.0  # times a parallel region or kernel is started
    vector: float = 1.0  # elements of the vectorised loop
    lanes_used: float = 1.0  # part of the vector registers' lanes that work
    unrolled: float = 1.0
    operations: float = 0.0  # arithmetic instructions
    loads: float = 0.0
    stores: float = 0.0
    gathers: float = 0.0
    accumulators: float = 0.0  # vectors held across the innermost real loop
    registers: float = 0.0  # part of the register file that is needed
    spills: float = 0.0
    cycles: float = 0.0
    chain: float = 0.0  # dependent multiply-adds
    inner: float = 1.0  # extent of the innermost real loop
    inner_reduces: bool = False
    inner_step: float = 0.0  # bytes the worst load moves with the innermost real loop
    tile_bytes: float = 0.0  # working set of the loops from the first that reduces inwards
    chunk_bytes: float = 0.0  # working set of one parallel chunk
    threads: float = 0.0  # GPU: threads of one block
    occupancy: float = 0.0  # GPU: resident threads over the most that fit
    coalesced: float = 0.0  # GPU: part of the fetched bytes that is used
    reduced: float = 1.0  # passes through the body that one tile's reduction takes
    overlap: float = 1.0  # tiles whose reductions the core has in flight at once
    guarded: float = 0.0  # a predicate that changes within the body (1), or only around it (0.5)
    cold: float = 0.0  # bytes from memory whatever fits the caches
    useful: float = 1.0  # part of the iterations in which the predicates hold
    fetching: bool = False  # asks for what later iterations read
    conditions: float = 0.0  # in the expression
    conditional: float = 0.0  # one that changes within a vector (1), within the body (0.5), or around it (0.25)
    share: float = 0.0  # bytes that one core touches
    apart: float = 0.0  # the whole nest's over what the cores touch together: 1 where they share nothing
    curve: tuple[float, ...] = ()  # bytes into caches of the sizes SIZES
    fresh: float = 0.0  # part of a register tile's operands that the next tile does not find in the first cache
    streams: float = 0.0  # cache lines that one pass through the body touches
    aliased: float = 0.0  # lines of one access in the body that fall on one set of the first cache


#: caches, in bytes, by which reuse is described whatever a machine has
SIZES = (24 << 10, 96 << 10, 384 << 10, 1536 << 10, 6 << 20)
#: part of a multiply-add's latency: a spilled accumulator is stored and loaded again, and the next step waits for it
_SPILLED = 0.75
#: a predicate within the body keeps LLVM from using whole vectors; one around it costs a compare
_GUARD_INSIDE, _GUARD_AROUND = 2.0, 1.03
#: part of a cache that stays a function's own from one call to the next
_OWN = 0.8


def nest_cost(nest: Nest, machine: Machine, shared_bytes: float = 0.0, resident: float = math.inf) -> NestCost:
    """The cost of ``nest``; ``shared_bytes`` is the shared memory that one block of the kernel holds.

    ``resident`` is what the whole function touches, in bytes. Where a cache holds all of it, nothing but cold
    buffers comes from below: functions are timed, and a model runs them, with their activations at hand.
    """
    on = machine.described
    if isinstance(on, GpuMachine):
        return _gpu(nest, machine, on, shared_bytes)
    return _cpu(nest, machine, on, resident)


@dataclass(frozen=True)
class _Body:
    """The nest cut at its innermost real loop (``pivot``, -1 where there is none)."""

    pivot: int
    loops: tuple[int, ...]  # numbers of the unrolled and vectorised loops inside
    vectorized: tuple[int, ...]
    automatic: bool  # the vector loop is LLVM's choice


def _cut(nest: Nest) -> _Body:
    inside: list[int] = []
    pivot = -1
    for i in range(len(nest.loops) - 1, -1, -1):
        loop = nest.loops[i]
        if loop.extent == 1 or loop.kind in ("unrolled", "vectorized"):
            inside.append(i)
            continue
        if loop.auto_unroll and math.prod(nest.loops[j].extent for j in [*inside, i]) <= loop.auto_unroll:
            inside.append(i)
            continue
        pivot = i
        break
    vectorized = tuple(i for i in inside if nest.loops[i].kind == "vectorized" and nest.loops[i].extent > 1)
    if not vectorized and pivot >= 0 and pivot not in nest.reduction and nest.loops[pivot].kind == "serial":
        steps = [abs(a.step(pivot)) for a in nest.accesses]
        if steps and steps[0] == 1 and all(step in (0, 1) for step in steps):
            above = next((i for i in range(pivot - 1, -1, -1) if nest.loops[i].extent > 1), -1)
            return _Body(above, (*inside, pivot), (pivot,), automatic=True)
    return _Body(pivot, tuple(inside), vectorized, automatic=False)


def _cpu(nest: Nest, machine: Machine, on: CpuMachine, resident: float) -> NestCost:
    extents = nest.extents
    body = _cut(nest)
    element = nest.accesses[0].buffer.element if nest.accesses else 4
    lanes = machine.lanes(element)
    vector = math.prod(extents[i] for i in body.vectorized)
    vectors = math.ceil(vector / lanes)
    scalar_loops = [i for i in body.loops if i not in body.vectorized]
    unrolled = math.prod(extents[i] for i in scalar_loops)

    loads, stores, gathers, accumulators, live = _accesses(nest, body, scalar_loops, vectors, vector)
    fused = 0.5 if nest.reduction and nest.arithmetic >= 2 else 1.0  # a multiply and an add are one instruction
    operations = unrolled * vectors * (nest.arithmetic * fused + nest.special)
    registers = accumulators + live
    steps = math.prod(extents[i] for i in scalar_loops if i in nest.reduction)
    spills = max(0.0, registers - _usable(machine, steps)) * (steps if nest.reduction else 1)
    chain = operations / max(accumulators, 1.0) if nest.reduction and body.pivot in nest.reduction else 0.0
    reduced = _reduced(nest, body)
    overlap = max(1.0, on.window / max(1.0, (operations + loads) * reduced))  # short reductions run side by side
    cycles = max(
        operations / on.fma_per_cycle, (loads + spills) / on.loads_per_cycle + gathers, stores + spills,
        chain * on.fma_latency / overlap,
    )
    cycles += _SPILLED * on.fma_latency * spills + _LOOP_CYCLES
    if nest.tiles:
        cycles = _in_tiles(nest, on) + _LOOP_CYCLES
    if body.automatic:
        cycles /= _AUTO_VECTOR
    guarded = _guarded(nest, body)
    if guarded:
        cycles *= _GUARD_INSIDE if guarded == 1.0 else _GUARD_AROUND
    inner = extents[body.pivot] if body.pivot >= 0 else 1
    passes = nest.iterations / max(1, unrolled * vector)

    chunks, regions = _parallel(nest)
    rounds = math.ceil(chunks / machine.cores)
    used = chunks / rounds  # cores at work on average
    compute = passes * cycles / machine.hz / used
    first_reduction = min(nest.reduction, default=len(extents))
    reach = _reach(nest, machine, resident / max(1.0, used), first_reduction)
    streams, aliased = _lines(nest, body, on.way_bytes)
    memory = tuple(
        bytes_ / level.refill / min(used, machine.cores)
        for bytes_, level in zip(reach.traffic, machine.levels, strict=True)
    )
    launch = regions * machine.launch_seconds * (1.0 if chunks > 1 else 0.0)
    first_inside = next((i + 1 for i, loop in enumerate(nest.loops) if loop.kind == "parallel"), 0)
    return NestCost(
        seconds=_combined(compute, memory) + launch, compute=compute, launch=launch, memory=memory,
        traffic=reach.traffic, parallel=chunks, balance=used / machine.cores,
        grain=nest.flops / max(1.0, chunks * regions), regions=regions,
        vector=vector, lanes_used=vector / (vectors * lanes), unrolled=unrolled, operations=operations, loads=loads,
        stores=stores, gathers=gathers, accumulators=accumulators, registers=registers / machine.vector_registers,
        spills=spills, cycles=cycles, chain=chain, inner=inner, inner_reduces=body.pivot in nest.reduction,
        inner_step=max((abs(a.step(body.pivot)) * a.buffer.element for a in nest.accesses), default=0.0)
        if body.pivot >= 0 else 0.0,
        reduced=reduced, overlap=overlap, guarded=guarded, cold=reach.cold,
        tile_bytes=reach.sets[first_reduction], chunk_bytes=reach.sets[first_inside], useful=nest.useful,
        fetching=any(loop.fetching for loop in nest.loops), conditions=nest.conditions,
        conditional=_conditional(nest, body), share=reach.share, apart=reach.apart, curve=reach.curve,
        fresh=reach.fresh, streams=streams, aliased=aliased,
    )


def _in_tiles(nest: Nest, on: CpuMachine) -> float:
    """Cycles of a step of products of tiles of 16 rows of 64 bytes, which takes as long however deep they are: the
    instructions, the rows that are loaded for them, or the time until the sums can be added to again."""
    rows, depth, columns = (nest.loops[axis].extent for axis in (-3, -2, -1))
    added = rows * columns / TILE_LANES / (on.tile_per_cycle or 1.0)
    loaded = (rows + depth * columns / TILE_LANES) * LINE_BYTES / on.l1_rate
    unrolled = math.prod(loop.extent for loop in nest.loops[:-3] if loop.kind == "unrolled")
    return max(added, loaded, on.tile_latency) * unrolled


def _reduced(nest: Nest, body: _Body) -> float:
    """Passes through the body until its accumulators are done: what reduces between it and the next spatial loop."""
    total = 1.0
    for i in range(body.pivot, -1, -1):
        if nest.loops[i].extent > 1 and i not in nest.reduction:
            break
        total *= nest.loops[i].extent
    return total


def _guarded(nest: Nest, body: _Body) -> float:
    """See :class:`NestCost`; a partitioned loop leaves the larger part without the predicate."""
    if not nest.predicated:
        return 0.0
    inside = any(i in nest.predicate and nest.loops[i].extent > 1 for i in body.loops)
    return 1.0 if inside and not any(loop.partitioned for loop in nest.loops) else 0.5


def _conditional(nest: Nest, body: _Body) -> float:
    """See :class:`NestCost`."""
    moving = {i for i in nest.conditional if nest.loops[i].extent > 1}
    if moving & set(body.vectorized):
        return 1.0
    return 0.5 if moving & set(body.loops) else 0.25 if moving else 0.0


def _usable(machine: Machine, steps: int) -> float:
    """Vector registers that LLVM fills before it spills.

    An unrolled reduction makes it hoist broadcasts into registers of their own; otherwise they are memory operands.
    Measured with 32 registers: a tile of 32 accumulators ran at full speed without unrolling, at a third with it.
    """
    hoisted = (5 if machine.vector_registers >= 32 else 1) if steps > 1 else 0
    return machine.vector_registers - hoisted


def _combined(compute: float, memory: tuple[float, ...]) -> float:
    """Out-of-order cores hide most, not all, of the lesser costs behind the largest."""
    worst = max(compute, *memory)
    return worst + 0.15 * (compute + sum(memory) - worst)


def _accesses(
    nest: Nest, body: _Body, scalar_loops: list[int], vectors: int, vector: int
) -> tuple[float, float, float, float, float]:
    """Loads, stores, gathered elements, accumulators and live operand vectors of one pass through the body."""
    extents = nest.extents
    loads = stores = gathers = accumulators = live = 0.0
    store = nest.accesses[0] if nest.accesses else None
    for access in nest.accesses:
        distinct = math.prod(access.elements(set(scalar_loops), extents))
        steps = [abs(access.step(i)) for i in body.vectorized]
        broadcast, contiguous = not any(steps), 1 in steps
        held = body.pivot >= 0 and not any(body.pivot in affine.loops for affine in access.index)
        count = distinct if broadcast else distinct * vectors
        if store is not None and access.buffer is store.buffer and (access.store or _same(access, store)):
            if held and nest.reduction:
                accumulators = count
            elif access.store:
                stores += count if contiguous or vector == 1 else distinct * vector
            elif access.buffer.scope != "local":
                loads += count
            continue
        if held or access.buffer.scope == "local":
            continue  # stays in a register across the innermost real loop
        if not broadcast and not contiguous:
            gathers += distinct * vector
        loads += count
        live = max(live, min(count, float(vectors)))
    return loads, stores, gathers, accumulators, live


def _same(a: Access, b: Access) -> bool:
    return a.index == b.index


def _parallel(nest: Nest) -> tuple[float, float]:
    """Chunks of the parallel region and how often it is entered."""
    entered = 1.0
    for loop in nest.loops:
        if loop.kind == "parallel":
            return float(loop.extent), entered
        entered *= loop.extent
    return 1.0, 1.0


@dataclass(frozen=True)
class _Reach:
    """The memory that a nest touches. ``sets`` are the working sets, in bytes, of the loops from each depth inwards."""

    traffic: tuple[float, ...]
    cold: float
    sets: list[float]
    share: float
    apart: float
    curve: tuple[float, ...]
    fresh: float


def _reach(nest: Nest, machine: Machine, resident: float, tile: int) -> _Reach:
    """Bytes into each level, and how they divide among cores and register tiles, whose loops begin at depth ``tile``.

    ``resident`` bytes are what one core touches in a call: a cache that holds them all is not refilled. Elsewhere, at
    the outermost depth whose working set fits a level, everything in it is fetched once for each iteration of the
    loops outside; what the nearest of those does not move stays.
    """
    extents = nest.extents
    depth = len(extents)
    buffers: dict[int, list[Access]] = {}
    for access in nest.accesses:
        if access.buffer.scope != "local":
            buffers.setdefault(id(access.buffer), []).append(access)
    groups = list(buffers.values())
    prints: list[list[float]] = []  # by depth, by buffer
    for d in range(depth + 1):
        if d and extents[d - 1] == 1:
            prints.append(prints[-1])
            continue
        inside = range(d, depth)
        prints.append([max(_footprint(a, inside, extents) for a in group) for group in groups])
    sets = [sum(row) for row in prints]
    moving = [{i for a in group for affine in a.index for i in affine.loops} for group in groups]
    outside = [math.prod(extents[:d]) for d in range(depth + 1)]

    def refilled(size: float) -> float:
        d = next((i for i in range(depth + 1) if sets[i] <= size), depth)
        total = 0.0
        for loops, held in zip(moving, prints[d], strict=True):
            total += held * outside[d] / (extents[d - 1] if d > 0 and d - 1 not in loops else 1)
        return total

    cold = sum(size for size, group in zip(prints[0], groups, strict=True) if group[0].buffer.cold)
    last = len(machine.levels) - 1
    traffic = tuple(
        cold if resident * (machine.cores if n == last else 1) <= _OWN * level.size else refilled(level.size)
        for n, level in enumerate(machine.levels)
    )
    shared = [
        -(-loop.extent // machine.cores) if loop.kind == "parallel" else loop.extent for loop in nest.loops
    ]
    share = sum(max(_footprint(a, range(depth), shared) for a in group) for group in groups)
    cores = next((min(machine.cores, loop.extent) for loop in nest.loops if loop.kind == "parallel"), 1)
    before = max((i for i in range(tile) if extents[i] > 1), default=-1)
    fresh = sum(size for size, loops in zip(prints[tile], moving, strict=True) if before in loops)
    return _Reach(
        traffic, cold, sets, share, sets[0] / (share * cores) if share else 1.0,
        tuple(refilled(size) for size in SIZES), fresh / sets[tile] if sets[tile] else 0.0,
    )


def _lines(nest: Nest, body: _Body, way: int) -> tuple[float, float]:
    """Cache lines that one pass through the body touches, and how many of one access, multiples of ``way`` bytes apart,
    fall on one set."""
    extents, streams, aliased = nest.extents, 0.0, 0.0
    for access in nest.accesses:
        if access.buffer.scope == "local":
            continue
        streams += max(1.0, _footprint(access, body.loops, extents) / LINE_BYTES)
        for i in body.loops:
            step = abs(access.step(i)) * access.buffer.element
            if extents[i] > 1 and step >= way and step % way == 0:
                aliased = max(aliased, float(extents[i]))
    return streams, aliased


def _footprint(access: Access, loops: Collection[int], extents: list[int]) -> float:
    """Bytes, in whole cache lines, that an access touches while ``loops`` run."""
    if not access.index:
        return float(access.buffer.element)
    elements = access.elements(loops, extents)
    last, size = access.index[-1], access.buffer.element
    span = min(float(access.buffer.shape[-1]), 1.0 + last.range_over(loops, extents)) * size
    # a row that is read whole shares its end lines with the next one
    row = span if span == access.buffer.shape[-1] * size else math.ceil(span / LINE_BYTES) * LINE_BYTES
    return math.prod(elements[:-1]) * min(row, elements[-1] * LINE_BYTES)


def _gpu(nest: Nest, machine: Machine, on: GpuMachine, shared_bytes: float) -> NestCost:
    extents = nest.extents
    grid = math.prod(loop.extent for loop in nest.loops if loop.kind.startswith("blockIdx"))
    threads = math.prod(loop.extent for loop in nest.loops if loop.kind.startswith("threadIdx"))
    own = [i for i, loop in enumerate(nest.loops) if not loop.kind.startswith("blockIdx")]
    per_thread = [i for i in own if not nest.loops[i].kind.startswith("threadIdx")]
    lane = next((i for i, loop in enumerate(nest.loops) if loop.kind == "threadIdx.x"), None)
    private = [a for a in nest.accesses if a.buffer.scope == "local" and a.store]
    accumulators = sum(math.prod(a.elements(set(per_thread), extents)) for a in private)
    registers = 24.0 + accumulators * 1.2
    resident, most, warps = on.threads_per_multiprocessor, float(on.blocks_per_multiprocessor), max(on.warp, threads)
    blocks_fit = min(
        resident / warps, on.registers_per_multiprocessor / (registers * warps),
        on.shared_bytes / shared_bytes if shared_bytes else most, most,
    )
    occupancy = min(1.0, max(0.0, math.floor(blocks_fit)) * threads / resident)
    waves = math.ceil(grid / machine.cores)
    balance = grid / (waves * machine.cores)
    spills = max(0.0, registers - machine.vector_registers)
    fetched = used = 0.0
    for access in nest.accesses:
        if access.buffer.scope not in ("global", ""):
            continue
        touched = math.prod(access.elements(set(own), extents)) * access.buffer.element * grid
        step = abs(access.step(lane)) * access.buffer.element if lane is not None else LINE_BYTES
        waste = 1.0 if step <= access.buffer.element * 4 else min(8.0, step / access.buffer.element)
        fetched, used = fetched + touched * waste, used + touched
    work = max(nest.flops, nest.iterations)
    # few resident warps hide little latency; independent accumulators make up for some of it
    hidden = min(1.0, (occupancy * 4) * max(1.0, min(4.0, accumulators / 4)) + 0.02)
    rate = machine.flops * balance * hidden * min(1.0, threads / on.warp) / (1 + spills / 16)
    compute = work / max(rate, 1.0)
    memory = tuple(fetched / (level.refill * machine.cores) / max(0.05, balance) for level in machine.levels)
    traffic = (fetched,) * len(machine.levels)
    return NestCost(
        seconds=_combined(compute, memory) + machine.launch_seconds, compute=compute, launch=machine.launch_seconds,
        memory=memory, traffic=traffic, parallel=grid, balance=balance, grain=work / max(1.0, grid), regions=1.0,
        unrolled=math.prod(extents[i] for i in per_thread if nest.loops[i].kind == "unrolled"),
        vector=math.prod(extents[i] for i in per_thread if nest.loops[i].kind == "vectorized"),
        accumulators=accumulators, registers=registers / machine.vector_registers, spills=spills,
        tile_bytes=shared_bytes, threads=threads, occupancy=occupancy, coalesced=used / fetched if fetched else 1.0,
    )
