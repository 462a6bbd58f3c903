"""Resizing computes what ONNX says, in every layout, and needs no conversion between convolutions."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

import mlc
from mlc.frontend import load_model
from mlc.graph.ir.channels import BLOCK
from mlc.graph.ir.rewrite import bindings, op_name, shape_of
from mlc.graph.layout.blocked import BlockedLayouts
from mlc.target import resolve

MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDING = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
RNG = np.random.default_rng(3)


def resize(
    shape: tuple[int, int, int, int], size: tuple[int, int], *, convolved: bool = False, **attrs: object
) -> onnx.ModelProto:
    """``Resize`` to ``size``, alone or between two 1x1 convolutions."""
    channels, out = shape[1], (*shape[:2], *size)
    nodes = [helper.make_node("Resize", ["x", "", "", "size"], ["y"], **attrs)]
    initializers = [numpy_helper.from_array(np.array(out, "int64"), "size")]
    if convolved:
        weight = RNG.standard_normal((channels, channels, 1, 1), dtype="float32")
        initializers.append(numpy_helper.from_array(weight, "w"))
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["before"]),
            helper.make_node("Resize", ["before", "", "", "size"], ["after"], **attrs),
            helper.make_node("Conv", ["after", "w"], ["y"]),
        ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", out))]
    graph = helper.make_graph(nodes, "resize", ends[:1], ends[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def check(model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape, dtype="float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("mode", "size"), list(product(MODES, [(14, 10), (11, 3), (1, 9), (6, 8)])), ids=str)
def test_linear(mode: str, size: tuple[int, int]) -> None:
    check(resize((2, 3, 7, 5), size, mode="linear", coordinate_transformation_mode=mode), (2, 3, 7, 5))


@pytest.mark.parametrize(("mode", "rounding"), list(product(MODES, ROUNDING)))
def test_nearest(mode: str, rounding: str) -> None:
    attrs = {"mode": "nearest", "coordinate_transformation_mode": mode, "nearest_mode": rounding}
    for size in ((14, 10), (11, 3), (6, 8)):
        check(resize((1, 3, 7, 5), size, **attrs), (1, 3, 7, 5))


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize("channels", [BLOCK, 18, 32])
@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("mode", ["half_pixel", "align_corners"])
def test_between_convolutions(channels: int, method: str, mode: str) -> None:
    shape = (1, channels, 7, 5)
    check(resize(shape, (13, 10), convolved=True, mode=method, coordinate_transformation_mode=mode), shape)


@pytest.mark.usefixtures("always_blocked")
def test_stays_in_blocks() -> None:
    model = resize((1, 64, 28, 28), (56, 56), convolved=True, mode="linear")
    mod = BlockedLayouts(resolve("x86-64-v4", threads=2))(load_model(model).mod)
    values = [b.value for b in bindings(mod["main"]) if isinstance(b.value, relax.Call)]
    (resized,) = [v for v in values if op_name(v) == "relax.image.resize2d"]
    assert shape_of(resized) == (1, 4, 56, 56, BLOCK)
    moves = [v for v in values if op_name(v) == "relax.permute_dims"]
    assert len(moves) == 2  # of the input and of the output
