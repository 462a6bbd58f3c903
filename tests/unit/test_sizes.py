"""Sizes that are expressions: arithmetic is that of numbers, and what they are compared with is decided or not."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
from tvm import tirx

from mlc.shapes import Free, Range
from mlc.sizes import Size, UndecidedSizeError, at_most, bounds_of, evaluated, may_come, scope, size_of, usual_size

FREE = {"n": Free("n", Range(1, 8), 4), "m": Free("m", Range(16, 64), 32)}


@pytest.fixture
def sizes():
    with scope(FREE):
        yield tuple(size_of(tirx.Var(name, "int64")) for name in FREE)


EXPRESSIONS = [
    lambda n, m: n * m * 64, lambda n, m: -(-m // 16) * 16, lambda n, m: (n + m) % 5, lambda n, m: 7 - n + 2 * m,
    lambda n, m: m // 3 - 1, lambda n, m: math.prod([n, 3, m]) // 3, lambda n, m: 100 // m + 100 % n,
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_arithmetic_is_that_of_numbers(sizes, expression):
    made = expression(*sizes)
    values = {}
    for n, m in itertools.product(range(1, 9), range(16, 65, 3)):
        values[n, m] = expression(n, m)
        assert evaluated(made.expr, {"n": n, "m": m}) == values[n, m]
    low, high = bounds_of(made.expr)
    assert low <= min(values.values()) and high >= max(values.values())
    assert usual_size(made) == expression(4, 32)


def test_what_has_one_value_is_a_number(sizes):
    n, m = sizes
    assert n - n == 0 and type(n - n) is int
    assert (n * m) // m == n
    assert n * 2 == n + n and hash(n * 2) == hash(n + n)


def test_comparisons_hold_for_every_size_or_are_undecided(sizes):
    n, m = sizes
    assert m >= 16 and m > 3 and n < m and n > 0 and bool(n) and not m < n
    assert (n != 1, n == 1) == (True, False)  # where it is 1 the general case serves too
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(UndecidedSizeError):
            compare(n, 4)
    for action in (int, range, lambda size: [0] * size):
        with pytest.raises(UndecidedSizeError):
            action(n)


def test_estimates_see_the_usual_sizes(sizes):
    n, m = sizes
    assert float(n) == 4.0
    assert n / 2 == 2.0
    assert 1.5 * m == 48.0
    assert n < 4.5


def test_an_expression_with_another_variable_stays_one_of_tvm(sizes):
    i = tirx.Var("i", "int64")
    assert not isinstance(sizes[0] * i, Size) and not isinstance(i * sizes[0], Size)


def test_what_sizes_come_to_together_decides_more():
    """``past`` tokens and ``length`` new ones of at most 64."""
    free = {"past": Free("past", Range(0, 64), 30), "length": Free("length", Range(1, 64), 8)}
    with scope(free):
        past, length = (size_of(tirx.Var(name, "int64")) for name in free)
        with pytest.raises(UndecidedSizeError):
            _ = past + length <= 64
        with at_most(64, "past", "length"):
            assert past + length <= 64 and length + past <= 64 and not past + length > 64
            assert bounds_of((past + length).expr) == (1, 64) and bounds_of((64 - past - length).expr) == (0, 63)
            assert may_come({"past": 60, "length": 4}) and not may_come({"past": 60, "length": 5})
        assert may_come({"past": 60, "length": 5}) and bounds_of((past + length).expr) == (1, 128)
