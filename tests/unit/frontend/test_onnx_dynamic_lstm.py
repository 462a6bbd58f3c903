"""``DynamicQuantizeLSTM`` as onnxruntime computes it and as its definition does in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from quantised_nodes import MICROSOFT, extremes, imported_numbers, model_of

import mlc
from mlc.cpu import host_flags
from mlc.errors import ModelError
from mlc.frontend import load_model

STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 7, 6
_INPUTS = ("x", "w", "r", "b", "lens", "h", "c", "p", "ws", "wz", "rs", "rz")


def _constants(count: int, dtype: str, columns: bool) -> dict[str, np.ndarray]:
    """Weights with one scale for each direction or for each of its columns; zero points at an end where they may be."""
    rng = np.random.default_rng(0)
    scales = (count, 4 * HIDDEN) if columns else (count,)
    found = {"w": extremes(rng, (count, FEATURES, 4 * HIDDEN), dtype),
             "r": extremes(rng, (count, HIDDEN, 4 * HIDDEN), dtype),
             "b": rng.standard_normal((count, 8 * HIDDEN)).astype("float32")}
    for name in "wr":
        found[f"{name}s"] = rng.uniform(0.002, 0.006, scales).astype("float32")
        found[f"{name}z"] = np.full(scales, 0 if dtype == "int8" else 117, dtype)
    return found


def _model(constants: dict[str, np.ndarray], feeds: dict[str, np.ndarray], **attributes: Any) -> onnx.ModelProto:
    inputs = [name if name in constants or name in feeds else "" for name in _INPUTS]
    node = helper.make_node("DynamicQuantizeLSTM", inputs, ["y", "yh", "yc"], name="layer", domain=MICROSOFT,
                            hidden_size=HIDDEN, **attributes)
    return model_of([node], feeds, constants, {"y": ("float32", 4), "yh": ("float32", 3), "yc": ("float32", 3)},
                    opset=17)


def _rounded(x: np.ndarray) -> np.ndarray:
    """By the range of all numbers, widened to hold zero, in 255 steps; float32's where rounding may show."""
    low, high = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
    step = (high - low) / np.float32(255)
    zero = np.rint(-low / step)
    return (np.clip(np.rint(x.astype("float32") / step) + zero, 0, 255).astype("float64") - zero) * step


def _wanted(
    constants: dict[str, np.ndarray], feeds: dict[str, np.ndarray], backwards: tuple[bool, ...]
) -> list[np.ndarray]:
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    every = np.zeros((STEPS, len(backwards), BATCH, HIDDEN))
    last = np.zeros((2, len(backwards), BATCH, HIDDEN))
    for way, back in enumerate(backwards):
        weights = {name: (constants[name][way].astype("float64") - constants[f"{name}z"][way])
                   * constants[f"{name}s"][way] for name in "wr"}
        gates = _rounded(feeds["x"]) @ weights["w"] + constants["b"][way].reshape(2, -1).sum(0)
        state, cell = (feeds[name][way].astype("float64") if name in feeds else np.zeros((BATCH, HIDDEN))
                       for name in "hc")
        peeps = constants["p"][way].reshape(3, HIDDEN) if "p" in constants else np.zeros((3, HIDDEN))
        for t in reversed(range(STEPS)) if back else range(STEPS):
            inner = _rounded(state) @ weights["r"] if state.any() else 0
            into, out, forget, candidate = np.split(gates[t] + inner, 4, axis=-1)
            cell = sigmoid(forget + peeps[2] * cell) * cell + sigmoid(into + peeps[0] * cell) * np.tanh(candidate)
            state = sigmoid(out + peeps[1] * cell) * np.tanh(cell)
            every[t, way] = state
        last[:, way] = state, cell
    return [every, *last]


def _onnxruntime_numbers(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """On one thread, which quantises a batch's states as a whole."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize("columns", [False, True], ids=["tensor", "columns"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("direction", "backwards", "extras"), [
    ("forward", (False,), ""), ("reverse", (True,), "hc"), ("bidirectional", (False, True), "hcp"),
])
def test_layers(direction: str, backwards: tuple[bool, ...], extras: str, dtype: str, columns: bool) -> None:
    """Far nearer to onnxruntime than a state that is not quantised would come: a step of it is 1/127."""
    rng, constants = np.random.default_rng(1), _constants(len(backwards), dtype, columns)
    feeds = {"x": rng.standard_normal((STEPS, BATCH, FEATURES)).astype("float32")}
    feeds |= {name: rng.uniform(-0.9, 0.9, (len(backwards), BATCH, HIDDEN)).astype("float32") for name in extras[:2]}
    if "p" in extras:
        constants["p"] = rng.standard_normal((len(backwards), 3 * HIDDEN)).astype("float32")
    model = _model(constants, feeds, direction=direction)
    references = [_wanted(constants, feeds, backwards)]
    if dtype == "uint8" or not {"avx512_vnni", "avx_vnni"}.isdisjoint(host_flags() or ()):  # else its products saturate
        references.append(_onnxruntime_numbers(model, feeds))
    found = imported_numbers(model, feeds)
    for reference in references:
        for ours, theirs in zip(found, reference, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
            assert ours.std() > 0.1


def test_what_goes_into_gates_may_be_clipped() -> None:
    constants = _constants(2, "uint8", False)
    feeds = {"x": np.random.default_rng(3).standard_normal((STEPS, BATCH, FEATURES)).astype("float32")}
    model = _model(constants, feeds, direction="bidirectional", clip=0.2)
    for ours, theirs, free in zip(imported_numbers(model, feeds), _onnxruntime_numbers(model, feeds),
                                  _wanted(constants, feeds, (False, True)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        assert np.abs(ours - free).max() > 0.1


def test_what_the_quantiser_writes(tmp_path: Path) -> None:
    """Of an LSTM in float32, near to what that gives."""
    rng = np.random.default_rng(4)
    feeds = {"x": rng.standard_normal((STEPS, BATCH, FEATURES)).astype("float32")}
    weights = {name: rng.standard_normal(shape).astype("float32") for name, shape in (
        ("w", (1, 4 * HIDDEN, FEATURES)), ("r", (1, 4 * HIDDEN, HIDDEN)), ("b", (1, 8 * HIDDEN)))}
    node = helper.make_node("LSTM", ["x", *weights], ["y"], hidden_size=HIDDEN)
    model = model_of([node], feeds, weights, {"y": ("float32", 4)}, opset=17)
    onnx.save(model, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "q.onnx", ["LSTM"])
    quantised = onnx.load(tmp_path / "q.onnx")
    (written,) = quantised.graph.node
    assert written.op_type == "DynamicQuantizeLSTM"
    arrays = {each.name: numpy_helper.to_array(each) for each in quantised.graph.initializer}
    constants = {name: arrays[given] for name, given in zip(_INPUTS, written.input, strict=True) if given in arrays}
    (found,) = imported_numbers(quantised, feeds)
    np.testing.assert_allclose(found, _wanted(constants, feeds, (False,))[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, _onnxruntime_numbers(model, feeds)[0], rtol=0, atol=0.1)


def test_a_compiled_layer() -> None:
    constants = _constants(1, "int8", True)
    feeds = {"x": np.random.default_rng(2).standard_normal((STEPS, BATCH, FEATURES)).astype("float32")}
    found = mlc.compile(_model(constants, feeds), log=False)(feeds["x"])
    for ours, wanted in zip(found, _wanted(constants, feeds, (False,)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("changed", "message"), [
    ({"direction": "up"}, "direction must be one of forward, reverse, bidirectional, got up; write"),
    ({"activations": ["Sigmoid", "Relu", "Tanh"]}, "activations must be Sigmoid, Tanh, Tanh, got Sigmoid, Relu, Tanh"),
    ({"input_forget": 1}, "input_forget must be 0; quantise a layer without it"),
    ({"lens": np.array([5, 4, 5], "int32")}, "sequence_lens must all be the number of steps, 5; leave it out"),
    ({"ws": np.ones(3, "float32")}, r"W_scale must be of \[1\] or \[1, 24\], got \[3\]; quantise the layer again"),
    ({"rs": np.zeros(1, "float32")}, "R_scale must be finite and positive, got 0; quantise the layer again"),
    ({"rz": np.zeros(1, "uint8")}, "R_zero_point must be of the type of R, int8, got uint8; quantise the layer again"),
    ({"w": np.zeros((1, 7, 20), "int8")}, r"W must be int8 or uint8 of 1 directions and 4 gates of 6, got int8 of .*"),
])
def test_layers_that_are_refused(changed: dict[str, Any], message: str) -> None:
    arrays = {name: value for name, value in changed.items() if isinstance(value, np.ndarray)}
    attributes = {name: value for name, value in changed.items() if name not in arrays}
    feeds = {"x": np.zeros((STEPS, BATCH, FEATURES), "float32")}
    with pytest.raises(ModelError, match=message) as caught:
        load_model(_model(_constants(1, "int8", False) | arrays, feeds, **attributes))
    assert "\n" not in str(caught.value) and "layer" in str(caught.value)
