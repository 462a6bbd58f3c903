"""Graphs and schedules tuned together, on a fake measurer: what is tuned and kept, and what compile then builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from cost_model.roofline import estimate
from mlc.artifact.compare import times_in_turn
from mlc.graph.pipeline import lower, optimise
from mlc.graph.substitute.choose import Decision, Substitutions, find
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.search import Found, Options
from mlc.graph.task import from_json
from mlc.graph.tasks import extract_tasks
from mlc.log import Layers, Prices, TuningLog
from mlc.log.decision import decision_of
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.report.session import SessionView
from mlc.substitution.codec import load_rule
from mlc.substitution.prove import certified
from mlc.target import resolve
from mlc.tuning.events import BatchMeasured, Event, Finished, SessionStarted
from mlc.tuning.joint import _SEARCH, JointTuning, Timer, TunedModel
from mlc.tuning.options import TuneOptions
from mlc.tuning.report import TuneReport

CPU = resolve("native", threads=2)
MERGE = Pattern(certified(load_rule({
    "name": "merge-columns", "inputs": {"x": ["m", "k"], "u": ["k", "a"], "v": ["k", "b"]},
    "source": {"nodes": [{"op": "matmul", "inputs": ["x", "u"]}, {"op": "matmul", "inputs": ["x", "v"]}],
               "outputs": ["%0", "%1"]},
    "target": {"nodes": [
        {"op": "concat", "inputs": ["u", "v"], "attributes": {"axis": 1}}, {"op": "matmul", "inputs": ["x", "%0"]},
        {"op": "slice", "inputs": ["%1"], "attributes": {"axis": 1, "begin": 0, "end": "a"}},
        {"op": "slice", "inputs": ["%1"], "attributes": {"axis": 1, "begin": "a", "end": "a+b"}}],
        "outputs": ["%2", "%3"]},
})))


class ByFunction:
    """Every schedule of a function takes the time that ``seconds`` gives for the function's roofline and columns."""

    def __init__(self, seconds: Callable[[float, int], float]) -> None:
        self._seconds = seconds
        self.columns: set[int] = set()

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: Callable[[int, MeasureResult], None] | None = None
    ) -> list[MeasureResult]:
        return [self._result(request, 3) for request in requests]

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        return [self._result(request, rounds) for request in requests]

    def close(self) -> None:
        pass

    def _result(self, request: MeasureRequest, repeats: int) -> MeasureResult:
        func = from_json(request.func)
        columns = int(func.params[-1].shape[-1])
        self.columns.add(columns)
        return MeasureResult((self._seconds(estimate(func, CPU.tvm), columns),) * repeats)


def products() -> tvm.IRModule:
    """Two products of one row, each read by another."""
    rng = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 64), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = []
            for _ in range(2):
                inner = builder.emit(op.matmul(x, relax.const(rng.standard_normal((64, 48)).astype("float32"))))
                parts.append(
                    builder.emit(op.matmul(inner, relax.const(rng.standard_normal((48, 32)).astype("float32"))))
                )
            result = builder.emit_output(relax.Tuple(parts))
        builder.emit_func_output(result)
    return builder.finalize()


def run(
    log: TuningLog, measurer: ByFunction, timer: Timer | None = None, rules: Substitutions | None = None,
    **more: object,
) -> TuneReport:
    options = TuneOptions(**{"trials": 12, "batch": 2, **more})  # type: ignore[arg-type]
    (report,) = joint(log, measurer, options, timer, rules).run()
    return report


def joint(
    log: TuningLog, measurer: ByFunction, options: TuneOptions, timer: Timer | None = None,
    rules: Substitutions | None = None, events: list[Event] | None = None,
) -> JointTuning:
    model = TunedModel(products(), rules or Substitutions([MERGE]), timer=timer)
    return JointTuning([model], CPU, log, options, measurer, None if events is None else events.append,
                       shipped=Layers([]))


def decision(log: TuningLog) -> Decision:
    """What compile does with the log."""
    found: list[Decision] = []
    rules = Substitutions([MERGE], decided=lambda subject: decision_of(log, subject), notify=found.append)
    optimise(products(), CPU, Prices(log), substitutions=rules)
    return found[0]


def test_without_rules_the_models_own_graph_is_tuned_alone(log: TuningLog) -> None:
    measurer = ByFunction(lambda least, columns: least + 10e-6)
    events: list[Event] = []
    (report,) = JointTuning([TunedModel(products())], CPU, log, TuneOptions(trials=12, batch=2), measurer,
                            events.append, shipped=Layers([])).run()
    assert report.graph is None and log.decisions() == [] and 96 not in measurer.columns
    assert [task.key for task in report.tasks] == [task.key for task in lower(products(), CPU).tasks]
    assert [type(event).__name__ for event in events].count("Finished") == 1 and report.trials <= 12


def test_the_merged_product_is_kept_where_it_is_faster(log: TuningLog) -> None:
    measurer = ByFunction(lambda least, columns: least + 10e-6)  # a call costs more than the work
    report = run(log, measurer)
    assert 96 in measurer.columns
    assert decision(log).chosen > 0
    assert decision(log).reason == "decided"
    keys = {t.key for t in extract_tasks(optimise(products(), CPU, substitutions=Substitutions([MERGE])), CPU)}
    assert {task.key for task in report.tasks} <= keys


def test_it_is_not_where_the_log_says_that_it_is_slower(log: TuningLog) -> None:
    run(log, ByFunction(lambda least, columns: 1e-4 if columns == 96 else 1e-5))
    assert decision(log).chosen == 0
    assert decision(log).reason == "decided"


def test_a_loss_as_a_whole_outweighs_the_tasks_times(log: TuningLog) -> None:
    def slower(modules: Sequence[tvm.IRModule], lookup: object) -> list[list[float]]:
        assert len(modules) == 2
        return [[2e-5 + i * 1e-8 for i in range(20)], [1e-5 + i * 1e-8 for i in range(20)]]

    report = run(log, ByFunction(lambda least, columns: least + 10e-6), slower)
    assert decision(log).chosen == 0
    assert report.graph is not None and not report.graph.substituted
    decided = decision(log).decided
    assert decided is not None and decided.seconds is not None and decided.own_seconds is not None
    assert decided.seconds > 1.9 * decided.own_seconds


def test_the_budget_holds_over_all_rounds(log: TuningLog) -> None:
    report = run(log, ByFunction(lambda least, columns: least + 10e-6))
    assert report.trials <= 12
    assert report.best_latency is not None


def test_where_the_own_graph_was_decided_for_nothing_is_searched(
    log: TuningLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(log, ByFunction(lambda least, columns: 1e-4 if columns == 96 else 1e-5))
    monkeypatch.setattr("mlc.graph.substitute.choose.search", lambda *_args, **_options: pytest.fail("it searched"))
    assert decision(log).reason == "decided"
    assert not decision(log).found.reports


@pytest.mark.parametrize("seconds", [8.0, 80.0])
def test_a_search_that_a_small_budget_cut_short_decides_nothing(
    seconds: float, log: TuningLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: object, **options: object) -> Found:
        found = find(*args, **options)  # type: ignore[arg-type]
        return replace(found, candidates=found.candidates[:1],
                       reports=tuple(replace(report, reason="work") for report in found.reports))

    monkeypatch.setattr("mlc.tuning.joint.find", cut)
    report = run(log, ByFunction(lambda least, columns: least + 10e-6), trials=4, seconds=seconds)
    assert report.graph is not None and not report.graph.substituted
    short = _SEARCH * seconds < Options().work
    assert (decision(log).reason != "decided") == short, "a compile has more time to search than this run had"


def test_of_two_runs_the_later_decides(log: TuningLog) -> None:
    run(log, ByFunction(lambda least, columns: 1e-4 if columns == 96 else 1e-5))
    assert decision(log).chosen == 0
    with TuningLog(log.path.with_name("other.db")) as other:
        run(other, ByFunction(lambda least, columns: least + 10e-6))
        log.put_decisions(other.decisions())
    assert decision(log).chosen > 0


@pytest.mark.parametrize("where", ["find", "lower", "subject", "agree"])
def test_what_goes_wrong_with_other_graphs_is_a_warning(
    where: str, log: TuningLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(*args: object, **options: object) -> object:
        calls.append(args)
        if where == "lower" and len(calls) == 1:  # of the model's own graph
            return lower(*args, **options)  # type: ignore[arg-type]
        raise RuntimeError("a defect")

    monkeypatch.setattr(f"mlc.tuning.joint.{where}", fails)
    with pytest.warns(UserWarning, match=r"substitutions must not fail, but they did \(RuntimeError: a defect\)"):
        report = run(log, ByFunction(lambda least, columns: least + 10e-6))
    monkeypatch.undo()
    own = {task.key for task in extract_tasks(optimise(products(), CPU), CPU)}
    assert ({task.key for task in report.tasks} == own) != (where == "subject")  # which comes when all is done
    monkeypatch.setenv("MLC_DEBUG", "1")
    monkeypatch.setattr(f"mlc.tuning.joint.{where}", fails)
    calls.clear()
    with pytest.raises(RuntimeError, match="a defect"):
        run(log, ByFunction(lambda least, columns: least + 10e-6))


def test_an_interrupted_run_decides_nothing_and_resumes(log: TuningLog) -> None:
    class Interrupted(ByFunction):
        def measure(self, requests: Sequence[MeasureRequest], on_result: object = None) -> list[MeasureResult]:
            if len(self.columns) > 1:
                raise KeyboardInterrupt
            return super().measure(requests)

    first = run(log, Interrupted(lambda least, columns: least + 10e-6))
    assert first.reason == "interrupted"
    assert log.decisions() == []
    second = run(log, ByFunction(lambda least, columns: least + 10e-6), resume=True)
    assert 0 < first.trials + second.trials <= 12
    assert len(log.decisions()) == 1


def test_all_runs_are_told_as_one(log: TuningLog) -> None:
    """Trials add up, and the model's time is that of one graph, not of both together."""
    events: list[Event] = []
    (report,) = joint(log, ByFunction(lambda least, columns: 20e-6 if columns == 96 else 30e-6),
                      TuneOptions(trials=40, batch=2), events=events).run()
    assert [type(e) for e in events].count(Finished) == 1
    assert isinstance(events[-1], Finished) and events[-1].report is report
    starts = [e for e in events if isinstance(e, SessionStarted)]
    assert all(start.trials == 40 and all(len(plan.calls) > 1 for plan in start.tasks) for start in starts)
    batches = [e for e in events if isinstance(e, BatchMeasured)]
    assert [b.trials for b in batches] == sorted(b.trials for b in batches)
    assert batches[-1].trials == report.trials
    # own: two functions called twice; merged: the wide product once, the others twice
    assert batches[-1].default_latency == pytest.approx(4 * 30e-6)
    assert batches[-1].latency == pytest.approx(20e-6 + 2 * 30e-6)
    view = SessionView()
    for event in events[:-1]:
        view.update(event)
    assert view.graph > 0
    used = {task.plan.name for task in view.tasks.values() if view.used(task)}
    assert len(used) == 2 < len(view.tasks)
    assert sum(map(view.share, view.tasks.values())) == pytest.approx(1.0)


def test_real_modules_are_timed_in_turn() -> None:
    times = times_in_turn([optimise(products(), CPU)] * 2, CPU, lambda key: None)
    assert [len(each) for each in times] == [25, 25]
    assert all(0 < seconds < 1 for each in times for seconds in each)


def narrow(columns: int) -> tvm.IRModule:
    """One product of a row with 64 x ``columns`` weights, and one with 64 x 48 that every such model has."""
    rng = np.random.default_rng(columns)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 64), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = [builder.emit(op.matmul(x, relax.const(rng.standard_normal((64, n), dtype=np.float32))))
                     for n in (columns, 48)]
            result = builder.emit_output(relax.Tuple(parts))
        builder.emit_func_output(result)
    return builder.finalize()


class Counting(ByFunction):
    """Remembers how often each function was measured."""

    def __init__(self) -> None:
        super().__init__(lambda least, columns: 50 * least)
        self.measured: list[tuple[str, str]] = []

    def measure(self, requests: Sequence[MeasureRequest], on_result: object = None) -> list[MeasureResult]:
        self.measured += [(request.task_key, request.trace) for request in requests]
        return super().measure(requests)


def test_what_several_models_have_is_tuned_once_for_all(log: TuningLog) -> None:
    measurer, events = Counting(), list[Event]()
    models = [TunedModel(narrow(columns)) for columns in (16, 80)]
    reports = JointTuning(models, CPU, log, TuneOptions(trials=24, batch=2), measurer, events.append,
                          shipped=Layers([])).run()
    keys = [{task.key for task in report.tasks} for report in reports]
    assert len(keys[0] & keys[1]) == 1 and len(keys[0] | keys[1]) == 3
    assert len(measurer.measured) == len(set(measurer.measured)), "no candidate twice"
    (shared,) = keys[0] & keys[1]
    start = next(e for e in events if isinstance(e, SessionStarted))
    assert {plan.key: plan.weight for plan in start.tasks} == {key: 1 + (key == shared) for key in keys[0] | keys[1]}
    assert all(task.weight == 1 for report in reports for task in report.tasks)
    finished = [e for e in events if isinstance(e, Finished)]
    assert len(finished) == 1 and finished[0].report.best_latency == pytest.approx(
        sum(report.best_latency or 0.0 for report in reports))


def test_trials_follow_priorities(log: TuningLog, tmp_path: Path) -> None:
    spent = []
    for priorities in ((1, 20), (20, 1)):
        with TuningLog(tmp_path / f"{priorities[0]}.db") as fresh:
            models = [TunedModel(narrow(n), priority=p) for n, p in zip((72, 80), priorities, strict=True)]
            reports = JointTuning(models, CPU, fresh, TuneOptions(trials=14, batch=2, confirm_rounds=0), Counting(),
                                  shipped=Layers([])).run()
        keys = [{task.key for task in report.tasks} for report in reports]
        spent.append([sum(t.trials for t in report.tasks if t.key not in keys[1 - i])
                      for i, report in enumerate(reports)])
    assert spent[0][0] < spent[0][1] and spent[1][0] > spent[1][1], spent


def test_several_models_one_of_which_has_other_graphs(log: TuningLog) -> None:
    """Each gets its decision, and the events tell of both together."""
    events: list[Event] = []
    models = [TunedModel(mod, Substitutions([MERGE])) for mod in (products(), narrow(80))]
    measurer = ByFunction(lambda least, columns: least + 10e-6)
    reports = JointTuning(models, CPU, log, TuneOptions(trials=40, batch=2), measurer, events.append,
                          shipped=Layers([])).run()
    assert len(log.decisions()) == 2
    assert [report.graph is not None and report.graph.substituted for report in reports] == [True, False]
    assert [report.graph is not None and report.graph.others for report in reports] == [1, 0]
    batches = [e for e in events if isinstance(e, BatchMeasured)]
    assert [b.trials for b in batches] == sorted(b.trials for b in batches) and batches[-1].trials == reports[0].trials
    assert batches[-1].latency == pytest.approx(sum(report.best_latency or 0.0 for report in reports), rel=0.05)
    assert sum(batch.share for batch in batches[-1:]) <= 1.0
