"""What a tensor function computes, block by block, as far as a schedule needs to know.

Everything here reads; nothing transforms. Two views exist: :func:`analyse` looks at a fresh function (which
blocks, of which kind, who feeds whom) and :func:`nest` at one block of a schedule under way (its loops, and how
each access moves when a loop advances by one). Strides are found by evaluating the flattened index, so any index
expression is understood; one that depends on data, or bends, has the stride ``None``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from math import prod
from typing import Any, TypeVar

import numpy as np
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import Call, TensorLoad

__all__ = [
    "Access", "BlockInfo", "FuncInfo", "Loop", "Nest", "accesses", "analyse", "evaluate", "expensive_calls", "nest",
    "op_name", "remembered", "uses", "walk",
]

_T = TypeVar("_T")

#: a use of one of these per element outweighs a load, so that computing it twice is worth a buffer
_EXPENSIVE = frozenset({
    "exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "pow", "erf", "tanh", "sigmoid", "sin", "cos", "tan",
    "sinh", "cosh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "sqrt", "rsqrt", "fmod",
    "call_pure_extern", "call_extern", "call_llvm_pure_intrin",
})

#: how many values of a variable are tried to find its stride
_MAX_STEPS = 4096

_INTEGER_OPS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Div: lambda a, b: np.trunc(a / b).astype(np.int64),
    tirx.Mod: lambda a, b: np.fmod(a, b),
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b,
    tirx.EQ: lambda a, b: a == b,
    tirx.NE: lambda a, b: a != b,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}


def op_name(call: Call) -> str:
    """The operator's bare name: ``exp`` for a call to ``tirx.exp``; empty for a call of anything else."""
    return str(getattr(call.op, "name", "")).rpartition(".")[2]


def walk(node: Any, *entries: tuple[Any, Callable[[Any], Any]]) -> None:
    """Call ``entries`` = (type, callback) on every matching node below and including ``node``, children first."""
    tvm_ffi.structural_walk(node, [(kind, lambda value, f=f: (f(value), None)[1]) for kind, f in entries])


def uses(node: Any, variables: Sequence[tirx.Var]) -> frozenset[int]:
    """The positions of those ``variables`` that occur in ``node``."""
    free = tirx.analysis.undefined_vars(node)
    return frozenset(i for i, v in enumerate(variables) if any(v.same_as(f) for f in free))


def evaluate(expr: Any, values: Mapping[tirx.Var, Any]) -> Any:
    """An integer expression over numpy values of its variables; None where it reads memory or is no integer."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, tirx.IntImm):
        return int(expr.value)
    if isinstance(expr, tirx.Var):
        return values.get(expr)
    if isinstance(expr, tirx.Cast):
        return evaluate(expr.value, values)
    if isinstance(expr, tirx.Not):
        inner = evaluate(expr.a, values)
        return None if inner is None else np.logical_not(inner)
    branches = _branches(expr)
    if branches is not None:
        condition, yes, no = (evaluate(e, values) for e in branches)
        return None if condition is None or yes is None or no is None else np.where(condition, yes, no)
    operation = _INTEGER_OPS.get(type(expr))
    if operation is None:
        return None
    a, b = evaluate(expr.a, values), evaluate(expr.b, values)
    return None if a is None or b is None else operation(a, b)


def _branches(expr: Any) -> tuple[Any, Any, Any] | None:
    if isinstance(expr, tirx.Select):
        return expr.condition, expr.true_value, expr.false_value
    if isinstance(expr, Call) and op_name(expr) == "if_then_else":
        return expr.args[0], expr.args[1], expr.args[2]
    return None


def remembered(look: Callable[..., _T]) -> Callable[..., _T]:
    """Keep the results of ``look(func, *hashable)`` for the last few functions; asking a space takes it many times."""
    kept: deque[tuple[tirx.PrimFunc, tuple[Any, ...], _T]] = deque(maxlen=8)

    @wraps(look)
    def cached(func: tirx.PrimFunc, *rest: Any) -> _T:
        for known, arguments, result in tuple(kept):
            if known.same_as(func) and arguments == rest:
                return result
        result = look(func, *rest)
        kept.append((func, rest, result))
        return result

    return cached


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
    if extents[position] == 1 or not any(position in dim for dim in dims):
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


def expensive_calls(body: Any) -> int:
    """How many transcendental or otherwise slow calls and divisions ``body`` makes."""
    count = [0]

    def call(node: Call) -> None:
        count[0] += op_name(node) in _EXPENSIVE

    def division(node: tirx.Div) -> None:
        count[0] += not isinstance(node.b, tirx.FloatImm | tirx.IntImm)

    walk(body, (Call, call), (tirx.Div, division))
    return count[0]


@dataclass(frozen=True)
class BlockInfo:
    """One block of a fresh function.

    ``kind`` is ``injective`` (every element of the output is written once, no accumulation), ``reduction`` (has an
    initial value and reduces at least one iterator) or ``opaque`` (anything else: nothing may be assumed).
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
        """For each iterator, whether it is reduced."""
        return tuple(int(i.iter_type) == tirx.IterVar.CommReduce for i in self.block.iter_vars)

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
            found[0] = found[0] or _branches(node) is not None

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
    def contraction(self) -> bool:
        """Whether two inputs that are both reduced are multiplied and one of them is reused along an output
        iterator, so that a register tile pays (matrix product, convolution, depthwise convolution)."""
        reduced = [a for a in self.reads if any(a.depends(r) for r in self.reduced)]
        if self.kind != "reduction" or len(reduced) < 2 or not _multiplies(self.block.body):
            return False
        return any(not a.depends(s) and self.extents[s] > 1 for a in reduced for s in self.spatial)


def _multiplies(body: Any) -> bool:
    found = [False]

    def loads(node: Any) -> bool:
        hit = [False]
        walk(node, (TensorLoad, lambda _: hit.__setitem__(0, True)))
        return hit[0]

    walk(body, (tirx.Mul, lambda n: found.__setitem__(0, found[0] or (loads(n.a) and loads(n.b)))))
    return found[0]


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


def _block(statement: Any) -> BlockInfo | None:
    loops = []
    while isinstance(statement, tirx.For):
        loops.append(statement)
        statement = statement.body
    if not isinstance(statement, s_tir.SBlockRealize):
        return None
    block = statement.block
    static = all(isinstance(loop.extent, tirx.IntImm) and loop.kind == tirx.ForKind.SERIAL for loop in loops)
    iterators = all(
        isinstance(i.dom.extent, tirx.IntImm) and isinstance(i.dom.min, tirx.IntImm) and int(i.dom.min) == 0
        for i in block.iter_vars
    )
    if not iterators:
        return BlockInfo(str(block.name_hint), block, "opaque", False)
    bound = len(loops) == len(block.iter_vars) and all(
        value.same_as(loop.loop_var) or (isinstance(value, tirx.IntImm) and int(i.dom.extent) == 1)
        for value, loop, i in zip(statement.iter_values, loops, block.iter_vars, strict=True)
    )
    always = isinstance(statement.predicate, tirx.IntImm) and bool(int(statement.predicate))
    return BlockInfo(str(block.name_hint), block, _kind(block), static and bound and always)


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
    own = [False]
    walk(store.value, (TensorLoad, lambda n: own.__setitem__(0, own[0] or n.source.same_as(store.buffer))))
    return "opaque" if own[0] else "injective"


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


def nest(sch: s_tir.Schedule, block_rv: s_tir.schedule.SBlockRV) -> Nest:
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
        parts = _branches(node)
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
        parts = _branches(node)
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
