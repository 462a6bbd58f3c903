"""Shifted tail tiles of loops of free extent: the last register tile starts earlier, so that it is a whole one.

Where every size has as many iterations as a tile, the last tile may begin before the one before it ends, and compute
some of its rows again: no row is tested, and there is one loop body instead of a whole and a ragged one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import loads, replaced, uses, walk
from schedules.loop_partition import HINT
from schedules.range_conditions import Ranges

__all__ = ["bound_of", "parts_of", "reads_made", "with_shifted_tails"]

_TILE = (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED)
_LOOPS = (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL)


def with_shifted_tails(func: tirx.PrimFunc, analyzer: Any) -> tirx.PrimFunc:
    """A scheduled function with free sizes whose last register tiles begin early enough to be whole, where all sizes
    have as many rows as a tile, and what is computed again comes to the same.

    ::

        for t in range((n + 5) // 6):           for t in range((n + 5) // 6):
            for r in unroll(6):          -->        for r in unroll(6):
                if t * 6 + r < n:                       B[min(t * 6, n - 6) + r] = f(A[min(t * 6, n - 6) + r])
                    B[t * 6 + r] = f(A[t * 6 + r])

    ``analyzer`` knows the ranges of the sizes and loops.
    """
    ranges, params = Ranges.of(func), list(func.params)

    def shift(loop: tirx.For) -> tirx.For:
        tile = _tile(loop, analyzer, ranges) if loop.kind in _LOOPS else None
        return loop if tile is None or not _repeatable(tile, params, analyzer) else _moved(tile, analyzer)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, shift)))


@dataclass(frozen=True)
class _Tile:
    """What is inside ``loop``, whose iteration computes ``size`` rows from ``begin`` on, of which the last of all is
    ``last``. ``inner`` are the loops inside it."""

    loop: tirx.For
    realizes: Sequence[s_tir.SBlockRealize]
    inner: Sequence[tirx.For]
    begin: Any
    last: Any
    size: int

    @property
    def variables(self) -> list[tirx.Var]:
        return [loop.loop_var for loop in self.inner]


def _tile(loop: tirx.For, analyzer: Any, ranges: Ranges) -> _Tile | None:
    """The register tile that a loop steps through; None where its steps are of another kind or may be too few."""
    inner: list[tirx.For] = []
    realizes: list[s_tir.SBlockRealize] = []
    walk(loop.body, (tirx.For, inner.append), (s_tir.SBlockRealize, realizes.append))
    bounds = (bound for realize in realizes for part in parts_of(realize.predicate)
              if (bound := bound_of(part)) is not None and uses(bound[0], [loop.loop_var]))
    value, last = next(bounds, (None, None))
    if value is None or uses(last, [loop.loop_var, *(each.loop_var for each in inner)]):
        return None
    used = [each for each in inner if uses(value, [each.loop_var])]
    if not used or any(each.kind not in _TILE or not isinstance(each.extent, tirx.IntImm) for each in used):
        return None

    def at(step: int) -> Any:
        ends = {each.loop_var: tirx.const(step * (int(each.extent) - 1), str(each.loop_var.ty)) for each in used}
        return analyzer.simplify(replaced(value, ends))

    begin, span = at(0), analyzer.simplify(at(1) - at(0))
    if not isinstance(span, tirx.IntImm) or int(span) < 1 or not ranges.hold(span <= last):
        return None
    there = replaced(begin, {loop.loop_var: loop.loop_var + 1})
    if not analyzer.can_prove_equal(there - begin, span + 1):
        return None
    return _Tile(loop, realizes, inner, begin, last, int(span) + 1)


def _repeatable(tile: _Tile, params: Sequence[Any], analyzer: Any) -> bool:
    """Whether a tile may compute rows that another one has computed: each block takes its rows from the loop in the
    same way, none adds to what it finds, and none reads what there may be too little of."""
    var = tile.loop.loop_var
    if any(uses(each.extent, [var]) or uses(each.min, [var]) for each in tile.inner):
        return False
    begun = [region.source for each in tile.realizes for region in each.block.writes
             if each.block.init is not None or not _adds(each.block, region.source)]
    alone = not any(uses(tile.begin, [each]) for each in _others(tile))
    for realize in tile.realizes:
        block = realize.block
        if uses(block, [var]):
            return False
        rows = _rows(realize, tile)
        if not all(each.iter_type == each.DataPar and _offset(tile, value, analyzer) is not None
                   for each, value in rows):
            return False
        guards = [bound_of(part) for part in parts_of(realize.predicate) if uses(part, [var])]
        if not all(guard is not None and _offset(tile, guard[0], analyzer) is not None
                   and analyzer.can_prove_equal(guard[1], tile.last) for guard in guards):
            return False
        for region in block.writes:
            local = str(region.source.scope()) == "local"
            if _adds(block, region.source) and not (local and any(region.source.same_as(each) for each in begun)):
                return False
        if not alone and rows and reads_made(block, params, [each.var for each, _ in rows]):
            return False
    return True


def _others(tile: _Tile) -> list[tirx.Var]:
    """The variables in a tile's begin but for the loop's own and free sizes, which the last row depends on too."""
    known = tirx.analysis.undefined_vars(tile.last)
    return [each for each in tirx.analysis.undefined_vars(tile.begin)
            if not each.same_as(tile.loop.loop_var) and not any(each.same_as(size) for size in known)]


def _rows(realize: s_tir.SBlockRealize, tile: _Tile) -> list[tuple[tirx.IterVar, Any]]:
    """The iterators of a block that the loop moves."""
    pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    return [(each, value) for each, value in pairs if uses(value, [tile.loop.loop_var])]


def _offset(tile: _Tile, value: Any, analyzer: Any) -> Any:
    """How far a row is from the tile's begin, in terms of the loops inside; None where it may lie outside the tile."""
    offset = analyzer.simplify(value - tile.begin)
    known = tirx.analysis.undefined_vars(offset)
    if not all(any(each.same_as(var) for var in tile.variables) for each in known):
        return None
    bound = analyzer.const_int_bound(offset)
    return offset if int(bound.min_value) >= 0 and int(bound.max_value) < tile.size else None


def _adds(block: s_tir.SBlock, buffer: Any) -> bool:
    """Whether a block reads what it writes."""
    return any(source.same_as(buffer) for source, _ in _read(block))


def _read(block: s_tir.SBlock) -> list[tuple[Any, list[Any]]]:
    """What a block reads, and at which indices: of what an instruction takes, where that begins."""
    found = [(load.source, [*load.indices]) for load in loads(block.body)]
    inner: list[s_tir.SBlock] = [block]
    walk(block.body, (s_tir.SBlock, inner.append))
    for each in inner:
        for match in each.match_buffers:
            if any(load.source.same_as(match.buffer) for load in loads(each.body)):
                found.append((match.source.source, [r.min for r in match.source.region]))
    return found


def reads_made(block: s_tir.SBlock, params: Sequence[Any], rows: Sequence[tirx.Var]) -> bool:
    """Whether a block reads, along its rows, a tensor that the function itself computes: of such a tensor there may be
    only the rows that a chunk asks for."""
    return any(
        str(source.scope()) != "local" and not any(source.same_as(param) for param in params)
        and any(uses(index, rows) for index in indices) for source, indices in _read(block)
    )


def _moved(tile: _Tile, analyzer: Any) -> tirx.For:
    """The loop with its last tile moved back."""
    var = tile.loop.loop_var
    begin = tirx.min(tile.begin, analyzer.simplify(tile.last - (tile.size - 1)))

    def move(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        values = [begin + _offset(tile, value, analyzer) if uses(value, [var]) else value
                  for value in realize.iter_values]
        kept = [part for part in parts_of(realize.predicate) if not uses(part, [var])]
        predicate = tirx.all(*kept) if kept else tirx.const(True, "bool")
        return s_tir.SBlockRealize(values, predicate, realize.block)

    body = tvm_ffi.structural_map(tile.loop.body, (s_tir.SBlockRealize, move))
    kept = {key: value for key, value in tile.loop.annotations.items() if key != HINT}
    first = replaced(tile.begin, {var: tirx.const(0, str(var.ty))})
    extent, end = tile.loop.extent, analyzer.simplify(tirx.floordiv(tile.last - first, tile.size) + 1)
    if not analyzer.can_prove_equal(extent, end):
        extent = tirx.min(extent, end)  # a chunk of several tiles ends with the last one
    return tirx.For(var, tile.loop.min, extent, tile.loop.kind, body, annotations=kept)


def parts_of(predicate: Any) -> list[Any]:
    """The conditions that must all hold."""
    if isinstance(predicate, tirx.And):
        return [*parts_of(predicate.a), *parts_of(predicate.b)]
    return [predicate]


def bound_of(condition: Any) -> tuple[Any, Any] | None:
    """``(value, last)`` of a condition ``value <= last``."""
    if isinstance(condition, tirx.LE):
        return condition.a, condition.b
    return (condition.a, condition.b - 1) if isinstance(condition, tirx.LT) else None
