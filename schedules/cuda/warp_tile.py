"""Tiles of matrix products by ``mma.sync``: what they ask of a GPU, and how long a product takes with them.

The kernel is :mod:`schedules.cuda.mma`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from schedules.cuda.common import ceil_div
from schedules.cuda.contraction import Contraction, K, M, N
from schedules.cuda.gemm import parts_cycles
from schedules.cuda.memory_time import LATENCY
from schedules.intrin import mma
from schedules.machine import GpuMachine

__all__ = [
    "ACROSS_OFFSET", "PANEL", "PANEL_OFFSET", "PIECE", "SUMS_OFFSET", "Operand", "WarpTile", "across_of", "estimate",
    "fills_tiles", "in_panels", "misfit_of", "operands_of", "panel_of", "permutes",
]

#: bytes that a copy or a thread's access takes at most, and in which a shared row is permuted
PIECE = 16
#: registers a thread needs beside its sums and fragments: addresses, loop counters
_OVERHEAD_REGISTERS = 32
#: and for where single elements of an image are fetched from, within its border or not
_GATHER_REGISTERS = 40
#: bytes of ``k`` that a stage has at least
_LEAST_ROW = 64
#: bytes that TVM copies at a time where a bound may cut them: it has no zeros of more bytes
_GUARDED_BYTES = 16
#: 32-bit words that a row across ``k`` is longer: lanes of a fetch take eight neighbours of four rows
ACROSS_OFFSET = 8
#: 32-bit words between rows of sums in shared memory: eight more than the banks, so that no two rows of a store meet
SUMS_OFFSET = 8
#: columns of a panel of sums, whose rows lie like those of all columns, and 32-bit words that a panel is longer than a
#: multiple of the banks: threads that take eight neighbours in two accesses meet neither in a panel nor in the next
PANEL, PANEL_OFFSET = 32, 4
#: multiply-adds of 16-bit floats that ``mma.sync`` does in a cycle at most, however fast other instructions are
_LANES = 1024
#: a pipeline has two steps at least; a sum of which more than so many times its length would be zeros has no seed here:
#: tensor cores do 16 times as much as other units, copies and stores the same
_FEWEST_STEPS, _MOST_ZEROS = 2, 8
#: rows, or columns, of a product that are worth a tile
_FEWEST_ROWS = 4
#: warps that keep a multiprocessor's four tensor cores busy, and cycles until a copy from the second cache lands
_WARPS, _LATENCY = 8, 600
#: the part of the shorter of products and fetches that the longer does not hide where a multiprocessor has one block,
#: whose warps wait for each other at each step, and where it has several; measured on an H200
_ALONE, _BESIDE = 0.75, 0.1
#: instructions of a copy of a window's elements, and of any other; multiprocessors issue four in a cycle, and tensor
#: cores wait for so much of the time of those that copy (measured there, too)
_WINDOW, _PLAIN, _ISSUED, _FELT = 25, 8, 4, 0.8
#: bytes that shared memory moves in a cycle
_SHARED_RATE = 128


@dataclass(frozen=True)
class WarpTile:
    """One assignment of the knobs: tiles of a block and of a warp, in elements, and ``block_k`` in bytes."""

    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    stages: int
    split_k: int
    panel: int  # blocks along ``m`` that are numbered before the next along ``n``

    @property
    def warps(self) -> int:
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def threads(self) -> int:
        return self.warps * mma.WARP

    def depth(self, kind: mma.Kind) -> int:
        """Elements of ``k`` in a stage."""
        return self.block_k * kind.width // 4

    @property
    def registers(self) -> int:
        """Of a thread: its sums, and the fragments of two steps, 16 by 32 bytes in four registers."""
        fragments = (self.warp_m + self.warp_n) // mma.TILE * 4
        return self.warp_m * self.warp_n // mma.WARP + 2 * fragments + _OVERHEAD_REGISTERS

    @property
    def stage_bytes(self) -> int:
        """Of both tiles, rows of bytes with their padding."""
        return (self.block_m + self.block_n) * self.block_k

    def shared_bytes(
        self, kind: mma.Kind, across: tuple[bool, bool] = (False, False), *, paneled: bool = False
    ) -> int:
        """The rings of stages, or the sums after them; ``across``: whether A and B run across ``k`` in memory;
        ``paneled``: whether the sums lie in panels. Sums of the operands' own type TVM puts in the place of one ring
        alone, beside the other."""
        rings = [
            self.stages * (block * self.block_k + self._padding(kind, block, runs))
            for block, runs in zip((self.block_m, self.block_n), across, strict=True)
        ]
        sums = self.block_m * (self.block_n + SUMS_OFFSET) * 4
        if paneled:
            sums = self.block_n // PANEL * (self.block_m * (PANEL + SUMS_OFFSET) + PANEL_OFFSET) * 4
        return max(sum(rings), sums + min(rings) if kind.width == 1 else sums)

    def _padding(self, kind: mma.Kind, block: int, across: bool) -> int:
        """Bytes that a stage of so many rows is larger than what it holds."""
        if permutes(kind):
            return 0
        return self.depth(kind) * ACROSS_OFFSET * 4 if kind.width == 1 and across else block * PIECE

    def blocks(self, contraction: Contraction) -> int:
        tiles = ceil_div(contraction.size(M), self.block_m) * ceil_div(contraction.size(N), self.block_n)
        return contraction.size("b") * tiles * self.split_k

    def steps(self, contraction: Contraction, kind: mma.Kind) -> int:
        """Stages that a block goes through, of a short sum two, with zeros in what it lacks."""
        return max(_FEWEST_STEPS, ceil_div(contraction.size(K), self.split_k * self.depth(kind)))

    def padded(self, contraction: Contraction, kind: mma.Kind) -> int:
        """What the sum's length is made a multiple of."""
        whole = self.split_k * self.depth(kind)
        return whole * (_FEWEST_STEPS if contraction.size(K) <= whole else 1)


@dataclass(frozen=True)
class Operand:
    """How a tile of A or B comes to the tensor cores."""

    side: str  # "a" or "b"
    role: str
    #: whether the shared tile runs along ``role``, and whether the operand does. Of bytes the tile runs along ``k``
    #: all the same, since ``ldmatrix`` transposes 16 bits
    transposed: bool
    across: bool
    vector: int  # elements of one copy


def fills_tiles(m: int, n: int, k: int, kind: mma.Kind) -> bool:
    """Whether a product of these sizes is worth a warp's tile.

    Of few rows or columns most of the tile is zeros, but what counts then is how fast the other operand comes, and
    copies that are under way meanwhile are reckoned twice as fast as those of :mod:`schedules.cuda.gemm`.
    """
    long = k * _MOST_ZEROS >= _FEWEST_STEPS * _LEAST_ROW * kind.width // 4
    return long and min(m, n) >= _FEWEST_ROWS and max(m, n) >= mma.TILE


def permutes(kind: mma.Kind) -> bool:
    """Whether rows are permuted: TVM's pass counts in eight elements of 16 bits."""
    return kind.width == 2


def across_of(contraction: Contraction) -> tuple[bool, bool]:
    """Whether A and B run across ``k`` in memory."""
    return contraction.run_a != K, contraction.run_b != K


def in_panels(tile: WarpTile, contraction: Contraction) -> bool:
    """Whether sums lie in panels on their way to the store: threads that store 16 bytes of 16-bit results take twice as
    many bytes of sums. Of fewer columns than a panel has, TVM would keep no more than these, where whole tiles are
    stored."""
    narrow = contraction.size(N) < PANEL
    return contraction.result_bits == 16 and contraction.vector_result == PIECE // 2 and tile.split_k == 1 and (
        not narrow)


def panel_of(tile: WarpTile, contraction: Contraction) -> int:
    """The widest panel that the grid is a multiple of, whatever its size."""
    if contraction.free:
        return 1
    count = ceil_div(contraction.size(M), tile.block_m)
    return next(p for p in range(min(tile.panel, count), 0, -1) if count % p == 0)


def operands_of(contraction: Contraction, kind: mma.Kind, tile: WarpTile) -> tuple[Operand, Operand]:
    whole_k = contraction.size(K) % tile.padded(contraction, kind) == 0
    found = []
    for side, role, block, run, vector in (
        ("a", M, tile.block_m, contraction.run_a, contraction.vector_a),
        ("b", N, tile.block_n, contraction.run_b, contraction.vector_b),
    ):
        transposed = run != K
        # bytes across k are copied one by one. Quantised models have them only where an image is kept plain, at that
        # price: weights are packed along k, two activations are multiplied as halves, images have channels last
        if kind.width == 4 and (transposed or not whole_k or contraction.size(role) % block):
            vector = 1 if transposed else min(vector, _GUARDED_BYTES)
        found.append(Operand(side, role, transposed and kind.width < 4, transposed, vector))
    return found[0], found[1]


def misfit_of(tile: WarpTile, contraction: Contraction, kind: mma.Kind, gpu: GpuMachine) -> str | None:
    """Why a tile can't run on a GPU, or None."""
    if tile.block_m % tile.warp_m or tile.block_n % tile.warp_n:
        return "the block's tile must be a multiple of the warp's"
    if not 64 <= tile.threads <= min(512, gpu.threads_per_block):
        return f"a block must have 64 to {min(512, gpu.threads_per_block)} threads, got {tile.threads}"
    shared = tile.shared_bytes(kind, across_of(contraction), paneled=in_panels(tile, contraction))
    if shared > gpu.shared_bytes:
        return f"the tiles must fit {gpu.shared_bytes} bytes, got {shared}"
    gathered = contraction.windowed and 1 in (contraction.vector_a, contraction.vector_b)
    registers = tile.registers + gathered * _GATHER_REGISTERS
    if not gpu.resident(tile.threads, registers, shared):
        return f"a block must fit a multiprocessor, got {registers} registers for each of {tile.threads} threads"
    if tile.steps(contraction, kind) < tile.stages:
        return f"a block must go through as many steps as it has stages, got {tile.steps(contraction, kind)}"
    for each, block in zip(operands_of(contraction, kind, tile), (tile.block_m, tile.block_n), strict=True):
        if block * tile.depth(kind) % (tile.threads * each.vector):
            return f"the copies of a tile along {each.role} must be shared out evenly"
    return None


def estimate(
    tile: WarpTile, contraction: Contraction, kind: mma.Kind, gpu: GpuMachine, resident: int = 0
) -> float:
    """Cycles of a product: whichever of tensor cores, shared memory and second cache is slowest, longer where too few
    bytes are on the way to hide latencies, times the rounds of blocks; but no less than memory takes for the operands.

    The form is reckoned from data sheets. How far products, fetches and the arithmetic of copies hide each other is
    fitted to 19 products and convolutions on an H200.
    """
    steps, size = tile.steps(contraction, kind), 4 // kind.width
    shared_bytes = tile.shared_bytes(kind, across_of(contraction), paneled=in_panels(tile, contraction))
    resident = resident or max(1, gpu.resident(tile.threads, tile.registers, shared_bytes))
    exact = tile.blocks(contraction) / gpu.multiprocessors
    rounds = ceil(exact) if exact < 4 else exact + 0.5  # the tail matters less the more rounds there are
    here = min(resident, ceil(exact))
    products = tile.block_m * tile.block_n * tile.depth(kind) * size / 2 / min(_LANES, gpu.tensor_lanes)
    fetched = tile.warps * (tile.warp_m + tile.warp_n) * tile.block_k
    shared = (fetched + tile.stage_bytes) / _SHARED_RATE
    busy = max(products, shared) + min(products, shared) * (_ALONE if here == 1 else _BESIDE)
    busy = (busy + _FELT * _copying(tile, contraction, kind)) * max(1.0, _WARPS / (here * tile.warps)) ** 0.5
    rate = gpu.l2_rate / gpu.multiprocessors / gpu.hz
    on_the_way = here * (tile.stages - 1) * tile.stage_bytes
    late = max(1.0, rate * _LATENCY / on_the_way) if on_the_way else 2.0
    ends = _LATENCY + 2 * tile.block_m * tile.block_n * 4 / _SHARED_RATE
    # where a multiprocessor holds as many blocks anyway, more stages are ready for what is late
    step = max(busy, tile.stage_bytes / rate * late) * (1 + 0.1 / tile.stages)
    time = max(rounds * (steps * step + ends / here), _from_memory(tile, contraction, kind, gpu, here))
    if tile.split_k > 1:
        time += 3 * _LATENCY + parts_cycles(
            contraction, tile.split_k, (tile.block_m, tile.block_n), tile.threads, rounds, gpu)
    return time


def _copying(tile: WarpTile, contraction: Contraction, kind: mma.Kind) -> float:
    """Cycles in which a step's copies are issued."""
    instructions = 0.0
    for rows, vector, windowed in ((tile.block_m, contraction.vector_a, contraction.windowed),
                                   (tile.block_n, contraction.vector_b, False)):
        instructions += rows * tile.depth(kind) / vector / mma.WARP * (_WINDOW if windowed else _PLAIN)
    return instructions / _ISSUED


def _from_memory(tile: WarpTile, contraction: Contraction, kind: mma.Kind, gpu: GpuMachine, here: int) -> float:
    """Cycles until each operand has come from memory once, with what all blocks have on the way."""
    m, n, k, batch = (contraction.size(role) for role in (M, N, K, "b"))
    operands = batch * k * (n if contraction.windowed else m + n) * 4 // kind.width  # windows overlap
    real = (min(m, tile.block_m) + min(n, tile.block_n)) / (tile.block_m + tile.block_n)
    blocks = min(tile.blocks(contraction), gpu.multiprocessors * here)
    on_the_way = blocks * max(1, tile.stages - 1) * tile.stage_bytes * real
    return operands * max(1.0 / gpu.memory_rate, LATENCY / on_the_way) * gpu.hz
