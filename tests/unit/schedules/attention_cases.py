"""Attention over a past and new tokens whose keys and values, put together, are results, too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import softmax
from tvm import te, tirx

from mlc.graph.ir.int32_indices import narrowed
from mlc.graph.kernels.query_blocks import Sizes, attention, joined

__all__ = ["grown", "grown_reference"]


def grown(
    heads: int, tokens: int, past: int, depth: int, rows: int = 1
) -> tuple[Callable[[], tirx.PrimFunc], Callable]:
    """``rows`` queries for each of ``tokens`` new ones and each head of keys; parameters are query ``[heads, queries,
    depth]``, new keys and values ``[tokens, heads, depth]``, past ones ``[heads, past, depth]``, then the results: both
    with the new ones behind the past, and what attention gives."""

    def build() -> tirx.PrimFunc:
        q = te.placeholder((heads, rows * tokens, depth), name="q")
        k, v = (te.placeholder((tokens, heads, depth), name=f"new_{name}") for name in "kv")
        old_k, old_v = (te.placeholder((heads, past, depth), name=f"past_{name}") for name in "kv")
        whole = [joined([heads, past + tokens, depth], 1, old, past, lambda h, j, d, new=new: new[j, h, d])
                 for old, new in ((old_k, k), (old_v, v))]
        out = attention(
            Sizes((heads,), rows * tokens, past + tokens, depth, depth), depth**-0.5, q, *whole, None, (1, 0, 2),
            staged=(True, True))
        return narrowed(te.create_prim_func([q, k, v, old_k, old_v, *whole, out]))

    return build, lambda q, k, v, old_k, old_v: grown_reference(q, k, v, old_k, old_v)


def grown_reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, old_k: np.ndarray, old_v: np.ndarray
) -> tuple[np.ndarray, ...]:
    keys, values = (np.concatenate([old, np.swapaxes(new, 0, 1)], 1) for old, new in ((old_k, k), (old_v, v)))
    scores = q.astype("float64") @ keys.transpose(0, 2, 1) * q.shape[-1] ** -0.5
    return keys, values, np.swapaxes(softmax(scores, -1) @ values, 0, 1)
