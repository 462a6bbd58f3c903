"""Many devices as one executor, however they are reached: a queue, one job per device, and supervision.

Devices take jobs when they become idle, so that a slow one does less and delays nobody. The job of a lost device goes
to another one. All devices of a fleet are of one machine class, since their times are compared in the log. Now and then
a device therefore times a candidate that others have timed, its *control*; a device whose times differ is reported and
excluded, and so is one that is another kind of machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from mlc.errors import MeasureError
from mlc.measure.executor import Answer, Job
from mlc.measure.measurer import MeasureRequest, MeasureResult

__all__ = ["Answered", "DeviceStatus", "Devices", "Fleet", "Gone", "Joined"]

#: jobs for each device, so that one that ends a job has the next at once
_AHEAD = 2
#: seconds without any device after which there will be none
_PATIENCE = 60.0
#: and after one that came was refused
_REFUSED = 5.0
#: seconds beyond a job's own limit after which its device hangs: it may have to start workers, and to compute the
#: reference output of a function that it meets for the first time
_GRACE = 180.0
#: seconds between two looks: a sum of floats may fall short of the moment that is waited for
_LEAST_WAIT = 1e-3
#: seconds after which the status is told anew
_PERIOD = 5.0
#: jobs of a device between two that have a control, and how many controls are remembered
_CONTROLLED, _CONTROLS = 16, 8
#: a control's time may be this many times that of the others, or theirs that of it
_TOLERANCE = 1.5
#: controls in a row after which a device is left out
_STRIKES = 2
#: a control must run for so many seconds that all can time it alike
_LONG_ENOUGH = 2e-5


@dataclass(frozen=True)
class Joined:
    """A device that takes jobs from now on; ``machine`` is its description, and ``native`` the attributes of TVM's
    target for it, as JSON."""

    device: str
    machine: str
    native: str = ""


@dataclass(frozen=True)
class Gone:
    """A device that takes no more jobs, and loses its current one. If it never joined, it was refused."""

    device: str
    why: str


@dataclass(frozen=True)
class Answered:
    """A device's answer to a job; None if the job was lost."""

    device: str
    job: str
    results: tuple[MeasureResult, ...] | None


class Devices(Protocol):
    """How devices are reached. The name of a device is never reused for another one."""

    def poll(self, timeout: float) -> list[Joined | Gone | Answered]:
        """The events since the last call, waiting up to ``timeout`` seconds for one."""

    def expect(self, jobs: Sequence[Job]) -> None:
        """Announce jobs that devices will be given, in this order, so that preparation can begin."""

    def begin(self, device: str, job: Job) -> None:
        """Give an idle device a job; returns at once."""

    def drop(self, device: str) -> None:
        """Stop using a device, and ignore its answers from now on."""

    def close(self) -> None:
        """Release all devices, abandoning their jobs. Idempotent."""


@dataclass(frozen=True)
class DeviceStatus:
    """The state of a device, for display: ``state`` is ``busy``, ``idle``, or why it is inactive; ``rate`` is in
    results per second since it joined."""

    device: str
    machine: str
    state: str
    results: int
    failures: int
    rate: float


@dataclass
class _Device:
    name: str
    machine: str
    since: float
    job: Job | None = None
    control: _Control | None = None
    deadline: float = 0.0
    jobs: int = 0
    results: int = 0
    failures: int = 0
    strikes: int = 0
    factor: float = 1.0  # of the last control: own seconds by those of the others
    out: str = ""
    until: float = 0.0  # when it went

    def status(self, now: float) -> DeviceStatus:
        lived = max((self.until or now) - self.since, 1e-9)
        state = self.out or ("idle" if self.job is None else "busy")
        return DeviceStatus(self.name, self.machine, state, self.results, self.failures, self.results / lived)


@dataclass(eq=False)
class _Control:
    """A candidate that worked, and its seconds on each device."""

    request: MeasureRequest
    seconds: dict[str, float] = field(default_factory=dict)

    def others(self, device: str) -> list[float]:
        return [seconds for name, seconds in self.seconds.items() if name != device]


class Fleet:
    """Implements :class:`mlc.measure.executor.Executor` on ``devices``, with ``grain`` candidates in a job.

    ``notify`` is called with the status of all devices when one joins, leaves or is excluded, and every few seconds.
    Raises :class:`MeasureError` if there has been no device for ``patience`` seconds.
    """

    def __init__(
        self, devices: Devices, *, grain: int = 4, notify: Callable[[Sequence[DeviceStatus]], None] | None = None,
        patience: float = _PATIENCE, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reach, self._grain, self._patience, self._clock = devices, grain, patience, clock
        self._notify = notify
        self._devices: dict[str, _Device] = {}
        self._idle: deque[str] = deque()
        self._queue: deque[Job] = deque()
        self._answers: list[Answer] = []
        self._controls: deque[_Control] = deque(maxlen=_CONTROLS)
        self._machine = ""
        self.native = ""  # the target of the first device, as JSON
        self._refused = ""
        self._alive = 0
        self._deserted = clock()  # since when there is no device
        self._told = self._checked = -float("inf")
        self._closed = False

    @property
    def capacity(self) -> int:
        return max(1, _AHEAD * self._alive)

    @property
    def wanted(self) -> int:
        return max(2, _AHEAD * self._alive)

    @property
    def grain(self) -> int:
        return self._grain

    @property
    def machine(self) -> str:
        """The description of its devices; empty before the first has joined."""
        return self._machine

    def status(self) -> list[DeviceStatus]:
        """All devices that ever joined, in the order of joining."""
        now = self._clock()
        return [device.status(now) for device in self._devices.values()]

    def submit(self, jobs: Sequence[Job]) -> None:
        self._queue.extend(jobs)
        self._reach.expect(jobs)

    def poll(self, timeout: float) -> list[Answer]:
        if timeout > 0:
            self._feed()
        if not self._answers:
            for happening in self._reach.poll(self._wait(timeout)):
                self._take(happening)
        if timeout > 0:
            self._expire()
            self._feed()
            if not self._alive and self._clock() - self._deserted >= self._patience:
                raise MeasureError(self._missing())
        self._tell()
        answers, self._answers = self._answers, []
        return answers

    def wait_for_device(self) -> None:
        """Return once there is a device; raises :class:`MeasureError` where none comes."""
        while not self._alive:
            self.poll(self._patience)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self._reach.close()
            self._tell(always=True)

    # -- what happens

    def _take(self, happening: Joined | Gone | Answered) -> None:
        match happening:
            case Joined():
                self._join(happening)
            case Gone():
                self._go(happening.device, happening.why)
            case Answered():
                self._answered(happening)

    def _join(self, joined: Joined) -> None:
        device = self._devices[joined.device] = _Device(joined.device, joined.machine, self._clock())
        self._alive += 1
        if not self._machine:
            self._machine, self.native = joined.machine, joined.native
        if joined.machine != self._machine:
            self._leave_out(device, f"left out: it is another machine ({joined.machine}) than the first "
                                    f"({self._machine})")
        else:
            self._idle.append(device.name)
        self._tell(always=True)

    def _go(self, name: str, why: str) -> None:
        device = self._devices.get(name)
        if device is None:  # it was refused before it could join
            now = self._clock()
            self._devices[name] = _Device(name, "", now, out=why, until=now)
            self._refused = f"{name}: {why}"
            if not self._alive:  # others may be on their way, but need not be waited for as long
                self._deserted = min(self._deserted, now - self._patience + _REFUSED)
        elif not device.out:
            self._lose(device, why)
        self._tell(always=True)

    def _lose(self, device: _Device, why: str) -> None:
        device.out, device.until = why, self._clock()
        self._alive -= 1
        if not self._alive:
            self._deserted = device.until
        if device.job is not None:
            self._answers.append(Answer(device.job.id, None))
            device.job = None

    def _leave_out(self, device: _Device, why: str) -> None:
        self._lose(device, why)
        for control in self._controls:
            control.seconds.pop(device.name, None)
        self._reach.drop(device.name)
        self._tell(always=True)

    def _answered(self, answered: Answered) -> None:
        device = self._devices.get(answered.device)
        if device is None or device.out or device.job is None or device.job.id != answered.job:
            return  # what was taken from a device is another's now
        job, control, results = device.job, device.control, answered.results
        device.job = device.control = None
        if results is not None and len(results) == len(job.requests) + (control is not None):
            results = tuple(replace(result, machine=device.machine, device=device.name) for result in results)
            if control is not None and not self._passed(device, control, results[-1]):
                results = None
            else:
                results = results[: len(job.requests)]
        else:
            results = None
        if device.strikes >= _STRIKES:
            self._leave_out(device, f"left out: its times are not those of the others ({_difference(device)})")
        else:
            self._idle.append(device.name)
        if results is not None:
            device.results += len(results)
            device.failures += sum(bool(result.failure) for result in results)
            self._remember(device, control, job, results)
        self._answers.append(Answer(job.id, results))

    def _expire(self) -> None:
        now = self._clock()
        if now - self._checked < 1.0:
            return
        self._checked = now
        for device in [d for d in self._devices.values() if d.job is not None and d.deadline <= now]:
            self._leave_out(device, "left out: it said nothing until its job's deadline")

    # -- jobs

    def _feed(self) -> None:
        while self._queue and self._idle:
            device = self._devices[self._idle.popleft()]
            if device.out:
                continue
            job = self._queue.popleft()
            device.job, device.control = job, None
            device.deadline = self._clock() + job.limit + _GRACE
            if not job.rounds and (_controlled(device.jobs) or device.strikes):
                device.control = self._control(device)
            device.jobs += 1
            if device.control is not None:
                job = replace(job, requests=(*job.requests, device.control.request))
            self._reach.begin(device.name, job)

    def _wait(self, timeout: float) -> float:
        """Seconds to the first moment at which something is due."""
        if timeout <= 0:
            return 0.0
        now = self._clock()
        due = [timeout, _PERIOD]
        if not self._alive:
            due.append(self._deserted + self._patience - now)
        return max(_LEAST_WAIT, min(due))

    # -- controls

    def _control(self, device: _Device) -> _Control | None:
        """The candidate that most others have timed and this device has not."""
        known = [c for c in self._controls if c.seconds and device.name not in c.seconds]
        return max(known, key=lambda control: len(control.seconds), default=None)

    def _remember(
        self, device: _Device, controlled: _Control | None, job: Job, results: Sequence[MeasureResult]
    ) -> None:
        """Keep a candidate as a control for the others."""
        if controlled is None and _controlled(device.jobs - 1) and not job.rounds:
            for request, result in zip(job.requests, results, strict=True):
                if not result.failure and len(result.times) > 1 and median(result.times) > _LONG_ENOUGH:
                    control = _Control(replace(request, best=0.0), {device.name: median(result.times)})
                    self._controls.append(control)
                    return

    def _passed(self, device: _Device, control: _Control, result: MeasureResult) -> bool:
        """Whether a device times a control as the others do: most of them must differ from it, and agree with each
        other, for it to be at fault. Of two devices alone the slower is: what disturbs makes slower."""
        if result.failure or not result.times:
            device.strikes, device.factor = device.strikes + 1, 0.0
            return False
        own, others = median(result.times), control.others(device.name)
        far = [seconds for seconds in others if not own / _TOLERANCE <= seconds <= own * _TOLERANCE]
        differs = 2 * len(far) > len(others) and len(far) > 1 and max(far) < _TOLERANCE * min(far)
        if differs or (far and self._alive == 2 and own > far[0]):
            device.strikes, device.factor = device.strikes + 1, own / median(far)
            return False
        control.seconds[device.name] = own
        device.strikes = 0
        return True

    # -- words

    def _missing(self) -> str:
        gone = [f"{d.name}: {d.out}" for d in self._devices.values() if d.out]
        why = self._refused or (gone[-1] if gone else "none has come")
        return (f"a device must measure, but there has been none for {self._patience:.0f} s ({why}); start one with "
                "`mlc worker`, and look at `mlc doctor`")

    def _tell(self, *, always: bool = False) -> None:
        if self._notify is not None and (always or self._clock() - self._told >= _PERIOD):
            self._told = self._clock()
            self._notify(self.status())


def _controlled(jobs: int) -> bool:
    """Whether a device that has done so many jobs is due for a control: soon after it has joined, then now and then."""
    return jobs % _CONTROLLED == 0 or jobs in (1, 2, 4, 8)


def _difference(device: _Device) -> str:
    """The deviation in a device's last control measurement."""
    if not device.factor:
        return "a candidate that works elsewhere fails here"
    slower = device.factor > 1
    factor = device.factor if slower else 1 / device.factor
    return f"{factor:.1f} times {'slower' if slower else 'faster'}"
