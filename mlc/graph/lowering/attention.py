"""Attention as one tensor function, with the movement around it folded into its reads and writes.

Before::

    S = R.matmul(Q, K) * scale + mask        # Q [.., N, D], K [.., D, M]
    Y = R.matmul(R.nn.softmax(S, axis=-1), V)

where Q, K and V are slices, reshapes and transposes of projections, and Y is transposed. After: one ``call_tir`` that
reads the projections where they lie and writes Y as its reader wants it. Projections of one input by constant weights
become one product, whose columns the function picks out.

The function never holds all of S: see :mod:`schedules.cpu.attention` for how it is scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from mlc.graph.ir.constants import array_of, constant, scalar_of, tensor_of
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.patterns import OPAQUE
from mlc.graph.ir.rewrite import builder_of, dtype_of, op_name, rebuilt, replaced, results_of, shape_of
from mlc.graph.ir.views import Graph, View, i64
from mlc.graph.kernels.attention import fused_attention
from mlc.graph.kernels.blocked import PANEL
from mlc.graph.kernels.query_blocks import Sizes, attention, block_of, joined, whole_blocks
from mlc.graph.lowering.batches import of_batch, rebatched
from mlc.sizes import Size, renamed, size_of, usual_size, variables_of
from mlc.target import Target
from schedules.cpu.attention import FEW
from schedules.cuda.attention import MOST_FEATURES, available

__all__ = ["FuseAttention"]

#: features that the narrowest vectors hold
_NARROWEST = 4
#: what no score makes up for: added to one, its weight is 0
_NEVER = -1e30


@dataclass
class _Scores:
    """``scale * product + sum(factor * mask)``; on GPUs the first term may have ``factors``, tensors, and be
    ``cap * tanh`` of all that. Tensors are as of ``batch`` dimensions before the scores' last two."""

    product: relax.Call
    scale: float
    batch: tuple[int, ...]
    masks: list[tuple[relax.Expr, float]] = field(default_factory=list)
    factors: list[relax.Expr] = field(default_factory=list)
    cap: float | None = None

    def scaled(self, number: float) -> _Scores:
        masks = [(mask, factor * number) for mask, factor in self.masks]
        if self.cap is None:
            return replace(self, scale=self.scale * number, masks=masks)
        return replace(self, cap=self.cap * number, masks=masks)

    def of(self, batch: tuple[int, ...]) -> _Scores | None:
        """The same where the scores' ``batch`` dimensions are others; None where a tensor is not to be had as such."""
        masks = [rebatched(mask, self.batch, batch) for mask, _ in self.masks]
        factors = [rebatched(each, self.batch, batch) for each in self.factors]
        if any(each is None for each in (*masks, *factors)):
            return None
        scaled = [(mask, factor) for mask, (_, factor) in zip(masks, self.masks, strict=True)]
        return replace(self, batch=batch, masks=scaled, factors=factors)


@dataclass(frozen=True)
class _Projection:
    """``data @ weight + bias`` by the attributes of ``product``, of the type ``kept``."""

    data: relax.Var
    weight: np.ndarray
    bias: np.ndarray | None
    product: relax.Call
    kept: str


@dataclass(frozen=True)
class _Joined:
    """A result of the model, ``whole``, that attention reads all of: ``past`` and what ``new`` loads behind it along
    ``axis``."""

    whole: relax.Var
    axis: int
    past: relax.Expr
    new: View

    def tensor(
        self, tensors: Mapping[relax.Expr, te.Tensor], new: View, image: Mapping[tirx.Var, tirx.Var]
    ) -> te.Tensor:
        """The result by the tensors of its sources; ``new`` is as it is read now."""
        shape = [i64(renamed(size, image)) for size in shape_of(self.whole)]
        past, source = tensors[self.past], tensors[new.source]
        return joined(shape, self.axis, past, past.shape[self.axis], lambda *x: new.at(source, *x))


@dataclass(frozen=True)
class _Attention:
    """Query ``[*batch, token, feature]``, key ``[*batch, feature, key]`` and value ``[*batch, key, feature]``; the
    scales of the views are part of ``scale``. ``joined`` are key and value where these are results, too."""

    sizes: Sizes
    scale: float
    query: View
    key: View
    value: View
    masks: list[tuple[relax.Expr, float]]
    order: tuple[int, ...]
    operand: str = "float32"
    kept: str = "float32"
    zeros: bool = False
    joined: tuple[_Joined | None, _Joined | None] = (None, None)
    factors: tuple[relax.Expr, ...] = ()
    cap: float | None = None

    @property
    def read(self) -> tuple[View, View, View]:
        """What is read of query, key and value: of a joined one the new part."""
        key, value = (view if own is None else own.new
                      for view, own in zip((self.key, self.value), self.joined, strict=True))
        return self.query, key, value


def FuseAttention(target: Target) -> tvm.transform.Pass:
    """Module pass: every attention becomes one tensor function.

    Only softmax along the keys, in float32, whose scores nothing else uses; on CPUs of at least half a block of
    queries, on GPUs of heads that registers hold, whose operands may have 16 bits. Scales of queries and keys move to
    the scores, or to the queries, which rounds differently.
    """

    @tvm.transform.module_pass(opt_level=0, name="FuseAttention")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        gpu = target.kind == "cuda"
        fuser = _Fuser(mod, gpu) if not gpu or available(target.tvm) else None
        return fuser.run() if fuser is not None and fuser.found else mod

    return run


class _Fuser:
    """Looks for attentions in ``main`` as it is, then emits it again with each as one call."""

    def __init__(self, mod: tvm.IRModule, gpu: bool) -> None:
        self._mod, self._gpu = mod, gpu
        self._graph = Graph(mod["main"])
        self._masks: dict[Any, relax.Expr] = {}
        self._results = results_of(mod["main"].body.body, self._graph.bound)
        #: by the variable that is bound to the result
        self.found: dict[relax.Var, _Attention] = {}
        for var, value in self._graph.bound.items():
            attention = self._attention(value)
            if attention is not None:
                reader, order = self._turned(var, attention.order)
                reader, kept = self._rounded(reader) if gpu else (reader, "float32")
                reader, order = self._turned(reader, order) if order == attention.order else (reader, order)
                self.found[reader] = replace(attention, order=order, kept=kept)

    def run(self) -> tvm.IRModule:
        self._builder = builder_of(self._mod)
        self._image: dict[relax.Var, relax.Expr] = {}

        def attended(_builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
            return self._emitted(self.found[var]) if var in self.found else value

        fused = rebuilt(self._mod, self._graph.bound, attended, self._builder, self._image)
        return relax.transform.DeadCodeElimination()(fused)

    # what is there

    def _attention(self, value: relax.Expr) -> _Attention | None:
        product = self._graph.call(value, "matmul")
        if product is None or not self._graph.once(product.args[0]):
            return None
        given = self._reshaped(product.args[0])
        rounded = self._graph.call(given, "astype") if self._gpu else None
        given = given if rounded is None else self._reshaped(rounded.args[0])
        seen = self._numbers(given)
        weights = self._graph.call(given if seen is None else seen, "nn.softmax")
        if weights is None or not self._graph.once(given):
            return None
        last = len(shape_of(weights)) - 1
        scores = self._scores(weights.args[0]) if int(weights.attrs.axis) in (-1, last) else None
        shape, last = shape_of(product.args[0]), len(shape_of(product)) - 1
        scores = None if scores is None else scores.of(shape[:-2])
        if scores is None or last < 2 or dtype_of(product) != "float32":
            return None
        (left, right), value = scores.product.args, product.args[1]
        made = shape_of(scores.product)
        own_rank = all(len(shape_of(operand)) == len(made) for operand in (left, right))
        if not own_rank or len(shape_of(value)) != last + 1 or shape_of(product)[:-1] != shape[:-1]:
            return None
        if made[-2:] != shape[-2:]:
            return None
        sizes = Sizes(shape[:-2], shape[-2], shape[-1], shape_of(left)[-1], shape_of(value)[-1])
        operands = {dtype_of(left), dtype_of(right), dtype_of(value), dtype_of(product.args[0])}
        operand = operands.pop()
        if operands or not (self._fits_gpu(sizes, operand) if self._gpu else self._fits_cpu(sizes)):
            return None
        query, key = self._graph.view(left, multiples=True), self._graph.view(right, multiples=True)
        if made != shape:
            query, key = (of_batch(view, made[:-2], shape[:-2]) for view in (query, key))
        scale = scores.scale * query.scale * key.scale
        views = key, self._graph.view(value)
        joined = self._joined(views[0], right), self._joined(views[1], value)
        return _Attention(sizes, scale, query, *views, scores.masks, tuple(range(last + 1)), operand,
                          zeros=seen is not None, joined=joined, factors=tuple(scores.factors), cap=scores.cap)

    def _joined(self, view: View, expr: relax.Expr) -> _Joined | None:
        """What ``expr`` is the whole of in another order, where that puts a past and new rows together and is a result
        otherwise: the present keys or values of a language model."""
        whole, concat = view.source, self._graph.call(view.source, "concat")
        if concat is None or self._gpu or not isinstance(concat.args[0], relax.Tuple):
            return None
        if self._graph.uses(whole) != 2 or not any(whole.same_as(each) for each in self._results):
            return None
        extents = dict(zip(view.variables, shape_of(expr), strict=True))
        own = [index for index, extent in zip(view.indices, shape_of(whole), strict=True) if extent != 1]
        plain = all(isinstance(index, tirx.Var) for index in own) and len(set(own)) == len(own)
        parts = list(concat.args[0].fields)
        if not plain or len(parts) != 2 or any(dtype_of(part) != "float32" for part in parts):
            return None
        if [extents[index] for index in own] != [extent for extent in shape_of(whole) if extent != 1]:
            return None
        return _Joined(whole, int(concat.attrs.axis) % len(shape_of(whole)), parts[0], self._graph.view(parts[1]))

    def _fits_cpu(self, sizes: Sizes) -> bool:
        return not sizes.features % _NARROWEST and (usual_size(sizes.tokens) >= FEW or not sizes.depth % _NARROWEST)

    def _fits_gpu(self, sizes: Sizes, operand: str) -> bool:
        return max(sizes.depth, sizes.features) <= MOST_FEATURES and operand in ("float32", "float16", "bfloat16")

    def _numbers(self, expr: relax.Expr) -> relax.Expr | None:
        """``w`` of ``where(isnan(w), 0, w)``, which exporters write for queries that a mask hides all keys from."""
        chosen = self._graph.call(expr, "where")
        test = self._graph.call(chosen.args[0], "isnan") if chosen is not None else None
        if chosen is None or test is None or scalar_of(chosen.args[1]) != 0 or not test.args[0].same_as(chosen.args[2]):
            return None
        used_so = self._graph.once(chosen.args[0]) and self._graph.uses(chosen.args[2]) == 2
        return chosen.args[2] if used_so else None

    def _reshaped(self, expr: relax.Expr) -> relax.Expr:
        """On GPUs, what alone ``expr`` is a reshape of that leaves the last two axes as they are; else itself."""
        call = self._graph.call(expr, "reshape") if self._gpu else None
        if call is None or not self._graph.once(call.args[0]) or shape_of(call)[-2:] != shape_of(call.args[0])[-2:]:
            return expr
        return call.args[0]

    def _scores(self, expr: relax.Expr) -> _Scores | None:
        """What softmax is taken of, if it is a product with scales and masks on it that nothing else uses."""
        if not self._graph.once(expr):
            return None
        whole = self._reshaped(expr)
        if whole is not expr:
            found = self._scores(whole)
            return None if found is None else found.of(shape_of(expr)[:-2])
        names = ("multiply", "divide", "add", *(("tanh",) if self._gpu else ()))
        product, call = self._graph.call(expr, "matmul"), self._graph.call(expr, *names)
        if product is not None:
            return _Scores(product, 1.0, shape_of(product)[:-2])
        if call is None or dtype_of(call) != "float32":
            return None
        if op_name(call) == "relax.tanh":
            found = self._scores(call.args[0])
            return None if found is None or found.masks or found.cap is not None else replace(found, cap=1.0)
        for arg, other in (call.args, reversed(call.args)):
            inner = self._scores(arg) if shape_of(arg) == shape_of(call) else None
            number = scalar_of(other)
            if inner is None:
                continue
            if op_name(call) == "relax.add":
                return replace(inner, masks=[*inner.masks, (other, 1.0)])
            if op_name(call) == "relax.multiply" and number:
                return inner.scaled(number)
            if op_name(call) == "relax.divide" and number and arg.same_as(call.args[0]):
                return inner.scaled(1.0 / number)
            if op_name(call) == "relax.multiply" and self._gpu and not inner.masks and inner.cap is None:
                return replace(inner, factors=[*inner.factors, other])
        return None

    def _turned(self, var: relax.Var, order: tuple[int, ...]) -> tuple[relax.Var, tuple[int, ...]]:
        """A transpose that alone reads ``var`` and leaves the last axis in place, and its order of axes."""
        reader = self._graph.reader(var)
        move = self._graph.call(reader, "permute_dims") if reader is not None else None
        if reader is None or move is None or permutation(move)[-1] != order[-1]:
            return var, order
        return reader, tuple(permutation(move))

    def _rounded(self, var: relax.Var) -> tuple[relax.Var, str]:
        """A cast that alone reads ``var``, and its type."""
        reader = self._graph.reader(var)
        cast = self._graph.call(reader, "astype") if reader is not None else None
        return (var, "float32") if reader is None or cast is None else (reader, dtype_of(cast))

    # what comes instead

    def _emitted(self, found: _Attention) -> relax.Expr:
        given = views = self._merge_projections(found.read)
        wholes = [own for own in found.joined if own is not None]
        sources = list(dict.fromkeys([*(view.source for view in views), *(own.past for own in wholes)]))
        n = len(found.sizes.batch)
        sizes = found.sizes
        free = variables_of([*sizes.all, *(index for view in views for index in view.indices)])
        seen, causal = _causal(found.masks, sizes) if self._gpu else (found.masks, None)
        if self._gpu:
            added = [self._bound(each) for each in (*(mask for mask, _ in seen), *found.factors)]
        else:
            made = self._mask(sizes, found.masks)
            added = [made] if made is not None else []

        def compute(tensors: list[te.Tensor], masks: list[te.Tensor], own: list[tirx.Var]) -> Any:
            image, there = dict(zip(free, own, strict=True)), dict(zip(sources, tensors, strict=True))
            views = [replace(view, indices=tuple(renamed(i, image) for i in view.indices)) for view in given]
            query, key, value = (there[view.source] for view in views)
            made = [None if each is None else each.tensor(there, view, image)
                    for each, view in zip(found.joined, views[1:], strict=True)]
            if made[0] is not None:
                key, views[1] = made[0], found.key
            if made[1] is not None:
                value, views[2] = made[1], found.value
            loads = (
                lambda *x: views[0].at(query, *x), lambda *x: views[1].at(key, *x[:n], x[-1], x[-2]),
                lambda *x: views[2].at(value, *x),
            )
            if not self._gpu:
                mask = (lambda *x: _broadcast(masks[0], x)) if masks else None
                staged = made[0] is not None, made[1] is not None
                result = attention(
                    sizes.renamed(image), found.scale, *loads, mask, found.order, found.zeros, staged)
                return [*(each for each in made if each is not None), result] if wholes else result

            def logit(score: Any, *x: Any) -> Any:
                for factor in masks[len(seen):]:
                    score = score * _broadcast(factor, x)
                if found.cap is not None:
                    score = tirx.tanh(score) * tirx.const(found.cap, "float32")
                if not seen:
                    return score
                terms = [_broadcast(mask, x) for mask in masks[: len(seen)]]
                scaled = [term if f == 1.0 else term * tirx.const(f, "float32")
                          for term, (_, f) in zip(terms, seen, strict=True)]
                return score + sum(scaled[1:], scaled[0])

            named = sizes.renamed(image)
            return fused_attention(
                named.batch, (named.tokens, named.keys, named.depth, named.features), found.scale, loads,
                logit, causal, found.order, (found.operand, found.kept), found.zeros,
            )

        arguments = [replaced(source, self._image) for source in sources], added
        call = self._builder.call_te(
            compute, *arguments, free, primfunc_name_hint="attention", primfunc_attrs={"op_pattern": OPAQUE}
        )
        if not wholes:
            return call
        made = self._builder.emit(call)
        for number, own in enumerate(wholes):  # the result of the model, which is read after this
            self._image[own.whole] = self._builder.emit(relax.TupleGetItem(made, number), own.whole.name)
        return relax.TupleGetItem(made, len(wholes))

    def _bound(self, expr: relax.Expr) -> relax.Expr:
        """What ``expr`` is now, by a name if it is made for the attention."""
        made = replaced(expr, self._image)
        return self._builder.emit(made) if isinstance(made, relax.Call) else made

    def _mask(self, sizes: Sizes, masks: list[tuple[relax.Expr, float]]) -> relax.Expr | None:
        """The sum of the masks as one tensor ``[.., key, query]``, made once for all attentions that use it."""
        if not masks:
            return None
        key = (*((mask, factor) for mask, factor in masks), sizes.tokens)
        if key not in self._masks:
            self._masks[key] = self._made_mask(sizes, masks)
        return self._masks[key]

    def _made_mask(self, sizes: Sizes, masks: list[tuple[relax.Expr, float]]) -> relax.Expr:
        emit, op = self._builder.emit, relax.op
        total = None
        for mask, factor in masks:
            term = replaced(mask, self._image)
            term = term if factor == 1.0 else emit(op.multiply(term, relax.const(factor, "float32")))
            total = term if total is None else emit(op.add(total, term))
        shape = (1,) * (2 - len(shape_of(total))) + shape_of(total)
        rank = len(shape)
        free = isinstance(sizes.tokens, Size)
        pad = -sizes.tokens % block_of(sizes.tokens) if shape[-2] != 1 and not free else 0
        array = array_of(total)
        if array is not None:
            turned = np.swapaxes(array.reshape(shape), -1, -2)
            return constant(np.pad(turned, [(0, 0)] * (rank - 1) + [(0, pad)]), "float32")
        total = emit(op.permute_dims(emit(op.reshape(total, shape)), [*range(rank - 2), rank - 1, rank - 2]))
        if free and shape[-2] != 1:
            return self._to_whole_blocks(total, sizes.tokens)
        return emit(op.nn.pad(total, [0] * (2 * rank - 1) + [pad])) if pad else total

    def _to_whole_blocks(self, mask: relax.Expr, tokens: Any) -> relax.Expr:
        """A mask ``[.., key, query]`` of a free number of queries with zeros up to the end of the last block."""
        free = variables_of([*shape_of(mask), tokens])

        def padded(tensor: te.Tensor, own: list[tirx.Var]) -> te.Tensor:
            end = renamed(tokens, dict(zip(free, own, strict=True)))
            zero = tirx.const(0.0, "float32")
            return te.compute(
                (*tensor.shape[:-1], i64(whole_blocks(end))),
                lambda *i: tirx.if_then_else(i[-1] < i64(end), tensor(*i[:-1], tirx.min(i[-1], i64(end) - 1)), zero),
                name="mask",
            )

        return self._builder.emit(self._builder.call_te(padded, mask, free, primfunc_name_hint="mask"))

    def _merge_projections(self, views: tuple[View, ...]) -> tuple[View, ...]:
        """Products of one input by constant weights that only this attention reads become one product."""
        projections = [self._projection(view) for view in views]
        merged: dict[relax.Expr, tuple[relax.Expr, int]] = {}  # source -> what it is columns of, and the first of them
        for data in dict.fromkeys(p.data for p in projections if p is not None):
            parts = {
                v.source: p for v, p in zip(views, projections, strict=True) if p is not None and p.data.same_as(data)
            }
            alike = len({(p.weight.dtype, p.kept) for p in parts.values()}) == 1
            if alike and len(parts) > 1 and sum(p.weight.shape[1] for p in parts.values()) % PANEL == 0:
                merged.update(self._product(data, parts))
        return tuple(
            replace(view, source=merged[view.source][0],
                    indices=(*view.indices[:-1], view.indices[-1] + merged[view.source][1]))
            if view.source in merged else view
            for view in views
        )

    def _projection(self, view: View) -> _Projection | None:
        """``data @ weight + bias`` that alone ``view`` is made of, rounded at most; its last index counts columns."""
        cast = self._graph.call(view.source, "astype")
        whole = view.source if cast is None else cast.args[0]
        total = self._graph.call(whole, "add") if cast is None or self._graph.once(whole) else None
        product = self._graph.call(total.args[0] if total is not None else whole, "matmul")
        if product is None or not view.exclusive or not isinstance(product.args[0], relax.Var):
            return None
        tensor = tensor_of(product.args[1])
        bias = array_of(total.args[1]) if total is not None else None
        weight = None if tensor is None or len(shape_of(product.args[1])) != 2 else tensor.numpy()
        if weight is None or (total is not None and not self._graph.once(total.args[0])):
            return None
        if total is not None and (bias is None or bias.shape != weight.shape[1:]):
            return None
        return _Projection(product.args[0], weight, bias, product, dtype_of(view.source))

    def _product(
        self, data: relax.Var, parts: dict[relax.Expr, _Projection]
    ) -> dict[relax.Expr, tuple[relax.Expr, int]]:
        """The merged product of ``parts``, and where each of them begins in it."""
        weight = np.concatenate([p.weight for p in parts.values()], axis=1)
        first = next(iter(parts.values()))
        arguments = [replaced(data, self._image), constant(weight)]
        product = self._builder.emit(relax.Call(first.product.op, arguments, first.product.attrs))
        if any(p.bias is not None for p in parts.values()):
            bias = [p.bias if p.bias is not None else np.zeros(p.weight.shape[1], "float32") for p in parts.values()]
            product = self._builder.emit(relax.op.add(product, constant(np.concatenate(bias))))
        if dtype_of(product) != first.kept:
            product = self._builder.emit(relax.op.astype(product, first.kept))
        columns = np.cumsum([0, *(p.weight.shape[1] for p in parts.values())])
        return {source: (product, int(column)) for source, column in zip(parts, columns, strict=False)}


def _causal(
    masks: list[tuple[relax.Expr, float]], sizes: Sizes
) -> tuple[list[tuple[relax.Expr, float]], int | None]:
    """The masks without one that says by constants that a query ``i`` sees keys up to ``i + c``, and that ``c``."""
    for number, (mask, factor) in enumerate(masks):
        array = array_of(mask)
        if array is None or array.shape[-2:] != (sizes.tokens, sizes.keys) or array.size != sizes.tokens * sizes.keys:
            continue
        last = array.reshape(sizes.tokens, sizes.keys) * factor
        limit = int((last[0] == 0).sum()) - 1
        seen = np.tri(sizes.tokens, sizes.keys, limit, dtype=bool)
        if limit >= 0 and not last[seen].any() and (last[~seen] <= _NEVER).all():
            return masks[:number] + masks[number + 1 :], limit
    return masks, None


def _broadcast(tensor: te.Tensor, point: Sequence[Any]) -> Any:
    """The element of ``tensor`` that broadcasts to ``point``."""
    shape = [size_of(extent) for extent in tensor.shape]
    trailing = point[len(point) - len(shape) :]
    return tensor(*(i64(0) if extent == 1 else i for i, extent in zip(trailing, shape, strict=True)))
