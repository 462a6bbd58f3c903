"""Quantised models with free sizes: those of fixed ones, and right at each."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.compilation import Compilation

SIZES = ((1, 1), (2, 5), (3, 33), (4, 1))
RNG = np.random.default_rng(3)
WEIGHT = RNG.integers(-127, 128, (64, 48), dtype=np.int8)


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """From ``x`` of ``(batch, length, 64)`` to ``y`` of ``(batch, length, 48)``."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "length", size])
            for name, size in (("x", 64), ("y", 48))]
    graph = helper.make_graph(nodes, "quantised", ends[:1], ends[1:],
                              [numpy_helper.from_array(array, name) for name, array in constants.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def qdq() -> onnx.ModelProto:
    """A product between conversions."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "sx", "zx"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["v"], axis=1),
        helper.make_node("MatMul", ["d", "v"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "sm", "zm"], ["n"]),
        helper.make_node("DequantizeLinear", ["n", "sm", "zm"], ["y"]),
    ]
    constants = {"sx": np.float32(0.03), "zx": np.uint8(120), "w": WEIGHT, "zm": np.int8(3), "sm": np.float32(0.2),
                 "sw": RNG.random(48, dtype=np.float32) * 0.01 + 0.01, "zw": np.zeros(48, "int8")}
    return model(nodes, {name: np.asarray(array) for name, array in constants.items()})


def dynamic() -> onnx.ModelProto:
    """Quantised by the range of what comes."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "sw"], ["t"]), helper.make_node("Mul", ["f", "t"], ["y"]),
    ]
    return model(nodes, {"w": WEIGHT, "sw": np.array(0.02, "float32")})


def weight_only() -> onnx.ModelProto:
    """Four bits, with a scale for 32 rows of each column."""
    node = helper.make_node("MatMulNBits", ["x", "p", "s"], ["y"], domain="com.microsoft", K=64, N=48, bits=4,
                            block_size=32)
    packed = RNG.integers(0, 256, (48, 2, 16), dtype=np.uint8)
    return model([node], {"p": packed, "s": RNG.random(96, dtype=np.float32) * 0.02 + 0.01})


MODELS = {"qdq": qdq, "dynamic": dynamic, "weight_only": weight_only}


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_one_build_is_right_at_every_size(name: str, integers: bool) -> None:
    proto = MODELS[name]()
    exe = mlc.compile(proto, log=False, integers=integers)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    step = 0.2 if name == "qdq" else 0.0  # a sum in another order may fall to the other side of a half
    for sizes in SIZES:
        x = np.random.default_rng(sizes[1]).standard_normal((*sizes, 64), dtype=np.float32)
        (found,), (wanted,) = exe(x=x), session.run(None, {"x": x})
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= step * 1.01 + 1e-4 * np.abs(wanted).max(), sizes
        assert np.mean(np.abs(found - wanted) > 1e-4 * np.abs(wanted).max()) < 0.01, sizes


@pytest.mark.parametrize("name", MODELS)
def test_gpus_have_a_schedule_for_each_function(name: str) -> None:
    from schedules import registry
    from schedules.space import first_seed

    compilation = Compilation.of(MODELS[name](), "cuda:sm_80", substitutions=False)
    target: Any = compilation.target.tvm
    for task in compilation.lowered().tasks:
        space = registry.find(task.func, target)
        first_seed(space, task.func, target)
        if "matmul" in task.name or "dense" in task.name:
            assert space.name != "cuda.fallback", task.name
