"""Matrix products with the output tile in registers: dense with packed weights, matmul, batched matmul.

The function holds one contraction block that multiplies two buffers and sums over one axis. The second operand is
packed as ``[N/n, K, n]``, or plain as ``[..., K, N]`` or ``[..., N, K]``, which the function may pack itself; the
first one is ``[..., M, K]`` or ``[..., K, M]``. Everything before the last two output axes is a batch. Blocking after
Goto and van de Geijn (2008).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from schedules.analysis import remembered
from schedules.cpu.common import InjectiveTile, schedule_injective
from schedules.cpu.tiling import accumulate, check_tile, consumers_inlined, divisors, tile_fits
from schedules.lowering import lines_per_step
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["GEMM"]

#: rows of the first operand from which a copy of the second one is cheap beside the product
_PACKED_ROWS = 256
#: rows from which a copy pays where vectors could not run along its columns otherwise
_COPIED_ROWS = 8


@dataclass(frozen=True)
class _Shape:
    """``[batch, m, k] x [batch, k, n]``; ``packed`` is the width of a packed weight's block, 0 for a plain operand.
    ``weight`` is the number of the parameter that holds the packed weight, -1 if none does. ``transposed`` tells for
    the two operands whether the sum runs along their other axis: ``[k, m]`` and ``[n, k]``. ``separate`` is False where
    both are the same buffer."""

    batch: int
    m: int
    n: int
    k: int
    packed: int
    weight: int
    transposed: tuple[bool, bool]
    separate: bool
    dtype: str


def _read(sch: s_tir.Schedule) -> tuple[s_tir.schedule.SBlockRV, _Shape] | None:
    """The one contraction block and its extents, if the function is a product that this space schedules."""
    reductions = []
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        kinds = [v.iter_type for v in sch.get(block).iter_vars]
        if any(kind == tirx.IterVar.CommReduce for kind in kinds):
            reductions.append(block)
    if len(reductions) != 1:
        return None
    block = reductions[0]
    stmt = sch.get(block)
    *spatial, reduce = stmt.iter_vars
    if len(spatial) < 2 or reduce.iter_type != tirx.IterVar.CommReduce:
        return None
    if any(v.iter_type != tirx.IterVar.DataPar for v in spatial):
        return None
    operands = _operands(stmt, reduce)
    if operands is None:
        return None
    left, right = operands
    n_axis, m_axis = spatial[-1].var, spatial[-2].var
    extents = [int(v.dom.extent) for v in spatial]
    batch = 1
    for extent in extents[:-2]:
        batch *= extent
    left_turned = _order(left, m_axis, reduce.var)
    right_turned = _order(right, reduce.var, n_axis)
    packed = 0
    if len(right.indices) == 3 and _is(right.indices[1], reduce.var) and _uses(right.indices[0], n_axis):
        packed, right_turned = int(right.source.shape[-1]), False
    if left_turned is None or right_turned is None:
        return None
    params = sch.mod["main"].params
    weight = next((i for i, param in enumerate(params) if packed and param.same_as(right.source)), -1)
    depth = int(reduce.dom.extent)
    shape = _Shape(
        batch, extents[-2], extents[-1], depth, packed, weight, (left_turned, right_turned),
        not left.source.same_as(right.source), str(left.source.dtype),
    )
    return block, shape


def _order(load: tvm.ir.TensorLoad, row: tirx.Var, column: tirx.Var) -> bool | None:
    """Whether a load ends in ``[column, row]`` instead of ``[row, column]``; None where it ends in neither."""
    if _is(load.indices[-2], row) and _is(load.indices[-1], column):
        return False
    return True if _is(load.indices[-2], column) and _is(load.indices[-1], row) else None


def _is(expr: tirx.Expr, var: tirx.Var) -> bool:
    return isinstance(expr, tirx.Var) and expr.same_as(var)


def _uses(expr: tirx.Expr, var: tirx.Var) -> bool:
    return any(v.same_as(var) for v in tirx.analysis.undefined_vars(expr))


def _operands(stmt: s_tir.SBlock, reduce: tirx.IterVar) -> tuple[tvm.ir.TensorLoad, tvm.ir.TensorLoad] | None:
    """The two loads of ``C = C + A * B``, that of the left operand first."""
    body = stmt.body
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, tirx.Add):
        return None
    product = body.value.b
    if not isinstance(product, tirx.Mul):
        return None
    left, right = product.a, product.b
    if not (isinstance(left, tvm.ir.TensorLoad) and isinstance(right, tvm.ir.TensorLoad)):
        return None
    if len(left.indices) < 2 or len(right.indices) < 2 or not str(left.source.dtype).startswith("float"):
        return None
    return left, right


class Gemm(Space):
    """Knobs: ``m`` rows and ``n`` columns of the register tile, ``mb`` row tiles and ``nb`` column tiles of one
    parallel chunk, ``k`` unrolling of the sum, ``order`` which axis varies fastest over the parallel chunks
    (0: columns, 1: rows), ``inner`` which tile loop is inside a chunk (0: columns, 1: rows), ``prefetch`` whether a
    packed weight is fetched one column of tiles ahead, ``pack`` whether the
    second operand is copied into panels before all else.
    """

    name = "cpu.gemm"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        shape = _shape(func)
        return shape is not None and (_packable(shape) or not (shape.transposed[1] or shape.n % 4))

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        machine = cpu_machine(target)
        columns, rows = _columns(shape, machine), _rows(shape)
        return (
            Knob("m", tuple(rows)),
            Knob("n", tuple(columns)),
            Knob("mb", tuple(sorted({d for r in rows for d in divisors(-(-shape.m // r), 64)}))),
            Knob("nb", tuple(sorted({d for c in columns for d in divisors(-(-shape.n // c), 64)}))),
            Knob("k", tuple(divisors(shape.k, 8))),
            Knob("order", (0, 1)),
            Knob("inner", (0, 1)),
            Knob("prefetch", (0, 1) if shape.weight >= 0 else (0,)),
            Knob("pack", _packs(shape, machine)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _shape(func)
        assert shape is not None
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        found = _read(sch)
        assert found is not None
        block, shape = found
        machine = cpu_machine(target)
        lanes = machine.lanes(shape.dtype)
        for producer in sch.get_producers(block):
            sch.compute_inline(producer)
        m_tile, n_tile, mb, nb = pick("m"), pick("n"), pick("mb"), pick("nb")
        unroll, order, inner, prefetch = pick("k"), pick("order"), pick("inner"), pick("prefetch")
        if -(-shape.m // m_tile) % mb or -(-shape.n // n_tile) % nb:
            raise InvalidDecision("a parallel chunk must hold whole register tiles")
        check_tile(machine, m_tile * -(-n_tile // lanes), unroll)
        panels = _packed(sch, block, shape, n_tile, _padded(shape, machine)) if pick("pack") else None
        out = consumers_inlined(sch, block)
        *batch, i, j = sch.get_loops(out)
        chunk_i, outer_i, tile_i = sch.split(i, [None, mb, m_tile])
        width = min(lanes, n_tile)
        chunk_j, outer_j, vectors, vector = sch.split(j, [None, nb, n_tile // width, width])
        chunks = (chunk_i, chunk_j) if order == 0 else (chunk_j, chunk_i)
        tiles = (outer_i, outer_j) if inner == 0 else (outer_j, outer_i)
        sch.reorder(*batch, *chunks, *tiles, tile_i, vectors, vector)
        sch.vectorize(vector)
        sch.unroll(vectors)
        sch.unroll(tile_i)
        if shape.m % m_tile:  # lowering peels the ragged tile, so that full ones test nothing
            sch.annotate(outer_i, "pragma_loop_partition_hint", True)
        if shape.n % n_tile:
            sch.annotate(outer_j, "pragma_loop_partition_hint", True)
        blocks = n_tile // shape.packed if shape.packed else 0
        fetched = (shape.weight, blocks, blocks) if prefetch and n_tile % shape.packed == 0 else None
        start = accumulate(sch, block, tiles[-1], len(batch) + 2, width, unroll, fetched)
        sch.parallel(sch.fuse(*batch, *chunks))
        sch.decompose_reduction(block, start)
        if panels is not None:
            schedule_injective(sch, panels, machine, InjectiveTile())


def _packed(
    sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, shape: _Shape, tile: int, padded: bool
) -> s_tir.schedule.SBlockRV:
    """Copy the second operand into panels that a register tile reads in one stream; returns the copying block.

    ``B[k, j]   -->   panel[j / tile, k, j % tile]``, with zeros up to whole tiles if ``padded``. The first operand, of
    which single values are broadcast, gains nothing by that, even where it is transposed.
    """
    turned = shape.transposed[1]

    def panel(*index: tirx.Var) -> tuple[tirx.Expr, ...]:
        *batch, k, j = (*index[:-2], index[-1], index[-2]) if turned else index
        return (*batch, tirx.floordiv(j, tile), k, tirx.floormod(j, tile))

    if padded:
        sch.pad_einsum(block, [1] * (len(sch.get_loops(block)) - 2) + [tile, 1])
        (copied,) = sch.get_producers(block)
    else:
        copied = sch.cache_read(block, 1, "global")
    sch.transform_layout(block, ("read", 1), panel)
    return copied


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    found = _read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


def _packable(shape: _Shape) -> bool:
    """Whether the function may copy its second operand, and has the rows to pay for that."""
    return not shape.packed and shape.separate and shape.m >= _COPIED_ROWS


def _padded(shape: _Shape, machine: CpuMachine) -> bool:
    """Whether the columns must be padded to whole vectors; four or eight make a vector of their own."""
    return _packable(shape) and bool(shape.n % machine.lanes(shape.dtype)) and shape.n not in (4, 8)


def _packs(shape: _Shape, machine: CpuMachine) -> tuple[int, ...]:
    """Whether to pack the second operand, best first: where it is read in short pieces far apart, often enough to pay
    for a copy."""
    if not _packable(shape):
        return (0,)
    if shape.transposed[1] or _padded(shape, machine):
        return (1,)  # without a copy no vector could run along its columns
    return (1, 0) if shape.k * shape.n * 4 > machine.l2_bytes and shape.m >= _PACKED_ROWS else (0, 1)


def _columns(shape: _Shape, machine: CpuMachine) -> list[int]:
    """Tile widths: whole vectors where they divide or are padded, else the widest part of one that does."""
    lanes = machine.lanes(shape.dtype)
    if _padded(shape, machine):
        return [v * lanes for v in range(1, min(8, -(-shape.n // lanes)) + 1)]
    if shape.n % lanes == 0:
        return [v * lanes for v in divisors(shape.n // lanes, 8)]
    width = next(w for w in (lanes // 2, lanes // 4, 4) if w and shape.n % w == 0)
    return [v * width for v in divisors(shape.n // width, 8) if v * width <= 8 * lanes]


def _rows(shape: _Shape) -> list[int]:
    exact = divisors(shape.m, 16)
    # with a ragged last tile: few rows of one where there are only few, else nothing that shows
    ragged = {4, 6, 8} if exact[-1] < min(shape.m, 4) else {6, 8, 12} if shape.m >= 64 else set()
    return sorted({*exact, *ragged})


def _seeds(shape: _Shape, machine: CpuMachine) -> Iterator[Decisions]:
    """Register tiles with their chunks, by what they cost together."""
    scored = []
    for m in _rows(shape):
        for n in _columns(shape, machine):
            cost = _tile_cost(shape, machine, m, n)
            if cost is not None:
                chunks = _chunks(shape, machine, m, n)[:2]
                scored.append((cost * chunks[0][0], m, n, chunks))
    scored.sort()
    for _, m, n, chunks in scored[:6]:
        k = max(divisors(shape.k, 4))
        for _, mb, nb, order, inner in chunks:
            prefetch = int((inner == 1 or nb == 1) and _fetched_ahead(shape, machine, m * mb, m, n, k))
            decisions = {"m": m, "n": n, "mb": mb, "nb": nb, "k": k, "order": order, "inner": inner}
            for pack in _packs(shape, machine):
                yield {**decisions, "prefetch": prefetch, "pack": pack}


def _tile_cost(shape: _Shape, machine: CpuMachine, m: int, n: int) -> float | None:
    """Time of a register tile's multiply-adds over that at peak, estimated; None for one that spills."""
    lanes = machine.lanes(shape.dtype)
    vectors = -(-n // lanes)
    if not tile_fits(machine, m, vectors):
        return None
    # vectors of B come from the second cache, broadcast values of A from the first
    loads = 1.5 / m + 1 / vectors
    if shape.transposed[1]:  # narrow panels are written in fewer streams
        loads *= 1 + 0.2 * vectors
    ragged = (-(-shape.m // m) * m / shape.m) ** 2  # a shorter tile runs slower, too
    ragged *= -(-shape.n // n) * n / shape.n
    latency = max(1.0, 8 / (m * vectors))  # two units with a latency of four
    return (1 + 0.3 * loads) * ragged * latency * vectors * lanes / n


def _fetched_ahead(shape: _Shape, machine: CpuMachine, rows: int, m: int, n: int, k: int) -> bool:
    """Whether the weight is worth fetching ahead: too large to wait in the second cache, read by several row tiles of
    a chunk of ``rows``, and in columns of which two fit that cache."""
    if shape.weight < 0 or n % shape.packed:
        return False
    column = shape.k * n * 4
    lines, steps = column // 64, -(-rows // m) * (shape.k // k)
    return shape.k * shape.n * 4 > machine.l2_bytes and column < machine.l2_bytes and lines_per_step(lines, steps) == 1


def _chunks(shape: _Shape, machine: CpuMachine, m: int, n: int) -> list[tuple[float, int, int, int, int]]:
    """``(cost, mb, nb, order, inner)`` best first.

    A chunk reads ``mb*m`` rows of A and ``nb*n`` columns of B; what is read again should fit half the L2 cache, and
    the chunks should be a multiple of the cores with at least two for each.
    """
    options = []
    item = 4
    tile_flops = m * n * shape.k
    for mb in divisors(-(-shape.m // m), 64):
        for nb in divisors(-(-shape.n // n), 64):
            chunks = shape.batch * (-(-shape.m // (m * mb))) * (-(-shape.n // (n * nb)))
            idle = -(-chunks // machine.cores) * machine.cores / chunks
            traffic = 1 / (mb * m) + 1 / (nb * n)
            footprint = (mb * m + nb * n) * shape.k * item
            overflow = max(0.0, footprint / (machine.l2_bytes / 2) - 1)
            grain = 20_000 / (tile_flops * mb * nb + 20_000)
            few = 0.05 if chunks < 2 * machine.cores else 0.0
            cost = idle * (1 + few) + 8 * traffic + 0.05 * min(overflow, 4) + grain
            # the smaller operand of a chunk stays in the first cache while the larger one streams past it
            inner = 1 if nb * n > mb * m else 0
            order = 1 if shape.n > shape.m else 0
            options.append((cost, mb, nb, order, inner))
    options.sort()
    return options


GEMM = Gemm()
