"""What a function of one attention computes, as its kernels need to know it.

The function holds the chain ``scores -> logits -> peak, powers -> total, values -> result``, whose scores are annotated
``mlc.op = "attention"``. What is loaded, and how scores become logits, may be any expression of the indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis import describe, loads, op_name, remembered, uses, walk
from schedules.cuda.contraction import PRECISION
from schedules.cuda.emit import i64, substituted
from schedules.cuda.lines import Lines, lines_of, place_of
from schedules.errors import InvalidDecision

__all__ = ["GROUPS_MARK", "LOG2E", "MARK", "Heads", "boxed", "check_marked", "grouped", "heads_of"]

#: the annotation of the scores that names what the function is, that of their tiles, and that of warpgroups' tiles
_OP, MARK, GROUPS_MARK = "mlc.op", "mlc.attention", "mlc.attention_wgmma"
LOG2E = log2(2.718281828459045)
_PIECE_BYTES = 16
#: queries of the smallest tile
_ROWS = 16


@dataclass(frozen=True)
class Load:
    """An element of queries, keys or values: ``element`` in terms of a row and a column."""

    element: TensorLoad
    row: Any
    column: Any

    def at(self, batch: Mapping[Any, Any], row: Any, column: Any) -> TensorLoad:
        """The element at a place of a head."""
        return substituted(self.element, {**batch, self.row: row, self.column: column})


@dataclass(frozen=True)
class Heads:
    """``count`` heads, numbered by ``batch`` variables with their ``extents``, of ``queries`` over ``keys``: products
    over ``depth``, values of ``features``, operands of ``dtype``.

    ``scale`` is of the scores where ``mask`` is None; else that is the logit, an expression of a score, loaded from
    ``scores``, of the query ``i`` and the key ``j``. A query sees keys up to its own number and ``causal``. Extents,
    queries and keys are expressions where sizes are free.
    """

    batch: tuple[Any, ...]
    extents: tuple[Any, ...]
    queries: Any
    keys: Any
    depth: int
    features: int
    dtype: str
    query: Load
    key: Load
    value: Load
    scale: float
    mask: Any
    causal: int | None
    i: Any
    j: Any
    scores: tirx.Buffer
    result: tirx.BufferStore
    rows: tuple[Any, Any]  # the result's variables that number the queries and the features
    own: tuple[Any, ...]  # and the heads
    values: tirx.Buffer
    totals: tirx.Buffer
    tf32: bool  # whether operands of float32 may be rounded
    zeros: bool = False  # whether a query that sees no key has 0

    @property
    def count(self) -> Any:
        return prod(self.extents)

    @property
    def bits(self) -> int:
        """Of an operand's element."""
        return int(tvm.runtime.DataType(self.dtype).bits)

    def at(self, number: Any) -> dict[Any, Any]:
        """The variables of the heads for a head's number."""
        values: list[Any] = []
        for extent in reversed(self.extents):
            values.insert(0, i64(number % extent))
            number = number // extent
        found = dict(zip(self.batch, values, strict=True))
        return found | dict(zip(self.own, values, strict=True))

    def vector(self, load: Load, extent: int) -> int:
        """Neighbouring elements of a row of ``extent`` that an aligned copy of 16, 8 or 4 bytes may take; 1 where
        none does."""
        places = list(zip(self.batch, self.extents, strict=True))
        found = place_of(load.element.source, load.element.indices, load.row, load.column, places)
        if found is None or found.column != 1:
            return 1
        widths = (_PIECE_BYTES * 8 // self.bits // n for n in (1, 2, 4))
        apart = (found.row, found.common, extent)
        return next((w for w in widths if w * self.bits >= 32 and not any(x % w for x in apart)), 1)

    @property
    def lines(self) -> tuple[Lines, Lines, Lines] | None:
        """Queries, keys and values as tensors that boxes can be copied of; None where one can't."""
        places = list(zip(self.batch, self.extents, strict=True))
        sizes = ((self.queries, self.depth), (self.keys, self.depth), (self.keys, self.features))
        q, k, v = (lines_of(load.element, load.row, load.column, extents, places)
                   for load, extents in zip((self.query, self.key, self.value), sizes, strict=True))
        return None if q is None or k is None or v is None else (q, k, v)

    def neighbours(self, most: int) -> int:
        """How many neighbouring features of the result, at most so many, one aligned store may take."""
        places = list(zip(self.own, self.extents, strict=True))
        found = place_of(self.result.buffer, self.result.indices, *self.rows, places)
        if found is None or found.column != 1:
            return 1
        apart = (found.row, found.common, self.features)
        return next(w for w in (most, most // 2, 1) if w and not any(x % w for x in apart))

    def made_of(self, batch: Mapping[Any, Any], query: Any, feature: Any, value: Any) -> tirx.Expr:
        """An element of the result, whose values divided by their total are ``value``."""
        i, f = self.rows
        one = tirx.const(1.0, "float32")
        return substituted(
            self.result.value, {**batch, i: query, f: feature}, {self.values: value, self.totals: one})

    def place(self, batch: Mapping[Any, Any], query: Any, feature: Any) -> tirx.BufferLoad:
        """Where an element of the result lies."""
        i, f = self.rows
        at = {**batch, i: query, f: feature}
        return tirx.BufferLoad(self.result.buffer, [substituted(index, at) for index in self.result.indices])

    def store(self, batch: Mapping[Any, Any], query: Any, feature: Any, value: Any) -> tirx.Stmt:
        """Store an element of the result, whose values divided by their total are ``value``."""
        place = self.place(batch, query, feature)
        return tirx.BufferStore(self.result.buffer, self.made_of(batch, query, feature, value), list(place.indices))


@remembered
def heads_of(func: tirx.PrimFunc) -> Heads | None:
    """The attention that a function holds; None where it holds none."""
    blocks: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, blocks.append))
    scores = next((b for b in blocks if str(b.annotations.get(_OP, "")) == "attention"), None)
    return _read(blocks, scores) if scores is not None else None


def grouped(heads: Heads) -> Heads:
    """The same attention with the heads that share keys and values as rows of queries of one head, where all of them
    fill no more than one tile: so keys and values are read once for all.

    ``g`` heads of ``q`` queries each are one of ``g q`` queries, of which the row ``n`` is query ``n % q`` of the head
    ``n // q``.
    """
    known = all(isinstance(size, int) for size in (*heads.extents, heads.queries))
    count = _sharing(heads) if heads.causal is None and heads.batch and known else 1
    if count == 1:
        return heads
    head, row = heads.batch[-1], heads.query.row
    kept = tirx.Var(str(head.name), head.ty.dtype)  # the head that shares its keys

    def at(number: Any, variable: Any) -> dict[Any, Any]:
        """What the head and the query are in terms of a row's number."""
        whole = tirx.const(heads.queries, number.ty.dtype)
        return {variable[0]: kept * count + (number // whole).astype(kept.ty.dtype), variable[1]: number % whole}

    def moved(load: Load) -> Load:
        return Load(substituted(load.element, {head: kept * count}), load.row, load.column)

    queries = tirx.Var("n", row.ty.dtype)
    i = tirx.Var("n", heads.i.ty.dtype)
    own, (line, column) = heads.own[-1], heads.rows
    n = tirx.Var("n", line.ty.dtype)
    stored = at(n, (own, line))
    result = tirx.BufferStore(heads.result.buffer, substituted(heads.result.value, stored),
                              [substituted(index, stored) for index in heads.result.indices])
    return replace(
        heads, batch=(*heads.batch[:-1], kept), own=(*heads.own[:-1], kept),
        extents=(*heads.extents[:-1], heads.extents[-1] // count), queries=heads.queries * count,
        query=Load(substituted(heads.query.element, at(queries, (head, row))), queries, heads.query.column),
        key=moved(heads.key), value=moved(heads.value), i=i,
        mask=None if heads.mask is None else substituted(heads.mask, at(i, (head, heads.i))),
        result=result, rows=(n, column),
    )


def _sharing(heads: Heads) -> int:
    """How many neighbouring heads read the same keys and values, of a number whose queries fill one tile at most."""
    head, extent = heads.batch[-1], heads.extents[-1]
    for count in range(min(extent, _ROWS // heads.queries), 1, -1):
        if extent % count:
            continue
        analyzer, first, other = sym.Analyzer(), *(tirx.Var(name, head.ty.dtype) for name in ("first", "other"))
        for variable, size in ((first, extent // count), (other, count)):
            zero = tirx.const(0, head.ty.dtype)
            analyzer.bind(variable, tvm.ir.Range.from_min_extent(zero, tirx.const(size, head.ty.dtype)))
        indices = [index for load in (heads.key, heads.value) for index in load.element.indices]
        moved = [analyzer.simplify(substituted(index, {head: first * count + other})) for index in indices]
        if not any(uses(index, [other]) for index in moved):
            return count
    return 1


def boxed(func: tirx.PrimFunc, heads: Heads) -> bool:
    """Whether boxes can be copied of what a function's attention reads, which the function is given."""
    lines = heads.lines if heads.bits == 16 else None
    return lines is not None and all(any(p.same_as(each.buffer) for p in func.params) for each in lines)


def check_marked(before: tirx.PrimFunc, after: tirx.PrimFunc) -> None:
    """Raise :class:`InvalidDecision` where a schedule of a function marks an attention and does more than move loops.

    The kernel that takes its place is made from what the blocks compute.
    """
    now = _blocks(after)
    marks = {mark for block in now.values() for mark in (MARK, GROUPS_MARK) if mark in block.annotations}
    if not marks:
        return
    was = _blocks(before)
    same = was.keys() == now.keys() and all(
        tvm_ffi.structural_equal(_bare(block), _bare(now[name])) for name, block in was.items())
    heads = heads_of(before)
    if GROUPS_MARK in marks and not (marks == {GROUPS_MARK} and heads is not None and boxed(before, heads)):
        raise InvalidDecision("the tiles of warpgroups must be marked where boxes can be copied of what is read")
    if not same or heads is None or str(now["scores"].annotations.get(_OP, "")) != "attention":
        raise InvalidDecision("the tiles of an attention must be marked where its blocks are as they were")


def _blocks(func: tirx.PrimFunc) -> dict[str, s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, found.append))
    return {str(block.name_hint): block for block in found if block.iter_vars}


def _bare(block: s_tir.SBlock) -> s_tir.SBlock:
    """A block without annotations."""
    return s_tir.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init,
                        block.alloc_buffers, block.match_buffers, {})


def _read(blocks: Sequence[s_tir.SBlock], scores: s_tir.SBlock) -> Heads | None:
    def readers(buffer: tirx.Buffer) -> list[s_tir.SBlock]:
        return [b for b in blocks if b.iter_vars and not _writes(b, buffer) and any(
            r.source.same_as(buffer) for r in b.reads)]

    held = _written(scores)
    (logits,) = readers(held)
    reducing = {_is_sum(b): b for b in readers(_written(logits))}
    powers = reducing[False]
    followers = readers(_written(powers))
    rounded = [b for b in followers if not _is_sum(b)]
    weights = _written(rounded[0]) if rounded else _written(powers)
    (total,) = (b for b in followers if _is_sum(b) and len(b.iter_vars) == len(scores.iter_vars) - 1)
    (values,) = (b for b in readers(weights) if _is_sum(b) and not b.same_as(total))
    (result,) = readers(_written(values))
    *batch, i, j, d = (v.var for v in scores.iter_vars)
    *extents, queries, keys, depth = (_extent(v.dom.extent) for v in scores.iter_vars)
    query, key = _operand(scores, i, d, j, 0), _operand(scores, j, d, i, -1)
    *heads, _, f, k = (v.var for v in values.iter_vars)
    factors = [load for load in describe(values).factors or () if not load.source.same_as(weights)]
    if query is None or key is None or len(factors) != 1:
        return None
    value = Load(substituted(factors[0], dict(zip(heads, batch, strict=True))), k, f)
    at = [v.var for v in logits.iter_vars]
    logit, causal = _limit(logits.body.value, at[-2], at[-1])
    scale = _scale(logit, held)
    renamed = dict(zip(at, [*batch, i, j], strict=True))
    mask = None if scale is not None else substituted(logit, renamed)
    axes = _axes(result, _written(values))
    return Heads(
        tuple(batch), tuple(extents), queries, keys, int(depth), int(values.iter_vars[-2].dom.extent),
        str(query.element.source.dtype), query, key, value, scale or 1.0, mask, causal, i, j, held, result.body,
        (axes[-2], axes[-1]), tuple(axes[:-2]), _written(values), _written(total),
        str(scores.annotations.get(PRECISION, "")) == "tf32", _asks_for(result.body.value, _written(total)),
    )


def _extent(extent: Any) -> Any:
    """A number, or an expression of free sizes as kernels count with it."""
    return int(extent) if isinstance(extent, tirx.IntImm) else extent.astype("int32")


def _written(block: s_tir.SBlock) -> tirx.Buffer:
    return block.writes[0].source


def _writes(block: s_tir.SBlock, buffer: tirx.Buffer) -> bool:
    return any(region.source.same_as(buffer) for region in block.writes)


def _is_sum(block: s_tir.SBlock) -> bool:
    """Whether the block reduces anything."""
    return any(v.iter_type == tirx.IterVar.CommReduce for v in block.iter_vars)


def _operand(block: s_tir.SBlock, row: Any, column: Any, other: Any, place: int) -> Load | None:
    """The factor of a sum of products that depends on ``row`` and not on ``other``; where axes of one element are
    written as their only index, which tells nothing, the factor at ``place``."""
    factors = describe(block).factors or ()
    told = [variable for variable in (row, column) if any(uses(load, [variable]) for load in factors)]
    found = [load for load in factors if all(uses(load, [variable]) for variable in told) and not uses(load, [other])]
    if len(found) > 1 and not uses(found[place], [row]):
        found = [found[place]]
    return Load(found[0], row, column) if len(found) == 1 else None


def _axes(result: s_tir.SBlock, values: tirx.Buffer) -> list[Any]:
    """The result's variables in the order of the axes of ``values``; one that has a single value stands for itself."""
    (load,) = (load for load in loads(result.body.value) if load.source.same_as(values))
    return [index if isinstance(index, tirx.Var) else tirx.Var("one", index.ty.dtype) for index in load.indices]


def _limit(logit: Any, i: Any, j: Any) -> tuple[Any, int | None]:
    """A logit without its causal limit ``j <= i + c``, and that ``c``."""
    if not isinstance(logit, Call) or op_name(logit) != "if_then_else" or not isinstance(logit.args[0], tirx.LE):
        return logit, None
    condition, inner, never = logit.args
    found = sym.detect_linear_equation(sym.Analyzer().simplify(condition.b - condition.a), [i, j])
    whole = bool(found) and all(isinstance(c, tirx.IntImm) for c in found)
    if not whole or [int(c) for c in found[:2]] != [1, -1] or float(getattr(never, "value", 0.0)) != float("-inf"):
        return logit, None
    return inner, int(found[2])


def _asks_for(value: Any, totals: tirx.Buffer) -> bool:
    """Whether what a query has depends on its total being any."""
    found: list[bool] = []
    walk(value, (Call, lambda call: found.append(
        op_name(call) == "if_then_else" and any(load.source.same_as(totals) for load in loads(call.args[0])))))
    return any(found)


def _scale(logit: Any, scores: tirx.Buffer) -> float | None:
    """The positive number that a logit is a score times; None for any other."""
    if isinstance(logit, TensorLoad) and logit.source.same_as(scores):
        return 1.0
    plain = isinstance(logit, tirx.Mul) and isinstance(logit.a, TensorLoad) and logit.a.source.same_as(scores)
    number = float(logit.b.value) if plain and isinstance(logit.b, tirx.FloatImm) else 0.0
    return number if number > 0.0 else None
