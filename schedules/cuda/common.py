"""What every CUDA space needs: reading the blocks of a function, inlining, binding, limits.

Words used here: a *leaf* is a block right under the root; it is *spatial* if none of its iterators is a
reduction and its body is one store, and *intermediate* if nothing outside the function sees what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.machine import GpuMachine, gpu_machine
from schedules.space import InvalidDecision, Space, best_seed

__all__ = [
    "CudaSpace", "Leaf", "bind_flat", "bind_leaf", "bind_leaves", "ceil_div", "inline_spatial", "leaves",
    "limits",
    "loads_of", "loop_kinds", "refresh", "require", "require_joined", "scratch",
    "static_extents", "uniform",
]

#: static ``__shared__`` arrays may not exceed this; more needs dynamic shared memory, which these spaces don't use
_STATIC_SHARED_BYTES = 48 * 1024
#: an inlined expression above this many nodes costs more in code than its buffer costs in traffic
_MAX_EXPRESSION = 4000


def limits(target: tvm.target.Target) -> GpuMachine:
    """The GPU that a ``cuda`` target describes, with the shared memory that these spaces may use of it."""
    gpu = gpu_machine(target)
    return replace(gpu, shared_bytes=min(gpu.shared_bytes, _STATIC_SHARED_BYTES))


class CudaSpace(Space):
    """A space that recognises a function by analysis and takes it only if a seed can really be carried out.

    Being asked costs one scheduling, which is remembered; failing after a match would cost the whole build.
    """

    target_kind = "cuda"

    def recognises(self, func: tirx.PrimFunc) -> bool:
        """Whether the function looks like this space's. May raise what TVM raises."""
        raise NotImplementedError

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _feasible(self, func, str(target))


@lru_cache(maxsize=1024)
def _feasible(space: CudaSpace, func: tirx.PrimFunc, target: str) -> bool:
    try:
        if not space.recognises(func):
            return False
        best_seed(space, func, tvm.target.Target(target))
    except Exception:  # TVM's primitives raise TypeError, ValueError, InternalError for what they don't know
        return False
    return True


@dataclass(frozen=True, eq=False)
class Leaf:
    """One block right under the root, as it is in the schedule now."""

    rv: Any
    block: Any
    intermediate: bool

    @property
    def reduction(self) -> bool:
        return any(iv.iter_type == tirx.IterVar.CommReduce for iv in self.block.iter_vars)

    @property
    def simple(self) -> bool:
        """Only data-parallel and reduction iterators, so loops may be fused, split and bound."""
        kinds = (tirx.IterVar.DataPar, tirx.IterVar.CommReduce)
        return all(iv.iter_type in kinds for iv in self.block.iter_vars)

    @property
    def spatial(self) -> bool:
        return self.simple and not self.reduction and isinstance(self.block.body, tirx.BufferStore)

    @property
    def name(self) -> str:
        return str(self.block.name_hint)

    @property
    def index_types(self) -> set[str]:
        """The integer types of its iterators."""
        return {str(iv.dom.extent.ty.dtype) for iv in self.block.iter_vars}

    def writes_to(self, buffer: Any) -> bool:
        return any(region.source.same_as(buffer) for region in self.block.writes)

    def reads_from(self, buffer: Any) -> bool:
        return any(region.source.same_as(buffer) for region in self.block.reads)


def leaves(sch: s_tir.Schedule) -> list[Leaf]:
    """The blocks right under the root, in the order in which they run.

    Raises :class:`InvalidDecision` for a function that is one opaque block: TVM can't put a loop around its root.
    """
    body = sch.mod["main"].body
    if not isinstance(body, s_tir.SBlockRealize) or body.block.name_hint != "root":
        raise InvalidDecision("the blocks must stand under a root block, but this function is a single opaque block")
    root_rv = sch.get_sblock("root")
    allocated = list(sch.get(root_rv).alloc_buffers)
    found = []
    for rv in sch.get_child_blocks(root_rv):
        block = sch.get(rv)
        inner = all(any(w.source.same_as(b) for b in allocated) for w in block.writes)
        found.append(Leaf(rv, block, inner))
    return found


def static_extents(block: Any) -> tuple[int, ...] | None:
    """The extents of a block's iterators, or None where one is symbolic or does not start at 0."""
    extents = []
    for iv in block.iter_vars:
        if not isinstance(iv.dom.extent, tirx.IntImm) or not isinstance(iv.dom.min, tirx.IntImm) or int(iv.dom.min):
            return None
        extents.append(int(iv.dom.extent))
    return tuple(extents)


def scratch(func: tirx.PrimFunc) -> s_tir.Schedule:
    """A schedule to find something out with; it is thrown away."""
    return s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="none", error_render_level="fast")


def loads_of(node: Any) -> list[Any]:
    """Every buffer load inside a statement or an expression."""
    found: list[Any] = []
    tvm_ffi.structural_walk(node, (tvm.ir.TensorLoad, found.append), order="post")
    return found


def _expression_size(node: Any) -> int:
    """Number of nodes of a statement as it would be printed."""
    count = 0

    def add(_: Any) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(node, (tvm.ir.Expr, add), order="post")
    return count


def uniform(found: Sequence[Leaf]) -> bool:
    """Whether all iterators have one integer type.

    Where they do not, some of TVM's primitives raise halfway and its lowering misses reductions across threads (seen
    with 0.27), so such a function is only bound, never rearranged.
    """
    return len(set().union(*(leaf.index_types for leaf in found))) <= 1


def refresh(sch: s_tir.Schedule, found: Sequence[Leaf]) -> list[Leaf]:
    """The same leaves as they are after transformations of the schedule."""
    return [replace(leaf, block=sch.get(leaf.rv)) for leaf in found]


def inline_spatial(sch: s_tir.Schedule, found: Sequence[Leaf]) -> list[Leaf]:
    """Inline every intermediate spatial leaf into its readers; returns the leaves that remain.

    A leaf stays where inlining would blow its reader up, or where TVM refuses.
    """
    remaining = list(found)
    for leaf in found:
        if not (leaf.intermediate and leaf.spatial):
            continue
        position = remaining.index(leaf)
        current = refresh(sch, remaining)
        if not _worth_inlining(current[position], current):
            continue
        try:
            sch.compute_inline(leaf.rv)
        except s_tir.ScheduleError:
            continue
        del remaining[position]
    return refresh(sch, remaining)


def _worth_inlining(leaf: Leaf, others: Sequence[Leaf]) -> bool:
    """Whether every reader of ``leaf`` declares that it reads it and stays of a size that compiles fast."""
    buffer = leaf.block.writes[0].source
    size = _expression_size(leaf.block.body)
    for other in others:
        uses = sum(load.source.same_as(buffer) for load in loads_of(other.block.body))
        if uses and (other is leaf or not other.reads_from(buffer)):
            return False
        if uses and _expression_size(other.block.body) + size * uses > _MAX_EXPRESSION:
            return False
    return True


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def bind_flat(sch: s_tir.Schedule, loops: Sequence[Any], threads: int, vector: int = 1) -> tuple[Any, Any]:
    """Fuse ``loops`` and spread them over a one-dimensional grid; returns the block and the thread loop.

    Before: ``for i, j: S``. After: ``for blockIdx.x, threadIdx.x, vectorised v: S``.
    """
    flat = sch.fuse(*loops)
    if vector > 1:
        bx, tx, vec = sch.split(flat, [None, threads, vector])
        sch.vectorize(vec)
    else:
        bx, tx = sch.split(flat, [None, threads])
    sch.bind(bx, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    return bx, tx


def require_joined(sch: s_tir.Schedule) -> None:
    """Raise :class:`InvalidDecision` unless TVM joins every reduction that is spread over threads.

    Its pass looks for patterns and leaves what it doesn't know as it is: each thread would keep a part of the sum.
    """
    lowered = s_tir.transform.LowerCrossThreadReduction()(sch.mod)["main"]
    threads: list[Any] = []
    left: list[str] = []

    def enter(loop: Any) -> None:
        if loop.thread_binding is not None and str(loop.thread_binding.thread_tag).startswith("threadIdx"):
            threads.append(loop.loop_var)

    def inspect(realize: Any) -> None:
        for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            used: list[Any] = []
            tvm_ffi.structural_walk(value, (tvm.ir.Var, used.append), order="post")
            spread = any(var.same_as(thread) for var in used for thread in threads)
            if iv.iter_type == tirx.IterVar.CommReduce and spread and realize.block.init is not None:
                left.append(str(realize.block.name_hint))

    callbacks = [(tirx.For, enter), (s_tir.SBlockRealize, inspect)]
    tvm_ffi.structural_walk(lowered.body, callbacks, order="pre")
    names = ", ".join(sorted(set(left)))
    require(not left, f"a reduction over threads must be one that TVM can join, but {names} is not")


def require(condition: bool, message: str) -> None:
    """Raise :class:`InvalidDecision` unless ``condition`` holds."""
    if not condition:
        raise InvalidDecision(message)


def loop_kinds(sch: s_tir.Schedule, leaf: Leaf) -> tuple[list[Any], list[Any]] | None:
    """The loops around a leaf that only data-parallel iterators use, and those that a reduction uses.

    None where a loop belongs to several leaves or an iterator is neither: such a nest can't be spread over threads.
    """
    if not leaf.simple:
        return None
    loops = sch.get_loops(leaf.rv)
    reducing: list[Any] = []
    inside: list[str] = []

    def visit(realize: Any) -> None:
        inside.append(realize.block.name_hint)
        if realize.block.same_as(sch.get(leaf.rv)):
            for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
                if iv.iter_type == tirx.IterVar.CommReduce:
                    tvm_ffi.structural_walk(value, (tvm.ir.Var, reducing.append), order="post")

    tvm_ffi.structural_walk(sch.get(loops[0]) if loops else leaf.block, (s_tir.SBlockRealize, visit), order="post")
    if len(inside) > 1:
        return None
    kinds: tuple[list[Any], list[Any]] = ([], [])
    for loop in loops:
        kinds[any(sch.get(loop).loop_var.same_as(var) for var in reducing)].append(loop)
    return kinds


def bind_leaf(sch: s_tir.Schedule, leaf: Leaf, gpu: GpuMachine, threads: int = 256) -> None:
    """Give a leaf a kernel of its own: a thread for each result, sums in order inside it.

    What can't be spread over threads (scans, sorts, nests of several leaves) runs in one thread.
    """
    kinds = loop_kinds(sch, leaf)
    if kinds is None:
        loops = sch.get_loops(leaf.rv)
        alone = sch.add_unit_loop(loops[0] if loops else leaf.rv)
        bind_flat(sch, [alone], 1)
        return
    spatial, reducing = kinds
    if not spatial:
        spatial = [sch.add_unit_loop(reducing[0] if reducing else leaf.rv)]
    sch.reorder(*spatial, *reducing)
    extent = prod(int(sch.get(loop).extent) for loop in spatial)
    bind_flat(sch, spatial, min(threads, gpu.threads_per_block, ceil_div(extent, gpu.warp) * gpu.warp))


def bind_leaves(sch: s_tir.Schedule, found: Sequence[Leaf], gpu: GpuMachine) -> None:
    """Give each leaf that no template took a kernel of its own."""
    for leaf in refresh(sch, found):
        bind_leaf(sch, leaf, gpu)
