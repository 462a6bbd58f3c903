"""Vectors of 16 bytes of results that are computed of 32-bit numbers: four at a time, and stored at once.

A thread's access takes 16 bytes at most: four numbers of 32 bits. Of eight, which TVM (0.27) has a type for and which
make 16 bytes of 16-bit results, both accesses of a thread must begin at a multiple of 32 bytes, so that half of shared
memory's banks are met twice. Four results of 32 bits are computed at once, but CUDA's compiler takes their store apart
where it is one of several branches.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx

from schedules.analysis import loads, replaced, uses
from schedules.cuda.emit import store_piece

__all__ = ["in_halves", "undivided"]

#: bits of a thread's access, and of what is computed with
_PIECE, _WIDE = 128, 32
_HALF = _PIECE // _WIDE


def in_halves(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The scheduled function with each such vector computed in registers, half after half; itself where it has none.

    ``for v in T.vectorized(8): y[v] = f(x[v])``   -->
    ``for h in T.unroll(2): for v in T.vectorized(4): r[4 * h + v] = f(x[4 * h + v])``, then ``y[0:8] = r[0:8]``; of
    four sums that lie in shared memory, ``h`` is 0 alone.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):  # blocks hand sums to each other, behind what the host allocates
        return func
    held: list[tirx.Buffer] = []

    def change(loop: tirx.For) -> Any:
        realize = loop.body
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(loop.extent, tirx.IntImm):
            return loop
        if not isinstance(realize, s_tir.SBlockRealize):
            return loop
        store, whole = realize.block.body, int(loop.extent)
        if not isinstance(store, tirx.BufferStore) or whole not in (4, 8) or whole * _bits(store.buffer) != _PIECE:
            return loop
        if store.buffer.scope() not in ("", "global"):
            return loop
        wide = [load.source for load in loads(store.value) if _bits(load.source) == _WIDE]
        sums = any(source.scope().startswith("shared") for source in wide)
        fetched = any(load.source.scope() == "local" for load in loads(store.value))
        if not (sums if whole == _HALF else wide or fetched) or not _is_whole(loop, realize):
            return loop
        held.append(tirx.decl_buffer((whole,), str(store.buffer.dtype), f"{store.buffer.name}_held", scope="local"))
        return tirx.SeqStmt([_computed(loop, realize, held[-1]), _stored(loop, realize, held[-1])])

    body = tvm_ffi.structural_map(func.body, (tirx.For, change), order="post")
    if not held:
        return func
    root = body.block
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init,
                         [*root.alloc_buffers, *held], root.match_buffers, root.annotations)
    return func.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), block))


def _bits(buffer: Any) -> int:
    return int(tvm.runtime.DataType(str(buffer.dtype)).bits)


def _computed(loop: tirx.For, realize: s_tir.SBlockRealize, held: tirx.Buffer) -> tirx.Stmt:
    dtype = loop.loop_var.ty.dtype
    half, lane = tirx.Var("part", dtype), tirx.Var("lane", dtype)  # "half" is a type
    number = half * tirx.const(_HALF, dtype) + lane
    at, whole = {loop.loop_var: number}, int(loop.extent)
    values = [replaced(undivided(value, loop.loop_var, whole), at) for value in realize.iter_values]
    block, store = realize.block, realize.block.body
    place = tirx.Var("place", dtype)
    inner = _block(block, [tirx.BufferLoad(held, [place])], place, block.reads,
                   tirx.BufferStore(held, store.value, [place]), whole)
    predicate = undivided(realize.predicate, loop.loop_var, whole)  # without the lane
    made: tirx.Stmt = s_tir.SBlockRealize([*values, number], predicate, inner)
    made = tirx.For(lane, tirx.const(0, dtype), tirx.const(_HALF, dtype), tirx.ForKind.VECTORIZED, made)
    return tirx.For(half, tirx.const(0, dtype), tirx.const(whole // _HALF, dtype), tirx.ForKind.UNROLLED, made)


def undivided(expr: Any, lane: tirx.Var, whole: int) -> Any:
    """The expression with no division and no comparison of the lane where ``whole`` of them agree on it: vectors begin
    at multiples of their length, which TVM does not find out of sums of several loops."""
    analyzer, dtype = sym.Analyzer(), lane.ty.dtype
    analyzer.bind(lane, tvm.ir.Range(tirx.const(0, dtype), tirx.const(whole, dtype)))

    def change(node: Any) -> Any:
        if not isinstance(node.b, tirx.IntImm) or int(node.b) % whole or not uses(node.a, [lane]):
            return node
        first = replaced(node.a, {lane: tirx.const(0, dtype)})
        begin = analyzer.modular_set(first)
        if int(begin.coeff) % whole or int(begin.base) % whole:
            return node
        if not analyzer.can_prove_equal(node.a - first, lane.astype(str(first.ty))):
            return node
        if isinstance(node, tirx.FloorMod):
            return tirx.FloorMod(first, node.b) + lane.astype(str(first.ty))
        return type(node)(first, node.b)

    return tvm_ffi.structural_map(
        expr, [(tirx.FloorDiv, change), (tirx.FloorMod, change), (tirx.LT, change)], order="post")


def _is_whole(loop: tirx.For, realize: s_tir.SBlockRealize) -> bool:
    """Whether all lie next to each other from a multiple of their bytes on, and are all stored or none."""
    own, store, analyzer, extent = loop.loop_var, realize.block.body, sym.Analyzer(), int(loop.extent)
    analyzer.bind(own, tvm.ir.Range(tirx.const(0, own.ty.dtype), tirx.const(extent, own.ty.dtype)))
    names = {each.var: undivided(value, own, extent) for each, value in zip(
        realize.block.iter_vars, realize.iter_values, strict=True)}
    offset: Any = tirx.const(0, store.indices[0].ty.dtype)
    for index, size in zip(store.indices, store.buffer.shape, strict=True):
        offset = offset * size + undivided(replaced(index, names), own, extent)
    first = replaced(offset, {own: tirx.const(0, own.ty.dtype)})
    begin = analyzer.modular_set(first)
    whole = not int(begin.coeff) % extent and not int(begin.base) % extent
    return (whole and bool(analyzer.can_prove_equal(offset - first, own.astype(str(first.ty))))
            and not uses(undivided(realize.predicate, own, extent), [own]))


def _stored(loop: tirx.For, realize: s_tir.SBlockRealize, held: tirx.Buffer) -> tirx.Stmt:
    own, store, zero, whole = loop.loop_var, realize.block.body, tirx.const(0, loop.loop_var.ty.dtype), int(loop.extent)
    values = [replaced(undivided(value, own, whole), {own: zero}) for value in realize.iter_values]
    place, begin = tirx.Var("place", own.ty.dtype), tirx.BufferLoad(store.buffer, store.indices)
    inner = _block(realize.block, [begin], place, [tirx.BufferLoad(held, [place])], store_piece(begin, held),
                   whole)
    return s_tir.SBlockRealize([*values, zero], undivided(realize.predicate, own, whole), inner)


def _block(
    block: s_tir.SBlock, writes: Any, place: tirx.Var, reads: Any, body: tirx.Stmt, whole: int
) -> s_tir.SBlock:
    """A block with the iterators of ``block`` and the ``place`` in a vector of so many."""
    dtype = place.ty.dtype
    numbered = tirx.IterVar(
        tvm.ir.Range(tirx.const(0, dtype), tirx.const(whole, dtype)), place, tirx.IterVar.DataPar)

    def regions(found: Any) -> list[Any]:
        return [tirx.BufferRegion(r.source, [tvm.ir.Range.from_min_extent(i, tirx.const(1, i.ty.dtype))
                                              for i in r.indices]) if isinstance(r, tvm.ir.TensorLoad) else r
                for r in found]

    return s_tir.SBlock([*block.iter_vars, numbered], regions(reads), regions(writes), block.name_hint, body)
