"""The database file: its tables, how it is opened safely, and what each failure means to the user."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlc.errors import LogError

__all__ = ["APPLICATION_ID", "PAGE_SIZE", "SCHEMA_VERSION", "connect", "explain", "explained", "transaction"]

SCHEMA_VERSION = 3
#: read as it is, and brought up to date when it is opened for writing: it lacks the workloads
_WITHOUT_WORKLOADS = 2
APPLICATION_ID = 0x6D6C6331  # "mlc1": tells our files from other people's SQLite databases
PAGE_SIZE = 4096
_BUSY_SECONDS = 30.0
_MAX_VALUE = 64 * 1024 * 1024  # bytes of one column, as of one record

#: ``body`` holds the whole record (see codec.py), ``uid`` its digest; the other columns are an index over it.
#: ``kept`` is 1 for a record that was kept when its task's best were timed in turn.
_TABLES = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    uid BLOB NOT NULL UNIQUE,
    task_key TEXT NOT NULL,
    session TEXT NOT NULL,
    seconds REAL,
    body BLOB NOT NULL,
    kept INTEGER NOT NULL
);
CREATE INDEX records_kept ON records (task_key) WHERE kept;
CREATE INDEX records_by_task ON records (task_key, seconds);
CREATE INDEX records_by_session ON records (session);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    started REAL NOT NULL,
    options TEXT NOT NULL,
    trials INTEGER NOT NULL,
    seconds REAL NOT NULL
);
CREATE TABLE state (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
);
"""
#: ``body`` is a task's function (see workload.py), ``uid`` its digest
_WORKLOADS = """
CREATE TABLE workloads (
    task_key TEXT PRIMARY KEY,
    uid BLOB NOT NULL,
    body BLOB NOT NULL
);
"""


def connect(path: Path, readonly: bool) -> sqlite3.Connection:
    """Open the log at ``path``, creating it unless ``readonly``. Raises :class:`LogError` for anything else."""
    if path.is_dir():
        raise LogError(f"the tuning log must be a file, but {path} is a directory; give a file in it")
    if readonly and not path.exists():
        raise LogError(f"the tuning log must exist, but there is no {path}; `mlc tune --log {path}` makes one")
    if not readonly:
        _make_parent(path)
    with explained(path):
        if readonly:
            return _connect_readonly(path)
        db = _open(path, "rwc")
        try:
            _prepare(db, path)
        except BaseException:
            db.close()
            raise
        return db


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a :class:`LogError` of one line."""
    try:
        yield
    except sqlite3.Error as error:
        raise LogError(explain(error, path)) from error


def explain(error: sqlite3.Error, path: Path) -> str:
    """What an SQLite error means for the tuning log at ``path``, and what to do."""
    text = str(error)
    if "not a database" in text or "encrypted" in text:
        return f"the tuning log must be an SQLite database, but {path} is not; " + _SALVAGE.format(path=path)
    if "malformed" in text or "no such table" in text:
        return f"the tuning log must be whole, but {path} is damaged ({text}); " + _SALVAGE.format(path=path)
    if "disk I/O" in text:  # a quota or a size limit ends here too
        return f"the disk must take the tuning log {path}, but it failed; check its free space, quota and health"
    if "disk is full" in text:
        return f"the disk must have room for the tuning log {path}, but it is full; free some space and run again"
    if "readonly" in text or "read-only" in text:
        return f"the tuning log must be writable, but {path} is read-only; give another file with --log"
    if "unable to open" in text:
        return f"the tuning log must be a file that this user can open, but {path} cannot be; check its permissions"
    if "locked" in text:
        return (f"the tuning log {path} must be free within {_BUSY_SECONDS:.0f} s, but another process holds it; "
                "wait for it or end it")
    return f"the tuning log {path} must be usable, but SQLite says: {text}"


_SALVAGE = "`mlc log check {path}` shows what can be read, and with --salvage NEW copies it"


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """A write transaction that takes its lock at once, so that two writers queue instead of failing midway."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _open(path: Path, mode: str, **options: str) -> sqlite3.Connection:
    query = "&".join([f"mode={mode}", *(f"{k}={v}" for k, v in options.items())])
    db = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{query}", uri=True, timeout=_BUSY_SECONDS, isolation_level=None,
        check_same_thread=False, factory=_Connection,
    )
    _distrust(db)
    return db


class _Connection(sqlite3.Connection):
    """Reports damage in one way: SQLite quotes damaged names in its message, which Python may fail to decode."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*args)
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError("malformed: its tables have names that are no text") from error


def _distrust(db: sqlite3.Connection) -> None:
    """A log that someone sent must neither run anything nor make this process take gigabytes."""
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    db.text_factory = _text
    if sys.version_info >= (3, 11):
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
    if sys.version_info >= (3, 12):
        db.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE)


def _text(data: bytes) -> str:
    """Damaged text is read as some text, which then does not match its checksum."""
    return data.decode(errors="replace")


def _connect_readonly(path: Path) -> sqlite3.Connection:
    """A reader that leaves no trace; where not even a lock file can be made, the file is taken as finished."""
    attempts: list[dict[str, str]] = [{}, {"immutable": "1"}]
    if not path.with_name(path.name + "-wal").exists():
        attempts.reverse()  # nothing is pending and nobody writes: no shared memory file is needed
    for attempt in attempts:
        db = _open(path, "ro", **attempt)
        try:
            _check_identity(db, path)
            return db
        except sqlite3.OperationalError as error:
            db.close()
            if attempt is attempts[-1] or "locked" in str(error):  # a log in use is not finished
                raise
        except BaseException:
            db.close()
            raise
    raise AssertionError("unreachable")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    if _user_version(db) != SCHEMA_VERSION:
        _create(db)
    _check_identity(db, path)
    _update(db)
    _use_wal(db)
    db.execute("PRAGMA synchronous = FULL")  # append returns after the disk has it
    db.execute("PRAGMA cache_size = -16384")
    _user_version(db)  # the first read makes the -wal file, by which a reader sees that there is a writer


def _create(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA page_size = {PAGE_SIZE}")
    with transaction(db):
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if _user_version(db) == 0 and tables == 0:  # else another process was faster, or the file is not ours
            for statement in (_TABLES + _WORKLOADS).strip().split(";")[:-1]:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _update(db: sqlite3.Connection) -> None:
    """Add what a log of the schema before lacks."""
    if _user_version(db) == _WITHOUT_WORKLOADS:
        with transaction(db):
            if _user_version(db) == _WITHOUT_WORKLOADS:  # else another process was faster
                db.execute(_WORKLOADS.strip().rstrip(";"))
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _use_wal(db: sqlite3.Connection) -> None:
    """Writers then do not block readers. The switch itself does not honour the busy time-out, hence the loop.

    Where the file system cannot do it (some network ones), the rollback journal is as safe, only slower.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _user_version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _check_identity(db: sqlite3.Connection, path: Path) -> None:
    application = db.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        raise LogError(
            f"the tuning log must be one that mlc made, but {path} is another SQLite database; give another file"
        )
    version = _user_version(db)
    if version in (SCHEMA_VERSION, _WITHOUT_WORKLOADS):
        _check_tables(db, version)
        return
    remedy = (
        "update mlc, or export it there with `mlc log export` and import it here"
        if version > SCHEMA_VERSION
        else "export it with the mlc that wrote it (`mlc log export`) and import it here (`mlc log import`)"
    )
    raise LogError(f"the tuning log must have schema {SCHEMA_VERSION}, but {path} has {version}; {remedy}")


def _check_tables(db: sqlite3.Connection, version: int) -> None:
    """No table, view or trigger but ours: those of a crafted file may do anything when they are read or written."""
    wanted = _TABLES + (_WORKLOADS if version == SCHEMA_VERSION else "")
    found = db.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex_%' LIMIT 32").fetchall()
    if sorted(_spelling(str(sql)) for (sql,) in found) != sorted(map(_spelling, wanted.strip().split(";")[:-1])):
        raise sqlite3.DatabaseError("malformed: its tables are not those that mlc makes")


def _spelling(sql: str) -> str:
    return " ".join(sql.split())


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(
            f"the tuning log's folder must exist or be creatable, but {path.parent} is not "
            f"({error.strerror}); give another file with --log"
        ) from None
