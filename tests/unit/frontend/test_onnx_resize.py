"""``Resize`` means what ONNX says for every scale, axis and coordinate transformation."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name

RNG = np.random.default_rng(5)


def scaled(
    shape: tuple[int, ...], scales: tuple[float, ...], opset: int = 18, **attrs: object
) -> onnx.ModelProto:
    """``Resize`` by ``scales``, of the axes in ``attrs`` if they are given."""
    names = ["x", "scales"] if opset == 10 else ["x", "", "scales"]
    factors = dict(zip(attrs.get("axes", range(len(shape))), scales, strict=True))
    out = [int(np.floor(extent * factors.get(i, 1))) for i, extent in enumerate(shape)]
    graph = helper.make_graph(
        [helper.make_node("Resize", names, ["y"], **attrs)], "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(np.array(scales, "float32"), "scales")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("mode", ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric"])
@pytest.mark.parametrize(("shape", "scales"), [
    ((1, 3, 7, 5), (1, 1, 1.5, 1.5)), ((1, 3, 7, 5), (1, 1, 0.6, 2)), ((1, 3, 7, 5), (1, 2, 2, 2)),
    ((1, 3, 7), (1, 1, 1.5)), ((1, 3, 5, 4, 6), (1, 1, 1.5, 2, 2)), ((1, 3, 8, 8), (1, 1, 0.75, 0.75)),
], ids=str)
def test_the_scale_is_the_one_that_is_given(
    shape: tuple[int, ...], scales: tuple[float, ...], mode: str, method: str
) -> None:
    model = scaled(shape, scales, mode=method, coordinate_transformation_mode=mode)
    x = RNG.standard_normal(shape, dtype="float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("opset", [10, 18])
def test_as_onnxruntime(method: str, opset: int) -> None:
    attrs = {} if opset == 10 else {"coordinate_transformation_mode": "align_corners"}
    model = scaled((1, 3, 7, 5), (1, 1, 1.5, 2.0), opset, mode=method, **attrs)
    x = RNG.standard_normal((1, 3, 7, 5), dtype="float32")
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-4, atol=2e-6)


def test_axes() -> None:
    model = scaled((1, 3, 7, 5), (2.0, 3.0), mode="linear", axes=[2, 3])
    assert [op_name(b.value) for b in bindings(load_model(model).mod["main"]) if isinstance(b.value, relax.Call)] == [
        "relax.image.resize2d"
    ]
    x = RNG.standard_normal((1, 3, 7, 5), dtype="float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("attrs", "scales", "message"), [
    ({"mode": "linear", "antialias": 1}, (1, 1, 0.5, 0.5), "antialias must be 0"),
    ({"mode": "cubic"}, (1, 1, 1.5, 1.5), "must be nearest or linear"),
])
def test_what_would_be_wrong_is_refused(attrs: dict[str, object], scales: tuple[float, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(scaled((1, 3, 7, 5), scales, **attrs))
