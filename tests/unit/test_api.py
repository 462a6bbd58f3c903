"""The Python face: what a user calls, from a model to arrays."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlc
from mlc.errors import BuildError, LogError, MlcError, ModelError, TargetError, UsageError
from mlc.log import TuningLog
from mlc.testing.measuring import FakeMeasurer
from mlc.testing.programs import dense


def _model() -> onnx.ModelProto:
    """Two matrix products with a sigmoid between them."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal(shape, dtype=np.float32) * 0.2, name)
               for name, shape in (("w1", (32, 48)), ("b1", (48,)), ("w2", (48, 16)))]
    nodes = [
        helper.make_node("MatMul", ["in.put", "w1"], ["h"]), helper.make_node("Add", ["h", "b1"], ["g"]),
        helper.make_node("Sigmoid", ["g"], ["s"]), helper.make_node("MatMul", ["s", "w2"], ["out/0"]),
    ]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("in.put", TensorProto.FLOAT, (8, 32))],
        [helper.make_tensor_value_info("out/0", TensorProto.FLOAT, (8, 16))], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture(autouse=True)
def _own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def case() -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    model = _model()
    x = np.random.default_rng(1).standard_normal((8, 32), dtype=np.float32)
    return model, x, ReferenceEvaluator(model).run(None, {"in.put": x})[0]


def test_importing_mlc_imports_nothing_heavy() -> None:
    code = ("import sys, mlc; dir(mlc); mlc.MlcError; mlc.tune\n"
            "print(sorted({m.partition('.')[0] for m in sys.modules} & "
            "{'tvm', 'tvm_ffi', 'numpy', 'onnx', 'torch', 'xgboost', 'rich'}))")
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_version_is_that_of_the_package() -> None:
    assert mlc.__version__ == metadata.version("mlc")


def test_tune_is_a_function_whatever_is_imported() -> None:
    import mlc.tuning.options

    assert mlc.tune.__module__ == "mlc.api"
    with pytest.raises(UsageError, match="the trials must be at least 1"):
        mlc.tune("no.onnx", trials=0)
    with pytest.raises(AttributeError, match="no attribute 'tuna'"):
        mlc.tuna  # noqa: B018


def test_compile_run_save_load(case: tuple[onnx.ModelProto, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    model, x, expected = case
    onnx.save(model, tmp_path / "small.onnx")
    exe = mlc.compile(str(tmp_path / "small.onnx"))
    exe.save(tmp_path / "small.so")
    loaded = mlc.load(tmp_path / "small.so")
    assert isinstance(loaded, mlc.Executable) and loaded.metadata["name"] == "small"
    assert [s.name for s in loaded.inputs] == ["in.put"] and [s.name for s in loaded.outputs] == ["out/0"]
    for each in (exe, loaded):
        for outputs in (each(x), each(**{"in.put": x})):
            np.testing.assert_allclose(outputs[0], expected, rtol=1e-5, atol=1e-5)
    assert not (tmp_path / "data").exists()  # compiling makes no log


def test_an_irmodule_with_threads_of_its_own() -> None:
    program = dense()
    exe = mlc.compile(program.mod, threads=1, log=False)
    x = np.random.default_rng(2).standard_normal((5, 24), dtype=np.float32)
    np.testing.assert_allclose(exe(x)[0], program.reference(x)[0], rtol=1e-5, atol=1e-5)
    assert exe.metadata["threads"] == 1 and exe.metadata["target"].split("/")[2] == "1"


def test_tune_then_compile_finds_it(case: tuple[onnx.ModelProto, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    model, x, expected = case
    events: list[object] = []
    measurer = FakeMeasurer(lambda values: 1e-3 + 1e-4 * (sum(values) % 11))
    report = mlc.tune(model, trials=24, log=tmp_path / "log.db", seed=3, measurer=measurer, on_event=events.append)
    assert 0 < report.trials <= 24 and events and not measurer.closed
    with TuningLog(tmp_path / "log.db", readonly=True) as log:
        assert log.count() == report.measured
        opened = mlc.compile(model, log=log)
    by_path = mlc.compile(model, log=tmp_path / "log.db")
    without = mlc.compile(model, log=False)
    assert any(f["tuned"] for f in by_path.metadata["functions"])
    assert opened.metadata["functions"] == by_path.metadata["functions"]
    assert not any(f["tuned"] for f in without.metadata["functions"])
    for exe in (by_path, opened, without):
        np.testing.assert_allclose(exe(x)[0], expected, rtol=1e-5, atol=1e-5)


def test_the_default_log_is_found(case: tuple[onnx.ModelProto, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    model, _, _ = case
    mlc.tune(model, trials=8, measurer=FakeMeasurer(lambda values: 1e-3 + 1e-4 * (sum(values) % 11)))
    assert list((tmp_path / "data").rglob("*.db"))
    assert any(f["tuned"] for f in mlc.compile(model).metadata["functions"])


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    cases = [
        (lambda: mlc.compile(tmp_path / "none.onnx"), ModelError),
        (lambda: mlc.compile(_model(), target="nativ"), TargetError),
        (lambda: mlc.compile(_model(), log=tmp_path / "none.db"), LogError),
        (lambda: mlc.compile(42), UsageError),
        (lambda: mlc.tune(_model(), target="x87"), TargetError),
        (lambda: mlc.tune(_model(), strategy="luck"), UsageError),
    ]
    for call, kind in cases:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, MlcError) and "\n" not in str(caught.value)


def test_a_failing_pass_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_options: object) -> None:
        raise RuntimeError("a long story\n  ends with the reason")

    monkeypatch.setattr("mlc.graph.pipeline.lower", fails)
    with pytest.raises(BuildError, match="a pass failed: ends with the reason; MLC_DUMP_DIR=DIR") as caught:
        mlc.compile(_model())
    assert "\n" not in str(caught.value)


def test_intermediate_modules_are_dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLC_DUMP_DIR", str(tmp_path / "dump"))
    mlc.compile(_model(), log=False)
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names[-2:] == ["build_final.py", "build_scheduled.py"] and len(names) > 10
    assert "vm.alloc_storage" in (tmp_path / "dump" / "build_final.py").read_text()
