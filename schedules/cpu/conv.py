"""Direct convolution in the blocked layout NCHW[c]c, with the output tile in registers.

The function holds one block annotated ``mlc.op = "conv2d_nchwc"`` that reads data ``[N, IC/c, H, W, c]`` (possibly
through a padding block) and weights ``[OC/c, IC/c, KH, KW, c, c]`` and writes ``[N, OC/c, OH, OW, c]``. After
Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures" (2018). A block
annotated ``"conv2d_phases"`` has two axes more, after the first: the phases of a transposed convolution, each with
channel blocks of its own, whose rows and columns a block after it interleaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import tvm
from tvm import s_tir, tirx

from schedules.cpu.conv_seeds import MAX_GROUPS, chunk_rows, seeds, tile_columns, tile_rows
from schedules.cpu.conv_shape import BFLOAT, BYTES, FLOATS, INTEGER, INTEGER_PHASES, TAPS, Shape, block_of, shape_of
from schedules.cpu.steps import has_dot, with_dots
from schedules.cpu.tiling import (
    accumulate,
    check_tile,
    consumers_inlined,
    divisors,
    find_annotated,
    staged_input,
    vectors_in,
)
from schedules.free import least_function
from schedules.lockstep import is_fixed
from schedules.machine import cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["CONV2D", "CONV2D_BFLOAT", "CONV2D_BYTES", "CONV2D_INTEGER", "DEPTHWISE_INTEGER"]


class Conv2d(Space):
    """Knobs: ``ow``/``oh`` output columns/rows of one register tile, ``oc`` output blocks of one register tile,
    ``rows`` output rows and ``groups`` output blocks of one parallel chunk, ``ic`` unrolling of the input channels,
    ``order`` which axis varies fastest over the parallel chunks (0: output channels, 1: rows), ``pad`` where the
    padded input is made (0: once, 1: per chunk of what varies slowest, so that whoever reads it has made it),
    ``prefetch`` whether weights are fetched one tile ahead.

    Of a pointwise convolution ``ow`` are pixels in a row of all the rows of a chunk, and where the output is one line
    ``rows`` are the pixels of a chunk.
    """

    name = "cpu.conv2d_nchwc"
    target_kind = "llvm"

    ops: tuple[str, ...] = FLOATS

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        block, shape = block_of(func), shape_of(func)
        if block is None or shape is None or block.annotation not in self.ops:
            return False
        width = vectors_in(shape.oc, cpu_machine(target).lanes())[1]
        return not shape.step.form or has_dot(block, shape.step, width, target)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = shape_of(func)
        assert shape is not None
        return (
            Knob("ow", tuple(tile_columns(shape.run(shape.oh)))),
            Knob("oh", tuple(tile_rows(shape))),
            Knob("oc", tuple(divisors(shape.oc_blocks, 8))),
            Knob("rows", tuple(chunk_rows(shape))),
            Knob("groups", tuple(divisors(shape.oc_blocks, MAX_GROUPS))),
            Knob("ic", tuple(divisors(shape.ic, 16))),
            Knob("order", (0, 1)),
            Knob("pad", (0, 1) if shape.padded else (0,)),
            Knob("prefetch", (0, 1) if shape.weight >= 0 else (0,)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape, least = shape_of(func), least_function(func)
        assert shape is not None
        smallest = None if least is None else shape_of(least)
        if smallest is not None and (smallest.oh, smallest.ow) != (shape.oh, shape.ow):
            shape = replace(shape, least=smallest.row)
        yield from seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        block, shape = find_annotated(sch, self.ops), shape_of(sch.mod["main"])
        assert block is not None and shape is not None
        lanes = cpu_machine(target).lanes()
        pad = staged_input(sch, block) if shape.padded else None
        out = consumers_inlined(sch, block)
        if shape.phased:
            _by_phase(sch, block, out, shape)
        ow_tile, oh_tile, oc_tile = pick("ow"), pick("oh"), pick("oc")
        rows, groups, unroll, order, pad_at = pick("rows"), pick("groups"), pick("ic"), pick("order"), pick("pad")
        fetched = (shape.weight, oc_tile, oc_tile) if pick("prefetch") else None
        if rows % oh_tile or groups % oc_tile:
            raise InvalidDecision("a parallel chunk must hold whole register tiles")
        count, width = vectors_in(shape.oc, lanes)
        check_tile(cpu_machine(target), ow_tile * oh_tile * oc_tile * count, unroll)
        line, along = shape.row, 1
        if shape.flat and all(is_fixed(sch, loop) for loop in sch.get_loops(out)[2:4]):
            line, rows = rows * shape.ow, 1
            _cut_into_lines(sch, block, out, shape.row, line)
        elif shape.line:  # whose length is free
            along, rows = max(1, rows // ow_tile), 1
        n, *phases, ob, oh, ow, oc = sch.get_loops(out)
        chunk_oc, outer_oc, tile_oc = sch.split(ob, [None, groups // oc_tile, oc_tile])
        chunk_oh, outer_oh, tile_oh = sch.split(oh, [None, rows // oh_tile, oh_tile])
        *lines, outer_ow, tile_ow = sch.split(ow, [None, along, ow_tile] if along > 1 else [None, ow_tile])
        pixels = (chunk_oh, *lines)
        chunks = (*pixels, *phases, chunk_oc) if order == 0 else (*phases, chunk_oc, *pixels)
        sch.reorder(n, *chunks, outer_oc, outer_oh, outer_ow, tile_oc, tile_oh, tile_ow, oc)
        vectors, vector = sch.split(oc, [count, width])
        sch.vectorize(vector)
        for loop in (tile_oc, tile_oh, tile_ow, vectors):
            sch.unroll(loop)
        if line % ow_tile:  # lowering peels the ragged tile, so that full ones test nothing
            sch.annotate(outer_ow, "pragma_loop_partition_hint", True)
        start = accumulate(sch, block, outer_ow, 5 + len(phases), lanes, unroll, fetched, shape.step)
        # not in each phase: its rows begin elsewhere in the image, and what TVM made of such copies was wrong
        if pad is not None and pad_at == 1 and (order == 0 or shape.apart or not phases):
            at = chunks[-1] if shape.apart else pixels[-1] if order == 0 else chunk_oc
            sch.compute_at(pad, at, preserve_unit_loops=True)
            sch.vectorize(sch.get_loops(pad)[-1])
            parallel = sch.fuse(n, *chunks[: chunks.index(at) + 1])
        else:
            if pad is not None:
                _parallel_padding(sch, pad)
            parallel = sch.fuse(n, *chunks)
        if int(sch.get(parallel).extent) > 1:
            sch.parallel(parallel)
        with_dots(sch, block, start, shape.step, target)


class IntegerConv2d(Conv2d):
    """The same for blocks annotated ``"conv2d_nchwc_integer"`` or ``"conv2d_phases_integer"``, whose sums run over data
    and packed weights of the forms of :mod:`schedules.intrin.dot`: uint8 and int8 ``[OC/c, IC/c, KH, KW, c/4, c, 4]``,
    or what a block has made int16 and int16 ``[OC/c, IC/c, KH, KW, c/2, c, 2]``. ``ic`` counts steps."""

    name = "cpu.conv2d_integer"
    tensorizes = "dot_"
    ops: tuple[str, ...] = (INTEGER, INTEGER_PHASES)


class ByteConv2d(IntegerConv2d):
    """Direct convolution for blocks annotated ``"conv2d_nchwc_bytes"``, whose pairwise sums saturate."""

    name = "cpu.conv2d_bytes"
    tensorizes = "dot_bytes"
    ops = (BYTES,)


class TappedConv2d(IntegerConv2d):
    """The same for blocks annotated ``"depthwise_nchwc_taps"``, of which each channel is a group of its own: uint8
    pixels with weights ``[C/c, 1, KH, KW/4, 1, c, 4]``, whose columns go in steps of four."""

    name = "cpu.depthwise_integer"
    tensorizes = "dot_taps"
    ops = (TAPS,)


class BfloatConv2d(Conv2d):
    """Direct convolution for blocks annotated ``"conv2d_nchwc_bfloat"``, of bfloat16 data and weights ``[OC/c, IC/c,
    KH, KW, c/2, c, 2]``. ``ic`` counts steps of two channels."""

    name = "cpu.conv2d_bfloat"
    tensorizes = "dot_bfloats"
    ops = (BFLOAT,)


def _by_phase(sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, out: s_tir.schedule.SBlockRV, shape: Shape) -> None:
    """Let the block that interleaves phases run through one after another.

    ``for h: B[h] = A[h % 2, h // 2]   -->   for p, y: B[y * 2 + p] = A[p, y]``
    """
    rows, columns = shape.phases
    sch.transform_block_layout(out, lambda n, b, h, w, c: (n, h % rows, w % columns, b, h // rows, w // columns, c))
    # moves nothing: indices are put in simplest form, without which a ragged tile would compute all phases
    sch.transform_layout(block, ("write", 0), lambda n, p, q, b, y, x, c: (n, p, q, b, y, x, c))


def _cut_into_lines(
    sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, out: s_tir.schedule.SBlockRV, width: int, line: int
) -> None:
    """Count pixels through rows of ``width``, and cut them into lines.

    ``for h, w: B[h, w] = A[h, w]   -->   for y, x: p = y * line + x; B[p // width, p % width] = A[p // width, ...]``

    In two steps, between which TVM finds the simplest form of what is between the blocks.
    """

    def joined(n: tirx.Var, b: tirx.Var, y: tirx.Var, x: tirx.Var, *rest: tirx.Var) -> tuple[tirx.Expr, ...]:
        return n, b, y * width + x, *rest

    def cut(n: tirx.Var, b: tirx.Var, p: tirx.Var, *rest: tirx.Var) -> tuple[tirx.Expr, ...]:
        return n, b, tirx.floordiv(p, line), tirx.floormod(p, line), *rest

    for step in (joined, cut):
        for each in (out, block):
            axes = [axis.var for axis in sch.get(each).iter_vars]
            # of their own type: lowering peels no ragged tile of a wider one
            sch.transform_block_layout(each, tirx.IndexMap.from_func(step, len(axes), index_dtype=str(axes[2].ty)))
        sch.transform_layout(block, ("write", 0), step)


def _parallel_padding(sch: s_tir.Schedule, pad: s_tir.schedule.SBlockRV) -> None:
    loops = sch.get_loops(pad)
    sch.vectorize(loops[-1])
    sch.parallel(sch.fuse(*loops[:-2]))


CONV2D, CONV2D_INTEGER, CONV2D_BYTES, CONV2D_BFLOAT = Conv2d(), IntegerConv2d(), ByteConv2d(), BfloatConv2d()
DEPTHWISE_INTEGER = TappedConv2d()
