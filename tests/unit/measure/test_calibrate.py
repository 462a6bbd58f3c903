"""Measuring what this machine is: which times count, and that the figures are this machine's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from mlc import subprocesses
from mlc.errors import MeasureError
from mlc.measure import calibrate as module
from mlc.measure.calibrate import Reading, calibrate, readings, steady
from mlc.target import resolve
from schedules.machine import FACTS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock by which each call takes what the list says next, and a second when it is used up."""
    lasts: list[float] = []
    now = [0.0]
    ticks = chain.from_iterable((0.0, seconds) for seconds in chain(lasts, repeat(1.0)))

    def tell() -> float:
        now[0] += next(ticks)
        return now[0]

    monkeypatch.setattr(module.time, "perf_counter", tell)
    yield lasts


def test_the_fastest_round_counts_where_another_confirms_it(clock: list[float]) -> None:
    clock += [*[5.0] * 5, *[2.0] * 5, *[2.1] * 5, *[9.0] * 20]
    assert steady(lambda: None) == (pytest.approx(2.0), True)


def test_one_fast_round_alone_is_not_confirmed(clock: list[float]) -> None:
    clock += [*[5.0] * 5, *[2.0] * 5, *[5.0] * 25]
    assert steady(lambda: None) == (pytest.approx(2.0), False)


def test_single_disturbed_calls_do_not_matter(clock: list[float]) -> None:
    clock += [2.0, 80.0, 2.0, 70.0, 2.0] * 7
    assert steady(lambda: None) == (pytest.approx(2.0), True)


def test_units_are_whole_or_shared_by_two() -> None:
    assert [module._halves(units) for units in (0.02, 0.49, 0.97, 1.02, 1.4, 1.93, 3.9)] == [0.5, 0.5, 1, 1, 1.5, 2, 4]


def test_paths_are_as_wide_as_hardware_makes_them() -> None:
    """Zen 4's two levels, measured quietly and less so; Intel's; one that seems to deliver more than it can."""
    measured = {53.0: 64, 56.1: 64, 26.4: 32, 30.1: 32, 118.0: 128, 88.0: 96, 46.0: 48, 33.0: 32, 3.0: 16}
    assert {rate: module._path(rate) for rate in measured} == measured


@pytest.mark.alone
def test_every_figure_is_one_of_a_machine() -> None:
    """Wide bounds, but not those of a kernel that was optimised away or computes something else."""
    bounds = {"ghz": (0.3, 8), "latency": (2, 12), "fma": (0.5, 8), "dot": (0.5, 8), "l1rate": (2, 1024),
              "l2rate": (1, 512), "l3rate": (0.3, 256), "core": (0.3, 1000), "memory": (0.3, 5000),
              "launch": (0.0, 1e5), "wake": (0.0, 1e6), "tile": (0.25, 8), "tilelatency": (4, 200),
              "words": (0.25, 8), "matrix": (0.25, 8), "bfloat": (0.25, 8)}
    found = {reading.name: reading for reading in readings(resolve("native", threads=2))}
    assert set(found) <= {*FACTS, "wake"}
    assert all(low < found[name].value <= high for name, (low, high) in bounds.items() if name in found), found
    if found["ghz"].confirmed:
        assert {"l1rate", "l2rate", "core", "memory"} <= set(found)


def test_what_is_not_confirmed_and_what_no_description_has_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_warning", lambda: "")
    said = '[{"name": "ghz", "value": 3.0, "confirmed": true}, {"name": "core", "value": 9.0, "confirmed": false}, ' \
           '{"name": "wake", "value": 50.0, "confirmed": true}]'
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    kept, found, busy = calibrate(resolve("native"))
    assert dict(kept.facts) == {"ghz": 3.0} and busy == ""
    assert found == [Reading("ghz", 3.0), Reading("core", 9.0, confirmed=False), Reading("wake", 50.0)]


def test_a_machine_that_becomes_busy_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "[]", ""))
    looks = iter(["", "1.9 of its CPUs are busy"])
    monkeypatch.setattr(module, "load_warning", lambda: next(looks))
    assert calibrate(resolve("native"))[2] == "1.9 of its CPUs are busy"


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit('no such instruction')", "print('no such instruction')",
             "import time; time.sleep(60)", "print('[{\"name\": 1}]')"])
def test_a_process_that_fails_is_one_line(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(module, "load_warning", lambda: "")
    monkeypatch.setattr(module, "_PATIENCE", 2.0)
    monkeypatch.setattr(subprocesses, "command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(MeasureError) as caught:
        calibrate(resolve("native"))
    text = str(caught.value)
    assert "\n" not in text and "mlc doctor" in text and text.count("calibration") == 1
