"""What fails in code generation gets another schedule, and the report says so."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import s_tir, tirx

from mlc.artifact import compile_module
from mlc.config import get
from mlc.errors import BuildError
from mlc.graph.tasks import extract_tasks
from mlc.log import Record
from mlc.target import resolve
from mlc.testing.programs import dense, twins
from schedules import language, registry
from schedules.space import Decisions, Knob, Pick, Space, schedule_with
from schedules.trace import trace_json

TARGET = resolve("llvm", threads=1)
_find, _matching = registry.find, registry.matching


class Refused(Space):
    """Knob ``good``: 0 asks for a pipeline of stages in no order, which lowering refuses. Seeds: so many bad ones, then
    a good one if ``last``."""

    name, target_kind = "cpu.refused", "llvm"

    def __init__(self, bad: int, last: bool) -> None:
        self.bad, self.last = bad, last

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return True

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return Knob("good", (0, 1)), Knob("number", tuple(range(12)))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        for number in range(self.bad):
            yield {"good": 0, "number": number}
        if self.last:
            yield {"good": 1, "number": self.bad}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        good, _ = pick("good"), pick("number")
        if not good:
            *_, loop = sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])
            sch.annotate(loop, "software_pipeline_stage", [0, 1, 2])


def _refuse(monkeypatch: pytest.MonkeyPatch, space: Space, fallback: Space | None = None) -> None:
    """Products are laid out by ``space``, everything else as always."""

    def product(func: tirx.PrimFunc) -> bool:
        return len(func.params) == 3 and len(func.params[1].shape) == 2

    monkeypatch.setattr(registry, "find", lambda func, target: space if product(func) else _find(func, target))
    if fallback is not None:
        monkeypatch.setattr(registry, "matching", lambda func, target: iter(
            (space, fallback)) if product(func) else _matching(func, target))


def _run(match: str, record: Record | None = None) -> dict[str, object]:
    """Build and run a small model, expecting one warning; what is said of its product."""
    case = dense()
    log = {} if record is None else {record.task_key: record}
    with pytest.warns(UserWarning, match=match) as caught:
        exe = compile_module(case.mod, TARGET, lambda task: log.get(task.key))
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    np.testing.assert_allclose(exe(x)[0], case.reference(x)[0], rtol=1e-4, atol=1e-4)
    product, other = exe.metadata["functions"]
    assert (product["name"], other["replaced"]) == ("matmul", "")
    return product


def test_the_next_seeds_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, Refused(2, last=True))
    product = _run(r"matmul: 2 of its schedules failed in code generation: .*cpu.refused lays it out instead")
    assert (product["space"], product["source"]) == ("cpu.refused", "seed")
    assert product["decisions"] == {"good": 1, "number": 2}
    assert "failed in code generation" in str(product["replaced"])


def test_then_other_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, Refused(9, last=True))  # the good one comes too late
    product = _run(r"4 of its schedules failed in code generation.*cpu.gemm lays it out instead")
    assert (product["space"], product["source"]) == ("cpu.gemm", "seed")


def test_then_the_loops_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, Refused(1, last=False), fallback=Refused(2, last=False))
    product = _run(r"its loops are compiled as they stand, which is slow, instead")
    assert (product["space"], product["source"], product["decisions"]) == ("", "plain", {})


def test_a_record_that_fails_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(language._ANNOTATIONS, "software_pipeline_stage", lambda value: True)  # type: ignore[index]
    _refuse(monkeypatch, Refused(0, last=True))
    task = next(t for t in extract_tasks(dense().mod, TARGET) if t.name == "matmul")
    decisions = {"good": 0, "number": 7}
    sch = schedule_with(Refused(0, last=True), task.func, TARGET.tvm, decisions)
    record = Record(task.key, task.name, "cpu.refused", decisions, trace_json(sch), times=(1e-6,))
    product = _run("matmul: its schedule failed in code generation", record)
    assert (product["source"], product["tuned"], product["seconds"]) == ("seed", False, None)
    sound = replace(record, decisions={"good": 1, "number": 7}, trace=trace_json(
        schedule_with(Refused(0, last=True), task.func, TARGET.tvm, {"good": 1, "number": 7})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exe = compile_module(dense().mod, TARGET, lambda each: sound if each.key == task.key else None)
    assert exe.metadata["functions"][0]["source"] == "log"


def test_what_every_schedule_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, Refused(2, last=True))
    monkeypatch.setattr("mlc.artifact.codegen_fallback.refusal", lambda func, target: "no registers left")
    with pytest.raises(BuildError, match=r"function matmul must compile for llvm.*no registers left; MLC_DUMP_DIR"):
        compile_module(dense().mod, TARGET)


def test_a_module_that_fails_as_a_whole_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, Refused(2, last=True))
    monkeypatch.setattr("mlc.artifact.codegen_fallback.refusal", lambda func, target: "")
    with pytest.raises(BuildError, match=r"the module must compile for llvm.*but TVM refused it") as caught:
        compile_module(dense().mod, TARGET)
    assert "\n" not in str(caught.value)


def test_functions_are_not_compiled_one_by_one_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.artifact.codegen_fallback.refusal", lambda func, target: pytest.fail("compiled once more"))
    assert [f["replaced"] for f in compile_module(twins().mod, TARGET).metadata["functions"]] == [""]


class RefusedOnGpu(Refused):
    name, target_kind = "cuda.refused", "cuda"


@pytest.mark.skipif(shutil.which(get("MLC_NVCC")) is None, reason="needs nvcc")
def test_a_gpu_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, RefusedOnGpu(1, last=False))
    with pytest.warns(UserWarning, match=r"matmul: its schedule failed in code generation.*cuda.gemm lays it out"):
        exe = compile_module(dense().mod, resolve("cuda:sm_80"))
    assert exe.metadata["functions"][0]["space"] == "cuda.gemm"
