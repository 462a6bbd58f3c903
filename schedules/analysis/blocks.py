"""The blocks of an unscheduled function: their kinds, and the data flow between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis.access import Access, accesses
from schedules.analysis.expressions import branches, expensive_calls, loads, walk
from schedules.analysis.memo import remembered

__all__ = ["BlockInfo", "FuncInfo", "analyse", "describe", "is_empty"]


@dataclass(frozen=True)
class BlockInfo:
    """One block, of a fresh function or of a schedule under way.

    ``kind`` is ``injective`` (every element of the output is written once, no accumulation), ``reduction`` (has an
    initial value and reduces at least one iterator) or ``opaque`` (anything else: nothing may be assumed). Only of
    blocks that are not opaque the ``extents`` are known, and count from 0.
    """

    name: str
    block: s_tir.SBlock
    kind: str
    plain: bool  # iterators are bound to the loops one to one, loops are serial, no predicate

    @cached_property
    def variables(self) -> tuple[tirx.Var, ...]:
        return tuple(i.var for i in self.block.iter_vars)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        return tuple(int(i.dom.extent) for i in self.block.iter_vars)

    @cached_property
    def reduces(self) -> tuple[bool, ...]:
        """For each iterator, whether it is a reduction."""
        return tuple(int(i.iter_type) == tirx.IterVar.CommReduce for i in self.block.iter_vars)

    @cached_property
    def regular(self) -> bool:
        """Whether every iterator is data-parallel or reduced, so that loops over it may be fused, split and bound."""
        return all(int(i.iter_type) in (tirx.IterVar.DataPar, tirx.IterVar.CommReduce) for i in self.block.iter_vars)

    @cached_property
    def index_types(self) -> frozenset[str]:
        """The integer types of the iterators."""
        return frozenset(str(i.dom.extent.ty.dtype) for i in self.block.iter_vars)

    @cached_property
    def spatial(self) -> tuple[int, ...]:
        """Positions of the iterators that index the output."""
        return tuple(i for i, r in enumerate(self.reduces) if not r)

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Positions of the iterators that are reduced."""
        return tuple(i for i, r in enumerate(self.reduces) if r)

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        return accesses(self.block.body, self.variables, self.extents)

    @cached_property
    def writes(self) -> tuple[tirx.Buffer, ...]:
        return tuple(r.source for r in self.block.writes)

    @cached_property
    def reads(self) -> tuple[Access, ...]:
        """The loads, without an accumulator's own."""
        return tuple(a for a in self.accesses if not a.write and not any(a.buffer.same_as(w) for w in self.writes))

    @property
    def elements(self) -> int:
        """How often the body runs."""
        return prod(self.extents)

    @property
    def outputs(self) -> int:
        """How many elements the block writes."""
        return prod(self.extents[i] for i in self.spatial)

    @cached_property
    def annotation(self) -> str:
        """The ``mlc.op`` annotation, or the empty string."""
        return str(self.block.annotations["mlc.op"]) if "mlc.op" in self.block.annotations else ""

    @cached_property
    def expensive(self) -> int:
        return expensive_calls(self.block.body)

    @cached_property
    def conditional(self) -> bool:
        """Whether the body chooses between branches (padding, concatenation)."""
        found = [False]

        def visit(node: Any) -> None:
            found[0] = found[0] or branches(node) is not None

        walk(self.block.body, (Call, visit), (tirx.Select, visit))
        return found[0]

    @cached_property
    def windowed(self) -> bool:
        """Whether an input's dimension is indexed by an output and a reduced iterator together (``oh + kh``)."""
        return any(
            any(self.reduces[v] for v in dim) and any(not self.reduces[v] and self.extents[v] > 1 for v in dim)
            for access in self.reads for dim in access.dims
        )

    @cached_property
    def factors(self) -> tuple[TensorLoad, TensorLoad] | None:
        """The two loads whose product the block sums up from zero, conversions of type left out; None where it
        computes anything else."""
        store, init = self.block.body, self.block.init
        if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
            return None
        if not isinstance(init, tirx.BufferStore) or not _is_zero(init.value):
            return None
        total, term = store.value.a, _bare(store.value.b)
        if not isinstance(total, TensorLoad) or not total.source.same_as(store.buffer):
            return None
        if not isinstance(term, tirx.Mul):
            return None
        a, b = _bare(term.a), _bare(term.b)
        return (a, b) if isinstance(a, TensorLoad) and isinstance(b, TensorLoad) else None

    @cached_property
    def contraction(self) -> bool:
        """Whether two inputs that are both reduced are multiplied and one of them is reused along an output
        iterator, so that a register tile pays (matrix product, convolution, depthwise convolution)."""
        reduced = [a for a in self.reads if any(a.depends(r) for r in self.reduced)]
        if self.kind != "reduction" or len(reduced) < 2 or not _multiplies(self.block.body):
            return False
        return any(not a.depends(s) and self.extents[s] > 1 for a in reduced for s in self.spatial)


def _multiplies(body: Any) -> bool:
    found = [False]
    walk(body, (tirx.Mul, lambda n: found.__setitem__(0, found[0] or bool(loads(n.a) and loads(n.b)))))
    return found[0]


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, tirx.Cast) else value


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm | tirx.IntImm) and float(value.value) == 0.0


@dataclass(frozen=True)
class FuncInfo:
    """The blocks of a function in program order. ``plain`` is False as soon as one thing is not understood:
    an opaque block, a symbolic extent, two blocks of one name, statements outside blocks."""

    func: tirx.PrimFunc
    blocks: tuple[BlockInfo, ...]
    plain: bool

    def __getitem__(self, name: str) -> BlockInfo:
        return next(b for b in self.blocks if b.name == name)

    def is_output(self, info: BlockInfo) -> bool:
        """Whether the block writes one of the function's parameters."""
        return any(w.same_as(p) for w in info.writes for p in self.func.params)

    @cached_property
    def outputs(self) -> tuple[BlockInfo, ...]:
        return tuple(b for b in self.blocks if self.is_output(b))

    @cached_property
    def reductions(self) -> tuple[BlockInfo, ...]:
        return tuple(b for b in self.blocks if b.kind == "reduction")

    def consumers(self, info: BlockInfo) -> tuple[BlockInfo, ...]:
        """The blocks that read what ``info`` writes."""
        return tuple(
            b for b in self.blocks
            if b is not info and any(a.buffer.same_as(w) for a in b.reads for w in info.writes)
        )

    def producers(self, info: BlockInfo) -> tuple[BlockInfo, ...]:
        """The blocks that write what ``info`` reads."""
        return tuple(
            b for b in self.blocks
            if b is not info and any(a.buffer.same_as(w) for a in info.reads for w in b.writes)
        )

    def downstream(self, info: BlockInfo) -> tuple[BlockInfo, ...]:
        """Every block that depends on ``info``, in program order."""
        reached = {info.name}
        for block in self.blocks:
            if any(p.name in reached for p in self.producers(block)):
                reached.add(block.name)
        return tuple(b for b in self.blocks if b.name in reached and b is not info)


@remembered
def analyse(func: tirx.PrimFunc) -> FuncInfo:
    """Look at a fresh function. Never raises: what is not understood makes the result not ``plain``."""
    body = func.body
    if not isinstance(body, s_tir.SBlockRealize) or body.block.iter_vars or body.block.match_buffers:
        return FuncInfo(func, (), False)
    statements = list(body.block.body.seq) if isinstance(body.block.body, tirx.SeqStmt) else [body.block.body]
    infos, plain = [], True
    for statement in statements:
        info = _block(statement)
        if info is None:
            plain = False
            continue
        infos.append(info)
        plain = plain and info.plain and info.kind != "opaque"
    unique = len({i.name for i in infos}) == len(infos)
    return FuncInfo(func, tuple(infos), plain and unique and bool(infos))


def is_empty(func: tirx.PrimFunc) -> bool:
    """Whether a parameter has no elements, so that there is little or nothing to compute."""
    return any(int(extent) == 0 for parameter in func.params for extent in parameter.shape)


def describe(block: s_tir.SBlock) -> BlockInfo:
    """Analyse one block of a partial schedule, whatever loops are around it."""
    static = all(
        isinstance(i.dom.extent, tirx.IntImm) and isinstance(i.dom.min, tirx.IntImm) and int(i.dom.min) == 0
        for i in block.iter_vars
    )
    return BlockInfo(str(block.name_hint), block, _kind(block) if static else "opaque", plain=False)


def _block(statement: Any) -> BlockInfo | None:
    loops = []
    while isinstance(statement, tirx.For):
        loops.append(statement)
        statement = statement.body
    if not isinstance(statement, s_tir.SBlockRealize):
        return None
    block = statement.block
    static = all(isinstance(loop.extent, tirx.IntImm) and loop.kind == tirx.ForKind.SERIAL for loop in loops)
    bound = len(loops) == len(block.iter_vars) and all(
        value.same_as(loop.loop_var) or (isinstance(value, tirx.IntImm) and int(i.dom.extent) == 1)
        for value, loop, i in zip(statement.iter_values, loops, block.iter_vars, strict=True)
    )
    always = isinstance(statement.predicate, tirx.IntImm) and bool(int(statement.predicate))
    return replace(describe(block), plain=static and bound and always)


def _kind(block: s_tir.SBlock) -> str:
    types = {int(i.iter_type) for i in block.iter_vars}
    if block.alloc_buffers or block.match_buffers or not types <= {tirx.IterVar.DataPar, tirx.IterVar.CommReduce}:
        return "opaque"
    nested = [False]
    inner = (s_tir.SBlockRealize, tirx.For, tirx.While, tirx.IfThenElse)
    walk(block.body, (inner, lambda _: nested.__setitem__(0, True)))
    if nested[0]:
        return "opaque"
    if tirx.IterVar.CommReduce in types:
        return "reduction" if block.init is not None else "opaque"
    if block.init is not None or not isinstance(block.body, tirx.BufferStore):
        return "opaque"
    store = block.body
    own = any(load.source.same_as(store.buffer) for load in loads(store.value))
    return "opaque" if own else "injective"
