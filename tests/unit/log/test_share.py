"""Logs shared through a folder: each pushes its own runs, pulls those of the others, and nothing conflicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from log_records import record

from mlc.errors import LogError
from mlc.log import TuningLog
from mlc.log.share import pull, push


def _log(folder: Path, machine: str, seconds: dict[str, float]) -> TuningLog:
    """A log with one run, of a record for each task."""
    folder.mkdir()
    log = TuningLog(folder / "native.db")
    session = log.start_session({})
    log.append([replace(record(0), task_key=key, task_name=key, times=(time,), machine=machine, session=session.id)
                for key, time in seconds.items()], session=session)
    return log


def test_three_logs_exchange_what_they_have(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with _log(tmp_path / "a", "A", {"x": 4.0, "y": 1.0}) as a, _log(tmp_path / "b", "B", {"x": 2.0, "z": 3.0}) as b, \
            _log(tmp_path / "c", "C", {"y": 2.0}) as c:
        files = {push(log, shared)[0] for log in (a, b, c)}
        assert len(files) == 3 and set(shared.iterdir()) == files
        pulled = pull(a, shared)
        assert pulled.files == 2 and pulled.exchange.added == 3 and a.count() == 5
        assert [(g.task_name, g.machine, g.over, g.factor) for g in pulled.gains] == [
            ("x", "B", "A", 2.0), ("z", "B", "", 0.0)]
        assert all(g.versions for g in pulled.gains)
        assert push(a, shared)[1] == 2 and set(shared.iterdir()) == files  # what came from others is theirs to push
        again = pull(a, shared)
        assert again.exchange.added == 0 and not again.gains
        for log in (b, c):
            pull(log, shared)
        assert {tuple(sorted(r.machine for r in log.records())) for log in (a, b, c)} == {("A", "A", "B", "B", "C")}


def test_logs_for_other_targets_are_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with _log(tmp_path / "a", "A", {"x": 1.0}) as a, TuningLog(tmp_path / "other.db") as other:
        push(a, shared)
        assert pull(other, shared).files == 0 and other.count() == 0


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with _log(tmp_path / "a", "A", {"x": 1.0, "y": 2.0}) as a, _log(tmp_path / "b", "B", {}) as b:
        path, _ = push(a, shared)
        path.write_bytes(path.read_bytes()[:-9])
        done = pull(b, shared).exchange
        assert done.added == 1 and len(done.problems) == 1


def test_no_folder(tmp_path: Path) -> None:
    with _log(tmp_path / "a", "A", {}) as a:
        for act in (push, pull):
            with pytest.raises(LogError, match="mkdir -p") as caught:
                act(a, tmp_path / "none")
            assert "\n" not in str(caught.value)
