"""onnxruntime's operators of decoders such as LLaMA's: root-mean-square norms, rotary positions, grouped attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mlc.frontend.onnx_expand import Expand, Nodes
from mlc.frontend.onnx_tokens import Tokens

__all__ = ["DECODER", "NORMS"]

_INT64 = 7  # onnx.TensorProto.INT64


# Normalisation


def _normalised(nodes: Nodes, x: str, scale: str, axis: int = -1, epsilon: float | None = None) -> str:
    """``x / sqrt(mean(x ** 2) + epsilon) * scale``, the mean over all axes from ``axis`` on."""
    added = nodes.constant(float(nodes.attributes().get("epsilon", 1e-5)) if epsilon is None else epsilon, scale)
    axes = [-1]  # sizes may be free there: the rank of none is known
    if axis != -1:
        rank = len(nodes.known_shape(nodes.node.input[0], "input"))
        axes = list(range(axis % rank, rank))
    mean = nodes.reduced("ReduceMean", str(nodes("Mul", x, x)), axes)
    return str(nodes("Mul", nodes("Div", x, nodes("Sqrt", nodes("Add", mean, added))), scale))


def _simplified_layer_norm(nodes: Nodes) -> str:
    """``X, scale``."""
    if any(nodes.node.output[1:]):
        raise nodes.refused("its deviation must not be used; export the model without it")
    x, scale = nodes.inputs(2)
    return _normalised(nodes, x, scale, int(nodes.attributes().get("axis", -1)))


def _skip_simplified_layer_norm(nodes: Nodes) -> list[str]:
    """``input, skip, gamma, bias``; the last of four outputs is the sum that is normalised."""
    x, skip, gamma, bias = nodes.inputs(4)
    if any(nodes.node.output[1:3]):
        raise nodes.refused("its mean and deviation must not be used; export the model without them")
    total = str(nodes("Add", x, skip))
    if bias:
        total = str(nodes("Add", total, bias))
    return [_normalised(nodes, total, gamma), "", "", total]


# Rotary positions


def _turned(nodes: Nodes, x: str, tables: Sequence[str], angles: int, size: int, interleaved: bool) -> str:
    """Each pair of the first numbers of a head turned by its angle: ``(a cos - b sin, b cos + a sin)``.

    ``x`` ends in the axis of a head's ``size`` numbers, of which the first ``2 * angles`` are turned; ``tables`` of
    cosines and sines broadcast over all axes before and end in the angles. Pairs are neighbours where ``interleaved``,
    else a number of the first half and one of the second.
    """
    cos, sin = tables
    turned, rest = x, ""
    if 2 * angles < size:
        turned, rest = (_sliced(nodes, x, begin, end) for begin, end in ((0, 2 * angles), (2 * angles, size)))
    if interleaved:
        a, b = (_sliced(nodes, turned, first, 2 * angles, 2) for first in (0, 1))
    else:
        a, b = (_sliced(nodes, turned, begin, begin + angles) for begin in (0, angles))
    first = nodes("Sub", nodes("Mul", a, cos), nodes("Mul", b, sin))
    second = nodes("Add", nodes("Mul", b, cos), nodes("Mul", a, sin))
    if interleaved:
        last = nodes.constant([-1])
        pairs = nodes("Concat", nodes("Unsqueeze", first, last), nodes("Unsqueeze", second, last), axis=-1)
        joined = nodes("Reshape", pairs, nodes("Shape", turned))
    else:
        joined = nodes("Concat", first, second, axis=-1)
    return str(nodes("Concat", joined, rest, axis=-1) if rest else joined)


def _sliced(nodes: Nodes, x: str, begin: int, end: int, step: int = 1) -> str:
    """Elements of the last axis."""
    return str(nodes("Slice", x, *(nodes.constant([number]) for number in (begin, end, -1, step))))


def _rotary_embedding(nodes: Nodes) -> str:
    """``input, position_ids, cos_cache, sin_cache``; the input is (batch, length, hidden) or (batch, heads, length,
    size), and a single position is that of the first token."""
    x, places, cos, sin = nodes.inputs(4)
    attributes = nodes.attributes()
    if attributes.get("scale", 1.0) != 1.0 or attributes.get("is_packed_batching", 0):
        raise nodes.refused("scale must be 1 and is_packed_batching 0; export the model again")
    rank, angles = nodes.rank_of(x, "input"), nodes.known_shape(cos, "cos_cache")[1]
    if nodes.rank_of(places, "position_ids") == 1:
        steps = nodes("Add", places, _counted(nodes, x, rank - 2))
        places = nodes("Unsqueeze", steps, nodes.constant([0]))
    # (batch, length, angles), with an axis for the heads
    axis = nodes.constant([2 if rank == 3 else 1])
    tables = [str(nodes("Unsqueeze", nodes("Gather", table, places), axis)) for table in (cos, sin)]
    interleaved = bool(attributes.get("interleaved", 0))
    if rank == 4:
        return _turned(nodes, x, tables, angles, nodes.fixed_size(x, 3, "input"), interleaved)
    heads = int(attributes.get("num_heads", 0))
    size = nodes.fixed_size(x, 2, "input") // heads if heads else 2 * angles
    split = str(nodes("Reshape", x, nodes.constant([0, 0, -1, size])))
    turned = _turned(nodes, split, tables, angles, size, interleaved)
    return str(nodes("Reshape", turned, nodes.constant([0, 0, -1])))


def _counted(nodes: Nodes, x: str, axis: int) -> str:
    """The numbers from 0 along an axis."""
    return str(nodes("Reshape", nodes.counted(x, axis, axis + 1), nodes.constant([-1])))


# Attention


_OFF = {"qk_output": 0, "k_quant_type": "NONE", "v_quant_type": "NONE", "kv_cache_bit_width": 0}
_SINK, _SCALES, _GAINS, _INPUTS = 11, slice(12, 14), slice(14, 16), 17


def _group_query_attention(nodes: Nodes) -> list[str]:
    """``query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache, sin_cache,
    position_ids, attention_bias, head_sink, k_scale, v_scale, q_norm_weight, k_norm_weight``: causal attention in which
    ``num_heads / kv_num_heads`` heads of queries share a head of keys and values.

    Without ``key`` and ``value``, ``query`` holds all three. The present keys are the past ones and the new ones
    behind them, (batch, kv_num_heads, past + length, size): every sequence fills its past. The results of one of which
    ``seqlens_k`` says otherwise are not numbers (NaN).
    The heads that share a key are rows of one product with it.
    """
    query, key, value, past_key, past_value, lengths, total, cos, sin, places, added = nodes.inputs(11)[:11]
    attributes, like = nodes.attributes(), nodes.node.input[0]
    _check_plain(nodes)
    sink, gains = nodes.inputs(_INPUTS)[_SINK], nodes.inputs(_INPUTS)[_GAINS]
    heads, groups = (int(attributes[name]) for name in ("num_heads", "kv_num_heads"))
    width, tokens = nodes.fixed_size(query, 2, "query"), Tokens.of(nodes, query, key or query, past_key)
    size = width // heads if key else width // (heads + 2 * groups)
    if heads % groups or (heads if key else heads + 2 * groups) * size != width:
        raise nodes.refused(f"the {width} columns of its query must be those of {heads} heads in {groups} groups; "
                            "export the model again")
    if not key:
        query, key, value = _split(nodes, query, [heads * size, groups * size, groups * size])
    if tokens.known:
        _check_length(nodes, total, tokens.past, tokens.total)

    def by_heads(x: str, count: int, turn: bool, gain: str = "") -> str:
        """(batch, heads, length, size), normalised where there is a gain, turned to the positions."""
        split = str(nodes("Reshape", x, nodes.constant([0, 0, count, size])))
        if gain:
            split = _normalised(nodes, split, gain, epsilon=_epsilon(attributes, "q" if gain == gains[0] else "k"))
        if turn:
            angles = nodes.known_shape(cos, "cos_cache")[1]
            split = _turned(nodes, split, tables, angles, size, bool(attributes.get("rotary_interleaved", 0)))
        return str(nodes("Transpose", split, perm=[0, 2, 1, 3]))

    rotary, tables = bool(attributes.get("do_rotary", 0)), list[str]()
    if rotary:
        places = places or str(nodes("Unsqueeze", tokens.places(), nodes.constant([0])))
        tables = [str(nodes("Unsqueeze", nodes("Gather", table, places), nodes.constant([2]))) for table in (cos, sin)]
    queries = nodes("Reshape", by_heads(query, heads, rotary, gains[0]), nodes.constant([0, groups, -1, size]))
    present = [by_heads(key, groups, rotary, gains[1]), by_heads(value, groups, False)]
    if past_key and tokens.past != 0:
        present = [str(nodes("Concat", old, new, axis=2))
                   for old, new in zip((past_key, past_value), present, strict=True)]
    scale = float(attributes.get("scale", 0.0)) or size ** -0.5
    turned = nodes("Transpose", present[0], perm=[0, 1, 3, 2])
    scores = nodes("MatMul", nodes("Mul", queries, nodes.constant(scale, like)), turned)
    cap = float(attributes.get("softcap", 0.0))
    if cap:
        limit = nodes.constant(cap, like)
        scores = nodes("Mul", nodes("Tanh", nodes("Div", scores, limit)), limit)
    if added:
        whole = nodes("Expand", added, tokens.shape(nodes.size(query, 0), heads))
        scores = nodes("Add", scores, nodes("Reshape", whole, tokens.shape(nodes.size(query, 0), groups, -1)))
    mask = _hidden(tokens, heads // groups, int(attributes.get("local_window_size", -1)), like)
    if mask:
        scores = nodes("Add", scores, mask)
    seen = nodes("MatMul", _weights(nodes, tokens, str(scores), sink, heads, groups), present[1])
    joined = nodes("Transpose", nodes("Reshape", seen, nodes.constant([0, heads, -1, size])), perm=[0, 2, 1, 3])
    result = nodes("Reshape", joined, nodes.constant([0, 0, heads * size]))
    if lengths:
        told = nodes("Add", nodes("Cast", nodes("Reshape", lengths, nodes.constant([-1, 1, 1])), to=_INT64),
                     nodes.constant(np.array(1)))
        full = nodes("Equal", told, tokens.end())
        result = nodes("Add", result, nodes("Where", full, *(nodes.constant(x, like) for x in (0.0, np.nan))))
    return [str(result), *present]


def _check_plain(nodes: Nodes) -> None:
    """Raise for what :func:`_group_query_attention` does not compute."""
    attributes, inputs = nodes.attributes(), nodes.inputs(_INPUTS)
    for name, off in _OFF.items():
        given = attributes.get(name, off)
        if (given.decode() if isinstance(given, bytes) else given) != off:
            raise nodes.refused(f"{name} must be {off}, got {given!r}; export the model without it")
    if not attributes.get("causal", 1):
        raise nodes.refused("causal must be 1, got 0; export the model with MultiHeadAttention")
    if any(inputs[_SCALES]) or any(inputs[_INPUTS - 1:]) or any(nodes.node.output[3:]):
        raise nodes.refused("it must have neither scales nor lengths of queries, and give no scores; export the model "
                            "without them")


def _epsilon(attributes: Mapping[str, object], side: str) -> float:
    """Of the norm of each head's queries (``q``) or keys (``k``)."""
    return float(str(attributes.get(f"{side}_norm_epsilon") or attributes.get("qk_norm_epsilon", 1e-6)))


def _weights(nodes: Nodes, tokens: Tokens, scores: str, sink: str, heads: int, groups: int) -> str:
    """The softmax of scores, (batch, groups, heads / groups * length, keys); with a ``sink``, one number for each head,
    beside which the keys have the rest."""
    if not sink and nodes.attributes().get("smooth_softmax", 0):
        sink = nodes.constant(np.zeros(heads, nodes.dtype_of(nodes.node.input[0])))
    if not sink:
        return str(nodes("Softmax", scores, axis=3))
    first, one = nodes.constant([0]), nodes.constant([1])
    batch, length = (nodes("Unsqueeze", nodes.size(tokens.query, axis), first) for axis in (0, tokens.axis))
    rows = nodes("Expand", nodes("Reshape", sink, nodes.constant([heads, 1, 1])),
                 nodes("Concat", batch, nodes.constant([heads]), length, one, axis=0))
    column = nodes("Reshape", rows, nodes.constant([0, groups, -1, 1]))
    whole = nodes("Softmax", nodes("Concat", scores, column, axis=3), axis=3)
    return str(nodes("Slice", whole, first, nodes.constant([-1]), nodes.constant([3])))


def _split(nodes: Nodes, x: str, sizes: list[int]) -> list[str]:
    if nodes.opset >= 13:
        return list(nodes("Split", x, nodes.constant(sizes), outputs=len(sizes), axis=2))
    return list(nodes("Split", x, outputs=len(sizes), axis=2, split=sizes))


def _check_length(nodes: Nodes, total: str, past: int, wanted: int) -> None:
    """Raise where the present keys are known not to be the past ones and the new ones."""
    given = nodes.constant_of(total) if total else None
    present = nodes.node.output[1] if len(nodes.node.output) > 1 else ""
    declared = nodes.types[present][1][2:3] if present in nodes.types else ()
    length = int(given.reshape(())) if given is not None else declared[0] if declared else wanted
    if length != wanted:
        raise nodes.refused(f"its keys must be the {past} past ones and the new ones, {wanted} together, got {length}; "
                            "export the model with past keys of the sequence's length")


def _hidden(tokens: Tokens, heads: int, window: int, like: str) -> str:
    """What is added to the scores of ``heads`` heads that share keys, for keys that a query does not see: later ones,
    and with a window all but so many before it and itself. Empty where all are seen."""
    nodes = tokens.nodes
    if tokens.known:
        query, key = np.arange(tokens.past, tokens.total)[:, None], np.arange(tokens.total)[None]
        hidden = (key > query) | ((key < query - window + 1) if window > 0 else False)
        added = np.tile(np.where(hidden, np.finfo("float32").min, 0).astype("float32"), (heads, 1))
        return _typed(nodes, added, like) if hidden.any() else ""
    queries, keys = nodes("Unsqueeze", tokens.places(), nodes.constant([1])), tokens.keys()
    test = nodes("Greater", keys, queries)
    if window > 0:
        test = nodes("Or", test, nodes("Less", keys, nodes("Add", queries, nodes.constant(np.array(1 - window)))))
    never, zero = (_typed(nodes, np.array(x, "float32"), like) for x in (np.finfo("float32").min, 0))
    mask = str(nodes("Where", test, never, zero))
    if heads == 1:
        return mask
    whole = nodes("Expand", mask, tokens.shape(nodes.constant(np.array(1)), heads))
    return str(nodes("Reshape", whole, tokens.shape(nodes.constant(np.array(1)), 1, -1)))


def _typed(nodes: Nodes, mask: np.ndarray, like: str) -> str:
    """The mask in the type of ``like``: the least float16 is far less than scores are."""
    dtype = nodes.dtype_of(like)
    return nodes.constant(np.asarray(mask if dtype == np.float32 else np.maximum(mask, -65504).astype(dtype)))


#: operators that onnxruntime puts into the standard domain
NORMS: Mapping[str, Expand] = {"SimplifiedLayerNormalization": _simplified_layer_norm}

#: operator of ``com.microsoft`` --> what it is made of
DECODER: Mapping[str, Expand] = {
    **NORMS,
    "GroupQueryAttention": _group_query_attention,
    "RotaryEmbedding": _rotary_embedding,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
}
