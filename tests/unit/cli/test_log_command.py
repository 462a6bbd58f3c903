"""``mlc log`` over real log files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlc.cli.main import main
from mlc.log import Record, TuningLog

VERSIONS = "tvm0.27.0-llvm22"


def _records(task: int, count: int, seed: int = 0) -> list[Record]:
    rng = np.random.default_rng((seed, task))
    made = []
    for trial in range(count):
        failed = trial % 5 == 4
        made.append(Record(
            f"{task:016x}-llvm/znver3/2-{VERSIONS}", f"fused_conv2d_{task}", "conv", {"tile": int(rng.integers(1, 9))},
            "[]", times=() if failed else tuple(rng.uniform(1e-3, 2e-3, 3)), failure="timeout" if failed else "",
            detail="10 s [limit]" if failed else "", trial=trial, session=f"s{seed}", machine="m",
        ))
    return made


@pytest.fixture
def log_path(tmp_path):
    path = tmp_path / "own.db"
    with TuningLog(path) as log:
        log.append(_records(1, 10) + _records(2, 5), log.start_session({"trials": 15}, "s0"))
    return path


def _json(capsys, *words: object) -> dict:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_show_lists_tasks_with_their_best(log_path, capsys) -> None:
    document = _json(capsys, "log", "show", "--log", log_path)
    assert document["records"] == 15
    first, second = document["tasks"]
    assert (first["task"], first["records"], first["failures"]) == ("fused_conv2d_1", 10, 2)
    assert first["best_ms"] == pytest.approx(1e3 * min(r.seconds for r in _records(1, 10)))
    assert second["versions"] == VERSIONS
    assert main(["log", "show", "--log", str(log_path)]) == 0
    text = capsys.readouterr().out
    assert "fused_conv2d_1" in text and f"2 tasks, 15 records in {log_path}" in text


def test_show_limits_its_lines(log_path, capsys) -> None:
    assert main(["log", "show", "--log", str(log_path), "--limit", "1"]) == 0
    text = capsys.readouterr().out
    assert "fused_conv2d_2" not in text and "and 1 more" in text


def test_show_one_task_best_first_failures_last(log_path, capsys) -> None:
    document = _json(capsys, "log", "show", "--log", log_path, "--task", "conv2d_1")
    times = [r["ms"] for r in document["records"]]
    good = [t for t in times if t is not None]
    assert len(times) == 10 and good == sorted(good) and times[-2:] == [None, None]
    assert document["records"][-1]["failure"] == "timeout"
    assert main(["log", "show", "--log", str(log_path), "--task", "0000000000000001"]) == 0
    text = capsys.readouterr().out
    assert "10 s [limit]" in text and "tile=" in text  # brackets are text, not markup


def test_show_sessions(log_path, capsys) -> None:
    (session,) = _json(capsys, "log", "show", "--log", log_path, "--sessions")["sessions"]
    assert session["session"] == "s0" and session["options"] == {"trials": 15}
    assert main(["log", "show", "--log", str(log_path), "--sessions"]) == 0
    assert "trials=15" in capsys.readouterr().out


def test_show_reads_the_users_log_by_default(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path))
    assert _json(capsys, "log", "show", "--target", "x86-64-v2")["tasks"] == []
    folder = tmp_path / "tuning_logs"
    from mlc.config import user_log_path
    from mlc.target import resolve

    with TuningLog(user_log_path(resolve("x86-64-v2").canonical)) as log:
        log.append(_records(3, 4))
    assert list(folder.iterdir())
    assert _json(capsys, "log", "show", "--target", "x86-64-v2")["records"] == 4


def test_merge_adds_what_is_new(log_path, tmp_path, capsys) -> None:
    other = tmp_path / "other.db"
    with TuningLog(other) as log:
        log.append(_records(1, 10) + _records(7, 6))
    document = _json(capsys, "log", "merge", other, "--log", log_path)
    assert (document["added"], document["duplicates"]) == (6, 10)
    with TuningLog(log_path, readonly=True) as log:
        assert log.count() == 21


def test_export_and_import_give_the_same_records(log_path, tmp_path, capsys) -> None:
    lines, copy = tmp_path / "log.jsonl", tmp_path / "copy.db"
    assert _json(capsys, "log", "export", lines, "--log", log_path)["records"] == 15
    assert _json(capsys, "log", "import", lines, "--log", copy)["added"] == 15
    with TuningLog(log_path, readonly=True) as a, TuningLog(copy, readonly=True) as b:
        assert list(a.records()) == list(b.records())


def test_import_of_a_torn_file_keeps_the_rest_and_exits_with_1(log_path, tmp_path, capsys) -> None:
    lines, copy = tmp_path / "log.jsonl", tmp_path / "copy.db"
    main(["log", "export", str(lines), "--log", str(log_path)])
    lines.write_text(lines.read_text()[:-40])
    capsys.readouterr()
    assert main(["log", "import", str(lines), "--log", str(copy), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["added"] == 14 and [p["line"] for p in document["problems"]] == [15]


def test_check_of_a_whole_and_a_damaged_log(log_path, tmp_path, capsys) -> None:
    assert _json(capsys, "log", "check", log_path)["records"] == 15
    damaged = tmp_path / "damaged.db"
    content = bytearray(log_path.read_bytes())
    record = content.rindex(b"x\x5e")  # where a compressed record begins
    content[record + 20 : record + 30] = b"\xff" * 10
    damaged.write_bytes(content)
    new = tmp_path / "saved.db"
    assert main(["log", "check", str(damaged), "--salvage", str(new), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"] and document["salvaged"]["records"] == document["records"] < 15
    with TuningLog(new, readonly=True) as log:
        assert log.count() == document["records"]


@pytest.mark.parametrize(("words", "code", "says"), [
    (["show", "--log", "{tmp}/none.db"], 1, "none.db"),
    (["show", "--log", "{log}", "--task", "pool"], 2, "got 'pool'"),
    (["merge", "{tmp}/none.db", "--log", "{tmp}/into.db"], 1, "none.db does not exist"),
    (["import", "{tmp}/none.jsonl", "--log", "{tmp}/into.db"], 1, "none.jsonl does not"),
    (["export", "{tmp}/none/x.jsonl", "--log", "{log}"], 2, "mkdir -p"),
    (["check", "{tmp}/none.db"], 1, "none.db"),
    (["merge", "{log}", "--log", "{log}"], 1, "is the log itself"),
    ([], 2, "required: ACTION"),
])
def test_errors(words, code, says, log_path, tmp_path, capsys) -> None:
    assert main(["log", *(w.format(tmp=tmp_path, log=log_path) for w in words)]) == code
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1
    assert not (tmp_path / "into.db").exists()
