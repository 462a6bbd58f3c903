"""Lowering of loops whose sums are kept in AMX tiles, and checks that a stored trace uses tiles correctly.

The intrinsics of :mod:`schedules.intrin.tiles` name a buffer of sums that is never allocated. They are therefore only
meaningful together: the tiles of a thread are configured with common shapes; sums are cleared, accumulated and stored
without interruption; and nothing else accesses the buffer. A space marks the loop around all that (:func:`mark`);
lowering configures each thread's tiles before it and releases them after it (:func:`with_tiles`); a stored trace, which
is untrusted, is refused if it does otherwise (:func:`check_tiles`).
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call

from schedules.analysis import op_name, replaced, walk
from schedules.errors import InvalidDecision
from schedules.intrin.tiles import CONFIGURE, DEPTHS, PRODUCT, RELEASE, SHAPES, STORE, TILE, ZERO, called, helper

__all__ = ["MARK", "called_names", "check_tiles", "is_tiles", "mark", "with_helpers", "with_tiles"]

#: the annotation of a loop: tiles of rows and of columns of the sums, and the steps that a tile holds
MARK = "mlc.tiles"
#: in this order
_STEPS = (ZERO, PRODUCT, STORE)


def is_tiles(value: Any) -> bool:
    """Whether an annotation's value is one that :func:`mark` writes."""
    return value in [[m, n, depth] for m, n in SHAPES for depth in DEPTHS]


def mark(sch: s_tir.Schedule, loop: s_tir.schedule.LoopRV, m: int, n: int, depth: int) -> None:
    """Mark ``loop`` as using tiles of these shapes."""
    sch.annotate(loop, MARK, [m, n, depth])


# -- lowering


def with_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Configure tiles before each marked loop and release them after it, once per thread if the loop is parallel.
    Returns the same object if no loop is marked."""
    marked: list[tirx.For] = []
    walk(func.body, (tirx.For, lambda loop: marked.append(loop) if MARK in loop.annotations else None))
    if not marked:
        return func

    def configured(loop: tirx.For) -> tirx.Stmt:
        if MARK not in loop.annotations:
            return loop
        m, n, depth = (int(v) for v in loop.annotations[MARK])
        kept = {key: value for key, value in loop.annotations.items() if key != MARK}
        plain = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=kept)
        steps = tirx.SeqStmt([called(f"{CONFIGURE}_{m}_{n}_{depth}"), plain, called(RELEASE)])
        if loop.kind != tirx.ForKind.PARALLEL:
            return steps
        return tirx.AttrStmt(tirx.const(0, "int32"), "pragma_parallel_launch_point", tirx.const(1, "int32"), steps)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, configured)))


def with_helpers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Add the functions in LLVM IR that stand for tile instructions, which LLVM inlines."""
    texts = sorted({text for name in called_names(func.body) if (text := helper(name))})
    if not texts:
        return func
    imported = tvm.ir.StringImm("\n".join(texts))
    return func.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", imported, func.body))


def called_names(stmt: tirx.Stmt) -> list[str]:
    """The names of the functions that a statement calls."""
    names: list[str] = []
    walk(stmt, (Call, lambda call: names.append(str(call.args[0].value)) if op_name(call) == "call_extern" else None))
    return names


# -- what a trace may make of them


def check_tiles(func: tirx.PrimFunc) -> None:
    """Raise :class:`InvalidDecision` if tiles do not hold the sums that the function names: if a tile operation is
    outside of a marked loop, has other shapes, or is not in the order zero, products, store on one part of a buffer
    that nothing else accesses; or if a loop around them is shared by threads, or is partitioned by lowering."""
    used, loops = _uses(func.body), _loops(func.body)
    marked = [loop for loop in loops if MARK in loop.annotations]
    if not used and not marked:
        return
    for loop in loops:
        if _uses(loop) and (loop.kind not in _WHOLE or any(map(_takes_apart, loop.annotations))):
            raise InvalidDecision("loops around tiles must run as they stand")
    for loop in marked:
        inner = _loops(loop.body)
        if any(MARK in each.annotations or (each.kind == tirx.ForKind.PARALLEL and _uses(each)) for each in inner):
            raise InvalidDecision("a loop that is marked for tiles must be one thread's, with no other in it")
    seen = [block for loop in marked for block in _stretches(loop)]
    if len(seen) != len(used):
        raise InvalidDecision("every use of tiles must be in a loop that is marked for them, in one stretch")
    sums = [_sums(block).source for block in used]
    others: list[tirx.Var] = []
    walk(func.body, (s_tir.SBlock, lambda block: others.extend(
        region.source for region in (*block.reads, *block.writes) if not any(block.same_as(b) for b in used))))
    if any(other.same_as(each) for other in others for each in sums):
        raise InvalidDecision("what is summed up in tiles must be named by their instructions alone")


#: loops whose iterations come one after the other, or each in its thread
_WHOLE = (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL, tirx.ForKind.UNROLLED)


def _takes_apart(key: str) -> bool:
    return str(key).startswith("software_pipeline")


def _uses(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    """The blocks that use tiles."""
    found: list[s_tir.SBlock] = []
    walk(stmt, (s_tir.SBlock, lambda block: found.append(block) if _kind(block) else None))
    return found


def _loops(stmt: tirx.Stmt) -> list[tirx.For]:
    found: list[tirx.For] = []
    walk(stmt, (tirx.For, found.append))
    return found


def _kind(block: s_tir.SBlock) -> str:
    """The tile operation of an innermost block; empty for none."""
    inner: list[s_tir.SBlock] = []
    walk(block.body, (s_tir.SBlock, inner.append))
    names = [] if inner else called_names(block.body)
    return next((kind for kind in _STEPS for name in names if name.startswith(kind)), "")


def _sums(block: s_tir.SBlock) -> tirx.BufferRegion:
    """The part of the buffer that stands for the tiles of sums."""
    return (block.reads if _kind(block) == STORE else block.writes)[0]


def _stretches(loop: tirx.For) -> list[s_tir.SBlock]:
    """The blocks of a marked loop that use tiles, where they come as they must."""
    m, n, depth = (int(v) for v in loop.annotations[MARK])
    analyzer = tvm.sym.Analyzer()
    sequences: list[tirx.SeqStmt] = []
    walk(loop, (tirx.SeqStmt, sequences.append),
         (tirx.For, lambda each: analyzer.bind(each.loop_var, tvm.ir.Range.from_min_extent(each.min, each.extent))))
    found: list[s_tir.SBlock] = []
    for sequence in sequences:
        parts = [_only(stmt) for stmt in sequence.seq]
        kinds = [_kind(part[0].block) if part else "" for part in parts]
        for at in (at for at, kind in enumerate(kinds) if kind == ZERO):
            if kinds[at : at + 3] != [*_STEPS]:
                raise InvalidDecision("tiles must be cleared, added to and stored, one right after the other")
            stretch = [part for part in parts[at : at + 3] if part]
            _check_stretch([realize for realize, _ in stretch], [var for _, loops in stretch for var in loops],
                           (m, n, depth), analyzer)
            found.extend(realize.block for realize, _ in stretch)
    return found


def _only(stmt: tirx.Stmt) -> tuple[s_tir.SBlockRealize, list[tirx.Var]] | None:
    """The one block in a nest of loops, and their variables."""
    variables = []
    while isinstance(stmt, tirx.For):
        variables.append(stmt.loop_var)
        stmt = stmt.body
    return (stmt, variables) if isinstance(stmt, s_tir.SBlockRealize) else None


def _check_stretch(
    realizes: list[s_tir.SBlockRealize], loops: list[tirx.Var], shapes: tuple[int, int, int], analyzer: Any
) -> None:
    m, n, depth = shapes
    for realize in realizes:
        extents = [int(each.extent) for each in _sums(realize.block).region]
        if extents[-2:] != [m * TILE, n * TILE] or set(extents[:-2]) - {1}:
            raise InvalidDecision(f"what is in a loop for {m} x {n} tiles must use so many, not {extents} sums")
    weights = [match.buffer for match in realizes[1].block.match_buffers if len(match.buffer.shape) == 4]
    if [[int(extent) for extent in weight.shape[:2]] for weight in weights] != [[n, depth]]:
        raise InvalidDecision(f"products in a loop for tiles of {depth} steps must take so many")
    first, *others = (_region(realize) for realize in realizes)
    if any(_mentions(start, loops) for start in first) or not all(
        len(each) == len(first) and all(map(analyzer.can_prove_equal, each, first)) for each in others
    ):
        raise InvalidDecision("tiles must be cleared, added to and stored for one part of the sums")
    if not all(isinstance(each.predicate, tirx.IntImm) and int(each.predicate) for each in realizes):
        raise InvalidDecision("what is done with tiles must not depend on where it is done")


def _region(realize: s_tir.SBlockRealize) -> list[Any]:
    """The origin of the block's part of the sums, in terms of the loops around it."""
    values = {it.var: value for it, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
    return [replaced(each.min, values) for each in _sums(realize.block).region]


def _mentions(expr: Any, variables: list[tirx.Var]) -> bool:
    found: list[tirx.Var] = []
    walk(expr, (tirx.Var, found.append))
    return any(var.same_as(other) for var in found for other in variables)
