"""Prunes a log to the best records of each task and a sample of the others to train on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from mlc.errors import LogError
from mlc.log.store import TuningLog, row_of

__all__ = ["prune"]

_BATCH = 1000  # records in one transaction


def prune(source: str | Path, out: str | Path, keep: int = 8, sample: int = 24, seed: int = 0) -> tuple[int, int]:
    """Copy the pruned log into a new file at ``out``; how many records there were and are. The source is not changed.

    Of each task stay what it is compiled from, its ``keep`` fastest records, and ``sample`` others drawn at random,
    failures among them. Workloads, decisions and sessions stay; stored cost models do not, since they are made again.
    """
    if keep < 1 or sample < 0:
        raise LogError(f"pruning must keep at least 1 record a task and sample 0 or more, got {keep} and {sample}")
    target = Path(out).expanduser()
    if target.exists():
        raise LogError(f"a pruned log is a new file, but {target} exists; give another name")
    before = after = 0
    with TuningLog(source, readonly=True) as log, TuningLog(target) as pruned:
        waiting: list[int] = []
        for summary in log.tasks():
            records = log.outline(summary.task_key)
            rng = random.Random(f"{seed}/{summary.task_key}")
            waiting += _kept(records, log.best_number(summary.task_key), keep, sample, rng)
            before += len(records)
            if len(waiting) >= _BATCH:
                after += _copy(log, pruned, waiting)
                waiting = []
        after += _copy(log, pruned, waiting)
        pruned.put_workloads(log.workloads())
        pruned.put_decisions(log.decisions())
        for session in log.sessions():
            pruned.update_session(session)
    return before, after


def _kept(
    records: Sequence[tuple[int, float]], best: int | None, keep: int, sample: int, rng: random.Random
) -> list[int]:
    """The numbers of those that stay, of a task's ``(number, seconds)`` in the order of the log."""
    ranked = sorted(range(len(records)), key=lambda i: records[i][1])
    chosen = {i for i in ranked[:keep] if math.isfinite(records[i][1])}
    chosen |= {i for i, (number, _) in enumerate(records) if number == best}
    others = [i for i in range(len(records)) if i not in chosen]
    chosen |= set(rng.sample(others, min(sample, len(others))))
    return [records[i][0] for i in sorted(chosen)]


def _copy(log: TuningLog, into: TuningLog, numbers: Sequence[int]) -> int:
    """Copy records in the log's order, which distinguishes the last comparison from earlier ones; returns how many."""
    # encoded anew: what the file says about a record is not taken on trust
    return into.append_rows([row_of(record) for record in log.records_at(numbers)])
