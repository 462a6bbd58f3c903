"""Convolutional networks with a free batch: Winograd's kernels are taken, and every batch is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc


def _network(operators: Sequence[str], channels: int = 32, size: int = 20) -> onnx.ModelProto:
    """3x3 convolutions at stride 1, each ``dilated`` or not, and followed by operators: ``bias``, ``relu``, ``add`` (of
    its input)."""
    rng, nodes, weights, last = np.random.default_rng(0), [], [], "x"

    def constant(*shape: int) -> str:
        values = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{len(weights)}"))
        return weights[-1].name

    def add(operator: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(operator, list(inputs), [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    for word in operators:
        parts = word.split("+")
        given = (last, constant(channels, channels, 3, 3), *([constant(channels)] if "bias" in parts else []))
        dilation = 2 if "dilated" in parts else 1
        made = add("Conv", *given, pads=[dilation] * 4, dilations=[dilation] * 2)
        made = add("Add", made, last) if "add" in parts else made
        last = add("Relu", made) if "relu" in parts else made
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", channels, size, size]) for n in "xy")
    graph = helper.make_graph(nodes, "network", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("operators", [[""], ["bias+relu", "bias+add+relu"], ["dilated+bias+add"]],
                         ids=["bare", "block", "dilated"])
def test_winograd_is_right_at_every_batch(operators: list[str]) -> None:
    proto = _network(operators)
    exe = mlc.compile(proto, log=False, shapes={"x": "1..9,32,20,20"})
    assert "cpu.conv2d_winograd" in {entry["space"] for entry in exe.metadata["functions"]}
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for batch in range(1, 10):
        x = np.random.default_rng(batch).standard_normal((batch, 32, 20, 20)).astype(np.float32)
        (expected,), (found,) = reference.run(None, {"x": x}), exe(x)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4, err_msg=str(batch))


@pytest.mark.parametrize("size", [pytest.param(28, marks=pytest.mark.slow), 56])
@pytest.mark.filterwarnings("error")  # TVM finds extents beyond 32 bits where it knows no range of the batch
def test_first_schedule_of_winograd_compiles(size: int) -> None:
    proto = _network(["bias+relu"], 64, size)
    exe = mlc.compile(proto, log=False, shapes={"x": f"1..8,64,{size},{size}"})
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for batch in (1, 3, 8):
        x = np.random.default_rng(batch).standard_normal((batch, 64, size, size)).astype(np.float32)
        np.testing.assert_allclose(exe(x)[0], reference.run(None, {"x": x})[0], rtol=1e-3, atol=1e-4)


def test_images_of_free_size_are_convolved_directly() -> None:
    proto = _network(["bias+relu"])
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[3].dim_param = "width"
    exe = mlc.compile(proto, log=False, shapes={"x": "1..2,32,20,16..24"})
    assert "cpu.conv2d_winograd" not in {entry["space"] for entry in exe.metadata["functions"]}
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for batch, width in ((1, 16), (2, 24), (1, 19)):
        x = np.random.default_rng(width).standard_normal((batch, 32, 20, width)).astype(np.float32)
        np.testing.assert_allclose(exe(x)[0], reference.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)
