"""The register tiles of a matrix product, and the analytic choice of the best ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from schedules.cpu.gemm_shape import GemmShape
from schedules.cpu.tiling import SHARED_SET, apart, divisors, tile_fits
from schedules.machine import LINE_BYTES, CpuMachine
from schedules.prefetch import lines_per_step
from schedules.space import Decisions

__all__ = [
    "chunks", "columns", "gemm_seeds", "packable", "packs", "padded", "rows", "sum_blocks", "sum_chains", "sum_parts",
    "tallest",
]

#: rows of the first operand from which a copy of the second one is cheap beside the product
_PACKED_ROWS = 256
#: rows from which a copy pays where vectors could not run along its columns otherwise
_COPIED_ROWS = 8
#: elements of a result up to which partial sums of all of them cost little beside the product
_SMALL_RESULT = 1000
#: products of one partial sum at least
_SHORTEST_SUM = 128
#: the tallest register tile
_MAX_ROWS = 16
#: Part of a load's time that arithmetic does not hide: of a vector of B, which streams from the second cache, by the
#: number of registers (measured with tiles of 2 to 6 rows on AVX2, of 6 to 12 on AVX-512), and of a broadcast value of
#: A, which the first one holds. And the time of a tile that leaves no register to spare, or one of 32: LLVM then keeps
#: the sums of 4 x 6 in registers or, beside another loop or epilogue, in memory (measured: 1.00 or 1.3 of 6 x 4).
_STREAMED, _BROADCAST, _CROWDED = {16: 0.8, 32: 0.45}, 0.3, 1.06
#: What it costs that a weight comes from memory, by the time of that beside that of the multiply-adds: to wait for its
#: lines where they are not fetched ahead, and, where they are, to read a line from the second cache while that is
#: filled, in multiply-adds for each pass of a row tile. (Measured on a Zen 5, of 8 to 64 rows and 7 million weights: on
#: AVX2 4 x 16 fetched ahead took 235 us and 4 x 24, which cannot be, 310; of 16 rows 325 and 450. On AVX-512 8 x 32,
#: 8 x 48 and 6 x 64 took 207, 214 and 250, not fetched 277, 263 and 270; of 32 rows 317, 314, 344 and 428, 413, 420.)
_WAITED, _FILLING = 0.55, 2.7
#: what a last tile of fewer rows costs beside its own time
_RAGGED = 1.03
#: multiply-adds of a chunk small enough that beginning one weighs half of all that could be lost by it
_GRAIN = 20_000
#: part of the third level's rate at which what the arithmetic waits for is there in time
_EASY = 0.25
#: time of a tile that takes half of the lines of a packed weight or less, over one that takes them whole
_PART_OF_LINE = 1.25


def packable(shape: GemmShape) -> bool:
    """Whether the function may copy its second operand, and has the rows to pay for that."""
    return not shape.packed and shape.separate and shape.m >= _COPIED_ROWS


def padded(shape: GemmShape, machine: CpuMachine) -> bool:
    """Whether the columns must be padded to whole vectors; four or eight make a vector of their own."""
    return packable(shape) and bool(shape.n % machine.lanes(shape.dtype)) and shape.n not in (4, 8)


def packs(shape: GemmShape, machine: CpuMachine) -> tuple[int, ...]:
    """Whether to pack the second operand, best first: where it is read in short pieces far apart, often enough to pay
    for a copy."""
    if not packable(shape):
        return (0,)
    if shape.transposed[1] or padded(shape, machine):
        return (1,)  # without a copy no vector could run along its columns
    return (1, 0) if shape.k * shape.n * 4 > machine.l2_bytes and shape.m >= _PACKED_ROWS else (0, 1)


def columns(shape: GemmShape, machine: CpuMachine) -> list[int]:
    """Tile widths: whole vectors where they divide or are padded, else the widest part of one that does."""
    lanes = machine.lanes(shape.dtype)
    if padded(shape, machine):
        return [v * lanes for v in range(1, min(8, -(-shape.n // lanes)) + 1)]
    if shape.n % lanes == 0:
        return [v * lanes for v in divisors(shape.n // lanes, 8)]
    width = next(w for w in (lanes // 2, lanes // 4, 4) if w and shape.n % w == 0)
    return [v * width for v in divisors(shape.n // width, 8) if v * width <= 8 * lanes]


def rows(shape: GemmShape) -> list[int]:
    """Tile heights: those that divide the rows, and for each number of tiles the lowest, so that the last tile is the
    least ragged."""
    lowest = {-(-shape.m // tiles) for tiles in range(-(-shape.m // _MAX_ROWS), shape.m + 1)}
    found = sorted({*divisors(shape.m, _MAX_ROWS), *lowest, *({6, 8, 12} if shape.m >= 64 else ())})
    return [m for m in found if m % shape.step.rows == 0]


def sum_parts(shape: GemmShape, machine: CpuMachine) -> tuple[int, ...]:
    """Into how many parts the sum may be cut that run in parallel: equal ones, since TVM's ``rfactor`` drops the
    predicate of a ragged one."""
    if machine.cores < 2 or shape.batch * shape.m * shape.n > _SMALL_RESULT or shape.step.rows > 1:
        return (1,)
    return tuple(p for p in divisors(shape.k, 4 * machine.cores) if p == 1 or shape.k // p >= _SHORTEST_SUM)


def sum_chains(shape: GemmShape, machine: CpuMachine) -> tuple[int, ...]:
    """How many sums a register tile may hold for each element: more than one where it has few elements."""
    busy = shape.step.accumulators(machine)
    if shape.m * -(-shape.n // machine.lanes(shape.dtype)) >= busy or shape.step.rows > 1:
        return (1,)
    return tuple(c for c in (1, 2, 4, 8) if shape.k % c == 0 and (c == 1 or shape.k // c >= busy))


def sum_blocks(shape: GemmShape, machine: CpuMachine) -> tuple[int, ...]:
    """Into how many blocks a chunk may cut the sum: several where three vectors of columns overflow the second cache
    and are used often enough."""
    if shape.m < 16 or shape.k * 3 * machine.vector_bytes <= machine.l2_bytes or shape.step.rows > 1:
        return (1,)
    return tuple(b for b in divisors(shape.k, 128) if b == 1 or _SHORTEST_SUM <= shape.k // b <= 4096)


def gemm_seeds(shape: GemmShape, machine: CpuMachine) -> Iterator[Decisions]:
    """Register tiles with their chunks, by what they cost together."""
    scored = []
    splits = [
        {name: value for name, value in zip(("parts", "chains", "kb"), values, strict=True)}
        for values in product(sum_parts(shape, machine), sum_chains(shape, machine), sum_blocks(shape, machine))
    ]
    for m, n in product(rows(shape), columns(shape, machine)):
        for split in splits:
            if shape.k % (split["parts"] * split["chains"]) or (split["kb"] > 1 and (shape.m % m or shape.n % n)):
                continue
            cost = _tile_cost(shape, machine, m, n, split["chains"])
            if cost is not None:
                layouts = chunks(shape, machine, m, n, split["parts"], split["kb"])[:2]
                scored.append((cost * layouts[0][0], m, n, tuple(split.items()), layouts))
    scored.sort()
    several = {name for split in splits for name, value in split.items() if value > 1}
    for _, m, n, pairs, layouts in scored[:6]:
        split = dict(pairs)
        k = _unrolled(shape, shape.k // (split["parts"] * split["chains"] * split["kb"]))
        for _, mb, nb, order, inner in layouts:
            ahead = split["kb"] == 1 and (inner == 1 or nb == 1)
            prefetch = int(ahead and _fetched_ahead(shape, machine, m * mb, m, n, k))
            decisions = {"m": m, "n": n, "mb": mb, "nb": nb, "k": k, "order": order, "inner": inner}
            for pack in packs(shape, machine):
                yield {**decisions, "prefetch": prefetch, "pack": pack,
                       **{name: value for name, value in split.items() if name in several}}


def _tile_cost(shape: GemmShape, machine: CpuMachine, m: int, n: int, chains: int) -> float | None:
    """Time of a register tile's multiply-adds over that at peak, estimated; None for one that spills."""
    lanes = machine.lanes(shape.dtype)
    vectors = -(-n // lanes)
    if not tile_fits(machine, m, vectors, chains, shape.step):
        return None
    # beside more than a load for each multiply-add, fewer accumulators suffice
    step = shape.step
    busy = step.accumulators(machine) / max(1.0, 1 / m + 1 / vectors)
    load = machine.fma_per_cycle / machine.loads_per_cycle  # in multiply-adds
    streamed, broadcast = _STREAMED.get(machine.vector_registers, 0.8) * load, _BROADCAST * load
    if shape.transposed[1]:  # narrow panels are written in fewer streams
        streamed, broadcast = streamed * (1 + 0.2 * vectors), broadcast * (1 + 0.2 * vectors)

    def steps(height: int) -> float:
        """Multiply-adds in the time of one step of the sum of a tile with so many rows."""
        products = max(float(height * vectors), busy / chains)
        each = broadcast + step.joined
        return products * step.multiply + products / vectors * each + streamed * vectors * step.rows

    full, left = divmod(shape.m, m)
    cost = (full * steps(m) + (steps(left) if left else 0.0)) / (shape.m * vectors)
    cost *= -(-shape.n // n) * n / shape.n * vectors * lanes / n * (_RAGGED if left else 1.0)
    if not (shape.transposed[0] or apart(machine, m, shape.k * step.bytes)):
        cost *= SHARED_SET
    spare = machine.vector_registers - (m * chains + 1) * vectors - 1
    if m > 1 and spare < (2 if machine.vector_registers >= 32 else 1):
        cost *= _CROWDED
    if m > 1 and 2 * n <= shape.packed:
        cost *= _PART_OF_LINE
    lines = machine.vector_bytes / LINE_BYTES
    fetched = _fetchable(shape, machine, shape.m, m, n)
    cost += _late(shape, machine) * (_FILLING * load * lines / m if fetched else _WAITED / lines)
    return cost * (1 + 0.01 * (chains - 1))


def _late(shape: GemmShape, machine: CpuMachine) -> float:
    """The time in which memory gives a weight over that of the multiply-adds, at most 1; 0 for one that waits in a
    cache."""
    weight = shape.k * shape.n * shape.step.bytes
    if shape.weight < 0 or weight <= machine.l2_bytes:
        return 0.0
    cycles = shape.m * shape.n * shape.k * shape.step.multiply / (machine.fma_per_cycle * machine.lanes(shape.dtype))
    return min(1.0, weight / machine.memory_rate * machine.hz * machine.cores / cycles)


def _unrolled(shape: GemmShape, depth: int) -> int:
    """How many steps of a sum a loop body holds: four, or where they leave a rest the most of up to eight. Of pairs of
    rows two at most: of four LLVM spills 6 x 16 (counted, bfloat16 for Neoverse V1)."""
    if shape.step.rows > 1:
        return max(divisors(depth, 2))
    return 4 if depth % 4 == 0 else max(divisors(depth, 8))


def _fetched_ahead(shape: GemmShape, machine: CpuMachine, height: int, m: int, n: int, k: int) -> bool:
    """Whether a weight that is too large to wait in the second cache is fetched ahead in a chunk of ``height`` rows."""
    column = shape.k * n * shape.step.bytes
    lines, steps = column // LINE_BYTES, -(-height // m) * (shape.k // k)
    large = shape.n // n * column > machine.l2_bytes
    return large and _fetchable(shape, machine, height, m, n) and lines_per_step(lines, steps) > 0


def _fetchable(shape: GemmShape, machine: CpuMachine, height: int, m: int, n: int) -> bool:
    """Whether a packed weight can be fetched ahead and is worth it: read by several row tiles (of products of 8 rows,
    tiles of 8 took 0.85 to 1.1 of their time), and in columns of which two fit the second cache."""
    return (shape.weight >= 0 and height > m and not n % shape.packed and shape.step.rows == 1
            and shape.k * n * shape.step.bytes < machine.l2_bytes)


def tallest(shape: GemmShape, machine: CpuMachine, m: int, mb: int) -> int:
    """How many row tiles a chunk may hold where the usual rows fill no more than one chunk and a call may have more of
    them: each chunk reads the weights anew, and ends with the last row."""
    if mb * m < shape.m:
        return mb
    return max(mb, machine.l2_bytes // 2 // (shape.k * shape.step.bytes * m))


def chunks(
    shape: GemmShape, machine: CpuMachine, m: int, n: int, parts: int, kb: int
) -> list[tuple[float, int, int, int, int]]:
    """``(cost, mb, nb, order, inner)`` best first.

    A chunk reads ``mb*m`` rows of A and ``nb*n`` columns of B; what is read again should fit half the L2 cache, and
    the chunks should be a multiple of the cores with at least two for each.
    """
    options = []
    row = column = shape.step.bytes
    depth = shape.k // parts
    tile_flops = m * n * depth
    room = machine.l2_bytes * (0.5 if kb == 1 else 0.75)
    products = shape.batch * shape.m * shape.n * shape.k * shape.step.multiply
    arithmetic = products / (machine.fma_per_cycle * machine.lanes(shape.dtype))
    # rows that each column of tiles reads anew come from the third level if need be, at a small part of its rate
    streams = row * machine.macs_per_cycle(shape.dtype) / (n * shape.step.multiply) <= _EASY * machine.l3_rate
    cycles = max(arithmetic, shape.batch * shape.k * shape.n * column / machine.l2_rate) / machine.cores  # at best
    for mb in divisors(-(-shape.m // m), 64):
        for nb in divisors(-(-shape.n // n), 64):
            count = shape.batch * parts * (-(-shape.m // (m * mb))) * (-(-shape.n // (n * nb)))
            idle = -(-count // machine.cores) * machine.cores / count
            traffic = 1 / (mb * m) + 1 / (nb * n)
            footprint = (mb * m * row + nb * n * column) * depth // kb
            overflow = max(0.0, footprint / room - 1)
            grain = _GRAIN / (tile_flops * mb * nb + _GRAIN)
            few = 0.05 if count < 2 * machine.cores else 0.0
            launch = machine.launch_cycles / cycles if count > 1 else 0.0
            # sums on their way through memory: once for each block of the sum, and parts of them to the end
            passes = 8 * kb / depth * (kb > 1) + (0.15 + 4 * parts * machine.cores / shape.k) * (parts > 1)
            cost = idle * (1 + few) + 8 * traffic + 0.05 * min(overflow, 4) + grain + launch + passes
            # the smaller operand of a chunk stays in the first cache while the larger one streams past it; a weight
            # that comes from memory is fetched ahead, a column of tiles at a time
            fetched = parts == 1 and streams and _fetched_ahead(shape, machine, mb * m, m, n, _unrolled(shape, depth))
            inner = 1 if nb * n > mb * m or kb > 1 or fetched else 0
            order = 1 if shape.n > shape.m else 0
            options.append((cost, mb, nb, order, inner))
    options.sort()
    return options
