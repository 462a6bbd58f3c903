"""Decoders as onnxruntime-genai's builder writes them: every step against onnxruntime with an explicit past."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.errors import InputError

MICROSOFT = "com.microsoft"
LAYERS, WIDTH, HEADS, GROUPS, SIZE, INNER, VOCABULARY, CAPACITY, WINDOW = 2, 64, 4, 2, 16, 96, 89, 40, 8


class Builder:
    """Writes the graph; weights are seeded random ones. ``attention`` is one of :data:`ATTENTIONS`."""

    def __init__(self, attention: str, dtype: str = "float32", bits: int = 0) -> None:
        self.attention, self.dtype, self.bits = attention, dtype, bits
        self.groups = HEADS if attention == "heads of their own" else GROUPS
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.sizes: list[onnx.ValueInfoProto] = []
        self.rng = np.random.default_rng(3)

    @property
    def kind(self) -> int:
        return helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))

    def constant(self, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def number(self, *shape: int, scale: float = 1.0, least: float = 0.0) -> str:
        return self.constant((self.rng.standard_normal(shape) * scale + least).astype(self.dtype))

    def add(self, operator: str, inputs: str, out: str = "", domain: str = MICROSOFT, **attributes: Any) -> str:
        names = ["" if name == "-" else name for name in inputs.split()]
        outputs = out.split() or [f"node{len(self.nodes)}"]
        self.nodes.append(helper.make_node(operator, names, ["" if name == "-" else name for name in outputs],
                                           domain=domain, **attributes))
        return outputs[0]

    def product(self, x: str, depth: int, columns: int, out: str = "") -> str:
        if not self.bits:
            made = self.add("MatMul", f"{x} {self.number(depth, columns, scale=1.4 / depth**0.5)}", out, "")
        else:
            blocks = -(-depth // 32)
            packed = self.rng.integers(0, 256, (columns, blocks, 16), np.uint8)
            scales = (self.rng.uniform(0.5, 1.5, columns * blocks) / (4.0 * depth**0.5)).astype(self.dtype)
            made = self.add("MatMulNBits", f"{x} {self.constant(packed)} {self.constant(scales)}", out, K=depth,
                            N=columns, bits=4, block_size=32)
        self.sizes.append(helper.make_tensor_value_info(made, self.kind, ["batch", "length", columns]))
        return made

    def normalised(self, x: str) -> str:
        """Of each head."""
        apart = self.add("Reshape", f"{x} {self.constant([0, 0, -1, SIZE])}", domain="")
        normal = self.add("SimplifiedLayerNormalization", f"{apart} {self.number(SIZE, scale=0.3, least=1)}", domain="",
                          axis=-1, epsilon=1e-6, stash_type=1)
        shape = [0, 0, HEADS * SIZE if x.startswith("q") else self.groups * SIZE]
        return self.add("Reshape", f"{normal} {self.constant(shape)}", domain="")

    def turned(self, x: str, heads: int) -> str:
        made = self.add("RotaryEmbedding", f"{self.normalised(x)} position_ids cos sin", num_heads=heads)
        self.sizes.append(helper.make_tensor_value_info(made, self.kind, ["batch", "length", heads * SIZE]))
        return made

    def seen(self, layer: int, x: str) -> str:
        past = f"past_key_values.{layer}.key past_key_values.{layer}.value"
        out = f"seen{layer} present.{layer}.key present.{layer}.value"
        grouped = {"num_heads": HEADS, "kv_num_heads": self.groups, "scale": SIZE ** -0.5}
        if self.attention == "packed":
            whole = self.product(x, WIDTH, (HEADS + 2 * GROUPS) * SIZE)
            return self.add("GroupQueryAttention", f"{whole} - - {past} ends total cos sin - - -", out, do_rotary=1,
                            **grouped)
        q, k, v = (self.product(x, WIDTH, count * SIZE, f"{name}{layer}")
                   for name, count in (("q", HEADS), ("k", self.groups), ("v", self.groups)))
        if self.attention == "sliding":
            window = WINDOW if layer == 0 else -1
            return self.add("GroupQueryAttention", f"{q} {k} {v} {past} ends total cos sin", out, do_rotary=1,
                            local_window_size=window, softcap=3.0, **grouped)
        if self.attention == "sinks":
            sinks = self.number(HEADS, least=1)
            return self.add("GroupQueryAttention", f"{q} {k} {v} {past} ends total cos sin - - {sinks}", out,
                            do_rotary=1, **grouped)
        q, k = (self.turned(x, count) for x, count in ((q, HEADS), (k, self.groups)))
        if self.attention == "turned before":
            return self.add("GroupQueryAttention", f"{q} {k} {v} {past} ends total", out, **grouped)
        return self.add("MultiHeadAttention", f"{q} {k} {v} - - - {past}", out, num_heads=HEADS, unidirectional=1)

    def layer(self, number: int, x: str, skip: str) -> tuple[str, str]:
        gains = [self.number(WIDTH, scale=0.3, least=1) for _ in range(2)]
        if number:
            self.add("SkipSimplifiedLayerNormalization", f"{x} {skip} {gains[0]}", f"n{number} - - x{number}",
                     epsilon=1e-5)
            x = f"x{number}"
        else:
            self.add("SimplifiedLayerNormalization", f"{x} {gains[0]}", "n0", "", axis=-1, epsilon=1e-5, stash_type=1)
        made = self.product(self.seen(number, f"n{number}"), HEADS * SIZE, WIDTH)
        self.add("SkipSimplifiedLayerNormalization", f"{x} {made} {gains[1]}", f"m{number} - - y{number}", epsilon=1e-5)
        gate, up = (self.product(f"m{number}", WIDTH, INNER) for _ in range(2))
        silu = self.add("Mul", f"{gate} {self.add('Sigmoid', gate, domain='')}", domain="")
        return self.product(self.add("Mul", f"{silu} {up}", domain=""), INNER, WIDTH), f"y{number}"

    def model(self) -> onnx.ModelProto:
        turn = np.outer(np.arange(CAPACITY), 50.0 ** -(np.arange(SIZE // 2) / (SIZE // 2)))
        for name, table in (("cos", np.cos(turn)), ("sin", np.sin(turn))):
            self.weights.append(numpy_helper.from_array(table.astype(self.dtype), name))
        counts = self.add("ReduceSum", f"attention_mask {self.constant([1])}", domain="", keepdims=0)
        self.add("Cast", self.add("Sub", f"{counts} {self.constant(1)}", domain=""), "ends", "", to=TensorProto.INT32)
        length = self.add("Gather", f"{self.add('Shape', 'attention_mask', domain='')} {self.constant(1)}", domain="")
        self.add("Cast", length, "total", "", to=TensorProto.INT32)
        x, skip = self.add("Gather", f"{self.number(VOCABULARY, WIDTH)} input_ids", domain=""), ""
        for number in range(LAYERS):
            x, skip = self.layer(number, x, skip)
        self.add("SkipSimplifiedLayerNormalization", f"{x} {skip} {self.number(WIDTH, scale=0.3, least=1)}", "last",
                 epsilon=1e-5)
        self.product("last", WIDTH, VOCABULARY, "logits")
        return self._finished()

    def _finished(self) -> onnx.ModelProto:
        # keys come before values, and the size of a head is but a name, as the builder leaves it
        sides = [f"{layer}.{side}" for side in ("key", "value") for layer in range(LAYERS)]
        value, positions = helper.make_tensor_value_info, any("position_ids" in node.input for node in self.nodes)
        inputs = [value("input_ids", TensorProto.INT64, ["batch", "length"]),
                  value("attention_mask", TensorProto.INT64, ["batch", "total_length"]),
                  *([value("position_ids", TensorProto.INT64, ["batch", "length"])] if positions else []),
                  *(value(f"past_key_values.{side}", self.kind, ["batch", self.groups, "past_length", "kv_cache_dim"])
                    for side in sides)]
        outputs = [value("logits", self.kind, ["batch", "length", VOCABULARY]),
                   *(value(f"present.{side}", self.kind, ["batch", self.groups, "total_length", "kv_cache_dim"])
                     for side in sides)]
        sizes = [each for each in self.sizes if each.name != "logits"]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights, value_info=sizes)
        domains = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)


ATTENTIONS = ("packed", "sliding", "sinks", "turned before", "heads of their own")


def reference(model: onnx.ModelProto, parts: list[np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    past = {value.name: np.zeros((1, value.shape[1], 0, SIZE), "float16" if "16" in value.type else "float32")
            for value in session.get_inputs() if value.name.startswith("past")}
    found, seen = [], 0
    for ids in parts:
        end = seen + ids.shape[1]
        given = {"input_ids": ids, "attention_mask": np.ones((1, end), np.int64),
                 "position_ids": np.arange(seen, end)[None]}
        logits, *present = session.run(None, {k: v for k, v in given.items() if k in names} | past)
        past, seen = dict(zip(past, present, strict=True)), end
        found.append(logits)
    return np.concatenate(found, axis=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("attention", "dtype", "bits"), [
    ("sliding", "float32", 4), ("sinks", "float32", 0), ("packed", "float16", 0),
    ("heads of their own", "float32", 0), ("turned before", "float32", 4), ("packed", "float32", 4),
], ids=str)
def test_every_step_is_that_of_onnxruntime(attention: str, dtype: str, bits: int) -> None:
    model = Builder(attention, dtype, bits).model()
    generator = mlc.Generator(model, capacity=CAPACITY, log=False)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 30))
    parts = np.split(ids, [1, 20, 21, 22], axis=1)[: 5 if attention == "heads of their own" else 4]
    wanted = reference(model, parts)
    found = np.concatenate([generator.logits(part) for part in parts], axis=1)
    atol = (1e-2 if dtype == "float16" else 1e-4) * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_attention_that_counts_keys_takes_no_padding_on_the_left() -> None:
    generator = mlc.Generator(Builder("packed").model(), capacity=CAPACITY, batch=2, log=False)
    assert len(list(generator([[3, 4, 5], [6, 7, 8]], 2))) == 2
    with pytest.raises(InputError, match="sequences must have one length for decoder") as caught:
        list(generator([[3, 4, 5], [6]], 2))
    assert "\n" not in str(caught.value)
