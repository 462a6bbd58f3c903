"""What tasks compute stands in the log beside their records, and goes wherever these go."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from log_records import record
from tvm import te

from mlc.graph.task import Task, normalise
from mlc.graph.tasks import extract_tasks
from mlc.log import TuningLog, Workload, check, export_jsonl, import_jsonl, merge, salvage
from mlc.target import resolve
from mlc.testing import programs


@pytest.fixture(scope="module")
def task() -> Task:
    from tvm import relax

    target = resolve("x86-64-v3")
    mod = relax.transform.LegalizeOps()(programs.dense().mod)
    return replace(extract_tasks(mod, target)[0], constant_bytes=2304)


def test_a_task_is_what_it_was(tmp_path: Path, task: Task) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        assert log.put_workloads([Workload.of(task)]) == 1 and log.put_workloads([Workload.of(task)]) == 0
        found = log.workload(task.key)
        assert log.workload("another") is None and list(log.workloads()) == [found]
    assert found == Workload.of(task)
    again = found.task()
    assert again.key == task.key and again.target.canonical == task.target.canonical
    assert (again.constants, again.constant_bytes) == (task.constants, 2304)
    assert normalise(again.func).same_as(again.func) or Task("", normalise(again.func), again.target).key == task.key


def test_a_function_under_a_foreign_key_is_refused(task: Task) -> None:
    with pytest.raises(ValueError, match="must have the hash 0000"):
        replace(Workload.of(task), task_key="0000" + task.key[4:]).task()


def test_they_go_with_the_records(tmp_path: Path, task: Task) -> None:
    with TuningLog(tmp_path / "a.db") as a, TuningLog(tmp_path / "b.db") as b, TuningLog(tmp_path / "c.db") as c:
        a.append([record(0)])
        a.put_workloads([Workload.of(task)])
        assert export_jsonl(a, tmp_path / "a.jsonl") == 1
        assert import_jsonl(b, tmp_path / "a.jsonl").added == 1
        merge(c, [tmp_path / "b.db"])
        assert list(c.workloads()) == list(b.workloads()) == [Workload.of(task)]
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text(lines[0].replace('"constant_bytes":2304', '"constant_bytes":2305') + "\n")
    with TuningLog(tmp_path / "d.db") as d:
        done = import_jsonl(d, tmp_path / "bad.jsonl")
        assert "altered" in done.problems[0][2] and not list(d.workloads())


def test_they_are_salvaged_from_a_damaged_file(tmp_path: Path, task: Task) -> None:
    path = tmp_path / "log.db"
    with TuningLog(path) as log:
        log.put_workloads([Workload.of(task)])
        log.append(record(i) for i in range(300))
    data = bytearray(path.read_bytes())
    data[:4096] = bytes(4096)  # the file's directory
    path.write_bytes(data)
    assert not check(path).ok
    salvage(path, tmp_path / "saved.db")
    with TuningLog(tmp_path / "saved.db") as saved:
        assert saved.workload(task.key) == Workload.of(task) and saved.count() > 250


def test_a_log_of_the_schema_before_is_read_and_brought_up_to_date(tmp_path: Path, task: Task) -> None:
    path = tmp_path / "log.db"
    with TuningLog(path) as log:
        log.append([record(0)])
    db = sqlite3.connect(path)
    db.executescript("DROP TABLE workloads; PRAGMA user_version = 2;")
    db.close()
    with TuningLog(path, readonly=True) as log:
        assert log.count() == 1 and list(log.workloads()) == [] and log.workload(task.key) is None
    assert check(path).ok
    with TuningLog(path) as log:
        assert log.put_workloads([Workload.of(task)]) == 1
    with TuningLog(path, readonly=True) as log:
        assert log.count() == 1 and log.workload(task.key) == Workload.of(task)


def test_one_under_the_key_of_the_function_with_its_numbers_is_read() -> None:
    """Numbers were part of keys once; see :mod:`mlc.graph.ir.immediates`."""
    x = te.placeholder((8,), "float32", name="x")
    scaled = normalise(te.create_prim_func([x, te.compute((8,), lambda i: x[i] * 0.3, name="y")]))
    task = Task("scaled", scaled, resolve("x86-64-v3"))
    old = replace(Workload.of(task), task_key=task.identity)
    assert task.key != task.identity and old.task().key == task.key
    with pytest.raises(ValueError, match="must have the hash 0000"):
        replace(old, task_key="0000" + task.key[4:]).task()
