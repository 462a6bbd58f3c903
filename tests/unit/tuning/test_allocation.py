"""Who gets the next trials, and when a task stops."""

from __future__ import annotations

import math

import pytest

from mlc.tuning.allocation import Allocator, TaskState


def states(*rooflines: float, weight: int = 1) -> list[TaskState]:
    return [TaskState(i, f"t{i}", weight, r) for i, r in enumerate(rooflines)]


def test_every_task_has_a_turn_in_the_order_of_its_share_of_the_roofline() -> None:
    tasks = states(1e-3, 4e-3, 2e-3)
    tasks[0].weight = 3
    allocator = Allocator(tasks, 8, trials=300)
    order = []
    for _ in range(3):
        state, n = allocator.next(300) or (None, 0)
        assert state is not None
        order.append((state.index, n))
        allocator.update(state, n, 10 * state.roofline, 1.0)
    assert order == [(1, 8), (0, 8), (2, 8)]


@pytest.mark.parametrize(("trials", "seconds", "first"), [
    (20, None, 4), (None, 30.0, 4), (480, None, 6), (None, 1e6, 8), (None, None, 8), (640, 192.0, 6), (2, None, 2),
])  # fmt: skip
def test_a_small_budget_makes_the_first_batches_small_but_never_the_default_alone(
    trials: int | None, seconds: float | None, first: int
) -> None:
    allocator = Allocator(states(*[1e-3] * 20), 8, trials, seconds)
    turn = allocator.next(trials)
    assert turn is not None and turn[1] == first


def test_a_small_budget_goes_to_the_largest_tasks() -> None:
    tasks = states(1e-3, 5e-3, 2e-3, 4e-3, 3e-3)
    allocator = Allocator(tasks, 8, trials=12)
    left, served = 12, []
    while (turn := allocator.next(left)) is not None:
        allocator.update(turn[0], turn[1], 1e-2, 0.1)
        served.append(turn[0].index)
        left -= turn[1]
    assert served == [1, 3, 4] and left == 0


def test_a_task_that_ships_tuned_waits_for_one_that_does_not() -> None:
    tasks = states(2e-3, 1e-3)
    tasks[0].shipped = 2e-3 / 0.6
    turn = Allocator(tasks, 8).next()
    assert turn is not None and turn[0] is tasks[1]
    tasks[0].shipped = 2e-2  # whatever ships for it is slow
    turn = Allocator(tasks, 8).next()
    assert turn is not None and turn[0] is tasks[0]


def test_a_large_task_may_have_a_second_turn_before_a_tiny_one_has_its_first() -> None:
    tasks = states(1e-6, 1e-3, 0.9e-3)
    allocator = Allocator(tasks, 8, trials=24)
    order = []
    for _ in range(5):
        turn = allocator.next()
        assert turn is not None
        order.append(turn[0].index)
        allocator.update(turn[0], turn[1], 2 * turn[0].roofline * (1.0 if turn[0].batches == 0 else 0.9), 1.0)
    assert order[:2] == [1, 2] and 0 not in order


def start(tasks: list[TaskState], best: float, seconds: float = 1.0) -> Allocator:
    allocator = Allocator(tasks, 8)
    for task in tasks:
        allocator.update(task, 8, best, seconds)
    return allocator


def test_then_the_largest_gain_for_the_whole_model_per_second_is_next() -> None:
    heavy = states(1e-3, 1e-3)
    heavy[1].weight = 10
    assert start(heavy, 4e-3).next() == (heavy[1], 8)

    slow = states(1e-3, 1e-3)  # the same task, but the second one's batches take five times as long
    allocator = start(slow, 4e-3)
    slow[1].spent *= 5
    assert allocator.next() == (slow[0], 8)

    near = states(1e-3, 3.5e-3)  # the second is close to its bound
    assert start(near, 4e-3).next() == (near[0], 8)


def test_a_task_without_success_yields_to_others_and_stops_when_flat() -> None:
    tasks = states(1e-3, 1e-3)
    tasks[0].weight = 2
    allocator = start(tasks, 4e-3)
    assert allocator.next() == (tasks[0], 8)
    reasons = [allocator.update(tasks[0], 8, 4e-3, 1.0) for _ in range(2)]
    assert reasons == ["", ""] and allocator.next() == (tasks[1], 8)
    reasons = [allocator.update(tasks[0], 8, 3.99e-3, 1.0) for _ in range(2)]  # a quarter of a percent is no success
    assert reasons == ["", "flat"]
    assert allocator.next() == (tasks[1], 8)


def test_success_starts_the_patience_anew() -> None:
    (task,) = tasks = states(1e-3)
    allocator = start(tasks, 4e-3)
    for best in (4e-3, 4e-3, 4e-3, 3e-3, 3e-3, 3e-3, 3e-3):
        assert allocator.update(task, 8, best, 1.0) == ""
    assert allocator.update(task, 8, 3e-3, 1.0) == "flat"
    assert allocator.next() is None


def test_near_the_roofline_one_batch_without_success_is_enough() -> None:
    (task,) = tasks = states(1e-3)
    allocator = start(tasks, 1.05e-3)
    assert allocator.update(task, 8, 1.05e-3, 1.0) == "roofline"


def test_reaching_the_documented_peak_is_no_reason_to_stop_while_it_still_gains() -> None:
    (task,) = tasks = states(1e-3)
    allocator = start(tasks, 0.95e-3)  # a machine faster than its documented constants
    assert allocator.update(task, 8, 0.9e-3, 1.0) == ""
    assert task.fraction > 1


def test_a_task_in_which_everything_fails_is_given_up() -> None:
    (task,) = tasks = states(1e-3)
    allocator = start(tasks, math.inf)
    assert [allocator.update(task, 8, math.inf, 1.0) for _ in range(3)] == ["", "", "failing"]


def test_tasks_with_a_time_from_the_log_come_after_equal_ones_without() -> None:
    tasks = states(9e-3, 9e-3)
    tasks[1].best = 1e-2
    turn = Allocator(tasks, 8).next()
    assert turn is not None and turn[0] is tasks[0]


def test_an_alternative_that_cannot_win_gets_one_trial_and_stops() -> None:
    tasks = states(1e-3, 5e-3, 2e-3)
    tasks[0].choice = tasks[1].choice = "one"
    allocator = Allocator(tasks, 8)
    served = []
    for best in (6e-3, 2e-3):
        turn = allocator.next()
        assert turn is not None
        served.append((turn[0].index, turn[1], allocator.update(turn[0], turn[1], best, 1.0)))
    assert served == [(1, 8, ""), (0, 8, "")], "the rival might be several times faster: it is next"
    assert allocator.gain(tasks[1]) == 0.0 < allocator.gain(tasks[0])
    slow = states(9e-3, 1e-3)
    slow[0].choice = slow[1].choice = "one"
    slow[1].best = 2e-3  # known from an earlier run, and less than the other's bound
    allocator = Allocator(slow, 8)
    assert allocator.next() == (slow[1], 8)
    allocator.stop(slow[1], "flat")
    assert allocator.next() == (slow[0], 1)
    assert allocator.update(slow[0], 1, 1e-2, 1.0) == "beaten"


def test_an_alternative_far_behind_its_rival_is_given_up() -> None:
    tasks = states(1e-4, 1e-4)
    tasks[0].choice = tasks[1].choice = "one"
    allocator = start(tasks, 1e-3)
    assert allocator.update(tasks[0], 8, 5e-4, 1.0) == ""
    assert allocator.update(tasks[1], 8, 9e-4, 1.0) == "beaten"
    assert allocator.gain(tasks[0]) > 0


# -- several graphs of a model


def served(allocator: Allocator, seconds: dict[int, float], turns: int = 40) -> list[int]:
    """Who gets batches, where every candidate of a task takes the same time."""
    found = []
    for _ in range(turns):
        turn = allocator.next()
        if turn is None:
            break
        found.append(turn[0].index)
        allocator.update(turn[0], turn[1], seconds[turn[0].index], 1.0)
    return found


def test_tasks_of_a_graph_that_cannot_win_any_more_get_nothing() -> None:
    tasks = states(1e-3, 1e-3, 1e-3)
    graphs = [[{0: 1, 1: 1}, {0: 1, 2: 1}]]  # the second has one task of its own instead of another
    order = served(Allocator(tasks, 8, graphs=graphs), {0: 2e-3, 1: 2e-3, 2: 3e-3})
    assert order.count(2) == 1 and order.count(1) > 1
    assert not tasks[2].stopped and tasks[1].stopped == "flat"


def test_a_graph_that_is_ahead_takes_the_trials_of_the_models_own() -> None:
    tasks = states(1e-3, 1e-3, 1e-3)
    order = served(Allocator(tasks, 8, graphs=[[{0: 1, 1: 1}, {0: 1, 2: 1}]]), {0: 2e-3, 1: 4e-3, 2: 1.5e-3})
    assert order.count(1) == 1 and order.count(2) > 1


def test_a_graph_without_a_chance_is_never_tried() -> None:
    tasks = states(1e-3, 1e-3, 3e-3)
    assert 2 not in served(Allocator(tasks, 8, graphs=[[{0: 1, 1: 1}, {0: 1, 2: 1}]]), {0: 2e-3, 1: 2e-3})


def test_graphs_that_are_about_as_fast_are_both_tuned() -> None:
    tasks = states(1e-3, 1e-3)
    order = served(Allocator(tasks, 8, graphs=[[{0: 1}, {1: 1}]]), {0: 2.0e-3, 1: 2.01e-3}, turns=6)
    assert {0, 1} == set(order[:2]) and min(order.count(0), order.count(1)) > 1


def test_a_task_of_a_lost_graph_is_not_compared() -> None:
    tasks = states(1e-3, 1e-3, 1e-3)
    allocator = Allocator(tasks, 8, graphs=[[{0: 1, 1: 1}, {0: 1, 2: 1}]])
    served(allocator, {0: 2e-3, 1: 2e-3, 2: 3e-3})
    assert [allocator.lost(task) for task in tasks] == [False, False, True]


# -- several models


def test_a_task_of_two_models_gains_in_both() -> None:
    tasks = states(1e-3, 1e-3)
    shared_first = Allocator(tasks, 8, graphs=[[{0: 1, 1: 1}], [{0: 1}]])
    order = served(shared_first, {0: 3e-3, 1: 3e-3})
    assert order.index(0) < order.index(1)
    gain = [shared_first.gain(task) for task in tasks]
    assert gain[0] == pytest.approx(2 * gain[1])


def test_each_model_has_a_leading_graph_of_its_own() -> None:
    """A graph that cannot win in one model says nothing about the tasks that another model calls."""
    tasks = states(1e-3, 1e-3, 1e-3)
    graphs = [[{0: 1}, {2: 1}], [{1: 1}, {2: 1}]]
    allocator = Allocator(tasks, 8, graphs=graphs)
    served(allocator, {0: 2e-3, 1: 4e-3, 2: 3e-3})
    assert [allocator.lost(task) for task in tasks] == [False, True, False]
