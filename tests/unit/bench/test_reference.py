"""The float64 reference agrees with onnxruntime as far as float32 goes, on operators of old and new versions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.performance.reference import float64_model, float64_outputs

RNG = np.random.default_rng(0)


def _model(opset: int, nodes: list, shape: list[int], **weights: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


NODE = helper.make_node
CASES = {
    "conv": (17, [NODE("Conv", ["x", "w", "b"], ["y"], group=2, strides=[2, 1], dilations=[1, 2], pads=[1, 2, 0, 1])],
             [2, 4, 11, 13], {"w": _normal(6, 2, 3, 3), "b": _normal(6)}),
    "conv same": (17, [NODE("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])], [1, 3, 12, 9],
                  {"w": _normal(5, 3, 3, 5)}),
    "conv of one": (17, [NODE("Conv", ["x", "w", "b"], ["y"], strides=[2], pads=[2, 1])], [2, 4, 13],
                    {"w": _normal(6, 4, 3), "b": _normal(6)}),
    "conv of three": (17, [NODE("Conv", ["x", "w"], ["y"], group=2, pads=[1, 0, 1, 0, 1, 1], strides=[1, 2, 1])],
                      [1, 4, 5, 7, 6], {"w": _normal(6, 2, 3, 2, 3)}),
    "maximum of three": (12, [NODE("MaxPool", ["x"], ["y"], kernel_shape=[1, 2, 3], strides=[1, 2, 2])],
                         [1, 3, 4, 6, 7], {}),
    "maximum": (8, [NODE("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])],
                [1, 3, 10, 12], {}),
    "mean": (8, [NODE("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])], [1, 3, 9, 9], {}),
    "mean with padding": (8, [NODE("AveragePool", ["x"], ["y"], kernel_shape=[3, 2], pads=[1, 1, 1, 0],
                                   count_include_pad=1)], [1, 3, 9, 9], {}),
    "batch normalisation": (8, [NODE("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], epsilon=1e-3)],
                            [2, 5, 4, 3], {"s": _normal(5), "b": _normal(5), "m": _normal(5), "v": _normal(5) ** 2}),
    "local response": (8, [NODE("LRN", ["x"], ["y"], size=5, alpha=0.3, beta=0.7, bias=1.5)], [2, 9, 4, 3], {}),
    "old softmax": (8, [NODE("Softmax", ["x"], ["y"])], [2, 4, 3, 2], {}),
    "softmax": (17, [NODE("Softmax", ["x"], ["y"])], [2, 4, 3, 2], {}),
    "layer normalisation": (17, [NODE("LayerNormalization", ["x", "s", "b"], ["y"], axis=-2)], [2, 4, 6],
                            {"s": _normal(4, 6), "b": _normal(4, 6)}),
}


@pytest.mark.parametrize("case", CASES)
def test_operators(case: str) -> None:
    import onnxruntime

    opset, nodes, shape, weights = CASES[case]
    model, x = _model(opset, nodes, shape, **weights), _normal(*shape)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (found,) = float64_outputs(model, {"x": x})
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_nothing_in_it_stays_in_float32() -> None:
    """A small difference of large numbers, which float32 would lose."""
    nodes = [
        NODE("Constant", [], ["c"], value=numpy_helper.from_array(np.float32([1.0]))),
        NODE("Add", ["x", "c"], ["a"]), NODE("Cast", ["a"], ["f"], to=TensorProto.FLOAT),
        NODE("Sub", ["f", "w"], ["y"]),
    ]
    model = _model(17, nodes, [1], w=np.float32([2.0**30]))
    (found,) = float64_outputs(model, {"x": np.float32([2.0**30])})
    assert found.tolist() == [1.0]
    types = {t.data_type for t in float64_model(model).graph.initializer}
    assert types == {TensorProto.DOUBLE} and model.graph.initializer[0].data_type == TensorProto.FLOAT
