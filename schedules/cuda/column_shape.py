"""What a function asks of :mod:`schedules.cuda.columns`: results that lie side by side, and how many of them one access
moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from schedules.analysis import branches, loads, remembered, uses, walk, widest_run
from schedules.cuda.common import Leaf, inline_injective, leaves, loop_kinds, scratch, uniform
from schedules.cuda.reduction import follows, own_order

__all__ = ["PIECE", "TYPES", "Shape", "bits_of", "guards", "neighbours", "shape_of"]

#: bytes of the widest access
PIECE = 16
#: what TVM writes vectors of
TYPES = frozenset({"float32", "float16", "bfloat16", "int32"})


@dataclass(frozen=True)
class Shape:
    """``results``, of which ``columns`` lie side by side, of so many ``terms`` each, ``run`` of them in a row;
    ``vector`` neighbours are fetched at once, ``bits`` each, and ``stored`` at once. ``last`` numbers the iterator
    along them of the reduction, ``out`` that of what is done to results, if anything is. ``guarded`` says that terms
    lie on a border that is not there."""

    results: int
    columns: int
    terms: int
    run: int
    vector: int
    bits: int
    stored: int
    last: int
    out: int
    guarded: bool

    @property
    def pieces(self) -> int:
        """Vectors of results."""
        return self.results // self.vector


@remembered
def shape_of(func: tirx.PrimFunc) -> Shape | None:
    found = leaves(sch := scratch(func))
    if not uniform(leaf.info for leaf in found):
        return None
    guarded = bool(guards(found))
    found = inline_injective(sch, found)
    if not found or len(found) > 2 or found[0].info.kind != "reduction" or not own_order(found[0].info):
        return None
    main, *rest = found
    if len(main.info.writes) != 1 or loop_kinds(sch, main) is None or main.intermediate != bool(rest):
        return None
    if rest and not follows(main, rest[0]):
        return None
    last, out = _last(main), _last(rest[0]) if rest else 0
    if last is None or out is None or (rest and not _same_column(main, last, rest[0], out)):
        return None
    fetched = moving(main, last)
    bits = max((bits_of(load) for load in fetched), default=8 * PIECE)
    vector = neighbours(main, last, fetched, PIECE * 8 // bits)
    if vector == 1 or any(str(load.source.dtype) not in TYPES for load in fetched):
        return None
    stored = _stored(rest[0], out, vector) if rest else _fitting(main.info.writes[0], vector)
    results = main.info.outputs
    run = [extent for extent, reduced in zip(main.info.extents, main.info.reduces, strict=True) if reduced][-1]
    return Shape(results, main.info.extents[last], main.info.elements // results, run, vector, bits, stored, last, out,
                  guarded)


def guards(found: Sequence[Leaf]) -> list[Leaf]:
    """Leaves that a reduction reads, which are something else, or nothing, on a border."""
    mains = [leaf for leaf in found if leaf.info.kind == "reduction"]
    read = [region.source for main in mains for region in main.info.block.reads]
    return [leaf for leaf in found if leaf.intermediate and leaf.info.kind == "injective"
            and any(leaf.writes_to(buffer) for buffer in read) and _is_guard(leaf)]


def _is_guard(leaf: Leaf) -> bool:
    body = leaf.info.block.body
    return isinstance(body, tirx.BufferStore) and branches(body.value) is not None


def _last(leaf: Leaf) -> int | None:
    """The last data-parallel iterator that has several points."""
    return next((i for i in reversed(leaf.info.spatial) if leaf.info.extents[i] > 1), None)


def _same_column(main: Leaf, last: int, rest: Leaf, out: int) -> bool:
    """Whether what follows the reduction has results side by side as the reduction has."""
    loaded = [load for load in loads(rest.info.block.body) if main.writes_to(load.source)]
    stores: list[Any] = []
    walk(main.info.block.body, (tirx.BufferStore, stores.append))
    places = {n for store in stores for n, index in enumerate(store.indices)
              if uses(index, [main.info.variables[last]])}
    return len(places) == 1 and all(
        bool(uses(index, [rest.info.variables[out]])) == (n in places)
        for load in loaded for n, index in enumerate(load.indices))


def moving(leaf: Leaf, position: int) -> list[TensorLoad]:
    """What a leaf reads, of what itself does not write, along an iterator."""
    variable = leaf.info.variables[position]
    return [load for load in loads(leaf.info.block.body) if not leaf.writes_to(load.source) and uses(load, [variable])]


def _fitting(written: tirx.Buffer, vector: int) -> int:
    """How many neighbours of a buffer one access may take, of so many."""
    if str(written.dtype) not in TYPES:
        return 1
    return min(vector, 8 * PIECE // int(tvm.runtime.DataType(str(written.dtype)).bits))


def bits_of(load: TensorLoad) -> int:
    return int(tvm.runtime.DataType(str(load.source.dtype)).bits)


def neighbours(leaf: Leaf, position: int, accesses: Sequence[TensorLoad], most: int) -> int:
    """How many neighbours along an iterator all accesses may take at once."""
    widths = [w for w in (8, 4, 2) if w <= most]
    return min((widest_run(each, leaf.info.variables, leaf.info.extents, position, widths) for each in accesses),
               default=1)


def _stored(rest: Leaf, out: int, vector: int) -> int:
    """How many neighbours one access of what is done to results may take: eight of 16 bits are computed in halves
    (:mod:`schedules.cuda.halves`)."""
    stores: list[Any] = []
    walk(rest.info.block.body, (tirx.BufferStore, stores.append))
    written = [tirx.BufferLoad(store.buffer, store.indices) for store in stores]
    accesses = [*written, *moving(rest, out)]
    if any(str(each.source.dtype) not in TYPES for each in accesses):
        return 1
    if vector == 8 and all(bits_of(each) == 16 for each in written) and neighbours(rest, out, accesses, 8) == 8:
        return 8
    whole = all(str(each.source.dtype) != "bfloat16" for each in accesses)
    return neighbours(rest, out, accesses, min(vector, 4)) if whole else 1
