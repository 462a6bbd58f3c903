"""Convolutions and pooling of volumes become those of images, and give what onnxruntime gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from relax_evaluation import assert_unchanged, evaluate, network, operators, weight
from tvm import relax
from tvm.relax import op

from mlc.frontend import load_model
from mlc.graph.pipeline import optimise, simplified
from mlc.graph.simplify import SliceVolumes
from mlc.target import resolve

_RNG = np.random.default_rng(3)
_CPU = resolve("native")


class _Net:
    """Builds an ONNX graph of one input, one node a call; every call gives the name of its result."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.nodes, self.weights = shape, [], []

    def add(self, kind: str, *inputs: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [f"v{len(self.nodes)}"], **attrs))
        return f"v{len(self.nodes) - 1}"

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(_RNG.uniform(-0.5, 0.5, shape).astype("float32"), name))
        return name

    def conv(self, x: str, *shape: int, **attrs: Any) -> str:
        return self.add("Conv", x, self.weight(*shape), self.weight(shape[0]), **attrs)

    def model(self, result: str) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)
        y = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "net", [x], [y], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def _check(net: _Net, result: str, *, lowered: bool = False) -> list[str]:
    """The operators after simplification; what they compute is compared with onnxruntime."""
    model = net.model(result)
    mod = load_model(model).mod
    mod = relax.transform.CanonicalizeBindings()(relax.transform.ConvertToDataflow()(mod))
    after = simplified(mod)
    x = _RNG.standard_normal(net.shape).astype("float32")
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    (found,) = evaluate(optimise(mod, _CPU) if lowered else after, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))
    return operators(after)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), {}),
    "padded": ((2, 3, 5, 6, 7), (4, 3, 3, 3, 3), {"pads": [1, 1, 1, 1, 1, 1]}),
    "padded unevenly": ((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), {"pads": [2, 0, 1, 0, 1, 2]}),
    "stride": ((1, 3, 9, 6, 7), (4, 3, 3, 3, 3), {"strides": [2, 2, 1], "pads": [1, 1, 1, 1, 1, 1]}),
    "stride, batch": ((3, 3, 9, 6, 7), (4, 3, 3, 3, 3), {"strides": [2, 2, 1], "pads": [1, 1, 1, 1, 1, 1]}),
    "dilation": ((2, 3, 9, 9, 7), (4, 3, 3, 3, 3), {"dilations": [3, 2, 1], "pads": [2, 1, 1, 3, 1, 1]}),
    "groups": ((2, 6, 5, 6, 7), (4, 3, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1, 1, 1]}),
    "depthwise": ((1, 6, 7, 6, 7), (6, 1, 3, 3, 3), {"group": 6, "strides": [2, 1, 1], "pads": [1, 1, 1, 1, 1, 1]}),
    "within images": ((2, 3, 5, 6, 7), (4, 3, 1, 3, 3), {"pads": [0, 1, 1, 0, 1, 1]}),
    "within images, stride": ((2, 3, 5, 6, 7), (4, 3, 1, 3, 3), {"strides": [2, 2, 2]}),
    "along the depth": ((2, 3, 5, 4, 4), (4, 3, 3, 1, 1), {"pads": [1, 0, 0, 1, 0, 0]}),
    "pixels": ((2, 3, 5, 4, 4), (4, 3, 1, 1, 1), {}),
    "depth one": ((2, 3, 1, 6, 7), (4, 3, 3, 3, 3), {"pads": [1, 1, 1, 1, 1, 1]}),
    "patches": ((1, 3, 7, 8, 8), (4, 3, 2, 4, 4), {"strides": [2, 4, 4]}),
    "patches, batch": ((2, 3, 6, 8, 8), (4, 3, 2, 4, 4), {"strides": [2, 4, 4]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    shape, kernel, attrs = CONVOLUTIONS[name]
    net = _Net(*shape)
    found = _check(net, net.conv("x", *kernel, **attrs))
    assert "nn.conv2d" in found
    assert "nn.conv3d" not in found


def test_taps_that_meet_nothing_but_padding_are_left_out() -> None:
    net = _Net(1, 3, 1, 6, 7)
    assert "concat" not in _check(net, net.conv("x", 4, 3, 3, 3, 3, pads=[1] * 6))


POOLING: dict[str, tuple[str, dict[str, Any]]] = {
    "maximum": ("MaxPool", {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}),
    "maximum, padded": ("MaxPool", {"kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "pads": [1, 1, 1, 0, 1, 1]}),
    "maximum of images": ("MaxPool", {"kernel_shape": [1, 3, 3], "strides": [1, 2, 2], "pads": [0, 1, 1, 0, 1, 1]}),
    "average": ("AveragePool", {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2]}),
    "average of what there is": ("AveragePool", {"kernel_shape": [3, 3, 3], "strides": [2, 1, 1], "pads": [1] * 6}),
    "average with padding": (
        "AveragePool", {"kernel_shape": [3, 3, 3], "pads": [1, 1, 1, 0, 1, 0], "count_include_pad": 1}
    ),
    "ceiling": ("MaxPool", {"kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "ceil_mode": 1}),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", POOLING)
def test_pooling(name: str, batch: int) -> None:
    kind, attrs = POOLING[name]
    net = _Net(batch, 3, 8, 6, 7)
    found = _check(net, net.add(kind, "x", **attrs))
    assert any(each.endswith("pool2d") for each in found)
    assert not any(each.endswith("3d") for each in found)


def _layers(net: _Net) -> str:
    """A stem, two branches that join, a transition and a head: what lies between stays a batch of images."""
    x = net.conv("x", 16, 3, 3, 3, 3, pads=[1] * 6, strides=[1, 2, 2])
    x = net.add("MaxPool", net.add("Relu", x), kernel_shape=[1, 2, 2], strides=[1, 2, 2])
    y = net.add("Relu", net.conv(x, 16, 16, 1, 3, 3, pads=[0, 1, 1, 0, 1, 1]))
    x = net.add("Add", x, net.conv(y, 16, 16, 3, 1, 1, pads=[1, 0, 0, 1, 0, 0]))
    x = net.conv(net.add("Relu", x), 20, 16, 3, 3, 3, strides=[2, 1, 1], pads=[1] * 6)
    return net.add("GlobalAveragePool", net.add("Relu", x))


def _separable(net: _Net) -> str:
    """A depthwise convolution between two of single pixels, with a residual, in channels that fill no block."""
    x = net.conv("x", 20, 3, 1, 3, 3, pads=[0, 1, 1, 0, 1, 1], strides=[1, 2, 2])
    y = net.conv(net.add("Relu", net.conv(x, 24, 20, 1, 1, 1)), 24, 1, 3, 3, 3, group=24, pads=[1] * 6)
    y = net.conv(net.add("Mul", y, net.add("Sigmoid", y)), 20, 24, 1, 1, 1)
    return net.add("GlobalAveragePool", net.add("Add", x, y))


def _pooled(net: _Net) -> str:
    """A padded maximum between convolutions: images of minus infinity lie before and after those of a block."""
    x = net.add("MaxPool", net.conv("x", 16, 3, 3, 3, 3, pads=[1] * 6), kernel_shape=[3] * 3, strides=[2] * 3,
                pads=[1] * 6)
    return net.add("GlobalAveragePool", net.conv(x, 16, 16, 1, 3, 3, pads=[0, 1, 1, 0, 1, 1]))


@pytest.mark.parametrize("body", [_layers, _separable, _pooled])
@pytest.mark.parametrize("batch", [1, 2])
def test_layers_in_blocked_layouts(batch: int, body: Callable[[_Net], str]) -> None:
    net = _Net(batch, 3, 6, 16, 16)
    assert _check(net, body(net), lowered=True).count("permute_dims") == 1  # that of the input


def test_transposed_convolutions_are_left_alone() -> None:
    mod = network((1, 4, 3, 5, 5), lambda bb, x: bb.emit(op.nn.conv3d_transpose(x, weight(4, 3, 2, 2, 2), strides=2)))
    assert_unchanged(SliceVolumes, mod["main"])
