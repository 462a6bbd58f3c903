"""onnxruntime's ``MultiHeadAttention``: as its CPU kernel computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from quantised_nodes import MICROSOFT, imported_numbers, model_of, onnxruntime_numbers

from mlc.errors import ModelError
from mlc.frontend import load_model

RNG = np.random.default_rng(5)
BATCH, HEADS, SIZE, LENGTH, KEYS, PAST = 2, 4, 8, 3, 5, 6
WIDTH = HEADS * SIZE


def _numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def _mask(*shape: int) -> np.ndarray:
    mask = RNG.integers(0, 2, shape, "int32")
    mask[..., 0] = 1
    return mask


#: inputs and their arrays, outputs, attributes
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "across": ("q k v", {"q": (BATCH, LENGTH, WIDTH), "k": (BATCH, KEYS, WIDTH), "v": (BATCH, KEYS, 2 * WIDTH)}, "y",
               {}),
    "scaled": ("q k v", {"q": (BATCH, LENGTH, WIDTH), "k": (BATCH, KEYS, WIDTH), "v": (BATCH, KEYS, WIDTH)}, "y",
               {"scale": 0.9}),
    "a bias": ("q k v b", {"q": (BATCH, LENGTH, WIDTH), "k": (BATCH, KEYS, WIDTH), "v": (BATCH, KEYS, WIDTH),
                           "b": (3 * WIDTH,)}, "y", {}),
    "by heads": ("q k v", {"q": (BATCH, LENGTH, WIDTH), "k": (BATCH, HEADS, KEYS, SIZE),
                           "v": (BATCH, HEADS, KEYS, SIZE)}, "y", {}),
    "padding": ("q k v - m", {"q": (BATCH, LENGTH, WIDTH), "k": (BATCH, KEYS, WIDTH), "v": (BATCH, KEYS, WIDTH),
                              "m": _mask(BATCH, KEYS)}, "y", {"mask_filter_value": -50.0}),
    "a past": ("q k v - - a ok ov", {
        "q": (BATCH, LENGTH, WIDTH), "k": (BATCH, LENGTH, WIDTH), "v": (BATCH, LENGTH, WIDTH),
        "a": (1, HEADS, LENGTH, PAST + LENGTH), "ok": (BATCH, HEADS, PAST, SIZE), "ov": (BATCH, HEADS, PAST, SIZE)},
        "y pk pv", {}),
    "causal": ("q k v - - - ok ov", {
        "q": (BATCH, LENGTH, WIDTH), "k": (BATCH, LENGTH, WIDTH), "v": (BATCH, LENGTH, WIDTH),
        "ok": (BATCH, HEADS, PAST, SIZE), "ov": (BATCH, HEADS, PAST, SIZE)}, "y pk pv", {"unidirectional": 1}),
}


def _node(inputs: str, outputs: str, attributes: dict[str, Any]) -> Any:
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node("MultiHeadAttention", names, outputs.split(), domain=MICROSOFT, num_heads=HEADS,
                            **attributes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_heads_with_keys_of_their_own(name: str) -> None:
    inputs, given, outputs, attributes = CASES[name]
    feeds = {each: what if isinstance(what, np.ndarray) else _numbers(*what) for each, what in given.items()}
    constants = {"b": feeds.pop("b")} if "b" in feeds else {}  # onnxruntime adds one that is constant, too
    model = model_of([_node(inputs, outputs, attributes)], feeds, constants,
                     {each: ("float32", 3 if each == "y" else 4) for each in outputs.split()}, 17)
    for ours, wanted in zip(imported_numbers(model, feeds), onnxruntime_numbers(model, feeds), strict=True):
        assert ours.shape == wanted.shape and wanted.std() > 0
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("count", [3, 2], ids=["query, key and value", "key and value"])
def test_what_lies_in_one_is_what_lies_apart(count: int) -> None:
    """onnxruntime has no such kernel for CPUs; it is given the parts."""
    keys = LENGTH if count == 3 else KEYS
    packed, query = _numbers(BATCH, keys, HEADS, count, SIZE), _numbers(BATCH, LENGTH, WIDTH)
    parts = [packed[:, :, :, i].reshape(BATCH, keys, WIDTH) for i in range(count)]
    apart = dict(zip("qkv", parts if count == 3 else [query, *parts], strict=True))
    feeds = {"q": packed} if count == 3 else {"q": query, "k": packed}
    models = [model_of([_node(" ".join(each), "y", {})], each, {}, {"y": ("float32", 3)}, 17)
              for each in (feeds, apart)]
    (ours,), (wanted,) = imported_numbers(models[0], feeds), onnxruntime_numbers(models[1], apart)
    np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("inputs", "feeds", "attributes", "words"), [
    ("q k v - - - ok ov n", {"ok": _numbers(1, HEADS, 4, SIZE), "ov": _numbers(1, HEADS, 4, SIZE),
                             "n": np.array([2], "int32")}, {}, "without a buffer that past and present keys share"),
    ("q k v - m", {"m": np.array([2], "int32")}, {}, "key_padding_mask must say of each key whether it is there"),
])
def test_what_is_refused(inputs: str, feeds: dict[str, np.ndarray], attributes: dict[str, int], words: str) -> None:
    feeds = {"q": _numbers(1, 3, WIDTH), "k": _numbers(1, 3, WIDTH), "v": _numbers(1, 3, WIDTH), **feeds}
    with pytest.raises(ModelError, match=words) as caught:
        load_model(model_of([_node(inputs, "y", attributes)], feeds, {}, {"y": ("float32", 3)}, 17))
    assert "\n" not in str(caught.value)
