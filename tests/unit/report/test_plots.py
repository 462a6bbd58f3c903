"""Figures show the numbers they were given."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from mlc.errors import InstallationError
from mlc.log.record import Record, Verdict
from mlc.report import plots


def _record(task: str, seconds: float | None, key: str | None = None) -> Record:
    times = () if seconds is None else (seconds,)
    return Record(key or f"key-{task}", task, "conv", {}, "[]", times, "" if times else "timeout")


def test_best_so_far_is_a_falling_step_of_each_task() -> None:
    times = {"a": [4.0, None, 2.0, 3.0, 1.0, 5.0], "b": [None, 3.0, 4.0]}
    records = [_record(task, t) for task, values in times.items() for t in values]
    records.append(replace(_record("a", 0.5), verdict=Verdict.REJECTED))  # the winner timed again is no trial
    (axes,) = plots.best_so_far(records).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["a"] == [[1, 1.0], [3, 0.5], [5, 0.25], [6, 0.25]]
    assert lines["b"] == [[2, 1.0], [3, 1.0]]
    assert axes.get_yscale() == "log"


def test_best_so_far_names_the_most_improved_only() -> None:
    noise = np.random.default_rng(0).uniform(1.0, 1.9, (9, 8))
    noise[:, 0] *= 4.0 ** np.arange(9)  # how much there is to improve on
    records = [_record(f"task{t}", float(noise[t, n])) for t in range(9) for n in range(8)]
    (axes,) = plots.best_so_far(records, curves=3).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["task8", "task7", "task6"]
    assert len(axes.lines) == 9


def test_best_so_far_keeps_tasks_of_one_name_apart() -> None:
    records = [_record("same", t, key) for key, t in [("k1", 2.0), ("k2", 4.0), ("k1", 1.0), ("k2", 3.0)]]
    (axes,) = plots.best_so_far(records).axes
    assert len(axes.lines) == 2


@pytest.mark.parametrize("records", [[], [_record("a", None)]])
def test_best_so_far_without_a_good_trial_says_so(records) -> None:
    (axes,) = plots.best_so_far(records).axes
    assert "no task" in axes.texts[0].get_text()


def test_by_device_counts_trials_and_takes_the_mean_of_what_each_has_found() -> None:
    def made(device: str, task: str, seconds: float | None, when: float) -> Record:
        return replace(_record(task, seconds), device=device, when=100.0 + when)

    records = [made("one", "a", 4.0, 0.0), made("two", "b", 2.0, 0.0), made("one", "b", 1.0, 6.0),
               made("two", "a", 1.0, 12.0), made("one", "a", None, 12.0)]
    records.append(replace(records[-2], verdict=Verdict.KEPT, times=(0.1,)))
    rates, found = plots.by_device(records).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in found.lines}
    assert lines["one"] == [[0.0, 1.0], [0.0, 1.0], [6.0, pytest.approx(0.5**0.5)], [12.0, pytest.approx(0.5**0.5)]]
    assert lines["two"] == [[0.0, 1.0], [0.0, 1.0], [12.0, pytest.approx(0.5)]]
    assert lines["all"][-1] == [12.0, pytest.approx((0.5 * 0.25) ** 0.5)]
    assert sum(sum(patch.get_data().values) for patch in rates.patches) == pytest.approx(5)  # a second is an interval
    rates, _ = plots.by_device(records, clock=lambda record: 2 * record.when).axes
    assert rates.patches[0].get_data().edges[-1] == pytest.approx(24.0)
    assert plots.by_device([]).axes


def test_latency_bars_are_sorted_and_ours_stand_out() -> None:
    results = [
        {"engine": "onnxruntime", "median_ms": 5.1, "p10_ms": 5.0, "p90_ms": 5.4},
        {"engine": "mlc", "median_ms": 4.9, "p10_ms": 4.8, "p90_ms": 5.2},
        {"engine": "failed", "median_ms": None, "p10_ms": None, "p90_ms": None},
        {"engine": "openvino", "median_ms": 11.0, "p10_ms": 10.0, "p90_ms": 12.0},
    ]
    (axes,) = plots.latency_bars(results).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["openvino", "onnxruntime", "mlc"]
    assert [bar.get_width() for bar in axes.patches] == [11.0, 5.1, 4.9]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[1] != colours[2]
    assert [text.get_text() for text in axes.texts] == ["11.0 ms", "5.10 ms", "4.90 ms"]


def test_svg_is_one_element_and_the_same_each_time() -> None:
    results = [{"engine": "mlc", "median_ms": 5.1, "p10_ms": 5.0, "p90_ms": 5.4}]
    first, second = (plots.svg(plots.latency_bars(results)) for _ in range(2))
    assert ElementTree.parse(io.StringIO(first)).getroot().tag.endswith("svg")
    assert first == second and "5.10 ms" in first


def test_without_matplotlib_the_remedy_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InstallationError, match="pip install matplotlib"):
        plots.latency_bars([])
