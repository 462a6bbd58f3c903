"""Whole runs on a fake measurer: budgets, records, events, failures, interrupts, resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from session_runs import BEST, DEFAULT, points, tune
from tuning_tasks import TARGET, TiledMatmul, matmul

from mlc.errors import MeasureError, UsageError
from mlc.graph.task import Task
from mlc.log import Record, TuningLog
from mlc.testing.measuring import FakeMeasurer, bowl, decided
from mlc.tuning import TuneOptions, tune_tasks
from mlc.tuning.events import BatchMeasured, Event, Finished, SessionStarted, TaskConfirmed, TaskStopped
from schedules import registry
from schedules.space import Knob, schedule_with
from schedules.trace import trace_json

pytestmark = pytest.mark.usefixtures("small_space")


def test_a_run_finds_the_best_and_writes_down_everything(log: TuningLog) -> None:
    measurer = FakeMeasurer(bowl(BEST), noise=0.005)
    report, listener = tune(log, measurer, trials=64)
    (task,) = report.tasks
    assert points(measurer)[0] == DEFAULT and BEST in points(measurer)
    assert report.reason in ("trials", "finished") and report.trials == len(measurer.log) == task.trials
    assert task.verdict == "tuned" and task.best_seconds == pytest.approx(1e-3, rel=0.02)
    assert task.default_seconds == pytest.approx(bowl(BEST)(DEFAULT), rel=0.02)
    assert task.speedup == pytest.approx(task.default_seconds / task.best_seconds)
    best = log.best(task.key)
    assert best is not None and decided(best.trace) == BEST and best.kept and best.trace in {
        r.trace for r in measurer.log
    }
    records = list(log.records())
    assert len(records) == report.measured == report.trials + len(measurer.compared[0])
    assert [r.trial for r in records[: report.trials]] == list(range(1, report.trials + 1))
    assert {r.session for r in records} == {report.session} and all(r.flops > 0 and r.machine for r in records)
    kinds = [type(e) for e in listener.events]
    assert kinds[0] is SessionStarted and kinds[-1] is Finished and TaskConfirmed in kinds
    assert listener.events[-1].report == report  # type: ignore[union-attr]


def test_a_batch_event_comes_after_its_records_are_durable(log: TuningLog, tmp_path: Path) -> None:
    seen = []

    def on_event(event: Event) -> None:
        if isinstance(event, BatchMeasured):
            with TuningLog(tmp_path / "log.db", readonly=True) as reader:
                seen.append((event.trials, reader.count()))

    tune_tasks([matmul(64, 64, 32)], TARGET, log, TuneOptions(trials=20), FakeMeasurer(bowl(BEST)), on_event)
    assert seen and all(trials == stored for trials, stored in seen)


def test_equal_seeds_measure_the_same_candidates_in_the_same_order(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        measurer = FakeMeasurer(bowl(BEST))
        with TuningLog(tmp_path / f"{name}.db") as log:
            tune(log, measurer, trials=48, seed=5)
        runs.append([r.trace for r in measurer.log])
    assert runs[0] == runs[1]


def test_candidates_are_timed_beside_the_default(log: TuningLog) -> None:
    measurer = FakeMeasurer(bowl(BEST))
    tune(log, measurer, trials=24)
    first, *others = measurer.log
    assert {decided(request.baseline) for request in measurer.log} == {DEFAULT} and first.baseline == first.trace
    assert others[-1].baseline_seconds == pytest.approx(bowl(BEST)(DEFAULT)), "known by then"
    assert not any(request.baseline for requests in measurer.compared for request in requests)


@pytest.mark.parametrize("machine", ["", "another"])
def test_a_default_that_another_machine_timed_is_no_measure_here(
    log: TuningLog, tmp_path: Path, machine: str
) -> None:
    tune(log, FakeMeasurer(bowl(BEST)), trials=16, confirm_rounds=0)
    measurer = FakeMeasurer(bowl(BEST))
    with TuningLog(tmp_path / "given.db") as given:
        given.append([replace(record, machine=machine or record.machine) for record in log.records()])
        tune(given, measurer, trials=16)
    usual = 0.0 if machine else bowl(BEST)(DEFAULT)
    assert measurer.log and all(request.baseline and request.baseline_seconds == usual for request in measurer.log)


class Clock:
    """Stands in for ``time``: every look at it takes ten milliseconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now

    time = monotonic


def test_equal_seeds_logs_and_times_give_equal_runs_over_several_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [matmul(64, 64, 32, weight=3), matmul(32, 64, 32), matmul(64, 128, 64)]
    runs = []
    for name in ("a", "b"):
        measurer = FakeMeasurer(bowl(BEST), noise=0.02)
        with TuningLog(tmp_path / f"{name}.db") as log:
            tune(log, FakeMeasurer(bowl(BEST)), tasks[:1], trials=10, seed=1)  # what an earlier run left behind
            with monkeypatch.context() as patch:
                clock = Clock()
                patch.setattr("mlc.tuning.session.time", clock)
                patch.setattr("mlc.tuning.journal.time", clock)
                report, _ = tune(log, measurer, tasks, trials=70, seed=5)
        runs.append(([(r.task_key, r.trace) for r in measurer.log], [t.trials for t in report.tasks], report.reason))
    assert runs[0] == runs[1] and min(runs[0][1]) > 0


def _shipped(task: Task, decisions: dict[str, int]) -> Record:
    """A record that came with mlc: timed far away, at a time that means nothing here."""
    sch = schedule_with(TiledMatmul(), task.func, TARGET.tvm, decisions)
    return Record(task.key, task.name, TiledMatmul.name, decisions, trace_json(sch), times=(1e-9,), machine="theirs",
                  made_for=TARGET.canonical)


@pytest.mark.parametrize(("rows", "verdict"), [(8, "default"), (16, "tuned")])
def test_what_ships_is_measured_first_and_is_what_a_winner_must_beat(
    log: TuningLog, rows: int, verdict: str
) -> None:
    task = matmul(64, 64, 32)
    shipped = _shipped(task, {"rows": rows, "columns": 32, "unroll": 4})
    measurer = FakeMeasurer(bowl(BEST))
    report = tune_tasks([task], TARGET, log, TuneOptions(trials=40), measurer, shipped=lambda _task: shipped)
    assert points(measurer)[0] == (rows, 32, 4) and DEFAULT in points(measurer)
    (found,) = report.tasks
    assert found.verdict == verdict and found.best_seconds == pytest.approx(1e-3)
    assert found.default_seconds == pytest.approx(bowl(BEST)((rows, 32, 4)))
    best = log.best(task.key)
    assert best is not None and decided(best.trace) == BEST and not best.made_for
    assert not any(record.machine == "theirs" for record in log.records())


@pytest.mark.parametrize("changes", [{"space": "cpu.older"}, {"decisions": {"rows": 5}}, {"trace": "[[],[]"}])
def test_what_ships_and_does_not_fit_is_left_alone(log: TuningLog, changes: dict[str, object]) -> None:
    task = matmul(64, 64, 32)
    shipped = replace(_shipped(task, {"rows": 8, "columns": 32, "unroll": 4}), **changes)  # type: ignore[arg-type]
    measurer = FakeMeasurer(bowl(BEST))
    tune_tasks([task], TARGET, log, TuneOptions(trials=8), measurer, shipped=lambda _task: shipped)
    assert points(measurer)[0] == DEFAULT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_memory_of_a_session_stays_flat(log: TuningLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 trials: once the cost model has its first trees, memory grows by less than a tenth."""
    import psutil

    class Wide(TiledMatmul):
        """Two hundred times as many points."""

        def knobs(self, func, target):  # type: ignore[no-untyped-def]
            return (*super().knobs(func, target), Knob("note", tuple(range(1, 201))))

        def seeds(self, func, target):  # type: ignore[no-untyped-def]
            yield from ({**seed, "note": 1} for seed in super().seeds(func, target))

        def schedule(self, sch, target, pick):  # type: ignore[no-untyped-def]
            super().schedule(sch, target, pick)
            sch.annotate(sch.get_loops(sch.get_sblock("C_update"))[0], "pragma_auto_unroll_max_step", pick("note"))

    class Forgetful(FakeMeasurer):
        """Keeps no requests, which would be the test's own growth."""

        def measure(self, requests, on_result=None):  # type: ignore[no-untyped-def]
            self.log.clear()
            return super().measure(requests, on_result)

    monkeypatch.setattr(registry, "find", lambda func, target: Wide())
    monkeypatch.setattr("mlc.tuning.allocation.PATIENCE", 10_000)
    sizes: dict[int, int] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, BatchMeasured):
            sizes[event.trials] = psutil.Process().memory_info().rss

    measurer = Forgetful(lambda values: 1e-3 * (2 + (hash(values) % 1000) / 1000))
    report = tune_tasks([matmul(64, 64, 32)], TARGET, log, TuneOptions(trials=2000), measurer, on_event)
    assert report.trials == 2000
    early = next(size for trials, size in sizes.items() if trials >= 200)
    assert max(sizes.values()) < 1.1 * early


def test_trials_are_honoured_and_shared_by_need(log: TuningLog) -> None:
    tasks = [matmul(64, 64, 32, weight=20), matmul(32, 64, 32), matmul(64, 128, 64)]
    report, _ = tune(log, FakeMeasurer(bowl(BEST)), tasks, trials=50, confirm_rounds=0)
    assert report.trials == 50 and all(t.trials >= 1 for t in report.tasks)
    assert report.tasks[0].trials > report.tasks[1].trials


def test_seconds_are_honoured(log: TuningLog) -> None:
    report, listener = tune(log, FakeMeasurer(bowl(BEST)), [matmul(64, 64, 32)], trials=None, seconds=0.4)
    assert report.reason in ("seconds", "finished") and report.seconds < 2.0
    assert all(e.eta is not None for e in listener.of(BatchMeasured))  # type: ignore[union-attr]


def test_fewer_trials_than_tasks_still_leaves_every_task_compilable(log: TuningLog) -> None:
    tasks = [matmul(16, 64, 16), matmul(64, 128, 64), matmul(64, 64, 32)]
    report, _ = tune(log, FakeMeasurer(bowl(BEST)), tasks, trials=2)
    assert [t.trials for t in report.tasks] == [0, 2, 0]
    first, largest, last = report.tasks
    assert first.verdict == "unconfirmed" and largest.best_seconds < 1.0
    expected = first.expected_seconds + largest.best_seconds + last.expected_seconds
    assert report.best_latency == pytest.approx(expected) and first.expected_seconds > first.roofline_seconds


def test_equal_tasks_are_tuned_once_with_their_weights_added(log: TuningLog) -> None:
    report, _ = tune(log, FakeMeasurer(bowl(BEST)), [matmul(64, 64, 32, weight=2), matmul(64, 64, 32, weight=3)])
    assert [t.weight for t in report.tasks] == [5]
    assert report.best_latency == pytest.approx(5 * report.tasks[0].best_seconds)


def test_candidates_that_lower_to_known_code_are_no_trials(log: TuningLog) -> None:
    measurer = FakeMeasurer(bowl(BEST), code=lambda values: f"{values[:2]}")  # the third knob changes nothing
    report, _ = tune(log, measurer, trials=20, confirm_rounds=0)
    codes = [record.code for record in log.records()]
    assert len(codes) == len(set(codes)) == report.trials == report.tasks[0].trials == report.measured
    assert len(measurer.log) > report.trials
    again = FakeMeasurer(bowl(BEST), code=lambda values: f"{values[:2]}")
    tune(log, again, trials=20, confirm_rounds=0)
    codes = [record.code for record in log.records()]
    assert len(codes) == len(set(codes))


def test_the_best_so_far_travels_with_a_request(log: TuningLog) -> None:
    measurer = FakeMeasurer(bowl(BEST))
    tune(log, measurer, trials=24, confirm_rounds=0)
    first = sum(request.best == 0.0 for request in measurer.log)
    assert first in (4, 6, 8) and all(request.best == 0.0 for request in measurer.log[:first])
    assert measurer.log[first].best == min(bowl(BEST)(p) for p in points(measurer)[:first])


def test_failures_are_counted_and_never_chosen(log: TuningLog) -> None:
    def failure(values: tuple[int, ...]) -> str:
        return {4: "wrong", 8: "crash", 16: "timeout"}.get(values[0], "")

    measurer = FakeMeasurer(bowl(BEST), failure=failure)
    report, listener = tune(log, measurer, trials=64)
    (task,) = report.tasks
    failed = [p for p in points(measurer) if failure(p)]
    assert sum(task.failures.values()) == len(failed) and set(task.failures) <= {"wrong", "crash", "timeout"}
    best = log.best(task.key)
    assert best is not None and decided(best.trace)[0] in (1, 2)
    assert sum(not r.ok for r in log.records()) == len(failed)
    assert listener.of(BatchMeasured)[-1].failures == task.failures  # type: ignore[union-attr]


def test_nothing_ever_works(log: TuningLog) -> None:
    """Failures of several kinds are not taken for a run that cannot work."""
    measurer = FakeMeasurer(bowl(BEST), failure=lambda v: "build" if v[2] == 1 else "wrong")
    report, listener = tune(log, measurer, trials=200)
    assert report.reason == "finished" and report.tasks[0].stopped == "failing"
    assert log.best(report.tasks[0].key) is None and report.best_latency is None
    assert [e.reason for e in listener.of(TaskStopped)] == ["failing"]  # type: ignore[union-attr]


def test_a_task_whose_space_is_broken_does_not_stop_the_others(
    log: TuningLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(TiledMatmul):
        def knobs(self, func, target):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("a defect")

    bad, good = matmul(16, 64, 16), matmul(64, 64, 32)
    spaces: Callable[..., TiledMatmul] = lambda func, target: Broken() if func.same_as(bad.func) else TiledMatmul()  # noqa: E731
    monkeypatch.setattr(registry, "find", spaces)
    report, _ = tune(log, FakeMeasurer(bowl(BEST)), [bad, good])
    assert {t.name: t.stopped.partition(":")[0] for t in report.tasks}[bad.name] == "broken"
    assert {t.name: t.verdict for t in report.tasks}[good.name] == "tuned"


def test_a_model_that_cannot_learn_a_task_does_not_stop_the_others(log: TuningLog) -> None:
    from cost_model.gbt import RankingModel

    bad, good = matmul(16, 64, 16, weight=100), matmul(64, 64, 32)

    class Narrow(RankingModel):
        def fit(self, samples):  # type: ignore[no-untyped-def]
            if any(s.group == bad.key for s in samples):
                raise ZeroDivisionError("a defect")
            super().fit(samples)

    measurer = FakeMeasurer(bowl(BEST))
    report = tune_tasks([bad, good], TARGET, log, TuneOptions(trials=40), measurer, model=Narrow())
    tuned = {t.key: t for t in report.tasks}
    assert tuned[bad.key].stopped == "broken: ZeroDivisionError: a defect" and tuned[bad.key].trials > 0
    assert tuned[good.key].verdict == "tuned" and log.count() == report.measured
    assert sum(t.trials for t in report.tasks) == report.trials


def test_luck_does_not_win(log: TuningLog) -> None:
    """Every schedule takes the same time; the search's minimum is noise, and the default stays."""
    measurer = FakeMeasurer(lambda values: 1e-3, noise=0.05)
    report, _ = tune(log, measurer, trials=40)
    (task,) = report.tasks
    assert task.verdict == "default"
    best = log.best(task.key)
    assert best is not None and decided(best.trace) == DEFAULT and best.kept


def test_a_later_run_keeps_the_earlier_winner_unless_it_is_beaten(log: TuningLog) -> None:
    tune(log, FakeMeasurer(bowl(BEST)), trials=64)
    first = log.best(matmul(64, 64, 32).key)
    measurer = FakeMeasurer(bowl(BEST), noise=0.01, seed=9)
    report, _ = tune(log, measurer, trials=24)
    assert report.tasks[0].verdict == "earlier"
    best = log.best(report.tasks[0].key)
    assert first is not None and best is not None and best.decisions == first.decisions


def test_an_earlier_winner_that_is_a_regression_by_now_is_dropped(log: TuningLog) -> None:
    tune(log, FakeMeasurer(bowl(BEST)), trials=64)
    changed = FakeMeasurer(lambda v: 3e-3 if v == BEST else 5e-4 * (1 + abs(v[1] - 16)), noise=0.001)
    report, _ = tune(log, changed, trials=16)
    assert report.tasks[0].verdict != "earlier"
    best = log.best(report.tasks[0].key)
    assert best is not None and decided(best.trace) != BEST


def test_what_the_log_knows_is_not_measured_again(log: TuningLog) -> None:
    first, second = FakeMeasurer(bowl(BEST)), FakeMeasurer(bowl(BEST))
    tune(log, first, trials=20)
    report, listener = tune(log, second, trials=20)
    assert not set(points(first)) & set(points(second))
    started = listener.of(SessionStarted)[0]
    assert started.tasks[0].known > 20  # type: ignore[union-attr]
    assert report.tasks[0].default_seconds == pytest.approx(bowl(BEST)(DEFAULT))


def test_resume_continues_the_budget_and_a_fresh_run_does_not(log: TuningLog) -> None:
    tune(log, FakeMeasurer(bowl(BEST)), trials=24)
    report, listener = tune(log, FakeMeasurer(bowl(BEST)), trials=40, resume=True)
    started = listener.of(SessionStarted)[0]
    assert report.trials == 16 and started.spent_trials == 24 and started.trials == 16  # type: ignore[union-attr]
    report, _ = tune(log, FakeMeasurer(bowl(BEST)), trials=40, resume=True)
    assert report.trials == 0 and report.reason == "trials"
    other, _ = tune(log, FakeMeasurer(bowl(BEST)), [matmul(32, 64, 16)], trials=10, resume=True)
    assert other.trials == 10
    fresh, _ = tune(log, FakeMeasurer(bowl(BEST)), trials=8)
    assert fresh.trials == 8


def test_an_interrupt_ends_the_run_with_what_was_found(log: TuningLog) -> None:
    measurer = FakeMeasurer(bowl(BEST), interrupt_at=21)
    report, listener = tune(log, measurer, trials=64)
    assert report.reason == "interrupted" and report.trials == 21 == log.count()
    assert isinstance(listener.events[-1], Finished)
    assert log.best(report.tasks[0].key) is not None and report.tasks[0].verdict == "unconfirmed"
    resumed, _ = tune(log, FakeMeasurer(bowl(BEST)), trials=64, resume=True)
    assert resumed.trials <= 43


def test_a_measurer_that_cannot_go_on_ends_the_run_but_loses_nothing(log: TuningLog) -> None:
    class Dying(FakeMeasurer):
        def measure(self, requests, on_result=None):  # type: ignore[no-untyped-def]
            if len(self.log) >= 16:
                raise MeasureError("no worker can be started")
            return super().measure(requests, on_result)

    with pytest.raises(MeasureError):
        tune(log, Dying(bowl(BEST)), trials=64)
    assert log.count() == 16


def test_the_cost_model_is_kept_in_the_log(log: TuningLog) -> None:
    from cost_model.gbt import RankingModel

    tune(log, FakeMeasurer(bowl(BEST)), trials=24)
    blob = log.get_state(f"cost_model/{TARGET.canonical}")
    assert blob is not None
    model = RankingModel()
    model.load(blob)
    assert model.known(matmul(64, 64, 32).key) == 24


def test_a_damaged_or_old_cost_model_is_trained_anew(log: TuningLog) -> None:
    tune(log, FakeMeasurer(bowl(BEST)), trials=24)
    log.put_state(f"cost_model/{TARGET.canonical}", b"something else")
    tune(log, FakeMeasurer(bowl(BEST)), trials=8)
    from cost_model.gbt import RankingModel

    model = RankingModel()
    model.load(log.get_state(f"cost_model/{TARGET.canonical}") or b"")
    assert model.known(matmul(64, 64, 32).key) >= 32


def test_the_report_and_the_events_are_json(log: TuningLog) -> None:
    import json

    report, listener = tune(log, FakeMeasurer(bowl(BEST), failure=lambda v: "crash" if v[0] == 4 else ""), trials=24)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["trials"] == report.trials and document["tasks"][0]["speedup"] >= 1
    for event in listener.events:
        assert json.loads(json.dumps(event.to_json(), allow_nan=False))["event"] == type(event).__name__


@pytest.mark.parametrize(("options", "text"), [
    ({"trials": 0}, "trials must be at least 1, got 0"), ({"seconds": -1.0}, "seconds must be positive, got -1.0"),
    ({"batch": 0}, "at least 1 candidate, got 0"),
    ({"strategy": "x"}, "coordinate, evolutionary, exhaustive, grid, random, got 'x'"),
    ({"confirm_rounds": -1}, "must not be negative"), ({"seconds": float("nan")}, "seconds must be positive"),
])  # fmt: skip
def test_options_are_checked(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        replace(TuneOptions(), **options)  # type: ignore[arg-type]
