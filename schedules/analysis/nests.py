"""The loops around one block of a partially scheduled function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis.access import Access, accesses
from schedules.analysis.expressions import branches, expensive_calls, uses, walk

__all__ = ["Loop", "Nest", "nest_of"]


@dataclass(frozen=True)
class Loop:
    """A loop of a schedule: ``kind`` is S (spatial), R (reduced), or M (mixed, or bound to nothing)."""

    rv: s_tir.schedule.LoopRV
    extent: int
    kind: str


@dataclass(frozen=True)
class Nest:
    """The loops around one block, outermost first, and its accesses with strides in those loops.

    ``conditions`` are the loops that decide a branch (a select evaluates both sides and is none); ``bare`` those
    whose value is used outside an index.
    """

    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    conditions: frozenset[int]
    bare: frozenset[int]
    expensive: int

    @property
    def writes(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.write)

    @property
    def reads(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if not a.write)

    def linear(self, outer: int, inner: int) -> bool:
        """Whether the two loops can be fused with no division left in any index."""
        if {outer, inner} & (self.conditions | self.bare):
            return False
        size = self.loops[inner].extent
        for access in self.accesses:
            o, i = access.strides[outer], access.strides[inner]
            if o is None or i is None or o != i * size:
                return False
        return True


def nest_of(sch: s_tir.Schedule, block_rv: s_tir.schedule.SBlockRV) -> Nest:
    """Describe a block of a schedule under way. Loops of symbolic extent count as extent 1 long."""
    realize = tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")(sch, block_rv)
    block = realize.block
    rvs = list(sch.get_loops(block_rv))
    loops = [sch.get(rv) for rv in rvs]
    variables = [loop.loop_var for loop in loops]
    extents = [int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else 1 for loop in loops]
    bindings = {i.var: value for i, value in zip(block.iter_vars, realize.iter_values, strict=True)}
    table = tuple(
        Loop(rv, extent, _loop_kind(var, block, realize.iter_values))
        for rv, extent, var in zip(rvs, extents, variables, strict=True)
    )
    inner = list(bindings)
    reach = [uses(bindings[v], variables) for v in inner]

    def through(node: Any) -> frozenset[int]:
        return uses(node, variables).union(*(reach[i] for i in uses(node, inner)))

    deciding = _conditions(block)
    conditions = frozenset().union(*(through(c) for c in deciding))
    bare = frozenset().union(*(through(v) for v in (*_bare_values(block.body), *deciding)))
    found = accesses(block.body, variables, extents, bindings)
    return Nest(table, found, conditions, bare, expensive_calls(block.body))


def _conditions(block: s_tir.SBlock) -> list[Any]:
    """The conditions of the body's branches, simplified under the iterators' ranges; those always true left out."""
    analyzer = sym.Analyzer()
    for iterator in block.iter_vars:
        analyzer.bind(iterator.var, iterator.dom)
    found: list[Any] = []

    def branch(node: Call) -> None:
        parts = branches(node)
        if parts is not None:
            condition = analyzer.simplify(parts[0])
            if not isinstance(condition, tirx.IntImm):
                found.append(condition)

    walk(block.body, (Call, branch))
    return found


def _loop_kind(var: tirx.Var, block: s_tir.SBlock, values: Sequence[Any]) -> str:
    types = {int(i.iter_type) for i, value in zip(block.iter_vars, values, strict=True) if uses(value, [var])}
    if types == {tirx.IterVar.DataPar}:
        return "S"
    return "R" if types == {tirx.IterVar.CommReduce} else "M"


def _bare_values(body: Any) -> list[Any]:
    """The variables of ``body`` whose value is data, neither an index nor part of a branch's condition."""
    found: list[Any] = []

    def call(node: Call, visitor: Any) -> None:
        parts = branches(node)
        for child in parts[1:] if parts is not None else node.args:
            visitor.visit(child)

    tvm_ffi.structural_visit(
        body,
        [
            (TensorLoad, lambda node, visitor: None),
            (tirx.BufferStore, lambda node, visitor: (visitor.visit(node.value), None)[1]),
            (Call, call),
            (tirx.Var, lambda node, visitor: found.append(node)),
        ],
    )
    return found
