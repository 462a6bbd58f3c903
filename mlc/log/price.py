"""Prices of tasks from the log, by which alternatives are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc.log.record import ELSEWHERE
from mlc.log.store import LogReader

if TYPE_CHECKING:
    from mlc.graph.task import Task

__all__ = ["Prices"]


class Prices:
    """A price function for :func:`mlc.graph.pipeline.lower`.

    Times of two machines say nothing about each other: alternatives of one choice are priced on the machine of the
    first of them that the log knows, and not at all on one that is faster than the target can be.
    """

    def __init__(self, log: LogReader | None = None) -> None:
        self._log = log
        self._machines: dict[str, str] = {}

    def __call__(self, task: Task) -> float | None:
        """Seconds of the record that the task would be built from, None without one."""
        key = task.key
        record = self._log.best(*task.keys) if self._log is not None else None
        if record is None or not record.ok or record.machine == ELSEWHERE:
            return None
        if self._machines.setdefault(task.choice or key, record.machine) != record.machine:
            return None
        return record.seconds
