"""Winograd convolution in the blocked layout NCHW[c]c.

The function holds the chain ``[padded] -> columns -> points -> products -> rows -> tiles -> result [-> epilogue]``
whose products are annotated ``mlc.op = "conv2d_winograd"``, or ``"conv2d_winograd_integer"`` where they are dot
products of 16-bit integers: the input transform in two steps, one matrix product for
each point ``[size, size, OC/c, T, c]`` over the flattened tiles ``T``, and the output transform in two steps. Both
transforms keep a tile of vectors in registers, the products are the register-tiled contraction of
:mod:`schedules.cpu.tiling`, and all of it is done for a block of tiles at a time, so that what lies between the steps
stays in the cache. Where the products are annotated with :data:`DILATED`, the result holds the images that a dilation
makes of one, and a block of its own moves their rows and columns to where they belong.

After Zlateski et al., "The Anatomy of Efficient FFT and Winograd Convolutions on Modern CPUs" (2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import remembered
from schedules.cpu.steps import Step, step_of, with_dots
from schedules.cpu.tiling import (
    OP_ANNOTATION,
    accumulate,
    accumulator_budget,
    check_tile,
    consumers_inlined,
    divisors,
    find_annotated,
    vectors_in,
)
from schedules.intrin import select
from schedules.intrin.dot import dot
from schedules.machine import LINE_BYTES, CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["DILATED", "SINGLE", "WINOGRAD", "WINOGRAD_INTEGER"]

#: annotation of the products where the number of images is free: no block of tiles holds several of them
SINGLE = "mlc.single"
#: annotation of the products of a dilated convolution
DILATED = "mlc.dilated"

_FLOAT, _INTEGER = "conv2d_winograd", "conv2d_winograd_integer"

#: tiles of one register tile at most
_MAX_TILE = 28
#: parts of the time of reading from the second cache, of streaming from the third, and of writing there by a transform
#: (a line is read first) that arithmetic does not hide; and starts of a parallel loop that one inside a block of tiles
#: costs, whose threads wait for each other each time
_NEAR, _FAR, _SPILLED, _MEETING = 0.96, 0.5, 2.0, 1.2
#: factor and offset, in bytes, of the distance between two points: an odd number of cache lines. A transform writes
#: all points of a tile at once; at a multiple of a way, as powers of two of channels make it, they all want the same
#: set of the first cache (up to 1.7 times as slow: 128 channels, 8 tiles)
_SPACED = (2 * LINE_BYTES, LINE_BYTES)
#: what a ragged register tile costs beside its idle part
_RAGGED = 0.05
#: part of a load's time that multiply-adds do not hide: from the first cache, or beside few uses or among many streams
#: of weights that come from the second each time
_LOADED, _STREAMED = 0.3, 1.0
#: uses of a vector of weights by one register tile, and blocks of them, up to which the arithmetic hides the streams
_USES, _STREAMS = 4, 4


@dataclass(frozen=True)
class _Shape:
    """Points a side of a tile, its outputs a side, images, rows and columns of tiles, and the channel blocks.
    ``dilated``: the rows and columns of the result are moved; ``single``: a block of tiles is of one image."""

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
    dilated: bool
    single: bool
    weight: int  # the number of the parameter with the transformed weights, -1 if they are none
    op: str
    step: Step

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
    image: SBlockRV


def _read(sch: s_tir.Schedule) -> tuple[_Blocks, _Shape] | None:
    products = find_annotated(sch, (_FLOAT, _INTEGER))
    if products is None:
        return None
    (points,) = sch.get_producers(products)
    (columns,) = sch.get_producers(points)
    padding = sch.get_producers(columns)
    (rows,) = sch.get_consumers(products)
    (tiles,) = sch.get_consumers(rows)
    (image,) = sch.get_consumers(tiles)
    size, _, ob, count, o, cb, c = (int(v.dom.extent) for v in sch.get(products).iter_vars[:7])
    m = int(sch.get(tiles).iter_vars[0].dom.extent)
    n, _, oh, ow, _ = (int(v.dom.extent) for v in sch.get(image).iter_vars)
    th, tw = -(-oh // m), -(-ow // m)
    assert count == n * th * tw
    blocks = _Blocks(padding[0] if padding else None, columns, points, products, rows, tiles, image)
    params = sch.mod["main"].params
    reads = [region.source for region in sch.get(products).reads]
    weight = next((i for i, param in enumerate(params) if any(param.same_as(read) for read in reads)), -1)
    step = step_of(next(read for read in reads if not read.same_as(sch.get(points).writes[0].source)))
    dilated, single = (key in sch.get(products).annotations for key in (DILATED, SINGLE))
    return blocks, _Shape(size, m, n, th, tw, cb, c, ob, o, bool(padding), dilated, single, weight,
                          str(sch.get(products).annotations[OP_ANNOTATION]), step)


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    found = _read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


class Winograd(Space):
    """Knobs: ``rows`` and ``columns`` of tiles that are transformed and multiplied together (whole rows, or a part of
    one; of a batch also ``images``, whole ones), ``group`` output blocks whose products are kept before they are
    transformed back, ``t`` tiles and ``oc`` output blocks of one register tile, ``k`` unrolling of the input channels,
    ``inner`` which loop of register tiles is inside (0: tiles, 1: output blocks), ``spread`` what the threads share (0:
    the blocks of tiles, 1: the groups of output blocks, so that weights are read once), ``pad`` where the padded input
    is made (0: once, 1: for each block of tiles and channels, 2: while it is read), ``prefetch`` whether weights are
    fetched one register tile ahead.
    """

    name = "cpu.conv2d_winograd"
    target_kind = "llvm"
    op = _FLOAT

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = _shape(func)
        if shape is None or shape.op != self.op:
            return False
        width = vectors_in(shape.oc, cpu_machine(target).lanes())[1]
        return not shape.step.form or select(dot(shape.step.form, width), target) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        images = (Knob("images", tuple(divisors(shape.n, 64))),) if shape.n > 1 and not shape.single else ()
        return (
            *images,
            Knob("rows", tuple(divisors(shape.rows, 64))),
            Knob("columns", tuple(divisors(shape.columns, 64))),
            Knob("group", tuple(divisors(shape.oc_blocks, 64))),
            Knob("t", tuple(range(1, min(shape.tiles, _MAX_TILE) + 1))),
            Knob("oc", tuple(divisors(shape.oc_blocks, 8))),
            Knob("k", tuple(divisors(shape.ic, 16))),
            Knob("inner", (0, 1)),
            Knob("spread", (0, 1)),
            Knob("pad", (0, 1, 2) if shape.padded else (0,)),
            Knob("prefetch", (0, 1) if shape.weight >= 0 else (0,)),
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
        lanes, inner_lanes = machine.lanes(), machine.lanes("int16" if shape.step.form else "float32")
        images = pick("images") if shape.n > 1 and not shape.single else 1
        rows, columns, group = pick("rows"), pick("columns"), pick("group")
        t, oc, unroll, inner = pick("t"), pick("oc"), pick("k"), pick("inner")
        spread, pad_at, prefetch = pick("spread"), pick("pad"), pick("prefetch")
        check_tile(machine, t * oc * vectors_in(shape.oc, lanes)[0], unroll)
        if columns != shape.columns and rows != 1:
            raise InvalidDecision("a block of tiles must be whole rows or a part of one")
        if images > 1 and (rows, columns) != (shape.rows, shape.columns):
            raise InvalidDecision("a block of several images must hold them whole")
        if t > images * rows * columns or group % oc:
            raise InvalidDecision("a block of tiles and a group of channels must hold whole register tiles")
        out = _moved(sch, blocks.image, lanes) if shape.dilated else consumers_inlined(sch, blocks.tiles)
        sch.compute_inline(blocks.tiles)

        n, ob, oh, ow, o = sch.get_loops(out)
        block_row, row, i = sch.split(oh, [None, rows, shape.m])
        block_column, column, j = sch.split(ow, [None, columns, shape.m])
        groups, ob = sch.split(ob, [None, group])
        block_image, n = sch.split(n, [None, images])
        sch.reorder(block_image, block_row, block_column, groups, ob, n, row, column, i, j, o)
        block = sch.fuse(block_image, block_row, block_column)
        _vectors(sch, o, lanes)
        sch.unroll(i)
        sch.unroll(j)
        sch.compute_at(blocks.rows, column, preserve_unit_loops=True)
        sch.set_scope(blocks.rows, 0, "local")
        _registers(sch, blocks.rows, lanes)

        copy = sch.cache_write(blocks.products, 0, "local")
        sch.compute_at(copy, groups, preserve_unit_loops=True)
        # the last tile of a group is followed by the same group of the next point
        fetched = (shape.weight, oc, oc if group > oc else shape.oc_blocks) if prefetch else None
        start = _products(sch, copy, blocks.products, (t, oc, unroll, inner), lanes, fetched, shape.step)

        sch.compute_at(blocks.points, block, preserve_unit_loops=True)
        element = machine.vector_bytes // inner_lanes
        sch.storage_align(blocks.points, 0, 1, *(distance // element for distance in _SPACED))
        *_, i, j, tiles, cb, c = sch.get_loops(blocks.points)
        sch.reorder(cb, tiles, i, j, c)
        _vectors(sch, c, inner_lanes)
        sch.unroll(i)
        sch.unroll(j)
        sch.compute_at(blocks.columns, tiles, preserve_unit_loops=True)
        sch.set_scope(blocks.columns, 0, "local")
        _registers(sch, blocks.columns, inner_lanes)
        if blocks.padded is not None:
            _padding(sch, blocks.padded, cb, pad_at, inner_lanes)
        if spread:
            sch.parallel(groups)
            sch.parallel(cb if pad_at == 1 else sch.fuse(cb, tiles))
        else:
            sch.parallel(block)
        with_dots(sch, blocks.products, start, shape.step, target)


class IntegerWinograd(Winograd):
    """The same for products annotated ``"conv2d_winograd_integer"``, of int16 by weights ``[size^2 * OC/c, IC/2, c,
    2]`` with sums that wrap in 32 bits. ``k`` counts steps of two channels."""

    name = "cpu.conv2d_winograd_integer"
    tensorizes = "dot_words"
    op = _INTEGER


def _moved(sch: s_tir.Schedule, image: SBlockRV, lanes: int) -> SBlockRV:
    """Schedule what moves the rows and columns of the result, and all that follows; returns the result's block."""
    moving = consumers_inlined(sch, image)
    sch.set_scope(image, 0, "global")
    *loops, _, o = sch.get_loops(moving)
    _vectors(sch, o, lanes)
    sch.parallel(sch.fuse(*loops))
    return image


def _products(
    sch: s_tir.Schedule, copy: SBlockRV, products: SBlockRV, tile: tuple[int, int, int, int], lanes: int,
    fetched: tuple[int, int, int] | None, step: Step,
) -> LoopRV:
    """The matrix product of each point, in register tiles; returns the loop to initialise before."""
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
    return accumulate(sch, products, order[1], 5, lanes, unroll, fetched, step)


def _padding(sch: s_tir.Schedule, padded: SBlockRV, cb: LoopRV, pad_at: int, lanes: int) -> None:
    if pad_at == 2:
        sch.compute_inline(padded)
        return
    if pad_at == 1:
        sch.compute_at(padded, cb, preserve_unit_loops=True)
    loops = sch.get_loops(padded)
    _vectors(sch, loops[-1], lanes)
    if pad_at == 0:
        sch.parallel(sch.fuse(*loops[:3]))


def _registers(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> None:
    """Unroll the transform of one tile of vectors: two loops over points, then single steps, then the channels."""
    y, x, *_, lane = sch.get_loops(block)[-len(sch.get(block).iter_vars) :]
    _vectors(sch, lane, lanes)
    sch.unroll(y)
    sch.unroll(x)


def _vectors(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> None:
    count, width = vectors_in(int(sch.get(loop).extent), lanes)
    vectors, vector = sch.split(loop, [count, width])
    sch.unroll(vectors)
    sch.vectorize(vector)


def _seeds(shape: _Shape, machine: CpuMachine) -> Iterator[Decisions]:
    """All ways to block, each with its best register tile, by :func:`_cost`."""
    count = vectors_in(shape.oc, machine.lanes())[0]
    options = []
    for images, rows, columns in _blocks(shape):
        tiles = images * rows * columns
        for group in divisors(shape.oc_blocks, 64):
            t, oc, inefficiency = _register_tile(shape, tiles, group, count, machine)
            for spread in (0, 1):
                cost = _cost(shape, machine, tiles, group, inefficiency, spread)
                options.append((cost, images, rows, columns, group, t, oc, spread))
    options.sort()
    for _, images, rows, columns, group, t, oc, spread in options[:12]:
        yield {
            **({"images": images} if shape.n > 1 and not shape.single else {}),
            "rows": rows, "columns": columns, "group": group, "t": t, "oc": oc, "k": max(divisors(shape.ic, 4)),
            "inner": 0, "spread": spread, "pad": int(shape.padded and not (spread and shape.ic_blocks < machine.cores)),
            "prefetch": 1,
        }


def _blocks(shape: _Shape) -> list[tuple[int, int, int]]:
    """Images, rows and columns of tiles of a block: part of a row, whole rows, or whole images."""
    parts = [(1, 1, columns) for columns in divisors(shape.columns, 64) if columns != shape.columns]
    whole = [(1, rows, shape.columns) for rows in divisors(shape.rows, 64)]
    several = [images for images in divisors(shape.n, 64) if images > 1 and not shape.single]
    return parts + whole + [(images, shape.rows, shape.columns) for images in several]


def _register_tile(
    shape: _Shape, tiles: int, group: int, vectors: int, machine: CpuMachine
) -> tuple[int, int, float]:
    """Tiles and output blocks of the register tile with the least work, and that work over the ideal one."""
    best = (float("inf"), 1, 1)
    block = shape.ic_blocks * shape.ic * shape.oc * 4  # bytes of one block of weights
    load = machine.fma_per_cycle / machine.loads_per_cycle  # in multiply-adds
    for oc in divisors(group, 8):
        for t in range(1, min(tiles, _MAX_TILE) + 1):
            width = oc * vectors
            fits = t * width + min(t, width) <= accumulator_budget(machine)
            if (t, oc) != (1, 1) and not (fits and shape.step.fits(machine, t * width, width)):
                continue
            again = tiles > t and oc * block > machine.l1_bytes / 2
            streamed = again and (t < _USES or oc > _STREAMS)
            loads = load * ((_STREAMED if streamed else _LOADED) / t + _LOADED / width)
            ragged = -(-tiles // t) * t / tiles + (_RAGGED if tiles % t else 0.0)
            busy = shape.step.busy or machine.fma_per_cycle * machine.fma_latency
            short = max(1.0, busy / (t * width))
            cost = ragged * short * (shape.step.multiply + loads)
            best = min(best, (cost, t, oc))
    cost, t, oc = best
    return t, oc, cost


def _cost(
    shape: _Shape, machine: CpuMachine, tiles: int, group: int, inefficiency: float, spread: int
) -> float:
    """Rough time of one thread in multiply-adds of a vector: arithmetic, and what passes the second cache."""
    cores, item = machine.cores, 4
    points, blocks, groups = shape.size**2, shape.tiles // tiles, shape.oc_blocks // group
    inner, outer = shape.ic_blocks * shape.ic, shape.oc_blocks * shape.oc
    shared = groups if spread else blocks
    mine = -(-shared // cores) / shared  # the part of the slowest thread
    products = points * shape.tiles * inner * outer / machine.lanes() * inefficiency * mine
    a, b, c = points * tiles * inner * item, points * inner * outer * item, points * tiles * group * shape.oc * item
    room = machine.l2_bytes * 3 / 4
    near = blocks * mine * (b + a * groups)
    far = blocks * (a * groups * mine if a + c > room else 0)  # streamed past the products, which hide most of it
    far += blocks * mine * (b if spread or a + b + c > machine.l2_bytes else 0)
    spilled = blocks * (a / cores if spread else a * mine) if spread or a + c > room else 0
    spilled += 2 * blocks * mine * groups * c if c > room else 0
    meetings = 2 * blocks if spread else 1
    memory = near * _NEAR / machine.l2_rate + (far * _FAR + spilled * _SPILLED) / machine.l3_rate
    return products + (memory + meetings * _MEETING * machine.launch_cycles) * machine.fma_per_cycle


WINOGRAD, WINOGRAD_INTEGER = Winograd(), IntegerWinograd()
