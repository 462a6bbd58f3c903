"""ONNX's ``Attention`` (opset 23 on) as products around a softmax.

Written out here since onnx's own definition cannot be inlined where inputs are left out, and copies the keys that
several heads share.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from mlc.frontend.onnx_expand import Nodes

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
    shape, flat = nodes.known_shape(query, "query"), len(nodes.known_shape(query, "query")) == 3
    total = nodes.known_shape(key, "key")[1 if flat else 2]
    past = nodes.known_shape(past_key, "past_key")[2] if past_key else 0
    if flat:
        batch, length, heads, groups = *shape[:2], int(given["q_num_heads"]), int(given["kv_num_heads"])
        query, key, value = (_by_heads(nodes, x, n) for x, n in ((query, heads), (key, groups), (value, groups)))
    else:
        batch, heads, length, groups = *shape[:3], nodes.known_shape(key, "key")[1]
    if heads % groups:
        raise nodes.refused(f"its {heads} heads of queries must share the {groups} heads of keys evenly; export the "
                            "model again")
    present = [key, value]
    if past_key:
        present = [str(nodes("Concat", old, new, axis=2))
                   for old, new in zip((past_key, past_value), present, strict=True)]
    size = shape[-1] // heads if flat else shape[3]
    sizes = _Sizes(batch, heads, groups, length, past, past + total)

    scale = float(given.get("scale", 0.0)) or size ** -0.5
    rows = sizes.grouped(nodes, str(nodes("Mul", query, nodes.constant(scale, nodes.node.input[0]))))
    scores = str(nodes("MatMul", rows, nodes("Transpose", present[0], perm=[0, 1, 3, 2])))
    stages = {_PRODUCT: scores}
    if cap := float(given.get("softcap", 0.0)):
        limit = nodes.constant(cap, nodes.node.input[0])
        scores = str(nodes("Mul", nodes("Tanh", nodes("Div", scores, limit)), limit))
    stages[_CAPPED] = scores
    bias = _bias(nodes, sizes, mask, "" if past_key else lengths)
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
    result = sizes.by_heads(nodes, str(nodes("MatMul", weights, present[1])))
    mode = int(given.get("qk_matmul_output_mode", 0))
    seen = sizes.by_heads(nodes, stages[mode]) if any(nodes.node.output[3:]) else ""
    if bias and _may_hide_all(nodes, bias):
        largest = nodes.reduced("ReduceMax", bias, [-1])
        visible, zero = nodes("Greater", largest, nodes.constant(-np.inf, bias)), _zero(nodes)
        result = str(nodes("Where", visible, result, zero))
        if seen and mode == _SOFTMAX:
            seen = str(nodes("Where", visible, seen, zero))
    if flat:
        joined = nodes("Transpose", result, perm=[0, 2, 1, 3])
        result = str(nodes("Reshape", joined, nodes.constant([batch, length, -1])))
    return [result, *present, seen]


class _Sizes:
    """Of an attention: ``total`` keys, the ``past`` ones among them; heads that share a group's keys follow each
    other."""

    def __init__(self, batch: int, heads: int, groups: int, length: int, past: int, total: int) -> None:
        self.batch, self.heads, self.groups, self.length, self.past, self.total = (
            batch, heads, groups, length, past, total)

    def grouped(self, nodes: Nodes, x: str) -> str:
        """(batch, heads, length, …) --> (batch, groups, heads / groups * length, …)."""
        if self.heads == self.groups:
            return x
        return str(nodes("Reshape", x, nodes.constant([0, self.groups, self.heads // self.groups * self.length, -1])))

    def by_heads(self, nodes: Nodes, x: str) -> str:
        """The inverse of :meth:`grouped`."""
        if self.heads == self.groups:
            return x
        return str(nodes("Reshape", x, nodes.constant([0, self.heads, self.length, -1])))

    def shared(self, nodes: Nodes, bias: str) -> str:
        """What is added to grouped scores: ``bias`` broadcasts to (batch, heads, length, total)."""
        if self.heads == self.groups:
            return bias
        whole = nodes("Expand", bias, nodes.constant([1, self.heads, self.length, self.total]))
        return self.grouped(nodes, str(whole))


def _by_heads(nodes: Nodes, x: str, heads: int) -> str:
    """(batch, length, heads * size) --> (batch, heads, length, size)."""
    return str(nodes("Transpose", nodes("Reshape", x, nodes.constant([0, 0, heads, -1])), perm=[0, 2, 1, 3]))


def _zero(nodes: Nodes) -> str:
    return nodes.constant(0.0, nodes.node.input[0])


def _bias(nodes: Nodes, sizes: _Sizes, mask: str, lengths: str) -> str:
    """What is added to the scores, minus infinity for keys that are not seen; empty for nothing.

    ``lengths`` are the numbers of keys of each sequence that are no padding. Queries are the last of them, or of all
    keys, the past ones included.
    """
    given, least = nodes.attributes(), nodes.constant(-np.inf, nodes.node.input[0])
    query, key = np.arange(sizes.length).reshape(-1, 1), np.arange(sizes.total)
    ahead = -1 if not given.get("is_causal", 0) else 0  # how many later keys a query sees; -1: all
    right = int(given.get("right_window_size", -1))
    ahead = right if ahead < 0 else ahead if right < 0 else min(ahead, right)
    left = int(given.get("left_window_size", -1))
    tests: list[str] = []  # of what is known at run time alone
    allowed = np.ones((sizes.length, sizes.total), bool)
    if not lengths:
        distance = key - query - sizes.past
        allowed &= (distance <= ahead if ahead >= 0 else True) & (distance >= -left if left >= 0 else True)
    else:
        counts = nodes("Reshape", nodes("Cast", lengths, to=_INT64), nodes.constant([-1, 1, 1, 1]))
        tests.append(str(nodes("Less", nodes.constant(key), counts)))
        distance = nodes("Sub", nodes.constant(key - query + sizes.length), counts)
        if ahead >= 0:
            tests.append(str(nodes("LessOrEqual", distance, nodes.constant([ahead]))))
        if left >= 0:
            tests.append(str(nodes("GreaterOrEqual", distance, nodes.constant([-left]))))
    added = ""
    if mask:
        mask, is_test = _whole(nodes, mask, sizes.total)
        known = nodes.value_of(mask)
        if not is_test:
            added = mask
        elif known is not None:
            allowed = allowed & known
        else:
            tests.append(mask)
    if not allowed.all():
        hidden = nodes.constant(np.where(allowed, 0, -np.inf).astype(nodes.dtype_of(nodes.node.input[0])))
        added = str(nodes("Add", added, hidden)) if added else hidden
    if tests:
        seen = reduce(lambda a, b: str(nodes("And", a, b)), tests)
        added = str(nodes("Where", seen, added or _zero(nodes), least))
    return added


def _whole(nodes: Nodes, mask: str, total: int) -> tuple[str, bool]:
    """The mask for all keys, of which those that it leaves out are not seen; whether it is one of truth values."""
    shape, dtype = nodes.known_shape(mask, "mask"), nodes.dtype_of(mask)
    is_test, short = dtype.kind == "b", total - shape[-1] if shape else 0
    if not short:
        return mask, is_test
    fill = np.full((*shape[:-1], short), False if is_test else -np.inf, dtype)
    array = nodes.value_of(mask)
    if array is not None:
        return nodes.constant(np.concatenate([array, fill], axis=-1)), is_test
    return str(nodes("Concat", mask, nodes.constant(fill), axis=len(shape) - 1)), is_test


def _may_hide_all(nodes: Nodes, bias: str) -> bool:
    """Whether some query may see no key at all."""
    array = nodes.value_of(bias)
    return array is None or bool(np.isneginf(array.max(axis=-1)).any())
