"""Export and import of logs as JSON lines, and merging without duplicates."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlc.errors import LogError
from mlc.log import codec
from mlc.log.decision import GraphDecision, decision_text, parse_decision
from mlc.log.record import Record
from mlc.log.store import TuningLog, row_of
from mlc.log.workload import Workload, parse_workload, workload_text

__all__ = ["Exchange", "export_jsonl", "import_jsonl", "merge", "read_jsonl"]

_BATCH = 1000  # records in one transaction
_MAX_LINE = 64 * 1024 * 1024
_SHOWN = 5


@dataclass(frozen=True)
class Exchange:
    """What an import or a merge did. ``problems`` are ``(source, line, reason)`` of what was skipped; the line is 0
    where the source is a database."""

    added: int
    duplicates: int
    problems: tuple[tuple[str, int, str], ...] = ()

    def __str__(self) -> str:
        text = f"{self.added} records added, {self.duplicates} were there already"
        if not self.problems:
            return text
        shown = "; ".join(f"{source}:{line}: {reason}" if line else f"{source}: {reason}"
                          for source, line, reason in self.problems[:_SHOWN])
        more = f"; and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        return f"{text}, {len(self.problems)} lines skipped: {shown}{more}"


def export_jsonl(
    log: TuningLog, path: str | Path, task_key: str | None = None, sessions: Collection[str] | None = None
) -> int:
    """Write every workload, decision and record as one JSON object a line, with its digest as ``uid``.

    With ``task_key`` those of one task alone, with ``sessions`` the records of these runs alone. Returns how many
    records were written.
    """
    target, count = Path(path), 0
    try:
        with target.open("w", encoding="utf-8") as file:
            for workload in log.workloads():
                if task_key in (None, workload.task_key):
                    text = workload_text(workload)
                    file.write(f'{{"uid":"{codec.digest(text).hex()}","workload":{text}}}\n')
            for decision in log.decisions() if task_key is None else []:
                text = decision_text(decision)
                file.write(f'{{"uid":"{codec.digest(text).hex()}","decision":{text}}}\n')
            for record in log.records(task_key):
                if sessions is not None and record.session not in sessions:
                    continue
                text = codec.canonical_text(record)
                file.write(f'{{"uid":"{codec.digest(text).hex()}",{text[1:]}\n')
                count += 1
    except OSError as error:
        raise LogError(f"the exported file must be writable, but {target} is not ({error.strerror})") from error
    return count


def read_jsonl(path: str | Path) -> Iterator[tuple[int, Record | Workload | GraphDecision | str]]:
    """``(line number, record)`` (or workload or decision), or ``(line number, reason)`` for a line that is neither.

    Blank lines are skipped.

    A line whose ``uid`` does not fit its content was torn or altered, and is no record either.
    """
    source = Path(path)
    try:
        with source.open("rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE):
                number += 1
                if line.strip():
                    yield number, _parse_line(line)
    except OSError as error:
        raise LogError(f"the imported file must be readable, but {source} is not ({error.strerror})") from error


def import_jsonl(log: TuningLog, path: str | Path) -> Exchange:
    """Append every record of ``path`` that the log does not have, and later decisions; bad lines are skipped."""
    problems: list[tuple[str, int, str]] = []

    workloads: list[Workload] = []
    decisions: list[GraphDecision] = []

    def records() -> Iterator[Record]:
        for number, found in read_jsonl(path):
            if isinstance(found, Record):
                yield found
            elif isinstance(found, Workload):
                workloads.append(found)
            elif isinstance(found, GraphDecision):
                decisions.append(found)
            else:
                problems.append((str(path), number, found))

    added, seen = _append(log, map(row_of, records()))
    log.put_workloads(workloads)
    log.put_decisions(decisions)
    return Exchange(added, seen - added, tuple(problems))


def merge(into: TuningLog, sources: Iterable[str | Path]) -> Exchange:
    """Append the records of other logs (``.db``, or ``.jsonl``) that ``into`` does not have, with their sessions.

    Of two decisions about one model the later one holds.
    """
    total = Exchange(0, 0)
    for source in map(Path, sources):
        done = import_jsonl(into, source) if source.suffix == ".jsonl" else _merge_database(into, source)
        total = Exchange(
            total.added + done.added, total.duplicates + done.duplicates, total.problems + done.problems
        )
    return total


def _merge_database(into: TuningLog, source: Path) -> Exchange:
    with TuningLog(source, readonly=True) as other:
        if other.path.resolve() == into.path.resolve():
            raise LogError(f"a log can be merged only from another file, but {source} is the log itself; leave it out")
        # rows are encoded anew: what a file from elsewhere says about itself is not taken on trust
        added, seen = _append(into, map(row_of, other.records()))
        into.put_workloads(other.workloads())
        into.put_decisions(other.decisions())
        known = {session.id for session in into.sessions()}
        for session in other.sessions():
            if session.id not in known:
                into.update_session(session)
        problems = ((str(source), 0, f"{other.damaged} entries do not match their checksums"),) if other.damaged else ()
    return Exchange(added, seen - added, problems)


def _append(log: TuningLog, rows: Iterator[tuple[Any, ...]]) -> tuple[int, int]:
    added = seen = 0
    while batch := list(islice(rows, _BATCH)):
        added += log.append_rows(batch)
        seen += len(batch)
    return added, seen


def _parse_line(line: bytes) -> Record | Workload | GraphDecision | str:
    found: Record | Workload | GraphDecision
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            return f"a record must be a JSON object, got {type(values).__name__}"
        uid = values.pop("uid", None)
        if set(values) == {"workload"}:
            found = parse_workload(json.dumps(values["workload"]))
            text = workload_text(found)
        elif set(values) == {"decision"}:
            found = parse_decision(json.dumps(values["decision"]))
            text = decision_text(found)
        else:
            found = codec.parse_text(json.dumps(values))
            text = codec.canonical_text(found)
    except codec.MalformedRecord as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"a record must be one JSON object, but {error}"
    if uid is not None and uid != codec.digest(text).hex():
        return "the content must fit its uid, but it was altered or damaged"
    return found
