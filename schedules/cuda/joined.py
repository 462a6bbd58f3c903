"""A product whose sum is cut over blocks as one kernel: the last of the blocks that share a tile adds up the parts.

A schedule has two kernels, one that computes parts and one that adds them up, tile by tile. Where a block of the second
reads nothing but what blocks of the first with its own tile have written, the second becomes the end of the first:
each block writes its part, is counted when that can be seen everywhere, and whichever finds that it is the last one of
its tile goes on. It adds the parts in their order, whoever came last, so that every run gives the same numbers. After
"threadFenceReduction" of NVIDIA's CUDA samples.

Whether that holds is proved of the function, not asked of the schedule: where it is not, the kernels stay two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, sym, tirx
from tvm.ir import TensorLoad

from schedules.analysis import evaluate, loads, replaced, uses, walk

__all__ = ["joined", "last_of"]

_BLOCK = "blockIdx.x"
_POINTERS = frozenset({"tirx.tvm_access_ptr", "tirx.address_of"})
#: The count of a tile's parts is zero when a module is loaded, and wraps to zero with the last part: a loaded module
#: runs one call at a time, its kernels one after another. A block's threads meet before one of them fences what all
#: have written, and counts; and again before any reads what the blocks that were counted before have written.
_ARRIVE = """
__device__ unsigned int {name}_count[{tiles}];
__forceinline__ __device__ int {name}(int tile) {{
  __syncthreads();
  int last = 0;
  if (threadIdx.x == 0 && threadIdx.y == 0) {{
    __threadfence();
    last = atomicInc(&{name}_count[tile], {parts}u - 1u) == {parts}u - 1u;
    __threadfence();
  }}
  return __syncthreads_or(last);
}}
"""


def last_of(parts: int, tiles: int, tile: Any) -> Any:
    """Whether a block is the last of the ``parts`` blocks of a ``tile``, of which there are so many: all threads of a
    block ask, once, when they have written its part. The last one sees what all of them have written."""
    from tvm.backend.cuda.op import cuda_func_call

    name = f"mlc_last_of_{parts}_in_{tiles}"
    source = _ARRIVE.format(name=name, tiles=tiles, parts=parts)
    last = cuda_func_call(name, tirx.Cast("int32", tile), source_code=source, return_type="int32")
    return tirx.NE(last, tirx.const(0, "int32"))


def joined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with kernels joined that can be; itself where none can."""
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func
    root = func.body.block
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    kept: list[Any] = []
    handed: list[tirx.Buffer] = []
    for nest in nests:
        found = _join(kept[-1], nest) if kept else None
        if found is None:
            kept.append(nest)
        else:
            kept[-1], between = found
            handed += between
    if len(kept) == len(nests):
        return func
    # TVM's planner would allocate in the kernel what one kernel alone uses, but it leaves what the host allocates
    parts = [buffer for buffer in root.alloc_buffers if any(buffer.same_as(each) for each in handed)]
    inner = [buffer for buffer in root.alloc_buffers if not any(buffer.same_as(part) for part in parts)]
    body = kept[0] if len(kept) == 1 else tirx.SeqStmt(kept)
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, inner,
                         root.match_buffers, root.annotations)
    realize = s_tir.SBlockRealize([], tirx.const(True, "bool"), block)
    return func.with_body(tirx.SeqStmt([*map(tirx.AllocBuffer, parts), realize]) if parts else realize)


@dataclass(frozen=True)
class _Kernel:
    """A nest of one loop over blocks of threads, all else inside."""

    loop: tirx.For
    threads: dict[str, int]
    stores: list[tirx.BufferStore]
    blocks: list[s_tir.SBlockRealize]
    loaded: list[TensorLoad]

    @property
    def count(self) -> int:
        return int(self.loop.extent)

    @property
    def writes(self) -> list[tirx.Buffer]:
        """The global buffers that its blocks say they write, each once."""
        return _distinct(region for realize in self.blocks for region in realize.block.writes)

    @property
    def reads(self) -> list[tirx.Buffer]:
        return _distinct(region for realize in self.blocks for region in realize.block.reads)

    @property
    def points(self) -> bool:
        """Whether it takes a buffer's address, by which an intrinsic may read anything of it."""
        found: list[Any] = []
        walk(self.loop, (tvm.ir.Call, lambda call: found.append(call) if _name(call) in _POINTERS else None))
        return bool(found)


def _kernel(nest: Any) -> _Kernel | None:
    """The nest, if it is a kernel whose outermost loop is over its blocks of threads, and whose threads number along
    the first two axes."""
    if not _is_bound(nest, _BLOCK):
        return None
    bound: list[tirx.For] = []
    walk(nest.body, (tirx.For, lambda loop: bound.append(loop) if loop.thread_binding is not None else None))
    axes = {str(loop.thread_binding.thread_tag): loop.extent for loop in bound}
    if not axes.keys() <= {"threadIdx.x", "threadIdx.y", "vthread.x", "vthread.y"}:
        return None
    if not all(isinstance(extent, tirx.IntImm) for extent in axes.values()):
        return None
    stores: list[tirx.BufferStore] = []
    blocks: list[s_tir.SBlockRealize] = []
    walk(nest, (tirx.BufferStore, stores.append), (s_tir.SBlockRealize, blocks.append))
    threads = {axis: int(extent) for axis, extent in axes.items() if axis.startswith("threadIdx")}
    return _Kernel(nest, threads, stores, blocks, loads(nest))


def _is_bound(nest: Any, axis: str) -> bool:
    binding = nest.thread_binding if isinstance(nest, tirx.For) else None
    return binding is not None and str(binding.thread_tag) == axis and isinstance(nest.extent, tirx.IntImm)


def _join(nest: Any, following: Any) -> tuple[tirx.For, list[tirx.Buffer]] | None:
    """Both kernels as one, where the second may run tile by tile at the end of the first; and what it hands over."""
    first, second = _kernel(nest), _kernel(following)
    if first is None or second is None or first.threads != second.threads or first.count % second.count:
        return None
    parts = first.count // second.count
    between = _common(first.writes, second.reads)
    if parts < 2 or not between or _common(second.writes, [*first.reads, *first.writes]) or second.points:
        return None
    if not all(_by_tiles(first, second, buffer) for buffer in between):
        return None
    return _whole(first, second, parts), between


def _distinct(regions: Iterable[Any]) -> list[tirx.Buffer]:
    """The global buffers that regions are of, each once."""
    found: list[tirx.Buffer] = []
    for region in regions:
        if region.source.scope() in ("", "global") and not _common([region.source], found):
            found.append(region.source)
    return found


def _common(some: Sequence[tirx.Buffer], others: Sequence[tirx.Buffer]) -> list[tirx.Buffer]:
    return [buffer for buffer in some if any(buffer.same_as(other) for other in others)]


def _name(call: Any) -> str:
    return str(getattr(call.op, "name", ""))


def _by_tiles(first: _Kernel, second: _Kernel, buffer: tirx.Buffer) -> bool:
    """Whether block ``t`` of the second kernel reads of a buffer only what blocks ``t``, ``t + count`` and so on of the
    first have written.

    A block writes what lies in a box of it. All elements are written, each once, and all boxes together hold no more
    elements than there are: so each box is written by its block alone. What the second kernel reads must lie in boxes
    that begin at the same place, but for the first dimension, which tells the parts apart.
    """
    written = _written(first, buffer)
    if written is None:
        return False
    numbers = np.arange(first.count)
    found = [_box(index, first.loop, numbers, first) for index in written]
    boxes = [box for box in found if box is not None]
    if len(boxes) < len(found):
        return False
    if prod(box.extent for box in boxes) * first.count != prod(int(extent) for extent in buffer.shape):
        return False
    if boxes[0].extent != 1 or not np.array_equal(boxes[0].begin, numbers // second.count):
        return False
    for load in second.loaded:
        if not load.source.same_as(buffer):
            continue
        for index, box in list(zip(_by_loops(load.indices, second), boxes, strict=True))[1:]:
            read = _box(index, second.loop, numbers % second.count, second)
            if read is None or read.extent > box.extent or not np.array_equal(read.begin, box.begin):
                return False
    return True


@dataclass(frozen=True)
class _Box:
    """Along one dimension, what each block of threads accesses: as much from where."""

    begin: np.ndarray
    extent: int


def _box(index: Any, loop: tirx.For, numbers: np.ndarray, kernel: _Kernel) -> _Box | None:
    """The box of an index of blocks with these numbers; None where it depends on a block's number and other loops in
    more than a sum."""
    inner: list[tirx.For] = []
    walk(loop.body, (tirx.For, inner.append))
    begin = replaced(index, {each.loop_var: tirx.const(0, each.loop_var.ty.dtype) for each in inner})
    analyzer = sym.Analyzer()
    for each in (loop, *inner):
        zero = tirx.const(0, each.loop_var.ty.dtype)
        analyzer.bind(each.loop_var, tvm.ir.Range.from_min_extent(zero, each.extent))
    offset = analyzer.simplify(index - begin)
    bound = analyzer.const_int_bound(offset)
    at = evaluate(begin, {loop.loop_var: numbers})
    if at is None or uses(offset, [loop.loop_var]) or bound.min_value != 0:
        return None
    return _Box(np.broadcast_to(at, numbers.shape), int(bound.max_value) + 1)


def _written(kernel: _Kernel, buffer: tirx.Buffer) -> list[Any] | None:
    """The indices by which the kernel writes every element of a buffer once, in terms of its loops; None where that is
    not seen."""
    stores = [store for store in kernel.stores if store.buffer.same_as(buffer)]
    owners = [r for r in kernel.blocks if any(w.source.same_as(buffer) for w in r.block.writes)
              and isinstance(r.block.body, tirx.BufferStore)]
    if len(stores) != 1 or len(owners) != 1 or not owners[0].block.body.same_as(stores[0]):
        return None
    realize, (store,) = owners[0], stores
    variables = [each.var for each in realize.block.iter_vars]
    whole = len(variables) == len(store.indices) and all(
        var.same_as(index) and int(each.dom.extent) == int(extent)
        for var, each, index, extent in zip(
            variables, realize.block.iter_vars, store.indices, buffer.shape, strict=True)
    )
    always = isinstance(realize.predicate, tirx.IntImm) and bool(realize.predicate)
    return _by_loops(store.indices, kernel) if whole and always else None


def _by_loops(indices: Sequence[Any], kernel: _Kernel) -> list[Any]:
    """Indices in terms of the kernel's loops."""
    values = {
        each.var: value for realize in kernel.blocks
        for each, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
    }
    found = list(indices)
    for _ in kernel.blocks:  # blocks in blocks
        found = [replaced(index, values) for index in found]
    return found


def _whole(first: _Kernel, second: _Kernel, parts: int) -> tirx.For:
    """One kernel with the blocks of the first."""
    number, tiles = first.loop.loop_var, second.count
    tile = number % tirx.const(tiles, number.ty.dtype)
    ending = replaced(second.loop.body, {second.loop.loop_var: tile.astype(second.loop.loop_var.ty.dtype)})
    body = tirx.SeqStmt([first.loop.body, tirx.IfThenElse(last_of(parts, tiles, tile), ending, None)])
    return tirx.For(number, first.loop.min, first.loop.extent, first.loop.kind, body, first.loop.thread_binding,
                    first.loop.annotations)
