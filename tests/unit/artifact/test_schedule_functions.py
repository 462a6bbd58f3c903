"""Which schedule each function gets: the log's, the space's seed, or the one it came with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import tvm
from tvm import s_tir

from mlc.artifact import schedule
from mlc.artifact.schedule import schedule_functions
from mlc.errors import BuildError
from mlc.graph.tasks import extract_tasks
from mlc.log import Record
from mlc.measure import machine_id
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


def _shipped(record: Record, made_for: str) -> Record:
    return replace(record, machine="theirs", made_for=made_for)


def test_what_ships_is_used_and_told_from_the_users_own_log() -> None:
    mod = dense().mod
    record, expected = _record(mod, "matmul")
    lookup = {record.task_key: _shipped(record, TARGET.canonical)}.get
    scheduled, (matmul, _), _ = schedule_functions(mod, TARGET, lookup)
    assert (matmul.source, matmul.seconds, matmul.to_json()["tuned"]) == ("shipped", None, False)
    tvm.ir.assert_structural_equal(scheduled["matmul"].body, expected["main"].body, map_free_vars=True)
    here = replace(lookup(record.task_key), machine=machine_id())
    _, (matmul, _), _ = schedule_functions(mod, TARGET, {record.task_key: here}.get)
    assert matmul.seconds == 2e-6, "it was timed on this machine"


@pytest.mark.parametrize(("made_on", "cores", "source"), [
    (2, 2, "shipped"), (2, 3, "shipped"), (2, 4, "seed"), (2, 5, "shipped"), (2, 64, "seed"), (64, 64, "shipped"),
    (16, 8, "shipped"),
])
def test_a_schedule_for_fewer_cores_must_keep_more_of_them_busy(made_on: int, cores: int, source: str) -> None:
    """Five parallel steps suit 3 and 5 cores; 4 would idle for most of the second turn, unless somebody found so."""
    mod, target = dense().mod, resolve("x86-64-v3", threads=cores)
    task = next(t for t in extract_tasks(mod, target) if t.name == "matmul")
    sch = s_tir.Schedule(tvm.IRModule({"main": task.func}))
    rows, *_ = sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])
    assert int(sch.get(rows).extent) == 5
    sch.parallel(rows)
    record = Record(task.key, task.name, "x", {}, trace_json(sch), times=(1e-6,))
    found = _shipped(record, f"llvm/x86-64-v3/{made_on}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, (matmul, _), _ = schedule_functions(mod, target, {task.key: found}.get)
    assert matmul.source == source


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
    unfit = _Unfit()
    monkeypatch.setattr(schedule.registry, "find", lambda func, target: unfit)
    monkeypatch.setattr(schedule.registry, "all_spaces", lambda kind: (unfit,))
    with pytest.raises(BuildError, match=r"function matmul must have a schedule.*five axes are needed") as caught:
        schedule_functions(dense().mod, TARGET, _nothing)
    assert "\n" not in str(caught.value)


def test_a_function_that_no_seed_of_its_space_fits_gets_the_last_space(monkeypatch: pytest.MonkeyPatch) -> None:
    last = registry.all_spaces("llvm")[-1]

    def unless_product(space: Space, *rest: object) -> object:
        if space.name == "cpu.gemm":
            raise InvalidDecision("the index map is not bijective")
        return first_seed(space, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(schedule, "first_seed", unless_product)
    with pytest.warns(UserWarning, match=r"no schedule of cpu\.gemm fits matmul, so .* lays it out, which is slow"):
        _, functions, _ = schedule_functions(dense().mod, TARGET, _nothing)
    assert {f.name: f.space for f in functions}["matmul"] == last.name
