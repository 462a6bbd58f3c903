"""Whole runs on a simulated fleet: kept busy, nothing proposed or counted twice, as good as a run on one machine."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from tuning_tasks import TARGET, matmul

from mlc.log import TuningLog
from mlc.measure.dispatch import Dispatcher
from mlc.measure.fleet import Fleet
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult
from mlc.testing.fleet import SimulatedDevices
from mlc.testing.measuring import FakeMeasurer, bowl, decided
from mlc.testing.remote import Clock
from mlc.tuning import TuneOptions, tune_tasks

BEST = (8, 32, 4)
TASKS = [matmul(64, 64, 32 * (1 + i), weight=1 + i % 3) for i in range(6)]


pytestmark = pytest.mark.usefixtures("small_space")


def _run(device: str, request: MeasureRequest, rounds: int) -> MeasureResult:
    seconds = bowl(BEST)(decided(request.trace))
    noise = random.Random(f"{device}/{request.trace}/{rounds}")
    times = tuple(seconds * noise.gauss(1.0, 0.005) for _ in range(rounds or 3))
    return MeasureResult(times, build_seconds=0.2, run_seconds=0.1, code_hash=f"{hash(request.trace):x}")


def _fleet(count: int, machine: str = "rack") -> tuple[Dispatcher, SimulatedDevices]:
    clock = Clock()
    devices = SimulatedDevices(count, clock, _run, lost=0.05, dying=0.2, slow=10.0, horizon=5.0,
                               machine=lambda _: machine, seed=1)
    fleet = Fleet(devices, clock=clock, grain=2)
    return Dispatcher(fleet, MeasureOptions(threads=2), attempts=50, grace=1e4, clock=clock), devices


def test_a_run_on_a_fleet_is_as_good_and_counts_each_trial_once(tmp_path: Path) -> None:
    trials = 120
    with TuningLog(tmp_path / "fleet.db") as log, TuningLog(tmp_path / "here.db") as here:
        dispatcher, devices = _fleet(24)
        with dispatcher:
            report = tune_tasks(TASKS, TARGET, log, TuneOptions(trials=trials), dispatcher)
        serial = tune_tasks(TASKS, TARGET, here, TuneOptions(trials=trials), FakeMeasurer(bowl(BEST), noise=0.005))
        records = [r for r in log.records() if r.verdict is None]
    assert 0 < report.trials == len(records) <= trials
    assert max(Counter((r.task_key, r.trace) for r in records).values()) == 1
    assert [r.trial for r in records] == list(range(1, report.trials + 1)) and {r.machine for r in records} == {"rack"}
    assert {name for name, _ in devices.measured} > {"device-1", "device-2"} and devices.died
    assert report.best_latency is not None and serial.best_latency is not None
    assert report.best_latency <= 1.1 * serial.best_latency
    assert all(task.verdict != "unconfirmed" for task in report.tasks)


def test_records_of_another_machine_class_are_left_alone(tmp_path: Path) -> None:
    """Of one class a run goes on with what is known, of another it begins anew."""
    with TuningLog(tmp_path / "log.db") as log:
        for machine, known in (("rack", 0), ("board", 0), ("rack", 1)):
            dispatcher, _ = _fleet(4, machine)
            with dispatcher:
                dispatcher.executor.wait_for_device()  # type: ignore[attr-defined]
                events: list[object] = []
                tune_tasks(TASKS[:1], TARGET, log, TuneOptions(trials=16), dispatcher, events.append)
            (plan,) = events[0].tasks  # type: ignore[attr-defined]
            assert (plan.known > 0) == bool(known)


def test_an_interrupt_keeps_what_has_been_measured(tmp_path: Path) -> None:
    dispatcher, devices = _fleet(8)
    answered = 0

    poll = devices.poll

    def interrupted(timeout: float):  # type: ignore[no-untyped-def]
        nonlocal answered
        found = poll(timeout)
        answered += len(found)
        if answered > 40 and timeout > 0:
            devices.poll = poll  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return found

    devices.poll = interrupted  # type: ignore[method-assign]
    with TuningLog(tmp_path / "log.db") as log, dispatcher:
        report = tune_tasks(TASKS, TARGET, log, TuneOptions(trials=400), dispatcher)
        assert report.reason == "interrupted" and 0 < report.trials == log.count()
    assert devices.closed
