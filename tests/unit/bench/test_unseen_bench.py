"""The table of architectures that nothing was tuned for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.performance import unseen
from tests.performance.unseen import failure, markdown


def row(model: str, tuned: float | None = None, **times: float | None) -> dict[str, Any]:
    ours = {"mlc": tuned, "mlc-untuned": times.pop("mlc")} if tuned else {"mlc-untuned": times.pop("mlc")}
    results = [{"engine": name, "median_ms": ms, "max_rel_err": 1e-6 if ms else None,
                **({} if ms else {"error": "out of memory"})} for name, ms in {**ours, **times}.items()]
    return {"model": model, "results": results, "machine": "CPU", "threads": 2, "build_seconds": 3.0,
            "tuning_seconds": 60.0 if tuned else None}


def test_the_slowest_against_its_peers_comes_first_and_what_failed_last() -> None:
    lines = markdown([
        row("fast", mlc=1.0, onnxruntime=3.0, openvino=2.0), {"model": "new", "error": "no DFT"},
        row("slow", mlc=4.0, onnxruntime=2.0, openvino=None), row("equal", mlc=1.01, onnxruntime=1.0, openvino=1.2),
    ]).splitlines()
    assert lines[0] == "| model | mlc untuned | onnxruntime | OpenVINO | best peer / mlc untuned | error |"
    assert lines[2] == "| slow | 4 | **2** | failed | 0.50 | 1e-06 |"
    assert [line.split()[1] for line in lines[3:5]] == ["equal", "fast"]
    assert lines[5] == "| geometric mean |  |  |  | **1.00** |  |"
    assert "1 of 3 are slower than the best peer by more than 2%" in lines[7]  # 1% is noise
    assert "onnxruntime's float32" in lines[7] and "the largest of all is 1e-06" in lines[7]
    assert lines[9:] == ["new failed: no DFT"]


def test_tuned_builds_have_columns_of_their_own() -> None:
    lines = markdown([row("net", tuned=1.0, mlc=2.0, onnxruntime=3.0, openvino=None)]).splitlines()
    assert lines[2] == "| net | 2 | **1** | 3 | failed | 1.50 | 3.00 | 1e-06 |"
    assert "Tuning budget a model: 60 s." in lines[4] and "0 of 1 are slower than the best peer" in lines[4]


def test_without_onnxruntime_there_is_no_error() -> None:
    assert markdown([row("net", mlc=1.0, onnxruntime=None, openvino=2.0)]).splitlines()[2].endswith("| 2.00 | - |")


def test_a_peer_may_fail_and_ours_may_not() -> None:
    assert failure(row("net", mlc=1.0, onnxruntime=None)) is None
    assert failure(row("net", mlc=None, onnxruntime=1.0)) == "out of memory"
    assert markdown([{"model": "new", "error": "no DFT"}]) == "new failed: no DFT\n"


def test_what_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, **_: object) -> dict[str, Any]:
        tried.append(name)
        return row(name, mlc=1.0, onnxruntime=2.0) if name == "swin" else {"model": name, "error": "no GRU"}

    tried: list[str] = []
    monkeypatch.setattr(unseen, "measure", measure)
    for _ in range(2):
        unseen.main(["--models", "swin,gru", "--output", str(tmp_path)])
    assert tried == ["swin", "gru", "gru"]
    assert [r["model"] for r in json.loads((tmp_path / "results.json").read_text())] == ["swin", "gru"]
    assert "gru failed: no GRU" in (tmp_path / "table.md").read_text()
