"""A small decoder as exporters for onnxruntime write LLaMA's: 4-bit weights, rotary positions, keys of the past."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.graph.kernels.rounded import has_rounded
from mlc.target import resolve
from mlc.testing.targets import runs

MICROSOFT = "com.microsoft"
HIDDEN, INNER, HEADS, GROUPS, SIZE, WORDS, LAYERS, BLOCK = 64, 160, 4, 2, 16, 96, 2, 32


class _Decoder:
    """Writes the graph; weights are seeded random ones."""

    def __init__(self, length: int, past: int, bits: int, level: int = 0) -> None:
        self.length, self.past, self.bits, self.level = length, past, bits, level
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(11)

    def constant(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def node(self, operator: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: object) -> str:
        self.nodes.append(helper.make_node(operator, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def gain(self, name: str) -> str:
        return self.constant(name, self._rng.uniform(0.5, 1.5, HIDDEN).astype("float32"))

    def product(self, name: str, x: str, k: int, n: int) -> str:
        blocks = -(-k // BLOCK)
        packed = self._rng.integers(0, 256, (n, blocks, BLOCK * self.bits // 8), dtype=np.uint8)
        scale = self._rng.uniform(0.5, 1.5, n * blocks) / (2 ** (self.bits - 2) * k ** 0.5)
        inputs = [x, self.constant(f"{name}.w", packed), self.constant(f"{name}.s", scale.astype("float32"))]
        return self.node("MatMulNBits", inputs, [name], MICROSOFT, K=k, N=n, bits=self.bits, block_size=BLOCK,
                         accuracy_level=self.level)

    def attention(self, layer: str, x: str) -> str:
        q, k, v = (self.product(f"{layer}.{part}", x, HIDDEN, width * SIZE)
                   for part, width in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)))
        past = [f"{layer}.past.{part}" for part in "kv"] if self.past else ["", ""]
        present = [f"{layer}.present.{part}" for part in "kv"]
        self.node("GroupQueryAttention", [q, k, v, *past, "seqlens", "total", "cos", "sin"],
                  [f"{layer}.seen", *present], MICROSOFT, num_heads=HEADS, kv_num_heads=GROUPS, do_rotary=1)
        return self.product(f"{layer}.o", f"{layer}.seen", HEADS * SIZE, HIDDEN)

    def layer(self, layer: str, x: str, skip: str) -> tuple[str, str]:
        """What the layer adds, and what it adds it to."""
        if skip:
            self.node("SkipSimplifiedLayerNormalization", [x, skip, self.gain(f"{layer}.g")],
                      [f"{layer}.n", "", "", f"{layer}.sum"], MICROSOFT, epsilon=1e-5)
            x = f"{layer}.sum"
        else:
            self.node("SimplifiedLayerNormalization", [x, self.gain(f"{layer}.g")], [f"{layer}.n"], axis=-1,
                      epsilon=1e-5)
        seen = self.attention(layer, f"{layer}.n")
        self.node("SkipSimplifiedLayerNormalization", [x, seen, self.gain(f"{layer}.h")],
                  [f"{layer}.m", "", "", f"{layer}.both"], MICROSOFT, epsilon=1e-5)
        gate, up = (self.product(f"{layer}.{part}", f"{layer}.m", HIDDEN, INNER) for part in ("gate", "up"))
        self.node("Sigmoid", [gate], [f"{layer}.open"])
        self.node("Mul", [gate, f"{layer}.open"], [f"{layer}.silu"])
        self.node("Mul", [f"{layer}.silu", up], [f"{layer}.inner"])
        return self.product(f"{layer}.down", f"{layer}.inner", INNER, HIDDEN), f"{layer}.both"

    def model(self) -> onnx.ModelProto:
        total = self.past + self.length
        turn = np.outer(np.arange(total), 100.0 ** -(np.arange(SIZE // 2) / (SIZE // 2)))
        self.constant("cos", np.cos(turn).astype("float32"))
        self.constant("sin", np.sin(turn).astype("float32"))
        self.constant("seqlens", np.array([total - 1], "int32"))
        self.constant("total", np.array(total, "int32"))
        x = self.node("Gather", [self.constant("words", self._rng.standard_normal((WORDS, HIDDEN)).astype("float32")),
                                 "ids"], ["x"])
        skip = ""
        for number in range(LAYERS):
            x, skip = self.layer(f"l{number}", x, skip)
        self.node("SkipSimplifiedLayerNormalization", [x, skip, self.gain("g")], ["last"], MICROSOFT, epsilon=1e-5)
        self.product("logits", "last", HIDDEN, WORDS)
        parts = [f"l{number}.{{}}.{part}" for number in range(LAYERS) for part in "kv"]
        inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, self.length])]
        if self.past:
            inputs += [helper.make_tensor_value_info(part.format("past"), TensorProto.FLOAT,
                                                     [1, GROUPS, self.past, SIZE]) for part in parts]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, self.length, WORDS])]
        outputs += [helper.make_tensor_value_info(part.format("present"), TensorProto.FLOAT,
                                                  [1, GROUPS, total, SIZE]) for part in parts]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(("length", "past", "bits"), [(1, 9, 4), (6, 0, 4), (3, 5, 8)],
                         ids=["a token", "a prompt", "a few tokens of 8 bits"])
def test_a_decoder_of_4_bits_is_right(length: int, past: int, bits: int) -> None:
    model = _Decoder(length, past, bits).model()
    rng = np.random.default_rng(past)
    feeds = {"ids": rng.integers(0, WORDS, (1, length))}
    for value in model.graph.input[1:]:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(shape, dtype=np.float32)
    exe = mlc.compile(model, target="native")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for mine, theirs in zip(exe(**feeds), session.run(None, feeds), strict=True):
        assert theirs.std() > 0.01
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    exact = ("cpu.gemm_weight_only", "cpu.gemm_digits")
    products = [entry for entry in exe.metadata["functions"] if entry["space"] in exact]
    assert sum(entry["calls"] for entry in products) == 7 * LAYERS + 1


@pytest.mark.parametrize("target", ["native", *(["x86-64-v3"] if runs("x86-64-v3") else [])])
def test_activations_of_8_bits_where_the_model_allows_them(target: str) -> None:
    """As near to the exact results as onnxruntime's, which rounds them likewise."""
    feeds = {"ids": np.random.default_rng(0).integers(0, WORDS, (1, 6))}
    exact, theirs = (
        onnxruntime.InferenceSession(_Decoder(6, 0, 4, level).model().SerializeToString(),
                                     providers=["CPUExecutionProvider"]).run(None, feeds)[0] for level in (0, 4))
    exe = mlc.compile(_Decoder(6, 0, 4, 4).model(), target=target)
    products = [entry for entry in exe.metadata["functions"] if entry["space"] == "cpu.gemm_rounded"]
    if not has_rounded(resolve(target), 4):
        assert not products
        pytest.skip("this CPU has no products of bytes in whole vectors")
    assert sum(entry["calls"] for entry in products) == 7 * LAYERS + 1
    errors = [np.sqrt(((each - exact) ** 2).mean() / (exact**2).mean()) for each in (exe(**feeds)[0], theirs)]
    assert 0 < errors[0] < 2 * errors[1] < 0.1


def test_a_length_that_is_told_when_run_is_never_silently_wrong() -> None:
    model = _Decoder(2, 0, 4).model()
    (place,) = [i for i, weight in enumerate(model.graph.initializer) if weight.name == "seqlens"]
    del model.graph.initializer[place]
    model.graph.input.append(helper.make_tensor_value_info("seqlens", TensorProto.INT32, [1]))
    exe = mlc.compile(model, target="native")
    feeds = {"ids": np.array([[3, 5]]), "seqlens": np.array([1], "int32")}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(exe(**feeds)[0], session.run(None, feeds)[0], rtol=1e-4, atol=1e-4)
    assert np.isnan(exe(**{**feeds, "seqlens": np.array([0], "int32")})[0]).all()
