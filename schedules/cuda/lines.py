"""Where the elements of a head's queries, keys or values lie in memory, and boxes of them that can be copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import sym, tirx
from tvm.ir import TensorLoad

from schedules.cuda.emit import i64, substituted

__all__ = ["Lines", "Place", "lines_of", "place_of"]

#: of a tensor that boxes are copied of, every stride and the first element lie at multiples of so many bytes
_ALIGNED_BYTES = 16
#: bytes of a stride, and elements along an axis, that boxes are copied with at most
_MOST_STRIDE, _MOST_SIZE = 1 << 40, 1 << 32


class Place(NamedTuple):
    """Elements from row to row and from column to column, what divides where a head begins, that place as an expression
    of the heads' variables, and the largest that it may be."""

    row: int
    column: int
    common: int
    start: Any
    most: int


def place_of(
    buffer: tirx.Buffer, indices: Sequence[Any], row: Any, column: Any, heads: Sequence[tuple[Any, Any]]
) -> Place | None:
    """Where an element lies, of ``heads`` that are variables with their extents; None where it has no such steps."""
    offset: Any = tirx.const(0, row.ty.dtype)
    for index, size in zip(indices, buffer.shape, strict=True):
        offset = offset * size + index
    analyzer = sym.Analyzer()
    for variable, extent in heads:
        kind = variable.ty.dtype
        size = tirx.const(extent, kind) if isinstance(extent, int) else extent.astype(kind)
        analyzer.bind(variable, tvm.ir.Range.from_min_extent(tirx.const(0, kind), size))
    found = sym.detect_linear_equation(analyzer.simplify(offset), [row, column])
    if not found or not all(isinstance(step, tirx.IntImm) for step in found[:2]):
        return None
    start = analyzer.simplify(found[2])
    divisors = analyzer.modular_set(start)
    common = int(divisors.base) if int(divisors.coeff) == 0 else _divisor(int(divisors.coeff), int(divisors.base))
    return Place(int(found[0]), int(found[1]), common, start, int(analyzer.const_int_bound(start).max_value))


def _divisor(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@dataclass(frozen=True)
class Lines:
    """Rows of 16-bit floats of every head as a tensor of columns, rows and places where heads begin, ``step`` elements
    apart, of which boxes can be copied."""

    buffer: tirx.Buffer
    rows: int
    columns: int
    row_step: int
    step: int
    count: int
    start: Any  # where a head begins, of the variables of heads

    @property
    def first(self) -> TensorLoad:
        """The tensor's first element."""
        return tirx.BufferLoad(self.buffer, [i64(0) for _ in self.buffer.shape])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As :func:`schedules.cuda.hopper.encode` takes them."""
        return self.columns, self.rows, self.count

    @property
    def strides(self) -> tuple[int, int]:
        """In bytes, without the columns'."""
        return 2 * self.row_step, 2 * self.step

    def at(self, batch: Mapping[Any, Any]) -> Any:
        """The number of the place where a head begins."""
        return tirx.Cast("int32", tirx.floordiv(substituted(self.start, batch), tirx.const(
            self.step, self.start.ty.dtype)))


def lines_of(
    load: TensorLoad, row: Any, column: Any, extents: tuple[int, int], heads: Sequence[tuple[Any, Any]]
) -> Lines | None:
    """Rows and columns, so many, of 16-bit floats from which boxes can be copied; None where none can."""
    found = place_of(load.source, load.indices, row, column, heads)
    if found is None or found.column != 1 or found.row < extents[1]:
        return None
    step = found.common or _ALIGNED_BYTES // 2
    count = found.most // step + 1
    aligned = not any(2 * each % _ALIGNED_BYTES for each in (found.row, step))
    known = 2 * max(found.row, step) < _MOST_STRIDE and max(*extents, count) < _MOST_SIZE
    return Lines(load.source, *extents, found.row, step, count, found.start) if aligned and known else None
