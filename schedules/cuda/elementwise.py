"""Elementwise functions and data movement: everything folded into one store a result, a thread for a few of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call

from schedules.analysis import BlockInfo, analyse, loads, op_name, remembered, uses, walk, widest_run
from schedules.cuda import memory_time
from schedules.cuda.common import (
    CudaSpace,
    Leaf,
    bind_flat,
    ceil_div,
    inline_injective,
    leaves,
    limits,
    require,
    scratch,
    uniform,
)
from schedules.cuda.memory_time import traffic_of
from schedules.machine import gpu_machine
from schedules.space import Decisions, Footprint, Knob, Pick

__all__ = ["Elementwise"]

_VECTOR_TYPES = frozenset({"float32", "int32", "float16", "bfloat16", "int8", "uint8"})
#: threads that a multiprocessor has at least where each takes several results at once
_LEAST_THREADS = 128
#: neighbouring results that a thread may have
_WIDTHS = (1, 2, 4, 8)
#: registers of a thread beside what it fetches
_OTHER_REGISTERS = 16


def _vector(info: BlockInfo, wanted: int) -> int:
    """How many neighbouring results one access may take: types of which TVM writes such vectors, and rows that it
    divides."""
    regions = (*info.block.reads, *info.block.writes)
    if any(str(region.source.dtype) not in _VECTOR_TYPES for region in regions):
        return 1
    widths = [w for w in (8, 4, 2, 1) if w <= wanted and (w < 8 or _in_halves(info))]
    return next(v for v in widths if info.extents[-1] % v == 0 and _agree(info, v))


def _in_halves(info: BlockInfo) -> bool:
    """Whether eight results may be made of what is fetched before (:mod:`schedules.cuda.halves`): they have 16 bits,
    lie side by side as all that moves with them, and what is read is the same element of a tensor everywhere, of none
    that is not there."""
    body, last = info.block.body, len(info.extents) - 1
    if not isinstance(body, tirx.BufferStore) or _bits(body.buffer) != 16:
        return False
    found, guards = loads(body.value), []
    walk(body.value, (Call, lambda call: guards.append(call) if op_name(call) == "if_then_else" else None))
    stored = tirx.BufferLoad(body.buffer, body.indices)
    moving = [load for load in (stored, *found) if uses(load, [info.variables[last]])]
    apart = all(not a.source.same_as(b.source) or tvm_ffi.structural_equal(a, b) for a in found for b in found)
    return not guards and apart and not any(loads(index) for load in found for index in load.indices) and all(
        widest_run(load, info.variables, info.extents, last, [8]) == 8 for load in moving)


def _bits(buffer: tirx.Buffer) -> int:
    return int(tvm.runtime.DataType(str(buffer.dtype)).bits)


def _fetch(sch: s_tir.Schedule, leaf: Leaf, thread: Any) -> None:
    """Bring eight neighbours of each tensor of 16 bits to registers at once, before they are computed with."""
    last = leaf.info.variables[-1]
    moving = [load.source for load in loads(leaf.info.block.body) if uses(load, [last]) and _bits(load.source) == 16]
    for i, read in enumerate(sch.get(leaf.rv).reads):
        if any(read.source.same_as(source) for source in moving):
            fetched = sch.cache_read(leaf.rv, i, "local")
            sch.compute_at(fetched, thread, preserve_unit_loops=True)
            *others, lanes = (loop for loop in sch.get_loops(fetched)[2:])
            require(all(int(sch.get(loop).extent) == 1 for loop in others) and int(sch.get(lanes).extent) == 8,
                    "eight neighbours of a result must be made of eight of each tensor")
            sch.vectorize(lanes)


def _agree(info: BlockInfo, width: int) -> bool:
    """Whether neighbours agree on every condition: TVM takes vectors apart that do not, and each thread would store
    its elements one by one, far from those of the next."""
    body, last = info.block.body, len(info.extents) - 1
    if width == 1 or not isinstance(body, tirx.BufferStore):
        return True
    stored, conditions = tirx.BufferLoad(body.buffer, body.indices), []
    walk(body.value, (Call, lambda call: conditions.append(call.args[0])
                      if op_name(call) == "if_then_else" else None))
    zero = tirx.const(0, str(body.buffer.dtype))
    return all(widest_run(tirx.if_then_else(condition, stored, zero), info.variables, info.extents, last, [width])
               == width for condition in conditions if uses(condition, [info.variables[last]]))


@remembered
def _largest(func: tirx.PrimFunc) -> tuple[int, Mapping[int, int]]:
    """How many results the largest kernel of a function has, and how many of them one access takes for each that is
    wanted."""
    sch = scratch(func)
    info = max((leaf.info for leaf in inline_injective(sch, leaves(sch))), key=lambda info: info.elements)
    return info.elements, {wanted: _vector(info, wanted) for wanted in _WIDTHS}


class Elementwise(CudaSpace):
    """Functions without a reduction: maps, broadcasts, transposes, gathers, concatenations, splits."""

    name = "cuda.elementwise"
    by_size = False

    def recognises(self, func: tirx.PrimFunc) -> bool:
        info = analyse(func)
        return info.plain and uniform(info.blocks) and all(b.kind == "injective" and b.extents for b in info.blocks)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        threads = tuple(t for t in (64, 128, 256, 512, 1024) if t <= limits(target).threads_per_block)
        return (Knob("threads", threads), Knob("vector", _WIDTHS))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        gpu = limits(target)
        points = max(prod(int(s) for s in p.ty.shape) for p in func.params)
        # with fewer, some multiprocessors would have none, while single elements keep as many bytes under way
        wide = points >= 4 * _LEAST_THREADS * gpu.multiprocessors
        vectors: tuple[int, ...] = (4, 2, 1) if wide else (1, 2, 4)
        # of small tensors, eight at once would leave too few threads; of float32 too they take two accesses
        whole = [p.ty for p in func.params if prod(int(s) for s in p.ty.shape) == points]
        if points >= 8 * _LEAST_THREADS * gpu.multiprocessors and all(_bits(buffer) == 16 for buffer in whole):
            vectors = (8, *vectors)
        filled = points >= 4 * 256 * gpu.multiprocessors or not wide
        for threads in (256, 128) if filled else (128, 256):
            for vector in vectors:
                yield {"threads": threads, "vector": vector}

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        gpu, traffic, (points, _) = limits(target), traffic_of(func), _largest(func)
        asked = self.footprint(func, target, decisions)
        vector = self._at_once(func, decisions)
        resident, blocks = resident or asked.resident, ceil_div(points, asked.threads * vector)
        running = min(blocks, gpu.multiprocessors * resident)
        return memory_time.seconds(
            gpu, blocks=blocks, resident=resident, under_way=running * asked.under_way / asked.resident,
            memory=traffic.moved)

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint:
        traffic, (points, _), vector = traffic_of(func), _largest(func), self._at_once(func, decisions)
        gpu = gpu_machine(target)
        threads = min(decisions["threads"], ceil_div(ceil_div(points, vector), gpu.warp) * gpu.warp)
        fetched = vector * max(1, traffic.read // points)
        return Footprint.of(gpu, threads, _OTHER_REGISTERS + ceil_div(fetched, 4), 0, 1, threads * fetched,
                            tensor_cores=False)

    def _at_once(self, func: tirx.PrimFunc, decisions: Decisions) -> int:
        _, widths = _largest(func)
        return widths[decisions["vector"]]

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        threads, wanted = pick("threads"), pick("vector")
        warp = limits(target).warp
        for leaf in inline_injective(sch, leaves(sch)):
            vector = _vector(leaf.info, wanted)
            fitting = ceil_div(ceil_div(leaf.info.elements, vector), warp) * warp
            _, thread = bind_flat(sch, sch.get_loops(leaf.rv), min(threads, fitting), vector)
            if vector == 8:
                _fetch(sch, leaf, thread)
