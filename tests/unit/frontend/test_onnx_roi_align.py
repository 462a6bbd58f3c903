"""Regions of images that are cut into bins, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model

IMAGES, CHANNELS, HEIGHT, WIDTH, REGIONS = 2, 3, 9, 13, 7


def regions(opset: int = 16, free: bool = False, kind: int = TensorProto.FLOAT, **attrs: Any) -> onnx.ModelProto:
    sizes: list[Any] = ["n", "h", "w", "r"] if free else [IMAGES, HEIGHT, WIDTH, REGIONS]
    n, h, w, r = sizes
    graph = helper.make_graph(
        [helper.make_node("RoiAlign", ["x", "rois", "images"], ["y"], **attrs)], "regions",
        [helper.make_tensor_value_info("x", kind, [n, CHANNELS, h, w]),
         helper.make_tensor_value_info("rois", kind, [r, 4]),
         helper.make_tensor_value_info("images", TensorProto.INT64, [r])],
        [helper.make_tensor_value_info("y", kind, [None] * 4)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def inputs(scale: float) -> dict[str, np.ndarray]:
    """Regions inside the images, across their edges and beyond them."""
    rng = np.random.default_rng(3)
    ends = np.sort(rng.uniform(-3, 16, (REGIONS, 2, 2)), axis=1) / scale
    return {"x": rng.standard_normal((IMAGES, CHANNELS, HEIGHT, WIDTH), dtype="float32"),
            "rois": ends.reshape(REGIONS, 4).astype("float32"), "images": rng.integers(0, IMAGES, REGIONS)}


def check(model: onnx.ModelProto, scale: float = 1.0) -> None:
    given, quiet = inputs(scale), onnxruntime.SessionOptions()
    quiet.log_severity_level = 4
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), quiet).run(None, given)
    (got,) = mlc.compile(model, log=False)(**given)
    assert got.shape == expected.shape and expected.std() > 0
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize(("opset", "attrs"), [
    (10, {"sampling_ratio": 2, "spatial_scale": 0.5}),
    (16, {"sampling_ratio": 3, "spatial_scale": 0.25}),
    (16, {"coordinate_transformation_mode": "output_half_pixel", "sampling_ratio": 1}),
], ids=str)
def test_samples_of_a_bin(opset: int, attrs: dict[str, Any], mode: str) -> None:
    """A half pixel is one of the image that is sampled: it is not scaled with the region."""
    model = regions(opset, mode=mode, output_height=3, output_width=2, **attrs)
    check(model, attrs.get("spatial_scale", 1.0))


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_as_many_samples_as_a_bin_has_pixels(mode: str, free: bool) -> None:
    check(regions(free=free, mode=mode, output_height=2, output_width=3, spatial_scale=0.5), 0.5)


def test_images_that_there_are_not_are_the_last() -> None:
    exe, given = mlc.compile(regions(output_height=2), log=False), inputs(1.0)
    (expected,) = exe(**{**given, "images": np.full(REGIONS, IMAGES - 1)})
    np.testing.assert_array_equal(exe(**{**given, "images": np.full(REGIONS, IMAGES + 9)})[0], expected)


def test_sums_of_halves_are_in_float32() -> None:
    given = inputs(1.0)
    exe = mlc.compile(regions(kind=TensorProto.FLOAT16, output_height=2), log=False)
    narrow = {name: array.astype("float16") if array.dtype.kind == "f" else array for name, array in given.items()}
    wide = {name: array.astype("float32") if array.dtype.kind == "f" else array for name, array in narrow.items()}
    (expected,) = mlc.compile(regions(output_height=2), log=False)(**wide)
    np.testing.assert_array_equal(exe(**narrow)[0], expected.astype("float16"))


def test_a_mode_that_there_is_not() -> None:
    with pytest.raises(ModelError, match="mode must be avg or max"):
        load_model(regions(mode="sum"))
