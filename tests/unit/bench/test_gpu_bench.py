"""The benchmark of GPUs, with this CPU in the GPU's place: what it builds, checks and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.performance.bench_gpu import Case, cases, main, run


def test_products_are_built_checked_and_timed(tmp_path: Path) -> None:
    chosen = [Case("7x24x33-float16", "float16", (7, 24, 33)), Case("5x8x16-float32", "float32", (5, 8, 16))]
    assert run(chosen, "native", tmp_path, only_build=True) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.so")) == sorted(case.name for case in chosen)
    assert not (tmp_path / "results.json").exists()
    assert run(chosen, "native", tmp_path) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["model"] for row in rows] == [case.name for case in chosen]
    assert all(row["seconds"] > 0 and 0 < row["error_of_numbers"] < 2e-3 and "error" not in row for row in rows)


def test_wrong_numbers_and_missing_compilers_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("5x8x16-float32", "float32", (5, 8, 16))
    assert run([case], "native", tmp_path, only_build=True) == 0
    monkeypatch.setattr("tests.performance.bench_gpu._error", lambda *_: 0.5)
    assert run([case], "native", tmp_path) == 1
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert "within 0.0001 of the reference, got 0.5" in row["error"] and "seconds" not in row


def test_an_unknown_target_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--build", "--match", "1x4096x4096-float32", "--target", "cuda:sm_1", "--output", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("1x4096x4096-float32: ") and "sm_1" in line


def test_names_differ() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
