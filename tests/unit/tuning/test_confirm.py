"""A winner must win when it is timed in turn with its rivals."""

from __future__ import annotations

import random

import pytest

from mlc.measure.measurer import MeasureResult
from mlc.tuning.confirm import Choice, as_alone, choose, faster

ROUNDS = 12


def rounds(*seconds: float, noise: float = 0.02, seed: int = 0) -> list[MeasureResult]:
    """Times of rivals in the same rounds: the machine drifts for all of them, and each has its own noise."""
    rng = random.Random(seed)
    drift = [1.0 + 0.3 * rng.random() for _ in range(ROUNDS)]
    return [
        MeasureResult(tuple(s * d * (1 + noise * rng.uniform(-1, 1)) for d in drift)) for s in seconds
    ]


FAILED = MeasureResult(failure="crash")


def test_a_clear_difference_is_seen_through_common_drift() -> None:
    default, winner = rounds(1.0, 0.9)
    assert faster(winner.times, default.times) and not faster(default.times, winner.times)


def test_equal_programs_are_rarely_taken_for_different_ones() -> None:
    wrong = sum(faster(*(r.times for r in rounds(1.0, 1.0, seed=seed))) for seed in range(400))
    assert wrong <= 0.03 * 400


def test_a_gain_below_one_percent_is_none() -> None:
    default, winner = rounds(1.0, 0.995, noise=0.0001)
    assert not faster(winner.times, default.times)
    assert not faster((), ()) and not faster((1.0,) * 9, (1.0,) * 9)


@pytest.mark.parametrize(("seconds", "default", "earlier", "expected"), [
    ((0.8, 1.0), 1, None, Choice(0, "tuned")),
    ((0.99, 1.0), 1, None, Choice(1, "default")),  # within the noise
    ((1.2, 1.0), 1, None, Choice(1, "default")),  # luck during the search
    ((0.7, 1.0, 0.8), 1, 2, Choice(0, "tuned")),
    ((0.8, 1.0, 0.8), 1, 2, Choice(2, "earlier")),  # no better than what is known: that stays
    ((0.9, 1.0, 0.8), 1, 2, Choice(2, "earlier")),
    ((0.8, 1.0, 1.3), 1, 2, Choice(0, "tuned")),  # the earlier best is a regression by now
    ((1.0, 1.0, 1.3), 1, 2, Choice(1, "default")),
    ((0.8, 0.6, 1.0), 2, None, Choice(1, "tuned")),  # the second finalist is the better one
    ((0.8, 0.9), None, None, Choice(0, "tuned")),
    ((0.8, 0.7), None, 0, Choice(1, "tuned")),
])  # fmt: skip
def test_choice(seconds: tuple[float, ...], default: int | None, earlier: int | None, expected: Choice) -> None:
    assert choose(rounds(*seconds), default, earlier) == expected


def test_rivals_that_fail_are_out() -> None:
    good = rounds(1.0)[0]
    assert choose([FAILED, good], 1, None) == Choice(1, "default")
    assert choose([good, FAILED], 1, None) == Choice(0, "tuned")  # the default itself does not run
    assert choose([FAILED, FAILED], 1, None).index is None
    assert choose([good, FAILED, FAILED], 1, 2) == Choice(0, "tuned")


def test_a_comparison_on_a_slow_machine_gives_the_times_of_a_quiet_one() -> None:
    slow = [MeasureResult((2.0, 2.2, 1.8)), MeasureResult((1.6, 1.6, 1.6)), FAILED]
    found = as_alone(slow, [1.0, 0.8, None])
    assert [r.times for r in found] == [pytest.approx((1.0, 1.1, 0.9)), pytest.approx((0.8,) * 3), ()]
    assert found[2].failure == "crash"


def test_times_of_a_comparison_are_never_scaled_up_and_never_without_a_measure() -> None:
    results = [MeasureResult((1.0, 1.0)), MeasureResult((2.0, 2.0))]
    assert as_alone(results, [1.5, 2.5]) == results
    assert as_alone(results, [None, None]) == results
