"""Vectorises reductions along free axes: a sum of ``n`` numbers in memory is one of a vector of partial results.

A schedule splits a sum of fixed length by ``rfactor``, into parts of equal length. Of a free length no number divides
every value, and LLVM keeps the order of a float sum, one addition after the other. So the loop is marked, and lowering
takes a vector a step. The last vector ends with the last number and begins within the one before it: of what both hold
it adds what no one has added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import loads, op_name, replaced, uses, walk
from schedules.free import SIZES, variables

__all__ = ["PARTIALS", "has_partial_sums", "with_partial_sums"]

#: the annotation of a loop over what is summed up: how many partial results there may be
PARTIALS = "mlc.partials"

#: partial results of a sum that is too short for as many as a loop may have, and of the last vector that is added up
#: within itself
_FEW, _LAST = 8, 4
_TYPES = ("float32", "float64", "int32", "int64")

_Combine = Callable[[Any, Any], Any]


def has_partial_sums(block: s_tir.SBlock) -> bool:
    """Whether the body of a reduction is one that this can split."""
    store = block.body
    return isinstance(store, tirx.BufferStore) and _kind_of(store) is not None


def with_partial_sums(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of opaque blocks whose marked loops take a vector a step.

    ::

        for k in range(n):              p[0:8] = 0
            s = s + x[k]          -->   for o in range(n // 8):
                                            p[0:8] = p[0:8] + x[o * 8 : o * 8 + 8]
                                        p[0:8] = p[0:8] + select(lane >= 8 - n % 8, x[n - 8 : n], 0)
                                        s = s + p[0] + .. + p[7]    # by halves, and where n is less than 8 as before
    """
    marked: list[bool] = []
    walk(func.body, (tirx.For, lambda loop: marked.append(PARTIALS in loop.annotations)))
    if not any(marked):
        return func
    analyzer = tvm.sym.Analyzer()
    for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True):
        ends = (tirx.const(int(end), str(var.ty)) for end in (low, int(high) + 1))
        analyzer.bind(var, tvm.ir.Range(*ends))

    def vectorised(loop: tirx.For) -> tirx.Stmt:
        if PARTIALS not in loop.annotations:
            return loop
        count = int(loop.annotations[PARTIALS])
        kept = {key: value for key, value in loop.annotations.items() if key != PARTIALS}
        plain = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=kept)
        found = _sum(plain)
        if found is None:
            return plain
        made: tirx.Stmt = plain
        for width in sorted({_FEW, count}):
            if width > count or analyzer.can_prove(loop.extent < width):
                continue
            enough = loop.extent >= width
            made = found.in_parts(width) if analyzer.can_prove(enough) else tirx.IfThenElse(
                enough, found.in_parts(width), made)
        return made

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, vectorised)))


class _Sum:
    """A loop whose iterations combine a ``term`` each with the element that ``store`` writes."""

    def __init__(self, loop: tirx.For, store: tirx.BufferStore, combine: _Combine, term: Any, neutral: Any) -> None:
        self._loop, self._store, self._combine, self._term, self._neutral = loop, store, combine, term, neutral

    def in_parts(self, width: int) -> tirx.Stmt:
        """The same for at least ``width`` iterations."""
        loop, kind = self._loop, str(self._loop.loop_var.ty)
        parts = tirx.decl_buffer([width], str(self._store.buffer.dtype), name="parts", scope="local")

        def lanes(count: int, value: Callable[[Any], Any]) -> tirx.Stmt:
            lane = tirx.Var("lane", kind)
            body = tirx.BufferStore(parts, value(lane), [lane])
            return tirx.For(lane, tirx.const(0, kind), tirx.const(count, kind), tirx.ForKind.VECTORIZED, body)

        def held(lane: Any) -> Any:
            return tirx.BufferLoad(parts, [lane])

        def term(at: Any) -> Any:
            return replaced(self._term, {loop.loop_var: at})

        def folded(half: int, lane: Any) -> Any:
            return self._combine(held(lane), held(lane + half))

        step, extent = tirx.Var(f"{loop.loop_var.name}_step", kind), loop.extent
        whole = lanes(width, lambda lane: self._combine(held(lane), term(step * width + lane)))
        new = tirx.const(width, kind) - tirx.floormod(extent, width)
        last = lanes(width, lambda lane: self._combine(
            held(lane), tirx.Select(lane >= new, term(extent - width + lane), self._neutral)))
        folds, half = [], width // 2
        while half >= _LAST:
            folds.append(lanes(half, partial(folded, half)))
            half //= 2
        result = tirx.BufferLoad(self._store.buffer, self._store.indices)
        for lane in range(min(width, _LAST)):
            result = self._combine(result, held(tirx.const(lane, kind)))
        body = tirx.SeqStmt([
            lanes(width, lambda _: self._neutral),
            tirx.For(step, tirx.const(0, kind), tirx.floordiv(extent, width), tirx.ForKind.SERIAL, whole),
            last, *folds, tirx.BufferStore(self._store.buffer, result, self._store.indices),
        ])
        block = s_tir.SBlock([], [], [], "parts", body, None, [parts], [], {})
        return s_tir.SBlockRealize([], tirx.const(True, "bool"), block)


def _sum(loop: tirx.For) -> _Sum | None:
    """The sum, product, maximum or minimum of what lies in memory one after the other that a loop computes; None where
    it is another loop."""
    realize = loop.body
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(loop.min, tirx.IntImm) or int(loop.min) != 0:
        return None
    if not isinstance(realize, s_tir.SBlockRealize) or not isinstance(realize.predicate, tirx.IntImm):
        return None
    store = realize.block.body
    found = _kind_of(store) if isinstance(store, tirx.BufferStore) else None
    if found is None or any(uses(index, [loop.loop_var]) for index in store.indices):
        return None
    _, combine, neutral = found
    sides = [store.value.a, store.value.b]
    held = [isinstance(side, TensorLoad) and side.source.same_as(store.buffer) and all(
        map(tvm_ffi.structural_equal, side.indices, store.indices)) for side in sides]
    if sum(held) != 1:
        return None
    term = sides[held.index(False)]
    in_order = combine if held[0] else lambda held, term: combine(term, held)
    return _Sum(loop, store, in_order, term, neutral) if _is_vector(term, loop.loop_var, store.buffer) else None


def _kind_of(store: tirx.BufferStore) -> tuple[type, _Combine, Any] | None:
    dtype = str(store.buffer.dtype)
    kinds = _kinds(dtype) if dtype in _TYPES else []
    return next((each for each in kinds if isinstance(store.value, each[0])), None)


def _kinds(dtype: str) -> list[tuple[type, _Combine, Any]]:
    """How terms are combined, and what changes nothing."""
    return [
        (tirx.Add, lambda a, b: a + b, tirx.const(0, dtype)), (tirx.Mul, lambda a, b: a * b, tirx.const(1, dtype)),
        (tirx.Max, tirx.max, tvm.tirx.min_value(dtype) if "int" in dtype else tirx.const(float("-inf"), dtype)),
        (tirx.Min, tirx.min, tvm.tirx.max_value(dtype) if "int" in dtype else tirx.const(float("inf"), dtype)),
    ]


def _is_vector(term: Any, var: tirx.Var, result: Any) -> bool:
    """Whether lanes of a term can be computed at once: each load is of one element for all, or of neighbours, and
    none is conditional."""
    conditional: list[bool] = []
    walk(term, (tvm.ir.Call, lambda call: conditional.append(op_name(call) == "if_then_else")))
    analyzer = tvm.sym.Analyzer()

    def step(index: Any) -> Any:
        return analyzer.simplify(replaced(index, {var: var + 1}) - index)

    for load in loads(term):
        if load.source.same_as(result):
            return False
        *outer, inner = load.indices or [tirx.const(0, "int32")]
        if any(uses(index, [var]) for index in outer):
            return False
        if uses(inner, [var]) and not analyzer.can_prove_equal(step(inner), 1):
            return False
    return not any(conditional)
