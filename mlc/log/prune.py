"""A log without what no longer matters: of each task the best records, and a sample of the others to learn from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from mlc.errors import LogError
from mlc.log.record import Record
from mlc.log.store import TuningLog, row_of

__all__ = ["prune"]


def prune(source: str | Path, out: str | Path, keep: int = 8, sample: int = 24, seed: int = 0) -> tuple[int, int]:
    """Copy the pruned log into a new file at ``out``; how many records there were and are. The source is not changed.

    Of each task stay what it is compiled from, its ``keep`` fastest records, and ``sample`` others drawn at random,
    failures among them. Workloads and sessions stay; stored cost models do not, since they are made again.
    """
    if keep < 1 or sample < 0:
        raise LogError(f"pruning must keep at least 1 record a task and sample 0 or more, got {keep} and {sample}")
    target = Path(out).expanduser()
    if target.exists():
        raise LogError(f"a pruned log is a new file, but {target} exists; give another name")
    before = after = 0
    with TuningLog(source, readonly=True) as log, TuningLog(target) as pruned:
        for summary in log.tasks():
            records = list(log.records(summary.task_key))
            kept = _kept(records, log.best(summary.task_key), keep, sample, random.Random(f"{seed}/{summary.task_key}"))
            pruned.append_rows([row_of(record) for record in kept])
            before, after = before + len(records), after + len(kept)
        pruned.put_workloads(log.workloads())
        for session in log.sessions():
            pruned.update_session(session)
    return before, after


def _kept(
    records: Sequence[Record], best: Record | None, keep: int, sample: int, rng: random.Random
) -> list[Record]:
    """In the order of the log, in which the last comparison is told from the earlier ones."""
    ranked = sorted(range(len(records)), key=lambda i: records[i].seconds)
    chosen = {i for i in ranked[:keep] if records[i].ok}
    chosen |= {i for i, record in enumerate(records) if record == best}
    others = [i for i in range(len(records)) if i not in chosen]
    chosen |= set(rng.sample(others, min(sample, len(others))))
    return [records[i] for i in sorted(chosen)]
