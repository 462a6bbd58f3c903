"""What a model takes after each trial, and how many trials a result takes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlc.log import Record
from tests.performance.bench_transfer import function_curves, functions_markdown, latencies, markdown, needed


@dataclass(frozen=True)
class _Task:
    key: str
    weight: int = 1
    choice: str = ""


def record(key: str, seconds: float) -> Record:
    return Record(key, key, "space", {}, "[]", times=(seconds,))


def test_of_alternatives_the_first_counts_until_two_are_timed() -> None:
    tasks = [_Task("direct", 2, "conv"), _Task("winograd", 2, "conv"), _Task("pool")]
    untuned = {"direct": 3.0, "winograd": 4.0, "pool": 5.0}
    records = [record("pool", 6.0), record("winograd", 2.0), record("direct", 2.5), record("winograd", 0.5)]
    assert latencies(tasks, untuned, records) == [11.0, 11.0, 11.0, 9.0, 6.0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("curve", "trials"), [
    ([2.0, 1.5, 1.005, 1.0], 2), ([1.0, 0.9], 0), ([2.0, 1.2], None), ([2.0, 1.0, 1.5, 1.0], 3),
])
def test_a_result_is_reached_when_it_is_not_lost_again(curve: list[float], trials: int | None) -> None:
    assert needed(curve, 1.0) == trials


def test_the_part_is_of_the_trials_without_knowledge() -> None:
    rows = [{"model": "net", "runs": {"nothing": [[2.0] * 8 + [1.0]], "others": [[2.0, 2.0, 1.0]]}}]
    lines = markdown(rows).splitlines()[2:]
    assert lines[0].endswith("| 8 (8) | 1.00 |")
    assert lines[1].endswith("| 2 (2) | 0.25 |")


def test_trials_are_counted_of_functions_that_gain_alone() -> None:
    untuned = {"conv": 2.0, "pool": 1.0}
    conv, pool = [record("conv", seconds) for seconds in (1.9, 1.5, 1.0)], record("pool", 0.99)
    slow = function_curves(untuned, [conv[0], pool, *conv[1:]])
    quick = function_curves(untuned, [record("conv", 1.005), record("pool", 2.0)])
    never = function_curves(untuned, [record("conv", 1.5)])
    assert slow == {"conv": [2.0, 1.9, 1.5, 1.0], "pool": [1.0, 0.99]}
    lines = functions_markdown([{"functions": {"nothing": [slow], "model": [never], "others": [quick]}}]).splitlines()
    assert lines[2:] == [
        "| nothing | 1 | 3 | 1.00 | 3 | 0 |", "| model | 1 | 1 | 0.33 | 1 | 1 |", "| others | 1 | 1 | 0.33 | 1 | 0 |",
    ]


def test_functions_that_gain_nothing_leave_no_table() -> None:
    flat = function_curves({"conv": 1.0}, [record("conv", 0.97)])
    text = functions_markdown([{"functions": {"nothing": [flat], "others": [flat]}}])
    assert text == "No function gains more than 5%.\n"
