"""Scopes that the code generator does not know."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import mlc


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatters_are_compiled_in_silence(reduction: str, capfd: pytest.CaptureFixture[str]) -> None:
    """TVM's warning goes to the terminal past Python."""
    ends = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in (
        ("x", TensorProto.FLOAT, [5, 4]), ("i", TensorProto.INT64, [3, 1]), ("u", TensorProto.FLOAT, [3, 4]),
        ("y", TensorProto.FLOAT, [5, 4]))]
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
    graph = helper.make_graph([node], "scatter", ends[:3], ends[3:])
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    exe = mlc.compile(model, log=False)
    rng = np.random.default_rng(0)
    x, u, i = rng.standard_normal((5, 4), "float32"), rng.standard_normal((3, 4), "float32"), np.array([[1], [0], [4]])
    wanted = x.copy()
    wanted[i[:, 0]] = u + (wanted[i[:, 0]] if reduction == "add" else 0)
    np.testing.assert_array_equal(exe(x, i, u)[0], wanted)
    assert "pragma_scope" not in "".join(capfd.readouterr())
