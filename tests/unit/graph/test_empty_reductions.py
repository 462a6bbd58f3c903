"""Reductions and products over no elements."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc

REDUCTIONS = ["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceLogSumExp"]


def emptied(elements: int) -> onnx.ModelProto:
    """Every reduction over the second axis of a (2, 3) tensor of which a pad of less than nothing keeps no column, and
    the product of what is left with weights of no rows."""
    constants = {"pads": np.array([0, -3, 0, 0], "int64"), "axis": np.array([1], "int64"),
                 "weights": np.ones((0, 4), helper.tensor_dtype_to_np_dtype(elements))}
    names = REDUCTIONS if elements == TensorProto.FLOAT else REDUCTIONS[:4]
    nodes = [helper.make_node("Pad", ["x", "pads"], ["none"]),
             helper.make_node("MatMul", ["none", "weights"], ["MatMul"])]
    nodes += [helper.make_node(name, ["none", "axis"], [name], keepdims=0) for name in names]
    outputs = [helper.make_tensor_value_info("MatMul", elements, (2, 4))]
    outputs += [helper.make_tensor_value_info(name, elements, (2,)) for name in names]
    graph = helper.make_graph(nodes, "emptied", [helper.make_tensor_value_info("x", elements, (2, 3))], outputs,
                              [numpy_helper.from_array(array, name) for name, array in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("elements", [TensorProto.FLOAT, TensorProto.INT32])
def test_of_nothing_comes_the_neutral_element(elements: int) -> None:
    model = emptied(elements)
    x = (9 * np.random.default_rng(0).standard_normal((2, 3))).astype(helper.tensor_dtype_to_np_dtype(elements))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in model.graph.output]
    for name, found, wanted in zip(names, mlc.compile(model, log=False)(x), session.run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(found, wanted, err_msg=name)
