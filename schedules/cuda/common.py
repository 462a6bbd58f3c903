"""What every CUDA space needs: the blocks that stand under the root, inlining, binding, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from math import prod
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import BlockInfo, describe, expression_size, loads, uses, walk
from schedules.lockstep import Lockstep, is_fixed
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, InvalidDecision, Space, best_seed

__all__ = [
    "CudaSpace", "Leaf", "bind_flat", "bind_leaf", "bind_leaves", "bring_inside", "ceil_div", "cheapest",
    "inline_injective", "leaves", "limits", "loop_kinds", "refresh", "require", "require_joined", "scratch", "uniform",
]

_Tile = TypeVar("_Tile", bound=Any)

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
    """A block right under the root, as it is in the schedule now; ``intermediate`` if nothing outside of the function
    sees what it writes."""

    rv: SBlockRV
    info: BlockInfo
    intermediate: bool

    def writes_to(self, buffer: tirx.Buffer) -> bool:
        return any(buffer.same_as(written) for written in self.info.writes)

    def reads_from(self, buffer: tirx.Buffer) -> bool:
        """Whether the block declares that it reads the buffer."""
        return any(buffer.same_as(region.source) for region in self.info.block.reads)


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
        info = describe(sch.get(rv))
        inner = all(any(written.same_as(buffer) for buffer in allocated) for written in info.writes)
        found.append(Leaf(rv, info, inner))
    return found


def scratch(func: tirx.PrimFunc) -> s_tir.Schedule:
    """A schedule to find something out with; it is thrown away."""
    return s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="none", error_render_level="fast")


def uniform(blocks: Iterable[BlockInfo]) -> bool:
    """Whether all iterators have one integer type.

    Where they do not, some of TVM's primitives raise halfway and its lowering misses reductions across threads (seen
    with 0.27), so such a function is only bound, never rearranged.
    """
    return len(frozenset().union(*(block.index_types for block in blocks))) <= 1


def refresh(sch: s_tir.Schedule, found: Sequence[Leaf]) -> list[Leaf]:
    """The same leaves as they are after transformations of the schedule."""
    return [replace(leaf, info=describe(sch.get(leaf.rv))) for leaf in found]


def inline_injective(sch: s_tir.Schedule, found: Sequence[Leaf]) -> list[Leaf]:
    """Inline every injective intermediate into its readers; returns the leaves that remain.

    A leaf stays where inlining would blow its reader up, or where TVM refuses.
    """
    remaining = list(found)
    for leaf in found:
        if not (leaf.intermediate and leaf.info.kind == "injective"):
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
    buffer = leaf.info.writes[0]
    size = expression_size(leaf.info.block.body)
    for other in others:
        body = other.info.block.body
        count = sum(load.source.same_as(buffer) for load in loads(body))
        if count and not other.reads_from(buffer):
            return False
        if count and expression_size(body) + size * count > _MAX_EXPRESSION:
            return False
    return True


def cheapest(
    made: type[_Tile], knobs: Mapping[str, Sequence[int]], misfit: Callable[[_Tile], str | None],
    cost: Callable[[_Tile], Any], count: int,
) -> Iterator[Decisions]:
    """The decisions of so many tiles that cost least, best first, of all that the ``knobs`` allow and that fit. A tile
    is a dataclass whose fields are knobs."""
    names = [field.name for field in fields(made)]
    tiles = (made(*choice) for choice in product(*(knobs[name] for name in names)))
    fitting = [tile for tile in tiles if misfit(tile) is None]
    for tile in nsmallest(count, fitting, key=cost):
        yield {name: getattr(tile, name) for name in names}


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def bind_flat(sch: s_tir.Schedule, loops: Sequence[Any], threads: int, vector: int = 1) -> tuple[Any, Any]:
    """Fuse ``loops`` and spread them over a one-dimensional grid; returns the block and the thread loop.

    Before: ``for i, j: S``. After: ``for blockIdx.x, threadIdx.x, vectorised v: S``.
    """
    loops = list(loops)
    if vector > 1 and not all(is_fixed(sch, loop) for loop in loops):  # whichever row it is in, neighbours lie in one
        loops[-1], vec = sch.split(loops[-1], [None, vector])
        bx, tx = sch.split(sch.fuse(*loops), [None, threads])
        sch.reorder(bx, tx, vec)
        sch.vectorize(vec)
    elif vector > 1:
        bx, tx, vec = sch.split(sch.fuse(*loops), [None, threads, vector])
        sch.vectorize(vec)
    else:
        bx, tx = sch.split(sch.fuse(*loops), [None, threads])
    sch.bind(bx, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    return bx, tx


def require_joined(sch: s_tir.Schedule | Lockstep) -> None:
    """Raise :class:`InvalidDecision` unless TVM joins every reduction that is spread over threads, of free sizes too.

    Its pass looks for patterns and leaves what it doesn't know as it is: each thread would keep a part of the sum.
    """
    names = ", ".join(sorted(_not_joined(sch.mod) or (_not_joined(sch.free.mod) if isinstance(sch, Lockstep) else ())))
    require(not names, f"a reduction over threads must be one that TVM can join, but {names} is not")


def _not_joined(mod: tvm.IRModule) -> set[str]:
    """Blocks whose parts of a sum TVM would leave in the threads that make them."""
    lowered = s_tir.transform.LowerCrossThreadReduction()(mod)["main"]
    threads: list[Any] = []
    left: set[str] = set()

    def enter(loop: Any) -> None:
        if loop.thread_binding is not None and str(loop.thread_binding.thread_tag).startswith("threadIdx"):
            threads.append(loop.loop_var)

    def inspect(realize: Any) -> None:
        for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            reduced = iv.iter_type == tirx.IterVar.CommReduce and realize.block.init is not None
            if reduced and uses(value, threads):
                left.add(str(realize.block.name_hint))

    callbacks = [(tirx.For, enter), (s_tir.SBlockRealize, inspect)]
    tvm_ffi.structural_walk(lowered.body, callbacks, order="pre")
    return left


def require(condition: bool, message: str) -> None:
    """Raise :class:`InvalidDecision` unless ``condition`` holds."""
    if not condition:
        raise InvalidDecision(message)


def loop_kinds(sch: s_tir.Schedule, leaf: Leaf) -> tuple[list[LoopRV], list[LoopRV]] | None:
    """The loops around a leaf that only data-parallel iterators use, and those that a reduction uses.

    None where a loop belongs to several leaves or an iterator is neither: such a nest can't be spread over threads.
    """
    if not leaf.info.regular:
        return None
    loops = sch.get_loops(leaf.rv)
    inside: list[Any] = []
    walk(sch.get(loops[0]) if loops else leaf.info.block, (s_tir.SBlockRealize, inside.append))
    if len(inside) > 1:
        return None
    reducing = [
        value for realize in inside if realize.block.same_as(leaf.info.block)
        for value, reduced in zip(realize.iter_values, leaf.info.reduces, strict=True) if reduced
    ]
    kinds: tuple[list[LoopRV], list[LoopRV]] = ([], [])
    for loop in loops:
        variable = sch.get(loop).loop_var
        kinds[any(uses(value, [variable]) for value in reducing)].append(loop)
    return kinds


def bring_inside(sch: s_tir.Schedule, out: SBlockRV, at: LoopRV) -> None:
    """Compute inside of a loop around ``out`` all that it is made of, as far as nothing else reads it."""
    waiting = [out]
    while waiting:
        for producer in sch.get_producers(waiting.pop(0)):
            readers = sch.get_consumers(producer)
            if not _inside(sch, producer, at) and all(_inside(sch, reader, at) for reader in readers):
                sch.compute_at(producer, at, preserve_unit_loops=True)
                waiting.append(producer)


def _inside(sch: s_tir.Schedule, block: SBlockRV, at: LoopRV) -> bool:
    return any(sch.get(loop).same_as(sch.get(at)) for loop in sch.get_loops(block))


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
