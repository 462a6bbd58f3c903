"""Direct convolution in the blocked layout NCHW[c]c, with the output tile in registers.

The function holds one block annotated ``mlc.op = "conv2d_nchwc"`` that reads data ``[N, IC/c, H, W, c]`` (possibly
through a padding block) and weights ``[OC/c, IC/c, KH, KW, c, c]`` and writes ``[N, OC/c, OH, OW, c]``. After
Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures" (2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from schedules.analysis import remembered
from schedules.cpu.tiling import (
    accumulate,
    accumulator_budget,
    check_tile,
    consumers_inlined,
    divisors,
    find_annotated,
    staged_input,
    vectors_in,
)
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["CONV2D"]

_OPS = ("conv2d_nchwc",)


@dataclass(frozen=True)
class _Shape:
    """The extents of the convolution block's axes and whether its input is padded by a block of its own."""

    n: int
    oc_blocks: int
    oh: int
    ow: int
    oc: int
    ic_blocks: int
    kh: int
    kw: int
    ic: int
    padded: bool


def _read(sch: s_tir.Schedule) -> tuple[s_tir.schedule.SBlockRV, _Shape] | None:
    block = find_annotated(sch, _OPS)
    if block is None:
        return None
    extents = [int(v.dom.extent) for v in sch.get(block).iter_vars]
    if len(extents) != 9:
        return None
    n, oc_blocks, oh, ow, oc, ic_blocks, kh, kw, ic = extents
    padded = bool(sch.get_producers(block))
    return block, _Shape(n, oc_blocks, oh, ow, oc, ic_blocks, kh, kw, ic, padded)


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    found = _read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


class Conv2d(Space):
    """Knobs: ``ow``/``oh`` output columns/rows of one register tile, ``oc`` output blocks of one register tile,
    ``rows`` output rows and ``groups`` output blocks of one parallel chunk, ``ic`` unrolling of the input channels,
    ``order`` which axis varies fastest over the parallel chunks (0: output channels, 1: rows), ``pad`` where the
    padded input is made (0: once, 1: per chunk of rows).
    """

    name = "cpu.conv2d_nchwc"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        return (
            Knob("ow", tuple(_columns(shape.ow))),
            Knob("oh", tuple(divisors(shape.oh, 4))),
            Knob("oc", tuple(divisors(shape.oc_blocks, 8))),
            Knob("rows", tuple(divisors(shape.oh, 28))),
            Knob("groups", tuple(divisors(shape.oc_blocks, 64))),
            Knob("ic", tuple(divisors(shape.ic, 16))),
            Knob("order", (0, 1)),
            Knob("pad", (0, 1) if shape.padded else (0,)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _shape(func)
        assert shape is not None
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        found = _read(sch)
        assert found is not None
        block, shape = found
        lanes = cpu_machine(target).lanes()
        pad = staged_input(sch, block) if shape.padded else None
        out = consumers_inlined(sch, block)
        ow_tile, oh_tile, oc_tile = pick("ow"), pick("oh"), pick("oc")
        rows, groups, unroll, order, pad_at = pick("rows"), pick("groups"), pick("ic"), pick("order"), pick("pad")
        if rows % oh_tile or groups % oc_tile:
            raise InvalidDecision("a parallel chunk must hold whole register tiles")
        count, width = vectors_in(shape.oc, lanes)
        check_tile(cpu_machine(target), ow_tile * oh_tile * oc_tile * count, unroll)
        n, ob, oh, ow, oc = sch.get_loops(out)
        chunk_oc, outer_oc, tile_oc = sch.split(ob, [None, groups // oc_tile, oc_tile])
        chunk_oh, outer_oh, tile_oh = sch.split(oh, [None, rows // oh_tile, oh_tile])
        outer_ow, tile_ow = sch.split(ow, [None, ow_tile])
        chunks = (chunk_oh, chunk_oc) if order == 0 else (chunk_oc, chunk_oh)
        sch.reorder(n, *chunks, outer_oc, outer_oh, outer_ow, tile_oc, tile_oh, tile_ow, oc)
        vectors, vector = sch.split(oc, [count, width])
        sch.vectorize(vector)
        for loop in (tile_oc, tile_oh, tile_ow, vectors):
            sch.unroll(loop)
        if shape.ow % ow_tile:  # lowering peels the ragged tile, so that full ones test nothing
            sch.annotate(outer_ow, "pragma_loop_partition_hint", True)
        start = accumulate(sch, block, outer_ow, 5, lanes, unroll)
        if pad is not None and pad_at == 1 and order == 0:
            sch.compute_at(pad, chunk_oh, preserve_unit_loops=True)
            sch.vectorize(sch.get_loops(pad)[-1])
            parallel = sch.fuse(n, chunk_oh)
        else:
            if pad is not None:
                _parallel_padding(sch, pad)
            parallel = sch.fuse(n, *chunks)
        sch.parallel(parallel)
        sch.decompose_reduction(block, start)


def _parallel_padding(sch: s_tir.Schedule, pad: s_tir.schedule.SBlockRV) -> None:
    loops = sch.get_loops(pad)
    sch.vectorize(loops[-1])
    sch.parallel(sch.fuse(*loops[:-2]))


def _columns(ow: int) -> list[int]:
    """Register tile widths: the divisors, and where there are only small ones, widths with a ragged last tile."""
    exact = divisors(ow, 28)
    return exact if exact[-1] >= min(ow, 5) else sorted({*exact, 7, 14})


def _seeds(shape: _Shape, machine: CpuMachine) -> Iterator[Decisions]:
    """Tiles by the registers they fill, then by how evenly the parallel chunks divide among the cores.

    The more accumulators a tile has, the fewer loads one multiply-add costs, until they spill.
    """
    vectors = vectors_in(shape.oc, machine.lanes())[0]
    budget = accumulator_budget(machine)
    tiles = []
    for ow in _columns(shape.ow):
        for oh in divisors(shape.oh, 4):
            for oc in divisors(shape.oc_blocks, 8):
                pixels, accumulators = ow * oh, ow * oh * oc * vectors
                if accumulators + min(oc * vectors, pixels) <= budget:
                    loads = 1 / pixels + 1 / (oc * vectors)
                    ragged = -(-shape.ow // ow) * ow / shape.ow
                    tiles.append((loads * ragged + (0.0 if accumulators >= 8 else 1.0), oh, -oc, ow, oc))
    tiles.sort()
    for _, oh, _, ow, oc in (tiles or [(0.0, 1, 0, 1, 1)])[:6]:
        options = []
        for rank, (order, pad) in enumerate(_orders(shape)):
            rows, groups = _chunk(shape, machine, oh, oc, order, pad)
            halo = (rows + shape.kh - 1) / rows if pad else 1.0
            options.append((halo > 1.7, rank, rows, groups, order, pad))
        for *_, rows, groups, order, pad in sorted(options):
            yield {
                "ow": ow, "oh": oh, "oc": oc, "rows": rows, "groups": groups,
                "ic": max(divisors(shape.ic, 4)), "order": order, "pad": pad,
            }


def _orders(shape: _Shape) -> list[tuple[int, int]]:
    weights = shape.oc_blocks * shape.oc * shape.ic_blocks * shape.ic * shape.kh * shape.kw
    data = shape.oh * shape.ow * shape.ic_blocks * shape.ic
    if not shape.padded:
        return [(1, 0), (0, 0)] if weights > data else [(0, 0), (1, 0)]
    return [(1, 0), (0, 1)] if weights > 4 * data else [(0, 1), (1, 0), (0, 0)]


def _chunk(shape: _Shape, machine: CpuMachine, oh: int, oc: int, order: int, pad: int) -> tuple[int, int]:
    """Rows and channel blocks of a parallel chunk: large enough to reuse what is loaded, and enough of them."""
    wanted = machine.cores * 2
    rows_options = [r for r in divisors(shape.oh, 28) if r % oh == 0]
    group_options = [g for g in divisors(shape.oc_blocks, 64) if g % oc == 0]
    best, best_cost = (rows_options[0], group_options[0]), float("inf")
    for rows in rows_options:
        for groups in group_options:
            by_rows = shape.n * (shape.oh // rows)
            chunks = by_rows if pad else by_rows * (shape.oc_blocks // groups)
            rounds = -(-chunks // machine.cores) * machine.cores
            idle = rounds / chunks
            few = max(1.0, wanted / chunks)
            halo = (rows + shape.kh - 1) / rows if pad else 1.0
            weights = groups * shape.oc * shape.ic_blocks * shape.ic * shape.kh * shape.kw * 4
            spill = 1.0 + 0.1 * max(0.0, weights / machine.l2_bytes - 0.5) if order == 1 or not pad else 1.0
            overhead = 1 + 0.02 / rows + 0.01 / groups
            cost = idle * (1 + 0.05 * (few - 1)) * (1 + 0.1 * (halo - 1)) * min(spill, 1.5) * overhead
            if cost < best_cost:
                best, best_cost = (rows, groups), cost
    return best


CONV2D = Conv2d()
