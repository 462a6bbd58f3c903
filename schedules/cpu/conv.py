"""Direct convolution in the blocked layout NCHW[c]c, with the output tile in registers.

The function holds one block annotated ``mlc.op = "conv2d_nchwc"`` that reads data ``[N, IC/c, H, W, c]`` (possibly
through a padding block) and weights ``[OC/c, IC/c, KH, KW, c, c]`` and writes ``[N, OC/c, OH, OW, c]``. After
Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures" (2018). A block
annotated ``"conv2d_phases"`` has two axes more, after the first: the phases of a transposed convolution, each with
channel blocks of its own, whose rows and columns a block after it interleaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import s_tir, tirx

from schedules.analysis import BlockInfo, analyse, remembered
from schedules.cpu.steps import FLOAT, SATURATING, TAPPED, Step, has_dot, step_of, with_dots
from schedules.cpu.tiling import (
    OP_ANNOTATION,
    accumulate,
    check_tile,
    consumers_inlined,
    divisors,
    find_annotated,
    staged_input,
    vectors_in,
)
from schedules.free import least_function
from schedules.intrin.dot import WORDS
from schedules.lockstep import is_fixed
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["CONV2D", "CONV2D_BFLOAT", "CONV2D_BYTES", "CONV2D_INTEGER", "DEPTHWISE_INTEGER"]

_PHASES = "conv2d_phases"
_INTEGER, _BYTES, _BFLOAT = "conv2d_nchwc_integer", "conv2d_nchwc_bytes", "conv2d_nchwc_bfloat"
_TAPPED = "depthwise_nchwc_taps"
_OPS = ("conv2d_nchwc", _PHASES)
_ALL = (*_OPS, _INTEGER, _BYTES, _BFLOAT, _TAPPED)
#: bytes of a step of the sum, of the activations and of each lane's weights
_WORD = 4
#: the widest register tile, and the most rows, pixels of a line and channel blocks of a parallel chunk
_MAX_COLUMNS, _MAX_ROWS, _MAX_LINE, _MAX_GROUPS = 28, 28, 512, 64
#: register tiles of each number of channel blocks whose chunks are compared, and seeds
_TILES, _SEEDS = 3, 8
#: mispredicted branches at the begin of a row of a tile, and reads from the third level that a chunk waits for until
#: the prefetcher knows its streams
_TILE, _CHUNK = 2.0, 16.0
#: part of the time of reading weights and input that arithmetic does not hide, and of the second and third level's rate
#: that is reached beside it (measured on Zen 4: weights that each tile reads again want four pixels a vector)
_EXPOSED, _NEAR, _FAR = 0.5, 0.5, 0.6
#: Reads from the third level that a tile of several rows waits for where a row begins in a block of input channels that
#: comes from beyond the second: the waits are too short for the prefetcher. Measured on Zen 3, 192 -> 32 channels of
#: 28x28: tiles of two rows take 1.6 times as long as those of one row with as many pixels. So does each tile of a
#: pointwise convolution or a line, which reads a few pixels of a block of channels, then those of the next: 1024 -> 256
#: channels of 64x64 take 32 ms in chunks of 16 rows, 18 ms in chunks of one, whose input stays in the second level;
#: 512 -> 512 channels, 3 of 3199 pixels at stride 2, 38 and 19.
_ROW = 1.0


@dataclass(frozen=True)
class _Shape:
    """The extents of the convolution block's axes and whether its input is padded by a block of its own. ``ic`` are
    the steps of a block of input channels. Where the output is one ``line``, its pixels count as rows of one column."""

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
    stride: int
    per_group: int  # output blocks that read the same input channels
    weight: int  # number of the parameter that holds the weights, -1 if none does
    phases: tuple[int, int] = (1, 1)  # rows and columns that a transposed convolution interleaves
    step: Step = FLOAT
    line: bool = False
    least: int = 0  # pixels of the shortest row where rows are of free length, and each begins with a tile of its own

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return self.oc_blocks // self.per_group

    @property
    def flat(self) -> bool:
        """Whether the pixels that a row of tiles reads go on where the next row's begin, so that a tile may hold the
        end of one and the begin of the other."""
        made = self.padded and self.step.form != WORDS  # a block that widens leaves pixels where they are
        pointwise = self.kh == self.kw == self.stride == 1 and not made
        return self.line or (pointwise and self.phases == (1, 1))

    @property
    def apart(self) -> bool:
        """Whether no two output blocks read the same channels, so that each chunk may pad what it reads."""
        return self.step is TAPPED

    @property
    def row(self) -> int:
        """Pixels of a row of the output as the block counts them."""
        return self.oh if self.line else self.ow

    def run(self, rows: int) -> int:
        """Pixels of the output that tiles of one row run along in a chunk of ``rows``."""
        if self.least:
            return self.row
        return rows * self.ow if self.flat else self.ow


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    block = _block(func)
    extra = 2 if block is not None and block.annotation == _PHASES else 0
    if block is None or len(block.extents) < 9 + extra:
        return None
    n, oc_blocks, oh, ow, oc, ic_blocks, kh, kw, ic = (block.extents[0], *block.extents[1 + extra :][:8])
    phases = (block.extents[1], block.extents[2]) if extra else (1, 1)
    output, column, lane = (position + extra for position in (1, 3, 4))
    tapped = block.annotation == _TAPPED  # where lanes share no pixels
    data = next(a for a in block.reads if (str(a.buffer.dtype) == "uint8" if tapped else not a.depends(lane)))
    stride = data.strides[column] or data.buffer.shape[-1]
    # the blocks of a group read the same channels: the index stays until the next group
    stays = data.strides[output] == 0
    per_group = 1 if tapped else oc_blocks if stays else data.periods[output] or 1
    padded = any(b.name != block.name for b in analyse(func).producers(block))
    weights = next(a.buffer for a in block.reads if a.depends(lane) and a is not data)
    weight = next((i for i, param in enumerate(func.params) if param.same_as(weights)), -1)
    line = oh == 1 < ow and phases == (1, 1)
    if line:
        oh, ow, kh, kw = ow, oh, kw, kh
    return _Shape(
        n, oc_blocks, oh, ow, oc, ic_blocks, kh, kw, ic, padded, int(stride) // int(data.buffer.shape[-1]), per_group,
        weight, phases, {_BYTES: SATURATING, _TAPPED: TAPPED}.get(block.annotation) or step_of(weights), line,
    )


def _block(func: tirx.PrimFunc) -> BlockInfo | None:
    return next((b for b in analyse(func).blocks if b.annotation in _ALL), None)


class Conv2d(Space):
    """Knobs: ``ow``/``oh`` output columns/rows of one register tile, ``oc`` output blocks of one register tile,
    ``rows`` output rows and ``groups`` output blocks of one parallel chunk, ``ic`` unrolling of the input channels,
    ``order`` which axis varies fastest over the parallel chunks (0: output channels, 1: rows), ``pad`` where the
    padded input is made (0: once, 1: per chunk of rows), ``prefetch`` whether weights are fetched one tile ahead.

    Of a pointwise convolution ``ow`` are pixels in a row of all the rows of a chunk, and where the output is one line
    ``rows`` are the pixels of a chunk.
    """

    name = "cpu.conv2d_nchwc"
    target_kind = "llvm"

    ops: tuple[str, ...] = _OPS

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        block, shape = _block(func), _shape(func)
        if block is None or shape is None or block.annotation not in self.ops:
            return False
        width = vectors_in(shape.oc, cpu_machine(target).lanes())[1]
        return not shape.step.form or has_dot(block, shape.step, width, target)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        return (
            Knob("ow", tuple(_columns(shape.run(shape.oh)))),
            Knob("oh", tuple(_tile_rows(shape))),
            Knob("oc", tuple(divisors(shape.oc_blocks, 8))),
            Knob("rows", tuple(_chunk_rows(shape))),
            Knob("groups", tuple(divisors(shape.oc_blocks, _MAX_GROUPS))),
            Knob("ic", tuple(divisors(shape.ic, 16))),
            Knob("order", (0, 1)),
            Knob("pad", (0, 1) if shape.padded else (0,)),
            Knob("prefetch", (0, 1) if shape.weight >= 0 else (0,)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape, least = _shape(func), least_function(func)
        assert shape is not None
        smallest = None if least is None else _shape(least)
        if smallest is not None and (smallest.oh, smallest.ow) != (shape.oh, shape.ow):
            shape = replace(shape, least=smallest.row)
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        block, shape = find_annotated(sch, self.ops), _shape(sch.mod["main"])
        assert block is not None and shape is not None
        lanes = cpu_machine(target).lanes()
        pad = staged_input(sch, block) if shape.padded else None
        out = consumers_inlined(sch, block)
        if str(sch.get(block).annotations[OP_ANNOTATION]) == _PHASES:
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
        if pad is not None and pad_at == 1 and (order == 0 or shape.apart):
            at = chunks[-1] if shape.apart else pixels[-1]
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
    """The same for blocks annotated ``"conv2d_nchwc_integer"``, whose sums run over data and packed weights of the
    forms of :mod:`schedules.intrin.dot`: uint8 and int8 ``[OC/c, IC/c, KH, KW, c/4, c, 4]``, or what a block has made
    int16 and int16 ``[OC/c, IC/c, KH, KW, c/2, c, 2]``. ``ic`` counts steps."""

    name = "cpu.conv2d_integer"
    tensorizes = "dot_"
    ops = (_INTEGER,)


class ByteConv2d(IntegerConv2d):
    """The same for blocks annotated ``"conv2d_nchwc_bytes"``, whose pairs of products saturate."""

    name = "cpu.conv2d_bytes"
    tensorizes = "dot_bytes"
    ops = (_BYTES,)


class TappedConv2d(IntegerConv2d):
    """The same for blocks annotated ``"depthwise_nchwc_taps"``, of which each channel is a group of its own: uint8
    pixels with weights ``[C/c, 1, KH, KW/4, 1, c, 4]``, whose columns go in steps of four."""

    name = "cpu.depthwise_integer"
    tensorizes = "dot_taps"
    ops = (_TAPPED,)


class BfloatConv2d(Conv2d):
    """The same for blocks annotated ``"conv2d_nchwc_bfloat"``, of bfloat16 data and weights ``[OC/c, IC/c, KH, KW, c/2,
    c, 2]``. ``ic`` counts steps of two channels."""

    name = "cpu.conv2d_bfloat"
    tensorizes = "dot_bfloats"
    ops = (_BFLOAT,)


def _by_phase(sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, out: s_tir.schedule.SBlockRV, shape: _Shape) -> None:
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


def _columns(ow: int) -> list[int]:
    """Register tile widths: for each number of tiles of a row the narrowest, so that the last is the least ragged."""
    return sorted({-(-ow // tiles) for tiles in range(-(-ow // _MAX_COLUMNS), ow + 1)})


def _chunk_rows(shape: _Shape) -> list[int]:
    """Rows of a parallel chunk; a line may be one, for its length may have no divisors."""
    if shape.line:
        return sorted({*divisors(shape.oh, _MAX_LINE), shape.oh})
    return divisors(shape.oh, _MAX_ROWS)


def _tile_rows(shape: _Shape) -> list[int]:
    """Rows of a register tile."""
    return [1] if shape.flat else divisors(shape.oh, 4)


def _fits(machine: CpuMachine, pixels: int, blocks: int, vectors: int, step: Step) -> bool:
    """Whether a tile's accumulators and the operands beside them stay in registers.

    LLVM keeps the broadcast pixels of a tile with several channel blocks, else the weights of its only block. Measured
    on AVX-512: 10 x 2 and 6 x 4 run at 96% of peak, 12 x 2 at 70%. On AVX2, where a block is two vectors: 2 x 2 at 83%,
    3 x 2, which leaves one register, at 48%.
    """
    accumulators = pixels * blocks * vectors
    operands = pixels if blocks > 1 and not step.form else vectors
    registers = machine.vector_registers
    if not step.fits(machine, accumulators, blocks * vectors):
        return False
    return accumulators <= registers * 3 // 4 and accumulators + operands <= registers - 2


@dataclass(frozen=True)
class _Chunk:
    """One parallel chunk: register tiles of ``oh`` x ``ow`` pixels and ``oc`` blocks that cover ``rows`` and
    ``groups`` blocks."""

    ow: int
    oh: int
    oc: int
    rows: int
    groups: int
    order: int
    pad: int


class _Cost:
    """Cycles of a schedule: arithmetic or loads in the register tile, weights and input from the cache they fit.

    The loads of one step are the tile's pixels and its weights. The weights of a tile, its panel, are read again for
    every tile of pixels, from the second level where they leave room for the input there, else from the third; the
    chunk's input is read again for every panel.
    """

    def __init__(self, shape: _Shape, machine: CpuMachine) -> None:
        self._shape, self._machine = shape, machine
        self._vectors = vectors_in(shape.oc, machine.lanes())[0]
        self._steps = shape.ic_blocks * shape.kh * shape.kw * shape.ic
        self._block = shape.oc * self._steps * _WORD  # bytes of the weights of one channel block
        self._near, self._far = _NEAR * machine.l2_rate, _FAR * machine.l3_rate  # bytes a cycle

    def _rows(self, rows: int) -> int:
        """Bytes of the input that ``rows`` rows of the output read, in one group's channels."""
        shape = self._shape
        height, width = (rows - 1) * shape.stride + shape.kh, (shape.ow - 1) * shape.stride + shape.kw
        return height * width * (shape.oc if shape.apart else shape.ic_blocks * shape.ic * _WORD)

    def _tile(self, columns: int, chunk: _Chunk, rate: float) -> float:
        """Cycles of one register tile whose weights arrive at ``rate`` bytes a cycle."""
        machine, step, vectors, pixels = self._machine, self._shape.step, chunk.oc * self._vectors, columns * chunk.oh
        loads = vectors + pixels * -(-chunk.oc // self._shape.per_group)
        products = max(pixels * vectors, step.accumulators(machine)) * step.multiply
        cycles = max(
            products / machine.fma_per_cycle, loads / machine.loads_per_cycle, chunk.oc * self._shape.oc * _WORD / rate,
        )
        return self._steps * cycles + 2 * pixels * vectors + _TILE * machine.mispredict_cycles * chunk.oh

    def tiles(self, chunk: _Chunk, rate: float = float("inf")) -> float:
        """Cycles of the tiles of a chunk's pixels for one panel, the ragged ones included."""
        shape, run = self._shape, self._shape.run(chunk.rows)
        full, left = divmod(run, chunk.ow)
        if left and shape.least:  # the last tile is a whole one that begins earlier
            full, left = full + 1, 0
        row = full * self._tile(chunk.ow, chunk, rate) + (self._tile(left, chunk, rate) if left else 0.0)
        return chunk.rows * shape.ow / (run * chunk.oh) * row

    def _starts(self, chunk: _Chunk) -> int:
        """Where a chunk's tiles begin to read a row of a block of input channels and no prefetcher is ahead of them."""
        shape = self._shape
        if shape.flat:
            run = min(shape.run(chunk.rows), chunk.rows * shape.ow)
            return chunk.rows * shape.ow // run * -(-run // chunk.ow)
        later = chunk.rows - chunk.rows // chunk.oh  # rows but the first of each tile
        return shape.kh * later * -(-shape.ow // chunk.ow)

    def __call__(self, chunk: _Chunk) -> float:
        """Cycles of the whole convolution on all cores."""
        shape, machine = self._shape, self._machine
        room, near, far = 0.75 * machine.l2_bytes, self._near, self._far
        panel, data = chunk.oc * self._block, self._rows(chunk.rows)
        again = float("inf")
        if panel > machine.l1_bytes // 2:
            again = near if panel + self._rows(chunk.oh) <= room else far
        phases = prod(shape.phases)
        kept = shape.oc_blocks * phases if chunk.order == 0 else chunk.groups  # blocks read until the next rows
        first = near if kept * self._block <= room / 2 else far
        stays = data if chunk.order == 0 else self._rows(shape.oh)
        source = near if stays + panel <= room else far
        tiled = data if shape.flat else chunk.rows // chunk.oh * self._rows(chunk.oh)
        read = tiled / source + panel / first
        panels = chunk.groups // chunk.oc
        cycles = panels * (self.tiles(chunk, again) + read * _EXPOSED)
        cycles += _CHUNK * machine.l3_latency
        waits = shape.ic_blocks * self._starts(chunk) * _ROW * machine.l3_latency
        once = self._rows(shape.oh) + panel <= room  # the input stays while a core goes through its chunks
        lost = min(1.0, max(0.0, (stays + panel - room) / machine.l2_bytes))  # part that a panel finds gone
        cycles += 0.0 if once else waits * (panels * lost if shape.flat else 1 + (panels - 1) * lost)
        groups = shape.oc_blocks // chunk.groups * phases
        chunks, before = shape.n * (shape.oh // chunk.rows) * groups, 0.0
        if chunk.pad and shape.apart:
            cycles += data * chunk.groups / near
        elif chunk.pad:
            chunks, cycles = chunks // groups, cycles * groups + data * shape.groups / near
        elif shape.padded:
            copied = shape.n * self._rows(shape.oh) * shape.groups
            before = machine.launch_cycles + copied * (1 / near + 1 / far) / machine.cores
        if once and not shape.flat:
            before += waits * shape.n * shape.oh / chunk.rows / machine.cores
        return before + (machine.launch_cycles if chunks > 1 else 0.0) + -(-chunks // machine.cores) * cycles


def _seeds(shape: _Shape, machine: CpuMachine) -> Iterator[Decisions]:
    """The schedules that take the fewest cycles, one for each register tile."""
    cost = _Cost(shape, machine)
    vectors = vectors_in(shape.oc, machine.lanes())[0]
    columns = _columns(shape.run(shape.oh))
    fitting = [ow for ow in columns if ow <= shape.least] or columns  # a tile for every size of a range
    tiles = [
        _Chunk(ow, oh, oc, shape.oh if shape.flat else oh, oc, 0, 0)
        for ow in fitting for oh in _tile_rows(shape) for oc in divisors(shape.oc_blocks, 8)
        if _fits(machine, ow * oh, oc, vectors, shape.step)
    ] or [_Chunk(1, 1, 1, 1, 1, 0, 0)]
    # the weights of a tile of many pixels and few channels come from a near cache: keep tiles of each width
    best: list[_Chunk] = []
    for oc in sorted({tile.oc for tile in tiles}):
        best += sorted((t for t in tiles if t.oc == oc), key=lambda t: cost.tiles(t) / (t.rows * t.oc))[:_TILES]
    found = [min(_chunks(shape, tile), key=cost) for tile in best]
    for chunk in sorted(found, key=cost)[:_SEEDS]:
        yield {
            "ow": chunk.ow, "oh": chunk.oh, "oc": chunk.oc, "rows": chunk.rows, "groups": chunk.groups,
            "ic": max(divisors(shape.ic, 4)), "order": chunk.order, "pad": chunk.pad,
            "prefetch": int(_fetched_ahead(shape, machine) or _kept_apart(shape, machine, chunk)),
        }


def _fetched_ahead(shape: _Shape, machine: CpuMachine) -> bool:
    """Whether the weights are too many to wait in the second level for the next tile. Measured with weights in memory:
    2048 -> 512 channels of 49 pixels gain 20%, of 784 pixels nothing, and what fits the level loses nothing."""
    steps = shape.ic_blocks * shape.ic * shape.kh * shape.kw
    weights = prod(shape.phases) * shape.oc_blocks * shape.oc * steps * _WORD
    return shape.weight >= 0 and weights > machine.l2_bytes // 2


def _kept_apart(shape: _Shape, machine: CpuMachine, tile: _Chunk) -> bool:
    """Whether a fetch must stand between the columns of a window.

    Where a step takes all channels LLVM unrolls the columns, loads once what several of them read, and holds it: where
    that is more than there are registers, it is spilled. It keeps nothing across a fetch. Measured on AVX2, 3 channels,
    windows of 3x3 at stride 2, tiles of 6 x 1 blocks: 1.16 and 1.25 times as fast; windows of 7 and 11 columns, which
    are not unrolled, as fast.
    """
    if shape.weight < 0 or shape.step.form or max(divisors(shape.ic, 4)) < shape.ic:
        return False
    vectors = tile.oc * vectors_in(shape.oc, machine.lanes())[0]
    window = shape.kh if shape.line else shape.kw
    shared = tile.ow * window - min(tile.ow * window, (tile.ow - 1) * shape.stride + window)
    return tile.ow * tile.oh * vectors + vectors + shared * tile.oh * shape.ic > machine.vector_registers


def _chunks(shape: _Shape, tile: _Chunk) -> Iterator[_Chunk]:
    """Every way to cut the convolution into chunks of whole register tiles."""
    places = ((0, 1), (0, 0), (1, 0)) if shape.padded else ((0, 0), (1, 0))
    for order, pad in places:
        for rows in _chunk_rows(shape):
            if rows % tile.oh:
                continue
            groups = [g for g in divisors(shape.oc_blocks, _MAX_GROUPS) if g % tile.oc == 0]
            for count in groups[-1:] if pad and not shape.apart else groups:
                yield replace(tile, rows=rows, groups=count, order=order, pad=pad)


CONV2D, CONV2D_INTEGER, CONV2D_BYTES, CONV2D_BFLOAT = Conv2d(), IntegerConv2d(), ByteConv2d(), BfloatConv2d()
DEPTHWISE_INTEGER = TappedConv2d()
