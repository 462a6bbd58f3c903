"""What is built here has run here once, and a run in which nothing can work ends before it has cost anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tvm import te

from mlc.artifact import Executable, compile_module, load, smoke_test
from mlc.artifact.smoke_test import save_tested
from mlc.errors import ArtifactError, MeasureError
from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.measure import LocalMeasurer, MeasureOptions
from mlc.target import resolve
from mlc.testing.misbehaving import Saboteur, spoilt
from mlc.testing.programs import dense
from mlc.tuning import TuneOptions, tune_tasks

TARGET = resolve("llvm", threads=1)


def _dying(failure: str) -> Executable:
    """A model of which one function fails as ``failure`` says when it is called."""
    mod = dense().mod
    bad = spoilt(mod["matmul"], failure).with_attr("tirx.is_scheduled", True)
    mod.update_func(mod.get_global_var("matmul"), bad)
    return compile_module(mod, TARGET)


def test_a_module_that_runs_is_written(tmp_path: Path) -> None:
    case = dense()
    assert save_tested(compile_module(case.mod, TARGET), tmp_path / "model.so")
    x = np.random.default_rng(1).standard_normal((5, 24), dtype=np.float32)
    np.testing.assert_allclose(load(tmp_path / "model.so")(x)[0], case.reference(x)[0], rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.so"]


@pytest.mark.parametrize(("failure", "says"), [
    ("illegal", "SIGILL: it has instructions that this CPU lacks; .*--target x86-64-v3"),
    ("crash", "SIGSEGV: the code or TVM is broken here; .*mlc doctor"),
])
def test_a_module_that_dies_is_not(failure: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.so").write_bytes(b"an earlier build")
    with pytest.raises(ArtifactError, match=rf"was built for llvm/.*must run once here.*{says}") as caught:
        save_tested(_dying(failure), tmp_path / "model.so")
    assert "\n" not in str(caught.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"an earlier build"]


def test_a_run_that_takes_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_test, "_PATIENCE", 2.0)
    with pytest.warns(UserWarning, match="has not ended its first run after 2 s"):
        assert not save_tested(_dying("timeout"), tmp_path / "model.so")
    assert (tmp_path / "model.so").exists()


def test_what_is_built_for_other_machines_is_not_run(tmp_path: Path) -> None:
    exe = _dying("illegal")
    exe.metadata["features"] = ["of-another-cpu"]
    assert not save_tested(exe, tmp_path / "model.so", native=False)
    with pytest.raises(ArtifactError, match="needs the instructions of-another-cpu"):
        save_tested(exe, tmp_path / "native.so")
    assert [path.name for path in tmp_path.iterdir()] == ["model.so"]


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=rf"{tmp_path}/none/model.so must be writable"):
        save_tested(compile_module(dense().mod, TARGET), tmp_path / "none" / "model.so")


def _product(size: int) -> Task:
    a, b = te.placeholder((size, 64), name="A"), te.placeholder((64, 96), name="B")
    r = te.reduce_axis((0, 64), name="r")
    c = te.compute((size, 96), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    return Task(f"product_{size}", normalise(te.create_prim_func([a, b, c])), TARGET)


def test_tuning_ends_where_every_candidate_dies_of_an_instruction(tmp_path: Path) -> None:
    """As on a virtual machine that hides AVX-512 from code that was made with it."""
    tasks = [_product(size) for size in (16, 24, 32, 48, 64)]
    with LocalMeasurer(MeasureOptions(threads=1), workers=2) as inner, TuningLog(tmp_path / "log.db") as log:
        measurer = Saboteur(inner, lambda trace: "illegal")
        with pytest.raises(MeasureError, match=r"all 4 failed \(4 crash: SIGILL\), of 3 functions: llvm/"):
            tune_tasks(tasks, TARGET, log, TuneOptions(seconds=120.0), measurer)
        assert [record.failure for record in log.records()] == ["crash"] * 4
