"""Tail tiles of loops of free extent: partial tiles run the code of whole tiles, and rows past the end are not stored.

A schedule guards every statement of a partial tile by a predicate. In a register tile that is a branch for each row and
each step of a sum, and a chunk of several tiles runs through all of them, including empty ones. After this pass a chunk
ends with the last row, and a register tile computes all of its rows: rows past the end read the last row again, and are
not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import replaced, uses, walk
from schedules.even_chunks import with_even_chunks
from schedules.free import SIZES, variables
from schedules.machine import cpu_machine
from schedules.range_conditions import Ranges
from schedules.shifted_tail import bound_of, parts_of, reads_made, with_shifted_tails

__all__ = ["whole_tiles"]


def whole_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function with free sizes, whose chunks hold no empty tiles and whose register tiles test nothing.

    ::

        for t in range(16):                        for t in range(min(16, (n - c * 96 + 5) // 6)):
            for k, r in grid(64, 6):        -->        for k, r in grid(64, 6):
                if c * 96 + t * 6 + r < n:                 tile[r] += A[min(c * 96 + t * 6 + r, n - 1), k] * B[k]
                    tile[r] += A[c * 96 + t * 6 + r, k] * B[k]
    """
    func, analyzer = _tested(_with_plain_indices(func)), _analyzer(func)
    target = func.attrs.get("target")
    func = _clipped(with_shifted_tails(func, analyzer), analyzer)
    if target is not None:
        func = with_even_chunks(func, cpu_machine(target).cores, analyzer)
    return _full(func, analyzer)


def _with_plain_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Predicates without ``i % n`` where ``i`` runs from 0 to ``n``, which TVM leaves where ``n`` is no number."""
    extents: dict[tirx.Var, Any] = {}
    walk(func.body, (tirx.For, lambda loop: extents.__setitem__(loop.loop_var, loop.extent)))

    def plain(modulo: tirx.FloorMod) -> Any:
        extent = extents.get(modulo.a) if isinstance(modulo.a, tirx.Var) else None
        return modulo.a if extent is not None and tvm_ffi.structural_equal(extent, modulo.b) else modulo

    def rewritten(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        predicate = tvm_ffi.structural_map(realize.predicate, (tirx.FloorMod, plain))
        return s_tir.SBlockRealize(realize.iter_values, predicate, realize.block)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, rewritten)))


def _tested(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Predicates without what holds for every size."""
    ranges = Ranges.of(func)

    def needed(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        parts = parts_of(realize.predicate)
        kept = [part for part in parts if not ranges.hold(part)]
        if len(kept) == len(parts):
            return realize
        predicate = tirx.all(*kept) if kept else tirx.const(True, "bool")
        return s_tir.SBlockRealize(realize.iter_values, predicate, realize.block)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, needed)))


def _analyzer(func: tirx.PrimFunc) -> Any:
    """One that knows the ranges of a function's free sizes and loops."""
    analyzer = tvm.sym.Analyzer()

    def bind(var: tirx.Var, least: Any, extent: Any) -> None:
        analyzer.bind(var, tvm.ir.Range.from_min_extent(least, extent))

    for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True):
        bind(var, *(tirx.const(int(end), str(var.ty)) for end in (low, int(high) - int(low) + 1)))
    walk(func.body, (tirx.For, lambda loop: bind(loop.loop_var, loop.min, loop.extent)))
    return analyzer


# chunks


def _clipped(func: tirx.PrimFunc, analyzer: Any) -> tirx.PrimFunc:
    def clip(loop: tirx.For) -> tirx.For:
        end = _end(loop, analyzer) if loop.kind == tirx.ForKind.SERIAL else None
        if end is None:
            return loop
        extent, body = tirx.min(loop.extent, end), _untested(loop, end, analyzer)
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, body, annotations=dict(loop.annotations))

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, clip)))


def _end(loop: tirx.For, analyzer: Any) -> Any:
    """The number of iterations in which the predicates of all that is inside a loop can hold, None where it is that of
    all."""
    if isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1:
        return None
    inner: list[tirx.Var] = []
    walk(loop.body, (tirx.For, lambda each: inner.append(each.loop_var)))
    ends: list[Any] = []
    for realize in _outermost(loop.body):
        bounds = (bound for part in parts_of(realize.predicate) if (bound := bound_of(part)) is not None)
        found = [_iterations(loop, inner, analyzer, *bound) for bound in bounds]
        if all(end is None for end in found):
            return None
        ends.append(next(end for end in found if end is not None))
    same = bool(ends) and all(analyzer.can_prove_equal(ends[0], end) for end in ends[1:])
    return ends[0] if same else None


def _outermost(body: tirx.Stmt) -> list[s_tir.SBlockRealize]:
    """The blocks of a loop's ``body`` that are in no other block of it: those inside a block, of the lanes of an
    instruction, are executed where its predicate holds."""
    found: list[s_tir.SBlockRealize] = []
    inside: list[s_tir.SBlockRealize] = []

    def note(realize: s_tir.SBlockRealize) -> None:
        found.append(realize)
        walk(realize.block.body, (s_tir.SBlockRealize, inside.append))

    walk(body, (s_tir.SBlockRealize, note))
    return [each for each in found if not any(each.same_as(one) for one in inside)]


def _untested(loop: tirx.For, end: Any, analyzer: Any) -> tirx.Stmt:
    """The body of a loop that runs ``end`` times, without the predicates that say so alone."""
    inner: list[tirx.For] = []
    walk(loop.body, (tirx.For, inner.append))
    first = {each.loop_var: tirx.const(0, str(each.loop_var.ty)) for each in inner if _number(each.extent) == 1}

    def settles(part: Any) -> bool:
        bound = bound_of(part)
        if bound is None:
            return False
        value = analyzer.simplify(replaced(bound[0], first))
        if uses(value, [each.loop_var for each in inner]):
            return False
        found = _iterations(loop, [], analyzer, value, bound[1])
        return found is not None and bool(analyzer.can_prove_equal(found, end))

    def without(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        kept = [part for part in parts_of(realize.predicate) if not settles(part)]
        predicate = tirx.all(*kept) if kept else tirx.const(True, "bool")
        return s_tir.SBlockRealize(realize.iter_values, predicate, realize.block)

    return tvm_ffi.structural_map(loop.body, (s_tir.SBlockRealize, without))


def _number(extent: Any) -> int | None:
    return int(extent) if isinstance(extent, tirx.IntImm) else None


def _iterations(loop: tirx.For, inner: Sequence[tirx.Var], analyzer: Any, value: Any, last: Any) -> Any:
    """How often ``value <= last`` can hold, where ``value`` grows with the loop and with those inside it."""
    var = loop.loop_var
    if not uses(value, [var]) or uses(last, [var, *inner]):
        return None

    def at(values: dict[tirx.Var, int]) -> Any:
        return replaced(value, {v: tirx.const(n, str(v.ty)) for v, n in values.items()})

    origin = {v: 0 for v in inner}
    steps = [analyzer.simplify(at({**origin, v: 1, **({} if v is var else {var: 0})}) - at({**origin, var: 0}))
             for v in (var, *inner)]
    if not all(isinstance(step, tirx.IntImm) and int(step) >= 0 for step in steps) or int(steps[0]) < 1:
        return None
    again = analyzer.simplify(at({**origin, var: 2}) - at({**origin, var: 1}))
    if not (isinstance(again, tirx.IntImm) and int(again) == int(steps[0])):
        return None
    return analyzer.simplify(tirx.floordiv(last - at({**origin, var: 0}), steps[0]) + 1)


# register tiles


def _full(func: tirx.PrimFunc, analyzer: Any) -> tirx.PrimFunc:
    loops: list[tirx.For] = []
    params = list(func.params)
    walk(func.body, (tirx.For, loops.append))
    indices = [loop.loop_var for loop in loops]
    lanes = [loop.loop_var for loop in loops if loop.kind == tirx.ForKind.VECTORIZED]

    def fill(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        block = realize.block
        if not block.writes or any(str(region.source.scope()) != "local" for region in block.writes):
            return realize
        kept, ends = [], {}
        for part in parts_of(realize.predicate):
            bound = bound_of(part)
            row = None if bound is None else _row(realize, analyzer, indices, lanes, *bound)
            if row is None or bound is None:
                kept.append(part)
            else:
                ends[row] = bound[1]
        if not ends or reads_made(block, params, list(ends)):
            return realize
        clamp, clamp_matched = _clamp(ends)
        filled = s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint,
            tvm_ffi.structural_map(block.body, [(TensorLoad, clamp), (s_tir.SBlock, clamp_matched)]),
            block.init, block.alloc_buffers, block.match_buffers, block.annotations,
        )
        always = tirx.const(True, "bool")
        return s_tir.SBlockRealize(realize.iter_values, tirx.all(*kept) if kept else always, filled)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, fill)))


def _row(
    realize: s_tir.SBlockRealize, analyzer: Any, loops: Sequence[tirx.Var], lanes: Sequence[tirx.Var], value: Any,
    last: Any,
) -> tirx.Var | None:
    """The iterator of a block that is ``value``, where rows past the end may be computed: it is none of a sum's, does
    not run along a vector, and no loop moves the end."""
    if uses(value, lanes) or uses(last, loops):
        return None
    pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    return next((each.var for each, at in pairs
                 if each.iter_type != tirx.IterVar.CommReduce and analyzer.can_prove_equal(at, value)), None)


def _clamp(
    ends: dict[tirx.Var, Any]
) -> tuple[Callable[[TensorLoad], Any], Callable[[s_tir.SBlock], s_tir.SBlock]]:
    """Loads of what lies in memory, and the rows that instructions take of it, up to the last row."""
    image = {var: tirx.min(var, last) for var, last in ends.items()}

    def clamp(load: TensorLoad) -> Any:
        if str(load.source.scope()) == "local" or not any(uses(index, list(image)) for index in load.indices):
            return load
        return tirx.BufferLoad(load.source, [replaced(index, image) for index in load.indices])

    def of_memory(match: s_tir.MatchBufferRegion) -> s_tir.MatchBufferRegion:
        taken = match.source
        if str(taken.source.scope()) == "local":
            return match
        region = [tvm.ir.Range.from_min_extent(replaced(r.min, image), r.extent) for r in taken.region]
        return s_tir.MatchBufferRegion(match.buffer, tirx.BufferRegion(taken.source, region))

    def clamp_matched(block: s_tir.SBlock) -> s_tir.SBlock:
        if not block.match_buffers:
            return block
        return s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init, block.alloc_buffers,
            [of_memory(match) for match in block.match_buffers], block.annotations)

    return clamp, clamp_matched
