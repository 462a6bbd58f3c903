"""What a compile takes of memory, in weights: the model's own, those that are packed, and little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")

#: matrices of a chain of products, each ``[_SIZE, _SIZE]`` of float32
_COUNT, _SIZE = 6, 1536
#: a copy as the model has them and one packed; what is left is for code generation, whatever the weights are
_COPIES, _REST = 2.15, 24 << 20

#: prints the bytes that the process has grown by at most while it compiled the second of two files, and the error of
#: what the artifact computes
_CHILD = """
import sys
sys.modules["torch"] = None
import numpy as np
import onnx
import mlc

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

small, large, artifact = sys.argv[1:]
mlc.compile(small, log=False, threads=1)(np.ones((1, 16), np.float32))  # whatever is loaded once
before = status("VmRSS")
exe = mlc.compile(large, log=False, threads=1)
exe.save(artifact)
print(status("VmHWM") - before)
x = np.random.default_rng(1).standard_normal(exe.inputs[0].shape, np.float32)
expected = x.astype(np.float64)
for tensor in onnx.load(large).graph.initializer:
    expected = np.maximum(expected @ onnx.numpy_helper.to_array(tensor, large.rpartition("/")[0]), 0)
print(float(np.abs(mlc.load(artifact)(x)[0] - expected).max() / np.abs(expected).max()))
"""


def _chain(path: Path, count: int, size: int, beside: bool = False) -> Path:
    """``relu(x @ W)`` so many times."""
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for i in range(count):
        matrix = rng.standard_normal((size, size), np.float32) * np.float32(size**-0.5)
        weights.append(numpy_helper.from_array(matrix, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{i}"], [f"p{i}"]))
        nodes.append(helper.make_node("Relu", [f"p{i}"], [name := f"r{i}"]))
    values = [helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, [1, size]) for each in ("x", name)]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=beside, location=f"{path.stem}.bin", size_threshold=1024)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_a_compile_takes_two_copies_of_the_weights(beside, tmp_path) -> None:
    small, large = _chain(tmp_path / "s.onnx", 1, 16), _chain(tmp_path / "l.onnx", _COUNT, _SIZE, beside)
    done = subprocess.run([sys.executable, "-c", _CHILD, str(small), str(large), str(tmp_path / "m.so")],
                          capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    grown, error = map(float, done.stdout.split())
    weights = 4 * _COUNT * _SIZE**2
    assert error < 1e-4
    assert weights < grown < _COPIES * weights + _REST, f"{grown / weights:.2f} times the weights"
