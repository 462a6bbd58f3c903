"""Attention with few queries: the projection weights of keys and values are multiplied with the queries, not with all
tokens.

A classifier reads one token: its last block needs the keys and values of all tokens for the single query that is left
(:mod:`mlc.graph.simplify.slice_pushdown`), and so do blocks that pool by attention. The projections of keys and values
are linear, so that the products are reassociated, separately for each head::

    q @ transpose(x @ w + b)   -->   (q @ transpose(w)) @ transpose(x) + q @ b
    p @ (x @ w + b)            -->   (p @ x) @ w + sum(p) * b

Of ``n`` tokens of ``k`` channels, and ``m`` queries of ``h`` heads with ``d`` elements, that is ``m*h*k*(d + n)``
multiplications in place of ``n*k*h*d``: for one query and heads of 64 a 64th of those for each. Whether it is less says
arithmetic on sizes, so that it has no price; sizes that are free are left alone.

Where scores go to a softmax over the keys, ``q @ b`` is the same for all of them and changes nothing; where ``p`` is
the result of one, it sums to 1.

Keys and values come from their product by reshapes, transposes and slices, which exporters write in many ways: one
product for queries, keys and values or three, heads before or after. So nothing is matched: the places of the product's
elements are moved as they are, in numbers, and what counts is where they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import SLICE, cuts, permutation
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, op_name, rebuilt, shape_of
from mlc.operators.shapes import fixed

__all__ = ["FewQueries"]

#: the multiplications that are left, as part of those that are saved, at most
_WORTH = 0.5
#: part of a product's elements that others may read: a query's own row
_OTHERS = 0.25
#: multiplications that are saved at least: what products of their own take to start, and more
_LEAST = 1 << 20
#: elements of a product whose places are looked at; larger ones than any attention's keys
_LARGEST = 1 << 26
_VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")


@dataclass(frozen=True)
class _Projection:
    """``x @ weight + bias`` of all tokens, ``result`` of it; ``weight`` is ``[k, c]`` and ``bias`` ``[c]`` or a 0."""

    result: relax.Var
    x: relax.Expr
    weight: np.ndarray
    bias: np.ndarray

    @property
    def rows(self) -> int:
        return math.prod(shape_of(self.result)[:-1])


@dataclass(frozen=True)
class _Use:
    """A product of something with keys, or with values where ``values``: in each of ``sets`` of tokens, and of each of
    ``heads``, which reads ``columns[heads, d]`` of the projection."""

    projection: _Projection
    values: bool
    sets: int
    columns: np.ndarray
    product: relax.Call

    @property
    def heads(self) -> int:
        return len(self.columns)

    @property
    def queries(self) -> int:
        return int(shape_of(self.product.args[0])[-2])

    def saves(self) -> int:
        """Multiplications; none where a good part of them would be left."""
        tokens, channels, width = self.projection.rows, len(self.projection.weight), self.columns.size
        before = tokens * channels * width
        after = self.queries * channels * (self.sets * width + self.heads * tokens)
        return before - after if after <= _WORTH * before else 0


class _Main:
    """The bindings and uses of the variables of ``main``."""

    def __init__(self, func: relax.Function) -> None:
        self.bound = {binding.var: binding.value for binding in bindings(func)}
        self.readers: dict[relax.Var, list[relax.Var]] = {}
        for var, value in self.bound.items():
            for each in dict.fromkeys(leaves(value)):
                self.readers.setdefault(each, []).append(var)
        self.results = set(leaves(func.body.body))

    def projections(self) -> Iterator[_Projection]:
        for var, value in self.bound.items():
            if not _is(value, "relax.matmul") or not fixed((*shape_of(var), *shape_of(value.args[0]))):
                continue
            weight = array_of(value.args[1])
            if weight is None or weight.ndim != 2 or dtype_of(var) != "float32" or len(shape_of(var)) < 2:
                continue
            made = _Projection(var, value.args[0], weight, np.zeros(weight.shape[1], "float32"))
            yield self._with_bias(made)

    def _with_bias(self, made: _Projection) -> _Projection:
        readers = self.readers.get(made.result, [])
        if len(readers) != 1 or made.result in self.results or not _is(self.bound[readers[0]], "relax.add"):
            return made
        others = [array_of(arg) for arg in self.bound[readers[0]].args if arg not in (made.result,)]
        bias = others[0] if len(others) == 1 else None
        if bias is None or bias.size != len(made.bias) or bias.shape[-1:] != made.bias.shape:
            return made
        same = shape_of(readers[0]) == shape_of(made.result)
        return _Projection(readers[0], made.x, made.weight, bias.reshape(-1)) if same else made

    def uses(self, made: _Projection) -> dict[relax.Var, _Use]:
        """The products that may be taken in the other order, by their variables; none where the projection is needed
        for others nonetheless."""
        size = made.rows * made.weight.shape[1]
        if size > _LARGEST or not self._asked_little(made.result):
            return {}
        found: dict[relax.Var, _Use] = {}
        others = 0
        pending = [(made.result, np.arange(size).reshape(shape_of(made.result)))]
        while pending:
            var, places = pending.pop()
            if var in self.results:
                return {}
            for reader in self.readers.get(var, []):
                moved = _moved(self.bound[reader], reader, places)
                if moved is not None:
                    pending.append((reader, moved))
                    continue
                use = self._use(made, var, self.bound[reader], places)
                if use is not None and use.saves():
                    found[reader] = use
                else:
                    others += places.size
        return found if others <= _OTHERS * size else {}

    def _asked_little(self, var: relax.Var) -> bool:
        """Whether some product of what is moved from a tensor may have few queries: fewer than half a head's elements,
        since more save nothing. Most attention is none of that."""
        for reader in self.readers.get(var, []):
            value = self.bound[reader]
            if _is_moved(value) and self._asked_little(reader):
                return True
            asked = shape_of(value.args[0]) if _is(value, "relax.matmul") and value.args[1] == var else ()
            if len(asked) > 1 and fixed(asked) and 2 * asked[-2] <= max(asked[-1], *shape_of(reader)[-1:]):
                return True
        return False

    def _use(self, made: _Projection, var: relax.Var, value: relax.Expr, places: np.ndarray) -> _Use | None:
        """Of a product whose second operand is ``var``, which is elements ``places`` of a projection."""
        if not _is(value, "relax.matmul") or value.args[0] == var or value.args[1] != var or places.ndim < 3:
            return None
        queries = shape_of(value.args[0])
        if queries[:-2] != places.shape[:-2] or not fixed(queries):
            return None
        rows, columns = np.divmod(places.reshape(-1, *places.shape[-2:]), made.weight.shape[1])
        for values in (False, True):
            if values:  # [.., token, d]
                rows, columns = rows.swapaxes(1, 2), columns.swapaxes(1, 2)
            if (rows != rows[:, :1]).any() or (columns != columns[:, :, :1]).any():
                continue
            sets, rest = divmod(made.rows, rows.shape[2])
            if rest or len(rows) % sets:
                return None
            tokens = rows[:, 0].reshape(sets, -1, rows.shape[2])
            heads = columns[:, :, 0].reshape(sets, -1, columns.shape[1])
            in_order = (tokens == np.arange(made.rows).reshape(sets, 1, -1)).all() and (heads == heads[:1]).all()
            return _Use(made, values, sets, heads[0], value) if in_order else None
        return None

    def vanishes(self, scores: relax.Var) -> bool:
        """Whether what is the same for all keys of a query changes nothing: softmax follows."""
        if scores in self.results:
            return False
        for reader in self.readers[scores]:
            value = self.bound[reader]
            if _is_softmax(value):
                continue
            if not _is(value, "relax.add", "relax.multiply", "relax.divide") or shape_of(reader) != shape_of(scores):
                return False
            others = [arg for arg in value.args if arg != scores]
            if len(others) != 1 or (value.args[0] != scores and _is(value, "relax.divide")):
                return False
            scales = not _is(value, "relax.add")
            if (scales and shape_of(others[0])[-1:] not in ((), (1,))) or not self.vanishes(reader):
                return False
        return True


def _is(value: Any, *names: str) -> bool:
    return isinstance(value, relax.Call) and op_name(value) in names


def _is_softmax(value: Any) -> bool:
    """Whether it is a softmax over the last axis."""
    return _is(value, "relax.nn.softmax") and int(value.attrs.axis) in (-1, len(shape_of(value)) - 1)


def _is_moved(value: relax.Expr) -> bool:
    return _is(value, *_VIEWS, "relax.permute_dims", SLICE)


def _moved(value: relax.Expr, var: relax.Var, places: np.ndarray) -> np.ndarray | None:
    """Where elements come from, for operators that only move elements."""
    if _is(value, *_VIEWS) and fixed(shape_of(var)):
        return places.reshape(shape_of(var))
    if _is(value, "relax.permute_dims"):
        return places.transpose(permutation(value))
    if _is(value, SLICE) and (found := cuts(value)) is not None:
        return places[tuple(slice(cut.begin, cut.end, cut.step) for cut in found)]
    return None


class _Writer:
    """Writes the products of a use in the other order, under the name of what they stand for."""

    def __init__(self, builder: relax.BlockBuilder, use: _Use, name: str) -> None:
        self._builder, self._use, self._name = builder, use, name

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return self._builder.emit(expr, self._name)

    def products(self, first: relax.Expr, x: relax.Expr, vanishes: bool, sums_to_one: bool) -> relax.Expr:
        """``first`` are queries or the weights of values. Keys' biases are left out where they vanish."""
        use, made = self._use, self._use.projection
        sets, heads, m = use.sets, use.heads, use.queries
        channels, width = made.weight.shape[0], use.columns.shape[1]
        shape = (*shape_of(first)[:-2], m)
        tokens = self._emit(op.reshape(x, (sets, made.rows // sets, channels)))
        weight, bias = made.weight[:, use.columns], made.bias[use.columns]  # [channels, heads, width], [heads, width]
        if use.values:
            mixed = self._emit(op.matmul(self._emit(op.reshape(first, (sets, heads * m, -1))), tokens))
            by_head = self._by_head(mixed, channels)
            result = self._by_set(self._emit(op.matmul(by_head, constant(weight.transpose(1, 0, 2)))), (*shape, width))
            if not bias.any():
                return result
            added = constant(np.broadcast_to(bias[None, :, None], (sets, heads, 1, width)).reshape(
                *shape[:-1], 1, width))
            if not sums_to_one:
                added = self._emit(op.multiply(self._emit(op.sum(first, [-1], keepdims=True)), added))
            return op.add(result, added)
        by_head = self._by_head(first, width)
        asked = self._emit(op.matmul(by_head, constant(weight.transpose(1, 2, 0))))
        turned = self._emit(op.permute_dims(tokens, [0, 2, 1]))
        scores = self._emit(op.matmul(self._by_set(asked, (sets, heads * m, channels)), turned))
        result = op.reshape(scores, (*shape, made.rows // sets))
        if vanishes or not bias.any():
            return result
        added = self._emit(op.matmul(by_head, constant(bias[:, :, None])))
        return op.add(self._emit(result), self._by_set(added, (*shape, 1)))

    def _by_head(self, expr: relax.Expr, last: int) -> relax.Expr:
        """``[heads, sets * queries, last]`` of what comes set by set."""
        use = self._use
        expr = self._emit(op.reshape(expr, (use.sets, use.heads, use.queries, last)))
        if use.sets > 1:
            expr = self._emit(op.permute_dims(expr, [1, 0, 2, 3]))
        return self._emit(op.reshape(expr, (use.heads, use.sets * use.queries, last)))

    def _by_set(self, expr: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        """What comes head by head in the order of sets, and in a shape."""
        use = self._use
        if use.sets > 1:
            expr = self._emit(op.reshape(expr, (use.heads, use.sets, use.queries, shape[-1])))
            expr = self._emit(op.permute_dims(expr, [1, 0, 2, 3]))
        return self._emit(op.reshape(expr, shape))


def _run_pass(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    func = mod["main"]
    main = _Main(func)
    plans: dict[relax.Var, _Use] = {}
    for made in main.projections():
        found = main.uses(made)
        if sum(use.saves() for use in found.values()) >= _LEAST:
            plans.update(found)
    if not plans:
        return mod
    image: dict[relax.Var, relax.Expr] = {}

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var not in plans:
            return value
        use = plans[var]
        x = image.get(use.projection.x, use.projection.x)
        vanishes = not use.values and main.vanishes(var)
        sums_to_one = use.values and _is_softmax(main.bound.get(use.product.args[0]))
        return _Writer(builder, use, var.name).products(value.args[0], x, vanishes, sums_to_one)

    return relax.transform.DeadCodeElimination(["main"])(rebuilt(mod, main.bound, change, image=image))


FewQueries = tvm.transform.module_pass(_run_pass, opt_level=0, name="FewQueries")
