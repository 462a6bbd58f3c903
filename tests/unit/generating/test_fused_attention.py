"""Attention as one operator whose past is free: GroupQueryAttention of onnxruntime, and ONNX's Attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.frontend.onnx_past import decoder

CAPACITY, VOCABULARY, WIDTH, HEADS, GROUPS, SIZE = 40, 61, 64, 4, 2, 16
FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
_SIDES = ("0.key", "0.value")


class Graph:
    """A decoder of one layer under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(3)

    def constant(self, values: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def weight(self, *shape: int) -> str:
        return self.constant((self.rng.standard_normal(shape) * 1.5 / np.sqrt(shape[0])).astype(np.float32))

    def add(self, operator: str, *inputs: str, out: tuple[str, ...] = (), **attributes: object) -> str:
        names = list(out) or [f"v{len(self.nodes)}"]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0]

    def projections(self) -> tuple[str, list[str]]:
        x = self.add("Gather", self.weight(VOCABULARY, WIDTH), "input_ids")
        return x, [self.add("MatMul", x, self.weight(WIDTH, count * SIZE)) for count in (HEADS, GROUPS, GROUPS)]

    def done(self, x: str, seen: str, opset: int) -> onnx.ModelProto:
        x = self.add("Add", x, self.add("MatMul", seen, self.weight(WIDTH, WIDTH)))
        self.add("MatMul", x, self.weight(WIDTH, VOCABULARY), out=("logits",))
        value = helper.make_tensor_value_info
        inputs = [value("input_ids", INT64, ["batch", "sequence"]), value("attention_mask", INT64, ["batch", "total"])]
        inputs += [value(f"past_key_values.{s}", FLOAT, ["batch", GROUPS, "past", SIZE]) for s in _SIDES]
        outputs = [value("logits", FLOAT, ["batch", "sequence", VOCABULARY])]
        outputs += [value(f"present.{s}", FLOAT, ["batch", GROUPS, "total", SIZE]) for s in _SIDES]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)


def grouped(**attributes: Any) -> onnx.ModelProto:
    """As exporters for onnxruntime write it: the lengths come from the mask."""
    g = Graph()
    x, parts = g.projections()
    one, axis = g.constant(np.array(1, np.int64)), g.constant(np.array([1], np.int64))
    count = g.add("Sub", g.add("ReduceSum", "attention_mask", axis, keepdims=0), one)
    lengths = g.add("Cast", count, to=INT32)
    total = g.add("Cast", g.add("Gather", g.add("Shape", "attention_mask"), one, axis=0), to=INT32)
    turn = np.outer(np.arange(CAPACITY), 100.0 ** -(np.arange(SIZE // 2) / (SIZE // 2)))
    tables = [g.constant(f(turn).astype(np.float32)) for f in (np.cos, np.sin)]
    g.add("GroupQueryAttention", *parts, *(f"past_key_values.{s}" for s in _SIDES), lengths, total, *tables,
          out=("seen", *(f"present.{s}" for s in _SIDES)), domain="com.microsoft", num_heads=HEADS,
          kv_num_heads=GROUPS, **{"do_rotary": 1, **attributes})
    return g.done(x, "seen", 17)


def standard(**attributes: Any) -> onnx.ModelProto:
    """ONNX's own, of three axes, of opset 23; ``masked``: with a mask of truth values."""
    g = Graph()
    x, parts = g.projections()
    given = ""
    if attributes.pop("masked", False):
        mask = g.add("Unsqueeze", g.add("Cast", "attention_mask", to=TensorProto.BOOL), g.constant(np.array([1, 2])))
        rows, columns = (g.add("Shape", name, start=1, end=2) for name in ("input_ids", "attention_mask"))
        one = g.constant(np.array([1]))
        given = g.add("Expand", mask, g.add("Concat", one, one, rows, columns, axis=0))
    g.add("Attention", *parts, given, *(f"past_key_values.{s}" for s in _SIDES),
          out=("seen", *(f"present.{s}" for s in _SIDES)), q_num_heads=HEADS, kv_num_heads=GROUPS,
          **{"is_causal": 1, **attributes})
    return g.done(x, "seen", 23)


def spelled_out() -> onnx.ModelProto:
    """By products and a softmax of all heads of keys, which every token sees."""
    g = Graph()
    x, (q, *new) = g.projections()
    whole = []
    for side, rows in zip(_SIDES, new, strict=True):
        split = g.add("Reshape", rows, g.constant(np.array([0, 0, GROUPS, SIZE])))
        turned = g.add("Transpose", split, perm=[0, 2, 1, 3])
        whole.append(g.add("Concat", f"past_key_values.{side}", turned, out=(f"present.{side}",), axis=2))
    rows = g.add("Transpose", g.add("Reshape", q, g.constant(np.array([0, -1, GROUPS, SIZE]))), perm=[0, 2, 1, 3])
    scores = g.add("MatMul", rows, g.add("Transpose", whole[0], perm=[0, 1, 3, 2]))
    seen = g.add("MatMul", g.add("Softmax", g.add("Mul", scores, g.constant(np.float32(0.25))), axis=-1), whole[1])
    joined = g.add("Reshape", g.add("Transpose", seen, perm=[0, 2, 1, 3]), g.constant(np.array([0, -1, WIDTH])))
    return g.done(x, joined, 17)


#: what makes the model, and its batch: onnxruntime's operator takes several tokens of one sequence alone
MODELS = {
    "grouped": (grouped, 1), "grouped, window": (lambda: grouped(do_rotary=0, softcap=2.0, local_window_size=5), 1),
    "standard": (lambda: standard(scale=0.4), 2), "standard, masked": (lambda: standard(masked=True), 2),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if place else ()) for place, name in enumerate(MODELS)])
def test_every_step_is_that_of_onnxruntime_with_an_explicit_past(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    generator = mlc.Generator(model, capacity=CAPACITY, batch=batch, log=False)
    spaces = {entry["space"] for entry in generator.executable.metadata["functions"]}
    assert ("cpu.attention" in spaces) == ("softcap" not in str(model.graph.node))
    rng = np.random.default_rng(0)
    past = {f"past_key_values.{s}": np.zeros((batch, GROUPS, 0, SIZE), np.float32) for s in _SIDES}
    for length in (1, 1, 3, 7, 1, 20, 1, 6):  # 40 in all: the last call fills the capacity
        ids = rng.integers(0, VOCABULARY, (batch, length))
        total = generator.length + length
        feeds = {"input_ids": ids, "attention_mask": np.ones((batch, total), np.int64), **past}
        wanted, *present = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
        np.testing.assert_allclose(generator.logits(ids), wanted, rtol=1e-4, atol=1e-4, err_msg=str(total))
        past = dict(zip(past, present, strict=True))
    assert generator.length == CAPACITY
    if name == "grouped":  # a sequence that does not fill its past is never silently wrong
        generator.reset()
        generator._mask[:, :2] = 0
        assert np.isnan(generator.logits(rng.integers(0, VOCABULARY, (batch, 4)))).all()


@pytest.mark.parametrize("name", [
    pytest.param("grouped", marks=pytest.mark.slow), pytest.param("standard", marks=pytest.mark.slow), "two heads"])
def test_a_past_that_is_given_and_taken_back(name: str) -> None:
    """The present keys and values are results: no state is kept, attention writes them as it reads the past."""
    model = spelled_out() if name == "two heads" else MODELS[name][0]()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = decoder(model, 1, CAPACITY, name)
    exe = mlc.compile(shapes.model, log=False, shapes=shapes.shapes)
    made = {entry["symbol"] for entry in exe.metadata["functions"]}
    assert any("attention" in symbol for symbol in made)
    assert name != "two heads" or not any("concat" in symbol for symbol in made)  # rotary halves are put together
    rng = np.random.default_rng(1)
    for past, length in ((0, 1), (1, 1), (15, 1), (16, 1), (39, 1), (0, 5), (13, 2), (20, 20)):
        feeds = {"input_ids": rng.integers(0, VOCABULARY, (1, length)),
                 "attention_mask": np.ones((1, past + length), np.int64)}
        feeds |= {f"past_key_values.{s}": rng.standard_normal((1, GROUPS, past, SIZE)).astype(np.float32)
                  for s in _SIDES}
        wanted = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
        found = exe(**{spec.name: feeds[spec.name] for spec in exe.inputs})
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=f"{length} behind {past}")
