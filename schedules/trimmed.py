"""Removes computation that nothing reads: within a part of a size range, less of an intermediate tensor may be needed.

A tensor that is padded to whole tiles for every size is mostly padding for the smallest. If the sizes at hand bound
what is read of an intermediate tensor, the rest is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import TensorLoad

from schedules.analysis import replaced, walk
from schedules.free import SIZES, variables

__all__ = ["trimmed"]

#: what TVM's analyzer gives for the bound of what has none
_UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class _Stage:
    """One block alone in its loops, which writes one element of one tensor in each iteration."""

    loops: tuple[tirx.For, ...]
    realize: s_tir.SBlockRealize

    @property
    def block(self) -> s_tir.SBlock:
        return self.realize.block

    @property
    def written(self) -> Any:
        return self.block.writes[0].source


def trimmed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with intermediate tensors as large as what is read of them; the same object where all is, or where
    it is no sequence of plain blocks.

    ``A[0:16] = ..; B[i] = A[i % 16] for i in 0 .. 2   -->   A[0:2] = ..; B[i] = A[i]``
    """
    root = func.body.block if isinstance(func.body, s_tir.SBlockRealize) else None
    if root is None:
        return func
    nests = _statements(root.body)
    stages = [stage for nest in nests if (stage := _stage(nest)) is not None]
    if len(stages) < len(nests):
        return func
    needed = _needed(func, stages)
    image = {
        buffer: tirx.decl_buffer(shape, str(buffer.dtype), name=str(buffer.name), scope=str(buffer.scope()))
        for buffer in root.alloc_buffers if (shape := _smaller(buffer, needed.get(buffer))) is not None
    }
    if not image:
        return func
    body = tirx.SeqStmt([_rebuilt(func, stage, image) for stage in stages])
    allocated = [image.get(buffer, buffer) for buffer in root.alloc_buffers]
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, allocated,
                         root.match_buffers, root.annotations)
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block))


def _statements(body: tirx.Stmt) -> list[tirx.Stmt]:
    return list(body) if isinstance(body, tirx.SeqStmt) else [body]


def _stage(nest: tirx.Stmt) -> _Stage | None:
    """The nest as a stage; None for anything else."""
    loops: list[tirx.For] = []
    while isinstance(nest, tirx.For):
        loops.append(nest)
        nest = nest.body
    if not isinstance(nest, s_tir.SBlockRealize) or len(nest.block.writes) != 1:
        return None
    block, variables = nest.block, [loop.loop_var for loop in loops]
    inner: list[s_tir.SBlock] = []
    walk(block.body, (s_tir.SBlock, inner.append))
    own = len(variables) == len(block.iter_vars) and all(
        value.same_as(var) for value, var in zip(nest.iter_values, variables, strict=True))
    places = [each.min for each in block.writes[0].region]
    plain = own and all(any(place.same_as(v.var) for v in block.iter_vars) or _number(place) == 0 for place in places)
    always = _number(nest.predicate) == 1
    return _Stage(tuple(loops), nest) if plain and always and not inner and not block.match_buffers else None


def _number(expr: Any) -> int | None:
    return int(expr) if isinstance(expr, tirx.IntImm) else None


def _needed(func: tirx.PrimFunc, stages: Sequence[_Stage]) -> dict[Any, list[int | None]]:
    """How many elements are read along each axis of every intermediate tensor; None where that is not known."""
    needed: dict[Any, list[int | None]] = {}
    for stage in reversed(stages):
        analyzer = _analyzer(func, stage, _extents(stage, needed.get(stage.written)))

        def note(load: TensorLoad, analyzer: sym.Analyzer = analyzer, stage: _Stage = stage) -> None:
            if load.source.same_as(stage.written):
                return
            ends = [_end(analyzer, index) for index in load.indices]
            old = needed.get(load.source, [0] * len(ends))
            needed[load.source] = [None if a is None or b is None else max(a, b)
                                   for a, b in zip(old, ends, strict=True)]

        walk(stage.block, (TensorLoad, note))
    return needed


def _end(analyzer: sym.Analyzer, index: Any) -> int | None:
    """One more than the highest value of an index; None where it has no bound."""
    most = int(analyzer.const_int_bound(index).max_value)
    return most + 1 if most < _UNBOUNDED else None


def _smaller(buffer: Any, ends: Sequence[int | None] | None) -> list[Any] | None:
    """The shape of what is read of a tensor where it is less than the whole."""
    if ends is None:
        return None
    shape = list(buffer.shape)
    for axis, (extent, end) in enumerate(zip(shape, ends, strict=True)):
        known = _number(extent)
        # an extent that depends on sizes is at least 1
        if end is not None and end > 0 and (end < known if known is not None else end == 1):
            shape[axis] = tirx.const(end, str(extent.ty))
    return shape if any(not a.same_as(b) for a, b in zip(shape, buffer.shape, strict=True)) else None


def _extents(stage: _Stage, ends: Sequence[int | None] | None) -> list[Any]:
    """The extents of a stage's axes, of which ``ends`` are needed along those of what it writes."""
    shape = _smaller(stage.written, ends)
    extents = [axis.dom.extent for axis in stage.block.iter_vars]
    if shape is None:
        return extents
    places = [each.min for each in stage.block.writes[0].region]
    for number, axis in enumerate(stage.block.iter_vars):
        for place, extent in zip(places, shape, strict=True):
            if place.same_as(axis.var):
                extents[number] = extent
    return extents


def _analyzer(func: tirx.PrimFunc, stage: _Stage, extents: Sequence[Any]) -> sym.Analyzer:
    """An analyzer that knows the ranges of the function's free sizes and of a stage's axes."""
    analyzer = sym.Analyzer()
    free = zip(variables(func), func.attrs[SIZES], strict=True) if func.attrs and SIZES in func.attrs else ()
    for var, (low, high, _) in free:
        first, last = (tirx.const(int(end), str(var.ty)) for end in (low, high))
        analyzer.bind(var, tvm.ir.Range(first, last + 1))
    for axis, extent in zip(stage.block.iter_vars, extents, strict=True):
        analyzer.bind(axis.var, tvm.ir.Range.from_min_extent(axis.dom.min, extent))
    return analyzer


def _rebuilt(func: tirx.PrimFunc, stage: _Stage, image: Mapping[Any, Any]) -> tirx.Stmt:
    """The stage with smaller tensors, and the iterations that these leave."""
    block = stage.block
    shrunk = image.get(stage.written)
    ends = None if shrunk is None else [_number(extent) for extent in shrunk.shape]
    extents = _extents(stage, ends)
    analyzer = _analyzer(func, stage, extents)

    def place(index: Any) -> Any:
        return index if isinstance(index, tirx.Var) else analyzer.simplify(index)

    def simple(load: TensorLoad) -> TensorLoad:
        if load.source not in image:
            return load
        return tirx.BufferLoad(load.source, [place(index) for index in load.indices])

    def inside(node: Any) -> Any:
        return replaced(tvm_ffi.structural_map(node, (TensorLoad, simple)), image)

    axes = [tirx.IterVar(tvm.ir.Range.from_min_extent(axis.dom.min, extent), axis.var, axis.iter_type)
            for axis, extent in zip(block.iter_vars, extents, strict=True)]
    regions = [
        [tirx.BufferRegion(image[region.source], [tvm.ir.Range.from_min_extent(place(r.min), r.extent)
                                                  for r in region.region]) if region.source in image else region
         for region in group]
        for group in (block.reads, block.writes)
    ]
    made: Any = s_tir.SBlock(axes, *regions, block.name_hint, inside(block.body),
                             None if block.init is None else inside(block.init), block.alloc_buffers,
                             block.match_buffers, block.annotations)
    made = s_tir.SBlockRealize(stage.realize.iter_values, stage.realize.predicate, made)
    for loop, extent in reversed(list(zip(stage.loops, extents, strict=True))):
        made = tirx.For(loop.loop_var, loop.min, extent, loop.kind, made, annotations=dict(loop.annotations))
    return made
