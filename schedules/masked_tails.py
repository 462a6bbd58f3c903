"""Masked vectors: a tail tile along a vector is computed under a mask, not lane by lane.

TVM makes a loop over lanes, each of which tests for itself, of a vectorised store under a condition. Where the lanes
are neighbours in memory, this pass makes a vector of them again: loads and stores take the condition as a mask, so that
nothing is accessed that the condition forbids, and what lies in registers is computed for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis import loads, op_name, replaced, uses, walk

__all__ = ["with_masked_tails"]

#: lanes that one loop may have
_LANES = (4, 8, 16, 32, 64)
_TYPES = ("float32", "float64", "int32", "int8", "uint8", "int16", "uint16", "int64")

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b, tirx.Sub: lambda a, b: a - b, tirx.Mul: lambda a, b: a * b, tirx.Max: tirx.max,
    tirx.Min: tirx.min, tirx.LT: lambda a, b: a < b, tirx.LE: lambda a, b: a <= b, tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b, tirx.EQ: tirx.EQ, tirx.NE: tirx.NE, tirx.And: tirx.And, tirx.Or: tirx.Or,
}
#: operators that compute each lane by itself
_PURE = ("call_llvm_pure_intrin", "fma", "round", "nearbyint", "floor", "ceil", "trunc", "sqrt", "fabs", "reinterpret")


class _NoVectorError(Exception):
    """What is computed for each lane cannot be computed for all at once."""


def with_masked_tails(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A lowered CPU function whose loops over conditional lanes are masked vectors; the same object where there are
    none.

    ::

        for s in range(16):                             m = base + 0..15 < n
            if base + s < n:                   -->      if base < n or base + 15 < n:
                B[at + s] = A[from + s] * 2                  store(B + at, load(A + from, m) * 2, m)
                                                        else: for s in range(16): ..
    """
    local = _local(func)
    found: list[bool] = []

    def masked(loop: tirx.For) -> tirx.Stmt:
        made = _masked(loop, local)
        found.append(made is not None)
        return loop if made is None else made

    body = tvm_ffi.structural_map(func.body, (tirx.For, masked))
    return func.with_body(body) if any(found) else func


def _local(func: tirx.PrimFunc) -> dict[Any, int]:
    """The elements of what a function keeps in registers."""
    sizes: dict[Any, int] = {}

    def note(allocated: tirx.AllocBuffer) -> None:
        buffer = allocated.buffer
        if str(buffer.scope()) == "local" and len(buffer.shape) == 1 and isinstance(buffer.shape[0], tirx.IntImm):
            sizes[buffer] = int(buffer.shape[0])

    walk(func.body, (tirx.AllocBuffer, note))
    return sizes


def _masked(loop: tirx.For, local: dict[Any, int]) -> tirx.Stmt | None:
    test = loop.body
    plain = loop.kind == tirx.ForKind.SERIAL and all(isinstance(e, tirx.IntImm) for e in (loop.min, loop.extent))
    if not plain or int(loop.min) or int(loop.extent) not in _LANES or not isinstance(test, tirx.IfThenElse):
        return None
    store, lane = _store(test.then_case), loop.loop_var
    if test.else_case is not None or store is None or not uses(test.condition, [lane]):
        return None
    vector = _Vector(lane, int(loop.extent), local)
    try:
        mask = vector.of(test.condition, None)
        stored = vector.store(store, mask)
    except _NoVectorError:
        return None
    if not vector.shares:
        return stored
    # what all lanes share is read only where one of them may read it
    first, last = (replaced(test.condition, {lane: tirx.const(at, str(lane.ty))}) for at in (0, int(loop.extent) - 1))
    ends = _ends(test.condition, lane)
    if ends in ({"low"}, {"high"}):
        return tirx.IfThenElse(first if ends == {"high"} else last, stored, None)
    return tirx.IfThenElse(tirx.any(first, last), stored, loop)


def _store(body: tirx.Stmt) -> tirx.BufferStore | None:
    """The store that a statement is, with the values of what it binds before."""
    values: dict[Any, Any] = {}
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    for part in parts[:-1]:
        if not isinstance(part, tirx.Bind):
            return None
        values[part.var] = replaced(part.value, values)
    return replaced(parts[-1], values) if isinstance(parts[-1], tirx.BufferStore) else None


def _ends(condition: Any, lane: tirx.Var) -> set[str]:
    """Which ends of the lanes a condition cuts off: of one that bounds a lane from above the first lanes are left."""
    if isinstance(condition, tirx.And):
        return _ends(condition.a, lane) | _ends(condition.b, lane)
    if not uses(condition, [lane]):
        return set()
    if not isinstance(condition, tirx.LT | tirx.LE | tirx.GT | tirx.GE):
        return {"other"}
    less, more = (condition.a, condition.b) if isinstance(condition, tirx.LT | tirx.LE) else (condition.b, condition.a)
    analyzer = tvm.sym.Analyzer()

    def step(side: Any) -> Any:
        return analyzer.simplify(replaced(side, {lane: lane + 1}) - side)

    if uses(less, [lane]) and not uses(more, [lane]) and analyzer.can_prove(step(less) >= 0):
        return {"high"}
    return {"low"} if uses(more, [lane]) and not uses(less, [lane]) and analyzer.can_prove(step(more) >= 0) else {
        "other"}


class _Vector:
    """Statements and expressions of one ``lane`` as those of all ``lanes``."""

    def __init__(self, lane: tirx.Var, lanes: int, local: dict[Any, int]) -> None:
        self._lane, self._lanes, self._local = lane, lanes, local
        #: whether lanes share what they read
        self.shares = False
        self._analyzer = tvm.sym.Analyzer()

    def store(self, store: tirx.BufferStore, mask: Any) -> tirx.Stmt:
        value = self.of(store.value, mask)
        base = self._base(store.buffer, store.indices)
        if base is None:
            raise _NoVectorError
        if store.buffer in self._local:
            held = tirx.BufferLoad(store.buffer, [self._ramp(base)])
            return tirx.BufferStore(store.buffer, tirx.Select(mask, value, held), [self._ramp(base)])
        address = tirx.address_of(tirx.BufferLoad(store.buffer, [base]))
        return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.masked.store", value, address, mask))

    def of(self, value: Any, mask: Any) -> Any:
        """A vector of an expression's values; loads are masked."""
        if not uses(value, [self._lane]):
            self.shares = self.shares or bool(loads(value)) or _divides(value)
            return tirx.Broadcast(value, self._lanes)
        if isinstance(value, tirx.Var):
            return self._ramp(tirx.const(0, str(value.ty)))
        if isinstance(value, TensorLoad):
            return self._load(value, mask)
        if isinstance(value, tirx.Cast):
            return tirx.Cast(f"{value.ty}x{self._lanes}", self.of(value.value, mask))
        if isinstance(value, tirx.Select):
            return tirx.Select(*(self.of(part, mask) for part in (value.condition, value.true_value,
                                                                  value.false_value)))
        if isinstance(value, Call):
            return self._call(value, mask)
        combine = next((each for kind, each in _BINARY.items() if isinstance(value, kind)), None)
        if combine is None:
            raise _NoVectorError
        return combine(self.of(value.a, mask), self.of(value.b, mask))

    def _ramp(self, base: Any) -> Any:
        return tirx.Ramp(base, tirx.const(1, str(base.ty)), self._lanes)

    def _base(self, buffer: Any, indices: Any) -> Any:
        """Where the first lane's element lies, if the others follow it; None otherwise."""
        if len(indices) != 1 or str(buffer.dtype) not in _TYPES:
            return None
        (index,) = indices
        first = replaced(index, {self._lane: tirx.const(0, str(self._lane.ty))})
        step = self._analyzer.simplify(replaced(index, {self._lane: self._lane + 1}) - index)
        if not self._analyzer.can_prove_equal(step, 1):
            return None
        first = self._analyzer.simplify(first)
        if buffer not in self._local:
            return first if str(buffer.scope()) in ("", "global") else None
        inside = isinstance(first, tirx.IntImm) and int(first) + self._lanes <= self._local[buffer]
        return first if inside else None

    def _load(self, load: TensorLoad, mask: Any) -> Any:
        base = self._base(load.source, load.indices)
        if base is None or mask is None:
            raise _NoVectorError
        if load.source in self._local:
            return tirx.BufferLoad(load.source, [self._ramp(base)])
        kind = str(load.source.dtype)
        nothing = tirx.Broadcast(tirx.const(0, kind), self._lanes)
        address = tirx.address_of(tirx.BufferLoad(load.source, [base]))
        return tirx.call_llvm_intrin(f"{kind}x{self._lanes}", "llvm.masked.load", address, mask, nothing)

    def _call(self, call: Call, mask: Any) -> Any:
        name = op_name(call)
        if name == "if_then_else" and mask is not None:
            test, one, other = call.args
            chosen = self.of(test, mask)
            return tirx.Select(chosen, self.of(one, tirx.And(mask, chosen)),
                               self.of(other, tirx.And(mask, tirx.Not(chosen))))
        if name not in _PURE:
            raise _NoVectorError
        kept = 1 if name == "call_llvm_pure_intrin" else 0  # the intrinsic's number
        args = [*call.args[:kept], *(self.of(each, mask) for each in call.args[kept:])]
        return tirx.call_intrin(f"{call.ty}x{self._lanes}", call.op, *args)


def _divides(value: Any) -> bool:
    """Whether an expression divides whole numbers, which it may guard against zero by a condition."""
    found: list[bool] = []
    kinds = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    for kind in kinds:
        walk(value, (kind, lambda each: found.append("float" not in str(each.ty))))
    return any(found)
