"""Attention as one kernel: scores, softmax and weighted values of one block of queries at a time, within the cache.

The function holds the chain ``rows -> queries -> scores -> logits -> peak, powers -> total -> inverse`` and
``powers -> values -> result`` of :func:`mlc.graph.kernels.query_blocks.attention`, whose scores are annotated
``mlc.op = "attention"``. Queries lie along the vectors: scores are computed transposed, ``[keys, 16 queries]``, so
that keys and values are read as they are, maxima and sums run over whole vectors, and the weights of one key are
scalars that multiply a row of values. The full matrix of scores is never written: a block of queries meets all keys
while its scores stay in the cache, so one pass of softmax suffices up to tens of thousands of keys. After Dao et al.,
"FlashAttention" (2022), and Goto and van de Geijn (2008) for the two products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import remembered, uses
from schedules.cpu.common import parallel_work
from schedules.cpu.tiling import accumulate, accumulator_budget, check_tile, divisors, find_annotated, vectors_in
from schedules.intrin import use
from schedules.intrin.transpose import transpose
from schedules.machine import CpuMachine, cpu_machine
from schedules.present import STAGE
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["ATTENTION", "FEW", "KEYS", "TOGETHER", "Blocks", "Sizes", "in_vectors", "read_attention"]

_OPS = ("attention",)

#: annotations of the scores where sizes are free: of how many blocks of queries, and of how many keys, there are
#: multiples for every size
TOGETHER, KEYS = "mlc.together", "mlc.keys"

#: fewer queries than these fill no vector and are :mod:`schedules.cpu.attention_few`'s
FEW = 8

#: key rows of one register tile of scores at most
_MAX_KEYS = 24

#: multiply-adds in the time of an element step of a pass over memory
_PRODUCTS_PER_STEP = 8


@dataclass(frozen=True)
class Sizes:
    """``batch`` heads of ``blocks`` times ``width`` queries, of ``depth`` features, over ``keys`` keys whose values
    have ``features`` features. ``together`` and ``multiple`` are what :data:`TOGETHER` and :data:`KEYS` say."""

    batch: int
    blocks: int
    width: int
    keys: int
    depth: int
    features: int
    together: int = 0
    multiple: int = 0

    @property
    def products(self) -> int:
        """Multiply-adds."""
        return self.batch * self.blocks * self.width * self.keys * (self.depth + self.features)


@dataclass(frozen=True)
class Blocks:
    """The function's blocks, in the order in which they are computed. ``keys`` and ``values_of`` are those that make
    keys and values which are results, too, and the stages through which these are read (:mod:`schedules.present`)."""

    rows: SBlockRV
    queries: SBlockRV
    scores: SBlockRV
    logits: SBlockRV
    peak: SBlockRV
    powers: SBlockRV
    total: SBlockRV
    inverse: SBlockRV
    values: SBlockRV
    out: SBlockRV
    keys: tuple[SBlockRV, SBlockRV] | None = None
    values_of: tuple[SBlockRV, SBlockRV] | None = None


def read_attention(sch: s_tir.Schedule) -> tuple[Blocks, Sizes] | None:
    """The blocks of an attention and its sizes; None for any other function."""
    scores = find_annotated(sch, _OPS)
    if scores is None:
        return None
    keys, (queries,) = _staged(sch, scores)
    (rows,) = sch.get_producers(queries)
    (logits,) = sch.get_consumers(scores)
    peak, powers = sorted(sch.get_consumers(logits), key=lambda b: len(sch.get(b).reads))  # in no fixed order
    total, values = sorted(sch.get_consumers(powers), key=lambda b: len(sch.get(b).reads))
    (inverse,) = sch.get_consumers(total)
    (out,) = sch.get_consumers(inverse)
    *batch, blocks, count, width, depth = (int(v.dom.extent) for v in sch.get(scores).iter_vars)
    features = int(sch.get(values).iter_vars[-2].dom.extent)
    own = _staged(sch, values)[0]
    found = Blocks(rows, queries, scores, logits, peak, powers, total, inverse, values, out, keys, own)
    said = sch.get(scores).annotations
    together, multiple = (int(said[key]) if key in said else 0 for key in (TOGETHER, KEYS))
    return found, Sizes(prod(batch), blocks, width, count, depth, features, together, multiple)


def _staged(
    sch: s_tir.Schedule, reader: SBlockRV
) -> tuple[tuple[SBlockRV, SBlockRV] | None, list[SBlockRV]]:
    """The producer of the result that a block reads through a staging block, and that block; and the other operands."""
    producers = list(sch.get_producers(reader))
    stage = next((each for each in producers if STAGE in sch.get(each).annotations), None)
    if stage is None:
        return None, producers
    (made,) = sch.get_producers(stage)
    return (made, stage), [each for each in producers if not sch.get(each).same_as(sch.get(stage))]


@remembered
def _shape(func: tirx.PrimFunc) -> Sizes | None:
    found = read_attention(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


class Attention(Space):
    """Knobs: ``chunk`` blocks of queries of one parallel task, ``block`` of them whose scores are kept together,
    ``m`` keys of a register tile of scores, ``l`` queries and ``f`` vectors of features of a register tile of the
    result, ``kd`` and ``kj`` unrolling of the sums over features and keys, ``keys`` and ``values`` whether a chunk
    copies them first (1), which pays where rows lie far apart in memory.
    """

    name = "cpu.attention"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        vectors, _ = vectors_in(shape.features, cpu_machine(target).lanes())
        return (
            Knob("chunk", tuple(divisors(shape.together or shape.blocks, 64))),
            Knob("block", tuple(divisors(shape.together or shape.blocks, 8))),
            Knob("m", tuple(_heights(shape))),
            Knob("l", tuple(divisors(shape.width, shape.width))),
            Knob("f", tuple(divisors(vectors, 8))),
            Knob("kd", tuple(divisors(shape.depth, 8))),
            Knob("kj", tuple(divisors(shape.multiple or shape.keys, 8))),
            Knob("keys", (0, 1)),
            Knob("values", (0, 1)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _shape(func)
        assert shape is not None
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        found = read_attention(sch)
        assert found is not None
        blocks, shape = found
        machine = cpu_machine(target)
        lanes = machine.lanes()
        chunk, block, m = pick("chunk"), pick("block"), pick("m")
        l_tile, f_tile, kd, kj = pick("l"), pick("f"), pick("kd"), pick("kj")
        copy_keys, copy_values = pick("keys"), pick("values")
        if chunk % block:
            raise InvalidDecision("a parallel chunk must hold whole blocks of queries")
        check_tile(machine, m * block * (shape.width // vectors_in(shape.width, lanes)[1]), kd)
        check_tile(machine, l_tile * f_tile, kj)
        present = [each for each in (blocks.keys, blocks.values_of) if each is not None]
        for _, stage in present:
            sch.compute_inline(stage)
        keys = sch.cache_read(blocks.scores, 0, "global", [blocks.scores]) if copy_keys else None
        values = sch.cache_read(blocks.values, 1, "global", [blocks.values]) if copy_values else None

        outer, tasks, at_block, at_tile = _result(sch, blocks.out, shape, (chunk, block, l_tile, f_tile), lanes)
        start_values = accumulate(sch, blocks.values, at_tile, len(sch.get(blocks.values).iter_vars) - 1, lanes, kj)
        sch.set_scope(blocks.values, 0, "local")
        for each in (blocks.inverse, blocks.total, blocks.powers, blocks.peak, blocks.logits):
            sch.compute_at(each, at_block, preserve_unit_loops=True)
        starts = [_over_keys(sch, each, lanes) for each in (blocks.peak, blocks.total)]
        _over_keys(sch, blocks.powers, lanes)
        in_vectors(sch, sch.get_loops(blocks.inverse)[-1], lanes)
        *_, q, j, lane = sch.get_loops(blocks.logits)
        tile, j = sch.split(j, [None, m])
        sch.reorder(tile, q, j, lane)
        for loop in (q, j):
            sch.unroll(loop)
        in_vectors(sch, lane, lanes)
        if shape.keys % m:
            sch.annotate(tile, "pragma_loop_partition_hint", True)
        start_scores = accumulate(sch, blocks.scores, tile, len(sch.get(blocks.scores).iter_vars) - 1, lanes, kd)
        sch.set_scope(blocks.scores, 0, "local")
        sch.compute_at(blocks.queries, at_block, preserve_unit_loops=True)
        sch.compute_at(blocks.rows, at_block, preserve_unit_loops=True)
        _transposition(sch, blocks.queries, lanes)
        in_vectors(sch, sch.get_loops(blocks.rows)[-1], lanes)
        for copy in (keys, values):
            if copy is not None:
                sch.compute_at(copy, tasks, preserve_unit_loops=True)
                in_vectors(sch, sch.get_loops(copy)[-1], lanes)
        tasks = sch.fuse(*outer, tasks)
        if shape.products >= _PRODUCTS_PER_STEP * parallel_work(machine):
            sch.parallel(tasks)
        for made, _ in present:
            *outer, _, feature = sch.get_loops(made)
            in_vectors(sch, feature, lanes)
            copied = sch.fuse(*outer) if len(outer) > 1 else outer[0]
            if shape.batch * shape.keys * shape.depth >= parallel_work(machine):
                sch.parallel(copied)
        for stage, start in (
            (blocks.values, start_values), (blocks.peak, starts[0]), (blocks.total, starts[1]),
            (blocks.scores, start_scores),
        ):
            sch.decompose_reduction(stage, start)


def _result(
    sch: s_tir.Schedule, out: SBlockRV, shape: Sizes, tile: tuple[int, int, int, int], lanes: int
) -> tuple[list[LoopRV], LoopRV, LoopRV, LoopRV]:
    """Tile the result; returns the loops over heads, over chunks, over blocks, and over register tiles."""
    chunk, block, l_tile, f_tile = tile
    *loops, f = sch.get_loops(out)
    position = _query_axis(sch, out)
    i = loops.pop(position)
    width = vectors_in(shape.features, lanes)[1]
    sizes = [None, chunk // block, block, shape.width // l_tile, l_tile]
    tasks, at_block, q, rows, row = sch.split(i, sizes)
    tiles, vectors, vector = sch.split(f, [None, f_tile, width])
    sch.reorder(*loops, tasks, at_block, q, rows, tiles, row, vectors, vector)
    sch.vectorize(vector)
    for loop in (row, vectors):
        sch.unroll(loop)
    return loops, tasks, at_block, tiles


def _query_axis(sch: s_tir.Schedule, out: SBlockRV) -> int:
    """Which axis of the result counts the queries: the one that the inverse of a query's total depends on last."""
    block = sch.get(out)
    variables = [v.var for v in block.iter_vars]
    (inverse,) = [region for region in block.reads if len(region.region) == len(variables)]
    (position,) = uses(inverse.region[-1].min, variables)
    return position


def _over_keys(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> LoopRV:
    """Step over the keys, and for each over the blocks of queries, so that several chains of maxima or sums run at
    once; returns the outer loop."""
    names = [v.iter_type == tirx.IterVar.CommReduce for v in sch.get(block).iter_vars]
    loops = sch.get_loops(block)[-len(names) :]
    if names[-1]:
        q, lane, j = loops[-3:]
    else:
        q, j, lane = loops[-3:]
    sch.reorder(j, q, lane)
    sch.unroll(q)
    in_vectors(sch, lane, lanes)
    return j


def in_vectors(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> None:
    count, width = vectors_in(int(sch.get(loop).extent), lanes)
    vectors, vector = sch.split(loop, [count, width])
    if count <= 4:
        sch.unroll(vectors)
    sch.vectorize(vector)


def _transposition(sch: s_tir.Schedule, queries: SBlockRV, lanes: int) -> None:
    """Transpose whole tiles in registers; features that fill no tile one vector of queries at a time."""
    *_, d, lane = sch.get_loops(queries)
    if int(sch.get(d).extent) % lanes or int(sch.get(lane).extent) % lanes:
        in_vectors(sch, lane, lanes)
        return
    d, row = sch.split(d, [None, lanes])
    lane, column = sch.split(lane, [None, lanes])
    sch.reorder(d, lane, row, column)
    sch.tensorize(row, use(transpose(lanes)))


def _seeds(shape: Sizes, machine: CpuMachine) -> Iterator[Decisions]:
    """Register tiles by loads per multiply-add, chunks by how evenly they divide among the cores."""
    options = []
    for block in divisors(shape.together or shape.blocks, 8):
        scores = _score_tile(shape, machine, block)
        if scores is None:
            continue
        kept = 2 * 4 * block * shape.width * (shape.keys + shape.depth)  # logits and powers, or rows and queries
        overflow = max(0.0, kept / (machine.l2_bytes / 2) - 1)
        for chunk in divisors(shape.together or shape.blocks, 64):
            if chunk % block:
                continue
            tasks = shape.batch * shape.blocks // chunk
            idle = -(-tasks // machine.cores) * machine.cores / tasks
            cost = idle * (1 + scores[0] / 4) + 0.2 * min(overflow, 4) + 0.001 * chunk
            options.append((cost, block, chunk, scores[1]))
    options.sort()
    tiles = _value_tiles(shape, machine)
    kd, kj = max(divisors(shape.depth, 4)), max(divisors(shape.multiple or shape.keys, 4))
    for _, block, chunk, m in options[:4]:
        for l_tile, f_tile in tiles[:2]:
            for copy in (0, 1) if chunk > block else (0,):
                yield {"chunk": chunk, "block": block, "m": m, "l": l_tile, "f": f_tile, "kd": kd, "kj": kj,
                       "keys": copy, "values": copy}


def _heights(shape: Sizes) -> list[int]:
    """Keys of a register tile of scores; of free numbers of keys such that no tile is ragged."""
    if shape.multiple:
        return divisors(shape.multiple, _MAX_KEYS)
    return list(range(1, min(shape.keys, _MAX_KEYS) + 1))


def _score_tile(shape: Sizes, machine: CpuMachine, block: int) -> tuple[float, int] | None:
    """Loads per multiply-add, and the keys of the register tile, of ``block`` blocks of queries."""
    vectors = block * vectors_in(shape.width, machine.lanes())[0]
    m = max((m for m in _heights(shape) if m * vectors <= _accumulators(machine)), default=0)
    if m < 1 or (m < 2 and shape.keys > 1 and block > 1):
        return None
    return 1 / m + 1 / vectors, m


def _accumulators(machine: CpuMachine) -> int:
    """Whole multiples of 12, which the tiles of 12 x 2, 6 x 4 and so on fill."""
    return accumulator_budget(machine) // 12 * 12


def _value_tiles(shape: Sizes, machine: CpuMachine) -> list[tuple[int, int]]:
    """Queries and vectors of features of a register tile, best first; half the registers hide the latency of the
    multiply-adds, and a narrower tile reads fewer lines of the values a step."""
    vectors, budget = vectors_in(shape.features, machine.lanes())[0], _accumulators(machine)
    tiles = [(r, f) for f in divisors(vectors, 8) for r in divisors(shape.width, shape.width) if r * f <= budget]
    wanted = max(machine.fma_per_cycle * machine.fma_latency, budget * 2 // 3)
    return sorted(tiles, key=lambda t: (abs(t[0] * t[1] - wanted) // 4, 1 / t[0] + 1 / t[1], t[1]))


ATTENTION = Attention()
