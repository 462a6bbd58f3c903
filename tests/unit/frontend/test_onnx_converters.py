"""Our own converters of ONNX operators, where TVM's hide what a node does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

import mlc
from mlc.frontend import load_model
from mlc.graph.rewrite import bindings, op_name


def clip(bounds: Mapping[str, float], opset: int) -> onnx.ModelProto:
    """``Clip`` with constant bounds: attributes before opset 11, inputs since."""
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])
    inputs, initializers, attributes = ["x"], [], {}
    if opset < 11:
        attributes = dict(bounds)
    else:
        inputs += [name if name in bounds else "" for name in ("min", "max")]
        initializers = [numpy_helper.from_array(np.float32(value), name) for name, value in bounds.items()]
    graph = helper.make_graph(
        [helper.make_node("Clip", inputs, ["y"], **attributes)], "clip", [image],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 4])], initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [6, 13])
@pytest.mark.parametrize("bounds", [{"min": 0.0, "max": 6.0}, {"min": -1.5}, {"max": 0.25}, {}], ids=str)
def test_clip_is_made_of_operators(bounds: Mapping[str, float], opset: int) -> None:
    model = clip(bounds, opset)
    values = [b.value for b in bindings(load_model(model).mod["main"])]
    names = [op_name(v) for v in values if isinstance(v, relax.Call)]
    assert names == [{"min": "relax.maximum", "max": "relax.minimum"}[name] for name in bounds]
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32") * 5
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(mlc.compile(model)(x)[0], expected)


def test_a_bound_that_is_no_number_does_not_bound() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype("float32")
    actual = mlc.compile(clip({"min": float("nan"), "max": 0.5}, 13))(x)[0]
    np.testing.assert_array_equal(actual, np.minimum(x, 0.5))


@pytest.mark.parametrize("attributes", [{}, {"exclusive": 1}, {"reverse": 1}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_cumulative_sums(dtype: str, attributes: Mapping[str, int]) -> None:
    """Position ids of RoBERTa are one."""
    x = (np.random.default_rng(2).standard_normal((3, 7, 5)) * 9).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node("CumSum", ["x", "axis"], ["y"], **attributes)], "scan",
        [helper.make_tensor_value_info("x", kind, x.shape)], [helper.make_tensor_value_info("y", kind, x.shape)],
        [numpy_helper.from_array(np.array(1), "axis")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-5, atol=1e-4)
