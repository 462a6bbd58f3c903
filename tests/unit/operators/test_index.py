"""Polynomials over sizes: arithmetic, division and remainder agree with integers."""

import random

import pytest

from mlc.operators.index import Poly, as_poly

NAMES = ("a", "b", "c")


def random_poly(rng: random.Random, depth: int = 2) -> Poly:
    if depth == 0:
        return Poly.symbol(rng.choice(NAMES)) if rng.random() < 0.6 else as_poly(rng.randint(-5, 5))
    left, right = random_poly(rng, depth - 1), random_poly(rng, depth - 1)
    return rng.choice([left + right, left - right, left * right])


@pytest.mark.parametrize("seed", range(300))
def test_division_and_remainder_agree_with_integers(seed: int) -> None:
    rng = random.Random(seed)
    numerator, divisor = (
        random_poly(rng, 3),
        rng.choice([as_poly(rng.randint(1, 6)), Poly.symbol("a"), 2 * Poly.symbol("b")]),
    )
    for _ in range(10):
        values = {name: rng.randint(1, 9) for name in NAMES}
        n, d = numerator.evaluate(values), divisor.evaluate(values)
        assert (numerator // divisor).evaluate(values) == n // d
        assert (numerator % divisor).evaluate(values) == n % d


def test_multiples_of_the_divisor_leave_the_quotient() -> None:
    g, o, h = map(Poly.symbol, "goh")
    assert (g * o) // g == o
    assert (g * o) % g == 0
    assert (4 * h + 7) // 2 == 2 * h + 3
    assert (4 * h + 7) % 2 == 1
    assert (3 * h + 1) // 2 == h + (h + 1) // 2
