"""Finding a sum of products in a function and bringing it into the form ``C[b, m, n] += A[b, k, m] * B[b, k, n]``.

The same normal form serves dense layers, batched products and convolutions: for a convolution ``m`` are the output
channels, ``n`` the output pixels of all images, ``k`` the window times the input channels, so that ``B`` is the
im2col matrix, which never exists in memory: it is the index expression with which a tile is fetched (implicit GEMM,
Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.cuda.common import Leaf, inline_spatial, leaves, loads_of, refresh, scratch, static_extents, uniform

__all__ = ["Contraction", "K", "M", "N", "Normal", "analyse", "inline_producers", "normalise", "operand"]

#: what an iterator of the contraction ranges over
BATCH, M, N, K = "b", "m", "n", "k"


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
    index: str = "int64"  # the type of the function's indices
    run_a: str = K
    run_b: str = N
    vector_a: int = 1
    vector_b: int = 1

    def size(self, role: str) -> int:
        """Number of points along a role."""
        return prod(e for r, e in zip(self.roles, self.extents, strict=True) if r == role)


@dataclass(frozen=True)
class Normal:
    """Blocks of a normalised function: the contraction, the one that writes the result, and what else runs."""

    main: Any
    out: Any
    #: leaves that belong to other kernels, run before the contraction and after ``out``
    before: tuple[Leaf, ...]
    after: tuple[Leaf, ...]


@lru_cache(maxsize=512)
def analyse(func: tirx.PrimFunc) -> Contraction | None:
    """The contraction in ``func``, or None where there is none or it can't be normalised."""
    try:
        contraction = _classify(scratch(func))
        if contraction is None:
            return None
        sch = scratch(func)
        return _with_runs(sch, normalise(sch, contraction), contraction)
    except (s_tir.ScheduleError, ValueError, tvm.error.InternalError):
        return None


def _single_reduction(found: Sequence[Leaf]) -> Leaf | None:
    reductions = [leaf for leaf in found if leaf.reduction]
    if not uniform(found) or len(reductions) != 1 or not all(leaf.spatial for leaf in found if not leaf.reduction):
        return None
    main = reductions[0]
    return main if main.simple and len(main.block.writes) == 1 else None


def _product(block: Any) -> tuple[Any, Any] | None:
    """The two loads of ``C[...] = C[...] + x * y`` (casts allowed), or None."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add) or block.init is None:
        return None
    if not isinstance(block.init, tirx.BufferStore) or not _is_zero(block.init.value):
        return None
    total, term = store.value.a, store.value.b
    if not isinstance(total, tvm.ir.TensorLoad) or not total.source.same_as(store.buffer):
        return None
    if isinstance(term, tirx.Cast):
        term = term.value
    if not isinstance(term, tirx.Mul):
        return None
    sides = []
    for side in (term.a, term.b):
        bare = side.value if isinstance(side, tirx.Cast) else side
        if not isinstance(bare, tvm.ir.TensorLoad):
            return None
        sides.append(bare)
    if sides[0].source.same_as(sides[1].source):
        return None
    return sides[0], sides[1]


def _is_zero(value: Any) -> bool:
    return isinstance(value, (tirx.FloatImm, tirx.IntImm)) and float(value.value) == 0.0


def _used(indices: Any, iters: Sequence[Any]) -> set[int]:
    seen: set[int] = set()

    def visit(var: Any) -> None:
        seen.update(i for i, iv in enumerate(iters) if iv.var.same_as(var))

    for index in indices:
        tvm_ffi.structural_walk(index, (tvm.ir.Var, visit), order="post")
    return seen


def _grouped_channels(indices: Any, iters: Sequence[Any]) -> set[tuple[int, int]]:
    """``(i, size)`` for each iterator ``i`` that occurs as ``i // size``: the channel of a grouped convolution."""
    found: set[tuple[int, int]] = set()

    def visit(node: Any) -> None:
        if isinstance(node.b, tirx.IntImm) and int(node.b) > 1:
            found.update((i, int(node.b)) for i, iv in enumerate(iters) if iv.var.same_as(node.a))

    for index in indices:
        tvm_ffi.structural_walk(index, (tirx.FloorDiv, visit), order="post")
    return found


def _classify(sch: s_tir.Schedule) -> Contraction | None:
    main = _single_reduction(leaves(sch))
    if main is None:
        return None
    loads, extents = _product(main.block), static_extents(main.block)
    if loads is None or extents is None or not _writes_own_iterators(main.block):
        return None
    iters = list(main.block.iter_vars)
    grouped = {g for load in loads for g in _grouped_channels(load.indices, iters)}
    if not grouped:
        return _roles(main.block, loads, extents, None)
    if len(grouped) > 1:
        return None
    (group,) = grouped
    if extents[group[0]] % group[1]:
        return None
    block = _split_groups(sch, main, group, _index_type(main.block)).block
    loads, extents = _product(block), static_extents(block)
    return None if loads is None or extents is None else _roles(block, loads, extents, group)


def _writes_own_iterators(block: Any) -> bool:
    """Whether the result is indexed by the data-parallel iterators, each once and in order."""
    spatial = [iv.var for iv in block.iter_vars if iv.iter_type == tirx.IterVar.DataPar]
    indices = list(block.body.indices)
    return len(indices) == len(spatial) and all(v.same_as(i) for v, i in zip(spatial, indices, strict=True))


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
    rank = len(main.block.iter_vars)
    sch.transform_block_layout(main.rv, _group_split(rank, *group, index))
    (main,) = refresh(sch, [main])
    for load in _product(main.block) or ():
        if not _has_division(load.indices):
            continue
        # TVM simplifies indices only where it rewrites them: an identical layout of a copy (inlined later) does it
        read = next(i for i, r in enumerate(main.block.reads) if r.source.same_as(load.source))
        sch.cache_read(main.rv, read, "global")
        same = tirx.IndexMap.from_func(lambda *i: list(i), ndim=len(load.indices), index_dtype=index)
        sch.transform_layout(main.rv, ("read", read), same)
    return refresh(sch, [main])[0]


def _has_division(indices: Any) -> bool:
    found: list[Any] = []
    for index in indices:
        tvm_ffi.structural_walk(index, (tirx.FloorDiv, found.append), order="post")
    return bool(found)


def _roles(
    block: Any, loads: tuple[Any, Any], extents: tuple[int, ...], group: tuple[int, int] | None
) -> Contraction | None:
    iters = list(block.iter_vars)
    in_lhs, in_rhs = _used(loads[0].indices, iters), _used(loads[1].indices, iters)
    spatial = [i for i, iv in enumerate(iters) if iv.iter_type == tirx.IterVar.DataPar]
    last = next((i for i in reversed(spatial) if extents[i] > 1), -1)
    # n is what runs along the result's memory, so the operand that has it plays the part of B
    lhs_is_a = not (last in in_lhs and last not in in_rhs)
    roles = []
    for i in range(len(iters)):
        left, right = i in in_lhs, i in in_rhs
        if extents[i] > 1 and not (left if i not in spatial and right else left or right):
            return None  # a sum over what only one side has, or a plain repetition
        if i not in spatial:
            roles.append(K)
        elif left == right:
            roles.append(BATCH)
        else:
            roles.append(M if left == lhs_is_a else N)
    if not {M, N, K} <= set(roles):
        return None
    bits = max(tvm.runtime.DataType(str(load.source.dtype)).bits for load in loads)
    return Contraction(tuple(roles), extents, group, lhs_is_a, _windowed(loads, iters), bits, _index_type(block))


def _windowed(loads: Sequence[Any], iters: Sequence[Any]) -> bool:
    def mixes(index: Any) -> bool:
        kinds = {int(iters[i].iter_type) for i in _used([index], iters)}
        return len(kinds) > 1

    return any(mixes(index) for load in loads for index in load.indices)


def _index_type(block: Any) -> str:
    return str(block.iter_vars[0].dom.extent.ty.dtype)


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
    position = [leaf.name for leaf in found].index(main.name)
    if contraction.group is not None:
        main = _split_groups(sch, main, contraction.group, contraction.index)
    loads = _product(main.block)
    if loads is None:
        raise ValueError("the reduction must be a sum of products")
    a, b = loads if contraction.lhs_is_a else loads[::-1]
    for load, order in ((a, (BATCH, K, M)), (b, (BATCH, K, N))):
        index = next(i for i, r in enumerate(sch.get(main.rv).reads) if r.source.same_as(load.source))
        sch.reindex(main.rv, ("read", index))
        _reshape(sch, main.rv, ("read", index), contraction, order)
    written = sch.reindex(main.rv, ("write", 0))
    _reshape(sch, main.rv, ("write", 0), contraction, (BATCH, M, N))
    _flatten_block(sch, main.rv, contraction, (BATCH, M, N, K))
    before = inline_spatial(sch, found[:position])
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
    result = sch.get(written).writes[0].source
    after = inline_spatial(sch, following)
    out = written
    if len(after) == 1 and _elementwise_on(after[0], result):
        sch.compute_inline(written)
        out, after = after[0].rv, []
    spatial = [e for r, e in zip(contraction.roles, contraction.extents, strict=True) if r != K]
    extents = list(static_extents(sch.get(out)) or ())
    if contraction.group is not None and len(extents) == len(spatial) - 1:
        sch.transform_block_layout(out, _group_split(len(extents), *_group_in_output(contraction), contraction.index))
    _flatten_block(sch, out, contraction, (BATCH, M, N))
    return out, after


def _group_in_output(contraction: Contraction) -> tuple[int, int]:
    assert contraction.group is not None
    position, size = contraction.group
    return sum(r != K for r in contraction.roles[:position]), size


def _elementwise_on(leaf: Leaf, buffer: Any) -> bool:
    """Whether ``leaf`` reads ``buffer`` only at its own iterators, in order."""
    iters = [iv.var for iv in leaf.block.iter_vars]
    extents = static_extents(leaf.block)
    if not leaf.spatial or extents is None or extents != tuple(int(e) for e in buffer.shape):
        return False
    loads = [ld for ld in loads_of(leaf.block.body) if ld.source.same_as(buffer)]

    def own(index: Any, position: int) -> bool:
        return iters[position].same_as(index) or (extents[position] == 1 and isinstance(index, tirx.IntImm))

    return bool(loads) and all(own(index, d) for ld in loads for d, index in enumerate(ld.indices))


def _with_runs(sch: s_tir.Schedule, normal: Normal, contraction: Contraction) -> Contraction:
    """Find out along which role each operand runs in memory, from the expression its tile is fetched with."""
    runs = []
    for rows in (M, N):
        fetch = sch.cache_read(normal.main, operand(sch, normal.main, rows), "shared")
        inline_producers(sch, fetch)
        runs.append(_run_of(sch.get(fetch), rows, contraction))
    (run_a, vector_a), (run_b, vector_b) = runs
    return replace(contraction, run_a=run_a, vector_a=vector_a, run_b=run_b, vector_b=vector_b)


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


def _run_of(fetch: Any, rows: str, contraction: Contraction) -> tuple[str, int]:
    """The role along which a fetched operand is contiguous in memory, and the widest aligned access along it."""
    loads = loads_of(fetch.body.value)
    guarded = not isinstance(fetch.body.value, (tvm.ir.TensorLoad, tirx.Cast))
    if len(loads) != 1:
        return rows, 1
    variables = [iv.var for iv in fetch.iter_vars]
    extents = [int(iv.dom.extent) for iv in fetch.iter_vars]
    coefficients = _linear(loads[0], variables, extents)
    if coefficients is None:
        return rows, 1
    steps = [c if e > 1 else 0 for c, e in zip(coefficients, extents, strict=False)]
    k_step, row_step = steps[-2], steps[-1]
    run = K if k_step == 1 else rows
    if guarded or 1 not in (k_step, row_step):
        return run, 1
    position = len(steps) - (2 if run == K else 1)
    others = [s for i, s in enumerate((*steps, coefficients[-1])) if i != position]
    widest = max(1, 128 // contraction.bits)
    fitting = (v for v in (8, 4, 2, 1) if v <= widest and extents[position] % v == 0 and not any(s % v for s in others))
    return run, next(fitting)


def _linear(load: Any, variables: Sequence[Any], extents: Sequence[int]) -> list[int] | None:
    """The flat offset of ``load`` as one step for each variable plus a constant, or None if it is not linear."""
    analyzer = tvm.sym.Analyzer()
    for var, extent in zip(variables, extents, strict=True):
        analyzer.bind(var, tvm.ir.Range(0, extent))
    offset: Any = tirx.const(0, str(variables[0].ty.dtype))
    for index, size in zip(load.indices, load.source.shape, strict=True):
        offset = offset * size + index
    offset = analyzer.simplify(offset)
    found = tvm.sym.detect_linear_equation(offset, list(variables))
    if not found or not all(isinstance(c, tirx.IntImm) for c in found):
        return None
    return [int(c) for c in found]
