"""Elementwise functions and data movement: everything folded into one store a result, a thread for a few of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.ir import Call

from schedules.analysis import BlockInfo, analyse, op_name, uses, walk, widest_run
from schedules.cuda.common import CudaSpace, bind_flat, ceil_div, inline_injective, leaves, limits, uniform
from schedules.space import Decisions, Knob, Pick

__all__ = ["Elementwise"]

_VECTOR_TYPES = frozenset({"float32", "int32", "float16", "bfloat16"})
#: threads that a multiprocessor has at least where each takes several results at once
_LEAST_THREADS = 128


def _vector(info: BlockInfo, wanted: int) -> int:
    """How many neighbouring results one access may take: types of which TVM writes such vectors, and rows that it
    divides."""
    regions = (*info.block.reads, *info.block.writes)
    if any(str(region.source.dtype) not in _VECTOR_TYPES for region in regions):
        return 1
    return next(v for v in (wanted, wanted // 2, 1) if v and info.extents[-1] % v == 0 and _agree(info, v))


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


class Elementwise(CudaSpace):
    """Functions without a reduction: maps, broadcasts, transposes, gathers, concatenations, splits."""

    name = "cuda.elementwise"

    def recognises(self, func: tirx.PrimFunc) -> bool:
        info = analyse(func)
        return info.plain and uniform(info.blocks) and all(b.kind == "injective" and b.extents for b in info.blocks)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        threads = tuple(t for t in (64, 128, 256, 512, 1024) if t <= limits(target).threads_per_block)
        return (Knob("threads", threads), Knob("vector", (1, 2, 4)))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        gpu = limits(target)
        points = max(prod(int(s) for s in p.ty.shape) for p in func.params)
        # with fewer, some multiprocessors would have none, while single elements keep as many bytes under way
        wide = points >= 4 * _LEAST_THREADS * gpu.multiprocessors
        vectors = (4, 2, 1) if wide else (1, 2, 4)
        filled = points >= 4 * 256 * gpu.multiprocessors or not wide
        for threads in (256, 128) if filled else (128, 256):
            for vector in vectors:
                yield {"threads": threads, "vector": vector}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        threads, wanted = pick("threads"), pick("vector")
        warp = limits(target).warp
        for leaf in inline_injective(sch, leaves(sch)):
            vector = _vector(leaf.info, wanted)
            fitting = ceil_div(ceil_div(leaf.info.elements, vector), warp) * warp
            bind_flat(sch, sch.get_loops(leaf.rv), min(threads, fitting), vector)
