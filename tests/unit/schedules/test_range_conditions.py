"""Conditions that hold for every size of a range: never one that some size breaks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import tirx

from schedules.analysis import evaluate
from schedules.range_conditions import Ranges

rows, heads, at = (tirx.Var(name, "int32") for name in "nmi")
SIZES = [(rows, 1, 70), (heads, 2, 5)]


def _ranges(extent: object) -> Ranges:
    return Ranges(SIZES, [(at, extent)])


@pytest.mark.parametrize(("condition", "expected"), [
    (at + 0 < tirx.floordiv(rows - 1, 32) * 2 + 2, True), (at + 0 < tirx.floordiv(rows - 1, 32) * 2 + 1, False),
    (at * 16 < rows + 15, True), (at * 16 < rows, True), (at * 16 + 15 < rows, False), (at <= rows, True),
    (tirx.floormod(at, tirx.floordiv(rows + 15, 16)) < tirx.floordiv(rows + 15, 16), True),
    (tirx.floordiv(at, rows) < 1, True), (rows - heads < 69, True), (rows - heads < 68, False),
    (tirx.Mul(rows - 2, heads) < 1000, False),
], ids=str)
def test_what_holds(condition: tirx.Expr, expected: bool) -> None:
    assert _ranges(tirx.floordiv(rows + 15, 16)).hold(condition) is expected


def test_nothing_is_said_of_what_is_not_known() -> None:
    other = tirx.Var("other", "int32")
    assert not _ranges(4).hold(other < 5) and not _ranges(other).hold(at < 5)
    assert not Ranges([(rows, 1, 600), (heads, 1, 600)], []).hold(rows * heads < 400000), "too many combinations to try"


def test_only_the_sizes_in_a_condition_are_combined() -> None:
    many = Ranges([(rows, 1, 4000), (heads, 1, 4000)], [(at, tirx.floordiv(rows + 15, 16))])
    assert many.hold(rows < 4001) and many.hold(at * 16 < rows + 15) and not many.hold(at * 16 + 15 < rows)
    assert many.hold(heads - 4000 < rows) is False, "16 million combinations"


@pytest.mark.parametrize("seed", range(40))
def test_randoheadsconditions_are_never_wrong(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def number() -> tirx.Expr:
        return tirx.const(int(rng.integers(1, 9)), "int32")

    def expression(depth: int) -> tirx.Expr:
        if not depth:
            return [rows, heads, at, number()][rng.integers(4)]
        one, other = expression(depth - 1), expression(depth - 1)
        return [lambda: one + other, lambda: one - other, lambda: one * number(), lambda: tirx.floordiv(one, number()),
                lambda: tirx.floormod(one, heads), lambda: tirx.Min(one, other), lambda: tirx.Max(one, other)][
                    rng.integers(7)]()

    ranges, held = _ranges(tirx.floordiv(rows + 15, 16)), 0
    for _ in range(25):
        condition = expression(2) < expression(1) + number()
        if ranges.hold(condition):
            held += 1
            for n, m in itertools.product((1, 2, 15, 16, 17, 33, 69, 70), range(2, 6)):
                for i in range((n + 15) // 16):
                    values = {rows: n, heads: m, at: i}
                    assert evaluate(condition.a, values) < evaluate(condition.b, values), (condition, values)
    assert seed or held, "some conditions hold"


def test_a_maximuheadsof_which_one_side_is_never_taken() -> None:
    ranges = _ranges(tirx.floordiv(rows + 15, 16))
    assert ranges.chosen(tirx.Max(tirx.const(0, "int32"), at)).same_as(at)
    assert ranges.chosen(tirx.Min(at, rows)).same_as(at)
    both = tirx.Min(at * 16 + 15, rows)
    assert ranges.chosen(both).same_as(both)
