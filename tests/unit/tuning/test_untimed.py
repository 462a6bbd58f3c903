"""Tuning for a GPU that is not there: what is compiled, refused and kept, and how long it counts."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

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
from mlc.tuning.candidate import TaskSpace
from mlc.tuning.untimed import inspect, objection
from schedules import registry
from schedules.cuda.mma import TensorCoreGemm

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
