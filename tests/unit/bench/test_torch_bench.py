"""The table of ``torch.compile(backend="mlc")``: what gains least first, and what is left to eager PyTorch below it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.performance import bench_torch_compile as bench  # noqa: E402


def _right(model: str, error: float = 1e-6, eager: tuple[str, ...] = ()) -> dict[str, object]:
    return {"model": f"{model} right", "seconds": 1.0, "error": error, "graphs": 2, "eager": list(eager), "breaks": []}


def _timed(model: str, mlc: float, eager: float, inductor: float) -> dict[str, object]:
    return {"model": model, "ms": {"mlc": mlc, "eager": eager, "inductor": inductor}, "machine": "CPU", "threads": 2}


def test_the_table() -> None:
    rows = [_right("fast"), _timed("fast", 1.0, 4.0, 2.0),
            _right("slow", 0.5, ("a graph of 3 operators runs eagerly",)),
            _timed("slow", 2.0, 1.0, 2.0), {"model": "gone right", "failed": "RuntimeError: no"}]
    text = bench.markdown({str(row["model"]): row for row in rows})
    lines = text.splitlines()
    assert lines[2] == "| slow | 2 | **1** | 2 | 0.50 | 1.00 | 5e-01 |"
    assert lines[3] == "| fast | **1** | 4 | 2 | 4.00 | 2.00 | 1e-06 |"
    assert lines[4] == "| geometric mean | | | | **1.41** | **1.41** | |"
    assert "1 of 2 are slower than eager by more than 2%." in text
    assert "Of 4 graphs of 2 architectures 1 ran eagerly." in text and "all but slow are within 1e-03" in text
    assert "gone right failed: RuntimeError: no" in text and "slow: a graph of 3 operators runs eagerly" in text


def test_results_of_other_shapes_types_and_no_numbers_are_wrong() -> None:
    x = torch.tensor([1.0, -4.0])
    assert bench._error(x + 0.5, x) == pytest.approx(0.125)
    assert bench._error(x[:1], x) == bench._error(x.double(), x) == bench._error(x * float("nan"), x) == float("inf")
    assert bench._error(torch.tensor([1]), torch.tensor([2])) == float("inf")


def test_a_step_that_fails_is_a_row_that_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    bench.main(["--models", "tcn", "--check", "--output", str(tmp_path)])
    assert "tcn right failed" in capsys.readouterr().out
    monkeypatch.setattr(bench, "_step", lambda title, options: _right("tcn"))
    bench.main(["--models", "tcn", "--check", "--output", str(tmp_path)])
    assert "failed" not in capsys.readouterr().out


def test_mlc_builds_for_the_target_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is told, which hands it to the backend as an option of its own."""
    told: list[object] = []
    monkeypatch.setattr(bench, "_step", lambda title, options: told.append(options[:2]) or _right("tcn"))
    bench.main(["--models", "tcn", "--check", "--target", "x86-64-v2", "--output", str(tmp_path)])
    monkeypatch.setattr(torch, "compile", lambda module, **named: told.append(named) or module)
    bench._right(torch.nn.ReLU(), [[torch.ones(2)], [torch.ones(4)]], "x86-64-v2")
    assert told == [["--target", "x86-64-v2"], {"backend": "mlc", "options": {"target": "x86-64-v2"}}]
