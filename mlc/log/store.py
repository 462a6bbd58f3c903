"""The tuning log as one SQLite file that several processes may append to at the same time."""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlc.log import codec, schema
from mlc.log.decision import PREFIX, GraphDecision, decision_text, parse_decision
from mlc.log.record import CLEARLY_FASTER, Record, best_of
from mlc.log.rows import Session, record_of, row_of, sealed, session_of, session_row, unsealed, workload_of
from mlc.log.workload import Workload, workload_text

__all__ = ["LogReader", "Session", "TaskSummary", "TuningLog", "row_of"]

_Fact = TypeVar("_Fact")

#: a time that counts; what damage or somebody else wrote there may be of any type
_TIME = "typeof(seconds) = 'real' AND seconds > 0"
_GPU = "-cuda/"  # in the key of a task for a GPU
_PAGE = 512  # rows fetched at once, so that a reader of a large log neither waits nor holds a lock


@dataclass(frozen=True)
class TaskSummary:
    """One line of ``mlc log show``. ``best_seconds`` is infinite if nothing succeeded; a candidate that was compiled
    for a GPU but not run does not count as failed."""

    task_key: str
    task_name: str
    records: int
    failures: int
    best_seconds: float
    versions: str


class LogReader(Protocol):
    """What a build needs of a log: one file, or several read as one (:func:`mlc.log.layered`)."""

    def best(self, *task_keys: str) -> Record | None:
        """The record to compile a task with, among those under any of its keys.

        It is the winner of the task's last comparison, unless something measured since is clearly faster; if nothing
        was compared, the fastest.
        """

    def records(self, task_key: str | None = None, session: str | None = None) -> Iterator[Record]:
        """All records that match, oldest first."""

    def count(self) -> int:
        """How many records there are."""

    def tasks(self) -> list[TaskSummary]:
        """One summary for each task, in the order of their keys."""

    def get_state(self, name: str) -> bytes | None:
        """The blob that a tuning run stored under a name, or None."""

    def by_versions(self) -> dict[str, int]:
        """How many records there are for each TVM and LLVM; only those of the running ones can ever match."""

    def close(self) -> None:
        """Let go of the file. Idempotent."""


class TuningLog(AbstractContextManager["TuningLog"]):
    """One log file. A record survives any crash and power failure once :meth:`append` has returned.

    Opening creates the file and its folder unless ``readonly``. Every failure is a one-line :class:`LogError`. May be
    used from several threads; other processes open it themselves.

    A record that is not as it was written is never returned: it is skipped and counted in :attr:`damaged`, and closing
    the log warns about it in one line.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self.path = Path(path).expanduser()
        self._lock = threading.RLock()
        self._damaged: set[tuple[str, Any]] = set()
        self._db = schema.connect(self.path, readonly)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._db.close()
            count, self._damaged = self.damaged, set()
        if count:
            warnings.warn(f"{count} entries of {self.path} do not match their checksums and were not used; "
                          f"`mlc log check {self.path}` counts all, and with --salvage NEW copies the others",
                          stacklevel=2)

    @property
    def damaged(self) -> int:
        """How many of the entries read so far are not as they were written."""
        return len(self._damaged)

    # -- writing

    def append(self, records: Iterable[Record], session: Session | None = None) -> int:
        """Store ``records`` in one transaction, which is durable when this returns; returns how many were new.

        A record that equals a stored one in every field is not stored twice, so that a writer that is unsure may repeat
        itself. ``session`` is stored in the same transaction, so that a session's budget always agrees with its
        records.
        """
        return self.append_rows([row_of(record) for record in records], session)

    def append_rows(self, rows: list[tuple[Any, ...]], session: Session | None = None) -> int:
        """:meth:`append` for rows that :meth:`rows` of another log gave."""
        with self._writing():
            before = self._db.total_changes
            self._db.executemany(
                "INSERT OR IGNORE INTO records (uid, task_key, session, seconds, body, kept) "
                "VALUES (?, ?, ?, ?, ?, ?)", rows,
            )
            added = self._db.total_changes - before
            if session is not None:
                self._put_session(session)
            return added

    def put_workloads(self, workloads: Iterable[Workload]) -> int:
        """Keep what tasks compute, once for each task; how many were new."""
        rows = []
        for workload in workloads:
            text = workload_text(workload)
            rows.append((workload.task_key, codec.digest(text), codec.pack(text)))
        with self._writing():
            before = self._db.total_changes
            self._db.executemany("INSERT OR IGNORE INTO workloads (task_key, uid, body) VALUES (?, ?, ?)", rows)
            return self._db.total_changes - before

    def put_state(self, name: str, blob: bytes) -> None:
        """Keep a blob under a name (a cost model, say), replacing what was there."""
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO state (name, value) VALUES (?, ?)", (name, sealed(blob)))

    def put_decisions(self, decisions: Iterable[GraphDecision]) -> int:
        """Keep which graphs were decided for, the latest decision about each subject; how many were new."""
        added = 0
        with self._writing():
            for decision in decisions:
                name, text = PREFIX + decision.subject, decision_text(decision)
                known = self._decision(name)
                if known is None or known.when < decision.when:
                    row = name, sealed(text.encode())
                    self._db.execute("INSERT OR REPLACE INTO state (name, value) VALUES (?, ?)", row)
                    added += 1
        return added

    def start_session(self, options: Mapping[str, Any], session_id: str | None = None) -> Session:
        """Note that a tuning run begins. ``options`` must be JSON values."""
        session = Session(session_id or uuid.uuid4().hex[:12], time.time(), dict(options))
        self.update_session(session)
        return session

    def update_session(self, session: Session, *, trials: int | None = None, seconds: float | None = None) -> Session:
        """Store what a session has spent in all so far, and return it as stored."""
        session = replace(
            session, trials=session.trials if trials is None else trials,
            seconds=session.seconds if seconds is None else seconds,
        )
        with self._writing():
            self._put_session(session)
        return session

    # -- reading

    def best(self, *task_keys: str) -> Record | None:
        number = self.best_number(*task_keys)
        if number is None:
            return None
        found = next(self.records_at([number]), None)
        return found or best_of(chain.from_iterable(map(self.records, task_keys)))  # the index named a damaged one

    def best_number(self, *task_keys: str) -> int | None:
        """The number of :meth:`best`, as :meth:`outline` has it."""
        kept = [row for key in task_keys for row in self._rows(
            "SELECT id, seconds FROM records WHERE task_key = ? AND kept AND " + _TIME + " ORDER BY id DESC LIMIT 1",
            key,
        )]
        latest = max(kept, default=None)
        after, below = (latest[0], latest[1] * CLEARLY_FASTER) if latest else (-1, float("inf"))
        rows = [row for key in task_keys for row in self._rows(
            # the plus keeps SQLite from walking the table by id instead of the index by seconds
            "SELECT seconds, id FROM records WHERE task_key = ? AND seconds < ? AND +id > ? AND " + _TIME
            + " ORDER BY seconds LIMIT 1",
            key, below, after,
        )]
        if rows:
            return int(min(rows)[1])
        return None if latest is None else int(latest[0])

    def outline(self, task_key: str) -> list[tuple[int, float]]:
        """``(number, seconds)`` of each record of a task, oldest first, a failure's infinite: without reading any."""
        rows = self._rows("SELECT id, seconds FROM records WHERE task_key = ? ORDER BY id", task_key)
        return [(number, seconds if isinstance(seconds, float) else float("inf")) for number, seconds in rows]

    def records(self, task_key: str | None = None, session: str | None = None) -> Iterator[Record]:
        for row in self.rows(task_key, session):
            if (record := self._sound("records", row[0], record_of(row))) is not None:
                yield record

    def records_at(self, numbers: Sequence[int]) -> Iterator[Record]:
        """The records with these numbers, oldest first."""
        for row in self.rows_at(numbers):
            if (record := self._sound("records", row[0], record_of(row))) is not None:
                yield record

    def rows(self, task_key: str | None = None, session: str | None = None) -> Iterator[tuple[Any, ...]]:
        """``(uid, task_key, session, seconds, body, kept)`` of every match, oldest first, for :meth:`append_rows`."""
        wanted = {"task_key": task_key, "session": session}
        given = {name: value for name, value in wanted.items() if value is not None}
        if not given:
            yield from self._all_rows()
            return
        where = " AND ".join(f"{name} = ?" for name in given)
        ids = [i for (i,) in self._rows(f"SELECT id FROM records WHERE {where} ORDER BY id", *given.values())]
        yield from self.rows_at(ids)

    def rows_at(self, numbers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """:meth:`rows` of the records with these numbers, oldest first."""
        ids = sorted(numbers)
        for start in range(0, len(ids), _PAGE):
            page = ids[start : start + _PAGE]
            marks = ",".join("?" * len(page))
            yield from self._rows(
                f"SELECT uid, task_key, session, seconds, body, kept FROM records WHERE id IN ({marks}) ORDER BY id",
                *page,
            )

    def count(self) -> int:
        return int(self._rows("SELECT count(*) FROM records")[0][0])

    def tasks(self) -> list[TaskSummary]:
        time = f"CASE WHEN {_TIME} THEN seconds END"
        rows = self._rows(
            f"SELECT task_key, count(*), count({time}), min({time}) FROM records WHERE typeof(task_key) = 'text' "
            "GROUP BY task_key ORDER BY task_key"
        )
        return [
            TaskSummary(key, self._task_name(key), n, n - ok - (self._untimed(key) if n > ok else 0),
                        float("inf") if best is None else best, codec.versions_of(key))
            for key, n, ok, best in rows
        ]

    def _untimed(self, task_key: str) -> int:
        """Candidates of a GPU's task that were compiled and not run: the table has no seconds of them either."""
        return sum(record.untimed for record in self.records(task_key)) if _GPU in task_key else 0

    def by_versions(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for key, n in self._rows("SELECT task_key, count(*) FROM records WHERE typeof(task_key) = 'text' "
                                 "GROUP BY task_key"):
            totals[codec.versions_of(key)] += n
        return dict(totals)

    def workload(self, task_key: str) -> Workload | None:
        """The workload of a task, None if the log does not have it."""
        return next(self._workloads(" WHERE task_key = ?", task_key), None)

    def workloads(self) -> Iterator[Workload]:
        """Every workload, in the order of the tasks' keys."""
        return self._workloads(" ORDER BY task_key")

    def workload_rows(self) -> list[tuple[bytes, bytes]]:
        """``(uid, body)`` of every workload, as stored."""
        return self._rows("SELECT uid, body FROM workloads ORDER BY task_key") if self._has_workloads() else []

    def get_state(self, name: str) -> bytes | None:
        """The blob kept under ``name``, or None."""
        rows = self._rows("SELECT value FROM state WHERE name = ?", name)
        return self._sound("state", name, unsealed(rows[0][0])) if rows else None

    def decisions(self) -> list[GraphDecision]:
        """Which graphs were decided for, in the order of the subjects."""
        names = self._rows("SELECT name FROM state WHERE substr(name, 1, ?) = ? ORDER BY name", len(PREFIX), PREFIX)
        return [found for (name,) in names if isinstance(name, str) and (found := self._decision(name)) is not None]

    def sessions(self) -> list[Session]:
        """Every tuning run that was noted, oldest first."""
        rows = self.session_rows()
        return [found for row in rows if (found := self._sound("sessions", row[0], session_of(row))) is not None]

    def session_rows(self) -> list[tuple[Any, ...]]:
        """``(id, started, options, trials, seconds)`` of every tuning run, as stored."""
        return self._rows("SELECT id, started, options, trials, seconds FROM sessions ORDER BY started, rowid")

    def integrity(self) -> list[str]:
        """SQLite's findings about the file's structure; empty for none."""
        lines = [line for (text,) in self._rows("PRAGMA integrity_check(20)") for line in str(text).splitlines()]
        return [line for line in lines if line != "ok" and not line.startswith("***")]

    # -- inside

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, schema.explained(self.path), schema.transaction(self._db):
            yield

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, schema.explained(self.path):
            return self._db.execute(sql, values).fetchall()

    def _all_rows(self) -> Iterator[tuple[Any, ...]]:
        last = -1
        while True:
            page = self._rows(
                "SELECT uid, task_key, session, seconds, body, kept, id FROM records WHERE id > ? ORDER BY id LIMIT ?",
                last, _PAGE,
            )
            page = [row for row in page if row[-1] > last]  # a damaged tree may give them in any order, for ever
            if not page:
                return
            last = max(row[-1] for row in page)
            yield from (row[:-1] for row in page)

    def _sound(self, table: str, key: Any, found: _Fact | None) -> _Fact | None:
        """``found``, and a note of the damage where there is None."""
        if found is None:
            self._damaged.add((table, key))
        return found

    def _has_workloads(self) -> bool:
        """A file of the schema before, opened for reading, has no such table."""
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE name = 'workloads'"))

    def _workloads(self, which: str, *values: Any) -> Iterator[Workload]:
        if not self._has_workloads():
            return
        keys = self._rows("SELECT task_key FROM workloads" + which, *values)
        for (key,) in keys:
            for uid, body in self._rows("SELECT uid, body FROM workloads WHERE task_key = ?", key):
                if (workload := self._sound("workloads", key, workload_of(uid, body, key))) is not None:
                    yield workload

    def _decision(self, name: str) -> GraphDecision | None:
        """The blob stored under a name; None if this version cannot read it."""
        try:
            found = parse_decision((self.get_state(name) or b"").decode())
        except (codec.MalformedRecord, UnicodeDecodeError):
            return None
        return found if PREFIX + found.subject == name else None

    def _task_name(self, key: str) -> str:
        rows = self._rows("SELECT id FROM records WHERE task_key = ? ORDER BY seconds DESC LIMIT 1", key)
        found = next(self.records_at([rows[0][0]]), None) if rows else None
        found = found or next(self.records(key), None)
        return found.task_name if found else "damaged"

    def _put_session(self, session: Session) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO sessions (id, started, options, trials, seconds) VALUES (?, ?, ?, ?, ?)",
            session_row(session),
        )
