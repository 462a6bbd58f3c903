"""Export, import and merge: nothing lost, nothing twice, bad lines named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from log_records import key, record

from mlc.errors import LogError
from mlc.log import TuningLog, export_jsonl, import_jsonl, merge


def test_export_and_import_round_trip(tmp_path: Path) -> None:
    records = [record(i, i % 2, ok=i % 3 > 0) for i in range(30)]
    with TuningLog(tmp_path / "a.db") as log:
        log.append(records)
        assert export_jsonl(log, tmp_path / "a.jsonl") == 30
        assert export_jsonl(log, tmp_path / "one.jsonl", task_key=key(1)) == 15
    with TuningLog(tmp_path / "b.db") as other:
        done = import_jsonl(other, tmp_path / "a.jsonl")
        assert (done.added, done.duplicates, done.problems) == (30, 0, ())
        assert list(other.records()) == records
        assert import_jsonl(other, tmp_path / "a.jsonl").duplicates == 30


def test_bad_lines_are_named_and_skipped(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "a.db") as log:
        log.append([record(1), record(2), record(3)])
        export_jsonl(log, tmp_path / "a.jsonl")
    first, second, third = (tmp_path / "a.jsonl").read_bytes().splitlines()
    altered = second.replace(b'"trial":2', b'"trial":4')
    by_hand = {k: v for k, v in json.loads(second).items() if k != "uid"}
    lines = [
        first, b"", b"not json", altered, b"[1, 2]", b"\xff\xfe", b'{"task_key": "k"}',
        json.dumps(by_hand | {"times": [float("nan")]}).encode(), json.dumps(by_hand | {"colour": 1}).encode(),
        json.dumps(by_hand | {"times": "fast"}).encode(), b"[" * 100_000, third[:60],
        json.dumps(by_hand | {"trial": 9}).encode(),
    ]  # fmt: skip
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    with TuningLog(tmp_path / "b.db") as other:
        done = import_jsonl(other, tmp_path / "bad.jsonl")
        assert [r.trial for r in other.records()] == [1, 9]
    assert [line for _, line, _ in done.problems] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    reasons = [reason for _, _, reason in done.problems]
    assert "uid" in reasons[1] and "object" in reasons[2] and "NaN" in reasons[5] and "colour" in reasons[6]
    assert f"{tmp_path / 'bad.jsonl'}:3: " in str(done) and "and 5 more" in str(done)


def test_merge_takes_each_fact_once_and_the_sessions(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "a.db") as a, TuningLog(tmp_path / "b.db") as b, TuningLog(tmp_path / "c.db") as c:
        a.append([record(i) for i in range(10)])
        b.append([record(i) for i in range(5, 15)])
        session = b.start_session({"trials": 10})
        c.append([record(i) for i in range(12, 20)])
        export_jsonl(c, tmp_path / "c.jsonl")
        done = merge(a, [tmp_path / "b.db", tmp_path / "c.jsonl"])
        assert (done.added, done.duplicates) == (10, 8)
        assert sorted(r.trial for r in a.records()) == list(range(20))
        assert a.sessions() == [session]
        assert merge(a, [tmp_path / "b.db"]).added == 0
        with pytest.raises(LogError, match="is the log itself"):
            merge(a, [tmp_path / "a.db"])
