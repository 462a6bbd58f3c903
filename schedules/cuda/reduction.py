"""Sums, maxima and the like: rows that are reduced and used again, and plain reductions with an epilogue.

``Rows``   softmax, layer normalisation: one block of threads for each row, the row's statistics in shared memory. A
           thread has the same elements in every stage, 16 bytes side by side where they are aligned, so that CUDA's
           compiler fetches each once and keeps it in registers (seen in the machine code; not where a bound cuts rows).
``Reduce`` pooling, means, matrix times vector, depthwise convolution: some threads side by side in the results,
           some sharing one result (Harris, "Optimizing Parallel Reduction in CUDA", 2007). Where results lie side by
           side in what is read, :mod:`schedules.cuda.columns` is asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir import Call

from schedules.analysis import BlockInfo, loads, op_name, remembered, uses, walk, widest_run
from schedules.cuda.common import (
    CudaSpace,
    Leaf,
    bind_flat,
    ceil_div,
    inline_injective,
    leaves,
    limits,
    loop_kinds,
    require,
    require_joined,
    scratch,
    uniform,
)
from schedules.cuda.memory_time import traffic_of
from schedules.cuda.reduction_time import ReduceKernel, RowKernel
from schedules.cuda.row_results import of_own_row, results_in, row_parts, with_row_results
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["Reduce", "Rows", "follows", "own_order"]

#: elements that a thread may have side by side, and the bytes of the widest access
_VECTORS, _PIECE = (1, 2, 4, 8), 16
#: threads of a row, beside multiples of a warp that divide it; elements of a row that a thread's registers hold
_THREADS, _HELD = (32, 64, 128, 256, 512, 1024), 48


def _positions(indices: Sequence[Any], leaf: Leaf) -> frozenset[int]:
    """Which iterators of a leaf occur in ``indices``."""
    return frozenset().union(*(uses(index, leaf.info.variables) for index in indices))


def own_order(info: BlockInfo) -> bool:
    """Whether a reduction is indexed by its data-parallel iterators, in order (so TVM can move it freely)."""
    stores: list[Any] = []
    walk(info.block.body, (tirx.BufferStore, stores.append))
    for store in stores:
        free = [i for i in store.indices if not isinstance(i, tirx.IntImm)]
        spatial = [info.variables[i] for i in info.spatial]
        own = [v for v in spatial if any(v.same_as(i) for i in free)]
        if len(own) != len(free) or not all(v.same_as(i) for v, i in zip(own, free, strict=True)):
            return False
    return bool(stores)


@dataclass(frozen=True)
class _RowShape:
    rows: int
    columns: int
    row_loops: tuple[int, ...]  # positions among the last leaf's iterators
    vector: int  # elements that every access along a row may take at once
    stages: int  # reductions


@remembered
def _row_shape(func: tirx.PrimFunc) -> _RowShape | None:
    sch = scratch(func)
    found = leaves(sch)
    if not uniform(leaf.info for leaf in found):
        return None
    parts = row_parts(inline_injective(sch, found))
    if parts is None:
        return None
    stages, each, last = parts
    if not all(s.info.kind == "reduction" and s.intermediate and own_order(s.info) for s in stages):
        return None
    results = results_in(last, stages)
    if not results or not all(isinstance(i, (tirx.Var, tirx.IntImm)) for load in results for i in load.indices):
        return None
    rows = frozenset().union(*(_positions(load.indices, last) for load in results))
    count = prod(last.info.extents[i] for i in rows)
    columns = last.info.elements // max(1, count)
    # each stage must describe the same rows, or one block would compute another's statistics again
    if columns == 1 or any(stage.info.outputs != count for stage in stages):
        return None
    if not all(of_own_row(leaf, stages, count) for leaf in each):
        return None
    return _RowShape(count, columns, tuple(sorted(rows)), min(_along_rows(leaf) for leaf in (*stages, last)),
                     len(stages))


def _along_rows(leaf: Leaf) -> int:
    """How many neighbours along its last iterator a leaf may access at once, in all that moves with it."""
    info, last = leaf.info, len(leaf.info.variables) - 1
    stores: list[Any] = []
    walk(info.block.body, (tirx.BufferStore, stores.append))
    accesses = [*loads(info.block.body), *(tirx.BufferLoad(store.buffer, store.indices) for store in stores)]
    moving = [load for load in accesses if uses(load, [info.variables[last]])]
    narrowest = min((_bits(load.source) for load in moving), default=32)
    widths = [v for v in _VECTORS[::-1] if 1 < v <= _PIECE * 8 // narrowest]
    return min((widest_run(load, info.variables, info.extents, last, widths) for load in moving), default=1)


def _bits(buffer: tirx.Buffer) -> int:
    return int(tvm.runtime.DataType(str(buffer.dtype)).bits)


class Rows(CudaSpace):
    """Reductions over rows whose results every element of the row uses again, in one kernel."""

    name = "cuda.rows"

    def recognises(self, func: tirx.PrimFunc) -> bool:
        return _row_shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _row_shape(func)
        assert shape is not None, "knobs are asked only of a space that matches"
        gpu = limits(target)
        whole = {t for t in range(gpu.warp, gpu.threads_per_block + 1, gpu.warp)
                 if shape.columns % (t * shape.vector) == 0}
        threads = sorted(whole.union(t for t in _THREADS if t <= gpu.threads_per_block))
        return (Knob("threads", tuple(threads)), Knob("vector", _VECTORS), Knob("unroll", (0, 16, 64)))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _row_shape(func)
        assert shape is not None, "seeds are asked only of a space that matches"
        (threads, _, _) = self.knobs(func, target)
        # four elements a thread, or one access, keep loads in flight; a warp alone needs no barrier
        wanted = max(32, ceil_div(shape.columns, max(4, shape.vector)))

        def preference(count: int) -> tuple[bool, int, bool, int]:
            """Whole rows first, which no bound cuts and registers hold; then as many threads as long rows take."""
            cut = shape.columns % (count * shape.vector) != 0 or shape.columns > count * _HELD
            missing = _THREADS[-1] - count if count * 4 < wanted else 0
            return cut, missing, count not in _THREADS, abs(count - wanted) + (count < wanted) * count

        for count in sorted(threads.values, key=preference):
            # what registers hold is fetched once only where the loop over it is unrolled in every stage
            held = ceil_div(shape.columns, count * shape.vector) * shape.vector
            most = 64 if held <= _HELD and (shape.vector == _VECTORS[-1] or held > 16) else 16
            yield {"threads": count, "vector": shape.vector, "unroll": most}

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        shape, gpu = _row_shape(func), limits(target)
        if shape is None:
            return None
        require(shape.vector % decisions["vector"] == 0, "so many neighbours of a row can't be accessed at once")
        return _row_kernel(shape, decisions).seconds(gpu, traffic_of(func), resident)

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint | None:
        shape = _row_shape(func)
        return None if shape is None else _row_kernel(shape, decisions).footprint(gpu_machine(target), traffic_of(func))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        shape = _row_shape(sch.mod["main"])
        if shape is None:
            raise InvalidDecision("the function must reduce rows and use the results in one elementwise stage")
        threads, vector, unroll = pick("threads"), pick("vector"), pick("unroll")
        require(shape.vector % vector == 0, f"{shape.vector} neighbours of a row may be accessed at once, got {vector}")
        parts = row_parts(inline_injective(sch, leaves(sch)))
        assert parts is not None, "what has a shape has parts"
        stages, each, last = parts
        loops = sch.get_loops(last.rv)
        rows = [loops[i] for i in shape.row_loops] or [sch.add_unit_loop(loops[0])]
        columns = [loop for i, loop in enumerate(loops) if i not in shape.row_loops]
        sch.reorder(*rows, *columns)
        row, column = sch.fuse(*rows), sch.fuse(*columns)
        row = with_row_results(sch, row, each, shape.rows, threads)
        sch.bind(row, "blockIdx.x")
        if vector > 1:
            sch.vectorize(_spread(sch, column, threads, unroll, vector))
        else:
            _spread(sch, column, threads, unroll)
        if vector == _VECTORS[-1]:
            _fetch_halves(sch, last)
        for stage in reversed(stages):
            sch.compute_at(stage.rv, row, preserve_unit_loops=True)
            for i in range(len(stage.info.writes)):
                sch.set_scope(stage.rv, i, "shared")
            reducing = sch.get_loops(stage.rv)[1:]
            if vector > 1:
                _fetch_vectors(sch, stage, _spread(sch, sch.fuse(*reducing), threads, unroll, vector))
            else:
                _spread(sch, sch.fuse(*reducing), threads, unroll)
        require_joined(sch)


def _row_kernel(shape: _RowShape, decisions: Decisions) -> RowKernel:
    held = _HELD if shape.columns % (decisions["threads"] * decisions["vector"]) == 0 else 0
    return RowKernel(shape.rows, shape.columns, shape.stages, held, **decisions)


def _spread(sch: s_tir.Schedule, loop: Any, threads: int, unroll: int, vector: int = 1) -> Any:
    """Deal a loop out to the threads of a block, neighbours to neighbours; the loop over a thread's, or the threads'
    where each has single ones."""
    outer, inner, *lanes = sch.split(loop, [None, threads, *([vector] if vector > 1 else [])])
    sch.bind(inner, "threadIdx.x")
    if unroll:
        sch.annotate(outer, "pragma_auto_unroll_max_step", unroll)
        sch.annotate(outer, "pragma_unroll_explicit", 0)
    return lanes[0] if lanes else inner


def _fetch_halves(sch: s_tir.Schedule, last: Leaf) -> None:
    """Bring what has 16 bits and moves along the row to registers at once, before eight results are computed in halves
    (:mod:`schedules.cuda.halves`)."""
    *_, thread, _ = sch.get_loops(last.rv)
    block = sch.get(last.rv)
    along = [block.iter_vars[-1].var]
    for i, read in enumerate(block.reads):
        if _bits(read.source) == 16 and any(uses(dim.min, along) for dim in read.region):
            _to_registers(sch, last, i, thread)


def _fetch_vectors(sch: s_tir.Schedule, stage: Leaf, lanes: Any) -> None:
    """Bring what moves along the row to registers as vectors, before the elements are reduced one by one."""
    *_, thread, _ = sch.get_loops(stage.rv)
    block = sch.get(stage.rv)
    along = [block.iter_vars[-1].var]
    moving = [i for i, read in enumerate(block.reads) if any(uses(dim.min, along) for dim in read.region)]
    for i in moving:
        _to_registers(sch, stage, i, thread)
    sch.unroll(lanes)


def _to_registers(sch: s_tir.Schedule, stage: Leaf, read: int, thread: Any) -> None:
    """Fetch what a thread has of a tensor as vectors of 16 bytes at most."""
    most = _PIECE * 8 // _bits(sch.get(stage.rv).reads[read].source)
    fetched = sch.cache_read(stage.rv, read, "local", consumer_blocks=[stage.rv])
    sch.compute_at(fetched, thread, preserve_unit_loops=True)
    *_, last = sch.get_loops(fetched)
    if int(sch.get(last).extent) > most:
        more, last = sch.split(last, [None, most])
        sch.unroll(more)
    sch.vectorize(last)


@dataclass(frozen=True)
class _ReduceShape:
    results: int
    terms: int
    terms_run: bool  # neighbouring terms of one result are neighbours in memory
    fused: bool  # an elementwise stage follows
    vector: int  # neighbouring terms that a thread may fetch at once

    def at_once(self, together: int) -> int:
        """Of so many threads for a result, whole vectors each."""
        return next(v for v in _VECTORS[::-1] if v == 1 or (v <= self.vector and self.terms % (together * v) == 0))


@remembered
def _reduce_shape(func: tirx.PrimFunc) -> _ReduceShape | None:
    sch = scratch(func)
    found = leaves(sch)
    if not uniform(leaf.info for leaf in found):
        return None
    found = inline_injective(sch, found)
    if not found or found[0].info.kind != "reduction" or len(found) > 2 or not own_order(found[0].info):
        return None
    main = found[0]
    if len(main.info.writes) != 1 or loop_kinds(sch, main) is None:
        return None
    if len(found) == 2 and not follows(main, found[1]):
        return None
    if len(found) == 1 and main.intermediate:
        return None
    results = main.info.outputs
    run = _terms_run(main)
    vector = _along_rows(main) if run and main.info.reduces[-1] and not _guards(main) else 1
    return _ReduceShape(results, main.info.elements // max(1, results), run, len(found) == 2, vector)


def follows(main: Leaf, last: Leaf) -> bool:
    """Whether ``last`` has one point for each result of ``main``, so that both run in the same thread."""
    if last.info.kind != "injective" or last.intermediate or last.info.elements != main.info.outputs:
        return False
    results = results_in(last, [main])
    plain = all(isinstance(i, (tirx.Var, tirx.IntImm)) for load in results for i in load.indices)
    needed = {i for i, e in enumerate(last.info.extents) if e > 1}
    return bool(results) and plain and all(needed <= _positions(load.indices, last) for load in results)


def _guards(leaf: Leaf) -> bool:
    """Whether a leaf reads what may not be there."""
    found: list[Any] = []
    walk(leaf.info.block.body, (Call, lambda call: found.append(call) if op_name(call) == "if_then_else" else None))
    return bool(found)


def _terms_run(main: Leaf) -> bool:
    """Whether the last dimension of the largest input moves with the reduction and with nothing else."""
    inputs = [load for load in loads(main.info.block.body) if not main.writes_to(load.source)]
    if not inputs:
        return False
    largest = max(inputs, key=lambda load: prod(int(s) for s in load.source.shape))
    for index in reversed(list(largest.indices)):
        used = {i for i in _positions([index], main) if main.info.extents[i] > 1}
        if used:
            return all(main.info.reduces[i] for i in used)
    return False


class Reduce(CudaSpace):
    """One reduction of any kind, with whatever is elementwise before and after it."""

    name = "cuda.reduce"

    def recognises(self, func: tirx.PrimFunc) -> bool:
        return _reduce_shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _reduce_shape(func)
        assert shape is not None, "knobs are asked only of a space that matches"
        together = tuple(t for t in (1, 4, 8, 16, 32, 64, 128, 256, 512) if t == 1 or t <= shape.terms)
        apart = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        return (Knob("threads_together", together), Knob("threads_apart", apart), Knob("unroll", (0, 16, 64)))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _reduce_shape(func)
        assert shape is not None, "seeds are asked only of a space that matches"
        together, apart, _ = self.knobs(func, target)
        gpu = limits(target)
        pairs = [
            (t, a) for t in together.values for a in apart.values if _pair_fits(t, a, gpu) and (t == 1 or t * a <= 512)
        ]
        for t, a in sorted(pairs, key=lambda pair: _estimate(pair[0], pair[1], shape, gpu))[:6]:
            yield {"threads_together": t, "threads_apart": a, "unroll": 16}

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        shape, gpu = _reduce_shape(func), limits(target)
        if shape is None:
            return None
        require(_pair_fits(decisions["threads_together"], decisions["threads_apart"], gpu), "too many threads, or few")
        return _reduce_kernel(shape, decisions).seconds(gpu, traffic_of(func), resident)

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint | None:
        shape = _reduce_shape(func)
        return None if shape is None else _reduce_kernel(shape, decisions).footprint(
            gpu_machine(target), traffic_of(func))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        shape = _reduce_shape(sch.mod["main"])
        if shape is None:
            raise InvalidDecision("the function must hold one reduction")
        together, apart, unroll = pick("threads_together"), pick("threads_apart"), pick("unroll")
        require(_pair_fits(together, apart, limits(target)), f"a block can't have {together} x {apart} threads")
        main, *rest = inline_injective(sch, leaves(sch))
        last = rest[0].rv if rest else sch.cache_write(main.rv, 0, "local")
        if rest:
            sch.set_scope(main.rv, 0, "local")
        if not sch.get_loops(last):
            sch.add_unit_loop(last)
        if together == 1:
            _, at = bind_flat(sch, sch.get_loops(last), apart)
        else:
            at = _bind_together(sch, last, together, apart, shape.terms_run)
        sch.compute_at(main.rv, at, preserve_unit_loops=True)
        inner = sch.get_loops(main.rv)[len(sch.get_loops(main.rv)) - len(sch.get(main.rv).iter_vars) :]
        if together > 1:
            # neighbours first: of several axes as one, an index could not be seen to name one of a thread's
            *others, last_axis = inner
            vector = shape.at_once(together)
            wide, lanes = sch.split(last_axis, [None, vector])
            outer, inner_thread = sch.split(sch.fuse(*others, wide), [None, together])
            sch.bind(inner_thread, _axis(shape.terms_run))
            if vector > 1:
                _fetch_vectors(sch, main, lanes)
        else:
            kinds = [iv.iter_type for iv in sch.get(main.rv).iter_vars]
            outer = next(loop for loop, kind in zip(inner, kinds, strict=True) if kind == tirx.IterVar.CommReduce)
            sch.decompose_reduction(main.rv, outer)
        if unroll:
            sch.annotate(outer, "pragma_auto_unroll_max_step", unroll)
            sch.annotate(outer, "pragma_unroll_explicit", 0)
        require_joined(sch)


def _reduce_kernel(shape: _ReduceShape, decisions: Decisions) -> ReduceKernel:
    together = decisions["threads_together"]
    vector = shape.at_once(together) if together > 1 else 1
    return ReduceKernel(shape.results, shape.terms, shape.terms_run, vector, together, decisions["threads_apart"],
                        decisions["unroll"])


def _axis(first: bool) -> str:
    """The thread axis that runs through a warp if ``first``, else the one across warps."""
    return "threadIdx.x" if first else "threadIdx.y"


def _bind_together(sch: s_tir.Schedule, last: Any, together: int, apart: int, terms_run: bool) -> Any:
    """Spread ``last`` over blocks and threads such that one thread of each group of ``together`` stores a result.

    Before: ``for i: store``. After: ``for blockIdx.x, threadIdx.y as i: for threadIdx.x where threadIdx.x < 1: store``.
    """
    flat = sch.fuse(*sch.get_loops(last))
    block, thread = sch.split(flat, [None, apart])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, _axis(not terms_run))
    _, writer = sch.split(sch.add_unit_loop(last), [None, together])
    sch.bind(writer, _axis(terms_run))
    return thread


def _pair_fits(together: int, apart: int, gpu: GpuMachine) -> bool:
    return gpu.warp <= together * apart <= gpu.threads_per_block


def _estimate(together: int, apart: int, shape: _ReduceShape, gpu: GpuMachine) -> float:
    """Relative time: steps in order, waves of blocks, uncoalesced reads, and the tree that joins threads."""
    steps = ceil_div(shape.terms, together * min(4, shape.at_once(together)))
    blocks = ceil_div(shape.results, apart)
    busy = gpu.multiprocessors * max(1, gpu.threads_per_multiprocessor // 2 // (together * apart))
    waves = ceil_div(blocks, busy)
    along = together if shape.terms_run else apart
    scatter = max(1.0, 8.0 / along)
    tree = 0.0 if together == 1 else 8.0 + 2.0 * together.bit_length() + (20.0 if together > gpu.warp else 0.0)
    return waves * (steps * scatter + tree) * max(1.0, together * apart / 256) ** 0.2
