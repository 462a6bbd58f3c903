"""Export, import and merge: nothing lost, nothing twice, bad lines named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from log_records import key, record

from mlc.errors import LogError
from mlc.log import TuningLog, export_jsonl, import_jsonl, merge
from mlc.log.decision import PREFIX, GraphDecision, decision_of


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


DECISIONS = [GraphDecision("a" * 32, "1" * 32, {"matmul": 1.3}, 2e-3, 1.5e-3, 100.0),
             GraphDecision("b" * 32, "2" * 32, when=200.0)]


@pytest.mark.parametrize("way", ["export", "export and merge", "merge"])
def test_decisions_go_along(way: str, tmp_path: Path) -> None:
    with TuningLog(tmp_path / "a.db") as log:
        log.append([record(1)])
        log.put_decisions(DECISIONS)
        log.put_state("cost_model/cpu", b"no decision")
        export_jsonl(log, tmp_path / "a.jsonl")
        export_jsonl(log, tmp_path / "one.jsonl", task_key=key(1))
    with TuningLog(tmp_path / "b.db") as other:
        if way == "export":
            assert import_jsonl(other, tmp_path / "a.jsonl").problems == ()
        else:
            merge(other, [tmp_path / ("a.db" if way == "merge" else "a.jsonl")])
        assert other.decisions() == DECISIONS
        assert [decision_of(other, d.subject) for d in DECISIONS] == DECISIONS
        assert other.get_state("cost_model/cpu") is None
    assert b"decision" not in (tmp_path / "one.jsonl").read_bytes()


def test_of_two_decisions_the_later_holds_whichever_comes_first(tmp_path: Path) -> None:
    earlier, later = GraphDecision("s", "1", when=10.0), GraphDecision("s", "2", when=20.0)
    for number, order in enumerate(([earlier, later], [later, earlier])):
        with TuningLog(tmp_path / f"{number}.db") as log:
            for decision in order:
                log.put_decisions([decision])
            assert log.decisions() == [later]


def test_altered_decisions_are_named_and_skipped(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "a.db") as log:
        log.put_decisions(DECISIONS)
        export_jsonl(log, tmp_path / "a.jsonl")
    first, second = (tmp_path / "a.jsonl").read_bytes().splitlines()
    lines = [first, second.replace(b"2222", b"3333"), b'{"decision": 3}', b'{"decision": {"subject": "s"}}',
             b'{"decision": {"subject": "s", "graph": "g", "scale": {"matmul": "fast"}}}',
             b'{"decision": {"subject": "s", "graph": "g", "seconds": -1}}',
             b'{"decision": {"subject": "s", "graph": "g", "colour": 1}}']
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    with TuningLog(tmp_path / "b.db") as other:
        done = import_jsonl(other, tmp_path / "bad.jsonl")
        assert other.decisions() == DECISIONS[:1]
    assert [line for _, line, _ in done.problems] == [2, 3, 4, 5, 6, 7]
    assert "uid" in done.problems[0][2] and all("decision" in reason for _, _, reason in done.problems[1:])


def test_what_no_mlc_wrote_is_no_decision(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "a.db") as log:
        for name, blob in (("x", b"\xff"), ("y", b"[]"), ("z", b"")):
            log.put_state(PREFIX + name, blob)
            assert decision_of(log, name) is None
        assert log.decisions() == []
        log.put_decisions([GraphDecision("x", "1")])
        assert decision_of(log, "x") == GraphDecision("x", "1")
