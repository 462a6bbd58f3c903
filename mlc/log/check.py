"""Checks that a log file is intact, and salvages what can be read of one that is not.

Every record carries the digest of its content, so each one that is read back is known to be as it was written.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mlc.errors import LogError
from mlc.log import codec, schema
from mlc.log.pages import raw_rows
from mlc.log.record import Record
from mlc.log.rows import record_of, record_of_body, session_of, workload_of
from mlc.log.store import Session, TuningLog
from mlc.log.workload import Workload

__all__ = ["CheckReport", "check", "salvage"]

_BATCH = 1000  # records in one transaction


@dataclass(frozen=True)
class CheckReport:
    """``records`` counts those that read back as written, ``damaged`` the visible ones that do not."""

    path: Path
    records: int
    damaged: int
    problems: tuple[str, ...]
    by_versions: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.problems and not self.damaged

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path} is whole: {self.records} records"
        why = self.problems[0] if self.problems else "content does not fit its digest"
        return (f"{self.path} is damaged ({why}): {self.records} records can be read, {self.damaged} are broken; "
                f"`mlc log check {self.path} --salvage NEW` copies those that can be read")


def check(path: str | Path) -> CheckReport:
    """Read the whole file and verify its structure and every record. Nothing is changed.

    Raises :class:`LogError` where there is no file, or it is no tuning log, or one of another schema.
    """
    source = Path(path).expanduser()
    problems = _structure(source)
    versions: Counter[str] = Counter()
    damaged = 0
    for found in _facts(source, bool(problems)):
        if isinstance(found, Record):
            versions[codec.versions_of(found.task_key)] += 1
        elif found is None:
            damaged += 1
    if problems and not versions:
        raise LogError(f"the tuning log must be an SQLite database made by mlc, but {source} is not, or nothing in it "
                       f"can be read ({problems[0]}); give another file, or delete this one")
    return CheckReport(source, versions.total(), damaged, tuple(problems), dict(versions))


def salvage(path: str | Path, out: str | Path) -> CheckReport:
    """Copy everything that reads back as written into a new log at ``out``; the source is not changed.

    Records, workloads and sessions are saved; named state is not, since nothing proves it whole and all of it can be
    made again. The report is that of the source.
    """
    target = Path(out).expanduser()
    if target.exists():
        raise LogError(f"records are salvaged into a new file, but {target} exists; give another name")
    report = check(path)
    with TuningLog(target) as log:
        facts = iter(_facts(report.path, not report.ok))
        while batch := list(islice(facts, _BATCH)):
            log.append(found for found in batch if isinstance(found, Record))
            log.put_workloads(found for found in batch if isinstance(found, Workload))
            for session in batch:
                if isinstance(session, Session):
                    log.update_session(session)
    return report


def _structure(source: Path) -> list[str]:
    """SQLite's findings about the file's structure, empty for none."""
    try:
        with TuningLog(source, readonly=True) as log:
            lines = log.integrity()
    except LogError as error:
        if isinstance(error.__cause__, sqlite3.DatabaseError) and _is_damage(error.__cause__):
            return [str(error.__cause__)]
        raise  # no file, a locked one, or somebody else's
    return lines


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return any(words in str(error) for words in ("malformed", "not a database", "disk I/O", "no such table"))


def _facts(source: Path, damaged: bool) -> Iterator[Record | Workload | Session | None]:
    """Records, workloads, sessions, and None for each that is not as it was written."""
    if not damaged:
        with TuningLog(source, readonly=True) as log:
            yield from map(record_of, log.rows())
            for uid, body in log.workload_rows():
                yield workload_of(uid, body)
            yield from map(session_of, log.session_rows())
        return
    seen: set[bytes] = set()
    for row in raw_rows(source, schema.PAGE_SIZE):
        if len(row) == 7 and isinstance(row[1], bytes) and isinstance(row[5], bytes):
            if row[1] not in seen:  # a page may have been copied before it was reused
                found = record_of_body(row[1], row[5])
                if found is not None:
                    seen.add(row[1])
                yield found
        elif len(row) == 3 and isinstance(row[1], bytes) and isinstance(row[2], bytes):
            if (workload := workload_of(row[1], row[2])) is not None:
                yield workload
        elif len(row) == 5 and (session := session_of(row)):
            yield session
