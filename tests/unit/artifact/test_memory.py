"""Memory of a compiled model: views share it safely, and a call in steady state allocates none."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc

SEEDS = range(12)


class _Graph:
    """A random network of convolutions, pools, sums and concatenations; parts are used again and again."""

    def __init__(self, seed: int) -> None:
        self._rng, self._values = random.Random(seed), np.random.default_rng(seed)
        self.batch = self._rng.choice((1, 1, 1, 2))
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._channels = {"x": self._rng.choice((16, 32, 8))}

    def model(self) -> onnx.ModelProto:
        source = helper.make_tensor_value_info("x", TensorProto.FLOAT, [self.batch, self._channels["x"], 6, 6])
        makers = (self._conv, self._conv, self._relu, self._pool, self._add, self._concat, self._concat, self._concat)
        for _ in range(self._rng.randint(6, 14)):
            self._rng.choice(makers)()
        self._concat()
        names = list(self._channels)
        last = names[-1]
        outputs = [last, *self._rng.sample(names[1:-1], self._rng.randint(0, 2))]
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self._nodes, "random", [source], infos, self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)

    def _any(self) -> str:
        recent = list(self._channels)[-5:]  # nested concatenations need what was made just before
        return self._rng.choice(recent)

    def _node(self, kind: str, inputs: list[str], channels: int, **attrs: object) -> None:
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], **attrs))
        self._channels[name] = channels

    def _conv(self) -> None:
        source, out, size = self._any(), self._rng.choice((16, 16, 32, 8, 24)), self._rng.choice((1, 3))
        scale = (self._channels[source] * size * size) ** -0.5
        array = (self._values.standard_normal((out, self._channels[source], size, size)) * scale).astype("float32")
        weight = numpy_helper.from_array(array, f"w{len(self._weights)}")
        self._weights.append(weight)
        self._node("Conv", [source, weight.name], out, pads=[size // 2] * 4)

    def _relu(self) -> None:
        source = self._any()
        self._node("Relu", [source], self._channels[source])

    def _pool(self) -> None:
        source = self._any()
        self._node("MaxPool", [source], self._channels[source], kernel_shape=[3, 3], pads=[1] * 4)

    def _add(self) -> None:
        first = self._any()
        second = self._rng.choice([name for name, c in self._channels.items() if c == self._channels[first]])
        self._node("Add", [first, second], self._channels[first])

    def _concat(self) -> None:
        parts = [self._any() for _ in range(self._rng.randint(2, 4))]
        self._node("Concat", parts, sum(self._channels[p] for p in parts), axis=1)


def _runs(model: onnx.ModelProto, count: int) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.standard_normal(shape, dtype="float32")
        yield x, session.run(None, {"x": x})


@cache
def _compiled(seed: int) -> tuple[onnx.ModelProto, mlc.Executable]:
    model = _Graph(seed).model()
    return model, mlc.compile(model)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_networks_compute_what_onnxruntime_does(seed: int) -> None:
    model, exe = _compiled(seed)
    held = [(exe(x), wanted) for x, wanted in _runs(model, 3)]
    for x, wanted in _runs(model, 2):
        held.append((exe.empty_outputs(), wanted))
        exe.run([x], held[-1][0])
    for outputs, wanted in held:  # after all runs: what a caller holds is overwritten by none of them
        for have, want in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4 * float(np.abs(want).max()))


def test_the_random_networks_hold_views() -> None:
    """The test above is about something: most networks have concatenations that are not copied."""

    def copied(model: onnx.ModelProto, exe: mlc.Executable) -> bool:
        kernels = sum(f["calls"] for f in exe.metadata["functions"] if "concatenate" in f["name"])
        return kernels == sum(node.op_type == "Concat" for node in model.graph.node)

    assert sum(copied(*_compiled(seed)) for seed in SEEDS) < len(SEEDS) // 2


def _wide() -> onnx.ModelProto:
    """A pool after a convolution that makes 3 MB, which malloc would map anew each time."""
    weight = np.random.default_rng(0).standard_normal((64, 3, 1, 1), dtype="float32")
    return helper.make_model(helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["r"]),
         helper.make_node("GlobalAveragePool", ["r"], ["y"])],
        "wide", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 112, 112])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64, 1, 1])], [numpy_helper.from_array(weight, "w")],
    ), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_call_in_steady_state_allocates_no_memory() -> None:
    exe = mlc.compile(_wide(), log=False)
    x = np.random.default_rng(0).standard_normal(exe.inputs[0].shape, dtype="float32")
    for _ in range(5):
        exe(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        exe(x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 50  # pages touched for the first time
