"""A fleet of simulated devices in virtual time: whatever becomes of them, each candidate has one result of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from test_dispatch import OPTIONS, ExecutorContract, _requests, _result

from mlc.errors import MeasureError
from mlc.measure.dispatch import Dispatcher
from mlc.measure.executor import Executor
from mlc.measure.fleet import Answered, DeviceStatus, Fleet, Gone, Joined
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.testing.fleet import SimulatedDevices
from mlc.testing.remote import Clock


def _measured(device: str, request: MeasureRequest, rounds: int) -> MeasureResult:
    result = _result(request, rounds or 3)
    return MeasureResult(result.times, result.failure, result.detail, machine="simulated")


def _skewed(factors: dict[str, float]) -> Callable[[str, MeasureRequest, int], MeasureResult]:
    """Devices whose times are wrong by a factor."""

    def run(device: str, request: MeasureRequest, rounds: int) -> MeasureResult:
        factor = factors.get(device, 1.0)
        return MeasureResult(tuple(factor * (1.0 + int(request.trace)) for _ in range(rounds or 3)))

    return run


def _fleet(devices: SimulatedDevices, clock: Clock, told: list[Sequence[DeviceStatus]] | None = None) -> Dispatcher:
    fleet = Fleet(devices, clock=clock, grain=3, notify=told.append if told is not None else None)
    return Dispatcher(fleet, OPTIONS, attempts=100, grace=1e4, clock=clock)


class TestFleet(ExecutorContract):
    def executor(self, clock: Clock) -> Executor:
        devices = SimulatedDevices(3, clock, lambda _device, r, rounds: _result(r, rounds), seed=1)
        return _Anonymous(devices, clock=clock)


class _Anonymous(Fleet):
    """The contract knows no machines."""

    def _join(self, joined: Joined) -> None:
        super()._join(Joined(joined.device, ""))


@pytest.mark.parametrize("seed", range(60))
def test_losses_deaths_and_comings_cost_no_result(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    count = rng.randint(2, 40)
    devices = SimulatedDevices(count, clock, _measured, lost=rng.random() * 0.3, dying=rng.random() * 0.5,
                               slow=rng.choice((1.0, 10.0)), horizon=20.0, seed=seed)
    devices.happen(5.0, Joined("late", "simulated"))
    devices._seconds["late"], devices.busy["late"] = 0.3, 0.0
    with _fleet(devices, clock) as dispatcher:
        for size in (rng.randint(1, 30), rng.randint(50, 300)):
            told: list[int] = []
            requests = _requests(size)
            results = dispatcher.measure(requests, lambda i, _r, told=told: told.append(i))
            assert results == [_measured("", r, 0) for r in requests] and sorted(told) == list(range(size))
        assert dispatcher.compare(requests[:4], 5) == [_measured("", r, 5) for r in requests[:4]]
    assert devices.closed
    states = {s.device: s.state for s in dispatcher.executor.status()}  # type: ignore[attr-defined]
    dead = {name for name, when in devices.died.items() if when <= clock.now}
    assert {name for name, state in states.items() if state == "it died"} == dead
    assert not [state for state in states.values() if state.startswith("left out")]


def test_a_device_does_one_job_at_a_time() -> None:
    clock = Clock()

    class Watched(SimulatedDevices):
        under_way: set[str] = set()  # noqa: RUF012

        def begin(self, device, job):  # type: ignore[no-untyped-def]
            assert device not in self.under_way
            self.under_way.add(device)
            super().begin(device, job)

        def poll(self, timeout):  # type: ignore[no-untyped-def]
            found = super().poll(timeout)
            self.under_way -= {h.device for h in found if isinstance(h, Answered)}
            return found

    with _fleet(Watched(5, clock, _measured), clock) as dispatcher:
        dispatcher.measure(_requests(100))


@pytest.mark.parametrize("factor", [3.0, 0.2])
def test_a_device_whose_times_differ_is_left_out_and_told_of(factor: float) -> None:
    """Of six devices one is disturbed, or lies; what it measured after it was found out is measured elsewhere."""
    clock, told = Clock(), list[Sequence[DeviceStatus]]()
    devices = SimulatedDevices(6, clock, _skewed({"device-3": factor}), seed=3)
    with _fleet(devices, clock, told) as dispatcher:
        dispatcher.measure(_requests(40))
        late = dispatcher.measure(_requests(400))
        later = dispatcher.measure(_requests(40))
    states = {s.device: s.state for s in told[-1]}
    out = [name for name, state in states.items() if state.startswith("left out")]
    assert out == ["device-3"] and ("slower" if factor > 1 else "faster") in states["device-3"]
    assert len(late) == 400
    assert [r.times[0] for r in later] == [1.0 + i for i in range(40)]


def test_of_two_devices_that_differ_the_slower_is_left_out() -> None:
    clock = Clock()
    devices = SimulatedDevices(2, clock, _skewed({"device-0": 4.0}), seed=3)
    with _fleet(devices, clock) as dispatcher:
        dispatcher.measure(_requests(400))
        states = {s.device: s.state for s in dispatcher.executor.status()}  # type: ignore[attr-defined]
    assert states["device-0"].startswith("left out") and not states["device-1"].startswith("left out")


def test_another_machine_than_the_first_is_left_out() -> None:
    clock = Clock()
    devices = SimulatedDevices(3, clock, _measured, machine=lambda name: "A" if name != "device-1" else "B")
    with _fleet(devices, clock) as dispatcher:
        results = dispatcher.measure(_requests(60))
        (_, out, _) = dispatcher.executor.status()  # type: ignore[attr-defined]
    assert {r.machine for r in results} == {"A"} and dispatcher.executor.machine == "A"
    assert out.results == 0 and "another machine (B) than the first (A)" in out.state


def test_a_silent_device_is_left_out_at_its_deadline() -> None:
    clock = Clock()

    class Silent(SimulatedDevices):
        def begin(self, device, job):  # type: ignore[no-untyped-def]
            if device != "device-1":
                super().begin(device, job)

    with _fleet(Silent(2, clock, _measured), clock) as dispatcher:
        assert len(dispatcher.measure(_requests(9))) == 9
        states = [s.state for s in dispatcher.executor.status()]  # type: ignore[attr-defined]
    assert "deadline" in states[1]


@pytest.mark.parametrize(("happening", "why"), [
    (None, "none has come"), (Gone("device-0", "TVM 0.1"), "device-0: TVM 0.1"), (Joined("device-0", "x"), "power cut"),
])
def test_without_devices_a_run_ends_in_one_line(happening: Joined | Gone | None, why: str) -> None:
    clock = Clock()
    devices = SimulatedDevices(0, clock, _measured)
    if happening is not None:
        devices.happen(1.0, happening)
    if isinstance(happening, Joined):
        devices._seconds["device-0"], devices.busy["device-0"] = 5.0, 0.0
        devices.happen(2.0, Gone("device-0", "power cut"))
    with pytest.raises(MeasureError, match="mlc worker") as caught, _fleet(devices, clock) as dispatcher:
        dispatcher.measure(_requests(30))
    assert why in str(caught.value) and "\n" not in str(caught.value) and clock.now < 100
