"""Reductions whose neighbouring results lie side by side in what is read: a row times a weight, means of channels last,
pooling. A thread has as many neighbouring results as it can fetch terms of at once, 16 bytes where they are aligned.

A block's threads lie along results and along terms. Each adds up every so many terms in registers, several of which are
under way at once; the sums of threads of the same results meet in shared memory, where those of the first terms add
them in order. Where too few blocks would run, a sum is cut over several, the last of which adds the parts
(:mod:`schedules.cuda.joined`). Sums have the same order in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.analysis import loads, uses
from schedules.cuda import memory_time
from schedules.cuda.column_shape import PIECE, TYPES, Shape, bits_of, guards, neighbours, shape_of
from schedules.cuda.common import CudaSpace, Leaf, ceil_div, cheapest, inline_injective, leaves, limits, require
from schedules.cuda.memory_time import SECTOR
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["Columns"]

#: numbers of 32 bits that the widest access takes, and banks of shared memory of as many bits each
_WIDE, _BANKS = 4, 32
#: terms of a thread that are fetched before they are added up, at most, and fetches of these that are under way at
#: once: CUDA's compiler moves the others behind the first additions (on an H200 a row times a weight had 2.6)
_DEPTH, _UNDER_WAY = 8, 3
#: threads along terms, and blocks that share a sum, at most
_MOST_TOGETHER, _MOST_PARTS = 256, 64
_SEEDS = 6
#: seconds until what a block has written can be read by another
_TOLD = 1.2e-6
#: registers of a thread beside its sums and what it fetches
_OTHER_REGISTERS = 12
#: cycles that a thread takes to add up a vector of what another has left in shared memory
_JOIN = 12


@dataclass(frozen=True)
class _Tile:
    """One assignment of the knobs: vectors of results of a block, threads of the same results, blocks of the same."""

    lanes: int
    together: int
    parts: int

    @property
    def threads(self) -> int:
        return self.lanes * self.together


class Columns(CudaSpace):
    """One reduction whose neighbouring results lie side by side in all that moves with them."""

    name = "cuda.columns"

    def recognises(self, func: tirx.PrimFunc) -> bool:
        return shape_of(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = shape_of(func)
        assert shape is not None, "knobs are asked only of a space that matches"
        lanes = {*_divisors(shape.columns // shape.vector, 256), *_divisors(shape.pieces, 256), 32, 64, 128, 256}
        return (
            Knob("lanes", tuple(sorted(lanes))), Knob("together", _divisors(shape.terms, _MOST_TOGETHER)),
            Knob("parts", _divisors(shape.terms, _MOST_PARTS)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = shape_of(func)
        assert shape is not None, "seeds are asked only of a space that matches"
        gpu = limits(target)
        knobs = {knob.name: knob.values for knob in self.knobs(func, target)}

        def preference(tile: _Tile) -> tuple[bool, float]:
            """TVM refuses some images that are cut into pieces with a rest."""
            return shape.pieces % tile.lanes != 0, _seconds(tile, shape, gpu)

        return cheapest(_Tile, knobs, lambda tile: _misfit(tile, shape, gpu), preference, _SEEDS)

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        shape, gpu, tile = shape_of(func), limits(target), _Tile(**decisions)
        if shape is None:
            return None
        misfit = _misfit(tile, shape, gpu)
        require(misfit is None, str(misfit))
        return _seconds(tile, shape, gpu, resident)

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint | None:
        shape, tile = shape_of(func), _Tile(**decisions)
        if shape is None:
            return None
        fetched = _piece_bytes(tile, shape)
        return Footprint.of(
            gpu_machine(target), tile.threads, _OTHER_REGISTERS + shape.vector + ceil_div(fetched, 4),
            _shared_bytes(tile, shape), 1, tile.threads * fetched, tensor_cores=False)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        shape = shape_of(sch.mod["main"])
        if shape is None:
            raise InvalidDecision("the function must hold one reduction with neighbouring results side by side")
        tile = _Tile(pick("lanes"), pick("together"), pick("parts"))
        misfit = _misfit(tile, shape, limits(target))
        require(misfit is None, str(misfit))
        found = leaves(sch)
        borders = guards(found)
        kept = [replace(leaf, intermediate=False) if leaf in borders else leaf for leaf in found]
        main, *rest = inline_injective(sch, kept)[len(borders):]
        column = shape.out if rest else main.info.spatial.index(shape.last)
        following = rest[0].rv if rest else None
        if tile.together == 1:
            _alone(sch, main, _kept(sch, main.rv, following, "local"), column, shape, tile)
        else:
            _together(sch, main, following, column, shape, tile)


def _kept(sch: s_tir.Schedule, block: Any, following: Any, scope: str) -> Any:
    """Keep what a block computes in memory of ``scope``; the block that takes it from there, which is ``following``
    where there is one."""
    if following is None:
        return sch.cache_write(block, 0, scope)
    sch.set_scope(block, 0, scope)
    return following


def _alone(sch: s_tir.Schedule, main: Leaf, out: Any, column: int, shape: Shape, tile: _Tile) -> None:
    """Each thread adds up all terms of its results."""
    block, lanes = _deal(sch, out, column, shape.vector)
    block, thread = sch.split(block, [None, tile.lanes])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    _vectors(sch, lanes, shape.vector, shape.stored)
    sch.compute_at(main.rv, thread, preserve_unit_loops=True)
    own = sch.get_loops(main.rv)[2:]
    terms = [loop for loop, reduced in zip(own, main.info.reduces, strict=True) if reduced]
    if len(terms) == 1:
        terms = list(sch.split(terms[0], [None, _depth(shape, tile)]))
    _accumulate(sch, main.rv, terms, own[shape.last], main, shape)


def _together(sch: s_tir.Schedule, main: Leaf, following: Any, column: int, shape: Shape, tile: _Tile) -> None:
    """Threads of a block, and blocks, each add up some of the terms.

    Before: ``for n, k: s[n] += f(n, k)``, ``for n: out(s[n])``. After, for the threads of a block: ``for k: r[n] +=
    f(n, k)`` in registers, ``t[thread, n] = r[n]`` in shared memory, and ``for thread: s[n] += t[thread, n]``,
    ``out(s[n])`` by some of them. Of parts of a sum, what is stored so are they; a second kernel adds them up.
    """
    loops, reduces = sch.get_loops(main.rv), main.info.reduces
    flat = sch.fuse(*(loop for loop, reduced in zip(loops, reduces, strict=True) if reduced))
    part, _, mine, _ = sch.split(flat, [tile.parts, None, tile.together, _depth(shape, tile)])
    own, total = main.info.spatial.index(shape.last), main.rv
    if tile.parts > 1:
        total = sch.rfactor(part, factor_axis=0)
        *_, mine, _ = sch.get_loops(total)
    sums = sch.rfactor(mine, factor_axis=0)
    exact = shape.vector == tile.together * shape.stored or tile.parts > 1
    out = _kept(sch, main.rv, following, "local" if exact else "shared")
    if tile.parts > 1:
        _blocks(sch, main.rv, out, column, shape, tile)
        _join(sch, main.rv, out, own, shape, tile)
        out = sch.cache_write(total, 0, "local")
        own, column = own + 1, own + 1
    block = _blocks(sch, total, out, column, shape, tile)
    shared = sch.cache_write(sums, 0, "local")
    sch.set_scope(shared, 0, "shared")
    sch.compute_at(shared, block, preserve_unit_loops=True)
    first, *others = sch.get_loops(shared)[1:]
    lane, held = sch.split(others[own], [tile.lanes, shape.vector])
    sch.bind(first, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    _vectors(sch, held, shape.vector, min(shape.vector, 8 * PIECE // _held_bits(sch, shared)))
    sch.compute_at(sums, lane, preserve_unit_loops=True)
    kinds = _reduced(sch, sums)
    inner = sch.get_loops(sums)[-len(kinds):]
    terms = [loop for loop, reduced in zip(inner, kinds, strict=True) if reduced]
    _accumulate(sch, sums, terms, inner[own + 1], main, shape)
    if exact:
        _join(sch, total, out, own, shape, tile)
    else:
        _join_shared(sch, total, out, own, shape, tile)
    # the last step: what a thread fetches of a sum is found where its place is that of the result
    if shape.vector == 2 * _WIDE and _held_bits(sch, shared) == 8 * PIECE // _WIDE:
        _apart(sch, shared, own + 1, tile, rows=True)
        if not exact:
            _apart(sch, main.rv, own, tile, rows=False)


def _reduced(sch: s_tir.Schedule, block: Any) -> list[bool]:
    """Which iterators of a block are terms."""
    return [iv.iter_type == tirx.IterVar.CommReduce for iv in sch.get(block).iter_vars]


def _deal(sch: s_tir.Schedule, block: Any, column: int, width: int) -> tuple[Any, Any]:
    """Loops over pieces of so many neighbours, and in one."""
    loops = sch.get_loops(block)
    pieces, inner = sch.split(loops[column], [None, width])
    sch.reorder(*loops[:column], pieces, *loops[column + 1:], inner)
    return sch.fuse(*loops[:column], pieces, *loops[column + 1:]), inner


def _blocks(sch: s_tir.Schedule, total: Any, out: Any, column: int, shape: Shape, tile: _Tile) -> Any:
    """Deal results out to blocks of threads; the loop over these, in which ``total`` is."""
    block, _ = _deal(sch, out, column, tile.lanes * shape.vector)
    sch.bind(block, "blockIdx.x")
    sch.compute_at(total, block, preserve_unit_loops=True)
    return block


def _held_bits(sch: s_tir.Schedule, block: Any) -> int:
    """Of an element of what a block writes."""
    return int(tvm.runtime.DataType(str(sch.get(block).writes[0].source.dtype)).bits)


def _apart(sch: s_tir.Schedule, block: Any, column: int, tile: _Tile, *, rows: bool) -> None:
    """Let what a block keeps in shared memory of eight neighbours of each lane lie as their first halves and then as
    their second ones, half of the banks further: neither threads that access four numbers of a half meet in a bank, nor
    those that access numbers side by side. ``rows``, of threads of the same results, follow each other in the banks."""
    held = sch.get(block).writes[0].source
    whole, alone = 2 * _WIDE * tile.lanes, tile.lanes == 1

    def halves(*place: Any) -> list[Any]:
        at = place[column]
        lane = [] if alone else [at % whole // (2 * _WIDE)]
        return [*place[:column], at // whole, *place[column + 1:], at // _WIDE % 2, *lane, at % _WIDE]

    index = str(sch.get(block).iter_vars[0].dom.extent.ty.dtype)
    layout = tirx.IndexMap.from_func(halves, ndim=len(held.shape), index_dtype=index)
    sch.transform_layout(block, ("write", 0), layout)
    sch.storage_align(block, 0, axis=-2 if alone else -3, factor=_BANKS, offset=_BANKS // 2)
    if rows:
        sch.storage_align(block, 0, axis=0, factor=_BANKS, offset=_WIDE * tile.lanes % _BANKS)


def _join(sch: s_tir.Schedule, total: Any, out: Any, own: int, shape: Shape, tile: _Tile) -> None:
    """Let a block's threads add up what ``total`` is the sum of, each of equally many neighbours, and store them."""
    wide = shape.vector // tile.together
    terms, held, lane = _share(sch, total, own, tile, wide)
    sch.reverse_compute_at(out, lane, preserve_unit_loops=True)
    *_, stored = sch.get_loops(out)
    _vectors(sch, stored, wide, min(wide, shape.stored))
    if wide > 1:
        fetched = sch.cache_read(total, 0, "local")
        sch.compute_at(fetched, terms[0], preserve_unit_loops=True)
        *_, last = sch.get_loops(fetched)
        _vectors(sch, last, wide, min(wide, 4))
        sch.unroll(held)
    sch.decompose_reduction(total, terms[0])


def _join_shared(sch: s_tir.Schedule, total: Any, out: Any, own: int, shape: Shape, tile: _Tile) -> None:
    """Let a block's threads add up single results, as many as there are, and those of the first terms store vectors."""
    terms, _, _ = _share(sch, total, own, tile, 1)
    sch.decompose_reduction(total, terms[0])
    *_, inner = sch.get_loops(out)
    rows, lane, held = sch.split(inner, [None, tile.lanes, shape.stored])
    _, row = sch.split(rows, [None, tile.together])
    sch.bind(row, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    _vectors(sch, held, shape.stored, shape.stored)


def _share(sch: s_tir.Schedule, total: Any, own: int, tile: _Tile, wide: int) -> tuple[list[Any], Any, Any]:
    """Deal out what a block adds up to its threads, so many neighbours to each; the loops over terms, over neighbours,
    and over threads."""
    inner, kinds = sch.get_loops(total)[1:], _reduced(sch, total)
    terms = [loop for loop, reduced in zip(inner, kinds, strict=True) if reduced]
    spatial = [loop for loop, reduced in zip(inner, kinds, strict=True) if not reduced]
    rows, lane, held = sch.split(spatial[own], [None, tile.lanes, wide])
    over, row = sch.split(rows, [None, tile.together])
    others = [loop for i, loop in enumerate(spatial) if i != own]
    sch.reorder(*others, over, row, lane, *terms, held)
    sch.bind(row, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    return terms, held, lane


def _accumulate(
    sch: s_tir.Schedule, block: Any, terms: Sequence[Any], column: Any, main: Leaf, shape: Shape
) -> None:
    """Add up in registers what is fetched before each step of the last loop over terms but one, as vectors."""
    sch.reorder(*terms, column)
    sch.unroll(column)
    for loop in terms:
        if int(sch.get(loop).extent) <= _DEPTH:
            sch.unroll(loop)
    fetched = [(made, shape.vector) for made in sch.get_producers(block)]
    for made, _ in fetched:
        sch.set_scope(made, 0, "local")
    sources = [read.source for read in sch.get(block).reads]
    for i, source in enumerate(sources):
        if source.scope() != "local":
            fetched.append((sch.cache_read(block, i, "local"), _width(main, source, shape)))
    for fetch, width in fetched:
        sch.compute_at(fetch, terms[-2] if len(terms) > 1 else terms[-1], preserve_unit_loops=True)
        own = sch.get_loops(fetch)[-len(sch.get(fetch).iter_vars):]
        *more, last = [loop for loop in own if int(sch.get(loop).extent) > 1] or own
        for loop in more:
            sch.unroll(loop)
        extent = int(sch.get(last).extent)
        _vectors(sch, last, extent, gcd(extent, width))
    sch.decompose_reduction(block, terms[0])


def _width(main: Leaf, source: tirx.Buffer, shape: Shape) -> int:
    """How many elements of a buffer are fetched at once: neighbouring columns, or where they are of none, terms."""
    found = [load for load in loads(main.info.block.body) if load.source.same_as(source)]
    if any(uses(load, [main.info.variables[shape.last]]) for load in found):
        return shape.vector
    terms = [i for i, reduced in enumerate(main.info.reduces) if reduced]
    if len(terms) != 1 or not found or str(source.dtype) not in TYPES:
        return 1
    return neighbours(main, terms[0], found, 8 * PIECE // bits_of(found[0]))


def _vectors(sch: s_tir.Schedule, loop: Any, extent: int, width: int) -> None:
    """Take the points of a loop so many at once."""
    if width < extent:
        more, loop = sch.split(loop, [None, width])
        sch.unroll(more)
    if width > 1:
        sch.vectorize(loop)


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, most + 1) if number % n == 0)


def _depth(shape: Shape, tile: _Tile) -> int:
    """How many terms a thread fetches before it adds them up."""
    return max(n for n in _divisors(shape.terms // (tile.parts * tile.together), _DEPTH) if shape.run % n == 0)


def _misfit(tile: _Tile, shape: Shape, gpu: GpuMachine) -> str | None:
    """Why a tile can't run on a GPU, or None."""
    if not gpu.warp <= tile.threads <= gpu.threads_per_block:
        return f"a block must have {gpu.warp} to {gpu.threads_per_block} threads, got {tile.threads}"
    if tile.together == 1:
        return None if tile.parts == 1 else "of a sum that blocks share, threads must share the parts"
    if shape.guarded:
        return "a sum with a border that is not there must be one thread's"
    if shape.terms % (tile.parts * tile.together) or shape.columns // shape.vector % tile.lanes:
        return "threads must have equal numbers of terms, and blocks of results"
    if _shared_bytes(tile, shape) > gpu.shared_bytes:
        return f"the threads' sums must fit {gpu.shared_bytes} bytes, got {_shared_bytes(tile, shape)}"
    if tile.parts > 1 and shape.vector % tile.together:
        return f"threads must divide {shape.vector} results of a part, got {tile.together}"
    return None


def _shared_bytes(tile: _Tile, shape: Shape) -> int:
    """For the threads' sums of a block."""
    if tile.together == 1:
        return 0
    return 4 * (tile.together + 1) * (tile.lanes * shape.vector + 3 * _BANKS * (shape.vector == 2 * _WIDE))


def _seconds(tile: _Tile, shape: Shape, gpu: GpuMachine, resident: int = 0) -> float:
    """Time of a tile, reckoned: terms are fetched, then threads' sums meet, and blocks'."""
    resident = resident or max(1, min(
        gpu.blocks_per_multiprocessor, gpu.threads_per_multiprocessor // tile.threads))
    blocks, piece = ceil_div(shape.pieces, tile.lanes) * tile.parts, shape.vector * shape.bits // 8
    row = tile.lanes * piece  # what neighbouring threads fetch; others have the rest of its last sectors
    whole = row % SECTOR == 0 and shape.columns * shape.bits // 8 % SECTOR == 0
    scattered = 1.0 if whole else 1.0 + SECTOR / (2 * row)
    running = min(shape.pieces * tile.parts * tile.together, gpu.multiprocessors * resident * tile.threads)
    found = memory_time.seconds(
        gpu, blocks=blocks, resident=resident, under_way=running * _piece_bytes(tile, shape),
        memory=shape.pieces * shape.terms * piece * scattered,
        cycles=_JOIN * tile.together if tile.together > 1 else 0)
    return found + (_TOLD + _JOIN * tile.parts / gpu.hz if tile.parts > 1 else 0.0)


def _piece_bytes(tile: _Tile, shape: Shape) -> int:
    """Bytes that a thread has under way."""
    terms = shape.terms // (tile.parts * tile.together)
    return shape.vector * shape.bits // 8 * min(terms, _depth(shape, tile), _UNDER_WAY)
