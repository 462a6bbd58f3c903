"""Tuning for a GPU that is not there: what is compiled, refused and kept, and how long it counts."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import te, topi

from mlc.cli.main import main
from mlc.codegen.inspection import Kernel, find_nvdisasm
from mlc.compilation import _chosen
from mlc.graph.task import Task
from mlc.log import TuningLog
from mlc.log.codec import canonical_text, parse_text
from mlc.log.layers import MemoryLog
from mlc.log.record import Record, untimed_of
from mlc.target import resolve
from mlc.testing.cuda_cases import CASES
from mlc.tuning import TuneOptions, untimed
from mlc.tuning.candidate import Candidate, TaskSpace
from mlc.tuning.events import BatchCompiled, Event
from mlc.tuning.priced import by_price
from mlc.tuning.report import TuneReport
from mlc.tuning.untimed import inspect, objection
from schedules import registry
from schedules.cuda.mma import TensorCoreGemm
from schedules.cuda.reduction import Rows
from schedules.machine import gpu_machine
from schedules.space import Space

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
BY_NAME = {case.name: case for case in CASES}
AMPERE = resolve("cuda:sm_80")
GOOD = Kernel("main_kernel", "sm_80", 128, 2, 128, 0, 0, 49152, Counter({"HMMA.16816.F32": 64}))


def record(**fields: object) -> Record:
    given = {"decisions": {"stages": 3}, "trace": "[]", "expected": 1e-5, **fields}
    return Record("task", "product", "cuda.mma", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kernel", "reason"), [
    (GOOD, ""), (replace(GOOD, spilled_bytes=8), "8 bytes of registers are spilled"),
    (replace(GOOD, stack_bytes=64), "64 bytes of main_kernel are on the stack"),
    (replace(GOOD, serialised=True), "waits for each of its products"),
    (replace(GOOD, blocks=0), "no block of main_kernel fits a multiprocessor"),
    (replace(GOOD, instructions=Counter({"FFMA": 64})), "there is no HMMA or IMMA"),
    (replace(GOOD, instructions=Counter()), ""),  # nobody has read it
], ids=["good", "spills", "stack", "serialised", "too_large", "no_tensor_cores", "unread"])
def test_what_speaks_against_a_candidate(kernel: Kernel, reason: str) -> None:
    found = objection([kernel], TensorCoreGemm())
    assert reason in found and bool(reason) == bool(found)


def test_an_architecture_alone_may_speak_against_a_candidate() -> None:
    lacking = replace(GOOD, arch="sm_86", instructions=Counter({"FFMA": 64}))
    assert "machine code for sm_86" in objection([GOOD, lacking], TensorCoreGemm())
    helper_kernel = replace(lacking, arch="sm_80")
    assert objection([GOOD, helper_kernel], TensorCoreGemm()) == "", "one kernel of several multiplies"


def test_which_untimed_record_counts() -> None:
    slow, fast = record(expected=2e-5, decisions={"stages": 2}), record(expected=1e-5)
    assert untimed_of([slow, fast]) == fast and untimed_of([]) is None
    assert untimed_of([slow, fast, record(failure="wrong", expected=0.0)]) == slow, "it was run since, and failed"
    assert untimed_of([slow, record(expected=3e-5), fast]) == fast, "the latest reckoning counts"
    assert untimed_of([record(failure="build", detail="spilled")]) is None
    assert parse_text(canonical_text(fast)) == fast
    assert not fast.ok and fast.untimed and not record(times=(1e-5,), expected=0.0).untimed


def test_what_was_not_run_is_no_failure(tmp_path: Path) -> None:
    key = "d5f6238884830c20-cuda/sm_80-tvm0-llvm0"
    found = [record(), record(expected=2e-5, decisions={"stages": 2}), record(failure="build", expected=0.0),
             record(times=(1e-5,), expected=0.0)]
    records = [replace(each, task_key=key) for each in found]
    with TuningLog(tmp_path / "log.db") as log:
        log.append(records)
        for reader in (log, MemoryLog(records)):
            [summary] = reader.tasks()
            assert (summary.records, summary.failures, summary.best_seconds) == (4, 1, 1e-5)


def test_a_time_replaces_what_was_reckoned(tmp_path: Path) -> None:
    """However slow it is."""
    task = SimpleNamespace(keys=("task",))
    with TuningLog(tmp_path / "log.db") as log:
        log.append([record(expected=1e-6)])
        assert log.best("task") is None and _chosen(log, task) == record(expected=1e-6)  # type: ignore[arg-type]
        timed = record(times=(1.0,), expected=0.0, decisions={"stages": 2})
        log.append([timed])
        assert _chosen(log, task) == timed  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mma_bf16", "wgmma_f16_gelu", "attention_f16_odd", "dense_even", "conv3x3_odd"])
def test_prices_order_seeds_as_spaces_do(name: str) -> None:
    """And with fewer blocks a multiprocessor, a candidate never becomes cheaper."""
    func, target = BY_NAME[name].func(), resolve("cuda:sm_90a").tvm
    space = registry.find(func, target)
    seeds = list(space.seeds(func, target))
    prices = [space.price(func, target, seed) for seed in seeds]
    assert prices == sorted(prices) and 1e-7 < prices[0] < 1e-4
    assert all(space.price(func, target, s, 1) >= space.price(func, target, s, 4) for s in seeds)


def task_of(name: str, target: str = "cuda:sm_80") -> Task:
    return Task(name, BY_NAME[name].func(), resolve(target))


def every_price(space: TaskSpace) -> dict[tuple[int, ...], float]:
    return {point: price for point in space.points() if (price := space.price(point)) is not None}


@pytest.mark.parametrize("name", ["mma_bf16", "attention_f16_odd", "conv3x3_odd"])
def test_every_point_is_priced(name: str) -> None:
    space = TaskSpace(task_of(name))
    found, seeds, every = by_price(space), list(space.seeds()), every_price(space)
    others = [price for price, point in found if point not in seeds]
    assert others == sorted(others) and {price for price, _ in found} == set(every.values())
    assert found[0] == (min(every.values()), seeds[0])
    assert all(space.realise(point) is not None for _, point in found[::20])


#: what waits for memory, by its space
MEMORY_BOUND = {
    "softmax": "cuda.rows", "softmax_wide": "cuda.rows", "layer_norm": "cuda.rows", "global_pool": "cuda.reduce",
    "max_pool": "cuda.reduce", "sum_columns": "cuda.reduce", "row_matrix_f16": "cuda.columns",
    "mean_last": "cuda.columns", "relu_f16": "cuda.elementwise", "transpose": "cuda.elementwise",
}
memory_bound = pytest.mark.parametrize("name", MEMORY_BOUND)


@memory_bound
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_waits_for_memory_has_a_price(name: str, arch: str) -> None:
    """Never less than its bytes take, and the first seed's is near the least of what is unrolled as far."""
    space = TaskSpace(task_of(name, f"cuda:{arch}"))
    assert space.space.name == MEMORY_BOUND[name]
    gpu, first, prices = gpu_machine(space.target), next(iter(space.seeds())), every_price(space)
    least = sum(np.dtype(str(p.ty.dtype)).itemsize * math.prod(map(int, p.ty.shape))
                for p in space.task.func.params) / gpu.memory_rate
    assert min(prices.values()) > least
    unroll = [place for place, knob in enumerate(space.knobs) if knob.name == "unroll"]
    alike = [price for point, price in prices.items() if all(point[place] == first[place] for place in unroll)]
    assert prices[first] <= 1.3 * min(alike)
    assert max(prices.values()) > min(prices.values()) or name == "transpose"


@pytest.mark.skipif(shutil.which("nvcc") is None or find_nvdisasm() is None, reason="needs nvcc and nvdisasm")
@pytest.mark.parametrize("name", ["softmax_wide", "sum_columns", "row_matrix_f16", "relu_f16"])
def test_the_compiler_agrees_with_what_waits_for_memory(name: str) -> None:
    space = TaskSpace(task_of(name))
    candidate = next(c for c in map(space.realise, space.seeds()) if c is not None)
    found = space.space.footprint(space.task.func, space.target, candidate.decisions)
    (kernel,) = inspect(candidate, space.target)
    assert found is not None and kernel.threads == found.threads and not found.tensor_cores
    assert 0.5 <= found.registers / kernel.registers <= 2
    assert 0.7 <= (found.shared_bytes + 64) / (kernel.shared_bytes + 64) <= 1.3


@memory_bound
def test_fewer_blocks_are_no_cheaper(name: str) -> None:
    space = TaskSpace(task_of(name))
    for decisions in space.space.seeds(space.task.func, space.target):
        few, many = (space.space.price(space.task.func, space.target, decisions, blocks) for blocks in (1, 8))
        assert few is not None and many is not None and few >= many > 0


@pytest.mark.parametrize(("rows", "columns"), [(16384, 1024), (4096, 8192)])
def test_long_rows_take_what_their_bytes_do(rows: int, columns: int) -> None:
    """At the memory's rate, and no less than that of one that goes through them with single warps."""
    data = te.placeholder((rows, columns), "float32", "x")
    func = te.create_prim_func([data, topi.nn.softmax(data)])
    space = TaskSpace(Task("softmax", func, resolve("cuda:sm_80")))
    first, least = next(iter(space.seeds())), 8 * rows * columns / gpu_machine(space.target).memory_rate
    price = space.price(first)
    assert space.space.name == "cuda.rows" and price is not None and least < price < 1.5 * least


def test_what_fits_no_machine_has_no_price() -> None:
    """However few cycles it would take."""
    space = TaskSpace(task_of("wgmma_f16_gelu", "cuda:sm_90a"))
    priced = every_price(space)
    others = [point for point in space.points() if point not in priced]
    assert others and all(space.realise(point) is None for point in others[::200])


def test_decisions_that_the_price_does_not_see_are_the_seeds() -> None:
    space = TaskSpace(task_of("mma_bf16"))
    panel = [knob.name for knob in space.knobs].index("panel")
    assert len(space.knobs[panel].values) > 1 and {point[panel] for _, point in by_price(space)} == {8}


def test_of_a_large_space_a_sample_is_priced() -> None:
    space = TaskSpace(task_of("mma_bf16"))
    found = by_price(space, 50)
    points = [point for _, point in found]
    assert set(space.seeds()) <= set(points) and len(points) <= 54 < len(by_price(space))
    assert found == by_price(TaskSpace(task_of("mma_bf16")), 50)


def test_without_a_price_there_are_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    space = TaskSpace(task_of("softmax"))
    monkeypatch.setattr(Rows, "price", Space.price)
    assert [point for _, point in by_price(space)] == list(space.seeds())


def ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: TuneOptions, *names: str,
    compiled: Callable[[Candidate], Kernel] = lambda _: GOOD,
) -> tuple[TuneReport, list[Event], list[Record]]:
    """Untimed tuning with a compiler that says so of each candidate."""
    monkeypatch.setattr(untimed, "has_nvcc", lambda: True)
    monkeypatch.setattr(untimed, "inspect", lambda candidate, _target: [compiled(candidate)])
    events: list[Event] = []
    with TuningLog(tmp_path / "log.db") as log:
        report = untimed.rank_tasks([task_of(name) for name in names], AMPERE, log, options, events.append)
        return report, events, list(log.records())


def test_a_given_time_goes_to_all_that_may_be_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the seeds, function by function in turn, and with progress."""
    report, events, records = ranked(tmp_path, monkeypatch, TuneOptions(seconds=600.0), "mma_bf16", "attention_f16_odd")
    space = TaskSpace(task_of("mma_bf16"))
    assert report.reason == "finished" and {task.stopped for task in report.tasks} == {"untimed"}
    own = [space.point(each.decisions) for each in records if each.space == space.space.name]
    assert len(own) == len(set(own)) > len(set(space.seeds())) == 4
    best = min(every_price(space).values())
    assert all(space.price(point) <= 1.25 * max(best, report.tasks[0].roofline_seconds) for point in own if point)
    batches = [event for event in events if isinstance(event, BatchCompiled)]
    assert [event.name for event in batches[:3]] in (["mma_bf16", "attention_f16_odd", "mma_bf16"],
                                                     ["attention_f16_odd", "mma_bf16", "attention_f16_odd"])
    assert batches[-1].trials == len(records) and batches[-1].latency == report.best_latency is not None
    assert batches[0].latency is None and batches[0].eta is not None and batches[-1].elapsed > 0


def test_no_time_is_overdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(_candidate: Candidate) -> Kernel:
        now[0] += 10.0
        return GOOD

    report, _, records = ranked(tmp_path, monkeypatch, TuneOptions(seconds=25.0), "mma_bf16", "attention_f16_odd",
                                compiled=slow)
    assert report.reason == "seconds" and len(records) == 3
    assert sorted(task.stopped for task in report.tasks) == ["seconds", "untimed"]


def test_trials_that_a_function_leaves_go_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = len(list(TaskSpace(task_of("softmax")).seeds()))
    report, _, records = ranked(tmp_path, monkeypatch, TuneOptions(trials=2 * few + 2), "softmax", "mma_bf16")
    assert report.reason == "trials" and len(records) == 2 * few + 2
    assert {task.name: task.trials for task in report.tasks} == {"softmax": few, "mma_bf16": few + 2}


def test_without_a_budget_each_function_has_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _, records = ranked(tmp_path, monkeypatch, TuneOptions(), "mma_bf16", "attention_f16_odd")
    assert report.reason == "finished" and len(records) == 8


def test_when_the_best_by_price_spills_another_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spilling(candidate: Candidate) -> Kernel:
        return replace(GOOD, spilled_bytes=8 if candidate.decisions["block_m"] == 64 else 0)

    report, events, records = ranked(tmp_path, monkeypatch, TuneOptions(seconds=600.0), "mma_bf16", compiled=spilling)
    best = untimed_of(records)
    assert best is not None and best.decisions["block_m"] == 128 and report.tasks[0].expected_seconds == best.expected
    last = [event for event in events if isinstance(event, BatchCompiled)][-1]
    assert last.failures["build"] == sum(each.decisions["block_m"] == 64 for each in records) > 4
    assert last.best_decisions == dict(best.decisions)


def test_a_defect_in_a_space_costs_its_function_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(space: TaskSpace, *_rest: object) -> list[tuple[float, tuple[int, ...]]]:
        if space.task.name == "mma_bf16":
            raise ZeroDivisionError("of a price")
        return by_price(space)

    monkeypatch.setattr(untimed, "by_price", broken)
    report, _, records = ranked(tmp_path, monkeypatch, TuneOptions(), "mma_bf16", "attention_f16_odd")
    assert len(records) == 4 and {task.name: task.stopped for task in report.tasks} == {
        "mma_bf16": "broken: ZeroDivisionError: of a price", "attention_f16_odd": "untimed"}


@needs_nvcc
def test_each_architecture_is_compiled_for() -> None:
    task = task_of("mma_bf16", "cuda:sm_80,sm_86")
    candidate = TaskSpace(task).default
    assert candidate is not None and {each.arch for each in inspect(candidate, task.target.tvm)} == {"sm_80", "sm_86"}


@needs_nvcc
def test_tune_without_a_gpu_then_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are compiled and kept, the report says that none was timed, and a build takes the best of them."""
    monkeypatch.setattr("mlc.gpu.find_gpu", lambda: None)
    half, model, log = TensorProto.FLOAT16, tmp_path / "product.onnx", str(tmp_path / "log.db")
    weight = np.random.default_rng(0).standard_normal((256, 128)).astype("float16")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("x", half, (128, 256))], [helper.make_tensor_value_info("y", half, (128, 128))],
        [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), model)
    command = ["tune", str(model), "--target", "cuda:sm_80", "--log", log]
    assert main([*command, "--trials", "2", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    (task,) = found["tasks"]
    assert found["untimed"] and found["trials"] == task["trials"] == 2 and found["best_latency"] is not None
    assert (task["verdict"], task["best_seconds"]) == ("untimed", None)
    assert any(json.loads(line).get("reason") == "untimed" for line in told.err.splitlines() if line.startswith("{"))
    with TuningLog(log) as kept:
        records = list(kept.records())
        assert len(records) == 2 and not any(record.times for record in records)
        best = untimed_of(records)
    assert best is not None and task["expected_seconds"] == best.expected
    assert main(["compile", str(model), "--target", "cuda:sm_80", "--log", log, "--json", "-o",
                 str(tmp_path / "product.so")]) == 0
    (function,) = json.loads(capsys.readouterr().out)["functions"]
    assert (function["source"], function["seconds"], function["tuned"]) == ("untimed", None, False)
    assert function["decisions"] == dict(best.decisions)
    assert main([*command, "--trials", "1"]) == 0
    shown = capsys.readouterr()
    assert "untimed: this machine has no GPU" in shown.out and "untimed, 1 candidates compiled" in shown.err
    assert "~ " in shown.out


@needs_nvcc
@pytest.mark.skipif(shutil.which("nvcc") is not None and find_nvdisasm() is None, reason="needs nvdisasm")
def test_the_compiler_says_what_becomes_of_a_candidate() -> None:
    space = TaskSpace(Task("product", BY_NAME["mma_bf16"].func(), AMPERE))
    candidate = space.realise(next(space.seeds()))
    assert candidate is not None
    found = inspect(candidate, AMPERE.tvm)
    assert found and any(each.count("HMMA") for each in found) and all(each.registers for each in found)
    assert objection(found, space.space) == ""
