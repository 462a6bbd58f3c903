"""PyTorch's attention with a mask: a query that it hides all keys from has 0, where its exporter to ONNX writes the
mean of all values."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:
    """For ``torch.onnx.export(custom_translation_table=...)``; without a mask PyTorch's own."""
    from onnxscript import ir, opset18
    from onnxscript.function_libs.torch_lib.ops import nn

    rank = len(query.shape)
    if attn_mask is None or dropout_p or is_causal:
        return nn.aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                                    enable_gqa)
    op: Any = opset18
    if enable_gqa and query.shape[1] != key.shape[1]:
        key, value = nn._attention_repeat_kv_for_group_query(query, key, value)
    share = op.CastLike(nn._attention_scale(query) if scale is None else float(scale), query)
    if attn_mask.dtype == ir.DataType.BOOL:
        hidden = op.CastLike(op.Constant(value=ir.tensor(np.float32(-np.inf))), query)
        attn_mask = op.Where(attn_mask, op.CastLike(0.0, query), hidden)
    root = op.Sqrt(share)
    turned = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    weights = op.Softmax(op.Add(op.MatMul(op.Mul(query, root), op.Mul(turned, root)), attn_mask), axis=-1)
    seen = op.Where(op.IsNaN(weights), op.CastLike(0.0, query), weights)
    return op.MatMul(seen, value)
