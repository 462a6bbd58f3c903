"""Progress is put together from events alone: what the table and the lines say follows from them."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from mlc.report.progress import LiveTable, line, listening
from mlc.report.session import SessionView
from mlc.tuning.events import (
    BatchCompiled,
    BatchMeasured,
    Event,
    Finished,
    SessionStarted,
    TaskConfirmed,
    TaskPlan,
    TaskStopped,
)
from mlc.tuning.report import TaskReport, TuneReport


def _plan(name: str, weight: int = 1, roofline: float = 1e-4, known: int = 0) -> TaskPlan:
    return TaskPlan(f"key-{name}", name, weight, "conv", 4, 300, roofline, known)


def _batch(name: str, best: float | None, default: float | None = 2e-3, **changes: object) -> BatchMeasured:
    values = {
        "task": f"key-{name}", "name": name, "batch": 1, "task_trials": 8, "trials": 8, "best_seconds": best,
        "default_seconds": default, "roofline_fraction": 0.5, "share": 0.5, "latency": 5e-3, "default_latency": 6e-3,
        "failures": {}, "elapsed": 10.0, "eta": 50.0, "best_decisions": {"tile": 4},
    }
    return BatchMeasured(**{**values, **changes})  # type: ignore[arg-type]


START = SessionStarted("s", (_plan("conv", 2), _plan("dense", 1, 5e-4), _plan("pool", 1, 1e-5, 3)), 100, 60.0, 7)
EVENTS: tuple[Event, ...] = (
    START,
    _batch("conv", 1e-3, failures={"timeout": 2}),
    _batch("dense", None, None, trials=16, latency=None, default_latency=None, elapsed=20.0, failures={"build": 1}),
    TaskStopped("key-dense", "dense", "failing", 8, None),
    TaskConfirmed("key-conv", "conv", "tuned", 2.2e-3, 1.1e-3),
)


def _view(*events: Event) -> SessionView:
    view = SessionView()
    for event in events:
        view.update(event)
    return view


def test_the_view_follows_the_events() -> None:
    view = _view(*EVENTS)
    conv, dense, pool = (view.tasks[f"key-{name}"] for name in ("conv", "dense", "pool"))
    assert (conv.state, dense.state, pool.state) == ("tuned", "failing", "waiting")
    assert conv.gain == pytest.approx(2.0) and dense.gain is None
    assert view.failures == {"build": 1, "timeout": 2}
    assert view.trials == 16 and view.latency is None and view.gain is None
    assert view.done == pytest.approx(20 / 60)  # the tighter of 16 of 100 trials and 20 of 60 seconds


def test_shares_add_up_and_unmeasured_tasks_count_with_their_roofline() -> None:
    view = _view(*EVENTS)
    ranked = view.ranked()
    assert [t.plan.name for t in ranked] == ["conv", "dense", "pool"]
    assert [t.cost for t in ranked] == pytest.approx([2 * 1.1e-3, 5e-4, 1e-5])
    assert sum(view.share(t) for t in ranked) == pytest.approx(1.0)


def test_one_task_is_active_at_a_time() -> None:
    view = _view(*EVENTS[:2], _batch("pool", 1e-5))
    assert view.active == "key-pool"
    assert [view.tasks[f"key-{n}"].state for n in ("conv", "pool")] == ["", "tuning"]


def test_without_a_budget_nothing_is_said_of_its_part() -> None:
    assert _view(SessionStarted("s", START.tasks, None, None), _batch("conv", 1e-3, eta=None)).done is None


@pytest.mark.parametrize(("events", "text"), [
    (EVENTS[:1], "3 tasks, 1 of them in the log already; budget: 100 trials or 1:00, 7 trials spent before"),
    (EVENTS[:2], "   0:10  conv: trial 8, best 1.00 ms (2.00× over untuned), failed: 2 timeout; "
                 "model 5.00 ms (1.20× over untuned), 0:50 left"),
    (EVENTS[:3], "   0:20  dense: trial 8, best -, failed: 1 build; model not known yet, 0:50 left"),
    (EVENTS[:4], "         dense: stopped, failing, after 8 trials"),
    (EVENTS[:5], "         conv: tuned, 1.10 ms against 2.20 ms untuned"),
])
def test_each_event_is_one_line(events, text) -> None:
    assert line(events[-1], _view(*events)) == text


def _shown(table: LiveTable, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(table.render())
    return console.export_text()


def test_the_live_table_counts_on_between_events() -> None:
    now = [0.0]
    table = LiveTable(height=40, clock=lambda: now[0])
    assert "preparing" in _shown(table)
    for event in EVENTS[:2]:
        table.update(event)
    now[0] = 5.0
    text = _shown(table)
    assert "0:15 elapsed · 0:45 left · 8/100 trials · model 5.00 ms (1.20× over untuned) · failed: 2 timeout" in text
    assert "25%" in text  # 15 of 60 seconds
    conv = next(row for row in text.splitlines() if "conv" in row)
    assert conv.split()[:8] == [">", "conv", "2", "8", "1.00", "ms", "10%", "80%"]


def test_the_live_table_fits_a_low_terminal() -> None:
    table = LiveTable(height=10)
    table.update(SessionStarted("s", tuple(_plan(f"t{n:02}", roofline=1 / (n + 1)) for n in range(30)), 10, None))
    text = _shown(table)
    assert len(text.splitlines()) <= 10
    assert "t00" in text and "t29" not in text and "and 26 smaller tasks" in text


def test_lines_go_to_a_pipe_and_a_table_to_a_terminal() -> None:
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=120, height=30)
        with listening(console) as listener:
            for event in EVENTS:
                listener(event)
        assert ("conv: tuned, 1.10 ms against" in out.getvalue()) is not terminal
        assert ("\x1b[" in out.getvalue()) is terminal


def test_json_lines_hold_every_event_whole() -> None:
    out = io.StringIO()
    with listening(Console(file=out, width=20, force_terminal=True), as_json=True) as listener:
        for event in EVENTS:
            listener(event)
    read = [json.loads(text) for text in out.getvalue().splitlines()]
    assert [r["event"] for r in read] == [type(e).__name__ for e in EVENTS]
    assert read[1]["best_seconds"] == 1e-3 and read[1]["failures"] == {"timeout": 2} and read[1]["eta"] == 50.0
    assert read[0]["tasks"][0]["name"] == "conv" and read[2]["best_seconds"] is None


def test_of_alternatives_the_fastest_counts_and_the_active_one_is_shown() -> None:
    plans = [_plan(f"t{n}", roofline=1 / (n + 1)) for n in range(6)]
    plans += [replace(_plan(name, roofline=2e-3), choice="c") for name in ("direct", "winograd")]
    view_events = (SessionStarted("s", tuple(plans), 10, None), _batch("direct", 3e-3), _batch("winograd", 5e-3))
    view = _view(*view_events)
    direct, winograd = view.tasks["key-direct"], view.tasks["key-winograd"]
    assert view.used(direct) and not view.used(winograd) and view.share(winograd) == 0.0
    assert sum(map(view.share, view.tasks.values())) == pytest.approx(1.0) and view.ranked()[-1] is winograd
    table = LiveTable(height=9)
    for event in view_events:
        table.update(event)
    row = next(text for text in _shown(table).splitlines() if "> winograd" in text)
    assert "not used" in row and "40%" in row


def test_the_end_takes_over_the_confirmed_estimate() -> None:
    task = TaskReport("key-conv", "conv", 2, "conv", 8, 9.0, 2.2e-3, 1.1e-3, 1e-4, {}, "flat", "tuned")
    view = _view(*EVENTS, Finished(TuneReport("finished", "s", 8, 30.0, 8, (task,))))
    assert view.latency == pytest.approx(2.2e-3) and view.gain == pytest.approx(2.0) and view.active == ""


def test_the_states_of_tasks_have_colours_and_what_broke_one_stays_short() -> None:
    shown = LiveTable(30, lambda: 0.0)
    for event in (*EVENTS, TaskStopped("key-pool", "pool", "broken: ZeroDivisionError: a defect", 0, None)):
        shown.update(event)
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True, color_system="standard").print(shown.render())
    assert "\x1b[32mtuned" in out.getvalue() and "\x1b[31mfailing" in out.getvalue()
    assert "broken" in out.getvalue() and "ZeroDivisionError" not in out.getvalue()


def test_what_is_compiled_and_not_run() -> None:
    """By arithmetic, which the best of nothing measured is not."""
    view, shown = SessionView(), LiveTable(24, lambda: 0.0)
    event = BatchCompiled("key-conv", "conv", 4, 4, 2e-5, 1e-3, {"build": 1}, 12.0, 48.0, {"stages": 3})
    for each in (START, event):
        view.update(each)
        shown.update(each)
    assert line(event, view) == "   0:12  conv: 4 compiled, best ~ 20.0 µs, refused: 1; model 1.00 ms, 0:48 left"
    task = view.tasks["key-conv"]
    assert (task.best, task.cost, task.trials, view.active, view.done) == (None, 4e-5, 4, "key-conv", 0.2)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown.render())
    assert "~ 20.0 µs" in console.export_text()
