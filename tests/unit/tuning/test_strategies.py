"""What every strategy must do, and that the default one is worth its name."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tuning_tasks import TiledMatmul, matmul

from cost_model.model import RooflineModel
from mlc.errors import UsageError
from mlc.measure.measurer import MeasureResult
from mlc.tuning.candidate import Candidate, Point, TaskSpace
from mlc.tuning.strategy import create, strategy_named, strategy_names
from mlc.tuning.strategy.base import Strategy

TASK = matmul(64, 64, 32)
VALID = 5 * 5 * 4  # rows of 3 divide nothing


def seconds(point: Point) -> float:
    """Fastest at (8, 32, 4), far from the seeds."""
    wanted = (8, 32, 4)
    return 1e-3 * (1 + sum((np.log2(a) - np.log2(b)) ** 2 for a, b in zip(point[:3], wanted, strict=True)))


def scorer(candidates: Sequence[Candidate]) -> np.ndarray:
    modules = [c.module for c in candidates]
    assert all(m is not None for m in modules)
    return RooflineModel().score(TASK.func, TASK.target.tvm, modules)  # type: ignore[arg-type]


def make(name: str, seed: int = 0) -> Strategy:
    return create(name, TaskSpace(TASK, TiledMatmul()), random.Random(seed), scorer)


def result(candidate: Candidate) -> MeasureResult:
    if candidate.point[0] == 16:
        return MeasureResult(failure="crash", detail="injected")
    return MeasureResult((seconds(candidate.point),) * 3, code_hash=str(candidate.point))


def explore(strategy: Strategy, rounds: int, n: int = 8) -> list[Candidate]:
    asked: list[Candidate] = []
    for _ in range(rounds):
        batch = strategy.ask(n)
        assert len(batch) <= n
        strategy.tell(batch, [result(c) for c in batch])
        asked += batch
    return asked


@pytest.mark.parametrize("name", strategy_names())
class TestContract:
    def test_the_default_comes_first(self, name: str) -> None:
        first = make(name).ask(1)
        assert [c.point for c in first] == [(1, 16, 1)]

    def test_nothing_is_proposed_twice_and_everything_is_valid(self, name: str) -> None:
        asked = explore(make(name), 6)
        assert len(asked) == 48 == len({c.point for c in asked}) == len({c.code for c in asked})
        assert all(c.point[0] != 3 and c.trace for c in asked)

    def test_equal_seeds_and_results_give_equal_candidates_in_equal_order(self, name: str) -> None:
        first, second = (explore(make(name, seed=3), 5) for _ in range(2))
        assert [c.point for c in first] == [c.point for c in second]
        assert [c.trace for c in first] == [c.trace for c in second]

    def test_what_an_earlier_run_measured_is_not_proposed(self, name: str) -> None:
        space = TaskSpace(TASK, TiledMatmul())
        known = [c for c in (space.realise(p) for p in [(1, 16, 1), (2, 16, 1), (4, 8, 2), (8, 4, 1)]) if c]
        strategy = make(name)
        strategy.tell(known, [result(c) for c in known])
        assert not {c.point for c in known} & {c.point for c in explore(strategy, 4)}

    def test_an_exhausted_space_gives_nothing_more(self, name: str) -> None:
        strategy = make(name)
        asked = explore(strategy, 30)
        assert strategy.ask(8) == [] and strategy.ask(0) == []
        assert len(asked) == VALID if name != "random" else len(asked) > 0.9 * VALID

    def test_a_run_in_which_everything_fails_goes_on(self, name: str) -> None:
        strategy = make(name)
        points = set()
        for _ in range(4):
            batch = strategy.ask(6)
            assert batch
            strategy.tell(batch, [MeasureResult(failure="timeout")] * len(batch))
            points |= {c.point for c in batch}
        assert len(points) == 24


def test_seeds_differ() -> None:
    a, b = (tuple(c.point for c in explore(make("random", seed), 2)) for seed in (0, 1))
    assert a != b


def test_grid_goes_through_the_knobs_in_order() -> None:
    asked = [c.point for c in explore(make("grid"), 2)]
    assert asked[0] == (1, 16, 1)
    assert asked[1:] == sorted(asked[1:])


def test_evolution_needs_fewer_trials_than_random_sampling() -> None:
    def trials_to_best(name: str, seed: int) -> int:
        asked = [c.point for c in explore(make(name, seed), 13)]
        return asked.index((8, 32, 4))

    evolved = [trials_to_best("evolutionary", seed) for seed in range(5)]
    drawn = [trials_to_best("random", seed) if (8, 32, 4) in {c.point for c in explore(make("random", seed), 13)}
             else VALID for seed in range(5)]
    assert np.median(evolved) < 0.8 * np.median(drawn)


@pytest.mark.parametrize("name", ["evolutionary", "coordinate"])
def test_a_search_that_learns_needs_fewer_trials_than_the_grid(name: str) -> None:
    asked = [c.point for c in explore(make(name), 13)]
    assert asked.index((8, 32, 4)) < 0.6 * [c.point for c in explore(make("grid"), 13)].index((8, 32, 4))


def test_coordinate_descent_changes_one_knob_of_the_best_so_far() -> None:
    strategy = make("coordinate")
    best = None
    for _ in range(4):
        batch = strategy.ask(4)
        if best is not None:
            assert all(sum(a != b for a, b in zip(c.point, best, strict=True)) == 1 for c in batch)
        strategy.tell(batch, [result(c) for c in batch])
        best = strategy.measured[0].point  # type: ignore[attr-defined]


@pytest.mark.parametrize(("budget", "name"), [(None, "evolutionary"), (119, "evolutionary"), (120, "exhaustive")])
def test_a_space_that_the_budget_covers_is_searched_exhaustively(budget: int | None, name: str) -> None:
    chosen = create("evolutionary", TaskSpace(TASK, TiledMatmul()), random.Random(0), scorer, budget)
    assert type(chosen) is strategy_named(name)


def test_the_same_machine_code_breeds_once() -> None:
    strategy = make("evolutionary")
    batch = strategy.ask(8)
    strategy.tell(batch, [MeasureResult((1e-3,), code_hash="same")] * len(batch))
    assert len(strategy.measured) == 1  # type: ignore[attr-defined]


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(UsageError, match="one of coordinate, evolutionary, exhaustive, grid, random, got 'magic'"):
        make("magic")
