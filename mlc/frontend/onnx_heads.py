"""onnxruntime's ``MultiHeadAttention``, which its optimiser and its builder of decoders write, as products around a
softmax."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mlc.frontend.onnx_expand import Nodes
from mlc.frontend.onnx_tokens import Tokens

__all__ = ["multi_head_attention"]


def multi_head_attention(nodes: Nodes) -> list[str]:
    """``query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value``: each head has keys of its
    own.

    Queries are (batch, length, heads * size), or hold keys and values, too, (batch, length, heads, 3, size). Keys and
    values are likewise, the two in one (batch, keys, heads, 2, size), or each by heads, (batch, heads, keys, size), as
    attention across sequences keeps them. The present ones are the past ones and those behind them.
    """
    query, key, value, bias, padding, added, past_key, past_value, *buffers = nodes.inputs(10)
    attributes, like = nodes.attributes(), nodes.node.input[0]
    if any(buffers) or any(nodes.node.output[3:]):
        raise nodes.refused("its past must grow, and it must give no scores; export the model without a buffer that "
                            "past and present keys share")
    heads, packed = int(attributes["num_heads"]), nodes.rank_of(query, "query") == 5
    ranks = {"query": 5 if packed else 3} | ({"key": nodes.rank_of(key, "key")} if key else {})
    if bias:
        query, key, value = _biased(nodes, query, key, value, bias)
    causal = bool(attributes.get("unidirectional", 0))
    if ranks.get("key") == 4 and (causal or past_key):
        raise nodes.refused("keys that are by heads must be all that there are; export the model again")
    tokens = Tokens.of(nodes, like, nodes.node.input[1] if key else like, past_key)
    query, key, value = _by_heads(nodes, query, key, value, heads)
    present = [key, value]
    if past_key:
        present = [str(nodes("Concat", old, new, axis=2))
                   for old, new in zip((past_key, past_value), present, strict=True)]
    width = nodes.fixed_size(like, -1, "query")
    scale = float(attributes.get("scale", 0.0)) or (width if packed else width // heads) ** -0.5
    scores = nodes("MatMul", nodes("Mul", query, nodes.constant(scale, like)),
                   nodes("Transpose", present[0], perm=[0, 1, 3, 2]))
    hidden = float(attributes.get("mask_filter_value", -10000.0))
    for each in (added, _padding(nodes, padding, hidden) if padding else "", _later(nodes, tokens) if causal else ""):
        scores = nodes("Add", scores, each) if each else scores
    seen = nodes("Transpose", nodes("MatMul", nodes("Softmax", scores, axis=3), present[1]), perm=[0, 2, 1, 3])
    return [str(nodes("Reshape", seen, nodes.constant([0, 0, -1]))), *present]


def _biased(nodes: Nodes, query: str, key: str, value: str, bias: str) -> list[str]:
    """Each with its part of the bias of all three."""
    if not key or not value or any(nodes.rank_of(each, "query, key and value") != 3 for each in (query, key, value)):
        raise nodes.refused("a bias must be that of query, key and value of three axes; export the model without it")
    sizes = [nodes.fixed_size(each, 2, "query, key and value") for each in (query, key, value)]
    ends = np.cumsum([0, *sizes])
    parts = [nodes("Slice", bias, *(nodes.constant([int(n)]) for n in (begin, end, 0)))
             for begin, end in pairwise(ends)]
    return [str(nodes("Add", each, part)) for each, part in zip((query, key, value), parts, strict=True)]


def _by_heads(nodes: Nodes, query: str, key: str, value: str, heads: int) -> list[str]:
    """Query, key and value as (batch, heads, tokens, size)."""
    if not key:
        return _apart(nodes, query, 3)
    if not value:
        return [_turned(nodes, query, heads), *_apart(nodes, key, 2)]
    if nodes.rank_of(nodes.node.input[1], "key") == 4:
        return [_turned(nodes, query, heads), key, value]
    return [_turned(nodes, each, heads) for each in (query, key, value)]


def _turned(nodes: Nodes, x: str, heads: int) -> str:
    split = nodes("Reshape", x, nodes.constant([0, 0, heads, -1]))
    return str(nodes("Transpose", split, perm=[0, 2, 1, 3]))


def _apart(nodes: Nodes, x: str, count: int) -> list[str]:
    """(batch, tokens, heads, count, size) as ``count`` of (batch, heads, tokens, size)."""
    parts = [nodes("Gather", x, nodes.constant(np.array(i)), axis=3) for i in range(count)]
    return [str(nodes("Transpose", part, perm=[0, 2, 1, 3])) for part in parts]


def _padding(nodes: Nodes, mask: str, hidden: float) -> str:
    """What is added to the scores (batch, heads, length, keys): ``hidden`` for keys that are padding.

    The mask is 1 where there is a key, (batch, keys) or (batch, length, keys).
    """
    rank, like = nodes.rank_of(mask, "key_padding_mask"), nodes.node.input[0]
    if rank == 1:
        raise nodes.refused("key_padding_mask must say of each key whether it is there, but has one axis; export the "
                            "model with a mask of two")
    seen = nodes.cast(str(nodes("Unsqueeze", mask, nodes.constant([1, 2] if rank == 2 else [1]))),
                      nodes.dtype_of(like))
    return str(nodes("Mul", nodes("Sub", nodes.constant(1.0, like), seen), nodes.constant(hidden, like)))


def _later(nodes: Nodes, tokens: Tokens) -> str:
    """What is added to the scores for keys that come after the query."""
    like = nodes.node.input[0]
    lowest = float(np.finfo(nodes.dtype_of(like)).min)
    places = nodes("Unsqueeze", tokens.places(), nodes.constant([1]))
    return str(nodes("Where", nodes("Greater", tokens.keys(), places), nodes.constant(lowest, like),
                     nodes.constant(0.0, like)))
