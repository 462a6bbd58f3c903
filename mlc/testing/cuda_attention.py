"""Attention functions for GPUs, each with a float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlc.testing.cases import Case

__all__ = ["ATTENTIONS", "TOLERANCES", "attention_case"]

#: of results of such operands, relative to themselves and the largest
TOLERANCES = {"float16": 1e-3, "bfloat16": 3e-3, "tf32": 1e-3, "float32": 1e-5}


def attention_case(
    name: str, heads: tuple[int, int], sizes: tuple[int, int, int, int], dtype: str = "float16", *,
    causal: int | None = None, mask: bool = False, groups: int = 1, result: str = "",
    order: Sequence[int] = (0, 2, 1, 3), index: str = "int64", warpgroups: bool = False,
) -> Case:
    """Attention of ``heads`` (batch, heads) and ``sizes`` (queries, keys, depth, features), whose operands lie as
    ``[batch, token, head, feature]``. ``mask`` adds one to the scores of a key, ``groups`` heads share keys and values;
    ``result`` is the type of the result where it is not the operands', which of ``tf32`` are float32; ``warpgroups`` of
    Hopper may take it."""
    (batch, count), (queries, keys, depth, features) = heads, sizes
    space = "cuda.attention" + {"float32": "_f32", "tf32": "_tf32"}.get(dtype, "_wgmma" if warpgroups else "")
    rtol, rounded = TOLERANCES[dtype], dtype == "tf32"
    dtype = "float32" if rounded else dtype

    def tensors() -> Any:
        from tvm import te

        from mlc.graph.kernels.attention import fused_attention
        from schedules.cuda.contraction import with_tf32

        q = te.placeholder((batch, queries, count, depth), dtype, "q")
        k = te.placeholder((batch, keys, count // groups, depth), dtype, "k")
        v = te.placeholder((batch, keys, count // groups, features), dtype, "v")
        added = te.placeholder((batch, 1, 1, keys), "float32", "mask")
        loads = (
            lambda b, h, i, c: q(b, i, h, c), lambda b, h, j, c: k(b, j, h // groups, c),
            lambda b, h, j, c: v(b, j, h // groups, c),
        )

        def logit(score: Any, b: Any, _h: Any, _i: Any, j: Any) -> Any:
            return score + added(b, 0, 0, j) if mask else score

        made = fused_attention((batch, count), sizes, depth**-0.5, loads, logit, causal, order,
                               (dtype, result or dtype))
        built = [q, k, v, *([added] if mask else []), made]
        return with_tf32(te.create_prim_func(built, index_dtype_override=index)) if rounded else built

    def attend(q: Any, k: Any, v: Any, added: Any) -> np.ndarray:
        k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
        scores = np.einsum("bihc,bjhc->bhij", q, k) * depth**-0.5 + added
        if causal is not None:
            i, j = np.indices((queries, keys))
            scores = np.where(j <= i + causal, scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        weights = powers / powers.sum(-1, keepdims=True)
        return np.einsum("bhij,bjhf->bhif", weights, v).transpose(order)

    if mask:
        return Case(name, tensors, lambda q, k, v, added: attend(q, k, v, added), rtol, space=space, index=index)
    return Case(name, tensors, lambda q, k, v: attend(q, k, v, 0.0), rtol, space=space, index=index)


ATTENTIONS = (
    attention_case("attention_f16_odd", (1, 2), (37, 45, 64, 64)),
    attention_case("attention_f16_causal", (1, 2), (70, 70, 32, 32), causal=0),
    attention_case("attention_f16_masked", (2, 2), (33, 50, 40, 24), mask=True, result="float32"),
    attention_case("attention_f16_grouped", (1, 4), (20, 36, 50, 50), groups=2, causal=16, order=(0, 1, 2, 3),
                   index="int32"),
    attention_case("attention_bf16", (1, 1), (48, 100, 128, 128), "bfloat16"),
    attention_case("attention_tf32_odd", (1, 2), (37, 45, 50, 18), "tf32", mask=True),
    attention_case("attention_tf32_causal", (1, 4), (40, 50, 64, 64), "tf32", causal=10, groups=2, index="int32"),
    attention_case("attention_f32_odd", (1, 2), (37, 45, 30, 18), "float32", mask=True),
    attention_case("attention_f32_causal", (1, 2), (40, 50, 64, 64), "float32", causal=10, groups=2),
    attention_case("attention_wgmma_f16_odd", (1, 2), (70, 100, 128, 128), warpgroups=True),
    attention_case("attention_wgmma_f16_grouped", (2, 4), (65, 72, 64, 64), groups=2, mask=True, order=(0, 1, 2, 3),
                   index="int32", result="float32", warpgroups=True),
    attention_case("attention_wgmma_bf16_causal", (1, 1), (96, 96, 96, 80), "bfloat16", causal=0, warpgroups=True),
)
