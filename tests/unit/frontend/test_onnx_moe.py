"""onnxruntime's mixtures of experts against its CPU kernels, or a loop in float64 over what these have not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.errors import ModelError

EXPERTS, HIDDEN, INNER = 4, 32, 48
Weights = dict[str, np.ndarray]


def model(
    operator: str, inputs: list[str], weights: Weights, shape: list[Any], kind: int = TensorProto.FLOAT,
    **attributes: Any,
) -> onnx.ModelProto:
    tokens = shape[0] if len(shape) == 2 else "tokens" if isinstance(shape[1], str) else shape[0] * shape[1]
    given = [helper.make_tensor_value_info("x", kind, shape),
             helper.make_tensor_value_info("r", kind, [tokens, EXPERTS])]
    if "rw" in inputs:
        given.append(helper.make_tensor_value_info("rw", kind, [tokens, EXPERTS]))
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, ["y"], domain="com.microsoft", **attributes)], "moe", given,
        [helper.make_tensor_value_info("y", kind, shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def floats(
    rng: np.random.Generator, wide: int = 1, third: bool = False, dtype: str = "float32"
) -> tuple[list[str], Weights]:
    shapes = {"w1": (EXPERTS, wide * INNER, HIDDEN), "b1": (EXPERTS, wide * INNER), "w2": (EXPERTS, HIDDEN, INNER),
              "b2": (EXPERTS, HIDDEN), **({"w3": (EXPERTS, INNER, HIDDEN), "b3": (EXPERTS, INNER)} if third else {})}
    weights = {name: (rng.standard_normal(shape) / (shape[2] ** 0.5 if name[0] == "w" else 1)).astype(dtype)
               for name, shape in shapes.items()}
    return ["x", "r", *weights], weights


def integers(
    rng: np.random.Generator, bits: int, block: int, zeros: bool, wide: int = 1, third: bool = False
) -> tuple[list[str], Weights]:
    weights: Weights = {}
    for place, (columns, depth) in enumerate([(wide * INNER, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)][:2 + third], 1):
        rows = (EXPERTS, columns)
        weights[f"w{place}"] = rng.integers(0, 256, (*rows, depth * bits // 8)).astype("uint8")
        scales = (*rows, depth // block) if block else rows
        weights[f"s{place}"] = (rng.uniform(0.5, 1.5, scales) / (depth ** 0.5 * (1 << bits) / 3)).astype("float32")
        weights[f"b{place}"] = rng.standard_normal(rows).astype("float32")
        if zeros:
            weights[f"z{place}"] = rng.integers(0, 256, (*scales[:-1], -(-scales[-1] * bits // 8))).astype("uint8")
    names = [f"{kind}{place}" for place in (1, 2, 3) for kind in "wsb"] + ["z1", "z2", "z3"]
    inputs = ["x", "r", *(name if name in weights else "" for name in names)]
    while not inputs[-1]:
        inputs.pop()
    return inputs, weights


def dequantised(weights: Weights, bits: int, block: int) -> Weights:
    found = {}
    for name, packed in weights.items():
        if name[0] != "w":
            continue
        numbers, scales = unpacked(packed, bits), weights[f"s{name[1]}"].astype("float64")
        zeros = unpacked(weights[f"z{name[1]}"], bits)[..., :scales.shape[-1]] if f"z{name[1]}" in weights else \
            np.full(scales.shape, 1 << (bits - 1))
        if not block:
            scales, zeros = scales[..., None], zeros[..., None]
        each = numbers.shape[2] // scales.shape[2]
        found[name] = (numbers - np.repeat(zeros, each, 2)) * np.repeat(scales, each, 2)
        found[f"b{name[1]}"] = weights[f"b{name[1]}"]
    return found


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    bytes_ = np.unpackbits(packed[..., None], axis=-1, bitorder="little")
    numbers = bytes_.reshape(*packed.shape[:-1], -1, bits)
    return (numbers << np.arange(bits)).sum(-1)


def expected(
    weights: Weights, given: Weights, k: int, kind: str, fusion: int, whole: bool, **numbers: float
) -> np.ndarray:
    """Token by token and expert by expert."""
    x, scores = given["x"].astype("float64").reshape(-1, HIDDEN), given["r"].astype("float64")
    weights = {name: array.astype("float64") for name, array in weights.items()}
    chosen = np.argsort(-scores, 1, kind="stable")[:, :k]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares = np.take_along_axis(shares / shares.sum(1, keepdims=True), chosen, 1)
    shares = shares / shares.sum(1, keepdims=True) if whole else shares
    made = np.zeros_like(x)
    for token, row in enumerate(x):
        for expert, share in zip(chosen[token], shares[token], strict=True):
            def layer(place: int, value: np.ndarray, expert: int = expert) -> np.ndarray:
                return weights[f"w{place}"][expert] @ value + weights[f"b{place}"][expert]

            gate = layer(1, row)
            up: Any = layer(3, row) if "w3" in weights else 1.0
            if fusion:
                gate, up = (gate[::2], gate[1::2]) if fusion == 1 else np.split(gate, 2)
            if kind == "swiglu":
                limit = numbers.get("swiglu_limit", np.inf)
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + numbers.get("activation_beta", 0.0)
            gate = gate / (1 + np.exp(-numbers.get("activation_alpha", 1.0) * gate))
            made[token] += share * layer(2, gate * up)
    return made.reshape(given["x"].shape)


def feeds(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Weights:
    tokens = int(np.prod(shape))
    return {"x": rng.standard_normal((*shape, HIDDEN)).astype(dtype),
            "r": rng.standard_normal((tokens, EXPERTS)).astype(dtype)}


def same(got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == wanted.shape and wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("kind", "whole", "k", "tokens"), [
    ("swiglu", 1, 2, "n"), ("relu", 0, 1, "n"), ("relu", 1, 4, 5), ("gelu", 1, 2, 5), ("silu", 0, 2, 1),
    ("identity", 1, 1, 5), ("swiglu", 0, 3, 5),
])
def test_as_onnxruntime(kind: str, whole: int, k: int, tokens: int | str) -> None:
    rng = np.random.default_rng(0)
    fusion = int(kind == "swiglu")
    inputs, weights = floats(rng, 1 + fusion)
    numbers = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7} if fusion and whole else {}
    given = model("MoE", inputs, weights, [tokens, HIDDEN], k=k, activation_type=kind, swiglu_fusion=fusion,
                  normalize_routing_weights=whole, **numbers)
    exe, session = mlc.compile(given, log=False), onnxruntime.InferenceSession(given.SerializeToString())
    for count in (1, 5, 200) if isinstance(tokens, str) else (tokens,):
        fed = feeds(rng, count)
        same(exe(**fed)[0], session.run(None, fed)[0])


def test_of_equal_scores_onnxruntime_takes_the_last() -> None:
    """As where padding has none at all."""
    rng = np.random.default_rng(8)
    inputs, weights = floats(rng)
    given = model("MoE", inputs, weights, [3, HIDDEN], k=2, activation_type="relu", normalize_routing_weights=1)
    fed = {**feeds(rng, 3), "r": np.array([[0, 0, 0, 0], [1, 0, 1, 1], [2, 1, 1, 0]], "float32")}
    (wanted,) = onnxruntime.InferenceSession(given.SerializeToString()).run(None, fed)
    same(mlc.compile(given, log=False)(**fed)[0], wanted)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("bits", "block", "zeros", "fusion"), [
    (4, 16, True, 1), (2, 0, False, 0), (4, 0, True, 1), (4, 16, False, 0), (8, 0, False, 0), (8, 0, True, 1),
    (2, 16, True, 0),
])
def test_of_integers_as_onnxruntime(bits: int, block: int, zeros: bool, fusion: int) -> None:
    rng = np.random.default_rng(1)
    inputs, weights = integers(rng, bits, block, zeros, 1 + fusion)
    attributes = {"block_size": block} if block else {}
    given = model("QMoE", inputs, weights, [2, 3, HIDDEN], k=2, activation_type="swiglu" if fusion else "silu",
                  swiglu_fusion=fusion, expert_weight_bits=bits, **attributes)
    fed = feeds(rng, 2, 3)
    (wanted,) = onnxruntime.InferenceSession(given.SerializeToString()).run(None, fed)
    same(mlc.compile(given, log=False)(**fed)[0], wanted, 2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [0, 1])
def test_experts_are_chosen_by_some_numbers_and_weighed_by_others(whole: int) -> None:
    rng = np.random.default_rng(2)
    inputs, weights = integers(rng, 4, 0, False)
    inputs += [""] * (14 - len(inputs)) + ["rw"]
    given = model("QMoE", inputs, weights, ["n", HIDDEN], k=2, activation_type="silu", expert_weight_bits=4,
                  normalize_routing_weights=whole)
    exe, session = mlc.compile(given, log=False), onnxruntime.InferenceSession(given.SerializeToString())
    for tokens in (1, 6):
        fed = feeds(rng, tokens)
        fed["rw"] = rng.random((tokens, EXPERTS)).astype("float32")
        same(exe(**fed)[0], session.run(None, fed)[0])


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("operator", "kind", "fusion", "tokens"), [
    ("MoE", "swiglu", 0, 7), ("MoE", "silu", 0, 7), ("MoE", "swiglu", 2, "n"), ("QMoE", "swiglu", 0, 7),
    ("QMoE", "swiglu", 2, 7),
])
def test_layers_that_onnxruntime_has_on_gpus_alone(operator: str, kind: str, fusion: int, tokens: int | str) -> None:
    """A gate beside the first layer, or behind it in the same."""
    rng = np.random.default_rng(3)
    wide = (2 if fusion else 1, not fusion)
    inputs, stored = floats(rng, *wide) if operator == "MoE" else integers(rng, 8, 16, True, *wide)
    quantised = {} if operator == "MoE" else {"expert_weight_bits": 8, "block_size": 16}
    numbers = {"activation_alpha": 1.3, "activation_beta": 0.5, "swiglu_limit": 0.9} if kind == "swiglu" else {}
    given = model(operator, inputs, stored, [tokens, HIDDEN], k=2, activation_type=kind, swiglu_fusion=fusion,
                  normalize_routing_weights=1, **quantised, **numbers)
    exe = mlc.compile(given, log=False)
    weights = stored if operator == "MoE" else dequantised(stored, 8, 16)
    for count in (1, 7) if isinstance(tokens, str) else (tokens,):
        fed = feeds(rng, count)
        same(exe(**fed)[0], expected(weights, fed, 2, kind, fusion, True, **numbers), 2e-5)


def test_integers_of_blocks_of_eight_bits() -> None:
    """Which onnxruntime multiplies with rounded tokens."""
    rng = np.random.default_rng(4)
    inputs, stored = integers(rng, 8, 16, True, 2)
    given = model("QMoE", inputs, stored, [5, HIDDEN], k=2, activation_type="swiglu", swiglu_fusion=1,
                  expert_weight_bits=8, block_size=16)
    fed = feeds(rng, 5)
    same(mlc.compile(given, log=False)(**fed)[0], expected(dequantised(stored, 8, 16), fed, 2, "swiglu", 1, True), 2e-5)


@pytest.mark.parametrize("operator", ["MoE", "QMoE"])
def test_of_halves(operator: str) -> None:
    rng = np.random.default_rng(5)
    inputs, stored = floats(rng, dtype="float16") if operator == "MoE" else integers(rng, 4, 16, False)
    stored = {name: each.astype("float16") if each.dtype == np.float32 else each for name, each in stored.items()}
    given = model(operator, inputs, stored, [1, 6, HIDDEN], TensorProto.FLOAT16, k=2, activation_type="silu",
                  normalize_routing_weights=1, **({"block_size": 16} if operator == "QMoE" else {}))
    fed = feeds(rng, 1, 6, dtype="float16")
    weights = stored if operator == "MoE" else dequantised(stored, 4, 16)
    (got,) = mlc.compile(given, log=False)(**fed)
    assert got.dtype == np.float16
    same(got.astype("float64"), expected(weights, fed, 2, "silu", 0, True), 1e-2)


@pytest.mark.parametrize(("attributes", "said"), [
    ({"activation_type": "geglu"}, "its activation must be one of relu, gelu, silu, swiglu, identity, got geglu"),
    ({"k": 5}, "it must choose 1 to 4 experts, got 5"), ({"use_sparse_mixer": 1}, "use_sparse_mixer must be 0"),
    ({"activation_type": "swiglu"}, r"swiglu must be of two layers.*got 0 without fc3"),
    ({"activation_type": "swiglu", "swiglu_fusion": 1}, "its weights must fit each other and 32 numbers of a token"),
], ids=str)
def test_what_no_mixture_is_is_refused_in_one_line(attributes: dict[str, Any], said: str) -> None:
    inputs, weights = floats(np.random.default_rng(6))
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(model("MoE", inputs, weights, ["n", HIDDEN], **attributes), log=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("attributes", "said"), [
    ({"quant_type": "fp8"}, "its weights must be integers in onnxruntime's own order.*got fp8"),
    ({"weights_prepacked": 1}, "weights_prepacked 0 or -1"), ({"expert_weight_bits": 3}, "2, 4 or 8 bits, got 3"),
    ({"block_size": 32}, r"its scales must be \[4, 48, 1\] for 32 numbers of each column in blocks of 32, got"),
], ids=str)
def test_what_no_integers_are_is_refused_in_one_line(attributes: dict[str, Any], said: str) -> None:
    inputs, weights = integers(np.random.default_rng(7), 4, 16, False)
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(model("QMoE", inputs, weights, ["n", HIDDEN], **{"block_size": 16, **attributes}), log=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("bits", "block"), [(4, 16), (8, 0)])
def test_weights_stay_integers(bits: int, block: int) -> None:
    inputs, weights = integers(np.random.default_rng(9), bits, block, False, 2)
    given = model("QMoE", inputs, weights, [3, HIDDEN], k=2, activation_type="swiglu", swiglu_fusion=1,
                  expert_weight_bits=bits, **({"block_size": block} if block else {}))
    sizes = {dtype: 0 for dtype in ("uint8", "float32")}
    for entry in mlc.compile(given, log=False).metadata["weights"]:
        sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + int(np.prod(entry["shape"]))
    assert sizes["uint8"] == sum(weights[name].size for name in ("w1", "w2"))
    assert sizes["float32"] < 2 * sum(weights[name].size for name in ("s1", "s2", "b1", "b2"))
