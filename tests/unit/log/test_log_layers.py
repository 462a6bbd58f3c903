"""The user's log over the shipped ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from log_records import VERSIONS, key, record

from mlc.errors import LogError
from mlc.log import Layers, TuningLog, export_jsonl, layered
from mlc.log import layers as layers_module
from mlc.target import Target

TARGET = Target("test", '{"kind": "llvm", "mcpu": "znver5", "num-cores": 2}')


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package of shipped logs, with the user's data folder beside it."""
    folder = tmp_path / "tuning_logs"
    (folder / "llvm-znver5-2").mkdir(parents=True)
    monkeypatch.setattr(layers_module.resources, "files", {"tuning_logs": folder}.__getitem__)
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))
    return folder / "llvm-znver5-2"


def test_both_forms_ship_and_the_user_wins_on_another_machine(package: Path, tmp_path: Path) -> None:
    fast, slow = sorted((record(1), record(2)), key=lambda r: r.seconds)
    with TuningLog(package / "a.db") as log:
        log.append([replace(fast, machine="theirs"), record(3, task=1)])
    with TuningLog(tmp_path / "b.db") as log:
        log.append([record(4, task=2), record(5, task=2, ok=False)])
        export_jsonl(log, package / "b.jsonl")
    with TuningLog(tmp_path / "user.db") as log:
        log.append([replace(slow, machine="mine")])
    with layered(tmp_path / "user.db", TARGET) as reader:
        assert reader.best(key(0)) == replace(slow, machine="mine")
        assert reader.best(key(1)) == record(3, task=1)
        assert reader.best_of([key(2), key(1), key(9)]) == {key(2): record(4, task=2), key(1): record(3, task=1)}
        assert reader.count() == 5 and len(list(reader.records(key(0)))) == 2
        assert reader.by_versions() == {VERSIONS: 5}
        summaries = {s.task_key: s for s in reader.tasks()}
        assert summaries[key(0)].records == 2 and summaries[key(0)].best_seconds == fast.seconds
        assert summaries[key(2)].failures == 1


def test_on_the_same_machine_the_faster_one_wins(tmp_path: Path) -> None:
    fast, slow = sorted((record(1), record(2)), key=lambda r: r.seconds)
    with TuningLog(tmp_path / "a.db") as upper, TuningLog(tmp_path / "b.db") as lower:
        upper.append([slow])
        lower.append([fast])
        assert Layers([upper, lower]).best(key(0)) == fast


def test_the_default_log_may_be_missing_and_a_named_one_may_not(package: Path, tmp_path: Path) -> None:
    with layered(None, TARGET) as reader:
        assert reader.count() == 0
    with TuningLog(tmp_path / "data" / "tuning_logs" / "llvm-znver5-2.db") as log:
        log.append([record(1)])
    with layered(None, TARGET) as reader:
        assert reader.best(key(0)) == record(1)
    with pytest.raises(LogError, match="must exist"):
        layered(tmp_path / "typo.db", TARGET)


def test_a_shipped_log_is_read_without_leaving_anything_beside_it(package: Path) -> None:
    with TuningLog(package / "a.db") as log:
        log.append([record(1)])
    with layered(None, TARGET) as reader:
        assert reader.best(key(0)) == record(1)
        assert [p.name for p in package.iterdir()] == ["a.db"]


def test_the_real_package_can_be_read() -> None:
    with Layers(layers_module.shipped(TARGET)) as reader:
        assert reader.count() >= 0
        assert all(summary.records > 0 for summary in reader.tasks())
