"""The register tiles and parallel chunks of a direct convolution, and what they cost on a described machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from schedules.cpu.conv_shape import Shape
from schedules.cpu.steps import Step
from schedules.cpu.tiling import divisors, vectors_in
from schedules.machine import LINE_BYTES, CpuMachine
from schedules.space import Decisions

__all__ = ["MAX_GROUPS", "chunk_rows", "seeds", "tile_columns", "tile_rows"]

#: bytes of a step of the sum, of the activations and of each lane's weights
_WORD = 4
#: the widest register tile, and the most rows, pixels of a line and channel blocks of a parallel chunk
_MAX_COLUMNS, _MAX_ROWS, _MAX_LINE, MAX_GROUPS = 28, 28, 512, 64
#: register tiles of each number of channel blocks whose chunks are compared, and seeds
_TILES, _SEEDS = 3, 8
#: mispredicted branches at the begin of a row of a tile, and reads from the third level that a chunk waits for until
#: the prefetcher knows its streams
_TILE, _CHUNK = 2.0, 16.0
#: Reads from the third level that a line waits for which another core has written: tiles read a few pixels of each row
#: and block of channels, which no prefetcher is ahead of. Measured on Zen 5, 256 channels of 14x14 in bytes, whose
#: padded image two cores make: 0 to 15 us, 0 to 2 reads a line, as the host places the cores
_PASSED = 1.0
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


def tile_columns(ow: int) -> list[int]:
    """Register tile widths: for each number of tiles of a row the narrowest, so that the last is the least ragged."""
    return sorted({-(-ow // tiles) for tiles in range(-(-ow // _MAX_COLUMNS), ow + 1)})


def chunk_rows(shape: Shape) -> list[int]:
    """Rows of a parallel chunk; a line may be one, for its length may have no divisors."""
    if shape.line:
        return sorted({*divisors(shape.oh, _MAX_LINE), shape.oh})
    return divisors(shape.oh, _MAX_ROWS)


def tile_rows(shape: Shape) -> list[int]:
    """Rows of a register tile."""
    return [1] if shape.flat else divisors(shape.oh, 4)


def _fits(machine: CpuMachine, pixels: int, blocks: int, vectors: int, step: Step) -> bool:
    """Whether a tile's accumulators and the operands beside them stay in registers.

    LLVM keeps the broadcast pixels of a tile with several channel blocks, else the weights of its only block. Measured
    on AVX-512: 10 x 2 and 6 x 4 run at 96% of peak, 12 x 2 at 70%. On AVX2, where a block is two vectors: 2 x 2 at 83%,
    3 x 2, which leaves one register, at 48%. Dot products wait for their sums, not for operands: whichever are fewer
    are kept. Measured with AVX-VNNI (16 registers), 256 -> 64 channels of 56x56: 6 x 1 at 94%, 3 x 2 at 50%, one of
    whose sums goes through memory at each step.
    """
    accumulators = pixels * blocks * vectors
    operands = vectors if blocks == 1 else min(pixels, blocks * vectors) if step.form else pixels
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

    def __init__(self, shape: Shape, machine: CpuMachine) -> None:
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
        # A tile that is in flight whole begins while the one before ends. Measured on Zen 5, 64 -> 256 channels in
        # bytes, in the mean over ten ways to cut it: tiles of 272 to 320 operations take 0.97 of the time of larger
        # ones. Steps of several instructions keep those units busy that would hide it
        whole = step.multiply == 1.0 and self._steps * (pixels * vectors + loads) <= machine.window
        begin = 0.0 if whole else _TILE * machine.mispredict_cycles * chunk.oh
        return self._steps * cycles + 2 * pixels * vectors + begin

    def tiles(self, chunk: _Chunk, rate: float = float("inf")) -> float:
        """Cycles of the tiles of a chunk's pixels for one panel, the ragged ones included."""
        shape, run = self._shape, self._shape.run(chunk.rows)
        full, left = divmod(run, chunk.ow)
        if left and shape.least:  # the last tile is a whole one that begins earlier
            full, left = full + 1, 0
        row = full * self._tile(chunk.ow, chunk, rate) + (self._tile(left, chunk, rate) if left else 0.0)
        return chunk.rows * shape.ow / (run * chunk.oh) * row

    def _starts(self, chunk: _Chunk) -> int:
        """The cost of starting to read a row of a block of input channels, where no hardware prefetcher is ahead."""
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
        elif chunk.pad and chunk.order == 0:
            chunks, cycles = chunks // groups, cycles * groups + data * shape.groups / near
        elif chunk.pad:
            inside = shape.oh // chunk.rows  # each core copies all rows, also those that another has made
            chunks, cycles = chunks // inside, cycles * inside + self._rows(shape.oh) * shape.groups / far
        elif shape.padded:
            copied = shape.n * self._rows(shape.oh) * shape.groups
            before = machine.launch_cycles + copied * (1 / near + 1 / far) / machine.cores
            read = copied if chunk.order == 1 else copied / min(machine.cores, shape.n * shape.oh // chunk.rows)
            before += read / LINE_BYTES * (1 - 1 / machine.cores) * _PASSED * machine.l3_latency
        if once and not shape.flat:
            before += waits * shape.n * shape.oh / chunk.rows / machine.cores
        return before + (machine.launch_cycles if chunks > 1 else 0.0) + -(-chunks // machine.cores) * cycles


def seeds(shape: Shape, machine: CpuMachine) -> Iterator[Decisions]:
    """The schedules that take the fewest cycles, one for each register tile."""
    cost = _Cost(shape, machine)
    vectors = vectors_in(shape.oc, machine.lanes())[0]
    columns = tile_columns(shape.run(shape.oh))
    fitting = [ow for ow in columns if ow <= shape.least] or columns  # a tile for every size of a range
    tiles = [
        _Chunk(ow, oh, oc, shape.oh if shape.flat else oh, oc, 0, 0)
        for ow in fitting for oh in tile_rows(shape) for oc in divisors(shape.oc_blocks, 8)
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


def _fetched_ahead(shape: Shape, machine: CpuMachine) -> bool:
    """Whether the weights are too many to wait in the second level for the next tile. Measured with weights in memory:
    2048 -> 512 channels of 49 pixels gain 20%, of 784 pixels nothing, and what fits the level loses nothing."""
    steps = shape.ic_blocks * shape.ic * shape.kh * shape.kw
    weights = prod(shape.phases) * shape.oc_blocks * shape.oc * steps * _WORD
    return shape.weight >= 0 and weights > machine.l2_bytes // 2


def _kept_apart(shape: Shape, machine: CpuMachine, tile: _Chunk) -> bool:
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


def _chunks(shape: Shape, tile: _Chunk) -> Iterator[_Chunk]:
    """Every way to cut the convolution into chunks of whole register tiles."""
    places = [(0, 1), (0, 0), (1, 0)] if shape.padded else [(0, 0), (1, 0)]
    if shape.padded and shape.phases == (1, 1):
        places.append((1, 1))
    for order, pad in places:
        for rows in chunk_rows(shape):
            if rows % tile.oh:
                continue
            groups = [g for g in divisors(shape.oc_blocks, MAX_GROUPS) if g % tile.oc == 0]
            for count in groups[-1:] if pad and order == 0 and not shape.apart else groups:
                yield replace(tile, rows=rows, groups=count, order=order, pad=pad)
