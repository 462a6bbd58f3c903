"""Noticing that the machine is slow, and timing again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import tvm

from mlc.measure.gauge import DISTURBED, Gauge, arrays, clock_of, undisturbed
from mlc.measure.lowered import arithmetic, compile_hashed
from mlc.target import resolve

TARGET = resolve("native", threads=2)


def gauge(readings: Sequence[float]) -> Gauge:
    """One that reads these, each of them three times over."""
    clock: Iterator[float] = (reading for reading in readings for _ in range(3))
    return Gauge(lambda: next(clock), waking=0.0)


class Timing:
    """Gives 1, 2, 3 ... and remembers the pauses before them."""

    def __init__(self) -> None:
        self.calls = 0
        self.pauses: list[float] = []

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def test_slowness_is_against_the_fastest_reading() -> None:
    machine = gauge([2e-5, 3e-5, 1e-5, 2e-5])
    assert [machine.slowness() for _ in range(4)] == [1.0, pytest.approx(1.5), 1.0, pytest.approx(2.0)]


def test_one_odd_reading_of_three_is_forgiven() -> None:
    clock = iter([1e-5] * 3 + [1e-5, 9e-5, 1e-5])
    machine = Gauge(lambda: next(clock))
    assert [machine.slowness(), machine.slowness()] == [1.0, 1.0]


def test_a_machine_that_stays_slow_becomes_the_measure() -> None:
    machine = gauge([1e-5, *[2e-5] * 200])
    assert [machine.slowness() for _ in range(201)][-1] == 1.0


def test_cores_that_slept_are_woken_before_a_reading() -> None:
    seconds = iter([9e-5, 7e-5, 3e-5, *[1e-5] * 20])
    spent: list[float] = []

    def clock() -> float:
        spent.append(next(seconds))
        return spent[-1]

    machine = Gauge(clock, waking=1.9e-4, now=lambda: sum(spent))
    assert undisturbed(lambda: "timed", machine) == ("timed", 1.0)
    assert len(spent) == 4 + 2 * 3, "of the readings the first four are none"


def test_at_a_quiet_moment_one_attempt_is_enough() -> None:
    timing = Timing()
    assert undisturbed(timing, gauge([1e-5] * 2), pause=timing.pauses.append) == (1, 1.0)
    assert not timing.pauses


def test_what_was_disturbed_before_or_after_is_timed_again() -> None:
    for readings in ([1e-5, 2e-5, 1e-5, 1e-5], [1e-5, 2e-5, 2e-5, 1e-5, 1e-5, 1e-5]):
        timing, machine = Timing(), gauge(readings)
        if len(readings) == 6:
            machine.slowness()  # slow already when the first attempt begins
        result, slowness = undisturbed(timing, machine, pause=timing.pauses.append)
        assert (result, slowness) == (2, 1.0) and len(timing.pauses) == 1


def test_of_several_disturbed_attempts_the_least_disturbed_counts() -> None:
    machine = gauge([1e-5, 4e-5, 2e-5, 3e-5, 2e-5, 2e-5, 5e-5])
    machine.slowness()
    result, slowness = undisturbed(Timing(), machine, pause=lambda _: None)
    assert result == 2 and slowness == pytest.approx(3.0) and slowness > DISTURBED


def test_what_cannot_matter_is_not_timed_again() -> None:
    timing, machine = Timing(), gauge([1e-5, 4e-5, 4e-5])
    machine.slowness()
    asked: list[tuple[int, float]] = []

    def matters(result: int, slowness: float) -> bool:
        asked.append((result, slowness))
        return False

    assert undisturbed(timing, machine, matters)[0] == 1
    assert asked == [(1, pytest.approx(4.0))]


def test_where_most_moments_are_disturbed_there_is_one_attempt() -> None:
    machine = gauge([1e-5, *[5e-5] * 12, 1e-5, 1e-5])
    machine.slowness()
    calls = []
    for _ in range(4):
        timing = Timing()
        undisturbed(timing, machine, pause=lambda _: None)
        calls.append(timing.calls)
    assert calls == [3, 1, 1, 1]
    assert not machine.rarely


def test_the_arithmetic_takes_time_on_this_machine() -> None:
    module, _ = compile_hashed(arithmetic(2), TARGET.tvm)
    tensors = [tvm.runtime.tensor(array) for array in arrays(2)]
    machine = Gauge(clock_of(partial(module["main"], *tensors)))
    assert all(machine.slowness() >= 1.0 for _ in range(5))
    assert 1e-6 < machine._clock() < 1.0
    x, y, sums = (tensor.numpy() for tensor in tensors)
    np.testing.assert_allclose(sums, x * y.sum(dtype="float64"), rtol=1e-4)
