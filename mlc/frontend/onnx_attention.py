"""ONNX's ``Attention`` (opset 23 on) as products around a softmax.

Written out here since onnx's own definition cannot be inlined where inputs are left out, and copies the keys that
several heads share.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from mlc.frontend.onnx_expand import Nodes
from mlc.frontend.onnx_tokens import Tokens

__all__ = ["attention"]

_INT64 = 7  # onnx.TensorProto.INT64
#: what ``qk_matmul_output`` is taken after, as ``qk_matmul_output_mode`` numbers it
_PRODUCT, _CAPPED, _MASKED, _SOFTMAX = range(4)


def attention(nodes: Nodes) -> list[str]:
    """``Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen``, of four axes each (batch, heads, length, size),
    or of three with the heads within the last.

    Heads that share a key are rows of one product with it. The result of a query that sees no key is 0.
    """
    from onnx import helper

    query, key, value, mask, past_key, past_value, lengths = nodes.inputs(7)
    given = nodes.attributes()
    size, value_size = nodes.fixed_size(query, -1, "query"), nodes.fixed_size(value, -1, "value")
    flat = nodes.rank_of(query, "query") == 3
    tokens = Tokens.of(nodes, query, key, past_key, 1 if flat else 2)
    if flat:
        heads, groups = int(given["q_num_heads"]), int(given["kv_num_heads"])
        size, value_size = size // heads, value_size // groups
        query, key, value = (_by_heads(nodes, x, n) for x, n in ((query, heads), (key, groups), (value, groups)))
    else:
        heads, groups = nodes.fixed_size(query, 1, "query"), nodes.fixed_size(key, 1, "key")
    if heads % groups:
        raise nodes.refused(f"its {heads} heads of queries must share the {groups} heads of keys evenly; export the "
                            "model again")
    present = [key, value]
    if past_key:
        present = [str(nodes("Concat", old, new, axis=2))
                   for old, new in zip((past_key, past_value), present, strict=True)]
    sizes = _Sizes(heads, groups, tokens)

    scale = float(given.get("scale", 0.0)) or size ** -0.5
    rows = sizes.grouped(nodes, str(nodes("Mul", query, nodes.constant(scale, nodes.node.input[0]))), size)
    scores = str(nodes("MatMul", rows, nodes("Transpose", present[0], perm=[0, 1, 3, 2])))
    stages = {_PRODUCT: scores}
    if cap := float(given.get("softcap", 0.0)):
        limit = nodes.constant(cap, nodes.node.input[0])
        scores = str(nodes("Mul", nodes("Tanh", nodes("Div", scores, limit)), limit))
    stages[_CAPPED] = scores
    bias, may_hide = _bias(nodes, tokens, mask, "" if past_key else lengths)
    if bias:
        scores = str(nodes("Add", scores, sizes.shared(nodes, bias)))
    stages[_MASKED] = scores
    kind = helper.np_dtype_to_tensor_dtype(nodes.dtype_of(nodes.node.input[0]))
    wide = int(given.get("softmax_precision", 0)) or kind
    if wide != kind:
        scores = str(nodes("Cast", scores, to=wide))
    weights = str(nodes("Softmax", scores, axis=-1))
    if wide != kind:
        weights = str(nodes("Cast", weights, to=kind))
    stages[_SOFTMAX] = weights
    result = sizes.by_heads(nodes, str(nodes("MatMul", weights, present[1])), value_size)
    mode = int(given.get("qk_matmul_output_mode", 0))
    seen = sizes.by_heads(nodes, stages[mode]) if any(nodes.node.output[3:]) else ""
    if may_hide:
        largest = nodes.reduced("ReduceMax", bias, [-1])
        visible, zero = nodes("Greater", largest, nodes.constant(-np.inf, bias)), _zero(nodes)
        result = str(nodes("Where", visible, result, zero))
        if seen and mode == _SOFTMAX:
            seen = str(nodes("Where", visible, seen, zero))
    if flat:
        joined = nodes("Transpose", result, perm=[0, 2, 1, 3])
        result = str(nodes("Reshape", joined, nodes.constant([0, 0, -1])))
    return [result, *present, seen]


class _Sizes:
    """The sizes of an attention; heads that share keys (grouped queries) are adjacent."""

    def __init__(self, heads: int, groups: int, tokens: Tokens) -> None:
        self.heads, self.groups, self.tokens = heads, groups, tokens

    def grouped(self, nodes: Nodes, x: str, size: int | None = None) -> str:
        """(batch, heads, length, size) --> (batch, groups, heads / groups * length, size); there are as many as keys
        where ``size`` is left out."""
        return self._apart(nodes, x, self.groups, size)

    def by_heads(self, nodes: Nodes, x: str, size: int | None = None) -> str:
        """The inverse of :meth:`grouped`."""
        return self._apart(nodes, x, self.heads, size)

    def _apart(self, nodes: Nodes, x: str, count: int, size: int | None) -> str:
        if self.heads == self.groups:
            return x
        shape = self.tokens.shape(nodes.size(x, 0), count, -1) if size is None else nodes.constant([0, count, -1, size])
        return str(nodes("Reshape", x, shape))

    def shared(self, nodes: Nodes, bias: str) -> str:
        """Reshape ``bias``, which broadcasts to (batch, heads, length, keys), to be added to grouped scores."""
        if self.heads == self.groups:
            return bias
        whole = nodes("Expand", bias, self.tokens.shape(nodes.constant(np.array(1)), self.heads))
        return self.grouped(nodes, str(whole))


def _by_heads(nodes: Nodes, x: str, heads: int) -> str:
    """(batch, length, heads * size) --> (batch, heads, length, size)."""
    return str(nodes("Transpose", nodes("Reshape", x, nodes.constant([0, 0, heads, -1])), perm=[0, 2, 1, 3]))


def _zero(nodes: Nodes) -> str:
    return nodes.constant(0.0, nodes.node.input[0])


def _bias(nodes: Nodes, tokens: Tokens, mask: str, lengths: str) -> tuple[str, bool]:
    """What is added to the scores, minus infinity for keys that are not seen, empty for nothing; and whether some query
    may see no key.

    ``lengths`` are the numbers of keys of each sequence that are no padding. Queries are the last of them, or of all
    keys, the past ones included.
    """
    given, least = nodes.attributes(), nodes.constant(-np.inf, nodes.node.input[0])
    ahead = -1 if not given.get("is_causal", 0) else 0  # how many later keys a query sees; -1: all
    right = int(given.get("right_window_size", -1))
    ahead = right if ahead < 0 else ahead if right < 0 else min(ahead, right)
    left = int(given.get("left_window_size", -1))
    if lengths and not tokens.known:
        raise nodes.refused("its numbers of queries and keys must be known where sequences are padded; fix them")
    tests: list[str] = []  # of what is known at run time alone
    allowed = np.ones((max(tokens.length, 1), max(tokens.total, 1)), bool)
    if lengths:
        query, key = np.arange(tokens.length).reshape(-1, 1), np.arange(tokens.total)
        counts = nodes("Reshape", nodes("Cast", lengths, to=_INT64), nodes.constant([-1, 1, 1, 1]))
        tests.append(str(nodes("Less", nodes.constant(key), counts)))
        tests += _within(nodes, nodes("Sub", nodes.constant(key - query + tokens.length), counts), ahead, left)
    elif tokens.known:
        distance = np.arange(tokens.total) - np.arange(tokens.length).reshape(-1, 1) - tokens.past
        allowed &= (distance <= ahead if ahead >= 0 else True) & (distance >= -left if left >= 0 else True)
    elif max(ahead, left) >= 0:
        places = nodes("Unsqueeze", tokens.places(), nodes.constant([1]))
        tests += _within(nodes, nodes("Sub", tokens.keys(), places), ahead, left)
    added = ""
    if mask:
        mask, is_test = _whole(nodes, mask, tokens.total)
        known = nodes.value_of(mask)
        if not is_test:
            added = mask
        elif known is not None and tokens.known:
            allowed = allowed & known
        else:
            tests.append(mask)
    if not allowed.all():
        hidden = nodes.constant(np.where(allowed, 0, -np.inf).astype(nodes.dtype_of(nodes.node.input[0])))
        added = str(nodes("Add", added, hidden)) if added else hidden
    if tests:
        seen = reduce(lambda a, b: str(nodes("And", a, b)), tests)
        added = str(nodes("Where", seen, added or _zero(nodes), least))
    if added and not (mask or lengths) and left < 0:
        return added, False  # the first key is seen by all
    return added, bool(added) and _may_hide_all(nodes, added)


def _within(nodes: Nodes, distance: str, ahead: int, left: int) -> list[str]:
    """Tests of how far behind its query a key lies; -1 for no limit."""
    tests = [nodes("LessOrEqual", distance, nodes.constant([ahead]))] if ahead >= 0 else []
    return tests + ([nodes("GreaterOrEqual", distance, nodes.constant([-left]))] if left >= 0 else [])


def _whole(nodes: Nodes, mask: str, total: int) -> tuple[str, bool]:
    """The mask for all keys (of free numbers of which it leaves none out), of which those that it leaves out are not
    seen; whether it is one of truth values."""
    dtype, last = nodes.dtype_of(mask), nodes.size_of(mask, -1) if nodes.rank_of(mask, "mask") else None
    is_test = dtype.kind == "b"
    short = total - last if last is not None and total >= 0 else 0
    if not short:
        return mask, is_test
    shape = nodes.known_shape(mask, "mask")
    fill = np.full((*shape[:-1], short), False if is_test else -np.inf, dtype)
    array = nodes.value_of(mask)
    if array is not None:
        return nodes.constant(np.concatenate([array, fill], axis=-1)), is_test
    return str(nodes("Concat", mask, nodes.constant(fill), axis=len(shape) - 1)), is_test


def _may_hide_all(nodes: Nodes, bias: str) -> bool:
    """Whether some query may see no key at all."""
    array = nodes.value_of(bias)
    return array is None or bool(np.isneginf(array.max(axis=-1)).any())
