"""onnxruntime's operators of decoders: as its CPU kernels compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from onnx import helper
from quantised_nodes import MICROSOFT, imported_numbers, model_of, onnxruntime_numbers

from mlc.errors import ModelError
from mlc.frontend import load_model

RNG = np.random.default_rng(7)


def _numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def _assert_as_onnxruntime(
    operator: str, inputs: str, feeds: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[str, int]], domain: str = MICROSOFT, opset: int = 17, **attributes: Any,
) -> None:
    names = ["" if name == "-" else name for name in inputs.split()]
    results = [name if name in outputs else "" for name in ("y", "m", "d", "t")] if "t" in outputs else list(outputs)
    node = helper.make_node(operator, names, results, domain=domain, **attributes)
    model = model_of([node], feeds, constants, outputs, opset)
    mine, theirs = imported_numbers(model, feeds), onnxruntime_numbers(model, feeds)
    for ours, wanted in zip(mine, theirs, strict=True):
        assert ours.shape == wanted.shape and wanted.std() > 0
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("opset", [15, 18])
@pytest.mark.parametrize("axis", [-1, 1])
def test_norm_by_the_root_mean_square(opset: int, axis: int) -> None:
    x = _numbers(2, 3, 16)
    constants = {"g": _numbers(*x.shape[axis:])}
    _assert_as_onnxruntime("SimplifiedLayerNormalization", "x g", {"x": x}, constants, {"y": ("float32", 3)}, "",
                           opset, axis=axis, epsilon=1e-3)


@pytest.mark.parametrize("inputs", ["x s g", "x s g b"])
def test_norm_of_a_sum(inputs: str) -> None:
    feeds = {"x": _numbers(2, 3, 16), "s": _numbers(2, 3, 16)}
    constants = {name: _numbers(16) for name in "gb" if name in inputs}
    _assert_as_onnxruntime("SkipSimplifiedLayerNormalization", inputs, feeds, constants,
                           {"y": ("float32", 3), "t": ("float32", 3)}, epsilon=1e-5)


def _caches(positions: int, angles: int) -> dict[str, np.ndarray]:
    turn = np.outer(np.arange(positions), 100.0 ** -(np.arange(angles) / angles))
    return {"cos": np.cos(turn).astype("float32"), "sin": np.sin(turn).astype("float32")}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("shape", [(2, 5, 24), (2, 3, 5, 8)], ids=["hidden", "heads"])
@pytest.mark.parametrize("first", [False, True])
def test_rotary_positions(shape: tuple[int, ...], interleaved: int, first: bool) -> None:
    places = np.array([3]) if first else RNG.integers(0, 12, (2, 5))
    _assert_as_onnxruntime("RotaryEmbedding", "x p cos sin", {"x": _numbers(*shape), "p": places}, _caches(12, 4),
                           {"y": ("float32", len(shape))}, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_positions_of_a_part_of_each_head(interleaved: int) -> None:
    feeds = {"x": _numbers(2, 5, 24), "p": RNG.integers(0, 12, (2, 5))}
    _assert_as_onnxruntime("RotaryEmbedding", "x p cos sin", feeds, _caches(12, 2), {"y": ("float32", 3)},
                           interleaved=interleaved, num_heads=3, rotary_embedding_dim=4)


ATTENTION = {
    "prompt": (0, 5, {}), "a token": (7, 1, {}), "a few tokens": (4, 3, {}),
    "rotary prompt": (0, 5, {"do_rotary": 1}), "rotary token": (7, 1, {"do_rotary": 1}),
    "interleaved": (7, 1, {"do_rotary": 1, "rotary_interleaved": 1}),
    "window": (0, 6, {"local_window_size": 3}), "window of a token": (7, 1, {"local_window_size": 3}),
    "scale": (0, 5, {"scale": 0.4}), "softcap": (0, 5, {"softcap": 1.5}),
}
_OUTPUTS = {"y": ("float32", 3), "pk": ("float32", 4), "pv": ("float32", 4)}


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("name", ATTENTION)
def test_grouped_attention(name: str, packed: bool) -> None:
    past, length, attributes = ATTENTION[name]
    batch, heads, groups, size = 2 if past == 0 or length == 1 else 1, 4, 2, 16
    feeds = {"q": _numbers(batch, length, (heads + 2 * groups if packed else heads) * size)}
    if not packed:
        feeds |= {"k": _numbers(batch, length, groups * size), "v": _numbers(batch, length, groups * size)}
    if past:
        feeds |= {"ok": _numbers(batch, groups, past, size), "ov": _numbers(batch, groups, past, size)}
    constants = {"seq": np.full(batch, past + length - 1, "int32"), "total": np.array(past + length, "int32")}
    inputs = f"q {'- -' if packed else 'k v'} {'ok ov' if past else '- -'} seq total"
    if "do_rotary" in attributes:
        constants |= _caches(16, size // 2)
        inputs += " cos sin"
    _assert_as_onnxruntime("GroupQueryAttention", inputs, feeds, constants, _OUTPUTS, num_heads=heads,
                           kv_num_heads=groups, **attributes)


def test_attention_with_a_bias() -> None:
    feeds = {"q": _numbers(2, 5, 32), "k": _numbers(2, 5, 16), "v": _numbers(2, 5, 16), "a": _numbers(1, 4, 5, 5)}
    constants = {"seq": np.full(2, 4, "int32"), "total": np.array(5, "int32")}
    _assert_as_onnxruntime("GroupQueryAttention", "q k v - - seq total - - - a", feeds, constants, _OUTPUTS,
                           num_heads=4, kv_num_heads=2)


@pytest.mark.parametrize(("past", "length", "window"), [(0, 5, -1), (7, 1, 3)])
@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "smooth"])
def test_attention_beside_sinks(past: int, length: int, window: int, sinks: bool) -> None:
    feeds = {"q": _numbers(2, length, 128)}
    if past:
        feeds |= {"ok": _numbers(2, 2, past, 16), "ov": _numbers(2, 2, past, 16)}
    constants = {"seq": np.full(2, past + length - 1, "int32"), "total": np.array(past + length, "int32")}
    constants |= {"sinks": _numbers(4) + 1} if sinks else {}
    inputs = f"q - - {'ok ov' if past else '- -'} seq total - - - - {'sinks' if sinks else ''}"
    _assert_as_onnxruntime("GroupQueryAttention", inputs, feeds, constants, _OUTPUTS, num_heads=4, kv_num_heads=2,
                           local_window_size=window, **({} if sinks else {"smooth_softmax": 1}))


@pytest.mark.parametrize("epsilons", [{}, {"qk_norm_epsilon": 0.5}, {"q_norm_epsilon": 0.5, "k_norm_epsilon": 0.1}])
def test_attention_of_normalised_heads(epsilons: dict[str, float]) -> None:
    """onnxruntime has no such kernel for CPUs; it is given what is normalised already."""
    feeds = {"q": _numbers(2, 5, 64), "k": _numbers(2, 5, 32), "v": _numbers(2, 5, 32)}
    constants = {"seq": np.full(2, 4, "int32"), "total": np.array(5, "int32"), **_caches(8, 8)}
    gains = {"qn": _numbers(16), "kn": _numbers(16)}
    mine, theirs = (model_of([helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "", "", "seq", "total", "cos", "sin", *more], list(_OUTPUTS),
        domain=MICROSOFT, num_heads=4, kv_num_heads=2, do_rotary=1, **attributes)], feeds, weights, _OUTPUTS, 17)
        for more, attributes, weights in ((["", "", "", "", "", "qn", "kn"], epsilons, constants | gains),
                                          ([], {}, constants)))
    given = dict(feeds)
    for name in "qk":
        heads = feeds[name].astype("float64").reshape(2, 5, -1, 16)
        epsilon = epsilons.get(f"{name}_norm_epsilon", epsilons.get("qk_norm_epsilon", 1e-6))
        normal = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + epsilon) * gains[f"{name}n"]
        given[name] = normal.astype("float32").reshape(feeds[name].shape)
    for ours, wanted in zip(imported_numbers(mine, feeds), onnxruntime_numbers(theirs, given), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("total", "attributes", "words"), [
    (9, {}, "its keys must be the 0 past ones and the new ones, 5 together, got 9"),
    (5, {"qk_output": 1}, "qk_output must be 0, got 1; export the model without it"),
    (5, {"causal": 0}, "causal must be 1, got 0"),
    (5, {"num_heads": 3}, "must be those of 3 heads in 2 groups"),
])
def test_what_is_refused(total: int, attributes: dict[str, int], words: str) -> None:
    feeds = {"q": _numbers(1, 5, 32), "k": _numbers(1, 5, 16), "v": _numbers(1, 5, 16)}
    constants = {"seq": np.full(1, 4, "int32"), "total": np.array(total, "int32")}
    node = helper.make_node("GroupQueryAttention", ["q", "k", "v", "", "", "seq", "total"], list(_OUTPUTS),
                            domain=MICROSOFT, **{"num_heads": 4, "kv_num_heads": 2, **attributes})
    with pytest.raises(ModelError, match=words) as caught:
        load_model(model_of([node], feeds, constants, _OUTPUTS, 17))
    assert "\n" not in str(caught.value)
