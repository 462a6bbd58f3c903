"""Products of two quantised activations, as attention has them, in integers: exact where the model's scales are.

Scales are powers of two, so that every result is one number that float32 holds, whatever the order of its sum: what
is compiled must agree with onnx's reference evaluator in every bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlc
from mlc.testing.targets import runs

#: this machine's instructions, and those of AVX2
TARGETS = ["native", pytest.param("x86-64-v3", marks=pytest.mark.skipif(
    not runs("x86-64-v3"), reason="this machine lacks AVX2"))]
_LIMITS = {"uint8": (0, 255), "int8": (-128, 127)}


def _value(name: str, dtype: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: dict[str, Any]) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "products", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _extreme(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random, with every third value at an end of the range, and with rows and columns of nothing else."""
    low, high = _LIMITS[dtype]
    array = np.where(rng.random(shape) < 1 / 3, rng.choice([low, high], shape), rng.integers(low, high + 1, shape))
    array[..., 0, :], array[..., :, 0] = high, low
    return array.astype(dtype)


def _products(form: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """``[2, 3, 97, 130] x [2, 3, 130, 83]`` of all types, with zero points at the ends and between."""
    rng = np.random.default_rng(len(form))
    left, right, result = (2, 3, 97, 130), (2, 3, 130, 83), (2, 3, 97, 83)
    nodes, inputs, outputs, feeds = [], [], [], {}
    constants: dict[str, Any] = {"s": np.float32(2**-7), "t": np.float32(2**-9), "u": np.float32(2**-2)}
    zeros = {"uint8": (0, 128, 255), "int8": (-128, 0, 127)}
    for kinds, places in zip(itertools.product(_LIMITS, repeat=2), ((0, 2), (1, 1), (2, 1), (1, 0)), strict=True):
        tag = "_".join(kinds)
        a, b, za, zb, zy, y = (f"{name}_{tag}" for name in ("a", "b", "za", "zb", "zy", "y"))
        for name, kind, shape in ((a, kinds[0], left), (b, kinds[1], right)):
            inputs.append(_value(name, kind, shape))
            feeds[name] = _extreme(rng, kind, shape)
        for name, kind, place in zip((za, zb), kinds, places, strict=True):
            constants[name] = np.array(zeros[kind][place], kind)
        constants[zy] = np.array(zeros[kinds[0]][1], kinds[0])
        if form == "MatMulInteger":
            nodes.append(helper.make_node(form, [a, b, za, zb], [y]))
        elif form == "QLinearMatMul":
            nodes.append(helper.make_node(form, [a, "s", za, b, "t", zb, "u", zy], [y]))
        else:
            nodes += [helper.make_node("DequantizeLinear", [a, "s", za], [f"f{a}"]),
                      helper.make_node("DequantizeLinear", [b, "t", zb], [f"f{b}"]),
                      helper.make_node("MatMul", [f"f{a}", f"f{b}"], [f"m{y}"]),
                      helper.make_node("QuantizeLinear", [f"m{y}", "u", zy], [y])]
        outputs.append(_value(y, "int32" if form == "MatMulInteger" else kinds[0], result))
    return _model(nodes, inputs, outputs, constants), feeds


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["QDQ", "QLinearMatMul", "MatMulInteger"])
def test_products_of_activations_are_exact(form: str, target: str) -> None:
    model, feeds = _products(form)
    exe = mlc.compile(model, target, log=False)
    found = exe(**feeds)
    for got, wanted in zip(found, ReferenceEvaluator(model).run(None, feeds), strict=True):
        assert wanted.std() > 0.5 and got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    calls = {entry["space"]: entry["calls"] for entry in exe.metadata["functions"]}
    assert sum(e["calls"] for e in exe.metadata["functions"] if e["space"] == "cpu.gemm_integer") == 4, calls


def _attention(heads: int = 4, tokens: int = 100, depth: int = 64) -> onnx.ModelProto:
    """``softmax(Q K' / 4) V`` with every tensor in bytes, as a quantiser writes it."""
    nodes: list[Any] = []
    constants: dict[str, Any] = {"half": np.float32(0.25)}

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, list(inputs), [name := f"t{len(nodes)}"], **attributes))
        return name

    def in_bytes(x: str, scale: float, zero: int) -> str:
        s, z = f"s{len(nodes)}", f"z{len(nodes)}"
        constants[s], constants[z] = np.float32(scale), np.uint8(zero)
        return add("DequantizeLinear", add("QuantizeLinear", x, s, z), s, z)

    q, k, v = (in_bytes(name, 2**-5, zero) for name, zero in (("q", 128), ("k", 120), ("v", 131)))
    scores = in_bytes(add("MatMul", q, add("Transpose", k, perm=[0, 2, 1])), 2**-2, 127)
    weights = in_bytes(add("Softmax", add("Mul", scores, "half"), axis=-1), 2**-8, 0)
    result = in_bytes(add("MatMul", weights, v), 2**-6, 125)
    shape = (heads, tokens, depth)
    return _model(nodes, [_value(name, "float32", shape) for name in "qkv"], [_value(result, "float32", shape)],
                  constants)


@pytest.mark.parametrize("target", TARGETS)
def test_attention_reads_and_writes_bytes(target: str) -> None:
    """Both products in integers, and softmax between them on bytes; it may round a byte's tie otherwise."""
    model = _attention()
    rng = np.random.default_rng(7)
    feeds = {name: (rng.standard_normal((4, 100, 64)) * 1.5).astype("float32") for name in "qkv"}
    exe = mlc.compile(model, target, log=False)
    (found,) = exe(**feeds)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    assert wanted.std() > 0.1
    assert np.abs(found - wanted).max() <= 2**-6 and (found == wanted).mean() > 0.98
    products = [e for e in exe.metadata["functions"] if e["space"] == "cpu.gemm_integer"]
    assert sum(e["calls"] for e in products) == 2
    (softmax,) = [e for e in exe.metadata["functions"] if "softmax" in e["name"]]
    assert "quantize" in softmax["name"]


def test_products_of_activations_stay_float_where_that_is_asked_for() -> None:
    model, feeds = _products("QDQ")
    exe = mlc.compile(model, log=False, integers=False)
    assert "cpu.gemm_integer" not in {entry["space"] for entry in exe.metadata["functions"]}
    for got, wanted in zip(exe(**feeds), ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_array_equal(got, wanted)
