"""Tables of tuning runs and benchmarks."""

from __future__ import annotations

import io
import math
from dataclasses import replace

from rich.console import Console

from mlc.report.tables import bench_table, tuning_table
from mlc.tuning.report import TaskReport, TuneReport


def _lines(renderable: object, width: int = 160) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _task(name: str, weight: int, default: float, best: float, trials: int = 8) -> TaskReport:
    return TaskReport(f"key-{name}", name, weight, "conv", trials, 9.0, default, best, best / 2, {}, "flat", "tuned")


def _report(*tasks: TaskReport) -> TuneReport:
    return TuneReport("trials", "s", 24, 30.0, 24, tasks)


def test_tasks_are_ranked_by_what_the_model_spends_in_them() -> None:
    tasks = (_task("small", 1, 2e-4, 1e-4), _task("often", 10, 3e-4, 2e-4), _task("failed", 1, math.inf, math.inf))
    header, _, *rows = _lines(tuning_table(_report(*tasks)))
    assert header.split() == [
        "task", "calls", "trials", "untuned", "tuned", "gain", "share", "of", "roofline", "verdict", "stopped",
    ]
    assert [row.split()[0] for row in rows] == ["often", "small", "failed"]
    assert rows[0].split() == ["often", "10", "8", "300", "µs", "200", "µs", "1.50×", "95%", "50%", "tuned", "flat"]
    assert rows[2].split()[3:] == ["-", "-", "-", "-", "-", "-", "flat"]


def test_a_narrow_terminal_gets_fewer_columns_and_shorter_names_but_one_line_a_task() -> None:
    names = ("fused_winograd_4x4_add_relu_4", "fused_winograd_4x4_add_relu_12", "softmax")
    report = _report(*(_task(name, 2, 3e-4, 2e-4) for name in names))
    for width in (70, 80, 100, 120, 160):
        header, _, *rows = lines = _lines(tuning_table(report), width)
        assert len(rows) == 3 and max(map(len, lines)) <= width, width
        assert {"gain", "share", "roofline", "stopped"} <= set(header.split())
        assert len({row.split()[0] for row in rows}) == 3 and [row.split()[0][-2:] for row in rows].count("_4") == 1
    assert "calls" not in _lines(tuning_table(report), 80)[0] and "calls" in header


def test_what_broke_a_task_is_told_below_the_table() -> None:
    broken = replace(_task("conv", 1, math.inf, math.inf, 0), stopped="broken: ZeroDivisionError: a [defect]")
    rows = _lines(tuning_table(_report(broken)))[2:]
    assert rows[0].split()[-1] == "broken" and rows[1] == "conv: broken: ZeroDivisionError: a [defect]"


def test_a_long_report_is_summed_up() -> None:
    report = _report(*(_task(f"t{n}", 1, 2e-3, 1e-3 / (n + 1)) for n in range(9)))
    rows = _lines(tuning_table(report, limit=4))[2:]
    assert len(rows) == 5 and rows[-1].split()[:4] == ["5", "more", "5", "40"]


def test_engines_are_ranked_and_a_failure_is_told() -> None:
    results = [
        {"engine": "mlc", "median_ms": 5.0, "p10_ms": 4.9, "p90_ms": 5.5, "max_abs_err": 1e-6, "max_rel_err": 2e-6},
        {"engine": "torch-eager", "median_ms": None, "p10_ms": None, "p90_ms": None, "max_abs_err": None,
         "max_rel_err": None, "error": "needs [a module]"},
        {"engine": "onnxruntime", "median_ms": 4.0, "p10_ms": 3.9, "p90_ms": 4.5, "max_rel_err": 0.0},
    ]
    rows = _lines(bench_table(results))[2:]
    assert [row.split()[0] for row in rows] == ["onnxruntime", "mlc", "torch-eager"]
    assert rows[1].split() == ["mlc", "5.00", "ms", "4.90", "ms", "5.50", "ms", "1.25×", "2.0e-06"]
    assert rows[2].endswith("needs [a module]")


def test_nobody_ran() -> None:
    assert _lines(bench_table([{"engine": "mlc", "median_ms": None, "error": "boom"}]))[-1].endswith("boom")
