"""A pruned log compiles the same and still has something to learn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from log_records import key, record

from mlc.errors import LogError
from mlc.log import TuningLog, Verdict, check
from mlc.log.decision import GraphDecision
from mlc.log.prune import prune


def _fill(path: Path) -> None:
    with TuningLog(path) as log:
        log.append(record(i, i % 3, ok=i % 4 > 0) for i in range(600))
        slow = replace(record(7000), times=(0.5,), verdict=Verdict.KEPT)  # chosen, though others looked faster
        log.append([slow])
        log.update_session(log.start_session({"trials": 600}, "s"), trials=600, seconds=9.0)
        log.put_decisions([GraphDecision("subject", "graph", when=1.0)])


def test_every_task_is_compiled_from_the_same_record(tmp_path: Path) -> None:
    _fill(tmp_path / "log.db")
    assert prune(tmp_path / "log.db", tmp_path / "new.db", keep=5, sample=10) == (601, 46)
    with TuningLog(tmp_path / "log.db", readonly=True) as old, TuningLog(tmp_path / "new.db", readonly=True) as new:
        assert new.sessions() == old.sessions() and check(new.path).ok
        assert new.decisions() == old.decisions() and len(new.decisions()) == 1
        for task in range(3):
            before, after = list(old.records(key(task))), list(new.records(key(task)))
            assert new.best(key(task)) == old.best(key(task))
            fastest = sorted(before, key=lambda r: r.seconds)[:5]
            assert all(r in after for r in fastest) and [r for r in before if r in after] == after
            assert any(not r.ok for r in after)


def test_it_is_reproducible_and_overwrites_nothing(tmp_path: Path) -> None:
    _fill(tmp_path / "log.db")
    for name in ("a.db", "b.db"):
        prune(tmp_path / "log.db", tmp_path / name)
    with TuningLog(tmp_path / "a.db") as a, TuningLog(tmp_path / "b.db") as b:
        assert list(a.records()) == list(b.records())
    with pytest.raises(LogError, match="give another name"):
        prune(tmp_path / "log.db", tmp_path / "a.db")
    with pytest.raises(LogError, match="at least 1"):
        prune(tmp_path / "log.db", tmp_path / "c.db", keep=0)
