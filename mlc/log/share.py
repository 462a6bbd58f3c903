"""Sharing logs through a folder: on a network drive or in a repository.

Each log has one file of its own there, which nobody else ever writes, so that there is nothing to conflict; it holds
the runs that were made into this log, and replaces its older version as a whole. Pulling adds what the files of others
hold. Records say on which machine they were measured and by which versions, here as there.
"""

from __future__ import annotations

import math
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from mlc.errors import LogError
from mlc.log.exchange import Exchange, export_jsonl, import_jsonl
from mlc.log.store import TaskSummary, TuningLog

__all__ = ["Gain", "Pulled", "pull", "push"]

_AUTHOR = "exchange/author"


@dataclass(frozen=True)
class Gain:
    """A task for which a pulled record is faster than all that the log had: ``factor`` times, 0 where it had none.

    ``machine`` and ``versions`` measured it, ``over`` is the machine of the fastest that the log had: where they
    differ, the factor is of the machines as well.
    """

    task_name: str
    machine: str
    versions: str
    seconds: float
    factor: float
    over: str = ""


@dataclass(frozen=True)
class Pulled:
    """The result of a pull: the records of how many files, and the ``gains``, largest first."""

    files: int
    exchange: Exchange
    gains: tuple[Gain, ...] = field(default=())


def push(log: TuningLog, folder: Path) -> tuple[Path, int]:
    """Write the runs that were made into ``log`` to its file in ``folder``; the file and how many records it has."""
    _need_folder(folder)
    path = folder / f"{log.path.stem}.{_author(log)}.jsonl"
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        count = export_jsonl(log, part, sessions={session.id for session in log.sessions()})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path, count


def pull(log: TuningLog, folder: Path) -> Pulled:
    """Add what others have pushed from their logs of the same name."""
    _need_folder(folder)
    own = f"{log.path.stem}.{_author(log)}.jsonl"
    files = [path for path in sorted(folder.glob("*.jsonl"))
             if path.name != own and path.name.rpartition(".")[0].rpartition(".")[0] == log.path.stem]
    before = {task.task_key: task.best_seconds for task in log.tasks()}
    total = Exchange(0, 0)
    for path in files:
        done = import_jsonl(log, path)
        total = Exchange(total.added + done.added, total.duplicates + done.duplicates, total.problems + done.problems)
    gains = [_gain(log, task, before.get(task.task_key, math.inf)) for task in log.tasks()]
    return Pulled(len(files), total, tuple(sorted(filter(None, gains), key=lambda g: (-g.factor, g.task_name))))


def _gain(log: TuningLog, task: TaskSummary, before: float) -> Gain | None:
    if task.best_seconds >= before:
        return None
    known = [record for record in log.records(task.task_key) if record.ok]
    best = min(known, key=lambda r: r.seconds, default=None)
    if best is None:
        return None
    beaten = next((record for record in known if record.seconds == before), None)
    factor, over = (0.0, "") if beaten is None else (before / best.seconds, beaten.machine)
    return Gain(best.task_name, best.machine, best.versions, best.seconds, factor, over)


def _author(log: TuningLog) -> str:
    """A name for this log, drawn once and kept in it."""
    blob = log.get_state(_AUTHOR)
    if blob is None:
        blob = uuid.uuid4().hex[:12].encode()
        log.put_state(_AUTHOR, blob)
    return blob.decode()


def _need_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise LogError(f"logs are shared through a folder, but {folder} is none; make it with `mkdir -p {folder}`")
