"""Fuses the free axes of elementwise functions: an activation of ``[batch, length, 128]`` is one of ``[n, 128]``.

Loops over several free sizes that are fused and cut into vectors leave divisions by free sizes in every index, which
TVM's analyzer does not put together again: each lane is then loaded and stored by itself. Of one axis there is nothing
to divide. Tensors lie in memory as they did; :func:`schedules.flatten_spatial.restored` gives the lowered function the
parameters of its callers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import evaluate, replaced, uses, walk
from schedules.flatten_spatial import FLAT, FUSED, like, with_indices
from schedules.free import SIZES, variables

__all__ = ["flattened_elementwise"]


def flattened_elementwise(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with free sizes whose blocks all compute an element of the elements at its place, with one axis in
    place of all from the first to the last of free extent; the same object where there is no such function, or no two
    free axes.

    ::

        for i, j, k in grid(b, t, 128):                      for i, k in grid(n, 128):
            y[i, j, k] = max(x[i, j, k] + c[k], 0)    -->        y[i, k] = max(x[i, k] + c[k], 0)
    """
    if not (func.attrs and SIZES in func.attrs) or FLAT in func.attrs:
        return func
    free, root = variables(func), func.body.block
    tensors = [*func.params, *root.alloc_buffers]
    if any(isinstance(each.ty, tvm.ir.PrimType) for each in tensors):
        return func
    shape = func.params[-1].shape
    axes = [axis for axis, size in enumerate(shape) if uses(size, free)]
    if len(axes) < 2:
        return func
    run = _Run(tuple(shape[axes[0] : axes[-1] + 1]), axes[0])
    places = [run.place_in(tensor, free) for tensor in tensors]
    nests = _nests(root.body)
    if nests is None or any(place is None for place in places):
        return func
    known = {tensor: place for tensor, place in zip(tensors, places, strict=True) if place is not None}
    owns = [run.own(nest, known) for nest in nests]
    if any(own is None for own in owns):
        return func
    return _flat(func, run, known, [own for own in owns if own is not None])


@dataclass(frozen=True)
class _Nest:
    """A block alone in its loops, the value of each of whose iterators is a loop's variable."""

    loops: tuple[tirx.For, ...]
    realize: s_tir.SBlockRealize


@dataclass(frozen=True)
class _Run:
    """The axes to fuse: their ``sizes``, and the first one of the result."""

    sizes: tuple[Any, ...]
    axis: int

    def place_in(self, tensor: Any, free: Sequence[tirx.Var]) -> int | None:
        """The first of these axes in a tensor, -1 where nothing of it is free, None where something else is."""
        axes = [axis for axis, size in enumerate(tensor.shape) if uses(size, free)]
        if not axes:
            return -1
        analyzer, run = tvm.sym.Analyzer(), tensor.shape[axes[0] : axes[-1] + 1]
        same = len(run) == len(self.sizes) and all(map(analyzer.can_prove_equal, run, self.sizes))
        return axes[0] if same else None

    def own(self, nest: _Nest, places: dict[Any, int]) -> tuple[tirx.Var, ...] | None:
        """A block's iterators along these axes, where it does all that it does at its own place."""
        block, count = nest.realize.block, len(self.sizes)
        if len(block.writes) != 1 or places.get(block.writes[0].source, -1) < 0:
            return None
        own = tuple(region.min for region in _cut(block.writes[0].region, places[block.writes[0].source], count))
        iterators = {each.var: each for each in block.iter_vars}
        if len(set(own)) < count or not all(var in iterators for var in own):
            return None
        alike: list[bool] = []

        def look(access: Any) -> Any:
            place = places.get(_tensor(access))
            if place is None or place < 0:
                alike.append(place is not None)
                return access
            taken = _cut(access.indices, place, count)
            alike.append(all(index.same_as(var) for index, var in zip(taken, own, strict=True)))
            nothing = [tirx.const(0, str(index.ty)) for index in taken]
            return with_indices(access, [*access.indices[:place], *nothing, *access.indices[place + count :]])

        left = tvm_ffi.structural_map(block.body, [(TensorLoad, look), (tirx.BufferStore, look)])
        return own if all(alike) and not uses(left, own) else None


def _nests(body: tirx.Stmt) -> list[_Nest] | None:
    """The nests that a function is a sequence of; None where one is no plain nest."""
    found: list[_Nest] = []
    for part in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        loops: list[tirx.For] = []
        while isinstance(part, tirx.For):
            loops.append(part)
            part = part.body
        if not isinstance(part, s_tir.SBlockRealize):
            return None
        block, plain = part.block, [loop.loop_var for loop in loops]
        spatial = all(each.iter_type == tirx.IterVar.DataPar for each in block.iter_vars)
        inner: list[Any] = []
        walk(block.body, (s_tir.SBlock, inner.append))
        if not spatial or inner or block.init is not None or block.alloc_buffers or block.match_buffers or not all(
                any(value.same_as(var) for var in plain) for value in part.iter_values):
            return None
        found.append(_Nest(tuple(loops), part))
    return found


def _flat(
    func: tirx.PrimFunc, run: _Run, places: dict[Any, int], owns: Sequence[tuple[tirx.Var, ...]]
) -> tirx.PrimFunc:
    free, count = variables(func), len(run.sizes)
    kind = str(next(size for size in run.sizes if uses(size, free)).ty)
    line = tirx.Var("line", kind)
    image = {
        tensor: like(tensor, [*tensor.shape[:place], line, *tensor.shape[place + count :]])
        for tensor, place in places.items() if place >= 0
    }
    gone = {var for own in owns for var in own[:-1]}
    kept = {own[-1] for own in owns}
    loops: dict[tirx.Var, bool] = {}

    def of_block(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        block = realize.block
        axes, values = [], []
        for each, value in zip(block.iter_vars, realize.iter_values, strict=True):
            if each.var in gone or each.var in kept:
                loops[value] = each.var in kept
            if each.var in kept:
                each = tirx.IterVar(tvm.ir.Range.from_min_extent(tirx.const(0, kind), line), each.var, each.iter_type)
            if each.var not in gone:
                axes.append(each)
                values.append(value)
        made = s_tir.SBlock(
            axes, [regions(each) for each in block.reads], [regions(each) for each in block.writes], block.name_hint,
            tvm_ffi.structural_map(block.body, [(TensorLoad, access), (tirx.BufferStore, access)]), None, [], [],
            block.annotations)
        return s_tir.SBlockRealize(values, realize.predicate, made)

    def short(indices: Sequence[Any], tensor: Any) -> list[Any]:
        place = places[tensor]
        return [*indices] if place < 0 else [*indices[:place], *indices[place + count - 1 :]]

    def regions(region: tirx.BufferRegion) -> tirx.BufferRegion:
        tensor = region.source
        return tirx.BufferRegion(image.get(tensor, tensor), short(region.region, tensor))

    def access(each: Any) -> Any:
        tensor = _tensor(each)
        if isinstance(each, TensorLoad):
            return tirx.BufferLoad(image.get(tensor, tensor), short(each.indices, tensor))
        return tirx.BufferStore(image.get(tensor, tensor), each.value, short(each.indices, tensor))

    def of_loop(loop: tirx.For) -> tirx.Stmt:
        if loop.loop_var not in loops:
            return loop
        if not loops[loop.loop_var]:
            return loop.body
        return tirx.For(loop.loop_var, loop.min, line, loop.kind, loop.body, annotations=dict(loop.annotations))

    root = func.body.block
    body = tvm_ffi.structural_map(root.body, [(s_tir.SBlockRealize, of_block), (tirx.For, of_loop)])
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init,
                         [image.get(each, each) for each in root.alloc_buffers], root.match_buffers, root.annotations)
    params = [image.get(param, param) for param in func.params]
    made = tirx.PrimFunc(params, s_tir.SBlockRealize([], tirx.const(True, "bool"), block), func.ret_type)
    for key, value in dict(func.attrs).items():
        made = made.with_attr(key, value)
    known = dict(zip(free, func.attrs[SIZES], strict=True))
    ends = [{var: int(sizes[i]) for var, sizes in known.items()} for i in range(3)]
    elements = [prod(int(evaluate(size, each)) for size in run.sizes) for each in ends]
    sides = [int(size) if isinstance(size, tirx.IntImm) else 0 for size in run.sizes]
    return made.with_attrs({SIZES: [elements], FLAT: [places[param] for param in func.params], FUSED: sides})


def _cut(indices: Sequence[Any], place: int, count: int) -> Sequence[Any]:
    return indices[place : place + count]


def _tensor(access: Any) -> Any:
    return access.source if isinstance(access, TensorLoad) else access.buffer
