"""Sums and maxima along a free dimension: nothing behind its end is counted, whatever divides the usual size."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc


def _model(operators: list[tuple[str, dict[str, int]]]) -> onnx.ModelProto:
    axes = numpy_helper.from_array(np.array([-1]), "axes")
    nodes = [helper.make_node(name, ["x", "axes"] if name == "ReduceSum" else ["x"], [f"y{i}"], **attributes)
             for i, (name, attributes) in enumerate(operators)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, "length"])
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, [None] * 2) for node in nodes]
    graph = helper.make_graph(nodes, "reductions", [x], outputs, [axes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("operators", [
    [("ReduceSum", {"keepdims": 1})], [("ReduceMax", {"axes": [-1]})], [("Softmax", {"axis": -1})],
    [("ReduceMean", {"axes": [0, 1]})],
], ids=lambda operators: operators[0][0])
def test_every_length_is_right(operators: list[tuple[str, dict[str, int]]]) -> None:
    proto = _model(operators)
    exe = mlc.compile(proto, log=False, shapes={"x": "3,1..300"})
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for length in (1, 2, 5, 8, 15, 16, 17, 31, 33, 64, 127, 299, 300):
        x = np.random.default_rng(length).standard_normal((3, length)).astype(np.float32) - 3
        for found, expected in zip(exe(x), reference.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=str(length))
