"""Quantised models on GPUs: how many kernels they are, of which kinds, and what these compute.

Kernels run one after the other in the emulator, or their functions on this machine's CPU where a model has many.
"""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from test_quantised_models import _encoder
from tvm import relax

from mlc.compilation import Compilation
from mlc.graph.ir.constants import array_of
from mlc.graph.ir.rewrite import bindings, op_name, shape_of
from mlc.graph.pipeline import Lowered
from mlc.target import resolve
from mlc.testing import cuda_emulator
from schedules.registry import find
from schedules.space import best_seed

HOPPER = resolve("cuda:sm_90a")
LENGTH = 72

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def lowered(model: onnx.ModelProto) -> Lowered:
    return Compilation.of(model, HOPPER).lowered()


def spaces(graph: Lowered) -> Counter[str]:
    """How many kernels a call starts, by what lays them out."""
    calls = (binding.value for binding in bindings(graph.module["main"]))
    names = [call.args[0] for call in calls if isinstance(call, relax.Call) and op_name(call) == "relax.call_tir"]
    return Counter(find(graph.module[name], HOPPER.tvm).name for name in names)


def emulated(graph: Lowered, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the kernels compute, one after the other."""
    module = graph.module
    known: dict[Any, Any] = dict(zip(module["main"].params, inputs, strict=True))

    def value(expr: Any) -> Any:
        if isinstance(expr, relax.Tuple):
            return [value(field) for field in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return known[expr.tuple_value][expr.index]
        if isinstance(expr, relax.Var):
            return known[expr]
        if not isinstance(expr, relax.Call):
            return np.array(array_of(expr))
        if op_name(expr) == "relax.reshape":
            return value(expr.args[0]).reshape(shape_of(expr))
        func = module[expr.args[0]]
        tuples = isinstance(expr.ty, relax.TupleType)
        results = [np.zeros([int(size) for size in ty.shape.values], str(ty.dtype))
                   for ty in (expr.ty.fields if tuples else [expr.ty])]
        scheduled = best_seed(find(func, HOPPER.tvm), func, HOPPER.tvm).mod["main"]
        cuda_emulator.run(scheduled, HOPPER.tvm, [value(arg) for arg in expr.args[1].fields], results)
        return results if tuples else results[0]

    for binding in bindings(module["main"]):
        known[binding.var] = value(binding.value)
    result = known[module["main"].body.body]
    return result if isinstance(result, list) else [result]


def model_of(nodes: Sequence[Any], inputs: Mapping[str, np.ndarray], outputs: Mapping[str, tuple[str, tuple[int, ...]]],
             constants: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    made = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in inputs.items()]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    results = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
               for name, (dtype, shape) in outputs.items()]
    graph = helper.make_graph(list(nodes), "net", made, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def reference(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return list(ReferenceEvaluator(model).run(None, dict(feeds)))


# Models


class _Tokens(CalibrationDataReader):
    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self._feeds = iter([{"x": rng.integers(0, 50, (1, LENGTH))} for _ in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def computed(model: onnx.ModelProto, batches: Sequence[np.ndarray]) -> list[np.ndarray]:
    """By the GPU's functions on this machine's CPU, one call for each batch of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Compilation.of(model, HOPPER).stand_in()
    return [np.asarray(run(tokens)[0]) for tokens in batches]


@pytest.mark.parametrize("weights", [QuantType.QInt8, QuantType.QUInt8], ids=["int8", "uint8"])
def test_dynamic_encoder(weights: QuantType, tmp_path: Path) -> None:
    """Quantising is a kernel behind a normalisation and two elsewhere; products are on tensor cores, with everything
    that is elementwise, scales and zero points among it, in them. Zero points of weights cost a sum of rows."""
    onnx.save(_encoder(128, LENGTH, 2), tmp_path / "f32.onnx")
    quantize_dynamic(tmp_path / "f32.onnx", tmp_path / "q.onnx", per_channel=True, weight_type=weights)
    model, moved = onnx.load(tmp_path / "q.onnx"), 4 * (weights == QuantType.QUInt8)
    found = spaces(lowered(model))
    assert found == {"cuda.mma": 6, "cuda.rows": 3 + 4, "cuda.reduce": 2 + moved, "cuda.attention_f32": 1,
                     "cuda.elementwise": 3}
    session, errors = onnxruntime.InferenceSession(tmp_path / "q.onnx"), []
    batches = [np.random.default_rng(seed).integers(0, 50, (1, LENGTH)) for seed in range(3)]
    for tokens, result in zip(batches, computed(model, batches), strict=True):
        (wanted,) = session.run(None, {"x": tokens})
        assert wanted.std() > 0.5
        errors.append(np.abs(result - wanted).max())
    # where a number lies half-way between two bytes, everything behind it is that of a neighbour
    assert sorted(errors)[1] < 2e-5 and max(errors) < 0.1


def test_static_encoder(tmp_path: Path) -> None:
    """A layer is eight products on tensor cores, two normalisations and a softmax, and nothing beside them."""
    onnx.save(_encoder(128, LENGTH, 2), tmp_path / "f32.onnx")
    quantize_static(tmp_path / "f32.onnx", tmp_path / "q.onnx", _Tokens(), quant_format=QuantFormat.QDQ,
                    per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
    model = onnx.load(tmp_path / "q.onnx")
    found = spaces(lowered(model))
    products = found.pop("cuda.mma") + found.pop("cuda.wgmma", 0)
    assert products == 8 and found == {"cuda.rows": 4, "cuda.elementwise": 3}
    tokens = np.random.default_rng(4).integers(0, 50, (1, LENGTH))
    (wanted,) = reference(model, {"x": tokens})
    (result,) = computed(model, [tokens])
    step = np.diff(np.unique(wanted)).min()
    assert wanted.std() > 0.5 and np.abs(result - wanted).max() < 1.01 * step and (result != wanted).mean() < 0.01


# Kernels


@needs_gxx
@pytest.mark.parametrize(("shape", "low", "high", "kernels"), [
    ((3, 7), -2.0, 5.0, 1), ((1, 1031), -3.0, -1.0, 1), ((8209,), -1.0, 2.0, 1), ((2, 33, 129), 0.5, 9.0, 2),
    ((40, 256), -4.0, 1.0, 2), ((5, 3), 0.0, 0.0, 1)], ids=str)
def test_dynamic_quantising(shape: tuple[int, ...], low: float, high: float, kernels: int) -> None:
    """As ONNX says, in every bit: of ranges on one side of zero, of few elements, of a prime number of them, and of
    zeros alone."""
    x = np.random.default_rng(5).uniform(low, high, shape).astype("float32")
    node, results = quantiser("x", shape)
    model = model_of([node], {"x": x}, results, {})
    graph = lowered(model)
    assert spaces(graph)["cuda.rows"] + spaces(graph)["cuda.reduce"] == kernels
    for found, wanted in zip(emulated(graph, [x]), reference(model, {"x": x}), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def quantiser(x: str, shape: tuple[int, ...]) -> tuple[Any, dict[str, tuple[str, tuple[int, ...]]]]:
    """A ``DynamicQuantizeLinear`` and its results."""
    node = helper.make_node("DynamicQuantizeLinear", [x], ["y", "scale", "zero"])
    return node, {"y": ("uint8", shape), "scale": ("float32", ()), "zero": ("uint8", ())}


def _behind_a_norm(size: int) -> tuple[onnx.ModelProto, np.ndarray]:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((3, size // 3, 384)).astype("float32")
    node, results = quantiser("n", x.shape)
    nodes = [helper.make_node("LayerNormalization", ["x", "g", "b"], ["n"], axis=-1), node]
    constants = {"g": rng.uniform(0.5, 2, 384).astype("float32"), "b": rng.uniform(-1, 1, 384).astype("float32")}
    return model_of(nodes, {"x": x}, {"n": ("float32", x.shape), **results}, constants), x


@needs_gxx
def test_a_norm_finds_its_extremes() -> None:
    """Exactly those of the rows that it writes."""
    model, x = _behind_a_norm(30)
    graph = lowered(model)
    assert spaces(graph)["cuda.rows"] == 2 and not spaces(graph)["cuda.reduce"]
    normal, *found = emulated(graph, [x])
    np.testing.assert_allclose(normal, reference(model, {"x": x})[0], atol=1e-5)
    node, results = quantiser("x", x.shape)
    again = model_of([node], {"x": normal}, results, {})
    for one, other in zip(found, reference(again, {"x": normal}), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_gxx
@pytest.mark.parametrize(("kinds", "zeros"), [(("uint8", "int8"), (131, 0)), (("uint8", "uint8"), (255, 1)),
                                              (("int8", "uint8"), (-128, 255))], ids=str)
def test_products_of_bytes(kinds: tuple[str, str], zeros: tuple[int, int]) -> None:
    """Exact, of all types, extremes, and zero points of each column."""
    rng = np.random.default_rng(7)
    a, b = (rng.choice(np.array([*range(limits.min, limits.max + 1), *[limits.min, limits.max] * 64], kind), shape)
            for kind, limits, shape in ((kind, np.iinfo(kind), shape) for kind, shape in zip(
                kinds, ((2, 20, 96), (96, 72)), strict=True)))
    columns = np.array(rng.integers(0, 100, 72) if zeros[1] else np.zeros(72), kinds[1])
    node = helper.make_node("MatMulInteger", ["a", "b", "za", "zb"], ["y"])
    model = model_of([node], {"a": a}, {"y": ("int32", (2, 20, 72))}, {
        "b": b, "za": np.array(zeros[0], kinds[0]), "zb": columns})
    graph = lowered(model)
    assert spaces(graph)["cuda.mma"] == 1 and "cuda.fallback" not in spaces(graph)
    (found,) = emulated(graph, [a])
    wanted = (a.astype("int64") - zeros[0]) @ (b.astype("int64") - columns)
    assert found.dtype == np.int32 and wanted.std() > 0
    np.testing.assert_array_equal(found, wanted)


@needs_gxx
@pytest.mark.parametrize("zeros", [(128, 120, 131), (100, 129, 3)], ids=str)
def test_attention_in_bytes(zeros: tuple[int, int, int]) -> None:
    """Heads are read where projections leave them and written where the next one reads them; sums are exact."""
    rng = np.random.default_rng(8)
    feeds = {name: rng.integers(0, 256, (2, 24, 3, 64)).astype("uint8") for name in "qkv"}
    constants: dict[str, np.ndarray] = {"s": np.array(2**-6, "float32"), "t": np.array(2**-1, "float32"),
                                        "u": np.array(2.0, "float32")}
    nodes: list[Any] = []
    for name, zero in zip("qkv", zeros, strict=True):
        constants[f"z{name}"] = np.array(zero, "uint8")
        nodes += [helper.make_node("DequantizeLinear", [name, "s", f"z{name}"], [f"d{name}"]),
                  helper.make_node("Transpose", [f"d{name}"], [f"h{name}"],
                                   perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])]
    constants["zs"] = np.array(127, "uint8")
    nodes += [helper.make_node("MatMul", ["hq", "hk"], ["s0"]),
              helper.make_node("QuantizeLinear", ["s0", "t", "zs"], ["s1"]),
              helper.make_node("DequantizeLinear", ["s1", "t", "zs"], ["s2"]),
              helper.make_node("MatMul", ["s2", "hv"], ["y0"]),
              helper.make_node("QuantizeLinear", ["y0", "u", "zs"], ["y1"]),
              helper.make_node("Transpose", ["y1"], ["y"], perm=[0, 2, 1, 3])]
    model = model_of(nodes, feeds, {"y": ("uint8", (2, 24, 3, 64))}, constants)
    graph = lowered(model)
    found = spaces(graph)
    assert found.pop("cuda.mma") + found.pop("cuda.wgmma", 0) == 2 and found == {"cuda.elementwise": 3}
    (result,), (wanted,) = emulated(graph, list(feeds.values())), reference(model, feeds)
    assert wanted.std() > 5
    np.testing.assert_array_equal(result, wanted)


