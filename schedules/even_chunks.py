"""Divides a parallel loop of free extent into equal chunks, as many as keep every core busy.

Chunks of a fixed number of rows leave one core with a whole chunk more than another: 28 rows in chunks of 16 on two
cores take as long as 32. As many chunks as a multiple of the cores, each of a part of the rows, take as long as 28.
Where another loop beside the chunks can be shared out equally, chunks keep their rows: weights are read once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import evaluate, replaced, uses, walk
from schedules.free import variables

__all__ = ["with_even_chunks"]

#: as many other iterations for each chunk, times the cores, leave no core waiting for long
_MANY = 8


def with_even_chunks(func: tirx.PrimFunc, cores: int, analyzer: Any) -> tirx.PrimFunc:
    """A scheduled function with free sizes whose parallel chunks are as many as a multiple of ``cores``, where there
    are so many rows.

    ::

        parallel c in range(ceil(n / 16)):                       parallel c in range(m):
            for r in range(min(16, n - c * 16)):         -->         for r in range((c + 1) * n // m - c * n // m):
                B[c * 16 + r] = f(A[c * 16 + r])                         B[c * n // m + r] = f(A[c * n // m + r])
    """
    params, free = list(func.params), variables(func)

    def even(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL or isinstance(loop.extent, tirx.IntImm):
            return loop
        apart = _apart(loop, free, analyzer)
        if apart is None or apart.others >= _MANY * cores:
            return loop
        if apart.others % cores == 0:  # each core has all chunks, of a part of the other loop
            return replace(apart, outer=False).together(apart.loop) if apart.outer else loop
        chunks = _chunks(apart.loop, params, analyzer)
        made = None if chunks is None else _cut(chunks, cores)
        return loop if made is None else apart.together(made)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, even))) if cores > 1 else func


@dataclass(frozen=True)
class _Apart:
    """``loop`` over chunks, and the variable of another loop of ``others`` iterations that was fused with it, inside it
    where ``outer``, else around it."""

    loop: tirx.For
    others: int = 1
    other: tirx.Var | None = None
    outer: bool = True

    def together(self, loop: tirx.For) -> tirx.For:
        """The loop over other chunks, fused again."""
        if self.other is None:
            return loop
        fused = tirx.Var("fused", str(loop.loop_var.ty))
        one, two = (part(fused, self.others if self.outer else loop.extent) for part in (tirx.floordiv, tirx.floormod))
        chunk, other = (one, two) if self.outer else (two, one)
        body = replaced(loop.body, {loop.loop_var: chunk, self.other: other})
        return tirx.For(fused, loop.min, loop.extent * self.others, loop.kind, body, annotations=dict(loop.annotations))


def _apart(loop: tirx.For, free: Sequence[tirx.Var], analyzer: Any) -> _Apart | None:
    """A parallel loop of chunks, apart from another one; None where it is of neither kind."""
    var = loop.loop_var
    divisions: list[Any] = []
    walk(loop.body, (tirx.FloorDiv, divisions.append), (tirx.FloorMod, divisions.append))
    by = next((each.b for each in divisions if each.a.same_as(var)), None)
    if by is None:
        return _Apart(loop)
    if isinstance(by, tirx.IntImm):
        others, extent, outer = int(by), analyzer.simplify(tirx.floordiv(loop.extent, by)), True
    else:
        some = {each: 4096 for each in free}
        times, chunks = evaluate(loop.extent, some), evaluate(by, some)
        others, extent, outer = int(times) // max(1, int(chunks)), by, False
    if not analyzer.can_prove_equal(loop.extent, extent * others):
        return None
    chunk, other = (tirx.Var(name, str(var.ty)) for name in ("chunk", "other"))

    def part(each: Any) -> Any:
        if not each.a.same_as(var) or not tvm_ffi.structural_equal(each.b, by):
            return each
        return chunk if isinstance(each, tirx.FloorDiv) == outer else other

    body = tvm_ffi.structural_map(loop.body, [(tirx.FloorDiv, part), (tirx.FloorMod, part)])
    if uses(body, [var]):
        return None
    analyzer.bind(chunk, tvm.ir.Range.from_min_extent(tirx.const(0, str(var.ty)), extent))
    return _Apart(tirx.For(chunk, loop.min, extent, loop.kind, body, annotations=dict(loop.annotations)), others, other,
                  outer)


@dataclass(frozen=True)
class _Chunks:
    """A parallel loop of chunks of ``size`` steps, the last one of fewer; the loops inside it over the steps of one;
    and how many steps there are together."""

    loop: tirx.For
    steps: Sequence[tirx.For]
    size: int
    count: Any


def _chunks(loop: tirx.For, params: Sequence[Any], analyzer: Any) -> _Chunks | None:
    """None where a loop is of another kind, or what it writes is not in loops over the steps of a chunk."""
    var, inner = loop.loop_var, _inner(loop)
    found = [(each, size, count) for each in inner if (known := _steps(each, var, analyzer)) for size, count in [known]]
    if not found:
        return None
    _, size, count = found[0]
    same = all(other == size and analyzer.can_prove_equal(each, count) for _, other, each in found[1:])
    steps = [each for each, *_ in found]
    inside = [realize for each in steps for realize in _realizes(each)]
    written = [realize for realize in _realizes(loop) if _writes(realize, params)]
    if not same or not all(any(each.same_as(known) for known in inside) for each in written):
        return None
    return _Chunks(loop, steps, size, count)


def _steps(loop: tirx.For, chunk: tirx.Var, analyzer: Any) -> tuple[int, Any] | None:
    """``(size, count)`` of a loop that runs ``min(size, count - chunk * size)`` times."""
    if not isinstance(loop.extent, tirx.Min) or not uses(loop.extent, [chunk]):
        return None
    size, left = loop.extent.a, loop.extent.b
    if not isinstance(size, tirx.IntImm):
        return None
    count = analyzer.simplify(replaced(left, {chunk: tirx.const(0, str(chunk.ty))}))
    linear = analyzer.can_prove_equal(left, count - chunk * size)
    return (int(size), count) if linear and not any(uses(count, [each]) for each in [chunk, loop.loop_var]) else None


def _cut(chunks: _Chunks, cores: int) -> tirx.For | None:
    """The loop with chunks of equal size; None where it counts chunks for something else, too."""
    loop, var, size, count = chunks.loop, chunks.loop.loop_var, chunks.size, chunks.count
    number = tirx.min(tirx.floordiv(loop.extent + (cores - 1), cores) * cores, count)
    begin, end = (tirx.floordiv(each * count, number) for each in (var, var + 1))
    start = tirx.Var("start", str(var.ty))  # in place of var * size

    def of(product: tirx.Mul) -> Any:
        known = product.a.same_as(var) and isinstance(product.b, tirx.IntImm) and int(product.b) % size == 0
        return start * (int(product.b) // size) if known else product

    def shortened(each: tirx.For) -> tirx.For:
        if not any(each.loop_var.same_as(step.loop_var) for step in chunks.steps):
            return each
        return tirx.For(each.loop_var, each.min, end - start, each.kind, each.body, annotations=dict(each.annotations))

    body = tvm_ffi.structural_map(loop.body, (tirx.Mul, of))
    if size == 1 or uses(tvm_ffi.structural_map(body, (tirx.For, lambda each: _short(each, chunks))), [var]):
        return None
    body = replaced(tvm_ffi.structural_map(body, (tirx.For, shortened)), {start: begin})
    return tirx.For(var, loop.min, number, loop.kind, body, annotations=dict(loop.annotations))


def _short(loop: tirx.For, chunks: _Chunks) -> tirx.For:
    """The loop over steps without its extent, which goes by the chunk in every case."""
    if not any(loop.loop_var.same_as(step.loop_var) for step in chunks.steps):
        return loop
    return tirx.For(loop.loop_var, loop.min, tirx.const(1, str(loop.loop_var.ty)), loop.kind, loop.body)


def _inner(loop: tirx.For) -> list[tirx.For]:
    found: list[tirx.For] = []
    walk(loop.body, (tirx.For, found.append))
    return found


def _realizes(loop: tirx.For) -> list[s_tir.SBlockRealize]:
    found: list[s_tir.SBlockRealize] = []
    walk(loop.body, (s_tir.SBlockRealize, found.append))
    return found


def _writes(realize: s_tir.SBlockRealize, params: Sequence[Any]) -> bool:
    return any(region.source.same_as(param) for region in realize.block.writes for param in params)
