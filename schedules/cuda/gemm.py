"""Tiled matrix products: a block of threads computes a tile of ``C`` from tiles of ``A`` and ``B`` in shared memory.

Each thread keeps a small tile of accumulators in registers and reads its operands from shared memory as vectors; the
tiles are fetched by all threads of the block together. Where the grid would leave most of the GPU idle, the sum is
cut over several blocks (split-k), the last of which adds the parts (:mod:`schedules.cuda.joined`). The structure is
that of Volkov and Demmel, "Benchmarking GPUs to Tune Dense Linear Algebra" (2008), and of CUTLASS's SIMT kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.cuda.common import CudaSpace, bind_leaves, ceil_div, cheapest, limits, require
from schedules.cuda.contraction import Contraction, K, M, N, contraction_of, inline_producers, normalise, operand
from schedules.machine import GpuMachine, gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["Cut", "Tile", "TiledContraction", "TiledGemm", "pad", "parts_cycles", "split_sum"]

#: elements that one shared-memory access of a thread takes (16 bytes of float32)
_FRAGMENT = 4
#: registers a thread needs beside its accumulators and operands: addresses, loop counters, predicates
_OVERHEAD_REGISTERS = 32
_SEEDS = 8
#: multiply-adds of an SM in a cycle
_LANES = 128
#: warps that an SM needs in flight, in one block or in several, to hide the latency of its memories
_WARPS = 16
#: cycles until what one block has written can be read by another, which is told of it
_TOLD = 2000
#: cycles in which a thread adds up the parts of a result that other blocks have left in the second cache, and more for
#: each part; measured on an H200
_SUM_CYCLES, _PART_CYCLES = 450, 10


@dataclass(frozen=True)
class Tile:
    """One assignment of the knobs. Sizes count elements of the normal form's ``m``, ``n`` and ``k``."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    split_k: int
    vector: int
    unroll: int

    @property
    def threads(self) -> int:
        return (self.block_m // self.thread_m) * (self.block_n // self.thread_n)

    def shared_bytes(self, bits: int) -> int:
        """Both tiles, each row of the k-major layout padded by one vector."""
        return (self.block_m + self.block_n + 2 * _FRAGMENT) * self.block_k * bits // 8

    @property
    def registers(self) -> int:
        return self.thread_m * self.thread_n + self.thread_m + self.thread_n + _OVERHEAD_REGISTERS

    def blocks(self, contraction: Contraction) -> int:
        tiles = ceil_div(contraction.size(M), self.block_m) * ceil_div(contraction.size(N), self.block_n)
        return contraction.size("b") * tiles * self.split_k


class TiledContraction(CudaSpace):
    """What the matrix product and the convolution share: everything but which functions are theirs."""

    def recognises(self, func: tirx.PrimFunc) -> bool:
        contraction = contraction_of(func)
        return contraction is not None and self.accepts(contraction)

    def accepts(self, contraction: Contraction) -> bool:
        """Whether a contraction of these sizes is this space's."""
        raise NotImplementedError

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        contraction = contraction_of(func)
        assert contraction is not None, "knobs are asked only of a space that matches"
        vectors = tuple(v for v in (1, 2, 4, 8) if v <= max(contraction.vector_a, contraction.vector_b))
        return (
            Knob("block_m", (16, 32, 64, 128)),
            Knob("block_n", (32, 64, 128)),
            Knob("block_k", (8, 16, 32)),
            Knob("thread_m", (2, 4, 8)),
            Knob("thread_n", (4, 8)),
            Knob("split_k", contraction.cuts(64)),
            Knob("vector", vectors),
            Knob("unroll", (0, 16, 64)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        contraction = contraction_of(func)
        assert contraction is not None, "seeds are asked only of a space that matches"
        knobs = {k.name: k.values for k in self.knobs(func, target)}
        knobs |= {"vector": knobs["vector"][-1:], "unroll": (16,)}  # nothing here can tell these apart
        gpu = limits(target)
        return cheapest(Tile, knobs, lambda t: _misfit(t, contraction, gpu), lambda t: estimate(t, contraction, gpu),
                        _SEEDS)

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        contraction, gpu = contraction_of(func), limits(target)
        if contraction is None:
            return None
        tile = Tile(**{f.name: decisions[f.name] for f in fields(Tile)})
        misfit = _misfit(tile, contraction, gpu)
        require(misfit is None, str(misfit))
        return estimate(tile, contraction, gpu, resident) / _LANES / gpu.hz

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint | None:
        contraction = contraction_of(func)
        if contraction is None:
            return None
        tile = Tile(**{f.name: decisions[f.name] for f in fields(Tile)})
        shared = tile.shared_bytes(contraction.bits)
        return Footprint.of(gpu_machine(target), tile.threads, tile.registers, shared, 1, shared, tensor_cores=False)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        contraction = contraction_of(sch.mod["main"])
        if contraction is None:
            raise InvalidDecision("the function must hold one sum of products that can be normalised")
        tile = Tile(**{f.name: pick(f.name) for f in fields(Tile)})
        misfit = _misfit(tile, contraction, limits(target))
        require(misfit is None, str(misfit))
        normal = normalise(sch, contraction)
        pad(sch, normal.main, contraction, (1, tile.block_m, tile.block_n, tile.block_k * tile.split_k))
        _multiply(sch, normal.main, normal.out, contraction, tile)
        bind_leaves(sch, [*normal.before, *normal.after], limits(target))


def _misfit(tile: Tile, contraction: Contraction, gpu: GpuMachine) -> str | None:
    """Why a tile can't run on a GPU, or None."""
    if tile.block_m % tile.thread_m or tile.block_n % tile.thread_n:
        return "the block's tile must be a multiple of the thread's"
    if not gpu.warp <= tile.threads <= gpu.threads_per_block:
        return f"a block must have {gpu.warp} to {gpu.threads_per_block} threads, got {tile.threads}"
    if tile.shared_bytes(contraction.bits) > gpu.shared_bytes:
        return f"the tiles must fit {gpu.shared_bytes} bytes, got {tile.shared_bytes(contraction.bits)}"
    if _held(tile) > gpu.registers_per_multiprocessor or tile.registers > gpu.registers_per_thread:
        return f"a block's registers must fit the register file, got {tile.registers} for each thread"
    if tile.split_k > 1 and tile.split_k * tile.block_k > contraction.size(K):
        return "every part of a cut sum must hold a tile"
    return None


def _held(tile: Tile) -> int:
    """Registers of a block."""
    return tile.registers * tile.threads


def estimate(tile: Tile, contraction: Contraction, gpu: GpuMachine, resident: int = 0) -> float:
    """Relative time of a tile: arithmetic with its padding, shared-memory reads, tail waves and idle threads.

    The unit is one multiply-add of one thread, of which an SM does :data:`_LANES` a cycle while about 15 bytes reach it
    from memory; only the order of tiles matters. Reckoned from data sheets, not measured.
    """
    depth = ceil_div(contraction.size(K), tile.split_k * tile.block_k) * tile.block_k
    fitting = min(gpu.threads_per_multiprocessor // tile.threads, gpu.registers_per_multiprocessor // _held(tile))
    resident = resident or max(1, min(fitting, gpu.blocks_per_multiprocessor))
    exact = tile.blocks(contraction) / gpu.multiprocessors
    waves = ceil(exact) if exact < 4 else exact + 0.5  # the tail matters less the more waves there are
    in_flight = min(resident, ceil(exact)) * tile.threads
    latency = max(1.0, _WARPS * gpu.warp / in_flight) ** 0.5
    shared = 2.0 / tile.thread_m + 2.0 / tile.thread_n
    fetch = 4.0 / tile.block_m + 4.0 / tile.block_n
    barrier = 60.0 * tile.threads / (tile.block_k * tile.block_m * tile.block_n)
    time = waves * tile.block_m * tile.block_n * depth * (1.0 + shared + fetch + barrier) * latency
    if tile.split_k > 1:
        time += _LANES * (_TOLD + parts_cycles(
            contraction, tile.split_k, (tile.block_m, tile.block_n), tile.threads, waves, gpu))
    return time


def parts_cycles(
    contraction: Contraction, parts: int, tile: tuple[int, int], threads: int, waves: float, gpu: GpuMachine
) -> float:
    """Cycles that go by with the parts of a cut sum, while blocks with tiles of so many rows and columns go through a
    multiprocessor in ``waves``: each writes a part and reads as much on average, but the last of all reads all of its
    tile's, a thread one result after another. The second cache holds them, where it is large enough."""
    rows, columns = (min(size, contraction.size(role)) for size, role in zip(tile, (M, N), strict=True))
    size = 4 * parts * contraction.size("b") * contraction.size(M) * contraction.size(N)
    rate = gpu.l2_rate if size <= gpu.l2_bytes else gpu.memory_rate
    moved = (2 * (waves - 1) + 1 + parts) * 4 * tile[0] * tile[1] * gpu.multiprocessors * gpu.hz / rate
    return moved + ceil_div(rows * columns, threads) * (_SUM_CYCLES + _PART_CYCLES * parts)


def pad(sch: s_tir.Schedule, main: Any, contraction: Contraction, whole: Sequence[int]) -> None:
    """Round the contraction up to ``whole`` tiles of batch, ``m``, ``n`` and ``k``; the fetch then reads zeros and the
    store drops what is over."""
    sizes = [contraction.size(r) for r in ("b", M, N, K)]
    uneven = [size % step != 0 for size, step in zip(sizes, whole, strict=True)]
    if any(uneven):
        sch.pad_einsum(main, list(whole))
    if any(uneven[:3]):  # the result was padded too: what cuts it back is folded into the store
        (cut,) = sch.get_consumers(main)
        sch.compute_inline(cut)


def _multiply(sch: s_tir.Schedule, main: Any, store: Any, contraction: Contraction, tile: Tile) -> None:
    def share(flat: Any) -> Any:
        _, thread = sch.split(flat, [None, tile.threads])
        sch.bind(thread, "threadIdx.x")
        return thread

    cut = Cut(tile.split_k, tile.block_m, tile.block_n, 1, share)
    main, store, lead, (m, n, k) = split_sum(sch, main, store, cut, "local")
    vm, vn = ceil_div(tile.thread_m, _FRAGMENT), ceil_div(tile.thread_n, _FRAGMENT)
    bm, m_v, m_t, m_i = sch.split(m, [None, vm, tile.block_m // tile.thread_m, tile.thread_m // vm])
    bn, n_v, n_t, n_i = sch.split(n, [None, vn, tile.block_n // tile.thread_n, tile.thread_n // vn])
    k_o, k_i = sch.split(k, [None, tile.block_k])
    sch.reorder(*lead, bm, bn, m_v, n_v, m_t, n_t, k_o, k_i, m_i, n_i)
    block = sch.fuse(*lead, bm, bn)
    thread = sch.fuse(m_t, n_t)
    sch.bind(block, "blockIdx.x")
    sch.bind(m_v, "vthread.y")
    sch.bind(n_v, "vthread.x")
    sch.bind(thread, "threadIdx.x")
    _stage(sch, main, k_o, k_i, M, contraction.run_a, min(contraction.vector_a, tile.vector), tile)
    _stage(sch, main, k_o, k_i, N, contraction.run_b, min(contraction.vector_b, tile.vector), tile)
    _write_back(sch, store, thread, contraction, tile)
    for loop in (m_i, n_i):
        sch.unroll(loop)
    if tile.unroll:
        sch.annotate(k_o, "pragma_auto_unroll_max_step", tile.unroll)
        sch.annotate(k_o, "pragma_unroll_explicit", 0)
    sch.decompose_reduction(main, k_o)


def _stage(
    sch: s_tir.Schedule, main: Any, k_o: Any, k_i: Any, rows: str, run: str, vector: int, tile: Tile
) -> None:
    """Bring an operand's tile to shared memory before each step of ``k_o`` and to registers before each ``k_i``.

    The shared tile is k-major whatever the operand's layout, so that a thread reads its rows as vectors.
    """
    index = operand(sch, main, rows)
    fetch = sch.cache_read(main, index, "shared")
    sch.compute_at(fetch, k_o, preserve_unit_loops=True)
    inline_producers(sch, fetch)
    *_, by_k, by_row = sch.get_loops(fetch)
    if run == K:
        sch.reorder(by_row, by_k)
        sch.storage_align(fetch, 0, axis=-2, factor=32, offset=_FRAGMENT)
        flat = sch.fuse(by_row, by_k)
    else:
        flat = sch.fuse(by_k, by_row)
    if vector > 1:
        _, thread, lanes = sch.split(flat, [None, tile.threads, vector])
        sch.vectorize(lanes)
    else:
        _, thread = sch.split(flat, [None, tile.threads])
    sch.bind(thread, "threadIdx.x")
    registers = sch.cache_read(main, index, "local")
    sch.compute_at(registers, k_i, preserve_unit_loops=True)
    *_, lanes = sch.get_loops(registers)
    sch.vectorize(lanes)


def _write_back(sch: s_tir.Schedule, store: Any, thread: Any, contraction: Contraction, tile: Tile) -> None:
    """Store a thread's accumulators, with the epilogue folded in, as vectors where no bound cuts one."""
    sch.reverse_compute_at(store, thread, preserve_unit_loops=True)
    *_, lanes = sch.get_loops(store)
    bits = max(tvm.runtime.DataType(str(r.source.dtype)).bits for r in sch.get(store).writes)
    whole = tile.split_k > 1 or contraction.size(N) % tile.block_n == 0  # the parts of a cut sum are stored padded
    if whole and bits == 32:
        sch.vectorize(lanes)


@dataclass(frozen=True)
class Cut:
    """How a sum is cut into ``parts``, and by whom they are added up: blocks of threads take tiles of ``m`` by ``n``,
    ``panel`` along ``m`` before the next along ``n``, and ``share`` deals the points of one out to threads, whose loop
    it returns."""

    parts: int
    m: int
    n: int
    panel: int
    share: Callable[[Any], Any]


def split_sum(
    sch: s_tir.Schedule, main: Any, out: Any, cut: Cut, scope: str
) -> tuple[Any, Any, list[Any], tuple[Any, Any, Any]]:
    """Cut a product's sum into parts, each a block's own, and keep what is added up in memory of ``scope``.

    Returns the block that multiplies, the one that stores, the loops that are blocks' alone, and those over m, n, k.
    """
    if cut.parts == 1:
        sch.set_scope(main, 0, scope)
        b, m, n, k = sch.get_loops(main)
        return main, out, [b], (m, n, k)
    *_, k = sch.get_loops(main)
    part, _ = sch.split(k, [cut.parts, None])
    partial = sch.rfactor(part, factor_axis=0)
    _add_parts(sch, main, out, cut)
    stored = sch.cache_write(partial, 0, scope)
    b, m, n, part, k = sch.get_loops(partial)
    return partial, stored, [part, b], (m, n, k)


def _add_parts(sch: s_tir.Schedule, total: Any, out: Any, cut: Cut) -> None:
    """Add up parts in their order and apply the epilogue, by blocks of threads that are numbered as those of the first
    part are: so this becomes the end of their kernel (:mod:`schedules.cuda.joined`)."""
    b, m, n = sch.get_loops(out)
    grid_m, m = sch.split(m, [None, cut.m])
    grid_n, n = sch.split(n, [None, cut.n])
    panels, along = sch.split(grid_m, [None, cut.panel])
    sch.reorder(b, panels, grid_n, along, m, n)
    sch.bind(sch.fuse(b, panels, grid_n, along), "blockIdx.x")
    sch.compute_at(total, cut.share(sch.fuse(m, n)), preserve_unit_loops=True)
    sch.set_scope(total, 0, "local")


class TiledGemm(TiledContraction):
    """Dense layers and batched matrix products whose three sizes are worth a tile."""

    name = "cuda.gemm"

    def accepts(self, contraction: Contraction) -> bool:
        sizes = [contraction.size(r) for r in (M, N, K)]
        return not contraction.windowed and contraction.group is None and min(sizes) >= 4
