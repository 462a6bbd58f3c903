"""Plots of a log: what they are drawn from, and what the page tells beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mlc.errors import UsageError
from mlc.log import Record, Session
from mlc.report import log_page, plots


def _record(task: str, seconds: float, when: float, session: str = "a", failure: str = "", detail: str = "") -> Record:
    times = () if failure else (seconds,)
    return Record(task, f"{task}-name", "space", {}, "[]", times, failure=failure, detail=detail, session=session,
                  when=when)


RECORDS = [
    _record("one", 4e-3, 1010.0), _record("one", math.inf, 1011.0, failure="crash", detail="<SIGSEGV>"),
    _record("one", 2e-3, 1020.0), _record("two", 1e-3, 1030.0), _record("one", 1e-3, 5005.0, "b"),
    _record("two", math.inf, 5006.0, "b", "build", "x"), _record("two", 5e-4, 5010.0, "b"),
    _record("two", math.inf, 5011.0, "b", "build", "y"), _record("two", math.inf, 5012.0, "b", "build", "y"),
]
SESSIONS = [
    Session("a", 1000.0, {"reason": "trials", "stopped": {"one": "flat", "two": "flat"}}, 4, 30.0),
    Session("b", 5000.0, {}, 5, 12.0),
]


def test_the_clock_runs_while_a_run_does() -> None:
    clock = log_page.tuning_clock(RECORDS, SESSIONS)
    assert [clock(r) for r in RECORDS] == [10.0, 11.0, 20.0, 30.0, 35.0, 36.0, 40.0, 41.0, 42.0]
    alone = log_page.tuning_clock(RECORDS, [])
    assert [alone(r) for r in RECORDS] == [0.0, 1.0, 10.0, 20.0, 20.0, 21.0, 25.0, 26.0, 27.0]


def test_curves_go_by_trials_and_by_time() -> None:
    def lines(figure):  # type: ignore[no-untyped-def]
        return {line.get_label(): [list(map(float, v)) for v in line.get_data()] for line in figure.axes[0].lines}

    by_trials = lines(plots.best_so_far(RECORDS))
    assert by_trials["one-name"] == [[1, 3, 4, 4], [1.0, 0.5, 0.25, 0.25]]
    figure = plots.best_so_far(RECORDS, clock=log_page.tuning_clock(RECORDS, SESSIONS))
    assert lines(figure)["one-name"] == [[10, 20, 35, 35], [1.0, 0.5, 0.25, 0.25]]
    assert lines(figure)["two-name"] == [[30, 40, 42], [1.0, 0.5, 0.5]]
    assert figure.axes[0].get_xlabel() == "seconds of tuning"


def test_failures_are_counted_with_what_is_commonest() -> None:
    assert log_page.failures(RECORDS) == [("build", 3, "y"), ("crash", 1, "<SIGSEGV>")]


@pytest.mark.parametrize("records", [RECORDS, RECORDS[:1], []])
def test_the_page_tells_why_runs_stopped_and_escapes_what_it_quotes(records: list[Record]) -> None:
    page = log_page.page("some/log.db", records, SESSIONS)
    assert page.count("<svg") == 2 and "2 flat" in page and "not ended" in page and "<script" not in page
    assert "<SIGSEGV>" not in page and (not records[1:] or "&lt;SIGSEGV&gt;" in page)
    assert replace(SESSIONS[0]).options["reason"] in page


@pytest.mark.parametrize(("suffix", "start"), [(".html", b"<!doctype"), (".png", b"\x89PNG"), (".svg", b"<svg")])
def test_each_kind_of_file(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"log{suffix}"
    log_page.check_plot(path)
    log_page.write(path, "log.db", RECORDS, SESSIONS)
    assert path.read_bytes().startswith(start)
    with pytest.raises(UsageError, match=r"ends in .html"):
        log_page.check_plot(tmp_path / "log.gif")
