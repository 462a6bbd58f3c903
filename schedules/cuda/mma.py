"""Matrix products on tensor cores by ``mma.sync``: 16-bit floats added up in float32, bytes in int32 (sm_80 and later).

Operands of float32 are multiplied as tf32 where the function says that they may be rounded.

A block of threads computes a tile of ``C``, each of its warps a part of it in registers. Tiles of ``A`` and ``B`` are
copied asynchronously into a ring of stages in shared memory (``cp.async``), some steps of ``k`` ahead, and fragments
are fetched (``ldmatrix``) one step ahead of the products that take them. The tiles keep the order of their operand in
memory, so that a copy takes 16 bytes where it is aligned; 16-byte pieces of a row are permuted by the row's number, so
that neither copies nor fetches meet in a bank of shared memory; rows of bytes and of float32 are padded instead. The
sums go through shared memory to a store in whole vectors, with the epilogue folded in. Blocks of threads are numbered
along narrow panels of ``C``, whose operands stay in the second cache, and the sum is cut over several blocks where the
grid would leave most of the GPU idle. The structure is that of CUTLASS's multistage kernels (``MmaMultistage``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice, product
from math import ceil, prod
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules import intrin
from schedules.cuda.common import CudaSpace, bind_leaves, ceil_div, require
from schedules.cuda.contraction import (
    PRECISION,
    Contraction,
    K,
    M,
    N,
    contraction_of,
    inline_producers,
    normalise,
    operand,
)
from schedules.cuda.gemm import Cut, pad, parts_cycles, split_sum
from schedules.cuda.memory_time import LATENCY
from schedules.intrin import mma
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["TensorCoreGemm", "WarpTile", "fills_tiles"]

_SEEDS = 4
#: bytes that a copy or a thread's access takes at most, and in which a shared row is permuted
_PIECE = 16
#: registers a thread needs beside its sums and fragments: addresses, loop counters
_OVERHEAD_REGISTERS = 32
#: and for where single elements of an image are fetched from, within its border or not
_GATHER_REGISTERS = 40
#: bytes of ``k`` that a stage has at least
_LEAST_ROW = 64
#: bytes that TVM copies at a time where a bound may cut them: it has no zeros of more bytes
_GUARDED_BYTES = 16
#: TVM's asynchronous copies have offsets of 32 bits
_MOST_BYTES = 1 << 31
#: 32-bit words that a row across ``k`` is longer: lanes of a fetch take eight neighbours of four rows
_ACROSS_OFFSET = 8
#: 32-bit words between rows of sums in shared memory: eight more than the banks, so that no two rows of a store meet
_SUMS_OFFSET = 8
#: columns of a panel of sums, whose rows lie like those of all columns, and 32-bit words that a panel is longer than a
#: multiple of the banks: threads that take eight neighbours in two accesses meet neither in a panel nor in the next
_PANEL, _PANEL_OFFSET = 32, 4
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
        sums = self.block_m * (self.block_n + _SUMS_OFFSET) * 4
        if paneled:
            sums = self.block_n // _PANEL * (self.block_m * (_PANEL + _SUMS_OFFSET) + _PANEL_OFFSET) * 4
        return max(sum(rings), sums + min(rings) if kind.width == 1 else sums)

    def _padding(self, kind: mma.Kind, block: int, across: bool) -> int:
        """Bytes that a stage of so many rows is larger than what it holds."""
        if _permutes(kind):
            return 0
        return self.depth(kind) * _ACROSS_OFFSET * 4 if kind.width == 1 and across else block * _PIECE

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


def _permutes(kind: mma.Kind) -> bool:
    """Whether rows are permuted: TVM's pass counts in eight elements of 16 bits."""
    return kind.width == 2


@dataclass(frozen=True)
class _Operand:
    """How a tile of A or B comes to the tensor cores."""

    side: str  # "a" or "b"
    role: str
    #: whether the shared tile runs along ``role``, and whether the operand does. Of bytes the tile runs along ``k``
    #: all the same, since ``ldmatrix`` transposes 16 bits
    transposed: bool
    across: bool
    vector: int  # elements of one copy


class TensorCoreGemm(CudaSpace):
    """Products of 16-bit floats, of signed bytes and of what may be tf32 whose sizes are worth a warp's tile."""

    name = "cuda.mma"
    tensorizes = "mma"
    opcodes = ("HMMA", "IMMA")

    def recognises(self, func: tirx.PrimFunc) -> bool:
        contraction, kind = contraction_of(func), _kind(func)
        if contraction is None or kind is None or max(map(_bytes, func.params)) >= _MOST_BYTES:
            return False
        return self.accepts(contraction, kind)

    def accepts(self, contraction: Contraction, kind: mma.Kind) -> bool:
        """Whether a contraction of these sizes is this space's."""
        m, n, k = (contraction.size(role) for role in (M, N, K))
        # single elements of an image cost what tensor cores save where most rows are zeros
        return fills_tiles(m, n, k, kind) and (not contraction.windowed or min(m, n) >= mma.TILE)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        contraction, kind = _known(func)
        cuts = tuple(s for s in (1, 2, 4, 8, 16) if s == 1 or contraction.size(K) // s >= 128 * kind.width)
        return (
            Knob("block_m", (64, 128, 256)),
            Knob("block_n", (64, 128, 256)),
            # of padded rows of 64 bytes, a copy of one begins in the bank in which that of the next ends
            Knob("block_k", (64, 128) if kind.width > 1 or all(_across(contraction)) else (128,)),
            Knob("warp_m", (32, 64)),
            Knob("warp_n", (32, 64)),
            Knob("stages", (2, 3, 4, 5)),
            Knob("split_k", cuts),
            Knob("panel", (1, 4, 8)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        contraction, kind = _known(func)
        knobs = {k.name: k.values for k in self.knobs(func, target)} | {"panel": (8,)}
        gpu = gpu_machine(target)
        tiles = [WarpTile(*choice) for choice in product(*(knobs[f.name] for f in fields(WarpTile)))]
        fitting = [t for t in tiles if _misfit(t, contraction, kind, gpu) is None]
        for tile in islice(sorted(fitting, key=lambda t: estimate(t, contraction, kind, gpu)), _SEEDS):
            yield {f.name: getattr(tile, f.name) for f in fields(WarpTile)}

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        gpu, tile, (contraction, kind) = gpu_machine(target), WarpTile(**decisions), _known(func)
        misfit = _misfit(tile, contraction, kind, gpu)
        require(misfit is None, str(misfit))
        return estimate(tile, contraction, kind, gpu, resident) / gpu.hz

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint:
        gpu, tile, (contraction, kind) = gpu_machine(target), WarpTile(**decisions), _known(func)
        shared = tile.shared_bytes(kind, _across(contraction), paneled=_in_panels(tile, contraction))
        return Footprint.of(gpu, tile.threads, tile.registers, shared, tile.stages, tile.stage_bytes, tensor_cores=True)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        contraction, kind = _known(sch.mod["main"])
        require(intrin.select(mma.product(kind), target) is not None,
                f"products of {kind.operand} need sm_80 or later, got {target.attrs['arch']}")
        tile = WarpTile(**{f.name: pick(f.name) for f in fields(WarpTile)})
        misfit = _misfit(tile, contraction, kind, gpu_machine(target))
        require(misfit is None, str(misfit))
        normal = normalise(sch, contraction)
        pad(sch, normal.main, contraction, (1, tile.block_m, tile.block_n, tile.padded(contraction, kind)))
        _multiply(sch, normal.main, normal.out, contraction, kind, tile)
        bind_leaves(sch, [*normal.before, *normal.after], gpu_machine(target))


def fills_tiles(m: int, n: int, k: int, kind: mma.Kind) -> bool:
    """Whether a product of these sizes is worth a warp's tile.

    Of few rows or columns most of the tile is zeros, but what counts then is how fast the other operand comes, and
    copies that are under way meanwhile are reckoned twice as fast as those of :mod:`schedules.cuda.gemm`.
    """
    long = k * _MOST_ZEROS >= _FEWEST_STEPS * _LEAST_ROW * kind.width // 4
    return long and min(m, n) >= _FEWEST_ROWS and max(m, n) >= mma.TILE


def _bytes(buffer: tirx.Buffer) -> int:
    return prod(int(extent) for extent in buffer.shape) * tvm.runtime.DataType(str(buffer.dtype)).bits // 8


def _kind(func: tirx.PrimFunc) -> mma.Kind | None:
    contraction = contraction_of(func)
    if contraction is None or contraction.types[0] != contraction.types[1]:
        return None
    return mma.kind_of(contraction.types[0], contraction.types[2], tf32=contraction.tf32)


def _known(func: tirx.PrimFunc) -> tuple[Contraction, mma.Kind]:
    contraction, kind = contraction_of(func), _kind(func)
    if contraction is None or kind is None:
        raise InvalidDecision("the function must hold one sum of products of 16-bit floats, of bytes or of tf32")
    return contraction, kind


def _across(contraction: Contraction) -> tuple[bool, bool]:
    """Whether A and B run across ``k`` in memory."""
    return contraction.run_a != K, contraction.run_b != K


def _in_panels(tile: WarpTile, contraction: Contraction) -> bool:
    """Whether sums lie in panels on their way to the store: threads that store 16 bytes of 16-bit results take twice as
    many bytes of sums."""
    return contraction.result_bits == 16 and contraction.vector_result == _PIECE // 2 and tile.split_k == 1


def _misfit(tile: WarpTile, contraction: Contraction, kind: mma.Kind, gpu: GpuMachine) -> str | None:
    """Why a tile can't run on a GPU, or None."""
    if tile.block_m % tile.warp_m or tile.block_n % tile.warp_n:
        return "the block's tile must be a multiple of the warp's"
    if not 64 <= tile.threads <= min(512, gpu.threads_per_block):
        return f"a block must have 64 to {min(512, gpu.threads_per_block)} threads, got {tile.threads}"
    shared = tile.shared_bytes(kind, _across(contraction), paneled=_in_panels(tile, contraction))
    if shared > gpu.shared_bytes:
        return f"the tiles must fit {gpu.shared_bytes} bytes, got {shared}"
    gathered = contraction.windowed and 1 in (contraction.vector_a, contraction.vector_b)
    registers = tile.registers + gathered * _GATHER_REGISTERS
    if not gpu.resident(tile.threads, registers, shared):
        return f"a block must fit a multiprocessor, got {registers} registers for each of {tile.threads} threads"
    if tile.steps(contraction, kind) < tile.stages:
        return f"a block must go through as many steps as it has stages, got {tile.steps(contraction, kind)}"
    for each, block in zip(_operands(contraction, kind, tile), (tile.block_m, tile.block_n), strict=True):
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
    shared_bytes = tile.shared_bytes(kind, _across(contraction), paneled=_in_panels(tile, contraction))
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


def _multiply(
    sch: s_tir.Schedule, main: Any, out: Any, contraction: Contraction, kind: mma.Kind, tile: WarpTile
) -> None:
    cut = Cut(tile.split_k, tile.block_m, tile.block_n, _panel(tile, contraction),
              lambda flat: _share_out(sch, flat, tile, 1))
    main, out, lead, (m, n, k) = split_sum(sch, main, out, cut, "shared.dyn")
    keep = sch.cache_write(main, 0, "warp")
    grid_m, warp_m, m_o, m_i = sch.split(m, [None, tile.block_m // tile.warp_m, tile.warp_m // mma.TILE, mma.TILE])
    grid_n, warp_n, n_o, n_i = sch.split(n, [None, tile.block_n // tile.warp_n, tile.warp_n // mma.TILE, mma.TILE])
    k_o, k_m, k_i = sch.split(k, [None, tile.depth(kind) // kind.depth, kind.depth])
    panels, along = sch.split(grid_m, [None, _panel(tile, contraction)])
    sch.reorder(*lead, panels, grid_n, along, warp_m, warp_n, k_o, k_m, m_o, n_o, m_i, n_i, k_i)
    block = sch.fuse(*lead, panels, grid_n, along)
    warp = sch.fuse(warp_m, warp_n)
    sch.bind(block, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")
    for each in _operands(contraction, kind, tile):
        _stage(sch, main, k_o, k_m, each, kind, tile)
    sch.reverse_compute_at(keep, warp, preserve_unit_loops=True)
    paneled = _in_panels(tile, contraction)
    sch.reverse_compute_at(out, block, preserve_unit_loops=True)
    _keep_sums(sch, keep, kind, paneled=paneled)
    _write_back(sch, out, tile, whole=tile.split_k > 1, columns=contraction.size(N), paneled=paneled)
    if contraction.tf32:
        sch.unannotate(main, PRECISION)  # what the intrinsic describes has none
    first = sch.decompose_reduction(main, k_o)
    *_, m_i, n_i = sch.get_loops(first)
    sch.tensorize(m_i, _use(mma.zero(kind)))
    *_, m_i, n_i, k_i = sch.get_loops(main)
    sch.tensorize(m_i, _use(mma.product(kind, b_first=not contraction.lhs_is_a)))
    last = tile.stages - 1
    # what a step's fragments cost is hidden by the products of the step before
    sch.annotate(k_m, "software_pipeline_stage", [0, 0, 1])
    sch.annotate(k_m, "software_pipeline_order", [0, 1, 2])
    sch.annotate(k_o, "software_pipeline_stage", [0, 0, last, last, last])
    sch.annotate(k_o, "software_pipeline_order", [0, 1, 2, 3, 4])
    sch.annotate(k_o, "software_pipeline_async_stages", [0])


def _use(computes: str) -> str:
    return intrin.use(intrin.PREFIX + computes)


def _panel(tile: WarpTile, contraction: Contraction) -> int:
    """The widest panel that the grid is a multiple of."""
    count = ceil_div(contraction.size(M), tile.block_m)
    return next(p for p in range(min(tile.panel, count), 0, -1) if count % p == 0)


def _operands(contraction: Contraction, kind: mma.Kind, tile: WarpTile) -> tuple[_Operand, _Operand]:
    whole_k = contraction.size(K) % tile.padded(contraction, kind) == 0
    found = []
    for side, role, block, run, vector in (
        ("a", M, tile.block_m, contraction.run_a, contraction.vector_a),
        ("b", N, tile.block_n, contraction.run_b, contraction.vector_b),
    ):
        transposed = run != K
        # bytes across k are copied one by one. Quantised models have them only where an image is kept plain, at that
        # price: weights are packed along k, two activations are multiplied as floats, images have channels last
        if kind.width == 4 and (transposed or not whole_k or contraction.size(role) % block):
            vector = 1 if transposed else min(vector, _GUARDED_BYTES)
        found.append(_Operand(side, role, transposed and kind.width < 4, transposed, vector))
    return found[0], found[1]


def _stage(
    sch: s_tir.Schedule, main: Any, k_o: Any, k_m: Any, which: _Operand, kind: mma.Kind, tile: WarpTile
) -> None:
    """Bring an operand's tile to shared memory some steps of ``k_o`` ahead, and its fragments to registers."""
    index = operand(sch, main, which.role)
    fetch = sch.cache_read(main, index, "shared.dyn")
    sch.compute_at(fetch, k_o, preserve_unit_loops=True)
    inline_producers(sch, fetch)
    transposed = which.transposed
    if not transposed:
        sch.transform_layout(fetch, ("write", 0), _turned(sch, fetch))
    *_, by_k, by_row = sch.get_loops(fetch)
    if not which.across:
        sch.reorder(by_row, by_k)
        by_k, by_row = by_row, by_k
    _share_out(sch, sch.fuse(by_k, by_row), tile, which.vector)
    if _permutes(kind):
        sch.annotate(fetch, "permuted_layout", 1)
    elif transposed:
        sch.storage_align(fetch, 0, axis=-2, factor=32, offset=_ACROSS_OFFSET)
    else:
        sch.storage_align(fetch, 0, axis=-2, factor=tile.depth(kind), offset=_PIECE * kind.width // 4)
    fragment = sch.cache_read(main, index, "warp")
    sch.compute_at(fragment, k_m, preserve_unit_loops=True)
    sch.transform_layout(fragment, ("write", 0), _in_fragments(sch, fragment, which.side, kind, transposed))
    *_, by_k, by_row = sch.get_loops(fragment)
    if not transposed:
        by_k, by_row = by_row, by_k
    k_t, k_i = sch.split(by_k, [None, kind.depth])
    row_t, row_i = sch.split(by_row, [None, mma.TILE])
    inner = (k_i, row_i) if transposed else (row_i, k_i)
    sch.reorder(k_t, row_t, *inner)
    loaded = sch.blockize(inner[0])
    if _permutes(kind):
        sch.annotate(loaded, "permuted_layout", 1)
    sch.tensorize(loaded, _use(mma.load(kind, which.side, transposed)))


def _share_out(sch: s_tir.Schedule, flat: Any, tile: WarpTile, vector: int) -> Any:
    """Deal the points of a tile out to the block's threads, ``vector`` neighbours to each; the loop over a warp's."""
    loops = sch.split(flat, [None, tile.warps, mma.WARP, vector])
    sch.bind(loops[1], "threadIdx.y")
    sch.bind(loops[2], "threadIdx.x")
    if vector > 1:
        sch.vectorize(loops[3])
    return loops[2]


def _index_map(sch: s_tir.Schedule, block: Any, change: Any) -> tirx.IndexMap:
    """The map of a block's written buffer that leaves all but the last two dimensions as they are."""
    written = sch.get(block).writes[0].source
    index = str(sch.get(block).iter_vars[0].dom.extent.ty.dtype)
    return tirx.IndexMap.from_func(
        lambda *i: [*i[:-2], *change(*i[-2:])], ndim=len(written.shape), index_dtype=index
    )


def _turned(sch: s_tir.Schedule, block: Any) -> tirx.IndexMap:
    return _index_map(sch, block, lambda k, row: [row, k])


def _in_fragments(sch: s_tir.Schedule, block: Any, side: str, kind: mma.Kind, transposed: bool) -> tirx.IndexMap:
    """Before: ``[k, row]`` if ``transposed``, else ``[row, k]``. After: ``[k / depth, row / 16, thread, element]``."""
    def change(k: Any, row: Any) -> list[Any]:
        if not transposed:
            k, row = row, k
        return [k // kind.depth, row // mma.TILE, *mma.place(kind, side, row % mma.TILE, k % kind.depth)]

    return _index_map(sch, block, change)


def _keep_sums(sch: s_tir.Schedule, keep: Any, kind: mma.Kind, *, paneled: bool) -> None:
    """Hold a warp's sums in its registers, and write them to shared memory when the last products are in."""
    def change(m: Any, n: Any) -> list[Any]:
        return [m // mma.TILE, n // mma.TILE, *mma.place_sum(m % mma.TILE, n % mma.TILE)]

    held = sch.get(keep).reads[0].source
    index = str(sch.get(keep).iter_vars[0].dom.extent.ty.dtype)
    layout = tirx.IndexMap.from_func(
        lambda *i: [*i[:-2], *change(*i[-2:])], ndim=len(held.shape), index_dtype=index
    )
    sch.transform_layout(keep, ("read", 0), layout)
    if paneled:
        panels = tirx.IndexMap.from_func(
            lambda *i: [*i[:-2], i[-1] // _PANEL, i[-2], i[-1] % _PANEL], ndim=len(held.shape), index_dtype=index)
        sch.transform_layout(keep, ("write", 0), panels)
    *_, m, n = sch.get_loops(keep)
    m_o, m_i = sch.split(m, [None, mma.TILE])
    n_o, n_i = sch.split(n, [None, mma.TILE])
    sch.reorder(m_o, n_o, m_i, n_i)
    stored = sch.blockize(m_i)
    sch.storage_align(stored, 0, axis=-2, factor=32, offset=_SUMS_OFFSET)
    if paneled:
        sch.storage_align(stored, 0, axis=-3, factor=32, offset=_PANEL_OFFSET)
    sch.tensorize(stored, _use(mma.store(kind)))


def _write_back(
    sch: s_tir.Schedule, out: Any, tile: WarpTile, *, whole: bool, columns: int, paneled: bool
) -> None:
    """Store a block's results with the epilogue folded in, as vectors where no bound cuts one."""
    regions = (*sch.get(out).reads, *sch.get(out).writes)
    widest = max(tvm.runtime.DataType(str(region.source.dtype)).bits for region in regions) // 8
    most = _PIECE // 2 if paneled else _PIECE // widest
    vector = next(v for v in (most, 2, 1) if whole or columns % v == 0)
    *_, m, n = sch.get_loops(out)
    # lanes that are served together take neighbours of one row, wherever a row of a last tile ends
    groups, n = sch.split(n, [None, 2 * _PANEL if paneled else _PANEL])
    _share_out(sch, sch.fuse(m, groups, n), tile, vector)
