"""A recurrent layer over its steps: the product with the state and the cell's arithmetic in one register tile.

The function is :func:`mlc.graph.kernels.recurrent.recurrent`: a loop over the steps around the blocks ``before`` and
``step``. A tile computes all gates of some panels of hidden units, so that the cell finds them in registers. Its
weights are read once a step from the cache that holds them, one after another. A step of two products, of which the
second reads what the first has made, has two such tiles. The units may be shared out among the
cores in every step, which costs a hand-over each time; directions and parts of the batch are shared out by the function
itself, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
from tvm import s_tir, tirx

from schedules.analysis import remembered, walk
from schedules.cpu.tiling import OP_ANNOTATION, accumulate, check_tile, divisors, tile_fits
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["RECURRENT"]

#: launches of a parallel loop that sharing out a step must save. Measured on two cores of Zen 4: a step takes two more,
#: since each core waits for the other's part of the state too; a third, since where the other core is busy, every step
#: waits for that
_HAND_OVERS = 3
#: part of a cache that weights may take and still be found there in the next step: a megabyte of them does not stay in
#: a second level of one
_ROOM = 0.75


@dataclass(frozen=True)
class _Shape:
    """Of one task: ``rows`` of the batch, ``panels`` of ``width`` hidden units with ``gates`` gates each, sums of
    ``depth`` products. ``states`` are carried from step to step; ``shared``: the function is parallel already."""

    rows: int
    panels: int
    gates: int
    width: int
    depth: int
    states: int
    shared: bool
    before: int = 0

    @property
    def products(self) -> int:
        """Multiply-adds of a step."""
        return self.rows * self.panels * (self.before + self.gates) * self.width * self.depth

    @property
    def weight_bytes(self) -> int:
        return 4 * self.panels * (self.before + self.gates) * self.width * self.depth


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    blocks: list[s_tir.SBlock] = []
    loops: list[tirx.For] = []
    walk(func.body, (s_tir.SBlock, blocks.append), (tirx.For, loops.append))
    named = {str(block.name_hint): block for block in blocks}
    product = named.get("product")
    if product is None or str(product.annotations.get(OP_ANNOTATION)) != "recurrent":
        return None
    rows, panels, gates, width, depth = (int(v.dom.extent) for v in product.iter_vars)
    shared = any(loop.kind == tirx.ForKind.PARALLEL for loop in loops)
    before = int(named["gates_product"].iter_vars[2].dom.extent) if "gates_product" in named else 0
    return _Shape(rows, panels, gates, width, depth, 1 + ("cell_before" in named), shared, before)


class Recurrent(Space):
    """Knobs: ``m`` rows of the batch and ``p`` panels of a register tile, ``k`` unrolling of the sum, ``units`` whether
    the panels of a step are shared out among the cores (1), ``q`` panels of the tile of a product before it."""

    name = "cpu.recurrent"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        return (
            Knob("m", tuple(divisors(shape.rows, 8))),
            Knob("p", tuple(divisors(shape.panels, 8))),
            Knob("k", tuple(divisors(shape.depth, 8))),
            Knob("units", (0,) if shape.shared else (0, 1)),
            *([Knob("q", tuple(divisors(shape.panels, 8)))] if shape.before else []),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape, machine = _shape(func), cpu_machine(target)
        assert shape is not None
        unroll = max(divisors(shape.depth, 4))
        launches = _HAND_OVERS * (2 if shape.before else 1)
        units = int(not shape.shared and _saved(shape, machine) > launches * machine.launch_seconds)
        first = _tiles(replace(shape, gates=shape.before), machine) if shape.before else []
        for m, p in _tiles(shape, machine)[:4]:
            more = {"q": next((q for rows, q in first if rows == m), 1)} if first else {}
            for chosen in dict.fromkeys((units if max(p, *more.values(), 1) < shape.panels else 0, 0)):
                yield {"m": m, "p": p, "k": unroll, "units": chosen, **more}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        shape, machine = _shape(sch.mod["main"]), cpu_machine(target)
        assert shape is not None
        m, p, k, units = (pick(name) for name in ("m", "p", "k", "units"))
        q = pick("q") if shape.before else 0
        lanes = min(machine.lanes(), shape.width)
        for panels, gates in ((p, shape.gates), (q, shape.before)):
            check_tile(machine, m * panels * gates * shape.width // lanes, k)
        for state in ("hidden", "cell")[: shape.states]:
            _vectors(sch, sch.get_loops(sch.get_sblock(f"{state}_before"))[-1], lanes)
        if shape.before:
            _tile(sch, ("gates_product", "gates"), (m, q, k, lanes), bool(units))
        _tile(sch, ("product", "inner", "outer"), (m, p, k, lanes), bool(units))


def _tile(sch: s_tir.Schedule, names: tuple[str, ...], sizes: tuple[int, int, int, int], parallel: bool) -> None:
    """One product of a step and what follows it, in tiles of ``m`` rows and ``p`` panels, ``k`` products unrolled."""
    m, p, k, lanes = sizes
    product, *inner, outer = (sch.get_sblock(name) for name in names)
    row, panel, lane = sch.get_loops(outer)[-3:]
    rows, row = sch.split(row, [None, m])
    panels, panel = sch.split(panel, [None, p])
    sch.reorder(panels, rows, row, panel, lane)
    for loop in (row, panel):
        sch.unroll(loop)
    _vectors(sch, lane, lanes)
    for block in inner:
        sch.compute_at(block, rows, preserve_unit_loops=True)
        *_, row, panel, lane = sch.get_loops(block)
        for loop in (row, panel):
            sch.unroll(loop)
        _vectors(sch, lane, lanes)
    start = accumulate(sch, product, rows, 4, lanes, k)
    for block in (*inner, product):
        sch.set_scope(block, 0, "local")
    if parallel:
        sch.parallel(panels)
    sch.decompose_reduction(product, start)


def _vectors(sch: s_tir.Schedule, loop: s_tir.schedule.LoopRV, lanes: int) -> None:
    vectors, vector = sch.split(loop, [None, lanes])
    if int(sch.get(vectors).extent) <= 4:
        sch.unroll(vectors)
    sch.vectorize(vector)


def _step_seconds(shape: _Shape, machine: CpuMachine, cores: int) -> float:
    """A step's product on some cores: its arithmetic, or reading each core's weights from the cache that holds them."""
    held = shape.weight_bytes / cores
    levels = ((machine.l1_bytes, machine.l1_rate), (machine.l2_bytes, machine.l2_rate))
    rate = next((rate for size, rate in levels if held <= _ROOM * size), machine.l3_rate)
    return max(shape.products / cores / machine.macs_per_cycle(), held / rate) / machine.hz


def _saved(shape: _Shape, machine: CpuMachine) -> float:
    """Seconds of a step that sharing it out among the cores saves, the hand-over not counted."""
    return _step_seconds(shape, machine, 1) - _step_seconds(shape, machine, min(machine.cores, shape.panels))


def _tiles(shape: _Shape, machine: CpuMachine) -> list[tuple[int, int]]:
    """Rows and panels of a register tile, best first: enough sums to hide the latency, then few loads for each
    multiply-add, whole panels last, since a tile of several reads as many streams of weights."""
    vectors = shape.gates * -(-shape.width // machine.lanes())
    fitting = [
        (m, p) for m in divisors(shape.rows, 8) for p in divisors(shape.panels, 4)
        if tile_fits(machine, m, p * vectors) or (m == p == 1)
    ]
    busy = machine.fma_per_cycle * machine.fma_latency

    def cost(tile: tuple[int, int]) -> tuple[float, ...]:
        m, p = tile
        idle = max(1.0, busy / (m * p * vectors))
        loads = 1 / m + 1 / (p * vectors)
        return idle * max(1.0, loads * machine.fma_per_cycle / machine.loads_per_cycle), 1 / m, p

    return sorted(fitting, key=cost)


RECURRENT = Recurrent()
