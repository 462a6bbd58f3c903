"""Matrix products with the output tile in registers: dense with packed weights, matmul, batched matmul.

The function holds one contraction block that multiplies two buffers and sums over one axis; its last output axis is
contiguous in the second operand, either packed as ``[N/n, K, n]`` or plain as ``[..., K, N]``. Everything before the
last two output axes is a batch. Blocking after Goto and van de Geijn (2008).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from schedules.analysis import remembered
from schedules.cpu.tiling import accumulate, check_tile, consumers_inlined, divisors, tile_fits
from schedules.lowering import lines_per_step
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

__all__ = ["GEMM"]


@dataclass(frozen=True)
class _Shape:
    """``[batch, m, k] x [batch, k, n]``; ``packed`` is the width of a packed weight's block, 0 for a plain operand.
    ``weight`` is the number of the parameter that holds the packed weight, -1 if none does."""

    batch: int
    m: int
    n: int
    k: int
    packed: int
    weight: int
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
    if not (_is(left.indices[-1], reduce.var) and _is(left.indices[-2], m_axis)):
        return None
    extents = [int(v.dom.extent) for v in spatial]
    batch = 1
    for extent in extents[:-2]:
        batch *= extent
    packed = 0
    if len(right.indices) == 3 and _is(right.indices[1], reduce.var) and _uses(right.indices[0], n_axis):
        packed = int(right.source.shape[-1])
    elif not (_is(right.indices[-1], n_axis) and _is(right.indices[-2], reduce.var)):
        return None
    params = sch.mod["main"].params
    weight = next((i for i, param in enumerate(params) if packed and param.same_as(right.source)), -1)
    depth = int(reduce.dom.extent)
    shape = _Shape(batch, extents[-2], extents[-1], depth, packed, weight, str(left.source.dtype))
    return block, shape


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
    packed weight is fetched one column of tiles ahead.
    """

    name = "cpu.gemm"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return _shape(func) is not None

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        shape = _shape(func)
        assert shape is not None
        lanes = cpu_machine(target).lanes(shape.dtype)
        columns = _columns(shape, lanes)
        rows = _rows(shape)
        return (
            Knob("m", tuple(rows)),
            Knob("n", tuple(columns)),
            Knob("mb", tuple(sorted({d for r in rows for d in divisors(-(-shape.m // r), 64)}))),
            Knob("nb", tuple(sorted({d for c in columns for d in divisors(shape.n // c, 64)}))),
            Knob("k", tuple(divisors(shape.k, 8))),
            Knob("order", (0, 1)),
            Knob("inner", (0, 1)),
            Knob("prefetch", (0, 1) if shape.weight >= 0 else (0,)),
        )

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape = _shape(func)
        assert shape is not None
        yield from _seeds(shape, cpu_machine(target))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        found = _read(sch)
        assert found is not None
        block, shape = found
        lanes = cpu_machine(target).lanes(shape.dtype)
        for producer in sch.get_producers(block):
            sch.compute_inline(producer)
        out = consumers_inlined(sch, block)
        m_tile, n_tile, mb, nb = pick("m"), pick("n"), pick("mb"), pick("nb")
        unroll, order, inner, prefetch = pick("k"), pick("order"), pick("inner"), pick("prefetch")
        if -(-shape.m // m_tile) % mb or (shape.n // n_tile) % nb:
            raise InvalidDecision("a parallel chunk must hold whole register tiles")
        check_tile(cpu_machine(target), m_tile * -(-n_tile // lanes), unroll)
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
        fetched = (shape.weight, n_tile // shape.packed) if prefetch and n_tile % shape.packed == 0 else None
        start = accumulate(sch, block, tiles[-1], len(batch) + 2, width, unroll, fetched)
        sch.parallel(sch.fuse(*batch, *chunks))
        sch.decompose_reduction(block, start)


@remembered
def _shape(func: tirx.PrimFunc) -> _Shape | None:
    found = _read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found and _vector_columns(found[1].n) else None


def _vector_columns(n: int) -> bool:
    """Whether some vector width divides the columns; narrower products are left to the general spaces."""
    return n % 4 == 0


def _columns(shape: _Shape, lanes: int) -> list[int]:
    """Tile widths: whole vectors where they divide, else the widest part of one that does."""
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
    """Register tiles by loads per multiply-add, then chunks by how evenly they divide among the cores."""
    lanes = machine.lanes(shape.dtype)
    tiles = []
    for m in _rows(shape):
        for n in _columns(shape, lanes):
            vectors = n // min(lanes, n) if n % min(lanes, n) == 0 else n
            if not tile_fits(machine, m, vectors):
                continue
            ragged = (-(-shape.m // m) * m / shape.m) ** 2  # a shorter tile runs slower, too
            narrow = min(lanes, n) / lanes
            # vectors of B come from the second cache, broadcast values of A from the first
            cost = (1.5 / m + 1 / vectors) * ragged / narrow + (1.0 if m * vectors < 8 else 0.0) / (m * vectors)
            tiles.append((cost, m, n))
    tiles.sort()
    for _, m, n in (tiles or [(0.0, 1, _columns(shape, lanes)[0])])[:6]:
        k = max(divisors(shape.k, 4))
        for mb, nb, order, inner in _chunks(shape, machine, m, n)[:2]:
            prefetch = int(inner == 1 and _fetched_ahead(shape, machine, m * mb, m, n, k))
            yield {"m": m, "n": n, "mb": mb, "nb": nb, "k": k, "order": order, "inner": inner, "prefetch": prefetch}


def _fetched_ahead(shape: _Shape, machine: CpuMachine, rows: int, m: int, n: int, k: int) -> bool:
    """Whether the weight is worth fetching ahead: too large to wait in the second cache, read by several row tiles of
    a chunk of ``rows``, and in columns of which two fit that cache."""
    if shape.weight < 0 or n % shape.packed:
        return False
    column = shape.k * n * 4
    lines, steps = column // 64, -(-rows // m) * (shape.k // k)
    return shape.k * shape.n * 4 > machine.l2_bytes and column < machine.l2_bytes and lines_per_step(lines, steps) == 1


def _chunks(shape: _Shape, machine: CpuMachine, m: int, n: int) -> list[tuple[int, int, int, int]]:
    """``(mb, nb, order, inner)`` best first.

    A chunk reads ``mb*m`` rows of A and ``nb*n`` columns of B; what is read again should fit half the L2 cache, and
    the chunks should be a multiple of the cores with at least two for each.
    """
    options = []
    item = 4
    tile_flops = m * n * shape.k
    for mb in divisors(-(-shape.m // m), 64):
        for nb in divisors(shape.n // n, 64):
            chunks = shape.batch * (-(-shape.m // (m * mb))) * (shape.n // (n * nb))
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
    return [option[1:] for option in options]


GEMM = Gemm()
