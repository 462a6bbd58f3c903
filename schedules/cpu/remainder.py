"""Sparse columns of a weight times all rows: vectors of rows are accumulated one column at a time."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx

from schedules.analysis import analyse
from schedules.cpu.common import extent_of
from schedules.cpu.tiling import divisors, find_annotated
from schedules.machine import cpu_machine
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["REMAINDER"]

_OP = "remainder"
#: chunks for each core: columns have different numbers of values
_CHUNKS = 4


class Remainder(Space):
    """Knob: ``columns`` of a parallel chunk. The block, annotated ``"remainder"``, holds loops whose extents are data;
    those around it are over columns and vectors of rows."""

    name = "cpu.remainder"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return any(block.annotation == _OP for block in analyse(func).blocks)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return (Knob("columns", tuple(divisors(_columns(func), 256))),)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        most = -(-_columns(func) // (_CHUNKS * cpu_machine(target).cores))
        sizes = divisors(_columns(func), 256)
        yield {"columns": max(size for size in sizes if size <= max(1, most))}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        columns = pick("columns")
        block = find_annotated(sch, (_OP,))
        assert block is not None
        column, *_ = sch.get_loops(block)
        chunk, _ = sch.split(column, [None, columns])
        if extent_of(sch, chunk) > 1:
            sch.parallel(chunk)


def _columns(func: tirx.PrimFunc) -> int:
    return int(func.params[-1].shape[0])


REMAINDER = Remainder()
