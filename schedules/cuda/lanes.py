"""Guarded vectors of a scheduled GPU function, told apart from what their lanes have in common.

A convolution's tile is copied in vectors of neighbouring channels. Where in the image they lie, and whether they do,
follows from the number of a product by divisions that all lanes agree on, since vectors begin at multiples of their
length. TVM (0.27) does not see that where the number is a sum of several loops, and copies lane by lane. Here the
divisions are of the vector's number. Where one guard stands in another, they become one: TVM makes an asynchronous copy
of ``c && d ? x : 0``, not of ``c ? (d ? x : 0) : 0``.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import TensorLoad

from schedules.analysis import branches, linear_offset, loads, replaced, uses, walk
from schedules.cuda.halves import undivided

__all__ = ["with_common_guards"]


def with_common_guards(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The scheduled function with one guard for each vector that has guards; itself where none has."""
    func = _with_common_places(func)
    changed: dict[s_tir.SBlock, s_tir.SBlock] = {}

    def enter(loop: tirx.For) -> None:
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(loop.extent, tirx.IntImm):
            return
        inside: list[s_tir.SBlockRealize] = []
        walk(loop.body, (s_tir.SBlockRealize, inside.append))
        for realize in inside:
            body = realize.block.body
            if not isinstance(body, tirx.BufferStore):
                continue
            if (linear := _with_linear_offsets(realize.block)) is not None:
                changed[realize.block] = linear
            elif _guarded(body.value):
                changed[realize.block] = _with_body(realize.block, _in_vectors(realize, loop))

    walk(func.body, (tirx.For, enter))
    if not changed:
        return func
    blocks = list(changed.items())

    def new(block: s_tir.SBlock) -> s_tir.SBlock:
        return next((after for before, after in blocks if before.same_as(block)), block)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlock, new), order="pre"))


def _guarded(value: Any) -> bool:
    """Whether a value stands behind a condition on where it lies; one on what is loaded, as of a leaky ReLU's, is no
    guard but arithmetic, and what it loads has no place in terms of a vector's number."""
    found = branches(value)
    return found is not None and not loads(found[0])


def _with_common_places(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function where iterators of guarded vectors in memory of all blocks that all lanes agree on are functions of
    no lane: TVM takes vectors apart whose guard seems to depend on it."""
    found = False

    def change(loop: tirx.For) -> Any:
        nonlocal found
        realize = loop.body
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(realize, s_tir.SBlockRealize):
            return loop
        store = realize.block.body
        if not isinstance(store, tirx.BufferStore) or not _guarded(store.value):
            return loop
        if store.buffer.scope() not in ("", "global") or not isinstance(loop.extent, tirx.IntImm):
            return loop
        values = [undivided(value, loop.loop_var, int(loop.extent)) for value in realize.iter_values]
        found = True
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind,
                        s_tir.SBlockRealize(values, realize.predicate, realize.block), loop.thread_binding,
                        loop.annotations)

    body = tvm_ffi.structural_map(func.body, (tirx.For, change), order="post")
    return func.with_body(body) if found else func


def _with_body(block: s_tir.SBlock, body: tirx.Stmt) -> s_tir.SBlock:
    return s_tir.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init,
                        block.alloc_buffers, block.match_buffers, block.annotations)


def _with_linear_offsets(block: s_tir.SBlock) -> s_tir.SBlock | None:
    """A block that copies ``w[i, k // 9, k // 3 % 3, k % 3]``, which lies ``i * 576 + k`` from the buffer's begin, with
    that as the last index and zeros before it: of vectors TVM does not find out, and keeps each lane's divisions, which
    CUDA has no types for. None where the offset is not proved to be linear, or the indices have no divisions."""
    store, found = block.body, loads(block.body.value)
    guard = (branches(store.value) or (None,))[0]
    if len(found) != 1 or not _divides(found[0]) or (guard is not None and _divides(guard)):
        return None
    (load,) = found
    extents = [int(each.dom.extent) for each in block.iter_vars if isinstance(each.dom.extent, tirx.IntImm)]
    variables = [each.var for each in block.iter_vars]
    linear = linear_offset(load, variables, extents) if len(extents) == len(variables) else None
    if linear is None:
        return None
    steps, start = linear
    dtype = str(load.indices[-1].ty.dtype)
    offset: Any = tirx.const(start, dtype)
    for step, variable in zip(steps, variables, strict=True):
        offset = offset + variable.astype(dtype) * tirx.const(step, dtype)
    zeros = [tirx.const(0, dtype) for _ in load.indices[1:]]
    flat = tirx.BufferLoad(load.source, [*zeros, sym.Analyzer().simplify(offset)])
    value = tvm_ffi.structural_map(
        store.value, (TensorLoad, lambda each: flat if each.same_as(load) else each), order="post")
    return _with_body(block, tirx.BufferStore(store.buffer, _single(value), store.indices))


def _divides(expr: Any) -> bool:
    found: list[Any] = []
    walk(expr, (tirx.FloorDiv, found.append), (tirx.FloorMod, found.append))
    return bool(found)


def _in_vectors(realize: s_tir.SBlockRealize, loop: tirx.For) -> tirx.BufferStore:
    """What a block stores, in terms of the vector's number and the lane for the iterator that numbers elements."""
    block, store, width = realize.block, realize.block.body, int(loop.extent)
    value = _single(store.value)
    for each, number in zip(block.iter_vars, realize.iter_values, strict=True):
        if not uses(number, [loop.loop_var]) or not _begins_at_multiples(number, loop.loop_var, width):
            continue
        dtype, analyzer = str(each.var.ty.dtype), sym.Analyzer()
        piece, lane = tirx.Var("piece", dtype), tirx.Var("lane", dtype)
        for other in block.iter_vars:
            if not other.var.same_as(each.var):
                analyzer.bind(other.var, other.dom)
        count = tirx.floordiv(each.dom.extent + tirx.const(width - 1, dtype), tirx.const(width, dtype))
        analyzer.bind(piece, tvm.ir.Range(tirx.const(0, dtype), count))
        analyzer.bind(lane, tvm.ir.Range(tirx.const(0, dtype), tirx.const(width, dtype)))
        split = analyzer.simplify(replaced(value, {each.var: piece * tirx.const(width, dtype) + lane}))
        own = loop.loop_var.astype(dtype)
        whole = tirx.floordiv(each.var - own, tirx.const(width, dtype))
        return tirx.BufferStore(store.buffer, _single(replaced(split, {piece: whole, lane: own})), store.indices)
    return tirx.BufferStore(store.buffer, value, store.indices)


def _begins_at_multiples(number: Any, lane: tirx.Var, width: int) -> bool:
    """Whether ``number`` is that of a vector's first element, a multiple of its ``width``, and the lane's."""
    analyzer, dtype = sym.Analyzer(), lane.ty.dtype
    analyzer.bind(lane, tvm.ir.Range(tirx.const(0, dtype), tirx.const(width, dtype)))
    begin = analyzer.simplify(replaced(number, {lane: tirx.const(0, dtype)}))
    multiple = analyzer.modular_set(begin)
    return bool(analyzer.can_prove_equal(number - begin, lane.astype(str(begin.ty.dtype)))) and not (
        int(multiple.coeff) % width or int(multiple.base) % width)


def _single(value: Any) -> Any:
    """``c ? (d ? x : 0) : 0`` as ``c && d ? x : 0``, of any depth."""
    outer = branches(value)
    inner = branches(_single(outer[1])) if outer is not None else None
    if outer is None or inner is None or loads(inner[0]) or not tvm_ffi.structural_equal(outer[2], inner[2]):
        return value
    return tirx.if_then_else(tirx.And(outer[0], inner[0]), inner[1], inner[2])
