"""Which schedule each function gets: the log's, the space's seed, or the one it came with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx

from mlc.artifact import Executable, compile_module, schedule
from mlc.artifact import compile as compiling
from mlc.artifact.schedule import Lookup, schedule_functions
from mlc.errors import BuildError, CodeGenerationError
from mlc.graph.task import Task
from mlc.graph.tasks import called_functions, extract_tasks
from mlc.log import Record
from mlc.log.layers import MemoryLog
from mlc.measure import machine_id
from mlc.target import Target, resolve
from mlc.testing.programs import dense, program, twins
from schedules import registry
from schedules.space import InvalidDecision, Knob, Space, feasible_seeds, first_seed, schedule_with
from schedules.trace import trace_json

TARGET = resolve("native", threads=1)


def _nothing(task: Task) -> None:
    return None


def _log(*records: Record) -> Lookup:
    """A log of these records, one for each key."""
    found = {record.task_key: record for record in records}
    return lambda task: found.get(task.key)


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
    scheduled, functions, _ = schedule_functions(mod, TARGET, _log(record))
    matmul, other = functions
    assert (matmul.source, matmul.decisions, matmul.seconds) == ("log", record.decisions, 2e-6)
    assert matmul.to_json()["tuned"] and other.source == "seed"
    tvm.ir.assert_structural_equal(scheduled["matmul"].body, expected["main"].body, map_free_vars=True)


def test_a_trace_that_does_not_fit_is_a_warning_and_the_seed() -> None:
    mod = dense().mod
    record, _ = _record(mod, "matmul")
    wrong = next(t for t in extract_tasks(mod, TARGET) if t.name == "bias_relu")
    with pytest.warns(UserWarning, match="the log's schedule of bias_relu no longer fits") as caught:
        _, functions, _ = schedule_functions(mod, TARGET, _log(replace(record, task_key=wrong.key)))
    assert len(caught) == 1
    assert [f.source for f in functions] == ["seed", "seed"]


def _shipped(record: Record, made_for: str) -> Record:
    return replace(record, machine="theirs", made_for=made_for)


def test_what_ships_is_used_and_told_from_the_users_own_log() -> None:
    mod = dense().mod
    record, expected = _record(mod, "matmul")
    ships = _shipped(record, TARGET.canonical)
    scheduled, (matmul, _), _ = schedule_functions(mod, TARGET, _log(ships))
    assert (matmul.source, matmul.seconds, matmul.to_json()["tuned"]) == ("shipped", None, False)
    tvm.ir.assert_structural_equal(scheduled["matmul"].body, expected["main"].body, map_free_vars=True)
    _, (matmul, _), _ = schedule_functions(mod, TARGET, _log(replace(ships, machine=machine_id())))
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
        _, (matmul, _), _ = schedule_functions(mod, target, _log(found))
    assert matmul.source == source


def test_equal_functions_are_scheduled_once() -> None:
    mod = twins().mod
    asked: list[Task] = []
    _, functions, same = schedule_functions(mod, TARGET, asked.append)
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


#: scales and zero points of the rescalings in turn; the first and the last are one function
RESCALED = ((0.031, 7), (0.9, 131), (1.3, 12), (0.031, 7))


def _rescaled(x: np.ndarray, scale: float, zero: int) -> np.ndarray:
    real = (x.astype(np.int32) - zero).astype(np.float32) * np.float32(scale)
    return np.clip(np.rint(real).astype(np.int32) + zero, 0, 255).astype(np.uint8)


def _rescalings() -> tvm.IRModule:
    """Rescalings of bytes one after the other, as quantised models hold them: one task, three functions."""
    def rescale(x: te.Tensor, scale: float, zero: int) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            real = (x[i].astype("int32") - tirx.const(zero, "int32")).astype("float32") * tirx.const(scale, "float32")
            rounded = tirx.nearbyint(real).astype("int32") + tirx.const(zero, "int32")
            return tirx.max(tirx.min(rounded, tirx.const(255, "int32")), tirx.const(0, "int32")).astype("uint8")

        return te.compute(x.shape, element, name="rescaled")

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        results, x = [], params[0]
        for place, (scale, zero) in enumerate(RESCALED):
            x = builder.emit_te(rescale, x, scale, zero, primfunc_name_hint=f"rescale{place}",
                                primfunc_attrs={"note": str(place)})
            results.append(x)
        return results

    return program({"x": ((7, 64), "uint8")}, body)


def test_functions_that_differ_in_numbers_alone_share_a_schedule_and_no_code() -> None:
    mod = _rescalings()
    (task,) = extract_tasks(mod, TARGET)
    assert task.weight == 4
    asked: list[Task] = []
    scheduled, functions, same = schedule_functions(mod, TARGET, asked.append)
    assert [(f.symbol, f.calls, f.name) for f in functions] == [
        ("rescale0", 2, "rescale"), ("rescale1", 1, "rescale"), ("rescale2", 1, "rescale")]
    assert same == {"rescale3": "rescale0"}
    assert {each.key for each in asked} == {f.key for f in functions} == {task.key}
    assert len({each.identity for each in asked}) == 3 and len({str(f.decisions) for f in functions}) == 1
    texts = [scheduled[symbol].script() for symbol in ("rescale0", "rescale1", "rescale2")]
    assert ["0.9" in text for text in texts] == [False, True, False]


def _exact(exe: Executable) -> None:
    """Every byte, extremes among them, comes out as numpy has it."""
    x = np.random.default_rng(0).permutation(np.resize(np.arange(256), 7 * 64)).reshape(7, 64).astype(np.uint8)
    expected = x
    for found, (scale, zero) in zip(exe(x), RESCALED, strict=True):
        expected = _rescaled(expected, scale, zero)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("recorded", [0, 1, 2])
def test_a_schedule_traced_on_one_of_them_is_that_of_all(recorded: int) -> None:
    mod = _rescalings()
    task = called_functions(mod, TARGET)[recorded].task
    space = registry.find(task.func, TARGET.tvm)
    schedules = list(feasible_seeds(space, task.func, TARGET.tvm))
    sch, decisions = schedules[-1]
    record = Record(task.key, task.name, space.name, decisions, trace_json(sch), times=(1e-6,))
    _, functions, _ = schedule_functions(mod, TARGET, _log(record))
    assert [(f.source, f.decisions) for f in functions] == [("log", decisions)] * 3
    _exact(compile_module(mod, TARGET, _log(record)))


def test_a_record_under_the_key_of_one_function_alone_serves_that_function() -> None:
    """Numbers were part of keys once."""
    mod = _rescalings()
    task = called_functions(mod, TARGET)[1].task
    space = registry.find(task.func, TARGET.tvm)
    sch, decisions = list(feasible_seeds(space, task.func, TARGET.tvm))[-1]
    log = MemoryLog([Record(task.identity, task.name, space.name, decisions, trace_json(sch), times=(1e-6,))])
    _, functions, _ = schedule_functions(mod, TARGET, lambda each: log.best(*each.keys))
    assert [f.source for f in functions] == ["seed", "log", "seed"]
    _exact(compile_module(mod, TARGET, lambda each: log.best(*each.keys)))


def test_each_of_them_is_repaired_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces a schedule that fails in code generation is made of the function's own numbers."""
    refused: list[str] = []

    def refusal(func: tirx.PrimFunc, target: Target) -> str:
        name = str(func.attrs["global_symbol"])
        refused.append(name)
        return "no registers left" if name != "rescale0" and refused.count(name) == 1 else ""

    failing = iter([True])
    generate = compiling._generate

    def fails_once(*args: Any) -> Any:
        if next(failing, False):
            raise CodeGenerationError("as a whole")
        return generate(*args)

    monkeypatch.setattr("mlc.artifact.codegen_fallback.refusal", refusal)
    monkeypatch.setattr(compiling, "_generate", fails_once)
    with pytest.warns(UserWarning, match="failed in code generation"):
        exe = compile_module(_rescalings(), TARGET)
    assert [bool(f["replaced"]) for f in exe.metadata["functions"]] == [False, True, True]
    _exact(exe)
