"""Filters that Winograd's algorithm transforms are stored as the model has them, in 16 bits, and transformed once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from scipy.signal import correlate2d

import mlc
from mlc.artifact import Executable, artifact
from mlc.artifact.compact_weights import buffers, transformed, transformed_bytes
from mlc.artifact.metadata import payload_bytes
from mlc.artifact.runtime import ALIGNMENT
from mlc.cpu import host_flags
from mlc.graph.algorithms.filters import TRANSFORMED, transform_weight

CHANNELS, SIZE = 64, 28
V3 = "x86-64-v3"
TYPES = {"float16": (np.float16, TensorProto.FLOAT16), "bfloat16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16)}


def _weight(kind: str) -> np.ndarray:
    values = np.random.default_rng(5).standard_normal((CHANNELS, CHANNELS, 3, 3)) / 24
    return values.astype(TYPES[kind][0] if kind in TYPES else kind)


def _model(kind: str) -> onnx.ModelProto:
    """A convolution, by whose weight alone 16 bits come in."""
    dtype = TYPES[kind][1] if kind in TYPES else TensorProto.FLOAT
    stored = helper.make_tensor("w", dtype, _weight(kind).shape, _weight(kind).tobytes(), raw=True)
    nodes = [helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
             helper.make_node("Conv", ["x", "wide"], ["y"], pads=[1] * 4)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, CHANNELS, SIZE, SIZE]) for n in "xy")
    return helper.make_model(helper.make_graph(nodes, "filters", [x], [y], [stored]),
                             opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _two() -> onnx.ModelProto:
    """Two convolutions in turn, the second by half the weight of the first."""
    model = _model("float16")
    half = (_weight("float16") / 2).astype(np.float16)
    model.graph.initializer.append(helper.make_tensor("h", TYPES["float16"][1], half.shape, half.tobytes(), raw=True))
    model.graph.node[1].output[0] = "z"
    model.graph.node.extend([helper.make_node("Cast", ["h"], ["half"], to=TensorProto.FLOAT),
                             helper.make_node("Conv", ["z", "half"], ["y"], pads=[1] * 4)])
    return model


def _input() -> np.ndarray:
    return np.random.default_rng(6).standard_normal((1, CHANNELS, SIZE, SIZE)).astype(np.float32)


def _convolved(kind: str, filters: int) -> np.ndarray:
    """The first few channels of the result in float64."""
    x, weight = _input()[0].astype(np.float64), _weight(kind).astype(np.float64)
    return np.array([sum(correlate2d(a, b, "same") for a, b in zip(x, weight[i], strict=True)) for i in range(filters)])


def _entries(exe: Executable) -> list[dict[str, object]]:
    return [entry for entry in exe.metadata["weights"] if "made" in entry]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("target", ["native", V3])
def test_a_file_holds_the_filters_of_the_model(kind: str, target: str, tmp_path: Path) -> None:
    if target == V3 and not {"avx2", "fma"} <= host_flags():
        pytest.skip("this CPU has no AVX2")
    exe, path = mlc.compile(_model(kind), target, log=False, threads=2), tmp_path / "m.so"
    (entry,) = _entries(exe)
    assert entry["shape"] == [CHANNELS, CHANNELS, 3, 3] and entry["made"] in TRANSFORMED
    exe.save(path)
    (found,) = artifact.read(path).metadata["weights"]
    assert (found["stored"], found["bytes"]) == (kind, 2 * 9 * CHANNELS**2)
    (first,) = exe(_input())
    np.testing.assert_allclose(first[0, :3], _convolved(kind, 3), rtol=0, atol=1e-4 * np.abs(first).max())
    for verify in (True, False):
        loaded = mlc.load(path, verify=verify)
        np.testing.assert_array_equal(loaded(_input())[0], first)
        loaded.save(tmp_path / "again.so")
        assert (tmp_path / "again.so").read_bytes() == path.read_bytes()


def test_float32_stays_as_it_is_read() -> None:
    """What is read from the file as it is can be mapped."""
    exe = mlc.compile(_model("float32"), log=False, threads=2)
    assert "cpu.conv2d_winograd" in {entry["space"] for entry in exe.metadata["functions"]} and not _entries(exe)


def test_filters_are_transformed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlc.artifact import executable

    exe, calls = mlc.compile(_model("float16"), log=False, threads=2), []
    monkeypatch.setattr(executable, "transformed", lambda *args: calls.append(args) or transformed(*args))
    x, outputs = _input(), exe.empty_outputs()
    exe(x)
    exe.run([x], outputs)
    exe.profile(x, repeats=1)
    assert len(calls) == 1


def test_what_is_made_of_filters_lies_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """For systems back large pieces of memory alone with large pages."""
    from mlc.artifact import executable

    exe, made = mlc.compile(_two(), log=False, threads=2), []
    monkeypatch.setattr(executable, "transformed", lambda *args: made.append(args[2]) or transformed(*args))
    (result,) = exe(_input())
    assert len(_entries(exe)) == 2 and made[1].ctypes.data - made[0].ctypes.data == made[0].nbytes
    filters = _weight("float16").astype(np.float64)
    inner = np.array([sum(correlate2d(a, b, "same") for a, b in zip(_input()[0], each, strict=True))
                      for each in filters])
    wanted = sum(correlate2d(a, b, "same") for a, b in zip(inner, filters[0] / 2, strict=True))
    np.testing.assert_allclose(result[0, 0], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_several_targets_share_them(tmp_path: Path) -> None:
    exe = mlc.compile(_model("float16"), ["x86-64-v4", V3], log=False, threads=2)
    exe.save(tmp_path / "m.so")
    first, second = artifact.read(tmp_path / "m.so").variants
    assert {entry["made"] for each in (first, second) for entry in each.metadata["weights"]} <= set(TRANSFORMED)
    same = first.metadata["weights"] == second.metadata["weights"]
    assert exe.shared_bytes == (4 * 9 * CHANNELS**2 if same else 0)


def test_loading_needs_no_compiler(tmp_path: Path) -> None:
    exe = mlc.compile(_model("float16"), log=False, threads=2)
    exe.save(tmp_path / "m.so")
    script = ("import sys; sys.modules['torch'] = None; import mlc; mlc.load(sys.argv[1]); "
              "assert 'tvm' not in sys.modules")
    subprocess.run([sys.executable, "-c", script, tmp_path / "m.so"], check=True)


@pytest.mark.parametrize("algorithm", TRANSFORMED)
def test_what_is_made_is_aligned(algorithm: str) -> None:
    filters = np.random.default_rng(7).standard_normal((32, 16, 3, 3)).astype(np.float32)
    wanted = transform_weight(filters, TRANSFORMED[algorithm])
    assert transformed_bytes(filters.shape, algorithm) == wanted.nbytes
    (data,) = buffers([wanted.nbytes])
    shape = transformed(filters, algorithm, data)
    assert data.ctypes.data % ALIGNMENT == 0 and shape == wanted.shape
    np.testing.assert_array_equal(data.view(np.float32).reshape(shape), wanted)


@pytest.mark.parametrize(("changed", "says"), [
    ({"made": "fft"}, "must be one of winograd_2x2, winograd_4x4"),
    ({"shape": [16, 24, 3, 3]}, "must be float32 filters of whole blocks"),
    ({"shape": [16, 16, 9]}, "must be float32 filters of whole blocks"),
    ({"dtype": "int32", "stored": "int32"}, "must be float32 filters of whole blocks"),
])
def test_other_weights_are_made_of_nothing(changed: dict[str, object], says: str) -> None:
    entry = {"shape": [16, 16, 3, 3], "dtype": "float32", "stored": "float16", "made": "winograd_4x4", "offset": 0,
             "bytes": 4608}
    assert payload_bytes([entry]) == 4608
    with pytest.raises(ValueError, match=says):
        payload_bytes([{**entry, **changed}])
