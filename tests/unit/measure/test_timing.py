"""Slow candidates get no more than they need, close ones as many repeats as it takes, on a clock that is made up."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median

import pytest

from mlc.measure.timing import Pace, Plan, standard_error, time_candidate

PLAN = Plan(repeats=3, most_repeats=9, min_repeat_seconds=0.01, warmup_runs=1)


class Clock:
    """Calls of ``seconds`` with relative ``noise``, the first one ``cold`` times as long."""

    def __init__(self, seconds: float, noise: float = 0.0, cold: float = 1.0, seed: int = 0) -> None:
        self.seconds, self.noise, self.cold = seconds, noise, cold
        self.calls: list[int] = []
        self._rng = random.Random(seed)

    def __call__(self, count: int) -> float:
        mean = self.seconds * (self.cold if not self.calls else 1.0) * (1 + self.noise * self._rng.gauss(0, 1))
        self.calls.append(count)
        return mean

    @property
    def spent(self) -> float:
        return self.seconds * sum(self.calls)


def plan(**changes: float) -> Plan:
    return Plan(**{**PLAN.__dict__, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 0.04])
def test_without_a_rival_there_are_so_many_repeats_of_so_long(seconds: float) -> None:
    clock = Clock(seconds, cold=5)
    times = time_candidate(clock, PLAN)
    assert len(times) == 3 and median(times) == seconds
    assert all(count * seconds >= 0.8 * 0.01 for count in clock.calls[-2:])


def test_who_is_clearly_slower_costs_two_calls() -> None:
    clock = Clock(5e-3)
    assert time_candidate(clock, plan(best=1e-3)) == [5e-3] and clock.calls == [1, 1]


def test_a_slow_first_call_is_forgiven() -> None:
    clock = Clock(1e-3, cold=9)
    assert median(time_candidate(clock, plan(best=1.01e-3))) == 1e-3


def test_who_is_slower_after_a_repeat_gets_no_other() -> None:
    clock = Clock(1.4e-3)
    assert len(time_candidate(clock, plan(best=1e-3))) == 1 and clock.spent < 0.02
    assert len(time_candidate(Clock(1.1e-3), plan(best=1e-3))) == 3


def test_repeats_go_on_until_the_difference_is_significant() -> None:
    alike = [len(time_candidate(Clock(1e-3, 0.05, seed=s), plan(best=1e-3))) for s in range(20)]
    apart = [len(time_candidate(Clock(0.8e-3, 0.05, seed=s), plan(best=1e-3))) for s in range(20)]
    assert median(alike) > 5 and max(alike) == 9 and median(apart) == 3
    assert len(time_candidate(Clock(1e-3, 0.0005), plan(best=1e-3))) == 3, "exact enough for anything"


def test_the_cutoff_is_absolute() -> None:
    clock = Clock(0.5)
    assert time_candidate(clock, plan(cutoff=0.25)) == [0.5] and clock.calls == [1]


class Machine:
    """One that is ``slow`` times as slow in every second tenth of a second, and slowest when it has slept."""

    def __init__(self, slow: float, now: float = 0.0) -> None:
        self.slow, self.now, self.slept = slow, now, True

    def timer(self, seconds: float, calls: list[int] | None = None):
        def timed(count: int) -> float:
            spent = 0.0
            for _ in range(count):
                spent += seconds * (self.slow if int((self.now + spent) / 0.1) % 2 else 1.0) * (3 if self.slept else 1)
                self.slept = False
            self.now += spent
            if calls is not None:
                calls.append(count)
            return spent / count

        return timed


@pytest.mark.parametrize("begins", [0.0, 0.05, 0.1, 0.15])
def test_beside_a_baseline_a_slow_machine_changes_nothing(begins: float) -> None:
    for seconds in (0.8e-3, 1.05e-3):
        machine = Machine(1.7, begins)
        pace = Pace(machine.timer(1e-3), 1e-3, 0.01)
        beside = time_candidate(machine.timer(seconds), plan(best=1e-3), pace)
        assert median(beside) == pytest.approx(seconds, rel=0.02) and len(beside) >= 3


def test_a_slow_moment_costs_no_candidate_its_repeats() -> None:
    def repeats(paced: bool, seconds: float) -> int:
        machine = Machine(2.2, 0.1)
        pace = Pace(machine.timer(1e-3), 1e-3, 0.01) if paced else (lambda: 1.0)
        return len(time_candidate(machine.timer(seconds), plan(best=1e-3), pace))

    assert repeats(False, 0.95e-3) == 1 and repeats(True, 0.95e-3) >= 3
    assert repeats(True, 1.3e-3) == 1, "who is slower than the baseline still is"


def test_a_reading_of_the_pace_is_long_enough() -> None:
    calls: list[int] = []
    machine = Machine(1.0)
    pace = Pace(machine.timer(3e-3, calls), 3e-3, 0.01)
    assert pace() == 1.0 and calls == [4, 4], "the first wakes the cores and counts for nothing"
    Pace(machine.timer(0.2, calls), 0.2, 0.01)()
    assert calls[2:] == [1, 1]


@pytest.mark.parametrize(("seconds", "repeats"), [(1.0, 3), (1e-3, 9)])
def test_who_takes_long_has_the_repeats_that_it_must_have(seconds: float, repeats: int) -> None:
    """All others would end behind the limit of its job."""
    paces = itertools.cycle([1.0, 1.5])
    assert len(time_candidate(lambda _: seconds, plan(exact=True))) == repeats
    assert len(time_candidate(lambda _: seconds, plan(best=seconds), lambda: next(paces))) == repeats


def test_the_error_of_the_median_falls_with_the_number() -> None:
    rng = random.Random(1)
    draws = [[1 + 0.1 * rng.gauss(0, 1) for _ in range(25)] for _ in range(300)]
    centre = sum(median(d) for d in draws) / len(draws)
    spread = math.sqrt(sum((median(d) - centre) ** 2 for d in draws) / len(draws))
    assert median(map(standard_error, draws)) == pytest.approx(spread, rel=0.2)
    assert standard_error([1.0]) == math.inf
