"""Models with weights of few bits on GPUs: what is packed, what is multiplied, and what becomes of many rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.compilation import Compilation
from mlc.graph.lowering.unpacked import UnpackWeights
from mlc.networks.inputs import random_inputs
from mlc.target import resolve
from schedules import registry

KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT}
DECODE, PREFILL = 1, 1000
HOPPER, AMPERE = "cuda:sm_90a", "cuda:sm_80"


def model(
    rows: int, sizes: tuple[int, ...], dtype: str = "float16", bits: int = 4, block: int = 32, zeros: str = "",
) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """Layers of ``MatMulNBits`` with a ReLU behind each, and their weights ``[K, N]``."""
    rng, nodes, weights = np.random.default_rng(0), list[Any](), list[Any]()
    held: list[np.ndarray] = []
    for layer, (k, n) in enumerate(pairwise(sizes)):
        count, half = -(-k // block), 1 << (bits - 1)
        packed = rng.integers(0, 256, (n, count, block * bits // 8), dtype=np.uint8)
        scales = rng.uniform(0.002, 0.006, (n, count)).astype(np.float16)
        given = {"b": packed, "s": scales.astype(np.float16 if dtype == "float16" else np.float32)}
        zero = np.full((n, count), float(half))
        if zeros == "whole":
            given["z"] = rng.integers(0, 256, (n, -(-count * bits // 8)), dtype=np.uint8)
            fields = given["z"][..., None] >> np.arange(0, 8, bits).astype(np.uint8) & 2 * half - 1
            zero = fields.reshape(n, -1)[:, :count].astype(float)
        elif zeros:
            zero = rng.uniform(0, 2 * half, (n, count)).astype(given["s"].dtype).astype(float)
            given["z"] = zero.astype(given["s"].dtype)
        integers = (packed[..., None] >> np.arange(0, 8, bits).astype(np.uint8) & 2 * half - 1).reshape(n, -1)[:, :k]
        moved, step = (np.repeat(each.astype(float), block, 1)[:, :k] for each in (zero, scales))
        held.append(((integers - moved) * step).T)
        weights += [numpy_helper.from_array(array, f"{name}{layer}") for name, array in given.items()]
        names = [f"x{layer}", *(f"{name}{layer}" for name in given)]
        nodes += [helper.make_node("MatMulNBits", names, [f"h{layer}"], domain="com.microsoft", K=k, N=n, bits=bits,
                                   block_size=block), helper.make_node("Relu", [f"h{layer}"], [f"x{layer + 1}"])]
    values = [helper.make_tensor_value_info(name, KINDS[dtype], (rows, size))
              for name, size in (("x0", sizes[0]), (f"x{len(sizes) - 1}", sizes[-1]))]
    graph = helper.make_graph(nodes, "layers", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), held


def spaces(made: onnx.ModelProto, target: str = HOPPER, **options: Any) -> list[tuple[str, list[str]]]:
    """Of each function, its space and the types of its parameters."""
    lowered = Compilation.of(made, target, **options).lowered()
    return [(registry.find(task.func, lowered.target.tvm).name, [str(p.dtype) for p in task.func.params])
            for task in lowered.tasks]


def error(made: onnx.ModelProto, weights: list[np.ndarray], target: str = HOPPER, **options: Any) -> float:
    """Of what the GPU computes, on this machine's CPU, relative to the largest result."""
    exe = Compilation.of(made, target, **options).stand_in()
    inputs = random_inputs(exe.inputs)
    (got,) = exe(**inputs)
    wanted = inputs["x0"].astype(float)
    for weight in weights:
        wanted = np.maximum(wanted @ weight, 0)
    return float(np.abs(got.astype(float) - wanted).max() / wanted.max())


@pytest.mark.parametrize("target", [HOPPER, AMPERE])
def test_activations_of_16_bits_are_multiplied_as_such(target: str) -> None:
    """Those between layers, too, which other kernels make."""
    made, weights = model(DECODE, (256, 96, 64))
    assert spaces(made, target) == [
        ("cuda.few_bits", ["float16", "uint32", "float16", "float16"])] * 2
    assert error(made, weights, target) <= 2e-3


def test_activations_in_another_order_stay_of_16_bits() -> None:
    """Where a list says which block's scale each number has, as GPTQ in the order of activations writes it."""
    made, _ = model(3, (256, 64))
    owners = np.random.default_rng(1).permutation(np.repeat(np.arange(8), 32)).astype(np.int32)
    made.graph.initializer.append(numpy_helper.from_array(owners, "g"))
    made.graph.node[0].input.extend(["", "g"])
    (types,) = (each for space, each in spaces(made) if space == "cuda.few_bits")
    assert types == ["float16", "uint32", "float16", "float16"]


@pytest.mark.parametrize("block", [32, 0])
def test_dequantised_operators_of_16_bits_are_packed(block: int) -> None:
    """``DequantizeLinear`` in float16, blocked and by columns, before a product of float16."""
    rng = np.random.default_rng(0)
    integers = rng.integers(-128, 128, (256, 48)).astype(np.int8)
    scales = rng.uniform(0.002, 0.006, (8, 48) if block else (48,)).astype(np.float16)
    options = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["weights"], **options),
             helper.make_node("Relu", ["x0"], ["positive"]), helper.make_node("MatMul", ["positive", "weights"], ["h"]),
             helper.make_node("Relu", ["h"], ["y"])]
    values = [helper.make_tensor_value_info(name, KINDS["float16"], (3, size))
              for name, size in (("x0", 256), ("y", 48))]
    graph = helper.make_graph(nodes, "dequantised", values[:1], values[1:], [
        numpy_helper.from_array(integers, "w"), numpy_helper.from_array(scales, "s")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    ((_, types),) = (each for each in spaces(made) if each[0] == "cuda.few_bits")
    assert types == ["float16", "uint32", "float16", "float16"]
    exe = Compilation.of(made, HOPPER).stand_in()
    inputs = random_inputs(exe.inputs)
    each = np.repeat(scales.astype(float), block, 0) if block else scales.astype(float)
    wanted = np.maximum(np.maximum(inputs["x0"].astype(float), 0) @ (integers * each), 0)
    assert np.abs(exe(**inputs)[0] - wanted).max() <= 2e-3 * wanted.max()


@pytest.mark.parametrize(("bits", "block", "zeros"), [(2, 16, "whole"), (4, 64, "whole"), (8, 32, ""),
                                                       (4, 32, "fractional")])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_width_is_packed(bits: int, block: int, zeros: str, dtype: str) -> None:
    made, weights = model(3, (200, 48), dtype, bits, block, zeros)
    ((space, types),) = spaces(made)
    assert space == "cuda.few_bits" and types[0] == dtype and types[1] == "uint32"
    assert error(made, weights) <= (1e-3 if dtype == "float16" else 1e-5)


def test_precision_is_the_options() -> None:
    made, weights = model(3, (256, 64), "float32")
    for precision, dtype in (("f32", "float32"), ("tf32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")):
        assert ["uint32" in types and types[0] for space, types in spaces(made, precision=precision)
                if space == "cuda.few_bits"] == [dtype]
    assert error(made, weights) <= 1e-5 and 1e-6 < error(made, weights, precision="f16") <= 2e-3


@pytest.mark.parametrize(("dtype", "precision", "space"), [
    ("float16", "f32", "cuda.wgmma"), ("float32", "f32", "cuda.gemm"), ("float32", "tf32", "cuda.mma")])
def test_weights_of_many_rows_become_floats_in_each_call(dtype: str, precision: str, space: str) -> None:
    made, weights = model(PREFILL, (256, 128), dtype)
    unpacked, product = spaces(made, precision=precision)
    assert unpacked == ("cuda.few_bits_weights", ["uint32", "float16", dtype])
    assert product == (space, [dtype] * 3)
    assert error(made, weights, precision=precision) <= 2e-3


def test_rows_choose_by_price() -> None:
    """A product of 4096 squared: one kernel while packed bytes count, two when products do."""
    found = {}
    for rows in (1, 64, 2048):
        made, _ = model(rows, (4096, 4096))
        found[rows] = [space for space, _ in spaces(made)]
    assert found[1] == found[64] == ["cuda.few_bits"]
    assert found[2048] == ["cuda.few_bits_weights", "cuda.wgmma"]


@pytest.mark.parametrize("rows", [DECODE, PREFILL])
def test_artifacts_hold_the_packed_bytes(rows: int) -> None:
    made, _ = model(rows, (1024, 512))
    lowered = Compilation.of(made, HOPPER).lowered()
    held = sum(task.constant_bytes for task in lowered.tasks[:1])
    assert held <= 1024 * 512 // 2 + 1024 * 512 // 32 * 2 + 1024


def test_zero_points_that_bfloat16_does_not_hold_keep_their_digits() -> None:
    made, weights = model(DECODE, (256, 64), "float32", zeros="fractional")
    assert all("uint32" not in types for _, types in spaces(made, precision="bf16"))
    assert error(made, weights, precision="bf16") <= 1e-2


def test_cpus_have_their_own_packing() -> None:
    made, _ = model(DECODE, (256, 64))
    target = resolve("x86-64-v3")
    mod = Compilation.of(made, "x86-64-v3").lowered().module
    assert UnpackWeights(target)(mod).same_as(mod)
    assert not any("few_bits" in var.name_hint for var in mod.functions)
