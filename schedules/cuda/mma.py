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
from dataclasses import fields
from math import prod
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules import intrin
from schedules.cuda.common import CudaSpace, bind_leaves, cheapest, require
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
from schedules.cuda.gemm import Cut, pad, split_sum
from schedules.cuda.warp_tile import (
    ACROSS_OFFSET,
    PANEL,
    PANEL_OFFSET,
    PIECE,
    SUMS_OFFSET,
    Operand,
    WarpTile,
    across_of,
    estimate,
    fills_tiles,
    in_panels,
    misfit_of,
    operands_of,
    panel_of,
    permutes,
)
from schedules.intrin import mma
from schedules.machine import gpu_machine
from schedules.space import Decisions, Footprint, InvalidDecision, Knob, Pick

__all__ = ["TensorCoreGemm"]

_SEEDS = 4
#: TVM's asynchronous copies have offsets of 32 bits
_MOST_BYTES = 1 << 31


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
        return (
            Knob("block_m", (64, 128, 256)),
            Knob("block_n", (64, 128, 256)),
            # of padded rows of 64 bytes, a copy of one begins in the bank in which that of the next ends
            Knob("block_k", (64, 128) if kind.width > 1 or all(across_of(contraction)) else (128,)),
            Knob("warp_m", (32, 64)),
            Knob("warp_n", (32, 64)),
            Knob("stages", (2, 3, 4, 5)),
            Knob("split_k", contraction.cuts(128 * kind.width)),
            Knob("panel", (1, 4, 8)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        contraction, kind = _known(func)
        knobs = {k.name: k.values for k in self.knobs(func, target)} | {"panel": (8,)}
        gpu = gpu_machine(target)
        return cheapest(WarpTile, knobs, lambda t: misfit_of(t, contraction, kind, gpu),
                        lambda t: estimate(t, contraction, kind, gpu), _SEEDS)

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        gpu, tile, (contraction, kind) = gpu_machine(target), WarpTile(**decisions), _known(func)
        misfit = misfit_of(tile, contraction, kind, gpu)
        require(misfit is None, str(misfit))
        return estimate(tile, contraction, kind, gpu, resident) / gpu.hz

    def footprint(self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions) -> Footprint:
        gpu, tile, (contraction, kind) = gpu_machine(target), WarpTile(**decisions), _known(func)
        shared = tile.shared_bytes(kind, across_of(contraction), paneled=in_panels(tile, contraction))
        return Footprint.of(gpu, tile.threads, tile.registers, shared, tile.stages, tile.stage_bytes, tensor_cores=True)

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        contraction, kind = _known(sch.mod["main"])
        require(intrin.select(mma.product(kind), target) is not None,
                f"products of {kind.operand} need sm_80 or later, got {target.attrs['arch']}")
        tile = WarpTile(**{f.name: pick(f.name) for f in fields(WarpTile)})
        misfit = misfit_of(tile, contraction, kind, gpu_machine(target))
        require(misfit is None, str(misfit))
        normal = normalise(sch, contraction)
        pad(sch, normal.main, contraction, (1, tile.block_m, tile.block_n, tile.padded(contraction, kind)))
        _multiply(sch, normal.main, normal.out, contraction, kind, tile)
        bind_leaves(sch, [*normal.before, *normal.after], gpu_machine(target))


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


def _multiply(
    sch: s_tir.Schedule, main: Any, out: Any, contraction: Contraction, kind: mma.Kind, tile: WarpTile
) -> None:
    cut = Cut(tile.split_k, tile.block_m, tile.block_n, panel_of(tile, contraction),
              lambda flat: _share_out(sch, flat, tile, 1))
    main, out, lead, (m, n, k) = split_sum(sch, main, out, cut, "shared.dyn")
    keep = sch.cache_write(main, 0, "warp")
    grid_m, warp_m, m_o, m_i = sch.split(m, [None, tile.block_m // tile.warp_m, tile.warp_m // mma.TILE, mma.TILE])
    grid_n, warp_n, n_o, n_i = sch.split(n, [None, tile.block_n // tile.warp_n, tile.warp_n // mma.TILE, mma.TILE])
    k_o, k_m, k_i = sch.split(k, [None, tile.depth(kind) // kind.depth, kind.depth])
    panels, along = sch.split(grid_m, [None, panel_of(tile, contraction)])
    sch.reorder(*lead, panels, grid_n, along, warp_m, warp_n, k_o, k_m, m_o, n_o, m_i, n_i, k_i)
    block = sch.fuse(*lead, panels, grid_n, along)
    warp = sch.fuse(warp_m, warp_n)
    sch.bind(block, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")
    for each in operands_of(contraction, kind, tile):
        _stage(sch, main, k_o, k_m, each, kind, tile)
    sch.reverse_compute_at(keep, warp, preserve_unit_loops=True)
    paneled = in_panels(tile, contraction)
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


def _stage(
    sch: s_tir.Schedule, main: Any, k_o: Any, k_m: Any, which: Operand, kind: mma.Kind, tile: WarpTile
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
    if permutes(kind):
        sch.annotate(fetch, "permuted_layout", 1)
    elif transposed:
        sch.storage_align(fetch, 0, axis=-2, factor=32, offset=ACROSS_OFFSET)
    else:
        sch.storage_align(fetch, 0, axis=-2, factor=tile.depth(kind), offset=PIECE * kind.width // 4)
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
    if permutes(kind):
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
            lambda *i: [*i[:-2], i[-1] // PANEL, i[-2], i[-1] % PANEL], ndim=len(held.shape), index_dtype=index)
        sch.transform_layout(keep, ("write", 0), panels)
    *_, m, n = sch.get_loops(keep)
    m_o, m_i = sch.split(m, [None, mma.TILE])
    n_o, n_i = sch.split(n, [None, mma.TILE])
    sch.reorder(m_o, n_o, m_i, n_i)
    stored = sch.blockize(m_i)
    sch.storage_align(stored, 0, axis=-2, factor=32, offset=SUMS_OFFSET)
    if paneled:
        sch.storage_align(stored, 0, axis=-3, factor=32, offset=PANEL_OFFSET)
    sch.tensorize(stored, _use(mma.store(kind)))


def _write_back(
    sch: s_tir.Schedule, out: Any, tile: WarpTile, *, whole: bool, columns: int, paneled: bool
) -> None:
    """Store a block's results with the epilogue folded in, as vectors where no bound cuts one."""
    regions = (*sch.get(out).reads, *sch.get(out).writes)
    widest = max(tvm.runtime.DataType(str(region.source.dtype)).bits for region in regions) // 8
    most = PIECE // 2 if paneled else PIECE // widest
    vector = next(v for v in (most, 2, 1) if whole or columns % v == 0)
    *_, m, n = sch.get_loops(out)
    # lanes that are served together take neighbours of one row, wherever a row of a last tile ends
    groups, n = sch.split(n, [None, 2 * PANEL if paneled else PANEL])
    _share_out(sch, sch.fuse(m, groups, n), tile, vector)
