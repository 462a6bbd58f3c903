"""A simulated fleet in virtual time: devices that are busy, lose answers, die and join."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence

from mlc.measure.executor import Job
from mlc.measure.fleet import Answered, Gone, Joined
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.testing.remote import Clock

__all__ = ["SimulatedDevices"]

Happening = Joined | Gone | Answered


class SimulatedDevices:
    """Implements :class:`mlc.measure.fleet.Devices` with ``count`` devices that take ``seconds`` for a candidate.

    ``run`` says what a device measures. ``lost`` is the probability that a job's answer is known to be lost, ``dying``
    the part of the devices that die at a random moment of the first ``horizon`` seconds, and ``slow`` how many times
    longer than the others the first device takes. ``charged``: the processor time that this process uses between two
    calls is time that passes for the devices too, as if they were real and this the session that feeds them.
    """

    def __init__(
        self, count: int, clock: Clock, run: Callable[[str, MeasureRequest, int], MeasureResult], *,
        seconds: float = 0.3, lost: float = 0.0, dying: float = 0.0, slow: float = 1.0, horizon: float = 60.0,
        charged: bool = False, seed: int = 0, machine: Callable[[str], str] = lambda device: "simulated",
    ) -> None:
        self._clock, self._run, self._lost = clock, run, lost
        self._rng = random.Random(seed)
        self._order = itertools.count()
        self._coming: list[tuple[float, int, Happening]] = []
        self._begun: dict[str, float] = {}
        self._dead: set[str] = set()
        self._charged, self._cpu = charged, time.process_time()
        self.measured: list[tuple[str, MeasureRequest]] = []  # in the order of their beginning
        self.busy: dict[str, float] = {}  # seconds that each device worked
        self.died: dict[str, float] = {}
        self.cpu = 0.0  # seconds of this process, the simulation's own left out
        self.closed = False
        self._seconds: dict[str, float] = {}
        for number in range(count):
            name = f"device-{number}"
            self._seconds[name] = seconds * (slow if number == 0 else 1.0)
            self.busy[name] = 0.0
            self.happen(0.0, Joined(name, machine(name)))
            if number and self._rng.random() < dying:
                self.died[name] = self._rng.random() * horizon
                self.happen(self.died[name], Gone(name, "it died"))

    def happen(self, when: float, happening: Happening) -> None:
        """Let something happen at a moment."""
        heapq.heappush(self._coming, (when, next(self._order), happening))

    def poll(self, timeout: float) -> list[Happening]:
        self._charge()
        deadline = self._clock.now + timeout
        while self._coming and self._void(self._coming[0][2]):
            heapq.heappop(self._coming)
        first = self._coming[0][0] if self._coming else deadline
        self._clock.now = max(self._clock.now, min(first, deadline))
        arrived = []
        while self._coming and self._coming[0][0] <= self._clock.now:
            happening_at, _, happening = heapq.heappop(self._coming)
            if self._void(happening):
                continue
            if isinstance(happening, Gone):
                self._end(happening.device)
            elif isinstance(happening, Answered):
                self._stop(happening.device, happening_at)
            arrived.append(happening)
        self._rest()
        return arrived

    def expect(self, jobs: Sequence[Job]) -> None:
        pass

    def begin(self, device: str, job: Job) -> None:
        self._charge()
        rounds = max(1, job.rounds)
        work = len(job.requests) * self._seconds[device] * self._rng.uniform(0.7, 1.3) * rounds**0.5
        self.measured += [(device, request) for request in job.requests]
        results = tuple(self._run(device, request, job.rounds) for request in job.requests)
        lost = self._rng.random() < self._lost
        self._begun[device] = self._clock.now
        self.happen(self._clock.now + work, Answered(device, job.id, None if lost else results))
        self._rest()

    def drop(self, device: str) -> None:
        self._end(device)

    def close(self) -> None:
        self.closed = True
        self._coming.clear()

    def utilisation(self, until: float) -> float:
        """The part of the living devices' time that they worked, from 0 to ``until``, which is now."""
        lived = sum(min(self.died.get(name, until), until) for name in self.busy)
        return (sum(self.busy.values()) + sum(until - begun for begun in self._begun.values())) / lived

    def _void(self, happening: Happening) -> bool:
        return happening.device in self._dead

    def _end(self, device: str) -> None:
        self._stop(device, self._clock.now)
        self._dead.add(device)

    def _stop(self, device: str, when: float) -> None:
        begun = self._begun.pop(device, None)
        if begun is not None:
            self.busy[device] += when - begun

    def _charge(self) -> None:
        used = time.process_time() - self._cpu
        self.cpu += used
        if self._charged:
            self._clock.now += used

    def _rest(self) -> None:
        self._cpu = time.process_time()

