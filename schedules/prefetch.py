"""Software prefetch of weights ahead of the tile that reads them.

A register tile's weights are used again by every tile of the same columns, so they come from memory in bursts: the
first tile waits for them and the others leave the memory idle. A loop that :func:`prefetch_ahead` has marked touches
the weights of the *next* tile column a few lines at a time; one that :func:`prefetch_rows` has marked touches rows to
come. :mod:`schedules.lowering` puts the instructions in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import replaced, uses, walk
from schedules.machine import LINE_BYTES

__all__ = ["insert_prefetches", "lines_per_step", "prefetch_ahead", "prefetch_rows"]

_MARK = "mlc.prefetch"
_ROWS_MARK = "mlc.prefetch_rows"
#: more fetches than this in one step of the marked loop would displace the arithmetic, of which a step holds tens of
#: multiply-adds. Small tiles need the fetches most: with 5 to 16 a step, 61 Winograd convolutions took 0.87 of
#: the time (geometric mean, 0.43 to 1.24) that they took with none
_MAX_PER_STEP = 16
#: for LLVM: a read, into the first or second-level cache, of data
_READ, _FIRST_LEVEL, _SECOND_LEVEL, _DATA = 0, 3, 2, 1


def prefetch_ahead(
    sch: s_tir.Schedule, loop: s_tir.schedule.LoopRV, param: int, blocks: int, distance: int
) -> None:
    """Fetch, while ``loop`` runs, what the next tile will read of the function's parameter number ``param``.

    ``loop`` is a reduction loop of a register tile. The parameter is ``[blocks, ..., 16]``, or ``[blocks, ..., 16, 4]``
    of bytes, with rows of one cache line; the tile reads ``blocks`` blocks, and the next tile those that lie
    ``distance`` blocks further. The fetches are spread evenly over the tiles that read the same blocks. Where they
    would be too dense, or rows are not cache lines, nothing is fetched.
    """
    sch.annotate(loop, _MARK, [param, blocks, distance])


def lines_per_step(lines: int, steps: int) -> int:
    """How many cache lines each step must fetch; 0 where that is too many to be worth it."""
    count = -(-lines // max(1, steps))
    return count if count <= _MAX_PER_STEP else 0


def prefetch_rows(
    sch: s_tir.Schedule, loop: s_tir.schedule.LoopRV, rows: Sequence[tuple[int, int]], lines: int
) -> None:
    """Fetch, while ``loop`` steps through rows of parameters of the function, ``lines`` cache lines a step of rows to
    come. ``rows`` holds for each parameter its number and how many elements further on the later row lies."""
    sch.annotate(loop, _ROWS_MARK, [lines, *(number for row in rows for number in row)])


def insert_prefetches(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace the marks of :func:`prefetch_ahead` and :func:`prefetch_rows` by prefetch instructions; the same object
    where there are none.

    ``for k: tile   -->   for k: prefetch(W[next tile, line]); tile``
    """
    loops: list[tirx.For] = []
    walk(func.body, (tirx.For, loops.append))
    bodies = {loop.loop_var: _with_fetches(func, loop, loops) for loop in loops if _MARK in loop.annotations}
    bodies |= {loop.loop_var: _with_rows(func, loop) for loop in loops if _ROWS_MARK in loop.annotations}
    if not bodies:
        return func

    def replace(loop: tirx.For) -> tirx.For:
        body = bodies.get(loop.loop_var)
        if body is None:
            return loop
        kept = {key: value for key, value in loop.annotations.items() if key not in (_MARK, _ROWS_MARK)}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=kept)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, replace)))


def _with_fetches(func: tirx.PrimFunc, loop: tirx.For, loops: Sequence[tirx.For]) -> tirx.Stmt:
    """The body of a marked loop, with the fetches before it."""
    param, blocks, distance = (int(v) for v in loop.annotations[_MARK])
    buffer = func.params[param]
    shape = [int(extent) for extent in buffer.shape]
    base = _first_index(loop, buffer)
    item = tvm.runtime.DataType(str(buffer.dtype)).bits // 8
    row = next((n for n in range(1, len(shape) - 1) if prod(shape[-n:]) * item == LINE_BYTES), 0)  # axes of one line
    if base is None or not row:
        return loop.body
    # the tiles that read the same blocks: serial loops around this one that the blocks' address does not depend on
    outwards = [each for each in loops if _contains(each, loop)]  # a walk meets inner loops first
    around = [each for each in reversed(outwards) if each.kind != tirx.ForKind.PARALLEL]
    reusing = [each for each in around if not uses(base[0], [each.loop_var])]
    steps, step = _steps([*reusing, loop])
    lines = blocks * prod(shape[1:-row])

    def fetch(number: Any) -> tirx.Stmt:
        line = [*base[1 : -row - 1], base[-row - 1] + number, *[tirx.const(0, "int32")] * row]
        return _fetch(tirx.BufferLoad(buffer, [base[0] + distance, *line]), _SECOND_LEVEL)

    if isinstance(steps, int):
        count = lines_per_step(lines, steps)
        fetches = [fetch(step * count + number) for number in range(count)]
    else:  # as many steps as a free size says
        number = tirx.Var("line", str(steps.ty))
        each = tirx.min(tirx.floordiv(steps - 1 + lines, steps), tirx.const(_MAX_PER_STEP, str(steps.ty)))
        fetches = [tirx.For(number, 0, each, tirx.ForKind.SERIAL, fetch(step * each + number))]
    return tirx.SeqStmt([*fetches, loop.body]) if fetches else loop.body


def _steps(loops: Sequence[tirx.For]) -> tuple[Any, Any]:
    """How many steps the loops take together, and the number of the one under way."""
    step: Any = tirx.const(0, "int32")
    for each in loops:
        step = step * each.extent + each.loop_var
    if all(isinstance(each.extent, tirx.IntImm) for each in loops):
        return prod(int(each.extent) for each in loops), step
    return prod((each.extent for each in loops), start=tirx.const(1, "int64")), step


def _with_rows(func: tirx.PrimFunc, loop: tirx.For) -> tirx.Stmt:
    """The body of a loop over rows, with the fetches of later rows before it."""
    lines, *numbers = (int(v) for v in loop.annotations[_ROWS_MARK])
    fetches = []
    for param, distance in zip(numbers[::2], numbers[1::2], strict=True):
        buffer = func.params[param]
        base = _first_index(loop, buffer, from_start=False)
        elements = LINE_BYTES * 8 // tvm.runtime.DataType(str(buffer.dtype)).bits
        if base is None:
            continue
        for n in range(lines):
            load = tirx.BufferLoad(buffer, [*base[:-1], base[-1] + distance + n * elements])
            fetches.append(_fetch(load, _FIRST_LEVEL))
    return tirx.SeqStmt([*fetches, loop.body]) if fetches else loop.body


def _fetch(load: tirx.BufferLoad, level: int) -> tirx.Stmt:
    """A prefetch instruction. What it names may lie past the end of a tensor: it has no other effect."""
    flags = [tirx.const(flag, "int32") for flag in (_READ, level, _DATA)]
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(load), *flags))


def _first_index(loop: tirx.For, buffer: tirx.Buffer, from_start: bool = True) -> list[Any] | None:
    """Where the tile inside ``loop`` begins to read ``buffer``, in terms of the loops outside the reduction:
    ``from_start`` at the loop's first iteration, else at the one under way."""
    realizes: list[s_tir.SBlockRealize] = []
    inner = [loop.loop_var] if from_start else []
    walk(loop.body, (s_tir.SBlockRealize, realizes.append), (tirx.For, lambda each: inner.append(each.loop_var)))
    values = {
        iterator.var: tirx.const(0, "int32") if iterator.iter_type == tirx.IterVar.CommReduce else value
        for realize in realizes
        for iterator, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
    }
    start = {var: tirx.const(0, "int32") for var in inner}
    indices = next((found for realize in realizes if (found := _indices(realize.block, buffer)) is not None), None)
    if indices is None:
        return None
    for _ in realizes:  # a block's iterators may be in terms of those of the block around it
        indices = [replaced(index, values) for index in indices]
    return [replaced(index, start) for index in indices]


def _indices(block: s_tir.SBlock, buffer: tirx.Buffer) -> list[Any] | None:
    """The indices at which a block reads ``buffer`` itself, or passes it to an intrinsic."""
    loads: list[TensorLoad] = []
    walk(block.body, (TensorLoad, loads.append))
    found = [list(load.indices) for load in loads if load.source.same_as(buffer)]
    found += [[r.min for r in m.source.region] for m in block.match_buffers if m.source.source.same_as(buffer)]
    return found[0] if found else None


def _contains(outer: tirx.For, inner: tirx.For) -> bool:
    if outer.same_as(inner):
        return False
    found = [False]

    def look(loop: tirx.For) -> None:
        found[0] = found[0] or loop.same_as(inner)

    walk(outer.body, (tirx.For, look))
    return found[0]
