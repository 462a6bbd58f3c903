"""Attention as one tensor expression for GPUs; :mod:`schedules.cuda.attention` says how its kernel is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from mlc.graph.ir.views import i64

__all__ = ["fused_attention"]

#: an element by its indices
Load = Callable[..., Any]


def fused_attention(
    batch: Sequence[Any], sizes: tuple[Any, Any, Any, Any], scale: float, loads: tuple[Load, Load, Load],
    logit_of: Load, causal: int | None, order: Sequence[int], dtypes: tuple[str, str], zeros: bool = False,
) -> te.Tensor:
    """``softmax(logit_of(scale * Q K')) V`` of ``(queries, keys, depth, features)``, added up in float32.

    ``loads`` give an element of Q, K and V, each ``[*batch, token, feature]`` of the first of ``dtypes``; the second is
    the result's. ``logit_of`` makes a logit of a score and its place ``[*batch, query, key]``. With ``causal``, the
    query ``i`` sees keys up to ``i + causal``. ``order`` are the axes of ``[*batch, token, feature]`` in the order of
    the result. Weights are rounded to the operands' type before they are divided by their total. With ``zeros`` a query
    that sees no key has 0, else no number.
    """
    operand, kept = dtypes
    query, key, value = loads
    heads, n = [i64(extent) for extent in batch], len(batch)
    queries, keys, depth, features = map(i64, sizes)
    rd, rj, rs, rv = (te.reduce_axis((i64(0), extent), name=name) for extent, name in
                      ((depth, "rd"), (keys, "rj"), (keys, "rs"), (keys, "rv")))
    never = tirx.const(float("-inf"), "float32")

    def wide(element: Any) -> Any:
        return element if operand == "float32" else element.astype("float32")

    def score(*x: Any) -> Any:
        return te.sum(wide(query(*x[:n], x[n], rd.var)) * wide(key(*x[:n], x[n + 1], rd.var)), axis=[rd])

    def logit(*x: Any) -> Any:
        found = logit_of(scores(*x) if scale == 1.0 else scores(*x) * tirx.const(scale, "float32"), *x)
        return found if causal is None else tirx.if_then_else(x[n + 1] <= x[n] + i64(causal), found, never)

    def result(*index: Any) -> Any:
        at = [index[list(order).index(axis)] for axis in range(n + 2)]
        mean, zero = values(*at) / total(*at[:-1]), tirx.const(0.0, "float32")
        return (tirx.if_then_else(total(*at[:-1]) > zero, mean, zero) if zeros else mean).astype(kept)

    scores = te.compute((*heads, queries, keys), score, name="scores", attrs={"mlc.op": "attention"})
    logits = te.compute(scores.shape, logit, name="logits")
    peak = te.compute((*heads, queries), lambda *x: te.max(logits(*x, rj.var), axis=[rj]), name="peak")
    powers = te.compute(scores.shape, lambda *x: tirx.exp(logits(*x) - peak(*x[:-1])), name="powers")
    total = te.compute((*heads, queries), lambda *x: te.sum(powers(*x, rs.var), axis=[rs]), name="total")
    weights = powers if operand == "float32" else te.compute(
        scores.shape, lambda *x: powers(*x).astype(operand), name="weights")
    values = te.compute(
        (*heads, queries, features),
        lambda *x: te.sum(wide(weights(*x[:-1], rv.var)) * wide(value(*x[:n], rv.var, x[-1])), axis=[rv]),
        name="values")
    shape = (*heads, queries, features)
    return te.compute([shape[axis] for axis in order], result, name="attention")
