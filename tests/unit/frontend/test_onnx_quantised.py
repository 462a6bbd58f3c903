"""``QuantizeLinear`` and its like against onnx's reference evaluator, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from quantised_nodes import extremes, imported_numbers, model_of, onnxruntime_numbers, operators

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.pipeline import lower
from mlc.target import resolve
from mlc.testing.targets import runs

#: a tie between two integers at every step, ends that saturate, and beyond what int32 holds
VALUES = np.concatenate([np.arange(-300, 300, 0.25), [1e30, -1e30, np.inf, -np.inf, 3e9, -3e9]]).astype("float32")


def _quantise(x: np.ndarray, constants: dict[str, np.ndarray], dtype: str, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("QuantizeLinear", ["x", *constants], ["y"], **attributes)
    return model_of([node], {"x": x}, constants, {"y": (dtype, x.ndim)}, opset=23)


def _dequantise(x: np.ndarray, constants: dict[str, np.ndarray], dtype: str, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("DequantizeLinear", ["x", *constants], ["y"], **attributes)
    return model_of([node], {"x": x}, constants, {"y": (dtype, x.ndim)}, opset=23)


def _saturated(x: np.ndarray, scale: float, zero_point: int, dtype: str) -> np.ndarray:
    """By ONNX's definition in float64; the quotient is that of float32. The reference converts to int32 before it
    saturates."""
    info = np.iinfo(dtype)
    return np.clip(np.rint((x / np.float32(scale)).astype("float64")) + zero_point, info.min, info.max).astype(dtype)


@pytest.mark.parametrize(("dtype", "zero_point"), [
    ("uint8", 0), ("uint8", 255), ("uint8", 128), ("int8", -128), ("int8", 127), ("int8", 0), ("int16", -7),
    ("uint16", 65535),
])
def test_rounds_half_to_even_and_saturates(dtype: str, zero_point: int) -> None:
    model = _quantise(VALUES, {"s": np.float32(0.5), "z": np.array(zero_point, dtype)}, dtype)
    assert operators(model) == ["relax.quantize"]
    wanted = _saturated(VALUES, 0.5, zero_point, dtype)
    np.testing.assert_array_equal(imported_numbers(model, {"x": VALUES})[0], wanted)
    np.testing.assert_array_equal(mlc.compile(model, log=False)(VALUES)[0], wanted)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_scale_for_each_channel(dtype: str, axis: int) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4, 5, 6)) * 40).astype("float32")
    scale = rng.uniform(0.1, 0.4, x.shape[axis]).astype("float32")
    zero_point = extremes(rng, scale.shape, dtype)
    model = _quantise(x, {"s": scale, "z": zero_point}, dtype, axis=axis)
    assert operators(model) == ["relax.quantize"]
    (quantised,) = imported_numbers(model, {"x": x})
    np.testing.assert_array_equal(quantised, ReferenceEvaluator(model).run(None, {"x": x})[0])
    back = _dequantise(quantised, {"s": scale, "z": zero_point}, "float32", axis=axis)
    assert operators(back) == ["relax.dequantize"]
    feeds = {"x": extremes(rng, x.shape, dtype)}
    np.testing.assert_array_equal(imported_numbers(back, feeds)[0], ReferenceEvaluator(back).run(None, feeds)[0])


def test_one_element_is_one_scale() -> None:
    """Of whatever shape, it is a constant without dimensions in the module."""
    x = np.random.default_rng(1).standard_normal((3, 4)).astype("float32")
    model = _quantise(x, {"s": np.full(1, 0.01, "float32"), "z": np.full(1, 3, "uint8")}, "uint8", axis=0)
    (call,) = [b.value for b in load_model(model).mod["main"].body.blocks[0].bindings][:1]
    assert [list(arg.ty.shape) for arg in call.args[1:]] == [[], []]
    assert [str(arg.ty.dtype) for arg in call.args[1:]] == ["float32", "uint8"]
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], wanted)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_scale_for_each_block(axis: int, zero: bool) -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((4, 6, 8)) * 30).astype("float32")
    shape = [n // 2 if i == axis else n for i, n in enumerate(x.shape)]
    constants = {"s": rng.uniform(0.1, 0.5, shape).astype("float32")}
    if zero:
        constants["z"] = extremes(rng, shape, "int8")
    attributes = {"axis": axis, "block_size": 2} | ({} if zero else {"output_dtype": TensorProto.INT8})
    model = _quantise(x, constants, "int8", **attributes)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], wanted)
    whole = extremes(rng, x.shape, "int8")
    back = _dequantise(whole, constants, "float32", axis=axis, block_size=2)
    np.testing.assert_array_equal(
        imported_numbers(back, {"x": whole})[0], ReferenceEvaluator(back).run(None, {"x": whole})[0]
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_a_last_block_that_is_shorter(axis: int) -> None:
    """As onnxruntime's quantiser writes it where a block does not divide; ONNX's evaluator refuses it."""
    rng, block = np.random.default_rng(21), 4
    x = (rng.standard_normal((10, 7)) * 30).astype("float32")
    shape = [-(-n // block) if i == axis else n for i, n in enumerate(x.shape)]
    constants = {"s": rng.uniform(0.1, 0.5, shape).astype("float32"), "z": extremes(rng, shape, "int8")}
    scale, zero = (np.take(np.repeat(a, block, axis=axis), range(x.shape[axis]), axis) for a in constants.values())
    model = _quantise(x, constants, "int8", axis=axis, block_size=block)
    wanted = np.clip(np.rint(x / scale) + zero, -128, 127)
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], wanted)
    whole = extremes(rng, x.shape, "int8")
    back = _dequantise(whole, constants, "float32", axis=axis, block_size=block)
    np.testing.assert_array_equal(imported_numbers(back, {"x": whole})[0], (whole - zero.astype("float32")) * scale)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_of_16_bit_numbers(dtype: Any) -> None:
    """The quotient is rounded to 16 bits before it is rounded to an integer; a product is once."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((16, 64)) * 20).astype(dtype)
    constants = {"s": np.array(0.37, dtype), "z": np.array(-5, "int8")}
    model = _quantise(x, constants, "int8")
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], wanted)
    wide = _saturated(x.astype("float32"), float(constants["s"]), -5, "int8")
    assert (wide != wanted).any(), "the rounding of the quotient must show"
    back = _dequantise(wanted, constants, np.dtype(dtype).name)
    (numbers,) = imported_numbers(back, {"x": wanted})
    assert numbers.dtype == dtype
    np.testing.assert_array_equal(numbers, ReferenceEvaluator(back).run(None, {"x": wanted})[0])


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2"])
def test_integers_of_less_than_8_bits(dtype: str) -> None:
    """Inside a model: quantised, saturated at the type's ends, and back; as weights, in blocks."""
    kind, rng = getattr(ml_dtypes, dtype), np.random.default_rng(4)
    x = (rng.standard_normal((4, 32)) * 6).astype("float32")
    constants = {"s": np.float32(0.75), "z": np.array(1, kind)}
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    model = model_of(nodes, {"x": x}, constants, {"y": ("float32", 2)}, opset=25)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], wanted)
    assert len(np.unique(wanted)) == 1 << ml_dtypes.iinfo(kind).bits

    weights = rng.integers(ml_dtypes.iinfo(kind).min, ml_dtypes.iinfo(kind).max, (32, 5), endpoint=True).astype(kind)
    constants = {"w": weights, "s": rng.uniform(0.1, 0.5, (4, 5)).astype("float32"),
                 "z": rng.integers(0, 1, (4, 5), endpoint=True).astype(kind)}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0, block_size=8),
             helper.make_node("MatMul", ["x", "d"], ["y"])]
    model = model_of(nodes, {"x": x}, constants, {"y": ("float32", 2)}, opset=25)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(imported_numbers(model, {"x": x})[0], wanted, rtol=1e-5, atol=1e-5)
    assert operators(model)[:2] == ["relax.reshape", "relax.astype"], "the weights must stay integers"


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_scale_of_16_bits_for_each_block(dtype: Any, zero: bool) -> None:
    """Each product is rounded to 16 bits once, whatever the integers' zero points are."""
    rng = np.random.default_rng(15)
    x = extremes(rng, (8, 12), "int8")
    constants = {"x": x, "s": (rng.uniform(0.1, 0.5, (2, 12)) * rng.choice([-1, 1], (2, 12))).astype(dtype)}
    if zero:
        constants["z"] = extremes(rng, (2, 12), "int8")
    node = helper.make_node("DequantizeLinear", list(constants), ["w"], axis=0, block_size=4)
    whole = helper.make_node("Mul", ["one", "w"], ["y"])
    model = model_of([node, whole], {"one": np.ones((8, 12), dtype)}, constants, {"y": (np.dtype(dtype).name, 2)})
    feeds = {"one": np.ones((8, 12), dtype)}
    zeros = np.repeat(constants["z"], 4, axis=0) if zero else np.zeros((8, 12))
    wanted = (x.astype("float64") - zeros) * np.repeat(constants["s"], 4, axis=0).astype("float64")
    np.testing.assert_array_equal(imported_numbers(model, feeds)[0], wanted.astype(dtype))


def _weights_of_4_bits(kind: Any, dtype: Any, axis: int, block: int) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """A product with weights of 4 bits, its data, and the result in float64; ``block`` 0 is a scale for each column."""
    rng, info = np.random.default_rng(16), ml_dtypes.iinfo(kind)
    shape = (512, 256) if axis == 0 else (256, 512)
    of_columns = [1 if i == axis else extent for i, extent in enumerate(shape)]
    scales = [extent // block if i == axis else extent for i, extent in enumerate(shape)] if block else of_columns
    weights = rng.integers(info.min, info.max, shape, endpoint=True).astype(kind)
    steps = rng.uniform(0.01, 0.1, scales).astype(dtype)
    zeros = rng.integers(info.min, info.max, scales, endpoint=True).astype(kind)
    every = [np.repeat(a.astype("float64"), block or 512, axis=axis) for a in (steps, zeros)]
    x = rng.standard_normal((3, 512)).astype(dtype)
    exact = (weights.astype("float64") - every[1]) * every[0]
    given = {"axis": axis, "block_size": block} if block else {"axis": 1 - axis}
    constants = {"w": weights, "s": steps if block else steps.ravel(), "z": zeros if block else zeros.ravel()}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], **given),
             *([helper.make_node("Transpose", ["d"], ["t"])] if axis else []),
             helper.make_node("MatMul", ["x", "t" if axis else "d"], ["y"])]
    model = model_of(nodes, {"x": x}, constants, {"y": (np.dtype(dtype).name, 2)}, opset=23)
    return model, x, x.astype("float64") @ (exact.T if axis else exact)


@pytest.mark.parametrize(("kind", "axis", "block"), [("int4", 0, 32), ("uint4", 1, 64), ("int4", 0, 0),
                                                     ("uint4", 1, 0)])
def test_weights_of_4_bits_with_scales_of_16_take_4_bits(kind: str, axis: int, block: int, tmp_path: Path) -> None:
    sizes = []
    for dtype in (np.float32, np.float16):
        model, x, wanted = _weights_of_4_bits(getattr(ml_dtypes, kind), dtype, axis, block)
        exe = mlc.compile(model, log=False)
        (found,) = exe(x)
        np.testing.assert_allclose(found.astype("float64"), wanted, rtol=1.01 * 2**-11, atol=1e-4)
        exe.save(tmp_path / "model.so")
        sizes.append((tmp_path / "model.so").stat().st_size)
    assert sizes[1] < sizes[0] + 512 * 256 // 8, "a copy in 16 bits would have four times as many bytes as the integers"


@pytest.mark.parametrize(("kind", "axis", "block"), [("int4", 0, 32), ("int4", 0, 0), ("uint4", 1, 0)])
def test_weights_of_4_bits_with_scales_of_bfloat16_take_4_bits(kind: str, axis: int, block: int) -> None:
    """In blocks, and with a scale for each column."""
    model, x, wanted = _weights_of_4_bits(getattr(ml_dtypes, kind), ml_dtypes.bfloat16, axis, block)
    exe = mlc.compile(model, log=False)
    np.testing.assert_allclose(exe(x)[0].astype("float64"), wanted, rtol=1.01 * 2**-8, atol=1e-4)
    taken = sum(int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize for entry in exe.metadata["weights"])
    assert taken <= 512 * 256 // 2 + 2 * 4 * 512 // 32 * 256


def test_weights_that_are_quantised_in_the_model_become_integers() -> None:
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((2, 8), (8, 3)))
    constants = {"w": w, "s": np.float32(0.02), "z": np.array(0, "int8")}
    nodes = [helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
             helper.make_node("MatMul", ["x", "d"], ["y"])]
    model = model_of(nodes, {"x": x}, constants, {"y": ("float32", 2)})
    assert operators(model) == ["relax.dequantize", "relax.matmul"]
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(imported_numbers(model, {"x": x})[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("x", [
    np.random.default_rng(6).standard_normal((3, 40)).astype("float32"), np.zeros((2, 3), "float32"),
    np.linspace(1, 9, 30, dtype="float32"), np.linspace(-9, -1, 30, dtype="float32"),
    np.full((2, 2), 1e-38, "float32"),
], ids=["random", "zeros", "positive", "negative", "tiny"])
def test_dynamic_quantisation(x: np.ndarray) -> None:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    outputs = {"y": ("uint8", x.ndim), "s": ("float32", 0), "z": ("uint8", 0)}
    model = model_of([node], {"x": x}, {}, outputs)
    found = imported_numbers(model, {"x": x})
    for ours, theirs in zip(found, ReferenceEvaluator(model).run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _within_a_step(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    (found,), (wanted,) = imported_numbers(model, feeds), ReferenceEvaluator(model).run(None, feeds)
    assert found.dtype == wanted.dtype and len(np.unique(wanted)) > 30
    apart = np.abs(found.astype("int32") - wanted.astype("int32"))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01


@pytest.mark.parametrize("end", ["min", "max"])
@pytest.mark.parametrize("channels", [False, True], ids=["tensor", "channels"])
@pytest.mark.parametrize(("x_type", "w_type"), [("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")])
def test_quantised_convolutions(x_type: str, w_type: str, channels: bool, end: str) -> None:
    """Grouped, with a border of the zero point and a bias; two dequantised inputs, a convolution and its bias."""
    rng = np.random.default_rng(8)
    x, w = extremes(rng, (2, 4, 9, 8), x_type), extremes(rng, (6, 2, 3, 3), w_type)
    scale = rng.uniform(0.001, 0.002, 6 if channels else ()).astype("float32")
    constants = {
        "xs": np.float32(0.02), "xz": np.array(getattr(np.iinfo(x_type), end), x_type), "w": w, "ws": scale,
        "wz": np.full(scale.shape, getattr(np.iinfo(w_type), end), w_type), "ys": np.float32(0.2),
        "yz": np.array(getattr(np.iinfo(x_type), end), x_type), "b": rng.integers(-9999, 9999, 6).astype("int32"),
    }
    sign = np.sign((x.astype(int) - constants["xz"]).sum() * (w.astype(int).mean() - constants["wz"].mean()))
    if (sign > 0) == (end == "max"):  # else everything saturates at the zero point's end
        constants["yz"] = np.array(np.iinfo(x_type).min if end == "max" else np.iinfo(x_type).max, x_type)
    node = helper.make_node("QLinearConv", ["x", *constants], ["y"], group=2, pads=[1, 1, 0, 1], strides=[2, 1])
    model = model_of([node], {"x": x}, constants, {"y": (x_type, 4)})
    _within_a_step(model, {"x": x})
    assert operators(model).count("relax.dequantize") == 3 and operators(model)[-1] == "relax.quantize"
    if channels and end == "max":
        (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
        apart = np.abs(mlc.compile(model, log=False)(x)[0].astype("int32") - wanted)
        assert apart.max() <= 1 and (apart > 0).mean() < 0.01


@pytest.mark.parametrize("of_b", ["one", "columns"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantised_products(dtype: str, of_b: str) -> None:
    rng = np.random.default_rng(9)
    a, b = extremes(rng, (2, 7, 40), dtype), extremes(rng, (40, 9), "int8")
    scale = rng.uniform(0.004, 0.008, 9 if of_b == "columns" else ()).astype("float32")
    constants = {"as": np.float32(0.05), "az": np.array(7, dtype), "b": b, "bs": scale,
                 "bz": extremes(rng, scale.shape, "int8"), "ys": np.float32(2.0), "yz": np.array(100, dtype)}
    node = helper.make_node("QLinearMatMul", ["a", *constants], ["y"])
    _within_a_step(model_of([node], {"a": a}, constants, {"y": (dtype, 3)}), {"a": a})


@pytest.mark.parametrize("rank", [1, 2])
def test_a_vector_by_a_quantised_matrix(rank: int) -> None:
    rng = np.random.default_rng(11)
    a = extremes(rng, (3, 40)[2 - rank:], "uint8")
    constants = {"as": np.float32(0.05), "az": np.array(7, "uint8"), "b": extremes(rng, (40, 64), "int8"),
                 "bs": np.float32(0.006), "ys": np.float32(0.5), "yz": np.array(100, "uint8")}
    nodes = [helper.make_node("DequantizeLinear", ["a", "as", "az"], ["x"]),
             helper.make_node("DequantizeLinear", ["b", "bs"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["p"]),
             helper.make_node("QuantizeLinear", ["p", "ys", "yz"], ["y"])]
    model = model_of(nodes, {"a": a}, constants, {"y": ("uint8", rank)})
    (wanted,) = ReferenceEvaluator(model).run(None, {"a": a})
    for target in ("native", "x86-64-v3") if runs("x86-64-v3") else ("native",):
        apart = np.abs(mlc.compile(model, target=target, log=False)(a)[0].astype("int32") - wanted)
        assert apart.max() <= 1 and (apart > 0).mean() < 0.02


@pytest.mark.parametrize(("scale", "zero_point"), [(6 / 255, 0), (0.04, 20)])
def test_clipped_convolutions_are_kernels_of_integers(scale: float, zero_point: int) -> None:
    """The bottleneck of a MobileNet, its ``Clip`` to six before each ``QuantizeLinear``."""
    rng = np.random.default_rng(14)
    constants = {"xs": np.float32(0.05), "xz": np.uint8(120), "low": np.float32(0), "six": np.float32(6),
                 "s": np.float32(scale), "z": np.uint8(zero_point)}
    nodes, given = [helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"])], ["q", "xs", "xz"]
    for i, shape in enumerate(((16, 8, 1, 1), (16, 1, 3, 3), (8, 16, 1, 1))):
        constants |= {f"w{i}": extremes(rng, shape, "int8"), f"ws{i}": rng.uniform(2e-3, 6e-3, shape[0]).astype("f")}
        nodes += [helper.make_node("DequantizeLinear", given, [f"d{i}"]),
                  helper.make_node("DequantizeLinear", [f"w{i}", f"ws{i}"], [f"v{i}"], axis=0),
                  helper.make_node("Conv", [f"d{i}", f"v{i}"], [f"c{i}"], group=16 // shape[1] if i == 1 else 1,
                                   pads=[shape[2] // 2] * 4),
                  helper.make_node("Clip", [f"c{i}", "low", "six"], [f"r{i}"]),
                  helper.make_node("QuantizeLinear", [f"r{i}", "s", "z"], [f"q{i}"])]
        given = [f"q{i}", "s", "z"]
    x = (3 * rng.standard_normal((1, 8, 14, 14))).astype("float32")
    model = model_of(nodes, {"x": x}, constants, {"q2": ("uint8", 4)})
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    assert {zero_point, round(6 / scale) + zero_point} <= set(wanted.ravel().tolist()), "both bounds must be met"
    apart = np.abs(mlc.compile(model, log=False)(x)[0].astype(int) - wanted)
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01
    lowered = lower(load_model(model).mod, resolve("native", threads=2)).module
    calls = [b.value for b in bindings(lowered["main"]) if op_name(b.value) == "relax.call_tir"]
    assert {str(call.ty.dtype) for call in calls} == {"uint8"}, "no kernel may write floats"


@pytest.mark.parametrize("form", ["pair", "operator", "integers"])
@pytest.mark.parametrize(("shape", "filters", "attributes"), [
    ((2, 8, 33), (12, 8, 3), {"pads": [1, 2], "strides": [2]}),
    ((2, 8, 33), (12, 4, 3), {"group": 2, "dilations": [3]}),
    ((2, 16, 40), (16, 1, 5), {"group": 16, "pads": [2, 2]}),
    ((1, 8, 6, 7, 9), (12, 8, 3, 3, 2), {"pads": [1, 1, 0, 1, 2, 1], "strides": [2, 1, 1]}),
    ((2, 8, 5, 6, 7), (12, 4, 1, 3, 3), {"group": 2}),
], ids=["line", "groups", "depthwise", "volume", "images"])
def test_convolutions_of_lines_and_volumes_are_kernels_of_integers(
    shape: tuple[int, ...], filters: tuple[int, ...], attributes: dict[str, Any], form: str
) -> None:
    """As a pair of ``DequantizeLinear`` around ``Conv``, as ``QLinearConv`` and as ``ConvInteger``, with a border of
    the zero point and a bias."""
    rng = np.random.default_rng(17)
    x, w = extremes(rng, shape, "uint8"), extremes(rng, filters, "int8")
    steps = rng.uniform(0.001, 0.002, filters[0]).astype("float32")
    constants = {"xs": np.float32(0.02), "xz": np.uint8(117), "w": w, "ws": steps, "wz": np.zeros(filters[0], "int8"),
                 "ys": np.float32(0.03), "yz": np.uint8(130), "b": rng.integers(-9999, 9999, filters[0], "int32")}
    if form == "pair":
        constants["bs"] = constants["xs"] * steps
        nodes = [helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["d"]),
                 helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["v"], axis=0),
                 helper.make_node("DequantizeLinear", ["b", "bs"], ["c"], axis=0),
                 helper.make_node("Conv", ["d", "v", "c"], ["r"], **attributes),
                 helper.make_node("QuantizeLinear", ["r", "ys", "yz"], ["y"])]
    elif form == "operator":
        nodes = [helper.make_node("QLinearConv", ["x", *constants], ["y"], **attributes)]
    else:
        nodes = [helper.make_node("ConvInteger", ["x", "w", "xz"], ["y"], **attributes)]
    model = model_of(nodes, {"x": x}, constants, {"y": ("int32" if form == "integers" else "uint8", len(shape))})
    (wanted,) = onnxruntime_numbers(model, {"x": x})
    apart = np.abs(mlc.compile(model, log=False)(x)[0].astype(int) - wanted)
    assert len(np.unique(wanted)) > 100 and apart.max() <= (form != "integers") and (apart > 0).mean() < 0.01
    lowered = lower(load_model(model).mod, resolve("native", threads=2)).module
    calls = [b.value for b in bindings(lowered["main"]) if op_name(b.value) == "relax.call_tir"]
    assert "float32" not in {str(call.ty.dtype) for call in calls}, "no kernel may write floats"


@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-1.0, 3.3), (0.3, None), (None, 2.0)])
@pytest.mark.parametrize(("scale", "zero_point"), [(0.05, 3), (0.031, 100)])
def test_clipping_quantised_numbers_is_exact(bounds: tuple[float, float], scale: float, zero_point: int) -> None:
    """Of all bytes, on to the same scale and to another."""
    every = np.arange(256, dtype="uint8").reshape(16, 16)
    constants = {"s": np.float32(0.05), "z": np.uint8(3), "t": np.float32(scale), "y": np.uint8(zero_point)}
    constants |= {name: np.float32(bound) for name, bound in zip("lh", bounds, strict=True) if bound is not None}
    nodes = [helper.make_node("DequantizeLinear", ["x", "s", "z"], ["d"]),
             helper.make_node("Clip", ["d", *(name if name in constants else "" for name in "lh")], ["c"]),
             helper.make_node("QuantizeLinear", ["c", "t", "y"], ["q"])]
    model = model_of(nodes, {"x": every}, constants, {"q": ("uint8", 2)})
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": every})
    np.testing.assert_array_equal(mlc.compile(model, log=False)(every)[0], wanted)
    assert len(np.unique(wanted)) > 5


_IMAGE = np.zeros((2, 6, 4), "float32")


@pytest.mark.parametrize(("scale", "zero_point", "attributes", "message"), [
    (np.float32(0), np.uint8(0), {}, "scale must be finite and positive, got 0"),
    (np.float32(-0.5), np.uint8(0), {}, "scale must be finite and positive, got -0.5"),
    (np.array([0.1] * 5 + [np.nan], "float32"), np.zeros(6, "uint8"), {}, "finite and positive, got nan"),
    (np.float32(np.inf), np.uint8(0), {}, "finite and positive, got inf"),
    (np.ones(5, "float32"), np.zeros(5, "uint8"), {}, r"one element, or the 6 of axis 1, got the shape \[5\]"),
    (np.ones(6, "float32"), np.zeros(6, "uint8"), {"axis": 3}, "axis must be from -3 to 2, got 3"),
    (np.ones(6, "float32"), np.zeros(6, "uint8"), {"axis": -4}, "axis must be from -3 to 2, got -4"),
    (np.ones(6, "float32"), np.zeros(3, "uint8"), {}, r"zero point must have the shape of its scale, \[6\], got \[3\]"),
    (np.ones((2, 3, 4), "float32"), np.zeros((2, 3, 4), "uint8"), {"block_size": 4}, r"a block, the shape \[2, 2, 4\]"),
    (np.ones((2, 3, 4), "float32"), np.zeros((2, 3, 4), "uint8"), {"block_size": -2}, "must not be negative, got -2"),
    (np.ones((2, 2, 4), "float32"), np.zeros((2, 2, 4), "uint8"), {"block_size": 2}, r"one element a block"),
])
def test_bad_parameters(scale: Any, zero_point: Any, attributes: dict[str, Any], message: str) -> None:
    constants = {"s": np.asarray(scale), "z": np.asarray(zero_point)}
    for model in (_quantise(_IMAGE, constants, "uint8", **attributes),
                  _dequantise(_IMAGE.astype("uint8"), constants, "float32", **attributes)):
        with pytest.raises(ModelError, match=message) as caught:
            load_model(model)
        assert "\n" not in str(caught.value)


def test_padding_with_a_dequantised_number() -> None:
    """Its number must be known: it is no weight whose width would be lost."""
    x = np.random.default_rng(22).standard_normal((2, 3)).astype("float32")
    nodes = [helper.make_node("DequantizeLinear", ["v", "s", "z"], ["d"]),
             helper.make_node("Pad", ["x", "p", "d"], ["y"])]
    constants = {"v": np.array(7, "int8"), "s": np.float32(0.3), "z": np.array(-4, "int8"), "p": np.array([0, 1, 0, 2])}
    model = model_of(nodes, {"x": x}, constants, {"y": ("float32", 2)})
    wanted = np.pad(x, ((0, 0), (1, 2)), constant_values=np.float32(11) * np.float32(0.3))
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], wanted)
    constants["z"] = np.array(4, "uint8")
    with pytest.raises(ModelError, match="type of what is quantised, int8, got uint8"):
        load_model(model_of(nodes, {"x": x}, constants, {"y": ("float32", 2)}))


def test_zero_points_of_a_wrong_type() -> None:
    constants = {"s": np.float32(1), "z": np.array(0, "int8")}
    with pytest.raises(ModelError, match="type of what is quantised, uint8, got int8"):
        load_model(_dequantise(_IMAGE.astype("uint8"), constants, "float32"))
    with pytest.raises(ModelError, match="output_dtype UINT8 does not match"):
        load_model(_quantise(_IMAGE, constants, "uint8", output_dtype=TensorProto.UINT8))
    with pytest.raises(ModelError, match="of type int32 must be 0"):
        load_model(_dequantise(_IMAGE.astype("int32"), {"s": np.float32(1), "z": np.array(1, "int32")}, "float32"))


def test_narrow_integers_at_the_border() -> None:
    constants = {"s": np.float32(1), "z": np.array(0, ml_dtypes.int4)}
    with pytest.raises(ModelError, match="a type that arrays have, but y of quantised is int4"):
        load_model(_quantise(_IMAGE, constants, "int4"))


def test_floating_point_of_8_bits() -> None:
    weights = np.ones((3, 4), ml_dtypes.float8_e4m3fn)
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["y"])
    model = model_of([node], {}, {"w": weights, "s": np.float32(1)}, {"y": ("float32", 2)})
    with pytest.raises(ModelError, match="must be integers of at most 16 bits or int32, got float8_e4m3fn"):
        load_model(model)


def test_weights_in_blocks_may_have_negative_scales() -> None:
    x = np.arange(-8, 8, dtype="int8").reshape(2, 8)
    scale = np.array([[-0.5, 0.25], [0.0, -2.0]], "float32")
    model = _dequantise(x, {"s": scale}, "float32", block_size=4)
    np.testing.assert_array_equal(imported_numbers(model, {"x": x})[0], x * np.repeat(scale, 4, axis=1))
