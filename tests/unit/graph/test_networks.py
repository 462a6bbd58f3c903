"""Whole blocks of well-known networks, from ONNX to fused kernels, against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from relax_evaluation import evaluate, operators

from mlc.frontend import load_model
from mlc.graph.pipeline import optimise
from mlc.graph.tasks import extract_tasks
from mlc.networks.inputs import random_inputs
from mlc.networks.models import model_named
from mlc.target import resolve

CPU = resolve("native")


class _Net:
    """Builds an ONNX graph, one node a call; every call gives the name of its result."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng(5)
        self.shape, self.nodes, self.weights = shape, [], []

    def add(self, kind: str, *inputs: str, **attrs: object) -> str:
        out = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], **attrs))
        return out

    def weight(self, *shape: int, low: float = -0.5, high: float = 0.5) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(self.rng.uniform(low, high, shape).astype("float32"), name))
        return name

    def ints(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, "int64"), name))
        return name

    def conv(self, x: str, inputs: int, outputs: int, kernel: int, group: int = 1, stride: int = 1) -> str:
        w, b = self.weight(outputs, inputs // group, kernel, kernel), self.weight(outputs)
        return self.add("Conv", x, w, b, pads=[kernel // 2] * 4, group=group, strides=[stride, stride])

    def norm(self, x: str, channels: int) -> str:
        parameters = [self.weight(channels) for _ in range(3)]
        return self.add("BatchNormalization", x, *parameters, self.weight(channels, low=0.5, high=1.5))

    def model(self, result: str) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)
        y = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "net", [x], [y], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def _residual() -> tuple[onnx.ModelProto, int]:
    n = _Net((1, 16, 8, 8))
    a = n.add("Relu", n.norm(n.conv("x", 16, 16, 3), 16))
    b = n.norm(n.conv(a, 16, 32, 3, stride=2), 32)
    s = n.norm(n.conv("x", 16, 32, 1, stride=2), 32)
    c = n.add("Relu", n.add("Sum", b, s))
    d = n.add("Reshape", n.add("GlobalAveragePool", c), n.ints(1, 32))
    return n.model(n.add("Softmax", n.add("Gemm", d, n.weight(10, 32), n.weight(10), transB=1))), 7


def _dense_block() -> tuple[onnx.ModelProto, int]:
    n, x = _Net((1, 16, 6, 6)), "x"
    for channels in (16, 32, 48):
        y = n.conv(n.add("Relu", n.norm(x, channels)), channels, 16, 3)
        x = n.add("Concat", x, y, axis=1)
    return n.model(n.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])), 8


def _shuffle_unit() -> tuple[onnx.ModelProto, int]:
    n = _Net((1, 24, 6, 6))
    a = n.add("Relu", n.norm(n.conv("x", 24, 24, 1, group=3), 24))
    b = n.add("Transpose", n.add("Reshape", a, n.ints(1, 3, 8, 6, 6)), perm=[0, 2, 1, 3, 4])
    c = n.norm(n.conv(n.add("Reshape", b, n.ints(1, 24, 6, 6)), 24, 24, 3, group=24), 24)
    d = n.norm(n.conv(c, 24, 24, 1, group=3), 24)
    return n.model(n.add("Relu", n.add("Add", "x", d))), 5


def _inception() -> tuple[onnx.ModelProto, int]:
    n = _Net((1, 16, 8, 8))
    x = n.add("LRN", n.add("Relu", n.conv("x", 16, 32, 3)), size=5, alpha=1e-2, beta=0.75, bias=1.0)
    x = n.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    one = n.add("Relu", n.conv(x, 32, 16, 1))
    three = n.add("Relu", n.conv(n.add("Relu", n.conv(x, 32, 16, 1)), 16, 32, 3))
    pool = n.add("MaxPool", x, kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    joined = n.add("Concat", one, three, n.add("Relu", n.conv(pool, 32, 16, 1)), axis=1)
    return n.model(n.add("Dropout", joined)), 10


def _squeeze_excite() -> tuple[onnx.ModelProto, int]:
    n = _Net((1, 16, 7, 7))
    a = n.norm(n.conv("x", 16, 32, 3), 32)
    b = n.add("Mul", a, n.add("Sigmoid", a))
    c = n.add("Sigmoid", n.conv(n.add("Relu", n.conv(n.add("GlobalAveragePool", b), 32, 8, 1)), 8, 32, 1))
    return n.model(n.norm(n.add("Mul", b, c), 32)), 6


def _compare(model: onnx.ModelProto, tolerance: float) -> int:
    imported = load_model(model)
    mod = optimise(imported.mod, CPU)
    assert set(operators(mod)) <= {"call_tir", "concat", "reshape", "strided_slice"}  # all but kernels are views
    inputs = random_inputs(imported.inputs)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run([o.name for o in imported.outputs], inputs)
    results = evaluate(mod, *(inputs[i.name] for i in imported.inputs))
    for result, reference in zip(results, expected, strict=True):
        assert reference.std() > 0
        scale = float(np.abs(reference).max())
        np.testing.assert_allclose(result, reference, rtol=tolerance, atol=tolerance * scale)
    return sum(task.weight for task in extract_tasks(mod, CPU))


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize("build", [_residual, _dense_block, _shuffle_unit, _inception, _squeeze_excite])
def test_blocks(build: Callable[[], tuple[onnx.ModelProto, int]]) -> None:
    model, kernels = build()
    # where vectors are short Winograd's algorithm pays sooner, and what comes before it stays a kernel of its own
    assert _compare(model, 1e-4) in (kernels, kernels + 1)


#: where vectors are short, one conversion of layouts less pays in SqueezeNet
@pytest.mark.parametrize(("name", "kernels"), [("squeezenet", (32, 33)), ("bert_tiny", (20,)),
                                               pytest.param("gpt2_tiny", (16,), marks=pytest.mark.slow)])
def test_networks(name: str, kernels: tuple[int, ...]) -> None:
    assert _compare(model_named(name), 1e-4) in kernels
