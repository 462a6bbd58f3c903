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


@pytest.mark.parametrize("scale", [1.7, 1.2, 0.3])
def test_places_are_rounded_as_in_float32(scale: float) -> None:
    """17 / 1.7 is 10 there; in float64, where 1.7 of float32 is a little more than 1.7, row 9 would be taken."""
    model = scaled((1, 1, 41, 3), (1, 1, scale, 1), mode="nearest", nearest_mode="floor",
                   coordinate_transformation_mode="asymmetric")
    x = RNG.standard_normal((1, 1, 41, 3), dtype="float32")
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(mlc.compile(model)(x)[0], expected)


def test_axes() -> None:
    model = scaled((1, 3, 7, 5), (2.0, 3.0), mode="linear", axes=[2, 3])
    assert [op_name(b.value) for b in bindings(load_model(model).mod["main"]) if isinstance(b.value, relax.Call)] == [
        "relax.image.resize2d"
    ]
    x = RNG.standard_normal((1, 3, 7, 5), dtype="float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("attrs", [
    {"mode": "linear", "antialias": 1}, {"mode": "cubic", "antialias": 1}, {"mode": "cubic"},
    {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}, {"mode": "linear", "exclude_outside": 1},
], ids=str)
@pytest.mark.parametrize("scales", [(1, 1, 0.6, 0.45), (1, 1, 1.5, 0.5), (1, 1, 2.0, 1.7)], ids=str)
def test_wider_kernels(attrs: dict[str, object], scales: tuple[float, ...]) -> None:
    model = scaled((1, 3, 9, 11), scales, **attrs)
    x = RNG.standard_normal((1, 3, 9, 11), dtype="float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model, log=False)(x)[0], expected, rtol=1e-4, atol=1e-5)


def sized(sizes: tuple[int, ...], region: tuple[float, ...] = (), **attrs: object) -> onnx.ModelProto:
    """``Resize`` of (1, 3, 8, 6) to ``sizes`` of the axes 2 and 3."""
    constants = [numpy_helper.from_array(np.array(sizes, "int64"), "sizes")]
    if region:
        constants.append(numpy_helper.from_array(np.array(region, "float32"), "roi"))
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "roi" if region else "", "", "sizes"], ["y"], axes=[2, 3], **attrs)],
        "resize", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 8, 6))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 3, "h", "w"))], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize("model", [
    sized((12, 3), mode="linear", keep_aspect_ratio_policy="not_larger"),
    sized((12, 7), mode="nearest", keep_aspect_ratio_policy="not_smaller"),
    sized((5, 4), (0.2, 0.1, 0.7, 1.3), mode="linear", coordinate_transformation_mode="tf_crop_and_resize",
          extrapolation_value=10.0),
    sized((5, 1), (0.2, 0.1, 0.7, 0.8), mode="cubic", coordinate_transformation_mode="tf_crop_and_resize"),
], ids=["not_larger", "not_smaller", "cropped", "cropped to one"])
def test_sizes_that_are_bounds_and_regions(model: onnx.ModelProto) -> None:
    x = RNG.standard_normal((1, 3, 8, 6), dtype="float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    (got,) = mlc.compile(model, log=False)(x)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_region_must_be_given() -> None:
    with pytest.raises(ModelError, match="region of interest must be a constant"):
        load_model(sized((5, 4), mode="linear", coordinate_transformation_mode="tf_crop_and_resize"))
