"""Simulated workers that build and run candidates in virtual time, for tests of the local measurer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from mlc.measure.measurer import MeasureResult
from mlc.measure.pool import Busy, Job, Pool
from mlc.measure.process import WorkerProcess
from mlc.measure.protocol import Message
from mlc.testing.remote import Clock

__all__ = ["SimulatedPool", "simulated_workers"]

#: jobs that time candidates, and those of which none may be done meanwhile
_TIMED = {"run", "interleave"}
_ALONE = _TIMED | {"reference"}


@dataclass(eq=False)
class _Worker:
    """A worker that never fails."""

    pid: int
    built: dict[int, Message] = field(default_factory=dict)  # by the number in the batch
    ready: bool = True
    alive: bool = True
    runs: int = 0
    ran: set[int] = field(default_factory=set)
    prepared: set[Path] = field(default_factory=set)
    baselines: dict[str, bool] = field(default_factory=dict)


class SimulatedPool(Pool):
    """A pool of ``size`` workers whose jobs take ``seconds`` each of the clock's time and of whose candidates ``run``
    gives the results, both of the message that a candidate was built by. ``running`` are the seconds in which
    candidates were timed, ``built`` how many were built, and ``overlapped`` says whether others were timed meanwhile,
    or a reference computed. A worker has one job at a time."""

    def __init__(
        self, size: int, clock: Clock, seconds: Callable[[str, Message], float],
        run: Callable[[Message], MeasureResult],
    ) -> None:
        self._clock, self._seconds, self._run = clock, seconds, run
        self._slots = [cast(WorkerProcess, _Worker(slot)) for slot in range(size)]
        self._open = True
        self.built = 0
        self.running = 0.0
        self.overlapped = False
        self._at_work: set[int] = set()

    @property
    def closed(self) -> bool:
        return not self._open

    def close(self) -> None:
        self._open = False

    def _begin(self, slot: int, job: Job, busy: Busy) -> None:
        kind, worker = job.message["job"], cast(_Worker, self._slots[slot])
        assert slot not in self._at_work, "it would take the answer for that of another job"
        if kind == "build":
            worker.built[job.message["id"]] = job.message
            self.built += 1
        others = [other.message["job"] for other, _ in busy.values()]
        self.overlapped |= (kind in _TIMED and "reference" in others) or (
            kind in _ALONE and not _TIMED.isdisjoint(others))
        took = self._seconds(kind, self._candidate(worker, job.message))
        self.running += took if kind in _TIMED else 0.0
        self._at_work.add(slot)
        busy[slot] = (job, self._clock.now + took)

    def _wait(self, slots: Any, busy: Busy, most: float = math.inf) -> None:
        if not busy:
            return
        slot = min(busy, key=lambda slot: busy[slot][1])
        if busy[slot][1] > self._clock.now + most:
            self._clock.now += most
            return
        job, ended = busy.pop(slot)
        self._at_work.discard(slot)
        self._clock.now = max(self._clock.now, ended)
        worker = self._slots[slot]
        assert worker is not None
        job.done(worker, self._answer(cast(_Worker, worker), job.message))

    @staticmethod
    def _candidate(worker: _Worker, message: Message) -> Message:
        return worker.built.get(message.get("id", -1), message)

    def _answer(self, worker: _Worker, message: Message) -> Message:
        built = self._candidate(worker, message)
        if message["job"] == "build":
            result = self._run(built)
            if result.failure == "build":
                return {"failure": "build", "detail": result.detail}
            return {"code_hash": result.code_hash, "build_seconds": self._seconds("build", built)}
        if message["job"] == "run":
            result = self._run(built)
            if result.failure:
                return {"failure": result.failure, "detail": result.detail}
            return {"times": list(result.times), "run_seconds": self._seconds("run", built), "slowness": 1.0}
        if message["job"] == "interleave":
            return {"times": [[1e-3] * message["rounds"] for _ in message["runs"]]}
        return {}


@contextmanager
def simulated_workers(
    clock: Clock, seconds: Callable[[str, Message], float], run: Callable[[Message], MeasureResult],
) -> Iterator[list[SimulatedPool]]:
    """Measurers of this machine that are made meanwhile have such workers; the pools, in their order."""
    pools: list[SimulatedPool] = []

    def made(size: int, _threads: int, _folder: Path, _kind: str) -> SimulatedPool:
        pools.append(SimulatedPool(size, clock, seconds, run))
        return pools[-1]

    with patch("mlc.measure.local.Pool", made), patch("mlc.measure.local.wait_until_quiescent", lambda pid: None):
        yield pools
