"""Code for ranges of sizes stays within its arrays: each lies between inaccessible pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.testing import guard

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"needs {guard.missing()}")

RNG = np.random.default_rng(5)


def _model(
    nodes: list[onnx.NodeProto], shape: tuple[str | int, ...], weights: dict[str, np.ndarray],
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def _weight(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def _quantised(value: str, made: str, scale: float = 0.05) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """``made``, of the numbers ``value`` rounded to 8 bits."""
    names = [f"{made}_scale", f"{made}_zero"]
    nodes = [helper.make_node("QuantizeLinear", [value, *names], [f"{made}_integers"]),
             helper.make_node("DequantizeLinear", [f"{made}_integers", *names], [made])]
    return nodes, dict(zip(names, (np.float32(scale), np.uint8(128)), strict=True))


def _constant(name: str, value: np.ndarray) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A weight of 8 bits."""
    scale = np.float32(np.abs(value).max() / 127)
    names = [f"{name}_integers", f"{name}_scale"]
    return [helper.make_node("DequantizeLinear", names, [name])], {
        names[0]: np.round(value / scale).astype(np.int8), names[1]: scale}


def _dense() -> onnx.ModelProto:
    return _model([helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
                  ("n", 64), {"w": _weight(64, 80)})


def _dense_of_integers() -> onnx.ModelProto:
    given, constants = _quantised("x", "q")
    weight, more = _constant("w", _weight(256, 128))
    made, last = _quantised("h", "y", 1.0)
    return _model([*given, *weight, helper.make_node("MatMul", ["q", "w"], ["h"]), *made], ("n", 256),
                  constants | more | last)


def _dense_of_bfloats() -> onnx.ModelProto:
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], ("n", 64),
                  {"w": _weight(64, 48).astype(ml_dtypes.bfloat16)}, TensorProto.BFLOAT16)


def _activations() -> onnx.ModelProto:
    given, constants = _quantised("x", "q")
    return _model([*given, helper.make_node("Mul", ["q", "x"], ["h"]), helper.make_node("Softmax", ["h"], ["y"])],
                  ("b", "n", 40), constants)


def _images() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4),
        helper.make_node("Conv", ["a", "d"], ["b"], pads=[1] * 4, strides=[2, 2], group=24),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Conv", ["c", "p"], ["y"]),
    ]
    return _model(nodes, (1, 8, "h", "w"), {"w": _weight(24, 8, 3, 3), "d": _weight(24, 1, 3, 3),
                                            "p": _weight(16, 24, 1, 1)})


def _images_of_integers() -> onnx.ModelProto:
    given, constants = _quantised("x", "q")
    first, one = _constant("w", _weight(32, 16, 3, 3))
    between, two = _quantised("a", "r", 1.0)
    second, three = _constant("p", _weight(32, 32, 1, 1))
    nodes = [*given, *first, helper.make_node("Conv", ["q", "w"], ["a"], pads=[1] * 4), *between, *second,
             helper.make_node("Conv", ["r", "p"], ["y"])]
    return _model(nodes, (1, 16, "h", "w"), constants | one | two | three)


def _attention() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"]), helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    return _model(nodes, ("b", "n", 32), {})


def _rounded_scores() -> onnx.ModelProto:
    """Products of rows with rows whose result is rounded before anything else is done with it."""
    made, constants = _quantised("s", "y", 0.2)
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), helper.make_node("MatMul", ["x", "t"], ["s"])]
    return _model([*nodes, *made], ("b", "n", 32), constants)


ROWS = ("n", "1..48", ["1", "2", "3", "5", "7", "13", "31", "47", "48"])
IMAGES = ("h,w", "9..40,9..40", ["9,9", "9,40", "17,23", "28,28", "31,33", "40,39"])
TEXTS = ("b,n", "1..3,1..40", ["1,1", "1,3", "2,7", "1,16", "3,33", "3,40"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("made", "shape", "ranges", "options"), [
    pytest.param(_dense_of_integers, "{},256", ROWS, {}, id="dense of integers"),
    pytest.param(_dense, "{},64", ROWS, {}, id="dense"),
    pytest.param(_dense_of_bfloats, "{},64", ROWS, {}, id="dense of bfloat16"),
    pytest.param(_dense, "{},64", ROWS, {"precision": "f16"}, id="dense, weights of float16"),
    pytest.param(_rounded_scores, "{},32", TEXTS, {}, id="rounded scores"),
    pytest.param(_activations, "{},40", TEXTS, {}, id="activations"),
    pytest.param(_images, "1,8,{}", IMAGES, {}, id="images"),
    pytest.param(_attention, "{},32", TEXTS, {}, id="attention"),
    pytest.param(_images_of_integers, "1,16,{}", IMAGES, {}, id="images of integers"),
    pytest.param(_images, "1,8,{}", IMAGES, {"precision": "bf16"}, id="images in bfloat16"),
])
def test_no_access_is_beyond_an_array(
    made: Callable[[], onnx.ModelProto], shape: str, ranges: tuple[str, str, list[str]], options: dict[str, str],
    tmp_path: Path,
) -> None:
    _, free, sizes = ranges
    path = tmp_path / "model.so"
    mlc.compile(made(), log=False, shapes={"x": shape.format(free)}, **options).save(path)
    assert not guard.faults(path, [shape.format(size) for size in sizes])


@pytest.mark.parametrize(("position", "faults"), [(15, False), (16, True), (-1, True)])
def test_an_access_beyond_an_array_faults(position: int, faults: bool, tmp_path: Path) -> None:
    program = tmp_path / "access.py"
    program.write_text(
        "import ctypes\n"
        "from mlc.artifact.runtime import array_of, empty_tensor\n"
        "array = array_of(empty_tensor((1024,), 'float32'))\n"  # a page
        f"print(ctypes.c_float.from_address(array.ctypes.data + 4 * (1008 * ({position} > 0) + {position})).value)\n")
    ended = subprocess.run([sys.executable, str(program)], env={**os.environ, "LD_PRELOAD": str(guard.library())},
                           capture_output=True, text=True, check=False)
    assert bool(ended.returncode) == faults
    assert bool(ended.stdout.strip()) != faults
