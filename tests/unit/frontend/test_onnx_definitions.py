"""Operators that are made of others in the ONNX graph, against onnx's reference and onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlc
from mlc.errors import ModelError

RNG = np.random.default_rng(7)


def model_of(
    operator: str, feeds: Mapping[str, np.ndarray], outputs: int = 1, constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 24, inputs: list[str] | None = None, **attributes: object,
) -> onnx.ModelProto:
    """One node; ``inputs`` where some are left out or come in another order."""
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(operator, inputs or [*feeds, *(constants or {})], names, **attributes)
    given = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
             for n, a in feeds.items()]
    graph = helper.make_graph([node], "node", given, [helper.make_empty_tensor_value_info(n) for n in names],
                              [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    if any(not value.type.tensor_type.elem_type for value in inferred.graph.output):  # inference says nothing of some
        results = ReferenceEvaluator(model).run(None, dict(feeds))
        for value, result in zip(model.graph.output, results, strict=True):
            kind = helper.np_dtype_to_tensor_dtype(result.dtype)
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, result.shape))
        return model
    return inferred


def check(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], tolerance: float = 1e-5) -> list[np.ndarray]:
    expected = ReferenceEvaluator(model).run(None, dict(feeds))
    got = mlc.compile(model, log=False, values={})(**feeds)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    return got


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype="float32")


# Attention


def heads(batch: int = 2, q: int = 4, kv: int = 2, length: int = 3, total: int = 5, size: int = 8) -> dict:
    return {"q": floats(batch, q, length, size), "k": floats(batch, kv, total, size),
            "v": floats(batch, kv, total, size + 4)}


@pytest.mark.parametrize("attributes", [
    {}, {"is_causal": 1}, {"softcap": 1.5, "scale": 0.3}, {"is_causal": 1, "softcap": 2.0},
], ids=str)
def test_attention_with_shared_heads(attributes: dict) -> None:
    feeds = heads()
    check(model_of("Attention", feeds, **attributes), feeds)


def test_attention_with_a_past() -> None:
    feeds = heads(length=3, total=3)
    feeds |= {"pk": floats(2, 2, 4, 8), "pv": floats(2, 2, 4, 12)}
    model = model_of("Attention", feeds, 3, inputs=["q", "k", "v", "", "pk", "pv"], is_causal=1)
    assert [out.shape for out in check(model, feeds)] == [(2, 4, 3, 12), (2, 2, 7, 8), (2, 2, 7, 12)]


def test_attention_gives_what_it_is_given_where_there_is_no_past() -> None:
    feeds = heads()
    _, key, value = check(model_of("Attention", feeds, 3), feeds)
    assert (key == feeds["k"]).all() and (value == feeds["v"]).all()


@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_rows_of_a_mask_that_forbid_everything_give_zeros(kind: str) -> None:
    feeds = heads()
    seen = RNG.random((2, 1, 3, 5)) < 0.6
    seen[0, 0, 1] = False
    feeds["mask"] = seen if kind == "bool" else np.where(seen, floats(2, 1, 3, 5), -np.inf).astype("float32")
    (y,) = check(model_of("Attention", feeds), feeds)
    assert (y[0, :, 1] == 0).all() and (y[1] != 0).any()


def test_a_constant_mask_is_one_constant() -> None:
    feeds, mask = heads(), np.tril(np.ones((3, 5), bool), -1)
    (y,) = check(model_of("Attention", feeds, constants={"mask": mask}), feeds)
    assert (y[:, :, 0] == 0).all()


def test_padded_keys_of_each_sequence() -> None:
    feeds = heads(length=3, total=6)
    feeds["n"] = np.array([6, 2], "int64")
    model = model_of("Attention", feeds, inputs=["q", "k", "v", "", "", "", "n"], is_causal=1)
    (y,) = check(model, feeds)
    assert (y[1, :, 0] == 0).all()  # two keys, three queries: the first sees none


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_attention_gives_its_scores(mode: int) -> None:
    feeds = heads()
    feeds["mask"] = RNG.random((3, 5)) < 0.7
    capped = {"softcap": 1.0} if mode else {}  # the reference caps what it gives of the product itself
    model = model_of("Attention", feeds, 4, qk_matmul_output_mode=mode, **capped)
    expected = ReferenceEvaluator(model).run(None, feeds)
    got = mlc.compile(model, log=False, values={})(**feeds)
    np.testing.assert_allclose(got[3], expected[3], rtol=1e-5, atol=1e-5)


def test_attention_with_heads_within_the_last_axis() -> None:
    feeds = {"q": floats(2, 3, 4 * 8), "k": floats(2, 5, 2 * 8), "v": floats(2, 5, 2 * 8)}
    check(model_of("Attention", feeds, q_num_heads=4, kv_num_heads=2), feeds)


# Others


@pytest.mark.parametrize("p", [1, 2])
def test_norms(p: int) -> None:
    x = np.abs(floats(3, 4, 5))
    x[1, :, 2] = 0
    check(model_of("LpNormalization", {"x": x}, opset=22, axis=1, p=p), {"x": x})


@pytest.mark.parametrize(("batch", "time"), [(0, 1), (1, 0)])
def test_sequences_are_reversed(batch: int, time: int) -> None:
    feeds = {"x": floats(4, 4, 3), "n": np.array([1, 4, 2, 3], "int64")}
    check(model_of("ReverseSequence", feeds, opset=10, batch_axis=batch, time_axis=time), feeds)


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_a_cache_is_written(mode: str) -> None:
    feeds = {"past": floats(3, 2, 6, 4), "new": floats(3, 2, 2, 4),
             "at": np.array([0, 4, 5 if mode == "circular" else 3], "int64")}
    check(model_of("TensorScatter", feeds, mode=mode), feeds)


def test_batch_norm_in_training() -> None:
    feeds = {"x": floats(4, 3, 5, 2), "s": floats(3), "b": floats(3), "m": floats(3), "v": np.abs(floats(3))}
    check(model_of("BatchNormalization", feeds, 3, opset=15, training_mode=1, momentum=0.7), feeds)


def test_a_dropout_that_drops_nothing_has_a_mask() -> None:
    feeds = {"x": floats(3, 4)}
    y, mask = mlc.compile(model_of("Dropout", feeds, 2, opset=13), log=False)(**feeds)
    assert (y == feeds["x"]).all() and mask.all()


def test_random_results_are_refused() -> None:
    constants = {"ratio": np.array(0.5, "float32"), "training": np.array(True)}
    with pytest.raises(ModelError, match="random in training"):
        mlc.compile(model_of("Dropout", {"x": floats(3, 4)}, 2, constants, opset=13), values={})


def test_an_output_shape_says_the_padding() -> None:
    for wanted, upper in (([10, 8], False), ([9, 7], True), ([12, 10], False)):
        feeds = {"x": floats(1, 2, 4, 3), "w": floats(2, 3, 3, 3)}
        given = {"auto_pad": "SAME_UPPER"} if upper else {}
        model = model_of("ConvTranspose", feeds, opset=11, strides=[3, 3], output_shape=wanted, **given)
        (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
        (got,) = mlc.compile(model, log=False, values={})(**feeds)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attributes", [
    {"kernel_shape": [2, 2]}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 2], "strides": [2, 1], "dilations": [2, 1], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [2, 2], "strides": [2, 2], "storage_order": 1},
    {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [2, 1, 2, 1], "ceil_mode": 1},
], ids=str)
def test_where_the_maximum_lies(attributes: dict) -> None:
    feeds = {"x": floats(2, 3, 9, 8)}
    model = model_of("MaxPool", feeds, 2, opset=12, **attributes)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for ours, theirs in zip(mlc.compile(model, log=False)(**feeds), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("attributes", [
    {"pads": [1, 1, 1, 1]}, {"strides": [2, 2], "dilations": [2, 1], "pads": [2, 1, 2, 1]}, {"offset_group": 2},
], ids=str)
def test_deformable_convolution(attributes: dict) -> None:
    x, w = floats(2, 2, 6, 5), floats(3, 2, 3, 3)  # the reference goes through it number by number
    plain = onnx.shape_inference.infer_shapes(model_of("Conv", {"x": x, "w": w}, **{
        k: v for k, v in attributes.items() if k != "offset_group"}))
    size = [d.dim_value for d in plain.graph.output[0].type.tensor_type.shape.dim][2:]
    taps = 9 * attributes.get("offset_group", 1)
    feeds = {"x": x, "w": w, "offset": 1.5 * floats(2, 2 * taps, *size), "b": floats(3),
             "mask": RNG.random((2, taps, *size), dtype="float32")}
    check(model_of("DeformConv", feeds, opset=22, kernel_shape=[3, 3], **attributes), feeds, 1e-4)


def test_cumulative_products() -> None:
    feeds, axis = {"x": floats(3, 4, 5)}, {"axis": np.array(1)}
    for given in ({}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}):
        check(model_of("CumProd", feeds, constants=axis, opset=26, **given), feeds)
