"""The table of models of few bits: what it says of its rows, and the models that it is made from."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mlc.bench.engines import onnx_inputs
from mlc.networks.inputs import random_inputs
from tests.performance import quantised
from tuning_logs import quantised as quantised_models


def _row(model: str, mlc: float, own: float, peers: tuple[float, float | None]) -> dict[str, object]:
    times = {"mlc": mlc, "mlc-untuned": own, "onnxruntime": peers[0], "openvino": peers[1]}
    return {"model": model, "machine": "here", "threads": 2, "bytes": 0.25,
            "results": [{"engine": engine, "median_ms": ms} for engine, ms in times.items()]}


def test_ratios_are_those_of_the_faster_peer() -> None:
    text = quantised.markdown([_row("a-qdq", 10.0, 15.0, (12.0, 20.0)), _row("b-f16", 10.0, 9.0, (8.0, None))])
    first, second = text.splitlines()[2:4]
    assert first == "| a-qdq | **10** | 15 | 12 | 20 | 1.20 | 1.50 | 0.25 |"
    assert second == "| b-f16 | 10 | 9 | **8** | failed | 0.80 | 0.90 | 0.25 |"
    assert "8 bits 1.20; float16 0.80" in text


def test_errors_stand_beside_what_was_asked() -> None:
    row = _row("b-f16-in-bf16", 10.0, 9.0, (12.0, 11.0))
    for each, error in zip(row["results"], (2e-3, None, 1e-4, 3e-3), strict=True):
        each["max_rel_err"] = error
    text = quantised.markdown([_row("a-f16", 10.0, 9.0, (8.0, None)), {**row, "widened": True}])
    assert [line.rpartition(" | ")[2] for line in text.splitlines()[2:4]] == ["-, -, - |", "2e-03, 1e-04, 3e-03 |"]
    assert "float16 0.80; float16 in bfloat16 1.10" in text and "Errors are relative" in text


@pytest.mark.parametrize("how", ["qdq", "dynamic", "f16", "bf16"])
def test_models_are_made_as_they_are_named(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's tools make them small, and they still compute what the float32 model does."""
    pytest.importorskip("onnxruntime")  # whose own kernels may saturate: they do not judge
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((64, 32), dtype="float32"), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "mm"), helper.make_node("Relu", ["h"], ["y"], "act")], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 32])], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    monkeypatch.setattr(quantised_models, "_float32", lambda _network: model)
    small, plain = quantised.made(f"net-{how}", tmp_path)
    types = {tensor.data_type for tensor in onnx.load(small).graph.initializer if len(tensor.dims) == 2}
    assert types == {{"f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}.get(how, TensorProto.INT8)}
    feeds = random_inputs(onnx_inputs(str(plain)), seed=0)  # of those that were calibrated with
    got, want = (ReferenceEvaluator(onnx.load(path)).run(None, feeds)[0] for path in (small, plain))
    assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.slow
def test_types_are_timed_alone_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """The float32 model is built once and compared with; each type is a part of its time and has an error."""
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 32), dtype="float32"), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "mm")], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 32])], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    monkeypatch.setattr(quantised_models, "_float32", lambda _network: model)
    wanted = ["--models", "net-f16,net-bf16", "--rounds", "1", "--output", str(tmp_path)]
    assert quantised.main(["--alone", "--sixteen", *wanted]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"net: float32 ([\d.]+) ms, f16 [\d.]+ ms \(([\d.]+) of it, error (\S+)\), "
                         r"bf16 [\d.]+ ms \(([\d.]+) of it, error (\S+)\)", line)
    assert found is not None, line
    assert 0 < float(found[3]) < float(found[5]) < 0.02
    assert len(list(tmp_path.glob("*.so"))) == 3 and not list(tmp_path.glob("*.md"))
