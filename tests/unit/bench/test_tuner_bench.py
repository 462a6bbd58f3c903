"""What `make bench-tuner` makes of two runs: who was how fast after how many trials."""

from __future__ import annotations

import math

import pytest

from tests.performance.bench_tuner import Found, Race, markdown, summary

MLC = Found(40, 8.0, "flat", ((1, 0.5, 2e-3), (9, 2.0, 1.5e-3), (30, 6.0, 1.1e-3), (40, 8.0, 1.0e-3)))
PEER = Found(64, 100.0, "trials", ((1, 50.0, 9e-3), (33, 50.0, 4e-3), (64, 100.0, 1.2e-3)))


def race(kernel: str = "gemm", mlc: Found = MLC, seed: int = 0) -> Race:
    return Race(kernel, seed, mlc, PEER)


@pytest.mark.parametrize(("trials", "seconds"), [(1, 2e-3), (8, 2e-3), (9, 1.5e-3), (39, 1.1e-3), (40, 1e-3),
                                                 (64, 1e-3)])
def test_the_best_after_so_many_trials_is_the_last_step_by_then(trials: int, seconds: float) -> None:
    assert MLC.after(trials) == seconds


def test_nothing_was_found_before_the_first_success() -> None:
    late = Found(8, 3.0, "trials", ((5, 2.0, 1e-3), (8, 3.0, 1e-3)))
    assert late.after(4) == math.inf and late.after(5) == 1e-3
    assert Found(3, 1.0, "failing", ()).final == math.inf


def test_what_it_takes_to_catch_up_is_counted_at_the_first_step_that_is_as_fast() -> None:
    one = race()
    assert one.gain == pytest.approx(1.2) and one.trials_needed == 30 and one.time_needed == pytest.approx(0.06)
    slow = race(mlc=Found(4, 1.0, "trials", ((1, 0.1, 2e-3), (4, 1.0, 1.3e-3))))
    assert slow.gain < 1 and slow.trials_needed == math.inf == slow.time_needed


def test_means_are_geometric_over_kernels_of_medians_over_seeds() -> None:
    twice = Found(1, 1.0, "trials", ((1, 1.0, 0.3e-3),))
    races = [race(), race(seed=1), race(mlc=twice, seed=2), race("conv", twice)]
    total = summary(races)
    assert total["gain"] == pytest.approx(math.sqrt(1.2 * 4.0))
    assert total["most_trials_needed"] == 30 and total["most_time_needed"] == pytest.approx(0.06)
    text = markdown(races, 64, "native")
    assert "| 16 trials | 64 trials |" in text and "256 trials" not in text
    assert "**2.19**" in text and "after 30 trials, 6.0% of its time" in text
    assert "| never |" not in text
