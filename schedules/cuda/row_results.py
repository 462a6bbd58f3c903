"""What a kernel of rows writes beside the row itself: a few numbers for each, made of the row's own reductions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import s_tir
from tvm.ir import TensorLoad

from schedules.analysis import loads
from schedules.cuda.common import Leaf

__all__ = ["of_own_row", "results_in", "row_parts", "with_row_results"]


def results_in(leaf: Leaf, producers: Sequence[Leaf]) -> list[TensorLoad]:
    """The loads in ``leaf`` of what ``producers`` write."""
    return [load for load in loads(leaf.info.block.body) if any(p.writes_to(load.source) for p in producers)]


def row_parts(found: Sequence[Leaf]) -> tuple[list[Leaf], list[Leaf], Leaf] | None:
    """The reductions, the results that have an element for each row, and the result of whole rows."""
    results = [leaf for leaf in found if leaf.info.kind == "injective" and not leaf.intermediate]
    stages = [leaf for leaf in found if leaf not in results]
    if not stages or not results:
        return None
    last = max(results, key=lambda leaf: leaf.info.elements)
    return stages, [leaf for leaf in results if leaf is not last], last


def of_own_row(leaf: Leaf, stages: Sequence[Leaf], rows: int) -> bool:
    """Whether the first axes of a result number the rows, and each element is made of what the stages make of its own
    row alone."""
    results, axes = results_in(leaf, stages), _row_axes(leaf, rows)
    variables = [v for v, extent in zip(leaf.info.variables[:axes], leaf.info.extents, strict=False) if extent > 1]

    def own(load: TensorLoad) -> bool:
        moving = [i for i, size in zip(load.indices, load.source.shape, strict=True) if int(size) > 1]
        return len(moving) == len(variables) and all(v.same_as(i) for v, i in zip(variables, moving, strict=True))

    return axes is not None and len(results) == len(loads(leaf.info.block.body)) and all(map(own, results))


def _row_axes(leaf: Leaf, rows: int) -> int | None:
    """How many of a result's first axes number so many rows."""
    extents = leaf.info.extents
    return next((axes for axes in range(len(extents) + 1) if prod(extents[:axes]) == rows), None)


def with_row_results(sch: s_tir.Schedule, row: Any, each: Sequence[Leaf], rows: int, threads: int) -> Any:
    """Store what has few elements for each row in the loop over rows, by the first of a block's threads."""
    for leaf in each:
        axes, loops = _row_axes(leaf, rows), sch.get_loops(leaf.rv)
        inner = sch.fuse(*loops[axes:]) if loops[axes:] else sch.add_unit_loop(leaf.rv)
        row = sch.merge(row, sch.fuse(*loops[:axes]) if loops[:axes] else sch.add_unit_loop(inner))
        _, thread = sch.split(inner, [None, threads])
        sch.bind(thread, "threadIdx.x")
    return row
