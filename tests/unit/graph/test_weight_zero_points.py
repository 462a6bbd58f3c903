"""Products with weights whose zero points 8 signed bits do not hold add up integers: bit for bit what onnx's reference
evaluator says, where scales are powers of two and so nothing rounds."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlc

ROWS, DEPTH, COLUMNS = 32, 230, 200  # sums that float32 holds


def ends(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random, with every third value at an end of its range."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    values = rng.integers(low, high + 1, shape)
    return np.where(rng.random(shape) < 1 / 3, rng.choice([low, high], shape), values).astype(dtype)


def model(data: str, weight: str, zero: int, channels: bool) -> onnx.ModelProto:
    """Integers to numbers through DequantizeLinear and MatMul."""
    rng = np.random.default_rng(abs(zero))
    count = COLUMNS if channels else 1
    points = ends(rng, (count,), weight)
    points[-1] = np.iinfo(weight).max
    constants = {
        "xs": np.float32(2.0**-4), "xz": np.array(zero, data), "w": ends(rng, (DEPTH, COLUMNS), weight),
        "ws": (2.0 ** -rng.integers(5, 8, count)).astype("float32"), "wz": points,
    }
    if not channels:
        constants |= {name: constants[name][0] for name in ("ws", "wz")}
    nodes = [helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xf"]),
             helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], **({"axis": 1} if channels else {})),
             helper.make_node("MatMul", ["xf", "wf"], ["y"])]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(data))
    graph = helper.make_graph(
        nodes, "product", [helper.make_tensor_value_info("x", kind, [2, ROWS, DEPTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, ROWS, COLUMNS])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize(("data", "weight", "zero", "channels"), [
    ("uint8", "uint8", 0, True), ("uint8", "uint8", 255, False), ("int8", "int8", -128, True),
    ("int8", "int8", 127, True), ("uint8", "int8", 77, False),
])
def test_integers_are_those_of_the_reference(data: str, weight: str, zero: int, channels: bool) -> None:
    given = model(data, weight, zero, channels)
    x = ends(np.random.default_rng(3), (2, ROWS, DEPTH), data)
    (wanted,) = ReferenceEvaluator(given).run(None, {"x": x})
    assert wanted.std() > 1
    exe = mlc.compile(given, log=False)
    np.testing.assert_array_equal(exe(x)[0], wanted)
    largest = max(exe.metadata["weights"], key=lambda entry: int(np.prod(entry["shape"])))
    assert largest["dtype"] in ("int8", "int16")
