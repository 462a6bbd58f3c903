"""Attention of a few queries over many keys: the decoding step of a language model.

The function is that of :mod:`schedules.cpu.attention` with one block of as many queries as there are, too few for
vectors. Every key and value is read once and hardly used, so that reading sets the pace: a task has some heads, whose
keys lie side by side, and steps through memory twice, for the scores and for the weighted values. Vectors lie along
the features. A score is the sum of a vector's lanes: those of as many keys as a vector has lanes are transposed in
registers and added up as whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import remembered, uses
from schedules.cpu.attention import FEW, Blocks, in_vectors, read_attention
from schedules.cpu.common import parallel_work
from schedules.cpu.tiling import check_tile, divisors, tile_fits, vectors_in
from schedules.intrin import use
from schedules.intrin.transpose import transpose
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["ATTENTION_FEW", "WHOLE_KEYS"]

#: keys come in multiples of this: one AVX-512 or two AVX2 vectors of scores
WHOLE_KEYS = 16

#: vectors of which the transposition is known
_TURNED = (4, 8, 16)


@dataclass(frozen=True)
class _Shape:
    """``heads`` of ``batch`` sequences, with ``queries`` of ``depth`` features over ``keys`` keys, whose values have
    ``features`` features."""

    batch: int
    heads: int
    queries: int
    keys: int
    depth: int
    features: int

    @property
    def reads(self) -> int:
        """Elements of keys and values, counted for each head."""
        return self.batch * self.heads * self.keys * (self.depth + self.features)


def _read(sch: s_tir.Schedule) -> tuple[Blocks, _Shape] | None:
    found = read_attention(sch)
    if found is None or found[1].blocks != 1 or found[1].width >= FEW or found[1].keys % WHOLE_KEYS:
        return None
    blocks, sizes = found
    *_, heads = [1, *(int(v.dom.extent) for v in sch.get(blocks.scores).iter_vars)][:-4]
    return blocks, _Shape(sizes.batch // heads, heads, sizes.width, sizes.keys, sizes.depth, sizes.features)


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    found = _read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


class AttentionFew(Space):
    """Knobs: ``heads`` of one parallel task, ``m`` keys of a register tile of scores, ``kd`` unrolling of its sum,
    ``f`` vectors of features of a register tile of the result, ``kj`` keys that are unrolled in it."""

    name = "cpu.attention_few"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        lanes = cpu_machine(target).lanes()
        sums, width = vectors_in(shape.depth, lanes)
        return (
            Knob("heads", tuple(divisors(shape.heads, 64))),
            Knob("m", tuple(divisors(width, 16))),
            Knob("kd", tuple(divisors(sums, 8))),
            Knob("f", tuple(divisors(vectors_in(shape.features, lanes)[0], 8))),
            Knob("kj", tuple(divisors(WHOLE_KEYS, WHOLE_KEYS))),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _shape(func)
        assert shape is not None
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        found = _read(sch)
        assert found is not None
        blocks, shape = found
        machine = cpu_machine(target)
        lanes = machine.lanes()
        heads, m, kd, f_tile, kj = (pick(name) for name in ("heads", "m", "kd", "f", "kj"))
        check_tile(machine, m * shape.queries, kd)
        check_tile(machine, f_tile * shape.queries, kj)
        sch.compute_inline(blocks.queries)
        width = vectors_in(shape.depth, lanes)[1]
        sums = _split_sum(sch, blocks.scores, width)
        peaks, totals = (_split_sum(sch, each, WHOLE_KEYS) for each in (blocks.peak, blocks.total))
        for each in (blocks.scores, blocks.logits, blocks.powers):  # keys innermost
            sch.transform_layout(each, ("write", 0), lambda *i: (*i[:-2], i[-1], i[-2]))
        sch.transform_layout(sums, ("write", 0), lambda *i: (*i[:-3], i[-2], i[-3], i[-1]))
        turned = sch.cache_read(blocks.scores, 0, "global")
        _turn(sch, turned)

        outer, tasks = _result(sch, blocks.out, heads, lanes)
        for each in (blocks.inverse, blocks.values, blocks.total, totals, blocks.powers, blocks.peak, peaks,
                     blocks.logits):
            sch.compute_at(each, tasks, preserve_unit_loops=True)
        start, at_head = _values(sch, blocks.values, (f_tile, kj), lanes)
        starts = [(blocks.values, start)]
        if blocks.values_of is not None:
            _stage(sch, blocks.values_of[1], at_head, lanes)
        starts += [(each, _over_keys(sch, each, lanes)) for each in (peaks, totals)]
        *_, keys, query = sch.get_loops(blocks.powers)
        sch.reorder(query, keys)
        in_vectors(sch, sch.split(keys, [None, WHOLE_KEYS])[1], lanes)
        at_tile = _logits(sch, blocks.logits, width)
        for each in (blocks.scores, turned, sums):
            sch.compute_at(each, at_tile, preserve_unit_loops=True)
        if blocks.keys is not None:
            _stage(sch, blocks.keys[1], at_tile, lanes)
        starts += [(sums, _sums(sch, sums, m, kd)), (blocks.scores, _scores(sch, blocks.scores, turned, width))]
        sch.set_scope(blocks.scores, 0, "local")
        sch.compute_at(blocks.rows, tasks, preserve_unit_loops=True)
        in_vectors(sch, sch.get_loops(blocks.rows)[-1], lanes)
        tasks = sch.fuse(*outer, tasks)
        if shape.reads >= parallel_work(machine):
            sch.parallel(tasks)
        for block, start in starts:
            sch.decompose_reduction(block, start)


def _split_sum(sch: s_tir.Schedule, block: SBlockRV, width: int) -> SBlockRV:
    """Reduce over the last axis in ``width`` lanes first, which become the last axis of a result of their own."""
    _, lane = sch.split(sch.get_loops(block)[-1], [None, width])
    return sch.rfactor(lane, len(sch.get(block).iter_vars) - 1)


def _turn(sch: s_tir.Schedule, copy: SBlockRV) -> None:
    """Make the copy ``[.., key, lane]`` one of ``[.., lane, key]``."""
    sch.transform_layout(copy, ("write", 0), lambda *i: (*i[:-2], i[-1], i[-2]))
    sch.transform_block_layout(copy, tirx.IndexMap.from_func(
        lambda *i: [*i[:-2], i[-1], i[-2]], ndim=len(sch.get(copy).iter_vars)))


def _result(sch: s_tir.Schedule, out: SBlockRV, heads: int, lanes: int) -> tuple[list[LoopRV], LoopRV]:
    """Cut the result into tasks; returns the loops over batches and over the tasks of one."""
    *loops, feature = sch.get_loops(out)
    block = sch.get(out)
    variables = [v.var for v in block.iter_vars]
    (inverse,) = [region for region in block.reads if len(region.region) == len(variables)]
    *batch, whole, lane = (uses(each.min, variables[:-1]) for each in inverse.region)
    queries = whole | lane
    fixed = [i for i in range(len(loops)) if i not in queries]
    at = next(iter(batch[-1]), fixed[-1])  # the axis of a single head may be any
    outer = [loops[i] for i in fixed if i != at]
    tasks, each = sch.split(loops[at], [None, heads])
    sch.reorder(*outer, tasks, each, *(loops[i] for i in sorted(queries)), feature)
    in_vectors(sch, feature, lanes)
    return outer, tasks


def _own_loops(sch: s_tir.Schedule, block: SBlockRV) -> list[LoopRV]:
    """The loops of the block's own axes, in their order."""
    return list(sch.get_loops(block))[-len(sch.get(block).iter_vars) :]


def _stage(sch: s_tir.Schedule, stage: SBlockRV, loop: LoopRV, lanes: int) -> None:
    """Read a few rows on the way, in the first-level cache."""
    sch.compute_at(stage, loop, preserve_unit_loops=True)
    in_vectors(sch, sch.get_loops(stage)[-1], lanes)
    sch.set_scope(stage, 0, "local")


def _values(
    sch: s_tir.Schedule, values: SBlockRV, tile: tuple[int, int], lanes: int
) -> tuple[LoopRV, LoopRV]:
    """Step over some keys at a time, and for each over the heads, whose values lie side by side; returns the loops of
    steps and of heads."""
    f_tile, kj = tile
    *batch, query, feature, key = _own_loops(sch, values)
    steps, chunks, key = sch.split(key, [None, WHOLE_KEYS // kj, kj])
    tiles, vectors, vector = sch.split(feature, [None, f_tile, vectors_in(int(sch.get(feature).extent), lanes)[1]])
    sch.reorder(steps, *batch, tiles, chunks, key, query, vectors, vector)
    for loop in (key, query, vectors):
        sch.unroll(loop)
    sch.vectorize(vector)
    return steps, batch[-1]


def _over_keys(sch: s_tir.Schedule, lanes_of: SBlockRV, lanes: int) -> LoopRV:
    """A maximum or sum in each lane; returns the loop over the vectors."""
    lane, *batch, steps = _own_loops(sch, lanes_of)
    sch.reorder(*batch, steps, lane)
    in_vectors(sch, lane, lanes)
    return steps


def _logits(sch: s_tir.Schedule, logits: SBlockRV, width: int) -> LoopRV:
    """Step over ``width`` keys of all heads; returns the loop of what one head has of them."""
    *batch, keys, query = _own_loops(sch, logits)
    steps, key = sch.split(keys, [None, width])
    sch.reorder(steps, *batch, query, key)
    sch.vectorize(key)
    return batch[-1]


def _sums(sch: s_tir.Schedule, sums: SBlockRV, m: int, kd: int) -> LoopRV:
    """A register tile of lanes of scores; returns the loop over what is added up."""
    lane, *batch, keys, query, depth = _own_loops(sch, sums)
    keys, key = sch.split(keys, [None, m])
    depth, step = sch.split(depth, [None, kd])
    sch.reorder(*batch, keys, depth, step, key, query, lane)
    for loop in (step, key, query):
        sch.unroll(loop)
    sch.vectorize(lane)
    return depth


def _scores(sch: s_tir.Schedule, scores: SBlockRV, turned: SBlockRV, width: int) -> LoopRV:
    """Add up the lanes of ``width`` keys at a time; returns the loop over the lanes."""
    *_, lane, key = _own_loops(sch, turned)
    if width in _TURNED:
        sch.tensorize(lane, use(transpose(width)))
    else:
        sch.vectorize(key)
    lane, *batch, key, query = _own_loops(sch, scores)
    sch.reorder(*batch, query, lane, key)
    sch.unroll(lane)
    sch.vectorize(key)
    return lane


def _seeds(shape: _Shape, machine: CpuMachine) -> Iterator[Decisions]:
    """Register tiles with sums enough to hide the latency of an addition, and as many heads a task as share the work
    evenly among the cores."""
    sums, width = vectors_in(shape.depth, machine.lanes())
    vectors = vectors_in(shape.features, machine.lanes())[0]
    m = _largest(machine, divisors(width, 8), shape.queries)
    f = _largest(machine, divisors(vectors, 8), shape.queries)
    kd, kj = max(divisors(sums, 4)), 4
    for heads in sorted(divisors(shape.heads, 64), key=lambda n: (_idle(shape, machine, n), -n))[:3]:
        yield {"heads": heads, "m": m, "kd": kd, "f": f, "kj": kj}


def _largest(machine: CpuMachine, counts: list[int], queries: int) -> int:
    """Rows of a register tile of which each has a vector for every query."""
    return max((n for n in counts if tile_fits(machine, n, queries)), default=1)


def _idle(shape: _Shape, machine: CpuMachine, heads: int) -> float:
    """The time that tasks of so many heads take, as a multiple of what cores that are never idle take."""
    tasks = shape.batch * shape.heads // heads
    return -(-tasks // machine.cores) * machine.cores / tasks


ATTENTION_FEW = AttentionFew()
