"""What chance graphs have that share a budget."""

from __future__ import annotations

import pytest

from mlc.tuning.competition import chances


def test_the_fastest_graph_has_all_chances_and_one_that_nothing_is_hoped_for_none() -> None:
    assert chances([{0: 1}, {1: 1}], ["", ""], [2.0, 1.0], [0.0, 0.0]) == [0.0, 1.0]


def test_a_chance_is_the_part_of_the_hope_that_catching_up_leaves() -> None:
    assert chances([{0: 1}, {1: 2}], ["", ""], [3.0, 1.0], [2.0, 0.0]) == pytest.approx([0.5, 1.0])


def test_what_graphs_share_makes_no_difference() -> None:
    shared = {2: 5}
    assert chances([{0: 1, **shared}, {1: 1, **shared}], [""] * 3, [2.0, 1.0, 9.0], [0.5, 0.0, 8.0]) == [0.0, 1.0]
    # called more often by the one that is behind, it does
    assert chances([{0: 6}, {0: 5, 1: 1}], [""] * 2, [1.0, 0.5], [0.8, 0.0]) == pytest.approx([1 - 0.5 / 0.8, 1.0])


def test_a_graph_takes_the_fastest_alternative_and_hopes_for_one_of_them() -> None:
    odds = chances([{0: 1, 1: 1}, {2: 1}], ["a", "a", ""], [3.0, 9.0, 2.0], [2.0, 2.0, 0.0])
    assert odds == pytest.approx([0.5, 1.0])


def test_calls_cost_something() -> None:
    assert chances([{0: 3}, {1: 1}], ["", ""], [1.0, 3.0], [0.0, 0.0]) == [1.0, 1.0]
    assert chances([{0: 3}, {1: 1}], ["", ""], [1.0, 3.0], [0.0, 0.0], call=0.1) == [0.0, 1.0]
