"""Jobs on devices that are there, come later, go, or never come; what is kept, shown and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cost_model.roofline import estimate
from mlc.cli.main import main
from mlc.errors import MeasureError, ModelError, TargetError, UsageError
from mlc.graph.task import from_json
from mlc.jobs import page, run
from mlc.jobs.file import Jobs, read
from mlc.log import TuningLog
from mlc.measure.fleet import DeviceStatus
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.target import resolve
from mlc.tuning.events import FleetChanged

CPU = resolve("x86-64-v3")


def small(path: Path, columns: int) -> Path:
    """Two products of one input; the second, with 48 columns, is in every such model."""
    rng = np.random.default_rng(columns)
    weights = [numpy_helper.from_array(rng.standard_normal((64, n), dtype="float32"), f"w{n}") for n in (columns, 48)]
    nodes = [helper.make_node("MatMul", ["x", f"w{n}"], [f"y{n}"]) for n in (columns, 48)]
    border = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64]),
              *(helper.make_tensor_value_info(f"y{n}", TensorProto.FLOAT, [4, n]) for n in (columns, 48))]
    graph = helper.make_graph(nodes, "small", border[:1], border[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


class Device:
    """Every schedule takes a time that its function has; it goes after ``left`` candidates."""

    def __init__(self, left: float = float("inf"), interrupt: float = float("inf")) -> None:
        self.left, self.interrupt = left, interrupt
        self.measured: list[tuple[str, str]] = []

    def measure(self, requests: Sequence[MeasureRequest], on_result: Any = None) -> list[MeasureResult]:
        if len(self.measured) >= self.left:
            raise MeasureError("a device must measure, but there has been none for 60 s")
        if len(self.measured) >= self.interrupt:
            raise KeyboardInterrupt
        self.measured += [(request.task_key, request.trace) for request in requests]
        return [self._result(request, 3) for request in requests]

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        return [self._result(request, rounds) for request in requests]

    def close(self) -> None:
        pass

    def _result(self, request: MeasureRequest, repeats: int) -> MeasureResult:
        seconds = 20 * estimate(from_json(request.func), CPU.tvm) * (1 + len(request.trace) % 97 / 97)
        return MeasureResult((seconds,) * repeats, machine="rack: fake", device="rack/0")


class Reached:
    """What :func:`mlc.tuning.devices.devices` gives."""

    machine = "rack: fake"
    fleet = None

    def __init__(self, target: Any, device: Device) -> None:
        self.target, self._device = target, device

    def of(self, target: Any) -> Reached:
        return Reached(target, self._device)

    def measurer(self, threads: int) -> Device:
        return self._device


@pytest.fixture
def rack(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Device | None]]]:
    """By executor what is there at each look, one after the other, and the last for ever."""
    there: dict[str, list[Device | None]] = {}

    @contextmanager
    def devices(executor: str, target: Any, on_event: Any = None) -> Iterator[Reached]:
        looks = there[executor]
        device = looks.pop(0) if len(looks) > 1 else looks[0]
        if device is None:
            raise MeasureError(f"a device must measure, but there is none at {executor}")
        on_event(FleetChanged((DeviceStatus("rack/0", "rack: fake", "idle", 4, 0, 2.0),)))
        yield Reached(target, device)

    monkeypatch.setattr(run, "devices", devices)
    yield there


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "a.onnx", 16)
    small(tmp_path / "b.onnx", 80)
    return tmp_path


def jobs_of(folder: Path, *targets: str, trials: int = 12) -> Jobs:
    lines = [f'trials = {trials}', 'models = [{ model = "a.onnx", substitutions = false }, '
             '{ model = "b.onnx", priority = 2, substitutions = false }]']
    for target in targets:
        lines += ["[[targets]]", target]
    (folder / "jobs.toml").write_text("\n".join(lines) + "\n")
    return read(folder / "jobs.toml")


V3, V2 = 'target = "x86-64-v3"\nexecutor = "rpc://h:1/{}"', 'target = "x86-64-v2"\nexecutor = "rpc://h:1/{}"'


def test_equal_functions_are_tuned_once_and_the_page_tells_of_all(folder: Path, rack: Any) -> None:
    device = Device()
    rack["rpc://h:1/x"] = [device]
    jobs = jobs_of(folder, V3.format("x"), V2.format("x"))
    results = run.run(jobs, Path)
    assert [result.state for result in results] == ["done", "done"] and all(r.trials <= 12 for r in results)
    assert len(device.measured) == len(set(device.measured)), "no candidate is measured twice"
    for result in results:
        assert [(m.functions, m.shared, m.whole) for m in result.models] == [(2, 1, False), (2, 1, False)]
        assert all(m.gain is not None and m.gain >= 1.0 for m in result.models)
        with TuningLog(result.log, readonly=True) as log:
            keys = {record.task_key for record in log.records()}
            assert {record.device for record in log.records()} == {"rack/0"}
        assert len(result.tasks) == 3 and keys <= set(result.tasks)
    text = page.write(jobs, results).read_text()
    assert text.count("<h2>") == 2 and text.count("<svg") == 2 and "rack/0" in text and "a.onnx" in text
    assert run.known_results(jobs) == {result.identity: result for result in results}


def test_a_device_that_comes_later_is_waited_for_while_others_are_tuned(folder: Path, rack: Any) -> None:
    rack["rpc://h:1/late"], rack["rpc://h:1/here"] = [None, None, Device()], [Device()]
    jobs = jobs_of(folder, V3.format("late") + '\nmissing = "wait"', V2.format("here"))
    told: list[str] = []
    slept: list[float] = []
    results = run.run(jobs, Path, tell=told.append, sleep=slept.append)
    assert [result.state for result in results] == ["done", "done"]
    late, here = map(str, jobs.targets)
    assert [text.partition(" a device")[0] for text in told] == [
        f"{late}: 2 models", f"{late} waits:", f"{here}: 2 models", f"{late}: 2 models", f"{late} waits:",
        f"{late}: 2 models"]
    assert len(slept) == 1, "only when nothing else is left to do"


def test_patience_ends(folder: Path, rack: Any) -> None:
    rack["rpc://h:1/x"] = [None]
    jobs = jobs_of(folder, V3.format("x") + '\nmissing = "wait"\npatience = 50')
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    (result,) = run.run(jobs, Path, sleep=sleep, clock=lambda: now[0])
    assert result.state == "skipped" and 50 <= now[0] < 100 and "there is none at" in result.reason


def test_a_missing_one_is_skipped(folder: Path, rack: Any) -> None:
    rack["rpc://h:1/none"], rack["rpc://h:1/here"] = [None], [Device()]
    results = run.run(jobs_of(folder, V3.format("none"), V2.format("here")), Path)
    assert [result.state for result in results] == ["skipped", "done"]
    assert [row[-1].partition(":")[0] for row in page.rows(results)] == ["skipped", "done", "done"]


def test_a_target_that_this_machine_cannot_run_is_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "lacking", lambda target: "the instructions avx512f")
    (result,) = run.run(jobs_of(folder, 'target = "x86-64-v4"'), Path)
    assert result.state == "skipped" and result.reason == "this machine lacks the instructions avx512f"


def test_when_the_last_device_goes_the_rest_follows_when_one_comes(folder: Path, rack: Any) -> None:
    first, second = Device(left=4), Device()
    rack["rpc://h:1/x"] = [first, second]
    (result,) = run.run(jobs_of(folder, V3.format("x") + '\nmissing = "wait"', trials=24), Path, sleep=lambda _: None)
    assert result.state == "done" and first.measured and second.measured
    assert not {*first.measured} & {*second.measured}, "what the first has measured is in the log"
    assert result.trials <= 24 and result.trials == len(first.measured) + len(second.measured)


def test_an_interrupted_run_goes_on(folder: Path, rack: Any) -> None:
    device = Device(interrupt=4)
    rack["rpc://h:1/x"], rack["rpc://h:1/y"] = [device], [Device()]
    jobs = jobs_of(folder, V2.format("y"), V3.format("x"), V3.format("y"), trials=24)
    results = run.run(jobs, Path)
    assert [result.state for result in results] == ["done", "interrupted", "not begun"]
    before = len(rack["rpc://h:1/y"][0].measured)
    device.interrupt = float("inf")
    again = run.run(jobs, Path, resume=True)
    assert [result.state for result in again] == ["done"] * 3
    assert again[0] == results[0], "what is done is not begun again"
    assert len(device.measured) == len(set(device.measured)) <= 24
    assert again[1].trials == len(device.measured) and len(rack["rpc://h:1/y"][0].measured) > before


def test_a_larger_budget_goes_on_with_what_is_done(folder: Path, rack: Any) -> None:
    device = Device()
    rack["rpc://h:1/x"] = [device]
    (first,) = run.run(jobs_of(folder, V3.format("x"), trials=8), Path)
    (second,) = run.run(jobs_of(folder, V3.format("x"), trials=20), Path, resume=True)
    assert first.trials <= 8 < second.trials <= 20 and len(device.measured) == len(set(device.measured))


def test_one_that_fails_costs_itself_alone(folder: Path, rack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rack["rpc://h:1/x"] = [Device()]
    real = run.tune_together
    calls = []

    def fails(compilations: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise UsageError("a defect")
        return real(compilations, *args, **options)

    monkeypatch.setattr(run, "tune_together", fails)
    results = run.run(jobs_of(folder, V3.format("x"), V2.format("x")), Path)
    assert [(r.state, r.reason) for r in results] == [("failed", "a defect"), ("done", "trials")]


def test_what_cannot_be_imported_or_meant_is_said_at_once_with_its_line(folder: Path, rack: Any) -> None:
    jobs = jobs_of(folder, V3.format("x"), V2.format("x"))
    (folder / "b.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"jobs\.toml:2: ") as caught:
        run.run(jobs, Path)
    assert "\n" not in str(caught.value) and not jobs.results.exists()
    with pytest.raises(TargetError, match=r"jobs\.toml:6: .*did you mean x86-64-v"):
        run.run(jobs_of(folder, V3.format("x"), V2.format("x").replace("v2", "v22")), Path)


def test_results_that_somebody_else_wrote(folder: Path) -> None:
    jobs = jobs_of(folder, V3.format("x"))
    for text in ("", "[]", "{}", '{"version": 9, "targets": []}', '{"version": 1, "targets": [3]}',
                 '{"version": 1, "targets": [{"models": [], "devices": [], "budget": [1]}]}'):
        jobs.results.write_text(text)
        with pytest.raises(UsageError, match="results of jobs must be what mlc wrote") as caught:
            run.known_results(jobs)
        assert "\n" not in str(caught.value)


def test_the_plan_measures_nothing(folder: Path) -> None:
    jobs = jobs_of(folder, V3.format("x"))
    (planned,) = run.plan(jobs, Path)
    assert (planned.functions, planned.shared) == (3, 1) and 0 <= planned.known <= 3
    assert [functions for _, functions, _ in planned.models] == [2, 2]
    assert not jobs.results.exists() and not planned.log.exists()


def test_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Really measured, on this machine."""
    jobs_of(folder, 'target = "native"', trials=4)
    assert main(["tune", "jobs.toml", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["targets"][0]["functions"] == 3
    assert main(["tune", "jobs.toml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (target,) = document["targets"]
    assert target["state"] == "done" and target["trials"] <= 4 and Path(document["page"]).is_file()
    assert all(model["whole"] and model["tuned"] > 0 and model["gain"] > 0 for model in target["models"])
    assert main(["tune", "jobs.toml", "--resume"]) == 0
    assert "whole model" in capsys.readouterr().out
    assert main(["jobs", "show", "jobs.toml"]) == 0
    shown = capsys.readouterr().out
    assert "b.onnx" in shown and "done" in shown
