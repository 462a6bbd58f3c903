"""Images whose size a call decides, on GPUs: rows of channels from convolution to convolution."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from relax_evaluation import evaluate

from mlc.frontend import load_model
from mlc.graph.layout import channels_last
from mlc.graph.pipeline import Lowered, lower
from mlc.options import CompileOptions
from mlc.target import resolve
from schedules import registry
from schedules.free import SIZES
from schedules.space import InvalidDecision, first_seed

GPU = resolve("cuda:sm_80")
RNG = np.random.default_rng(5)
#: beside one another: an odd size, one of a single row, one of tiles
SIZES_OF_CALLS = ((7, 5), (1, 9), (16, 16))


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    scale = np.prod(shape[1:]) ** -0.5
    return numpy_helper.from_array(RNG.uniform(-scale, scale, shape).astype("float32"), name)


def _model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 16, "h", "w"))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, None, None, None))
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _conv(x: str, y: str, index: int, **attrs: object) -> list[onnx.NodeProto]:
    """With a bias and ReLU."""
    return [helper.make_node("Conv", [x, f"w{index}", f"b{index}"], [f"c{index}"], **attrs),
            helper.make_node("Relu", [f"c{index}"], [y])]


def residual() -> onnx.ModelProto:
    """Convolutions with a sum between them, each channel by itself and a maximum among images, a smaller image."""
    nodes = [
        *_conv("x", "s", 0, pads=[1] * 4), *_conv("s", "t", 1, pads=[2] * 4, dilations=[2, 2]),
        helper.make_node("Add", ["s", "t"], ["u"]),
        *_conv("u", "v", 2), *_conv("v", "d", 3, pads=[1] * 4, group=40),
        helper.make_node("MaxPool", ["d"], ["m"], kernel_shape=[3, 3], pads=[1] * 4),
        *_conv("m", "y", 4, pads=[1] * 4, strides=[2, 2]),
    ]
    shapes = [(24, 16, 3, 3), (24, 24, 3, 3), (40, 24, 1, 1), (40, 1, 3, 3), (32, 40, 3, 3)]
    weights = [w for i, shape in enumerate(shapes) for w in (_weight(f"w{i}", *shape), _weight(f"b{i}", shape[0]))]
    return _model(nodes, weights)


def stretched() -> onnx.ModelProto:
    """Transposed convolutions whose phases see two pixels of three, or one, the last without its last row and column.
    """
    nodes = [helper.make_node("ConvTranspose", ["x", "w0", "b0"], ["s"], strides=[2, 2], pads=[1] * 4),
             helper.make_node("LeakyRelu", ["s"], ["t"], alpha=0.2),
             helper.make_node("ConvTranspose", ["t", "w1", "b1"], ["y"], strides=[2, 2], pads=[0, 0, 1, 1])]
    return _model(nodes, [_weight("w0", 16, 24, 4, 4), _weight("b0", 24), _weight("w1", 24, 12, 2, 2),
                          _weight("b1", 12)])


MODELS = {"residual": residual, "stretched": stretched}


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which small images are worth a transpose too."""
    monkeypatch.setattr(channels_last, "_UNTILED", 1e6)


def lowered(model: onnx.ModelProto) -> Lowered:
    mod = load_model(model, shapes={"x": "2,16,1..64,1..64"}).mod
    return lower(mod, GPU, options=CompileOptions.of(precision="f16"))


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_models(name: str) -> None:
    """Of each size, as TVM computes the functions on a CPU."""
    model = MODELS[name]()
    after, session = lowered(model), onnxruntime.InferenceSession(model.SerializeToString())
    for size in SIZES_OF_CALLS:
        x = RNG.standard_normal((2, 16, *size)).astype("float32")
        (exact,), (found,) = session.run(None, {"x": x}), evaluate(after.module, x)
        assert found.shape == exact.shape
        assert np.abs(found - exact).max() <= 3e-3 * np.abs(exact).max()


def test_convolutions_are_products_of_rows() -> None:
    """On tensor cores, with all that is elementwise behind them; an image is a view of its rows."""
    after = lowered(residual())
    products = []
    for task in after.tasks:
        assert SIZES in task.func.attrs
        for space in registry.matching(task.func, GPU.tvm):
            with contextlib.suppress(InvalidDecision):
                first_seed(space, task.func, GPU.tvm)
                products += [task.name] * (space.name == "cuda.mma")
                break
    assert [name.count("relu") for name in products] == [1, 1, 1, 1]
    # to channels last and back, each channel by itself, and the maximum
    assert sum(task.weight for task in after.tasks) == len(products) + 2 + 2
