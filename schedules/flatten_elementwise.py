"""Fuses the free axes of elementwise functions and reductions: an activation of ``[batch, length, 128]`` is one of
``[n, 128]``, the largest of ``[batch, length]`` numbers that of ``[n]``.

Loops over several free sizes that are fused and cut into vectors leave divisions by free sizes in every index, which
TVM's analyzer does not put together again: each lane is then loaded and stored by itself. Of one axis there is nothing
to divide. Tensors lie in memory as they did; :func:`schedules.flatten_spatial.restored` gives the lowered function the
parameters of its callers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import evaluate, uses, walk
from schedules.flatten_spatial import FLAT, FUSED, like, with_indices
from schedules.free import SIZES, variables
from schedules.merged import Product

__all__ = ["flattened_elementwise"]

#: the annotation of a block that a space of its own schedules, by all of its axes
_OP = "mlc.op"


def flattened_elementwise(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with free sizes whose blocks all treat each place along some neighbouring axes alike, with one axis in
    place of the longest run of them that begins and ends with a free one; the same object where there is none.

    ::

        for i, j, k in grid(b, t, 128):                      for i, k in grid(n, 128):
            y[i, j, k] = max(x[i, j, k] + c[k], 0)    -->        y[i, k] = max(x[i, k] + c[k], 0)

    Attributes say how the parameters were: :data:`schedules.flatten_spatial.FLAT` and ``FUSED``.
    """
    if not (func.attrs and SIZES in func.attrs) or FLAT in func.attrs or not isinstance(
            func.body, s_tir.SBlockRealize):
        return func
    free, root = variables(func), func.body.block
    tensors = [*func.params, *root.alloc_buffers]
    nests = None if any(isinstance(each.ty, tvm.ir.PrimType) for each in tensors) else _nests(root.body)
    for run in _runs(tensors, free) if nests else ():
        places = {tensor: place for tensor in tensors if (place := run.place_in(tensor)) is not None}
        if len(places) < len(set(tensors)) or _transposes(places):
            continue
        owns = [run.own(nest, places) for nest in nests or ()]
        if all(own is not None for own in owns):
            return _flat(func, run, places, [own for own in owns if own])
    return func


def _transposes(places: Mapping[Any, int]) -> bool:
    """Whether tensors of as many axes have the run at different ones: what is tiled then are its last axis and the one
    that it changes places with, of which the former would be longer than need be."""
    having = [(len(tensor.shape), place) for tensor, place in places.items() if place >= 0]
    return any(rank == other and place != at for rank, place in having for other, at in having)


def _runs(tensors: Sequence[Any], free: Sequence[tirx.Var]) -> list[_Run]:
    """The runs of axes that begin and end with a free one, of the tensor that has the most, longest first."""
    shape = max((each.shape for each in tensors), key=lambda shape: sum(bool(uses(size, free)) for size in shape))
    axes = [axis for axis, size in enumerate(shape) if uses(size, free)]
    ends = [(first, last) for first in axes for last in axes if first < last]
    runs = [tuple(shape[first : last + 1]) for first, last in sorted(ends, key=lambda each: each[0] - each[1])]
    return [_Run(sizes, [var for var in free if any(uses(size, [var]) for size in sizes)]) for sizes in runs]


@dataclass(frozen=True)
class _Nest:
    """A block alone in its loops, the value of each of whose iterators is a loop's variable."""

    loops: tuple[tirx.For, ...]
    realize: s_tir.SBlockRealize


@dataclass(frozen=True)
class _Run:
    """The axes to fuse: their ``sizes``, and the free variables in these."""

    sizes: tuple[Any, ...]
    free: Sequence[tirx.Var]

    def place_in(self, tensor: Any) -> int | None:
        """The first of these axes in a tensor, -1 where it has none of their sizes, None where it has others of them.
        """
        analyzer, count = tvm.sym.Analyzer(), len(self.sizes)
        axes = [axis for axis, size in enumerate(tensor.shape) if uses(size, self.free)]
        if not axes:
            return -1
        run = tensor.shape[axes[0] : axes[-1] + 1]
        same = len(run) == count and all(map(analyzer.can_prove_equal, run, self.sizes))
        return axes[0] if same else None

    def own(self, nest: _Nest, places: dict[Any, int]) -> tuple[tirx.Var, ...] | None:
        """A block's iterators along these axes, where it does all that it does at its own place; none of a block that
        touches no tensor with these axes, None where it does otherwise."""
        block, count = nest.realize.block, len(self.sizes)
        iterators = {each.var: each for each in block.iter_vars}
        own: list[tuple[tirx.Var, ...]] = []
        known: list[bool] = []

        def look(access: Any) -> Any:
            place = places.get(_tensor(access))
            known.append(place is not None)
            if place is None or place < 0:
                return access
            own.append(tuple(access.indices[place : place + count]))
            nothing = [tirx.const(0, str(index.ty)) for index in own[-1]]
            return with_indices(access, [*access.indices[:place], *nothing, *access.indices[place + count :]])

        parts = [part for part in (block.body, block.init) if part is not None]
        left = [tvm_ffi.structural_map(part, [(TensorLoad, look), (tirx.BufferStore, look)]) for part in parts]
        if not all(known):
            return None
        if not own:
            return None if any(self.is_used(part) for part in left) else ()
        first = own[0]
        if len(set(first)) < count or not all(var in iterators for var in first):
            return None
        alike = all(one.same_as(other) for each in own for one, other in zip(first, each, strict=True))
        kinds = {int(iterators[var].iter_type) for var in first}
        left = [*left, *(each.dom.extent for each in block.iter_vars if each.var not in first)]
        used = any(uses(part, first) or self.is_used(part) for part in left)
        return first if alike and len(kinds) == 1 and not used else None

    def is_used(self, part: Any) -> bool:
        """Whether something depends on these sizes, but by their product."""
        return bool(uses(self.with_product(part, tirx.const(0, str(self.free[0].ty))), self.free))

    def with_product(self, part: Any, line: Any) -> Any:
        """The same with ``line`` for the product of all sizes; of sizes that are no variables nothing is replaced."""
        if not all(isinstance(size, tirx.Var) for size in self.sizes):
            return part
        return tvm_ffi.structural_map(part, (tirx.Mul, Product(self.free, line).replaced))


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
        inner: list[Any] = []
        walk(block.body, (s_tir.SBlock, inner.append))
        simple = all(any(value.same_as(var) for var in plain) for value in part.iter_values)
        if not simple or inner or block.alloc_buffers or block.match_buffers or _OP in block.annotations:
            return None
        found.append(_Nest(tuple(loops), part))
    return found


def _flat(
    func: tirx.PrimFunc, run: _Run, places: dict[Any, int], owns: Sequence[tuple[tirx.Var, ...]]
) -> tirx.PrimFunc:
    free, count = variables(func), len(run.sizes)
    kind = str(run.free[0].ty)
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
            rewritten(block.body), None if block.init is None else rewritten(block.init), [], [], block.annotations)
        return s_tir.SBlockRealize(values, realize.predicate, made)

    def rewritten(part: Any) -> Any:
        return run.with_product(tvm_ffi.structural_map(part, [(TensorLoad, access), (tirx.BufferStore, access)]), line)

    def short(indices: Sequence[Any], tensor: Any) -> list[Any]:
        place = places[tensor]
        return [*indices] if place < 0 else [*indices[:place], *indices[place + count - 1 :]]

    def regions(region: tirx.BufferRegion) -> tirx.BufferRegion:
        tensor = region.source
        ranges = [tvm.ir.Range.from_min_extent(rewritten(each.min), rewritten(each.extent))
                  for each in short(region.region, tensor)]  # what is gathered is at a place that is loaded
        return tirx.BufferRegion(image.get(tensor, tensor), ranges)

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
    sizes = [elements if var.same_as(line) else [int(end) for end in known[var]] for var in variables(made)]
    sides = [int(size) if isinstance(size, tirx.IntImm) else 0 for size in run.sizes]
    return made.with_attrs({SIZES: sizes, FLAT: [places[param] for param in func.params], FUSED: sides})


def _tensor(access: Any) -> Any:
    return access.source if isinstance(access, TensorLoad) else access.buffer
