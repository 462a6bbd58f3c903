"""Finding a sum of products in a function and bringing it into the form ``C[b, m, n] += A[b, k, m] * B[b, k, n]``.

The same normal form serves dense layers, batched products and convolutions: for a convolution ``m`` are the output
channels, ``n`` the output pixels of all images, ``k`` the window times the input channels, so that ``B`` is the
im2col matrix, which never exists in memory: it is the index expression with which a tile is fetched (implicit GEMM,
Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import BlockInfo, describe, linear_offset, loads, remembered, uses, walk, widest_run
from schedules.cuda.common import Leaf, inline_injective, leaves, refresh, scratch, uniform
from schedules.free import free_function

__all__ = [
    "BATCH", "PRECISION", "Contraction", "K", "M", "N", "Normal", "contraction_of", "inline_producers", "normalise",
    "operand", "with_tf32",
]

#: what an iterator of the contraction ranges over
BATCH, M, N, K = "b", "m", "n", "k"
#: the parts that a sum may be cut into
_CUTS = (1, 2, 4, 8, 16)
#: the annotation of a sum of products that says what its operands may be rounded to: ``tf32``
PRECISION = "mlc.precision"


@dataclass(frozen=True)
class Contraction:
    """A sum of products: the role of each iterator, and the sizes of the normal form.

    ``windowed`` says that some input index mixes spatial and reduction iterators (a convolution). ``run_a`` and
    ``run_b`` say along which role (``m``/``n`` or ``k``) neighbouring elements of an operand are neighbours in
    memory, and ``vector_a``, ``vector_b`` how many elements one aligned access along it may take.
    """

    roles: tuple[str, ...]
    extents: tuple[int, ...]
    group: tuple[int, int] | None  # (iterator, channels in a group): output channels are split in groups first
    lhs_is_a: bool
    windowed: bool
    bits: int  # of the wider operand's elements
    types: tuple[str, str, str]  # of the elements of A, B and C
    index: str = "int64"  # the type of the function's indices
    #: whether operands of float32 may be rounded to tf32
    tf32: bool = False
    run_a: str = K
    run_b: str = N
    vector_a: int = 1
    vector_b: int = 1
    #: of an element of what is stored, and how many neighbours along ``n`` one aligned store may take
    result_bits: int = 32
    vector_result: int = 1
    #: whether these are sizes of one call among others
    free: bool = False

    def size(self, role: str) -> int:
        """Number of points along a role."""
        return prod(e for r, e in zip(self.roles, self.extents, strict=True) if r == role)

    def cuts(self, least: int) -> tuple[int, ...]:
        """Into how many parts the sum may be cut, of so many terms at least: none where sizes are free, as are then the
        tiles whose parts are added up."""
        return (1,) if self.free else tuple(s for s in _CUTS if s == 1 or self.size(K) // s >= least)


def with_tf32(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with each of its sums of products of float32 marked: its operands may be rounded to tf32. Itself
    where it holds none."""
    def marked(block: s_tir.SBlock) -> s_tir.SBlock:
        operands = describe(block).factors
        if operands is None or any(str(load.source.dtype) != "float32" for load in operands):
            return block
        return s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init, block.alloc_buffers,
            block.match_buffers, {**block.annotations, PRECISION: "tf32"},
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlock, marked), order="post"))


@dataclass(frozen=True)
class Normal:
    """Blocks of a normalised function: the contraction, the one that writes the result, and what else runs."""

    main: Any
    out: Any
    #: leaves that belong to other kernels, run before the contraction and after ``out``
    before: tuple[Leaf, ...]
    after: tuple[Leaf, ...]


@remembered
def contraction_of(func: tirx.PrimFunc) -> Contraction | None:
    """The contraction in ``func``, or None where there is none or it can't be normalised."""
    try:
        contraction = _classify(scratch(func))
        if contraction is None:
            return None
        sch = scratch(func)
        found = _with_runs(sch, normalise(sch, contraction), contraction)
        return replace(found, free=free_function(func) is not None)
    except (s_tir.ScheduleError, ValueError, tvm.error.InternalError):
        return None


def _single_reduction(found: Sequence[Leaf]) -> Leaf | None:
    reductions = [leaf for leaf in found if leaf.info.kind == "reduction"]
    kinds = sorted(leaf.info.kind for leaf in found)
    if not uniform(leaf.info for leaf in found) or kinds != ["injective"] * (len(found) - 1) + ["reduction"]:
        return None
    (main,) = reductions
    return main if len(main.info.writes) == 1 else None


def _factors(info: BlockInfo) -> tuple[tvm.ir.TensorLoad, tvm.ir.TensorLoad] | None:
    """The two operands of a sum of products of different buffers."""
    factors = info.factors
    return None if factors is None or factors[0].source.same_as(factors[1].source) else factors


def _grouped_channels(load: tvm.ir.TensorLoad, info: BlockInfo) -> set[tuple[int, int]]:
    """``(i, size)`` for each iterator ``i`` that occurs as ``i // size``: the channel of a grouped convolution."""
    divided: list[Any] = []
    walk(load, (tirx.FloorDiv, divided.append))
    return {
        (i, int(node.b)) for node in divided if isinstance(node.b, tirx.IntImm) and int(node.b) > 1
        for i, variable in enumerate(info.variables) if variable.same_as(node.a)
    }


def _classify(sch: s_tir.Schedule) -> Contraction | None:
    main = _single_reduction(leaves(sch))
    if main is None:
        return None
    operands = _factors(main.info)
    if operands is None or not _writes_own_iterators(main.info):
        return None
    grouped = {group for load in operands for group in _grouped_channels(load, main.info)}
    if not grouped:
        return _roles(main.info, None)
    if len(grouped) > 1:
        return None
    (group,) = grouped
    if main.info.extents[group[0]] % group[1]:
        return None
    return _roles(_split_groups(sch, main, group, _index_type(main.info)).info, group)


def _writes_own_iterators(info: BlockInfo) -> bool:
    """Whether the result is indexed by the data-parallel iterators, each once and in order."""
    indices = list(info.block.body.indices)
    return len(indices) == len(info.spatial) and all(
        info.variables[i].same_as(index) for i, index in zip(info.spatial, indices, strict=True)
    )


def _group_split(rank: int, position: int, size: int, index: str) -> tirx.IndexMap:
    """Before: ``..., f, ...``. After: ``..., f // size, f % size, ...``, the group and the channel in it."""

    def split(*iters: Any) -> list[Any]:
        channel = iters[position]
        return [*iters[:position], channel // size, channel % size, *iters[position + 1 :]]

    return tirx.IndexMap.from_func(split, ndim=rank, index_dtype=index)


def _split_groups(sch: s_tir.Schedule, main: Leaf, group: tuple[int, int], index: str) -> Leaf:
    """Make the group of a grouped convolution an iterator of its own.

    Before: ``y[f] += x[f // 12 * 8 + c] * w[f, c]``. After: ``y[g * 12 + i] += x[g * 8 + c] * w[g * 12 + i, c]``.
    """
    sch.transform_block_layout(main.rv, _group_split(len(main.info.variables), *group, index))
    (main,) = refresh(sch, [main])
    for load in _factors(main.info) or ():
        if _has_division(load):  # a copy is simplified, which is inlined later
            read = next(i for i, r in enumerate(main.info.block.reads) if r.source.same_as(load.source))
            sch.cache_read(main.rv, read, "global")
            _rewrite_read(sch, main.rv, read, index)
    return refresh(sch, [main])[0]


def _simplify_reads(sch: s_tir.Schedule, block: Any, index: str) -> None:
    """Bring ``y[(g * 12 + i) // 12, (g * 12 + i) % 12]`` to ``y[g, i]`` in what a block reads of the function's
    intermediates: of the former TVM takes too small a region to be needed (seen with 0.27, of 24 channels 16)."""
    kept = list(sch.get(sch.get_sblock("root")).alloc_buffers)
    for read, region in enumerate(sch.get(block).reads):
        if any(region.source.same_as(buffer) for buffer in kept):
            _rewrite_read(sch, block, read, index)


def _rewrite_read(sch: s_tir.Schedule, block: Any, read: int, index: str) -> None:
    """TVM simplifies indices only where it rewrites them: to an identical layout here."""
    rank = len(sch.get(block).reads[read].source.shape)
    same = tirx.IndexMap.from_func(lambda *i: list(i), ndim=rank, index_dtype=index)
    sch.transform_layout(block, ("read", read), same)


def _has_division(load: tvm.ir.TensorLoad) -> bool:
    found: list[Any] = []
    walk(load, (tirx.FloorDiv, found.append))
    return bool(found)


def _roles(info: BlockInfo, group: tuple[int, int] | None) -> Contraction | None:
    operands, extents = _factors(info), info.extents
    if operands is None:
        return None
    in_lhs, in_rhs = (uses(load, info.variables) for load in operands)
    last = next((i for i in reversed(info.spatial) if extents[i] > 1), -1)
    # n is what runs along the result's memory, so the operand that has it plays the part of B
    lhs_is_a = not (last in in_lhs and last not in in_rhs)
    roles = []
    for i, reduced in enumerate(info.reduces):
        left, right = i in in_lhs, i in in_rhs
        if extents[i] > 1 and not ((left and right) if reduced else (left or right)):
            return None  # a sum over what only one side has, or a plain repetition
        if reduced:
            roles.append(K)
        elif left == right:
            roles.append(BATCH)
        else:
            roles.append(M if left == lhs_is_a else N)
    if not {M, N, K} <= set(roles):
        return None
    bits = max(tvm.runtime.DataType(str(load.source.dtype)).bits for load in operands)
    a, b = operands if lhs_is_a else operands[::-1]
    types = (str(a.source.dtype), str(b.source.dtype), str(info.writes[0].dtype))
    windowed = any(
        len({info.reduces[i] for i in uses(index, info.variables)}) > 1 for load in operands for index in load.indices
    )
    tf32 = str(info.block.annotations.get(PRECISION, "")) == "tf32"
    return Contraction(tuple(roles), extents, group, lhs_is_a, windowed, bits, types, _index_type(info), tf32)


def _index_type(info: BlockInfo) -> str:
    return str(info.block.iter_vars[0].dom.extent.ty.dtype)


def _fuse(positions: Sequence[int], extents: Sequence[int], variables: Sequence[Any], index: str) -> Any:
    """The row-major number of the point that ``variables`` at ``positions`` name."""
    number: Any = tirx.const(0, index)
    for i in positions:
        number = number * extents[i] + variables[i]
    return number


def normalise(sch: s_tir.Schedule, contraction: Contraction) -> Normal:
    """Bring the contraction of ``sch`` into normal form; raises ``ScheduleError`` where TVM can't.

    ::

        pad[..] = x[..]; C[n, f, y, x] += pad[n, c, y + r, x + s] * w[f, c, r, s]; E[..] = relu(C[..] + bias[f])
        -->
        B[k, p] = x[..]; A[k, f] = w[..]; C[0, f, p] += A[k, f] * B[k, p]; E[f, p] = relu(C[f, p] + bias[f])
    """
    found = leaves(sch)
    main = _single_reduction(found)
    if main is None:
        raise ValueError("the function must hold exactly one reduction")
    position = [leaf.info.name for leaf in found].index(main.info.name)
    if contraction.group is not None:
        main = _split_groups(sch, main, contraction.group, contraction.index)
    operands = _factors(main.info)
    if operands is None:
        raise ValueError("the reduction must be a sum of products")
    a, b = operands if contraction.lhs_is_a else operands[::-1]
    for load, order in ((a, (BATCH, K, M)), (b, (BATCH, K, N))):
        index = next(i for i, r in enumerate(sch.get(main.rv).reads) if r.source.same_as(load.source))
        sch.reindex(main.rv, ("read", index))
        _reshape(sch, main.rv, ("read", index), contraction, order)
    written = sch.reindex(main.rv, ("write", 0))
    _reshape(sch, main.rv, ("write", 0), contraction, (BATCH, M, N))
    _flatten_block(sch, main.rv, contraction, (BATCH, M, N, K))
    before = inline_injective(sch, found[:position])
    out, after = _fold_epilogue(sch, written, found[position + 1 :], contraction)
    return Normal(main.rv, out, tuple(before), tuple(after))


def _reshape(
    sch: s_tir.Schedule, block: Any, which: tuple[str, int], contraction: Contraction, order: Sequence[str]
) -> None:
    """Give a reindexed buffer one dimension for each role in ``order`` that it has."""
    now = sch.get(block)
    region = (now.reads if which[0] == "read" else now.writes)[which[1]]
    positions = [next(i for i, iv in enumerate(now.iter_vars) if iv.var.same_as(r.min)) for r in region.region]
    extents = [contraction.extents[p] for p in positions]
    members = [[d for d, p in enumerate(positions) if contraction.roles[p] == role] for role in order]

    def flat(*variables: Any) -> list[Any]:
        return [_fuse(dims, extents, variables, contraction.index) for dims in members if dims]

    index_map = tirx.IndexMap.from_func(flat, ndim=len(positions), index_dtype=contraction.index)
    sch.transform_layout(block, which, index_map)


def _flatten_block(sch: s_tir.Schedule, block: Any, contraction: Contraction, order: Sequence[str]) -> None:
    """Give a block over (some of) the contraction's iterators, in their order, one iterator for each role."""
    rank = len(sch.get(block).iter_vars)
    roles = [r for r in contraction.roles if r in order][:rank]
    extents = [e for r, e in zip(contraction.roles, contraction.extents, strict=True) if r in order][:rank]

    members = [[i for i, r in enumerate(roles) if r == role] for role in order]

    def flat(*variables: Any) -> list[Any]:
        return [_fuse(positions, extents, variables, contraction.index) for positions in members]

    sch.transform_block_layout(block, tirx.IndexMap.from_func(flat, ndim=rank, index_dtype=contraction.index))


def _fold_epilogue(
    sch: s_tir.Schedule, written: Any, following: Sequence[Leaf], contraction: Contraction
) -> tuple[Any, list[Leaf]]:
    """Fold what follows elementwise into the block that writes the result; the rest runs as other kernels."""
    after = inline_injective(sch, following)
    out = written
    if len(after) == 1 and _elementwise_on(after[0], sch.get(written).writes[0].source):
        sch.compute_inline(written)
        out, after = after[0].rv, []
    elif len(after) == 1 and _moved(sch, written, after[0]):
        sch.reverse_compute_inline(after[0].rv)
        after = []
    spatial = [e for r, e in zip(contraction.roles, contraction.extents, strict=True) if r != K]
    rank = len(sch.get(out).iter_vars)
    if contraction.group is not None and rank == len(spatial) - 1:
        sch.transform_block_layout(out, _group_split(rank, *_group_in_output(contraction), contraction.index))
    _flatten_block(sch, out, contraction, (BATCH, M, N))
    if contraction.group is not None:
        _simplify_reads(sch, out, contraction.index)
    return out, after


def _moved(sch: s_tir.Schedule, written: Any, leaf: Leaf) -> bool:
    """Lay the result out as what follows it elementwise reads it: each element once, at another place. Whether it does.

    Before: ``C[h, p, x] = ..; E[y, x] = relu(C[y // 2, y % 2, x])``.
    After: ``C[h * 2 + p, x] = ..; E[y, x] = relu(C[y, x])``.
    """
    result = sch.get(written).writes[0].source
    found = {str(list(load.indices)): load.indices for load in loads(leaf.info.block.body)
             if load.source.same_as(result)}
    if leaf.info.kind != "injective" or len(found) != 1:
        return False
    (indices,) = found.values()
    if not leaf.info.variables[-1].same_as(indices[-1]):  # neighbours would be stored one by one
        return False
    reads = tirx.IndexMap(list(leaf.info.variables), list(indices), None)
    try:
        sch.transform_layout(written, ("write", 0), reads.inverse(leaf.info.extents))
    except (s_tir.ScheduleError, ValueError, tvm.error.InternalError):
        return False
    return _elementwise_on(refresh(sch, [leaf])[0], sch.get(written).writes[0].source)


def _group_in_output(contraction: Contraction) -> tuple[int, int]:
    assert contraction.group is not None
    position, size = contraction.group
    return sum(r != K for r in contraction.roles[:position]), size


def _elementwise_on(leaf: Leaf, buffer: Any) -> bool:
    """Whether ``leaf`` reads ``buffer`` only at its own iterators, in order."""
    info = leaf.info
    if info.kind != "injective" or info.extents != tuple(int(e) for e in buffer.shape):
        return False
    results = [load for load in loads(info.block.body) if load.source.same_as(buffer)]

    def own(index: Any, d: int) -> bool:
        return info.variables[d].same_as(index) or (info.extents[d] == 1 and isinstance(index, tirx.IntImm))

    return bool(results) and all(own(index, d) for load in results for d, index in enumerate(load.indices))


def _with_runs(sch: s_tir.Schedule, normal: Normal, contraction: Contraction) -> Contraction:
    """Find out along which role each operand runs in memory, from the expression its tile is fetched with."""
    runs = []
    for rows in (M, N):
        fetch = sch.cache_read(normal.main, operand(sch, normal.main, rows), "shared")
        inline_producers(sch, fetch)
        runs.append(_run_of(describe(sch.get(fetch)), rows, contraction))
    (run_a, vector_a), (run_b, vector_b) = runs
    bits, vector = _result(sch, normal, contraction)
    return replace(contraction, run_a=run_a, vector_a=vector_a, run_b=run_b, vector_b=vector_b, result_bits=bits,
                   vector_result=vector)


def _result(sch: s_tir.Schedule, normal: Normal, contraction: Contraction) -> tuple[int, int]:
    """The bits of an element of the result, and how many neighbours along ``n`` one aligned store of 16 bytes or less
    may take."""
    info = describe(sch.get(normal.out))
    bits = int(tvm.runtime.DataType(str(info.writes[0].dtype)).bits)
    store = info.block.body
    if not isinstance(store, tirx.BufferStore):
        return bits, 1
    place = tirx.BufferLoad(store.buffer, store.indices)
    widths = [v for v in (8, 4, 2) if v * bits <= 128]
    return bits, widest_run(place, info.variables, info.extents, len(info.extents) - 1, widths)


def operand(sch: s_tir.Schedule, main: Any, rows: str) -> int:
    """Which read of a normalised contraction is the operand whose rows are ``m`` or ``n``."""
    block = sch.get(main)
    row = block.iter_vars[-3 if rows == M else -2].var  # ..., m, n, k
    return next(i for i, r in enumerate(block.reads) if any(row.same_as(dim.min) for dim in r.region))


def inline_producers(sch: s_tir.Schedule, block: Any) -> None:
    """Inline every spatial block that ``block`` reads, and what those read, as far as TVM allows."""
    refused = 0
    while True:
        producers = sch.get_producers(block)
        if len(producers) <= refused:
            return
        try:
            sch.compute_inline(producers[refused])
        except s_tir.ScheduleError:
            refused += 1


def _run_of(fetch: BlockInfo, rows: str, contraction: Contraction) -> tuple[str, int]:
    """The role along which a fetched operand is contiguous in memory, and the widest aligned access along it."""
    value = fetch.block.body.value
    widest = max(1, 128 // contraction.bits)
    widths = [v for v in (16, 8, 4, 2) if v <= widest]
    fetched = loads(value)
    load = fetched[0] if len(fetched) == 1 else None
    offset = linear_offset(load, fetch.variables, fetch.extents) if load is not None else None
    steps = [step if extent > 1 else 0 for step, extent in zip(offset[0], fetch.extents, strict=True)] if offset else []
    run = K if steps and steps[-2] == 1 else rows
    for role in (run, K, rows):
        along = len(fetch.extents) - (2 if role == K else 1)
        vector = widest_run(value, fetch.variables, fetch.extents, along, widths)
        if vector > 1:
            return role, vector
    return run, 1
