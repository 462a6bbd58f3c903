"""The device's side of a fleet: a local measurer behind three calls that exchange text."""

from __future__ import annotations

import os

from mlc.measure.executor import Job
from mlc.measure.local import LocalMeasurer
from mlc.measure.local_executor import build_workers
from mlc.measure.machine import machine_id
from mlc.measure.wire import Description, job_of, results_text

__all__ = ["Node"]


class Node:
    """Builds and times jobs on the machine that it runs on, as :class:`mlc.measure.local.LocalMeasurer` does, one at a
    time; :mod:`mlc.measure.wire` has the texts."""

    def __init__(self) -> None:
        self._measurer: LocalMeasurer | None = None

    def describe(self) -> str:
        """The text of a :class:`mlc.measure.wire.Description`."""
        from mlc.graph.task import versions
        from mlc.target import resolve

        return Description(machine_id(), versions(), resolve("native").attrs).text()

    def run(self, text: str) -> str:
        """Do a job; the text of its results."""
        job = job_of(text)
        measurer = self._ready(job)
        if job.rounds:
            return results_text(measurer.compare(job.requests, job.rounds))
        return results_text(measurer.measure(job.requests))

    def pid(self) -> int:
        """The process that measures."""
        return os.getpid()

    def close(self) -> None:
        """Stop what measures. Idempotent."""
        if self._measurer is not None:
            self._measurer.close()
            self._measurer = None

    def _ready(self, job: Job) -> LocalMeasurer:
        """The measurer for a job's options; its threads are those that the session's target has."""
        if self._measurer is None or self._measurer.options != job.options:
            self.close()
            self._measurer = LocalMeasurer(job.options, build_workers())
        return self._measurer
