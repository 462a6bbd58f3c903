"""Several logs read as one: the user's own over the shipped ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from mlc.config import user_log_path
from mlc.log.codec import versions_of
from mlc.log.record import Record, best_of
from mlc.log.store import LogReader, TaskSummary, TuningLog
from mlc.target import Target

__all__ = ["Layers", "MemoryLog", "layered", "shipped"]


class MemoryLog:
    """Records held in memory, as those that ship are. Nothing can be appended."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = list(records)
        by_key: dict[str, list[Record]] = {}
        for record in self._records:
            by_key.setdefault(record.task_key, []).append(record)
        self._best = {key: found for key, records in by_key.items() if (found := best_of(records)) is not None}

    def best_seconds(self, task_key: str) -> float:
        """Seconds of :meth:`best`, infinite without one."""
        found = self._best.get(task_key)
        return found.seconds if found else float("inf")

    def best(self, *task_keys: str) -> Record | None:
        found = [self._best[key] for key in task_keys if key in self._best]
        return found[0] if len(found) == 1 else best_of(found)

    def records(self, task_key: str | None = None, session: str | None = None) -> Iterator[Record]:
        for record in self._records:
            if task_key in (None, record.task_key) and session in (None, record.session):
                yield record

    def count(self) -> int:
        return len(self._records)

    def tasks(self) -> list[TaskSummary]:
        by_key: dict[str, list[Record]] = {}
        for record in self._records:
            by_key.setdefault(record.task_key, []).append(record)
        return [
            TaskSummary(key, found[0].task_name, len(found), sum(not (r.ok or r.untimed) for r in found),
                        self.best_seconds(key), versions_of(key))
            for key, found in sorted(by_key.items())
        ]

    def by_versions(self) -> dict[str, int]:
        return dict(Counter(versions_of(record.task_key) for record in self._records))

    def get_state(self, name: str) -> bytes | None:
        return None

    def close(self) -> None:
        pass


class Layers(AbstractContextManager["Layers"]):
    """``readers`` in the order of trust: a lower one is asked only where the upper ones have no record.

    Times are not compared: those of two machines say nothing about each other, and a tuning run has timed what ships
    beside its own candidates.
    """

    def __init__(self, readers: Iterable[LogReader]) -> None:
        self.readers = tuple(readers)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def best(self, *task_keys: str) -> Record | None:
        return next((found for reader in self.readers if (found := reader.best(*task_keys)) is not None), None)

    def records(self, task_key: str | None = None, session: str | None = None) -> Iterator[Record]:
        for reader in self.readers:
            yield from reader.records(task_key, session)

    def count(self) -> int:
        return sum(reader.count() for reader in self.readers)

    def tasks(self) -> list[TaskSummary]:
        merged: dict[str, TaskSummary] = {}
        for summary in (s for reader in self.readers for s in reader.tasks()):
            seen = merged.get(summary.task_key)
            merged[summary.task_key] = summary if seen is None else TaskSummary(
                seen.task_key, seen.task_name, seen.records + summary.records, seen.failures + summary.failures,
                min(seen.best_seconds, summary.best_seconds), seen.versions,
            )
        return [merged[key] for key in sorted(merged)]

    def by_versions(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for reader in self.readers:
            totals.update(reader.by_versions())
        return dict(totals)

    def get_state(self, name: str) -> bytes | None:
        return next((blob for reader in self.readers if (blob := reader.get_state(name)) is not None), None)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def layered(user_path: str | Path | None, target: Target) -> Layers:
    """The user's log (``None``: the one in the platform's data folder) over the shipped ones of ``target``.

    A default log that does not exist yet is an empty one; a path that the caller named must exist.
    """
    path = user_log_path(target.canonical) if user_path is None else Path(user_path).expanduser()
    own = [] if user_path is None and not path.exists() else [TuningLog(path, readonly=True)]
    return Layers([*own, *shipped(target)])


def shipped(target: Target) -> list[LogReader]:
    """A reader of the records that ship for ``target``; none where there are none."""
    from mlc.log.shipped import shipped_records  # TVM's import takes seconds, and a log alone needs none

    records = shipped_records(target)
    return [MemoryLog(records)] if records else []
