"""Fuses the concatenation of past and new keys and values with the attention that reads it, so that each is read once.

A decoder returns the keys and values of all tokens, past and new, and its attention reads them.
:func:`mlc.graph.kernels.query_blocks.joined` marks the block that concatenates them, and attention reads the result
through one staging block. If staging keeps the order of elements, the two blocks are merged: the past passes through
the caches only once. A large result is written with non-temporal stores (:mod:`schedules.nontemporal`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import loads, replaced, walk
from schedules.machine import cpu_machine
from schedules.nontemporal import nontemporal_store, with_store_fence

__all__ = ["PRESENT", "STAGE", "fuse_present_stores"]

#: the annotation of a block of whose result a stage reads every element, and that of the stage
PRESENT, STAGE = "mlc.present", "mlc.stage"

#: of the second-level cache, what one result may take before it is stored past the caches
_PART = 4


@dataclass(frozen=True)
class _Move:
    """The nest of a marked block, the block, and the stage that it is merged with."""

    nest: tirx.Stmt
    block: s_tir.SBlock
    stage: s_tir.SBlock


def fuse_present_stores(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function whose marked results are written in the stages that read them; the same object where there
    are no such.

    ::

        for i, j: P[i, j] = f(i, j)                       for i:
        for i:                                       -->      for j: C[j] = f(i, j); P[i, j] = C[j]
            for j: C[j] = P[i, j]                             g(C)
            g(C)
    """
    if not isinstance(func.body, s_tir.SBlockRealize) or not isinstance(func.body.block.body, tirx.SeqStmt):
        return func
    root = func.body.block
    statements = list(root.body)
    moved = [move for nest in statements if (move := _move(func, nest)) is not None]
    if not moved:
        return func
    large = [_is_large(func, move.block) for move in moved]
    stages = {move.stage.writes[0].source: _merged(move, is_so) for move, is_so in zip(moved, large, strict=True)}
    left = [each for each in statements if not any(each.same_as(move.nest) for move in moved)]
    body = _with_stages(left[0] if len(left) == 1 else tirx.SeqStmt(left), stages)
    if not all(isinstance(each, tirx.IntImm) and not int(each) for each in large):
        body = _waiting(body)
    made = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
                        root.match_buffers, root.annotations)
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, made))


def _move(func: tirx.PrimFunc, nest: tirx.Stmt) -> _Move | None:
    """The fusion to be done with a nest; None unless it is a single marked block that is only read by a staging block.
    """
    found = _inner(nest)
    if len(found) != 1 or PRESENT not in found[0].annotations:
        return None
    block, written = found[0], found[0].writes[0].source
    readers = [each for each in _inner(func.body) if _reads(each, written)]
    if len(readers) != 1 or not _is_stage(readers[0]) or not _is_plain(block):
        return None
    return _Move(nest, block, readers[0])


def _inner(statement: Any) -> list[s_tir.SBlock]:
    """The blocks that hold no others."""
    found: list[s_tir.SBlock] = []
    walk(statement, (s_tir.SBlock, found.append))
    around = [each for each in found if _has_blocks(each)]
    return [each for each in found if not any(each.same_as(other) for other in around)]


def _has_blocks(block: s_tir.SBlock) -> bool:
    inner: list[s_tir.SBlock] = []
    walk(block.body, (s_tir.SBlock, inner.append))
    return bool(inner)


def _reads(block: s_tir.SBlock, source: Any) -> bool:
    matched = any(match.source.source.same_as(source) for match in block.match_buffers)
    return matched or any(load.source.same_as(source) for load in loads(block.body))


def _is_plain(block: s_tir.SBlock) -> bool:
    """Whether the block stores one element at its own axes."""
    return isinstance(block.body, tirx.BufferStore) and block.init is None and _are(
        block.body.indices, [axis.var for axis in block.iter_vars])


def _is_stage(block: s_tir.SBlock) -> bool:
    """Whether the block stores an element of another tensor as it is."""
    if STAGE not in block.annotations or not _is_plain(block) or block.match_buffers:
        return False
    read = loads(block.body.value)
    return len(read) == 1 and read[0].same_as(block.body.value)


def _are(indices: Sequence[Any], variables: Sequence[tirx.Var]) -> bool:
    return len(indices) == len(variables) and all(a.same_as(b) for a, b in zip(indices, variables, strict=True))


def _is_large(func: tirx.PrimFunc, block: s_tir.SBlock) -> Any:
    """Whether the result is to go past the caches: a condition on free sizes, or a known one."""
    target = func.attrs["target"] if func.attrs and "target" in func.attrs else None
    if target is None:
        return tirx.const(False, "bool")
    result = block.writes[0].source
    item = tvm.runtime.DataType(str(result.dtype)).bits // 8
    size = reduce(mul, [extent.astype("int64") for extent in result.shape], tirx.const(item, "int64"))
    least = tirx.const(cpu_machine(target).l2_bytes // _PART, "int64")
    return tvm.sym.Analyzer().simplify(size > least)


def _merged(move: _Move, large: Any) -> s_tir.SBlock:
    """The stage with the marked block's element computed in it and stored to both."""
    stage, block = move.stage, move.block
    load = stage.body.value
    image = {axis.var: index for axis, index in zip(block.iter_vars, load.indices, strict=True)}
    kept = tirx.BufferLoad(stage.body.buffer, list(stage.body.indices))
    out = tirx.BufferStore(block.body.buffer, kept, list(load.indices))
    stored: tirx.Stmt = tirx.IfThenElse(large, nontemporal_store(out), out)
    if isinstance(large, tirx.IntImm):
        stored = nontemporal_store(out) if int(large) else out
    first = tirx.BufferStore(stage.body.buffer, replaced(block.body.value, image), list(stage.body.indices))
    reads = [_region(each, image) for each in block.reads]
    place = [tvm.ir.Range.from_min_extent(index, tirx.const(1, str(index.ty))) for index in load.indices]
    writes = [*stage.writes, tirx.BufferRegion(block.body.buffer, place)]
    return s_tir.SBlock(stage.iter_vars, reads, writes, stage.name_hint, tirx.SeqStmt([first, stored]), None,
                        stage.alloc_buffers, [], {})


def _region(region: Any, image: Mapping[Any, Any]) -> Any:
    ends = [(replaced(each.min, image), replaced(each.extent, image)) for each in region.region]
    return tirx.BufferRegion(region.source, [tvm.ir.Range.from_min_extent(*each) for each in ends])


def _with_stages(body: tirx.Stmt, stages: Mapping[Any, s_tir.SBlock]) -> tirx.Stmt:
    """The statement with other blocks in place of those that write the keys of ``stages``."""
    def there(block: s_tir.SBlock) -> s_tir.SBlock:
        return stages.get(block.writes[0].source, block) if len(block.writes) == 1 and not _has_blocks(block) else block

    return tvm_ffi.structural_map(body, (s_tir.SBlock, there))


def _waiting(body: tirx.Stmt) -> tirx.Stmt:
    """The statement with a wait for its stores at the end of each thread's part of it."""
    def waiting(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        threads.append(loop)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, with_store_fence(loop.body),
                        annotations=dict(loop.annotations))

    threads: list[tirx.For] = []
    body = tvm_ffi.structural_map(body, (tirx.For, waiting))
    return body if threads else with_store_fence(body)
