"""Loads and stores, and their strides with respect to a variable.

Strides are found by evaluating the flattened index, so any index expression is understood; one that depends on data,
or bends, has the stride ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Range, TensorLoad

from schedules.analysis.expressions import branches, evaluate, replaced, uses, walk

__all__ = ["Access", "accesses", "linear_offset", "widest_run"]

#: how many values of a variable are tried to find its stride
_MAX_STEPS = 4096


@dataclass(frozen=True)
class Access:
    """One load or store. ``strides[i]`` is how many elements it moves when variable ``i`` advances by one:
    0 where the variable does not matter, None where the step is not constant. ``periods[i]`` is after how many equal
    steps a bent one changes (16 for ``c % 16``), 0 where that does not arise. ``dims[d]`` are the variables that
    index dimension ``d``."""

    buffer: tirx.Buffer
    write: bool
    strides: tuple[int | None, ...]
    periods: tuple[int, ...]
    dims: tuple[frozenset[int], ...]

    def depends(self, position: int) -> bool:
        """Whether the variable at ``position`` moves this access."""
        return self.strides[position] != 0


def _stride(
    indices: Sequence[Any], shape: Sequence[Any], dims: Sequence[frozenset[int]], position: int,
    variables: Sequence[tirx.Var], extents: Sequence[int], bindings: Mapping[tirx.Var, Any],
) -> tuple[int | None, int]:
    """The stride and the period of one access along the variable at ``position``."""
    if extents[position] <= 1 or not any(position in dim for dim in dims):
        return 0, 0
    point: dict[tirx.Var, Any] = {v: np.int64(0) for v in variables}
    point[variables[position]] = np.arange(min(extents[position], _MAX_STEPS), dtype=np.int64)
    for var, expr in bindings.items():
        point[var] = evaluate(expr, point)
    offset: Any = 0
    for index, extent, dim in zip(indices, shape, dims, strict=True):
        # an index that this variable does not move is a constant, even where it is read from memory
        value, size = evaluate(index, point) if position in dim else 0, evaluate(extent, {})
        if value is None or size is None:
            return None, 0
        offset = offset * size + value
    steps = np.diff(np.broadcast_to(offset, (min(extents[position], _MAX_STEPS),)))
    changes = np.flatnonzero(steps != steps[0])
    return (None, int(changes[0]) + 1) if len(changes) else (int(steps[0]), 0)


def accesses(
    body: Any, variables: Sequence[tirx.Var], extents: Sequence[int], bindings: Mapping[tirx.Var, Any] | None = None
) -> tuple[Access, ...]:
    """Every distinct load and store in ``body``, with strides in ``variables``.

    ``bindings`` define further variables of ``body`` (a block's iterators) in terms of ``variables``.
    """
    bound = dict(bindings or {})
    seen: list[tuple[tirx.Buffer, bool, Any]] = []

    def note(buffer: tirx.Buffer, indices: Any, write: bool) -> None:
        if not any(b.same_as(buffer) and w == write and tvm_ffi.structural_equal(i, indices) for b, w, i in seen):
            seen.append((buffer, write, indices))

    walk(
        body,
        (TensorLoad, lambda n: note(n.source, n.indices, False)),
        (tirx.BufferStore, lambda n: note(n.buffer, n.indices, True)),
    )
    reach = {inner: uses(expr, variables) for inner, expr in bound.items()}

    def dimension(index: Any) -> frozenset[int]:
        direct = uses(index, variables)
        inner = list(reach)
        return direct.union(*(reach[inner[i]] for i in uses(index, inner))) if inner else direct

    result = []
    for buffer, write, indices in seen:
        dims = tuple(dimension(i) for i in indices)
        moves = [_stride(indices, buffer.shape, dims, p, variables, extents, bound) for p in range(len(variables))]
        result.append(Access(buffer, write, tuple(s for s, _ in moves), tuple(p for _, p in moves), dims))
    return tuple(result)


def linear_offset(
    load: TensorLoad, variables: Sequence[tirx.Var], extents: Sequence[int]
) -> tuple[list[int], int] | None:
    """The elements that ``load`` lies from its buffer's begin, as a step for each of ``variables`` and a constant;
    None where that is not proved. Unlike strides, which are tried one variable at a time, this holds at every point:
    what an aligned access of several elements needs."""
    analyzer = sym.Analyzer()
    for var, extent in zip(variables, extents, strict=True):
        analyzer.bind(var, Range(0, extent))
    offset: Any = tirx.const(0, str(variables[0].ty.dtype))
    for index, size in zip(load.indices, load.source.shape, strict=True):
        offset = offset * size + index
    found = sym.detect_linear_equation(analyzer.simplify(offset), list(variables))
    if not found or not all(isinstance(c, tirx.IntImm) for c in found):
        return None
    *steps, start = (int(c) for c in found)
    return steps, start


def widest_run(
    value: Any, variables: Sequence[tirx.Var], extents: Sequence[int], position: int, widths: Sequence[int]
) -> int:
    """The first of ``widths`` of which it is proved that ``value``, an element or zero where a guard says so, may be
    fetched for as many neighbours along the variable at ``position`` by one aligned access; 1 where none is.

    They are neighbours in memory, begin at a multiple of their number, and are all there or none is: so lie the
    channels of a pixel that a convolution reads, padding or not.
    """
    guard, load, other = branches(value) or (None, value, None)
    load = load.value if isinstance(load, tirx.Cast) else load
    if not isinstance(load, TensorLoad) or (other is not None and not _is_zero(other)):
        return 1
    offset: Any = tirx.const(0, str(variables[0].ty.dtype))
    for index, size in zip(load.indices, load.source.shape, strict=True):
        offset = offset * size + index
    return next((w for w in widths if extents[position] % w == 0 and _runs(
        offset, guard, variables, extents, position, w)), 1)


def _runs(
    offset: Any, guard: Any, variables: Sequence[tirx.Var], extents: Sequence[int], position: int, width: int
) -> bool:
    analyzer, dtype = sym.Analyzer(), str(variables[position].ty.dtype)
    for i, (var, extent) in enumerate(zip(variables, extents, strict=True)):
        if i != position:
            analyzer.bind(var, Range(0, extent))
    piece, lane = tirx.Var("piece", dtype), tirx.Var("lane", dtype)
    analyzer.bind(piece, Range(0, extents[position] // width))
    analyzer.bind(lane, Range(0, width))
    first, any_lane = ({variables[position]: piece * width + i} for i in (tirx.const(0, dtype), lane))

    def at(expr: Any, where: Mapping[tirx.Var, Any]) -> Any:
        return analyzer.simplify(replaced(expr, where))

    begin = at(offset, first)
    return bool(
        analyzer.can_prove_equal(at(offset, any_lane), begin + lane)
        and analyzer.can_prove_equal(tirx.floormod(begin, tirx.const(width, dtype)), tirx.const(0, dtype))
        and (guard is None or tvm_ffi.structural_equal(at(guard, any_lane), at(guard, first)))
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and float(value.value) == 0.0
