"""The user's log over the shipped ones."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from log_records import VERSIONS, key, record

from mlc.errors import LogError
from mlc.log import Layers, Record, TuningLog, Verdict, export_jsonl, layered, shipped
from mlc.log.layers import shipped as shipped_readers
from mlc.log.record import ELSEWHERE
from mlc.log.shipped import _faster_machines, shipped_records
from mlc.target import Target
from schedules.machine import cpu_machine

TARGET = Target("test", '{"kind": "llvm", "mcpu": "znver5", "num-cores": 2}')


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package of shipped logs, with the user's data folder beside it."""
    folder = tmp_path / "tuning_logs"
    (folder / "x86-64-v4").mkdir(parents=True)
    monkeypatch.setattr(shipped.resources, "files", {"tuning_logs": folder}.__getitem__)
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))
    return folder / "x86-64-v4"


def _theirs(made: Record) -> Record:
    """``made`` as the file that ships has it: tuned for the level and kept there."""
    key = made.task_key.replace("znver5", "x86-64-v4")
    return replace(made, task_key=key, machine="theirs", verdict=Verdict.KEPT)


def _read(made: Record) -> Record:
    """:func:`_theirs` as a reader for ``TARGET`` gives it."""
    return replace(made, machine="theirs", made_for="llvm/x86-64-v4/2")


def test_both_forms_ship_and_the_users_own_goes_before(package: Path, tmp_path: Path) -> None:
    fast, slow = sorted((record(1), record(2)), key=lambda r: r.seconds)
    with TuningLog(package / "a.db") as log:
        log.append([_theirs(fast), _theirs(record(3, task=1)), _theirs(record(6, task=3, ok=False))])
    with TuningLog(tmp_path / "b.db") as log:
        log.append([_theirs(record(4, task=2))])
        export_jsonl(log, package / "b.jsonl")
    with TuningLog(tmp_path / "user.db") as log:
        log.append([replace(slow, machine=machine) for machine in ("mine", "theirs")])
    with layered(tmp_path / "user.db", TARGET) as reader:
        assert reader.best(key(0)) == replace(slow, machine="mine"), "times of elsewhere do not count"
        assert reader.best(key(1)) == _read(record(3, task=1))
        assert reader.best(key(2)) == _read(record(4, task=2)) and reader.best(key(9)) is None
        assert reader.count() == 5 and len(list(reader.records(key(0)))) == 3
        assert reader.by_versions() == {VERSIONS: 5}
        assert {s.task_key: s.records for s in reader.tasks()} == {key(0): 3, key(1): 1, key(2): 1}


@pytest.mark.parametrize(("name", "folder"), [
    ("native-avx512", "x86-64-v4"), ("x86-64-v4", "x86-64-v4"), ("znver3", "x86-64-v3"), ("haswell", "x86-64-v3"),
    ("x86-64-v3", "x86-64-v3"), ("x86-64-v2", "llvm-x86-64-v2-8"), ("skylake-avx512", "x86-64-v4"),
])
def test_what_serves_a_cpu_is_made_for_the_same_vectors(name: str, folder: str) -> None:
    cpu = "znver5" if name == "native-avx512" else name
    assert shipped.family(Target(name, f'{{"kind": "llvm", "mcpu": "{cpu}", "num-cores": 8}}')) == folder


def test_a_gpu_is_served_by_what_was_made_for_it() -> None:
    assert shipped.family(Target("cuda", '{"kind": "cuda", "arch": "sm_90"}')) == "cuda-sm_90"


def test_records_of_other_versions_are_not_found(package: Path) -> None:
    with TuningLog(package / "a.db") as log:
        log.append([_theirs(record(1, versions="tvm0.26.0-llvm22"))])
    with layered(None, TARGET) as reader:
        assert reader.best(key(0)) is None and reader.count() == 1


@pytest.mark.parametrize(("beyond", "elsewhere"), [(1, False), (3, True), (5, True)])
def test_times_that_this_machine_cannot_have_are_of_another(package: Path, beyond: int, elsewhere: bool) -> None:
    most = cpu_machine(TARGET.tvm).flops
    with TuningLog(package / "a.db") as log:
        for task in range(5):  # the same times, a little above and below what arithmetic allows
            rate = most * (1.01 if task < beyond else 0.99)
            log.append([replace(_theirs(record(1, task=task)), times=(1e-3,), flops=rate * 1e-3)])
        log.append([replace(_theirs(record(1, task=7)), machine="others", times=(1e-3,), flops=most * 0.9e-3)])
    with layered(None, TARGET) as reader:
        found = [reader.best(key(task)) for task in range(5)]
        prices = {each.machine for each in found if each is not None and each.seconds == 1e-3}
        assert prices == {ELSEWHERE if elsewhere else "theirs"}
        other = reader.best(key(7))
        assert other is not None and other.machine == "others"


def test_a_damaged_shipped_log_is_told(package: Path) -> None:
    (package / "a.jsonl").write_text('{"task_key": "x"}\n')
    with pytest.raises(LogError, match=r"must be whole.*line 1.*reinstall"):
        layered(None, TARGET)


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
        log.append([_theirs(record(1))])
    with layered(None, TARGET) as reader:
        assert reader.best(key(0)) == _read(record(1))
        assert [p.name for p in package.iterdir()] == ["a.db"]


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_the_real_package_can_be_read(level: str) -> None:
    with Layers(shipped_readers(Target(level, f'{{"kind": "llvm", "mcpu": "{level}", "num-cores": 5}}'))) as reader:
        for file in (resources.files("tuning_logs") / level).iterdir():
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else []
            keys = [json.loads(line)["task_key"] for line in lines]
            assert len(keys) == len(set(keys)), "each file has one record of a task"
        for summary in reader.tasks():
            found = reader.best(summary.task_key)
            assert found is not None and found.made_for.startswith(f"llvm/{level}/") and not found.kept


def _named(level: str, *features: str) -> Target:
    attrs = {"kind": "llvm", "mcpu": level, "num-cores": 2, **({"mattr": list(features)} if features else {})}
    return Target(level, json.dumps(attrs))


@pytest.mark.parametrize(("level", "feature"), [("x86-64-v4", "+avx512vnni"), ("x86-64-v3", "+avxvnni")])
def test_schedules_of_dot_products_of_bytes_are_read_where_there_are_any(
    level: str, feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / level
    folder.mkdir()
    monkeypatch.setattr("mlc.log.shipped.resources.files", {"tuning_logs": tmp_path}.__getitem__)
    for place, stem in enumerate(("models", "quantised", "quantised-vnni")):
        with TuningLog(folder / f"{stem}.db") as log:
            log.append([record(1, place)])
    found = {name: sorted(each.task_key.partition("-")[0] for each in shipped_records(target))
             for name, target in (("plain", _named(level)), ("dots", _named(level, feature)))}
    names = [f"{place:016x}" for place in range(3)]
    assert found == {"plain": names[:2], "dots": names}
    assert shipped_records(_named(level, feature))[0].task_key.split("-", 1)[1].startswith(f"llvm/{level}/2/mattr=")


@pytest.mark.parametrize(("features", "elsewhere"), [(("+avx512vnni",), False), ((), True)])
def test_a_machine_is_faster_by_the_instructions_that_it_uses(features: tuple[str, ...], elsewhere: bool) -> None:
    """Three times float32's peak is nothing much for dot products of bytes, and impossible where there are none."""
    target = _named("x86-64-v4", *features)
    most = cpu_machine(target.tvm).flops
    bytes_ = replace(record(1), space="cpu.gemm_integer", times=(1.0,), flops=3.0 * most, made_for=target.canonical)
    assert (_faster_machines([bytes_], target) == {bytes_.machine}) == elsewhere
    assert _faster_machines([replace(bytes_, space="cpu.gemm")], target) == {bytes_.machine}
    assert _faster_machines([replace(bytes_, space="cpu.gemm", flops=0.9 * most)], target) == set()
