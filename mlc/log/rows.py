"""Rows of the log's tables as records and back. A row that was altered after writing is ignored.

A record's row holds its text and the digest of it; its other columns are an index, and must say what the text says. A
session carries its checksum among its options, a named state at its beginning; those of a log that was written before
they did are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlc.log import codec
from mlc.log.record import Record
from mlc.log.workload import Workload, parse_workload

__all__ = [
    "Session", "record_of", "record_of_body", "row_of", "sealed", "session_of", "session_row", "unsealed",
    "workload_of",
]

_CHECK = "checksum"
_SEAL, _SEAL_BYTES = b"mlc\0", 16
_MAX_COUNT = 1 << 53
_MAX_SECONDS = 253402300800.0  # the year 10000, beyond which there are no dates


@dataclass(frozen=True)
class Session:
    """One tuning run: ``options`` as the user gave them, and what of its budget is spent."""

    id: str
    started: float
    options: dict[str, Any] = field(default_factory=dict)
    trials: int = 0
    seconds: float = 0.0


def row_of(record: Record) -> tuple[bytes, str, str, float | None, bytes, int]:
    """``(uid, task_key, session, seconds, body, kept)``; raises :class:`~mlc.log.codec.MalformedRecord`."""
    text = codec.canonical_text(record)
    return codec.digest(text), *_index(record), codec.pack(text), int(record.kept)


def record_of(row: Sequence[Any]) -> Record | None:
    """The record of a row as :func:`row_of` makes it; None where it is not as it was written."""
    uid, task_key, session, seconds, body, kept = row
    record = record_of_body(uid, body)
    if record is None or (task_key, session, seconds) != _index(record) or kept != int(record.kept):
        return None
    return record


def record_of_body(uid: Any, body: Any) -> Record | None:
    """The record of a body and its digest, whatever the columns beside them say; None where they do not fit."""
    text = _verified_text(uid, body)
    try:
        return None if text is None else codec.parse_text(text)
    except codec.MalformedRecord:
        return None


def workload_of(uid: Any, body: Any, task_key: str | None = None) -> Workload | None:
    """The workload (of the task) of a body and its digest; None where they do not fit."""
    text = _verified_text(uid, body)
    try:
        workload = None if text is None else parse_workload(text)
    except codec.MalformedRecord:
        return None
    return workload if workload is not None and task_key in (None, workload.task_key) else None


def session_row(session: Session) -> tuple[str, float, str, int, float]:
    """``(id, started, options, trials, seconds)``, with a checksum of them all among the options."""
    options = {**session.options, _CHECK: _session_checksum(session)}
    return session.id, float(session.started), json.dumps(options), session.trials, float(session.seconds)


def session_of(row: Sequence[Any]) -> Session | None:
    """Inverse of :func:`session_row`; None for what is no session, or not as it was written.

    SQLite stores whole numbers in REAL columns as integers, which a raw row shows.
    """
    name, started, options, trials, seconds = row
    try:
        parsed = json.loads(options)
    except (TypeError, ValueError, RecursionError):
        return None
    sane = (isinstance(name, str) and name.isprintable() and isinstance(parsed, dict) and _is_natural(trials)
            and _is_time(started) and _is_time(seconds))
    if not sane:
        return None
    checksum = parsed.pop(_CHECK, None)
    session = Session(name, float(started), parsed, trials, float(seconds))
    return session if checksum in (None, _session_checksum(session)) else None


def sealed(blob: bytes) -> bytes:
    """A named state's value with its checksum."""
    return _SEAL + _digest(blob) + blob


def unsealed(value: Any) -> bytes | None:
    """Inverse of :func:`sealed`; None where the value is not as it was written. One without a checksum is older."""
    if not isinstance(value, bytes) or not value.startswith(_SEAL):
        return value if isinstance(value, bytes) else None
    checksum, blob = value[len(_SEAL) :][:_SEAL_BYTES], value[len(_SEAL) + _SEAL_BYTES :]
    return blob if checksum == _digest(blob) else None


def _index(record: Record) -> tuple[str, str, float | None]:
    return record.task_key, record.session, record.seconds if record.ok else None


def _verified_text(uid: Any, body: Any) -> str | None:
    if not isinstance(uid, bytes) or not isinstance(body, bytes):
        return None
    try:
        text = codec.unpack(body)
    except codec.MalformedRecord:
        return None
    return text if codec.digest(text) == uid else None


def _session_checksum(session: Session) -> str:
    facts = [session.id, float(session.started), session.options, session.trials, float(session.seconds)]
    return _digest(json.dumps(facts, sort_keys=True).encode()).hex()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SEAL_BYTES).digest()


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


def _is_time(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value < _MAX_SECONDS
