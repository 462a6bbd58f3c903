"""Features of a scheduled function: a vector of fixed length, computed for each level of the memory hierarchy.

The vector holds the costliest nests one after the other and totals over the whole function. Most quantities span
many orders of magnitude and enter as ``log2(1 + x)``. Reading one candidate takes about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import tvm

from cost_model.costs import SIZES, NestCost, nest_cost
from cost_model.machine import Machine, reference
from cost_model.nests import Function, Nest, read_function

__all__ = ["FEATURES", "LOOP_FEATURES", "Features", "SpaceFeatures", "extract"]

#: nests described one by one; a tuned function rarely has more that matter
NESTS = 3

_NEST_NAMES = (
    "share", "seconds", "compute", "launch", "memory_l1", "memory_l2", "memory_l3",
    "traffic_l1", "traffic_l2", "traffic_l3", "flops_per_byte_l1", "flops_per_byte_l2", "flops_per_byte_l3",
    "flops", "iterations", "arithmetic", "special", "predicated", "opaque", "reduction", "depth",
    "parallel", "balance", "grain", "regions", "vector", "lanes_used", "unrolled",
    "operations", "loads", "stores", "gathers", "loads_per_operation", "accumulators", "registers", "spills",
    "cycles_per_operation", "chain", "inner", "inner_reduces", "inner_step", "tile_bytes", "chunk_bytes",
    "threads", "occupancy", "coalesced", "reduced", "overlap", "guarded", "cold",
    "efficiency", "memory_part_l1", "memory_part_l2", "memory_part_l3", "useful", "fetching", "conditions",
    "conditional", "share_bytes", "apart", *(f"bytes_each_{size >> 10}k" for size in SIZES), "fresh", "streams",
    "aliased",
)
_TOTAL_NAMES = (
    "seconds", "compute", "launch", "flops", "nests", "allocated", "allocated_shared", "allocated_local",
    "arguments", "vectorized_part", "predicated_part", "regions",
    "efficiency", "rest", "reducing", "copying", "serial", "body", "useful", "fetching", "conditional", "share_bytes",
)
#: decisions of a candidate's space that have an entry, the first ones
_DECISIONS = 12
#: the names of the vector's entries that are read off the scheduled function, in order
LOOP_FEATURES = tuple(f"nest{i}.{name}" for i in range(NESTS) for name in _NEST_NAMES) + tuple(
    f"total.{name}" for name in _TOTAL_NAMES
)
#: what a space says that a candidate asks of a GPU
_FOOTPRINT = ("threads", "registers", "shared_bytes", "resident", "occupancy", "under_way", "stages", "cluster",
              "tensor_cores")
#: all of them; the others are what the candidate's space says, 0 where nothing is asked of it
FEATURES = (*LOOP_FEATURES, "space.seconds", *(f"space.decision{i}" for i in range(_DECISIONS)),
            *(f"space.{name}" for name in _FOOTPRINT))


@dataclass(frozen=True)
class SpaceFeatures:
    """What a candidate's space says of it where the loops do not: products on tensor cores, stages of copies and the
    order of blocks are marks on a loop nest, written out when it is lowered.

    ``seconds`` is the space's price, ``decisions`` its knobs' values in their order. The others are reckoned, 0 where
    the space says nothing of them: a block's ``threads``, the ``registers`` of each and its ``shared_bytes``, how many
    blocks are ``resident`` on a multiprocessor and the part of its threads that they are (``occupancy``), the bytes of
    operands that these have ``under_way`` at most, the ``stages`` of their copies, the blocks of a ``cluster``, and
    whether ``tensor_cores`` multiply.
    """

    seconds: float
    decisions: tuple[int, ...]
    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0
    resident: int = 0
    occupancy: float = 0.0
    under_way: int = 0
    stages: int = 0
    cluster: int = 0
    tensor_cores: bool = False

    def vector(self) -> list[float]:
        """The entries of a feature vector."""
        known = [_log(abs(value)) for value in self.decisions[:_DECISIONS]]
        return [_time(self.seconds), *known, *([0.0] * (_DECISIONS - len(known))),
                *(_log(getattr(self, name)) for name in _FOOTPRINT)]


@dataclass(frozen=True, eq=False)
class Features:
    """``vector`` has one float32 for each name in :data:`FEATURES`; ``seconds`` is the analytic estimate."""

    vector: np.ndarray
    seconds: float


def extract(
    mod: tvm.IRModule, target: tvm.target.Target, cold: Sequence[int] = (), of_space: SpaceFeatures | None = None
) -> Features:
    """The features of the one function in ``mod``, on what machines with the target's instructions have. Remembered for
    the modules seen last.

    ``cold`` are the positions of parameters that no cache holds (see :func:`cost_model.machine.cold_weights`). The
    price of a space that has one is the estimate.
    """
    read = _extract(mod, str(target), tuple(cold))
    if of_space is None:
        return read
    vector = read.vector.copy()
    vector[len(LOOP_FEATURES):] = of_space.vector()
    return Features(vector, of_space.seconds)


@lru_cache(maxsize=1024)
def _extract(mod: tvm.IRModule, target_json: str, cold: tuple[int, ...]) -> Features:
    return describe(read_function(mod, cold), reference(tvm.target.Target(target_json)))


def describe(function: Function, on: Machine) -> Features:
    """The features of a function that has been read."""
    shared = sum(_kept(b.bytes, b.scope) for b in function.allocations if b.scope.startswith("shared"))
    resident = sum(b.bytes for b in (*function.arguments, *function.allocations) if b.scope in ("global", ""))
    costs = [(nest, nest_cost(nest, on, shared, resident)) for nest in function.nests]
    total = sum(cost.seconds for _, cost in costs)
    ranked = sorted(costs, key=lambda pair: -pair[1].seconds)  # stable: equal costs keep the order of the program
    values: list[float] = []
    for nest, cost in ranked[:NESTS]:
        values += _nest_vector(nest, cost, total, on)
    values += [0.0] * (len(_NEST_NAMES) * (NESTS - len(ranked[:NESTS])))
    values += _total_vector(function, costs)
    values += _mix_vector([cost for _, cost in ranked], [nest for nest, _ in ranked], on)
    values += [0.0] * (len(FEATURES) - len(LOOP_FEATURES))
    return Features(np.asarray(values, dtype=np.float32), total)


def _log(value: float) -> float:
    return math.log2(1.0 + value)


def _time(seconds: float) -> float:
    return math.log2(max(seconds, 1e-10))


def _kept(size: float, scope: str) -> float:
    # before lowering a cache buffer has its whole source's shape; what one block holds is far smaller
    return min(size, 48 * 1024.0) if scope.startswith("shared") else size


def _nest_vector(nest: Nest, cost: NestCost, total: float, on: Machine) -> list[float]:
    levels = 3
    memory = [*cost.memory, *([0.0] * levels)][:levels]
    traffic = [*cost.traffic, *([0.0] * levels)][:levels]
    return [
        cost.seconds / total if total else 0.0, _time(cost.seconds), _time(cost.compute), _time(cost.launch),
        *(_time(m) for m in memory), *(_log(t) for t in traffic), *(_log(nest.flops / (1.0 + t)) for t in traffic),
        _log(nest.flops), _log(nest.iterations), nest.arithmetic, nest.special, float(nest.predicated),
        float(nest.opaque), float(bool(nest.reduction)), float(len(nest.loops)),
        _log(cost.parallel), cost.balance, _log(cost.grain), _log(cost.regions), _log(cost.vector), cost.lanes_used,
        _log(cost.unrolled), _log(cost.operations), _log(cost.loads), _log(cost.stores), _log(cost.gathers),
        (cost.loads + cost.gathers) / max(1.0, cost.operations), cost.accumulators, cost.registers, cost.spills,
        cost.cycles / max(1.0, cost.operations), cost.chain, _log(cost.inner), float(cost.inner_reduces),
        _log(cost.inner_step), _log(cost.tile_bytes), _log(cost.chunk_bytes),
        _log(cost.threads), cost.occupancy, cost.coalesced, _log(cost.reduced), _log(cost.overlap), cost.guarded,
        _log(cost.cold), _ratio(nest.flops / on.flops, cost.compute),
        *(_ratio(m, cost.compute) for m in memory), nest.useful, float(cost.fetching), cost.conditions,
        cost.conditional, _log(cost.share), cost.apart,
        *(math.log2((1.0 + b) / nest.iterations) for b in (*cost.curve, *([0.0] * len(SIZES)))[: len(SIZES)]),
        cost.fresh, _log(cost.streams), _log(cost.aliased),
    ]


def _ratio(part: float, whole: float) -> float:
    return math.log2((part + 1e-10) / (whole + 1e-10))


def _mix_vector(costs: list[NestCost], nests: list[Nest], on: Machine) -> list[float]:
    """Features of the whole function's composition, costliest nests first."""
    total = sum(cost.seconds for cost in costs) or 1.0

    def part(chosen: Callable[[Nest, NestCost], bool]) -> float:
        return sum(c.seconds for n, c in zip(nests, costs, strict=True) if chosen(n, c)) / total

    return [
        _ratio(sum(n.flops for n in nests) / on.flops, total), sum(c.seconds for c in costs[NESTS:]) / total,
        part(lambda n, _: bool(n.reduction)), part(lambda n, _: not n.arithmetic and not n.special),
        part(lambda _, c: c.parallel == 1), _log(max((c.unrolled * c.vector for c in costs), default=0.0)),
        sum(n.useful * c.seconds for n, c in zip(nests, costs, strict=True)) / total,
        float(any(c.fetching for c in costs)), max((c.conditional for c in costs), default=0.0),
        _log(sum(c.share for c in costs)),
    ]


def _total_vector(function: Function, costs: list[tuple[Nest, NestCost]]) -> list[float]:
    work = sum(nest.iterations for nest, _ in costs) or 1.0
    seconds = sum(cost.seconds for _, cost in costs)

    def allocated(prefix: str) -> float:
        return _log(sum(b.bytes for b in function.allocations if b.scope.startswith(prefix)))

    return [
        _time(seconds), _time(sum(cost.compute for _, cost in costs)), _time(sum(cost.launch for _, cost in costs)),
        _log(sum(nest.flops for nest, _ in costs)), float(len(costs)), allocated("global"), allocated("shared"),
        allocated("local"), _log(sum(b.bytes for b in function.arguments)),
        sum(nest.iterations for nest, cost in costs if cost.vector > 1) / work,
        sum(nest.iterations for nest, _ in costs if nest.predicated) / work,
        _log(sum(cost.regions for _, cost in costs)),
    ]
