"""Which schedule each function gets: the log's, the space's seed, or the one it came with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import tvm

from mlc.build import schedule
from mlc.build.schedule import schedule_functions
from mlc.errors import BuildError
from mlc.graph.tasks import extract_tasks
from mlc.log import Record
from mlc.target import resolve
from mlc.testing.programs import dense, twins
from schedules import registry
from schedules.space import InvalidDecision, Knob, Space, first_seed, schedule_with
from schedules.trace import trace_json

TARGET = resolve("native", threads=1)


def _nothing(key: str) -> None:
    return None


def _record(mod: tvm.IRModule, name: str) -> tuple[Record, tvm.IRModule]:
    """A record of some other decisions than the seed's for a task, and the function they lead to."""
    task = next(t for t in extract_tasks(mod, TARGET) if t.name == name)
    space = registry.find(task.func, TARGET.tvm)
    _, seed = first_seed(space, task.func, TARGET.tvm)
    for knob in space.knobs(task.func, TARGET.tvm):
        for value in knob.values:
            decisions = {**seed, knob.name: value}
            if decisions == seed:
                continue
            try:
                sch = schedule_with(space, task.func, TARGET.tvm, decisions)
            except InvalidDecision:
                continue
            return Record(task.key, task.name, space.name, decisions, trace_json(sch), times=(1e-6, 3e-6)), sch.mod
    raise AssertionError("the space has no second point")


def test_without_a_log_every_function_gets_its_seed() -> None:
    scheduled, functions, same = schedule_functions(dense().mod, TARGET, _nothing)
    assert [f.name for f in functions] == ["matmul", "bias_relu"]
    assert {f.source for f in functions} == {"seed"} and not any(f.to_json()["tuned"] for f in functions)
    assert all(f.decisions and f.space.startswith("cpu.") for f in functions)
    assert same == {}
    for function in functions:
        assert scheduled[function.symbol].attrs["tirx.is_scheduled"]
        assert scheduled[function.symbol].attrs["global_symbol"] == function.symbol


def test_the_log_goes_before_the_seed() -> None:
    mod = dense().mod
    record, expected = _record(mod, "matmul")
    scheduled, functions, _ = schedule_functions(mod, TARGET, {record.task_key: record}.get)
    matmul, other = functions
    assert (matmul.source, matmul.decisions, matmul.seconds) == ("log", record.decisions, 2e-6)
    assert matmul.to_json()["tuned"] and other.source == "seed"
    tvm.ir.assert_structural_equal(scheduled["matmul"].body, expected["main"].body, map_free_vars=True)


def test_a_trace_that_does_not_fit_is_a_warning_and_the_seed() -> None:
    mod = dense().mod
    record, _ = _record(mod, "matmul")
    wrong = next(t for t in extract_tasks(mod, TARGET) if t.name == "bias_relu")
    with pytest.warns(UserWarning, match="the log's schedule of bias_relu no longer fits") as caught:
        _, functions, _ = schedule_functions(mod, TARGET, {wrong.key: record}.get)
    assert len(caught) == 1
    assert [f.source for f in functions] == ["seed", "seed"]


def test_equal_functions_are_scheduled_once() -> None:
    mod = twins().mod
    asked: list[str] = []
    _, functions, same = schedule_functions(mod, TARGET, lambda key: asked.append(key))
    assert [(f.symbol, f.calls) for f in functions] == [("add", 2)]
    assert same == {"plus": "add"} and len(asked) == 1


def test_a_function_that_comes_scheduled_is_left_alone() -> None:
    mod = dense().mod
    given = mod["matmul"].with_attr("tirx.is_scheduled", True)
    mod.update_func(mod.get_global_var("matmul"), given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled, functions, _ = schedule_functions(mod, TARGET, _nothing)
    assert functions[0].source == "given"
    tvm.ir.assert_structural_equal(scheduled["matmul"].body, given.body)


class _Unfit(Space):
    name, target_kind = "cpu.unfit", "llvm"

    def matches(self, func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return True

    def knobs(self, func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return (Knob("only", (1,)),)

    def seeds(self, func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> Iterator[dict[str, int]]:
        yield {"only": 1}

    def schedule(self, sch: object, target: tvm.target.Target, pick: object) -> None:
        raise InvalidDecision("five axes are needed")


def test_a_function_that_nothing_schedules_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.registry, "find", lambda func, target: _Unfit())
    with pytest.raises(BuildError, match=r"function matmul must have a schedule.*five axes are needed") as caught:
        schedule_functions(dense().mod, TARGET, _nothing)
    assert "\n" not in str(caught.value)
