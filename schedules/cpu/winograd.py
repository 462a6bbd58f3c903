"""Winograd convolution in the blocked layout NCHW[c]c.

The function holds the chain ``[padded] -> columns -> points -> products -> rows -> tiles -> result [-> epilogue]``
whose products are annotated ``mlc.op = "conv2d_winograd"``: the input transform in two steps, one matrix product for
each point ``[size, size, OC/c, T, c]`` over the flattened tiles ``T``, and the output transform in two steps. Both
transforms keep a tile of vectors in registers, the products are the register-tiled contraction of
:mod:`schedules.cpu.tiling`, and all of it is done for a block of tiles at a time, so that what lies between the steps
stays in the cache. After Zlateski et al., "The Anatomy of Efficient FFT and Winograd Convolutions on Modern CPUs"
(2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import remembered
from schedules.cpu.tiling import (
    accumulate,
    accumulator_budget,
    check_tile,
    consumers_inlined,
    divisors,
    find_annotated,
    vectors_in,
)
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["WINOGRAD"]

_OPS = ("conv2d_winograd",)


@dataclass(frozen=True)
class _Shape:
    """Points a side of a tile, its outputs a side, images, rows and columns of tiles, and the channel blocks."""

    size: int
    m: int
    n: int
    rows: int
    columns: int
    ic_blocks: int
    ic: int
    oc_blocks: int
    oc: int
    padded: bool

    @property
    def tiles(self) -> int:
        """All tiles of the batch."""
        return self.n * self.rows * self.columns


@dataclass(frozen=True)
class _Blocks:
    padded: SBlockRV | None
    columns: SBlockRV
    points: SBlockRV
    products: SBlockRV
    rows: SBlockRV
    tiles: SBlockRV


def _read(sch: s_tir.Schedule) -> tuple[_Blocks, _Shape] | None:
    products = find_annotated(sch, _OPS)
    if products is None:
        return None
    (points,) = sch.get_producers(products)
    (columns,) = sch.get_producers(points)
    padding = sch.get_producers(columns)
    (rows,) = sch.get_consumers(products)
    (tiles,) = sch.get_consumers(rows)
    (image,) = sch.get_consumers(tiles)
    size, _, ob, count, o, cb, c = (int(v.dom.extent) for v in sch.get(products).iter_vars)
    m = int(sch.get(tiles).iter_vars[0].dom.extent)
    n, _, oh, ow, _ = (int(v.dom.extent) for v in sch.get(image).iter_vars)
    th, tw = -(-oh // m), -(-ow // m)
    assert count == n * th * tw
    blocks = _Blocks(padding[0] if padding else None, columns, points, products, rows, tiles)
    return blocks, _Shape(size, m, n, th, tw, cb, c, ob, o, bool(padding))


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    found = _read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


class Winograd(Space):
    """Knobs: ``rows`` rows of tiles that are transformed and multiplied together, ``t`` tiles and ``oc`` output blocks
    of one register tile, ``k`` unrolling of the input channels, ``inner`` which loop of register tiles is inside
    (0: tiles, 1: output blocks), ``spread`` what the threads share (0: the blocks of rows, 1: each step's own loops,
    which read the weights once but meet three times), ``pad`` where the padded input is made (0: once, 1: for each
    block of rows and channels, 2: while it is read).
    """

    name = "cpu.conv2d_winograd"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        return (
            Knob("rows", tuple(divisors(shape.rows, 64))),
            Knob("t", tuple(_tiles(shape))),
            Knob("oc", tuple(divisors(shape.oc_blocks, 8))),
            Knob("k", tuple(divisors(shape.ic, 16))),
            Knob("inner", (0, 1)),
            Knob("spread", (0, 1)),
            Knob("pad", (0, 1, 2) if shape.padded else (0,)),
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
        rows, t, oc, unroll = pick("rows"), pick("t"), pick("oc"), pick("k")
        inner, spread, pad_at = pick("inner"), pick("spread"), pick("pad")
        count, width = vectors_in(shape.oc, lanes)
        check_tile(machine, t * oc * count, unroll)
        if t > rows * shape.columns:
            raise InvalidDecision(f"a register tile of {t} must fit the {rows * shape.columns} tiles of a block")
        if spread and rows != shape.rows:
            raise InvalidDecision("steps are shared among threads for all rows at once")
        out = consumers_inlined(sch, blocks.tiles)
        sch.compute_inline(blocks.tiles)
        at, meet = self._outputs(sch, out, blocks, shape, rows, lanes, spread)
        copy = sch.cache_write(blocks.products, 0, "local")
        sch.compute_at(copy, at, preserve_unit_loops=True)
        start = self._products(sch, copy, blocks.products, (t, oc, unroll, inner), lanes, spread)
        self._inputs(sch, blocks, at, lanes, spread, pad_at)
        if meet is not None:
            sch.parallel(meet)
        sch.decompose_reduction(blocks.products, start)

    def _outputs(
        self, sch: s_tir.Schedule, out: SBlockRV, blocks: _Blocks, shape: _Shape, rows: int, lanes: int, spread: int
    ) -> tuple[LoopRV, LoopRV | None]:
        """Tile the result; returns the loop over blocks of rows, and the parallel one if that is shared."""
        n, ob, oh, ow, o = sch.get_loops(out)
        block, row, i = sch.split(oh, [None, rows, shape.m])
        column, j = sch.split(ow, [None, shape.m])
        sch.reorder(n, block, ob, row, column, i, j, o)
        outer = sch.fuse(n, block)
        _vectors(sch, o, lanes)
        sch.unroll(i)
        sch.unroll(j)
        if spread:
            ob = sch.fuse(ob, row)
            sch.parallel(ob)
        sch.compute_at(blocks.rows, column, preserve_unit_loops=True)
        sch.set_scope(blocks.rows, 0, "local")
        *_, y, x, _, _, lane = sch.get_loops(blocks.rows)
        _vectors(sch, lane, lanes)
        sch.unroll(y)
        sch.unroll(x)
        return outer, None if spread else outer

    def _products(
        self, sch: s_tir.Schedule, copy: SBlockRV, products: SBlockRV, tile: tuple[int, int, int, int], lanes: int,
        spread: int,
    ) -> LoopRV:
        t, oc, unroll, inner = tile
        *_, i, j, ob, tiles, o = sch.get_loops(copy)
        ragged = int(sch.get(tiles).extent) % t
        outer_oc, tile_oc = sch.split(ob, [None, oc])
        outer_t, tile_t = sch.split(tiles, [None, t])
        order = (outer_oc, outer_t) if inner == 0 else (outer_t, outer_oc)
        sch.reorder(i, j, *order, tile_oc, tile_t, o)
        _vectors(sch, o, lanes)
        sch.unroll(tile_oc)
        sch.unroll(tile_t)
        if ragged:
            sch.annotate(outer_t, "pragma_loop_partition_hint", True)
        start = accumulate(sch, products, order[1], 5, lanes, unroll)
        if spread:
            sch.parallel(sch.fuse(i, j))
        return start

    def _inputs(
        self, sch: s_tir.Schedule, blocks: _Blocks, at: LoopRV, lanes: int, spread: int, pad_at: int
    ) -> None:
        sch.compute_at(blocks.points, at, preserve_unit_loops=True)
        *_, i, j, tiles, cb, c = sch.get_loops(blocks.points)
        sch.reorder(cb, tiles, i, j, c)
        _vectors(sch, c, lanes)
        sch.unroll(i)
        sch.unroll(j)
        sch.compute_at(blocks.columns, tiles, preserve_unit_loops=True)
        sch.set_scope(blocks.columns, 0, "local")
        *_, i, x, _, _, c = sch.get_loops(blocks.columns)
        _vectors(sch, c, lanes)
        sch.unroll(i)
        sch.unroll(x)
        if blocks.padded is not None:
            if pad_at == 2:
                sch.compute_inline(blocks.padded)
            elif pad_at == 1:
                sch.compute_at(blocks.padded, cb, preserve_unit_loops=True)
                _vectors(sch, sch.get_loops(blocks.padded)[-1], lanes)
            else:
                loops = sch.get_loops(blocks.padded)
                _vectors(sch, loops[-1], lanes)
                sch.parallel(sch.fuse(*loops[:3]))
        if spread:
            sch.parallel(cb)


def _vectors(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> None:
    count, width = vectors_in(int(sch.get(loop).extent), lanes)
    vectors, vector = sch.split(loop, [count, width])
    sch.unroll(vectors)
    sch.vectorize(vector)


def _tiles(shape: _Shape) -> list[int]:
    return [t for t in range(1, min(shape.tiles, 28) + 1)]


def _seeds(shape: _Shape, machine: CpuMachine) -> Iterator[Decisions]:
    for rows in divisors(shape.rows, 64):
        for spread in ((0, 1) if rows == shape.rows else (0,)):
            for t, oc in ((12, 2), (6, 4), (7, 2), (7, 3), (8, 3), (24, 1), (4, 4), (14,1), (5,4)):
                if shape.oc_blocks % oc == 0 and t <= rows * shape.columns:
                    for inner in (0, 1):
                        for pad in (0, 1, 2) if shape.padded else (0,):
                            yield {"rows": rows, "t": t, "oc": oc, "k": 4, "inner": inner, "spread": spread, "pad": pad}


WINOGRAD = Winograd()
