"""Every way in which a tuning log can be unusable is one line with a remedy."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from mlc.errors import LogError
from mlc.log import Record, TuningLog, check, export_jsonl, import_jsonl, merge, salvage
from mlc.log.schema import APPLICATION_ID, SCHEMA_VERSION

RECORD = Record("0-llvm-tvm1-llvm1", "task", "space", {"tile": 4}, "[]", (0.5,))


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    with TuningLog(tmp_path / "log.db") as log:
        log.append([RECORD])
    return tmp_path / "log.db"


def _message(call: object, *args: object, **options: object) -> str:
    with pytest.raises(LogError) as caught:
        call(*args, **options)  # type: ignore[operator]
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def _with_version(path: Path, version: int) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory; give a file in it" in _message(TuningLog, tmp_path)


def test_a_missing_file_to_read(tmp_path: Path) -> None:
    text = _message(TuningLog, tmp_path / "no.db", readonly=True)
    assert "must exist" in text and "mlc tune --log" in text
    assert not (tmp_path / "no.db").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "folder must exist or be creatable" in _message(TuningLog, tmp_path / "file" / "sub" / "log.db")


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("content", [b"hello, this is a text file\n" * 9, random.Random(0).randbytes(9000)])
def test_not_a_database(tmp_path: Path, content: bytes, readonly: bool) -> None:
    path = tmp_path / "log.db"
    path.write_bytes(content)
    text = _message(TuningLog, path, readonly=readonly)
    assert "must be an SQLite database" in text and "mlc log check" in text
    assert "give another file" in _message(check, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("readonly", [False, True])
def test_somebody_elses_database(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "other.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE music (title)")
    db.commit()
    db.close()
    before = path.read_bytes()
    assert "another SQLite database" in _message(TuningLog, path, readonly=readonly)
    assert "another SQLite database" in _message(check, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_and_an_older_schema(log_path: Path, readonly: bool) -> None:
    _with_version(log_path, SCHEMA_VERSION + 1)
    assert "update mlc" in _message(TuningLog, log_path, readonly=readonly)
    _with_version(log_path, SCHEMA_VERSION - 2)
    assert "with the mlc that wrote it" in _message(TuningLog, log_path, readonly=readonly)
    assert APPLICATION_ID.to_bytes(4, "big") in log_path.read_bytes()[:100]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_torn_tail(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "log.db"
    with TuningLog(path) as log:
        log.append([Record("k", f"task{i}", "space", {"i": i}, "[]" * i, (1.0,)) for i in range(300)])
    path.write_bytes(path.read_bytes()[:-5000])
    text = _message(TuningLog, path, readonly=readonly)
    assert "is damaged" in text and f"`mlc log check {path}`" in text


def test_a_damaged_record(log_path: Path) -> None:
    db = sqlite3.connect(log_path)
    db.execute("UPDATE records SET body = x'00'")
    db.commit()
    db.close()
    _is_left_out(log_path)


def _is_left_out(path: Path) -> None:
    """The only record of a log is damaged: it is not used, and closing the log says so once."""
    log = TuningLog(path)
    assert list(log.records()) == [] and log.best(RECORD.task_key) is None and log.damaged == 1
    with pytest.warns(UserWarning, match=r"1 entries .* do not match their checksums .*mlc log check") as caught:
        log.close()
    assert len(caught) == 1
    log.close()  # warns no more
    report = check(path)
    assert not report.ok and report.damaged == 1 and report.records == 0


@pytest.mark.parametrize("change", [
    "task_key = 'other'", "session = 'other'", "seconds = 1e-12", "seconds = -1", "seconds = 9e999", "seconds = 'fast'",
    "seconds = x'00'", "seconds = NULL", "kept = 1", "kept = 'yes'", "uid = x'00'", "uid = 7", "body = 'text'",
    "body = 5",
    "body = (SELECT zeroblob(3000000))", "task_key = x'ff'", "task_key = CAST(x'ff' AS TEXT)",
])  # fmt: skip
def test_a_column_that_was_edited(log_path: Path, change: str) -> None:
    with TuningLog(log_path) as log:
        log.append([replace(RECORD, times=(0.75,))])
    db = sqlite3.connect(log_path)
    db.execute(f"UPDATE records SET {change} WHERE id = 1")
    db.commit()
    db.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TuningLog(log_path, readonly=True) as log:
            best = log.best(RECORD.task_key)
            assert best is not None and best.times == (0.75,), "the other record is not lost"
            assert [r.times for r in log.records()] == [(0.75,)] and log.tasks() and log.damaged == 1
            assert all(len(log.outline(t.task_key)) for t in log.tasks() if "\ufffd" not in t.task_key)
    assert check(log_path).damaged == 1


def test_merging_a_damaged_log_says_what_it_leaves_out(log_path: Path, tmp_path: Path) -> None:
    with TuningLog(log_path) as log:
        log.append([replace(RECORD, times=(0.75,))])
    db = sqlite3.connect(log_path)
    db.execute("UPDATE records SET seconds = 1e-9 WHERE id = 1")
    db.commit()
    db.close()
    with TuningLog(tmp_path / "all.db") as log, pytest.warns(UserWarning, match="1 entries"):
        done = merge(log, [log_path])
        assert done.added == 1 and done.problems == ((str(log_path), 0, "1 entries do not match their checksums"),)
        assert "log.db: 1 entries" in str(done)


def test_a_session_or_state_that_was_edited(log_path: Path) -> None:
    with TuningLog(log_path) as log:
        log.update_session(log.start_session({"trials": 9}, "first"), trials=3, seconds=2.0)
        log.start_session({"trials": 9}, "second")
        log.put_state("cost_model/x", b"model")
    db = sqlite3.connect(log_path)
    for change in ("trials = 4", "seconds = 1e12", "started = 'x'", "options = 'x'", "options = '[]'", "id = 7"):
        db.execute("BEGIN")
        db.execute(f"UPDATE sessions SET {change} WHERE id = 'first'")
        db.execute("UPDATE state SET value = CAST(substr(value, 1, 20) || 'M' || substr(value, 22) AS BLOB)")
        db.commit()
        with TuningLog(log_path, readonly=True) as log:
            assert [s.id for s in log.sessions()] == ["second"]
            assert log.get_state("cost_model/x") is None and log.damaged == 2
            with pytest.warns(UserWarning, match="2 entries"):
                log.close()
        db.execute("DELETE FROM sessions WHERE id IS NOT 'second'")
        db.commit()
        with TuningLog(log_path) as log:
            log.start_session({"trials": 9}, "first")
    db.close()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("statement", [
    "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END", "CREATE TABLE music (title)",
    "DROP TABLE state; CREATE VIEW state AS SELECT 'x' AS name, zeroblob(1) AS value", "DROP INDEX records_by_task",
    "ALTER TABLE records ADD COLUMN more AS (hex(body))", "CREATE INDEX i ON records (hex(body))",
])  # fmt: skip
def test_a_schema_that_is_not_ours(log_path: Path, statement: str, readonly: bool, tmp_path: Path) -> None:
    db = sqlite3.connect(log_path)
    db.executescript(statement)
    db.close()
    assert "its tables are not those that mlc makes" in _message(TuningLog, log_path, readonly=readonly)
    assert salvage(log_path, tmp_path / "saved.db").records == 1


def test_a_full_disk_and_afterwards(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        log.append([RECORD])
        pages = log._db.execute("PRAGMA page_count").fetchone()[0]
        log._db.execute(f"PRAGMA max_page_count = {pages}")
        big = Record("k", "t", "s", {}, random.Random(0).randbytes(50_000).hex(), (1.0,))
        assert "it is full; free some space" in _message(log.append, [big])
        log._db.execute("PRAGMA max_page_count = 1000000")
        log.append([big])
        assert log.count() == 2


def test_a_file_size_limit_while_writing(tmp_path: Path) -> None:
    program = (
        "import random, resource, signal, sys\n"
        "from mlc.errors import LogError\nfrom mlc.log import Record, TuningLog\n"
        "log = TuningLog(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n  for i in range(50): log.append([Record('k', str(i), 's', {}, random.randbytes(9000).hex(), (1.0,))])\n"
        "except LogError as error: print(i, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "log.db")], capture_output=True, text=True, check=True
    )
    stored, _, text = done.stdout.partition(" ")
    assert "check its free space, quota" in text and text.count("\n") == 1
    with TuningLog(tmp_path / "log.db") as log:
        assert log.count() == int(stored) > 0


def _as_ordinary_user(path: Path) -> list[str]:
    """What opening the log for reading, then for writing says to a user without privileges."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            for readonly in (True, False):
                try:
                    with TuningLog(path, readonly=readonly) as log:
                        text = f"opened {log.count()}"
                except LogError as error:
                    text = str(error)
                os.write(send, f"{text}\n".encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    return lines


def test_a_file_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed to other users
        folder, path = Path(name), Path(name) / "log.db"
        with TuningLog(path) as log:
            log.append([RECORD])
        path.chmod(0o444)
        folder.chmod(0o555)
        opened, refused = _as_ordinary_user(path)
        assert opened == "opened 1", "a read-only file in a read-only folder can still be read"
        assert "is read-only; give another file with --log" in refused
        path.chmod(0o000)
        unreadable = _as_ordinary_user(path)
        folder.chmod(0o755)
    assert len(unreadable) == 2 and all("check its permissions" in line for line in unreadable)


def test_a_log_that_another_process_holds(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.log.schema._BUSY_SECONDS", 0.1)
    with TuningLog(log_path) as log:
        holder = sqlite3.connect(log_path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        assert "another process holds it" in _message(log.append, [RECORD])
        holder.execute("ROLLBACK")
        holder.close()
        assert log.append([RECORD]) == 0


def test_a_record_that_is_too_large_when_unpacked(log_path: Path) -> None:
    import zlib

    db = sqlite3.connect(log_path)
    db.execute("UPDATE records SET body = ?", (zlib.compress(b"[" * (65 * 1024 * 1024), 9),))
    db.commit()
    db.close()
    _is_left_out(log_path)


def test_writing_to_a_log_opened_for_reading(log_path: Path) -> None:
    with TuningLog(log_path, readonly=True) as log:
        assert "is read-only" in _message(log.append, [RECORD])


def test_import_and_export_paths(log_path: Path, tmp_path: Path) -> None:
    with TuningLog(log_path) as log:
        assert "must be readable" in _message(import_jsonl, log, tmp_path / "none.jsonl")
        assert "must be writable" in _message(export_jsonl, log, tmp_path / "no" / "out.jsonl")
