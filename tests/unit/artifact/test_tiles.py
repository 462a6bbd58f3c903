"""Whole models for Sapphire Rapids, on a CPU whose AMX is emulated: compiled, stored, loaded and run in a child that
must ask the kernel for tiles, and compared with onnx's reference evaluator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mlc.cpu import host_cpu
from mlc.testing import amx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(amx.missing()), reason=f"{amx.missing()} must be there"),
]

_CHILD = """
import json, sys
import numpy as np
import mlc
from mlc.testing import amx
folder, precision = sys.argv[1:3]
mlc.compile(folder + "/model.onnx", target=amx.target(2), precision=precision).save(folder + "/model.so")
exe = mlc.load(folder + "/model.so")
with amx.counted() as counts:
    found = exe(np.load(folder + "/x.npy"))
np.save(folder + "/found.npy", found[0])
print(json.dumps({"counts": counts, "spaces": [f.get("space") for f in exe.metadata["functions"]]}))
"""
#: a step of every quantised value
SCALE = np.float32(0.1)


def layers(rows: int, sizes: Sequence[int], quantised: bool) -> onnx.ModelProto:
    """``x -> relu(x W + b)`` for each pair of ``sizes``, quantised per channel with zero points that are not zero."""
    rng, nodes, constants = np.random.default_rng(len(sizes) + rows), [], []

    def constant(name: str, array: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(array, name))
        return name

    def add(op: str, inputs: Sequence[str], name: str, **attributes: int) -> str:
        nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def rounded(value: str, number: int) -> str:
        if not quantised:
            return value
        pair = constant(f"s{number}", SCALE), constant(f"z{number}", np.uint8(number * 17 % 256))
        return add("DequantizeLinear", (add("QuantizeLinear", (value, *pair), f"q{number}"), *pair), f"d{number}")

    value = rounded("x", 7)
    for number, (depth, columns) in enumerate(pairwise(sizes)):
        scales = rng.uniform(0.5, 2, columns).astype("float32") / (90 * depth**0.5)
        if quantised:
            weight = constant(f"w{number}", rng.integers(-128, 128, (depth, columns)).astype("int8"))
            zeros = constant(f"wz{number}", np.zeros(columns, "int8"))
            weight = add("DequantizeLinear", (weight, constant(f"ws{number}", scales), zeros), f"wd{number}", axis=1)
        else:
            weight = constant(f"w{number}", (rng.standard_normal((depth, columns)) / depth**0.5).astype("float32"))
        bias = constant(f"b{number}", rng.standard_normal(columns).astype("float32"))
        value = add("Relu", (add("Add", (add("MatMul", (value, weight), f"m{number}"), bias), f"a{number}"),),
                    f"r{number}")
        value = rounded(value, 8 + number)
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, rows, size])
              for name, size in (("x", sizes[0]), (value, sizes[-1]))]
    graph = helper.make_graph(nodes, "layers", shapes[:1], shapes[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def images(size: int, channels: Sequence[int], quantised: bool) -> onnx.ModelProto:
    """Convolutions of 3x3 and 1x1 in turn, every third one with a stride of 2; the last one is added to its input."""
    rng, nodes, constants, whole = np.random.default_rng(size), [], [], size

    def constant(name: str, array: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(array, name))
        return name

    def add(op: str, inputs: Sequence[str], name: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def rounded(value: str, number: int) -> str:
        if not quantised:
            return value
        pair = constant(f"s{number}", SCALE), constant(f"z{number}", np.uint8(number * 19 % 256))
        return add("DequantizeLinear", (add("QuantizeLinear", (value, *pair), f"q{number}"), *pair), f"d{number}")

    value, before = rounded("x", 6), ""
    for number, (depth, filters) in enumerate(pairwise(channels)):
        side = 1 if number % 2 else 3
        each = depth * side * side
        if quantised:
            weight = constant(f"w{number}", rng.integers(-128, 128, (filters, depth, side, side)).astype("int8"))
            scales = rng.uniform(0.5, 2, filters).astype("float32") / (90 * each**0.5)
            scaled = constant(f"ws{number}", scales), constant(f"wz{number}", np.zeros(filters, "int8"))
            weight = add("DequantizeLinear", (weight, *scaled), f"wd{number}", axis=0)
        else:
            values = rng.standard_normal((filters, depth, side, side)) * (2 / each) ** 0.5
            weight = constant(f"w{number}", values.astype("float32"))
        bias = constant(f"b{number}", rng.standard_normal(filters).astype("float32"))
        strides, before = [2, 2] if number % 3 == 1 else [1, 1], value
        value = add("Conv", (value, weight, bias), f"c{number}", pads=[side // 2] * 4, strides=strides)
        if number == len(channels) - 2:
            value = add("Add", (value, before), "sum")
        value = rounded(add("Relu", (value,), f"r{number}"), 7 + number)
        size = -(-size // strides[0])
    shapes = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels[0], whole, whole]),
              helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, channels[-1], size, size])]
    graph = helper.make_graph(nodes, "images", shapes[:1], shapes[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _run(folder: Path, model: onnx.ModelProto, x: np.ndarray, precision: str = "f32") -> tuple[np.ndarray, dict]:
    onnx.save(model, folder / "model.onnx")
    np.save(folder / "x.npy", x)
    done = subprocess.run([sys.executable, "-c", _CHILD, str(folder), precision], capture_output=True, text=True,
                          check=False, env={**os.environ, **amx.environment(folder)})
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(folder / "found.npy"), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("rows", [32, 50])
def test_quantised_layers(rows: int, tmp_path: Path) -> None:
    """Within a step of the reference, whose products are of float32; rows that make no whole tiles are padded."""
    model = layers(rows, (256, 512, 256, 128), quantised=True)
    x = np.random.default_rng(1).uniform(-3, 3, (1, rows, 256)).astype("float32")
    found, said = _run(tmp_path, model, x)
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    assert np.unique(expected).size > 20
    assert np.abs(found - expected).max() <= SCALE * 1.01
    assert np.mean(found != expected) < 0.01
    assert said["spaces"].count("cpu.gemm_tiles") == 3
    if not host_cpu().shows("amx-tile"):
        tiles = -(-rows // 16) * 16 // 16
        products = tiles * (32 * 4 + 16 * 8 + 8 * 4)
        assert said["counts"]["tdpbusd"] == products
        assert said["counts"]["tilestored"] == said["counts"]["tilezero"] == tiles * (32 + 16 + 8)


def test_quantised_images(tmp_path: Path) -> None:
    """Convolutions whose windows are gathered; within a step of the reference."""
    model = images(13, (32, 64, 64, 128, 128), quantised=True)
    x = np.random.default_rng(4).uniform(-3, 3, (1, 32, 13, 13)).astype("float32")
    found, said = _run(tmp_path, model, x)
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    assert np.unique(expected).size > 20
    assert np.abs(found - expected).max() <= SCALE * 1.01
    assert np.mean(found != expected) < 0.01
    assert said["spaces"].count("cpu.gemm_tiles") >= 3
    assert host_cpu().shows("amx-tile") or said["counts"]["tdpbusd"]


def test_images_of_bfloat16(tmp_path: Path) -> None:
    model = images(13, (64, 64, 128, 128), quantised=False)
    x = np.random.default_rng(5).standard_normal((1, 64, 13, 13)).astype("float32")
    found, said = _run(tmp_path, model, x, "bf16")
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2**-6
    assert said["spaces"].count("cpu.gemm_tiles") >= 2
    assert host_cpu().shows("amx-tile") or said["counts"]["tdpbf16ps"]


def test_layers_of_bfloat16(tmp_path: Path) -> None:
    """Operands are rounded to 8 bits of mantissa, sums are not."""
    model = layers(48, (256, 384, 128), quantised=False)
    x = np.random.default_rng(2).standard_normal((1, 48, 256)).astype("float32")
    found, said = _run(tmp_path, model, x, "bf16")
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2**-7
    assert said["spaces"].count("cpu.gemm_tiles") == 2
    if not host_cpu().shows("amx-tile"):
        assert said["counts"]["tdpbf16ps"] == 3 * (24 * 8 + 8 * 12)


def test_a_kernel_that_refuses_tiles_is_told_in_one_line(tmp_path: Path) -> None:
    model = layers(32, (256, 128), quantised=True)
    x = np.zeros((1, 32, 256), "float32")
    _run(tmp_path, model, x)
    code = "import sys, mlc, numpy; mlc.load(sys.argv[1])(numpy.zeros((1, 32, 256), 'float32'))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.so")], capture_output=True, text=True,
                          check=False, env={**os.environ, **amx.environment(tmp_path, granted=False)})
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("mlc.errors.ArtifactError: ")
    assert "the kernel does not let this process use; allow it tiles" in line
