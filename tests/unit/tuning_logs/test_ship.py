"""The tool that writes the logs that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlc import api
from mlc.errors import UsageError
from mlc.log import Record, TuningLog, Verdict, manifest
from mlc.log.exchange import read_jsonl
from mlc.networks.models import model_named
from mlc.tuning.report import TaskReport, TuneReport
from tuning_logs import ship


def _record(task: int, seconds: float, verdict: Verdict | None = None) -> Record:
    return Record(
        f"{task:016x}-llvm/x86-64-v3/2-tvm0.27.0-llvm22", f"conv_{task}", "cpu.conv", {"tile": task}, "[[],[]]",
        times=(seconds, seconds * 1.01, seconds * 1.02), machine="here", session="s", trial=3, seed=9, when=1.5e9 + 0.3,
        build_seconds=0.2, flops=1e6, code="c0de", verdict=verdict,
    )


class Tuner:
    """Stands for ``api.tune``: each call writes two records of one task, and sees nothing of the machine."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.reason = "seconds"

    def __call__(self, model, *, target, seconds, log, on_event):
        self.calls.append(seconds)
        task = len(model.graph.node)
        records = [_record(task, 3e-3), _record(task, 2e-3 / len(self.calls), verdict=Verdict.KEPT)]
        with TuningLog(log) as out:
            out.append([*records, _record(999, 1e-3)])  # 999: of some older graph
        report = TaskReport(records[0].task_key, "t", 1, "s", 1, 1.0, 1.0, 1.0, 1.0, {}, "", "tuned")
        return TuneReport(self.reason, "s", 1, 1.0, 1, (report,))


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    made = Tuner()
    monkeypatch.setattr(api, "tune", made)
    monkeypatch.setattr("mlc.artifact.cpu_features.missing_features", lambda *_: ())  # any CPU could time these
    return made


def _read(path: Path) -> list[Record]:
    found = [record for _, record in read_jsonl(path)]
    assert all(isinstance(record, Record) for record in found)
    return found


def test_each_model_gets_its_seconds_once_and_the_file_holds_the_best(tuner: Tuner, tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    models = ["squeezenet", "shufflenet"]
    outcome = ship.ship(["x86-64-v3"], models, 5.0, work, out)
    file = out / "x86-64-v3" / ship.FILE
    records = _read(file)
    assert tuner.calls == [5.0, 5.0] and outcome.document["records"] == {f"x86-64-v3/{ship.FILE}": 2}
    assert len(records) == 2 and [r.task_name for r in records] == sorted(r.task_name for r in records)
    best = max(records, key=lambda r: r.seconds)
    assert best.times == (2.02e-3,) and best.kept and best.machine == "here" and best.trace
    assert (best.session, best.trial, best.seed, best.build_seconds, best.code) == ("", 0, 0, 0.0, "")
    before = file.read_bytes()
    ship.ship(["x86-64-v3"], models, 5.0, work, out)
    assert tuner.calls == [5.0, 5.0] and file.read_bytes() == before, "nothing is left to do"
    ship.ship(["x86-64-v3"], models[:1], 8.0, work, out)
    assert tuner.calls == [5.0, 5.0, 3.0] and len(_read(file)) == 2


def test_an_interrupt_keeps_what_is_there_and_the_next_run_goes_on(tuner: Tuner, tmp_path: Path) -> None:
    tuner.reason = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        ship.ship(["x86-64-v3"], ["squeezenet"], 5.0, tmp_path / "work", tmp_path / "out")
    tuner.reason = "seconds"
    ship.ship(["x86-64-v3"], ["squeezenet"], 5.0, tmp_path / "work", tmp_path / "out")
    assert tuner.calls == [5.0, 5.0]


def test_a_target_that_cannot_run_here_is_cross_built_and_marked(tuner: Tuner, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mlc.artifact.cpu_features.missing_features", lambda machine, needed: ("avx512f",))
    ship.ship(["x86-64-v4"], ["squeezenet"], 5.0, tmp_path / "work", tmp_path / "out")
    records = _read(tmp_path / "out" / "x86-64-v4" / ship.FILE)
    assert not tuner.calls and len(records) > 10
    assert all(r.times == () and not r.ok and "cross-built" in r.extra["untimed"] for r in records)
    assert all("/x86-64-v4/" in r.task_key for r in records)


def test_a_timed_record_is_never_replaced_by_an_untimed_one(tmp_path: Path) -> None:
    timed, untimed = _record(1, 1e-3), replace(_record(1, 1e-3), times=())
    for order in ([timed, untimed], [untimed, timed]):
        assert ship.write(tmp_path / "x" / ship.FILE, order) == 1
        assert _read(tmp_path / "x" / ship.FILE) == [timed]
    newer = _record(1, 2e-3)
    ship.write(tmp_path / "x" / ship.FILE, [timed, newer])
    assert _read(tmp_path / "x" / ship.FILE) == [newer]
    assert list(json.loads((tmp_path / manifest.NAME).read_text())) == [f"x/{ship.FILE}"]
    manifest.check(tmp_path / "x" / ship.FILE)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got lenet"):
        ship.ship(["x86-64-v3"], ["lenet"], 5.0, tmp_path, tmp_path)


def test_the_command_prints_one_document(tuner: Tuner, tmp_path: Path, capsys) -> None:
    words = ["--targets", "x86-64-v3", "--models", "squeezenet", "--seconds", "2", "--work", str(tmp_path / "w"),
             "--output", str(tmp_path / "o"), "--json"]
    assert ship.main(words) == 0
    assert json.loads(capsys.readouterr().out)["records"] == {f"x86-64-v3/{ship.FILE}": 1}


def test_alternatives_are_timed_in_turn_whenever_their_records_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import dataclass

    from mlc.measure import MeasureRequest, MeasureResult

    @dataclass(frozen=True)
    class _Task:
        key: str
        choice: str

    class _Measurer:
        def __init__(self) -> None:
            self.asked: list[list[str]] = []

        def compare(self, requests, rounds):
            self.asked.append([r.task_key for r in requests])
            failed = requests[0].task_key == broken.task_key
            return [MeasureResult((), "crash") if failed else MeasureResult((4e-3, 5e-3, 9e-3)) for _ in requests]

    monkeypatch.setattr(MeasureRequest, "of", lambda task, trace: MeasureRequest(task.key, "", "", trace))
    one, other, alone, broken, rival = records = [_record(n, 1e-3) for n in range(5)]
    tasks = [_Task(one.task_key, "a"), _Task(other.task_key, "a"), _Task("without a record", "a"),
             _Task(alone.task_key, ""), _Task(broken.task_key, "b"), _Task(rival.task_key, "b")]
    measurer = _Measurer()
    found = ship.in_turn(tasks, records, measurer)  # type: ignore[arg-type]
    assert measurer.asked == [[one.task_key, other.task_key], [broken.task_key, rival.task_key]]
    assert [r.times for r in found[:2]] == [(5e-3,)] * 2 and found[2:] == records[2:], "what fails keeps its time"


@pytest.mark.parametrize(("seed", "replaced"), [(1e-3, True), (3.9e-3, True), (3.95e-3, False), (None, False)])
def test_what_the_first_seed_beats_is_replaced(seed: float | None, replaced: bool) -> None:
    from mlc.compilation import Compilation
    from mlc.measure import MeasureResult
    from mlc.networks.models import model_named
    from mlc.tuning.candidate import TaskSpace

    task = next(t for t in Compilation.of(model_named("squeezenet"), "x86-64-v3", substitutions=False).tasks()
                if "conv" in t.name)
    space = TaskSpace(task)
    first, other = [c for c in map(space.realise, list(space.seeds())[:6]) if c is not None][:2]
    record = replace(_record(1, 5e-3), task_key=task.key, trace=other.trace, decisions=dict(other.decisions))
    unknown = _record(2, 1e-3)

    class _Measurer:
        def compare(self, requests, rounds):
            assert [r.trace for r in requests] == [other.trace, first.trace]
            return [MeasureResult((4.03e-3,) * rounds),
                    MeasureResult((), "crash") if seed is None else MeasureResult((seed,) * rounds)]

    kept, pairs = ship.refreshed([task], [record, unknown], _Measurer())
    assert kept[1] == unknown and len(pairs) == replaced
    assert kept[0].trace == (first.trace if replaced else other.trace)
    if replaced:
        assert kept[0].decisions == dict(first.decisions) and kept[0].seconds == pytest.approx(seed)
        assert kept[0].machine != "here" and kept[0].session == ""


def test_quantised_models_have_files_of_their_own_by_what_multiplies_bytes(tuner: Tuner, tmp_path: Path, monkeypatch):
    made: list[tuple[str, Path]] = []

    def small(name: str, folder: Path):
        made.append((name, folder))
        return model_named("squeezenet")

    monkeypatch.setattr(ship.quantised, "quantised", small)
    monkeypatch.setattr(ship, "in_turn", lambda tasks, records, measurer: records)
    monkeypatch.setattr("tuning_logs.samples.every_task", lambda model, target: [])
    words = ["--quantised", "--models", "mobilenet_v2-qdq", "--seconds", "2", "--work", str(tmp_path / "w"),
             "--output", str(tmp_path / "o")]
    assert ship.main(words) == 0
    files = sorted(str(path.relative_to(tmp_path / "o")) for path in (tmp_path / "o").glob("*/*"))
    assert files == [f"x86-64-v{level}/quantised{dots}.jsonl" for level in (3, 4) for dots in ("-vnni", "")]
    assert len(tuner.calls) == 4 and {each for each, _ in made} == {"mobilenet_v2-qdq"}
    assert sorted(path.name for path in (tmp_path / "w").glob("*.db")) == [
        "x86-64-v3-mattr-avxvnni.db", "x86-64-v3.db", "x86-64-v4-mattr-avx512vnni.db", "x86-64-v4.db"]
    assert ship.main([*words, "--refresh"]) == 2, "only float32 models are refreshed"
