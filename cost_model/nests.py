"""Reads a tensor function, scheduled or not, as a list of loop nests, one for each statement that stores.

Loops are read where the schedule left them, before any lowering, so that the walk costs about a millisecond
and the blocks still say which loops reduce.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import tvm
import tvm_ffi
from tvm import tirx

from cost_model.affine import Affine, Environment, evaluate

__all__ = ["Access", "Buffer", "Function", "Loop", "Nest", "read_function"]

_KINDS = ("serial", "parallel", "vectorized", "unrolled", "thread")  # by tirx.ForKind
_REDUCE = 2  # tirx.IterVar.CommReduce
#: annotations of blocks whose sums run over short numbers, several products a step, and the bytes of an activation
_SHORT = {"conv2d_nchwc_integer": 1, "conv2d_nchwc_bytes": 1, "dense_integer": 1, "dense_bytes": 1,
          "conv2d_winograd_integer": 1, "depthwise_nchwc_taps": 1, "conv2d_nchwc_bfloat": 2, "dense_bfloat": 2}
#: types of the activations, weights and sums of an intrinsic that takes one step -> how many activations that is
_DOTS: dict[tuple[str, ...], int] = {
    ("uint8", "int8", "int32"): 4, ("int16", "int16", "int32"): 2, ("bfloat16", "bfloat16", "float32"): 2,
}
#: those of one that unpacks bytes of weights where they are whole or two halves: as many activations as it reads
_UNPACKING = ("int8", "uint8", "int32")
#: bytes of a step that one lane reads of either operand at once
_WORD = 4
#: how the names of calls begin that are an instruction on the tiles of a matrix unit
_TILES = "mlc_tiles_"
#: how the annotations begin that ask for prefetches
_FETCH = "mlc.prefetch"
#: cost of one call in multiply-adds, from the polynomials LLVM and TVM expand them to
_SPECIAL = {
    "exp": 12, "tanh": 16, "erf": 20, "sigmoid": 14, "log": 14, "pow": 26, "rsqrt": 8, "sqrt": 8, "sin": 16, "cos": 16,
}


@dataclass(frozen=True)
class Loop:
    """``kind``: serial, parallel, vectorized, unrolled, or the thread tag (``blockIdx.x`` …).

    ``partitioned`` loops are cut in two when they are lowered, so that a predicate holds throughout the larger part.
    ``fetching`` ones ask for what later iterations of the loops around them will read.
    """

    extent: int
    kind: str
    auto_unroll: int = 0
    partitioned: bool = False
    fetching: bool = False


@dataclass(frozen=True)
class Buffer:
    """``bytes`` is the size of the whole buffer, ``element`` of one element; ``argument`` for parameters.

    A ``cold`` one is in no cache when the function begins: a weight of a model whose weights do not fit there.
    """

    name: str
    shape: tuple[int, ...]
    element: int
    scope: str
    argument: bool
    cold: bool = False

    @property
    def bytes(self) -> float:
        total = float(self.element)
        for extent in self.shape:
            total *= extent
        return total


@dataclass(frozen=True)
class Access:
    """One load or store: ``index`` holds one affine form per dimension."""

    buffer: Buffer
    index: tuple[Affine, ...]
    store: bool

    def step(self, loop: int) -> float:
        """Elements that one step of ``loop`` moves this access through memory."""
        stride, total = 1.0, 0.0
        for affine, extent in zip(reversed(self.index), reversed(self.buffer.shape), strict=True):
            total += affine.step(loop) * stride
            stride *= extent
        return total

    def elements(self, loops: Collection[int], extents: list[int]) -> list[float]:
        """Distinct positions in each dimension while ``loops`` run, the others standing still."""
        return [
            min(float(extent), affine.positions(loops, extents))
            for affine, extent in zip(self.index, self.buffer.shape, strict=True)
        ]


@dataclass(frozen=True)
class Nest:
    """A store with its loops, outermost first. ``arithmetic`` and ``special`` count operations an iteration.

    ``predicate`` has the numbers of the loops that its predicates change with; they hold in the part ``useful`` of all
    iterations. Of the ``conditions`` within its expression (a border's zeros), ``conditional`` has those loops.

    An intrinsic that adds dot products of short numbers to a vector of sums is read as the multiply-adds whose place
    it takes: of words of four bytes, for every lane.
    """

    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]  # the store comes first
    reduction: frozenset[int]  # numbers of the loops that reduce
    arithmetic: float
    special: float
    predicated: bool
    opaque: bool = False  # a tensor intrinsic or an external call
    predicate: frozenset[int] = frozenset()
    useful: float = 1.0
    conditions: int = 0
    conditional: frozenset[int] = frozenset()
    short: int = 0  # bytes of an operand of which an instruction may add up several products at a time
    tiles: bool = False  # sums lie in the tiles of a matrix unit, which the unrolled and vectorised loops fill

    @property
    def extents(self) -> list[int]:
        return [loop.extent for loop in self.loops]

    @property
    def iterations(self) -> float:
        total = 1.0
        for loop in self.loops:
            total *= loop.extent
        return total

    @property
    def flops(self) -> float:
        """Operations of the whole nest."""
        return self.iterations * (self.arithmetic + self.special)


@dataclass
class Function:
    """``allocations`` are the intermediate buffers, ``arguments`` the parameters."""

    nests: list[Nest] = field(default_factory=list)
    allocations: list[Buffer] = field(default_factory=list)
    arguments: list[Buffer] = field(default_factory=list)


def read_function(mod: tvm.IRModule | tirx.PrimFunc, cold: Sequence[int] = ()) -> Function:
    """The nests of the one function in ``mod`` (of ``main`` where there are several).

    ``cold`` are the positions of the parameters that no cache holds.
    """
    if isinstance(mod, tirx.PrimFunc):
        func = mod
    else:
        functions = {v.name_hint: f for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
        func = functions.get("main") or next(iter(functions.values()))
    return _Walk(func, cold).result


class _Walk:
    """Carries loops, bindings and predicates down the tree."""

    def __init__(self, func: tirx.PrimFunc, cold: Sequence[int] = ()) -> None:
        self.result = Function()
        self._cold = [func.params[i] for i in cold]
        self._buffers: dict[object, Buffer] = {}
        self._loops: list[Loop] = []
        self._env = Environment()
        self._reduction: set[int] = set()
        self._predicates: list[tuple[set[int], float]] = []
        self._allocated: set[object] = set()
        self._short = 0
        self._statement(func.body)
        for buffer in self._buffers.values():
            (self.result.arguments if buffer.argument else self.result.allocations).append(buffer)

    def _statement(self, stmt: tirx.Stmt) -> None:
        visit = getattr(self, f"_visit_{type(stmt).__name__}", None)
        if visit is not None:
            visit(stmt)

    def _visit_SeqStmt(self, stmt: tirx.SeqStmt) -> None:
        for part in stmt.seq:
            self._statement(part)

    def _visit_For(self, stmt: tirx.For) -> None:
        index = len(self._loops)
        extent = int(stmt.extent.value) if isinstance(stmt.extent, tirx.IntImm) else 16
        kind = _KINDS[int(stmt.kind)]
        if kind == "thread":
            kind = str(stmt.thread_binding.thread_tag)
        steps = stmt.annotations.get("pragma_auto_unroll_max_step", 0) if stmt.annotations else 0
        hint = bool(stmt.annotations) and bool(stmt.annotations.get("pragma_loop_partition_hint", 0))
        fetching = bool(stmt.annotations) and any(str(key).startswith(_FETCH) for key in stmt.annotations)
        self._loops.append(Loop(extent, kind, int(steps), hint, fetching))
        self._env.values[stmt.loop_var] = Affine.loop(index)
        self._env.extents.append(extent)
        self._statement(stmt.body)
        self._loops.pop()
        self._env.extents.pop()
        self._reduction.discard(index)

    def _visit_SBlockRealize(self, stmt: tirx.Stmt) -> None:
        block = stmt.block
        guarded = not isinstance(stmt.predicate, tirx.IntImm)
        if guarded:
            self._predicates.append((self._moving(stmt.predicate), self._holding(stmt.predicate)))
        before = set(self._reduction)
        for variable, value in zip(block.iter_vars, stmt.iter_values, strict=True):
            form = evaluate(value, self._env)
            self._env.values[variable.var] = form
            if int(variable.iter_type) == _REDUCE:
                self._reduction |= form.loops
        for buffer in block.alloc_buffers:
            self._allocated.add(buffer)
            self._buffer(buffer)
        short = self._short
        self._short = short or _SHORT.get(str(block.annotations.get("mlc.op", "")), 0)
        if not self._dot(block):
            self._statement(block.body)
        self._short, self._reduction = short, before
        if guarded:
            self._predicates.pop()

    def _dot(self, block: tirx.Stmt) -> bool:
        """Read an intrinsic's dot products of short numbers; False where ``block`` is something else."""
        regions = [matched.source for matched in block.match_buffers]
        types = tuple(str(region.source.dtype) for region in regions)
        step = int(regions[0].region[-1].extent) if types == _UNPACKING else _DOTS.get(types)
        if step is None:
            return False
        activations, weights, sums = ([evaluate(r.min, self._env) for r in region.region] for region in regions)
        first, before = len(self._loops), set(self._reduction)
        rows, depth = (int(regions[0].region[-axis].extent) if len(activations) >= axis else 1 for axis in (2, 1))
        depth //= step
        activations[-1] = activations[-1].scaled(1 / step)
        if tiles := depth > 1:  # rows of sums, and several steps of each
            row, deep = (self._inner(extent, "unrolled") for extent in (rows, depth))
            self._reduction.add(first + 1)
            sums[-2] += row
            activations[-2] += row
            activations[-1] += deep
            weights[-3] += deep
        lane = self._inner(int(regions[2].region[-1].extent), "vectorized")
        sums[-1] += lane
        weights[-2] += lane
        stored = self._buffer(regions[2].source)
        data, weight = self._buffer(regions[0].source), self._buffer(regions[1].source)
        words = max(1, step * data.element // _WORD)  # of activations, each a dot product with a word of weights
        data = replace(data, shape=(*data.shape[:-1], data.shape[-1] // step), element=words * _WORD)
        weight = replace(weight, shape=weight.shape[:-1], element=_WORD)
        accesses = (
            Access(stored, tuple(sums), True), Access(stored, tuple(sums), False),
            Access(data, tuple(activations), False), Access(weight, tuple(weights[:-1]), False),
        )
        self._add(accesses, _Work(arithmetic=2.0 * words), opaque=False, tiles=tiles)
        del self._loops[first:], self._env.extents[first:]
        self._reduction = before
        return True

    def _inner(self, extent: int, kind: str) -> Affine:
        """A loop of an intrinsic, as the innermost one."""
        self._loops.append(Loop(extent, kind))
        self._env.extents.append(extent)
        return Affine.loop(len(self._loops) - 1)

    def _visit_IfThenElse(self, stmt: tirx.IfThenElse) -> None:
        self._predicates.append((self._moving(stmt.condition), self._holding(stmt.condition)))
        self._statement(stmt.then_case)
        if stmt.else_case is not None:
            self._statement(stmt.else_case)
        self._predicates.pop()

    def _moving(self, condition: tirx.Expr) -> set[int]:
        """The loops that a condition changes with."""
        variables: list[tirx.Var] = []
        tvm_ffi.structural_walk(condition, [(tirx.Var, variables.append)])
        return {i for v in variables for i in self._env.values.get(v, Affine()).loops}

    def _holding(self, condition: tirx.Expr) -> float:
        """The part of all iterations in which ``a < constant`` holds, as the last tile of a ragged extent has it."""
        kind = type(condition).__name__
        if kind == "And":
            return self._holding(condition.a) * self._holding(condition.b)
        if kind != "LT":
            return 1.0
        left, right = evaluate(condition.a, self._env), evaluate(condition.b, self._env)
        values = 1.0 + left.range_over(left.loops, self._env.extents)
        return min(1.0, max(1.0, right.constant - left.constant) / values) if not right.terms else 1.0

    def _visit_AttrStmt(self, stmt: tirx.AttrStmt) -> None:
        self._statement(stmt.body)

    def _visit_While(self, stmt: tirx.Stmt) -> None:
        self._statement(stmt.body)

    def _visit_Bind(self, stmt: tirx.Stmt) -> None:
        self._env.values[stmt.var] = evaluate(stmt.value, self._env)

    def _visit_AllocBuffer(self, stmt: tirx.Stmt) -> None:
        self._allocated.add(stmt.buffer)
        self._buffer(stmt.buffer)

    def _visit_Evaluate(self, stmt: tirx.Evaluate) -> None:
        call = stmt.value
        if type(call).__name__ != "Call" or not self._loops:
            return
        if len(call.args) and str(getattr(call.args[0], "value", "")).startswith(_TILES):
            return  # it clears or stores sums: little beside the products
        self._add((), _Work(), opaque=True)

    def _visit_BufferStore(self, stmt: tirx.BufferStore) -> None:
        work = _Work()
        _count(stmt.value, work)
        short, products = self._short if self._reduction else 0, 1
        if self._reduction and {str(load.source.dtype) for load in work.loads} == set(_UNPACKING):
            short, products = 1, sum(str(load.source.dtype) == _UNPACKING[0] for load in work.loads)
        if short:  # to widen the operands is a part of the instruction
            work.arithmetic = 2.0 * products
        accesses = [self._access(stmt.buffer, stmt.indices, store=True)]
        seen = set()
        for load in work.loads:
            access = self._access(load.source, load.indices, store=False)
            key = (id(access.buffer), tuple(_form(a) for a in access.index))
            if key not in seen:
                seen.add(key)
                accesses.append(access)
        self._add(tuple(accesses), work, opaque=False, short=short)

    def _add(self, accesses: tuple[Access, ...], work: _Work, *, opaque: bool, short: int = 0,
             tiles: bool = False) -> None:
        self.result.nests.append(
            Nest(
                tuple(self._loops), accesses, frozenset(self._reduction), work.arithmetic, work.special,
                bool(self._predicates), opaque, frozenset().union(*(moving for moving, _ in self._predicates)),
                math.prod(part for _, part in self._predicates), len(work.conditions),
                frozenset().union(*(self._moving(condition) for condition in work.conditions)), short, tiles,
            )
        )

    def _access(self, buffer: tirx.Buffer, indices: list[tirx.Expr], *, store: bool) -> Access:
        return Access(self._buffer(buffer), tuple(evaluate(i, self._env) for i in indices), store)

    def _buffer(self, buffer: tirx.Buffer) -> Buffer:
        known = self._buffers.get(buffer)
        if known is None:
            shape = tuple(int(e.value) if isinstance(e, tirx.IntImm) else 16 for e in buffer.shape)
            bits = tvm.runtime.DataType(str(buffer.dtype)).bits
            known = Buffer(
                buffer.name, shape, max(1, bits // 8), str(buffer.scope()), buffer not in self._allocated,
                any(buffer.same_as(c) for c in self._cold),
            )
            self._buffers[buffer] = known
        return known


def _form(affine: Affine) -> tuple[object, ...]:
    return (affine.constant, tuple((tuple(t.coefficients.items()), t.cap, t.unit) for t in affine.terms))


@dataclass
class _Work:
    loads: list[tvm.ir.TensorLoad] = field(default_factory=list)
    arithmetic: float = 0.0
    special: float = 0.0
    conditions: list[tirx.Expr] = field(default_factory=list)


def _children(expr: tirx.Expr) -> Iterator[tirx.Expr]:
    for name in ("a", "b", "value", "condition", "true_value", "false_value"):
        child = getattr(expr, name, None)
        if isinstance(child, tirx.Expr):
            yield child
    for child in getattr(expr, "args", ()):
        if isinstance(child, tirx.Expr):
            yield child


def _count(expr: tirx.Expr, work: _Work) -> None:
    kind = type(expr).__name__
    if kind == "TensorLoad":
        work.loads.append(expr)
        return
    if kind in ("Var", "IntImm", "FloatImm", "StringImm"):
        return
    if kind == "Select":
        _count_select(expr, work)
        return
    if kind == "Call":
        name = str(getattr(expr.op, "name", "")).rpartition(".")[2]
        work.special += _SPECIAL.get(name, 0)
        work.conditions += [expr.args[0]] if name == "if_then_else" else []
        work.arithmetic += name not in _SPECIAL
    elif kind not in ("Broadcast", "Ramp"):
        work.arithmetic += 1
    if kind == "Cast" and _same_bits(expr):
        work.arithmetic -= 1
    if kind in ("LShift", "RShift"):  # by how much is settled when loops are unrolled
        _count(expr.a, work)
        return
    for child in _children(expr):
        _count(child, work)


def _same_bits(cast: tirx.Expr) -> bool:
    """Whether a cast reads the bits of an integer as signed or unsigned, which no instruction does."""
    kinds = [tvm.runtime.DataType(str(expr.ty.dtype)) for expr in (cast, cast.value)]
    return kinds[0].bits == kinds[1].bits and all(str(kind).lstrip("u").startswith("int") for kind in kinds)


def _count_select(expr: tirx.Expr, work: _Work) -> None:
    """The dearer arm; a condition that reads no tensor is settled by the loops and costs nothing itself."""
    condition, arms = _Work(), (_Work(), _Work())
    _count(expr.condition, condition)
    for value, arm in zip((expr.true_value, expr.false_value), arms, strict=True):
        _count(value, arm)
    work.loads += [*condition.loads, *arms[0].loads, *arms[1].loads]
    work.conditions += [expr.condition, *condition.conditions, *arms[0].conditions, *arms[1].conditions]
    work.special += max(arm.special for arm in arms)
    work.arithmetic += max(arm.arithmetic for arm in arms) + (condition.arithmetic + 1 if condition.loads else 0)
