"""Each law of a function that is not polynomial holds numerically, in both number systems."""

from fractions import Fraction

import numpy as np
import pytest
from cases import MAKERS

from mlc.operators import OPERATORS
from mlc.operators.arithmetic import FIELD, PRIME, REAL, STRICT, Arithmetic
from mlc.operators.evaluate import evaluate
from mlc.operators.laws import BELOW, LAWS, VALUES
from mlc.substitution.check.maxima import (
    AT_MOST_ONE,
    CONTRACTING,
    EXCEEDING,
    GENTLE,
    GROWING,
    IDEMPOTENT,
    NONNEGATIVE,
    ODD,
    POSITIVE,
    VANISHING,
    ZERO,
)
from mlc.substitution.check.maxima import BELOW as BELOW_GRANTED
from mlc.substitution.check.maxima import VALUES as VALUES_GRANTED

POSITIVE_DOMAIN = ("log", "sqrt")


def points(arithmetic: Arithmetic, function: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    if arithmetic is FIELD:
        small = arithmetic.integers(np.arange(-5000, 5000, 7))
        return np.concatenate([small, arithmetic.random(rng, (2000,))])
    values = np.concatenate([rng.standard_normal(2000), 100 * rng.standard_normal(100), np.arange(-5.0, 6.0)])
    return np.abs(values) + 1e-9 if function in POSITIVE_DOMAIN else values


def order(arithmetic: Arithmetic, values: np.ndarray) -> np.ndarray:
    if arithmetic is FIELD:
        return np.where(values > PRIME // 2, values.astype(np.int64) - PRIME, values.astype(np.int64))
    return values


#: those that the field knows as pseudorandom maps; relu goes by its order
OPAQUE = sorted(set(LAWS) - {"relu"})


def test_every_function_has_its_laws() -> None:
    assert set(LAWS) == {name for name, each in OPERATORS.items() if each.real is not None}


@pytest.mark.parametrize("function", [name for name, laws in LAWS.items() if laws.domain])
def test_function_is_defined_on_its_domain_alone(function: str) -> None:
    x = np.arange(-3.0, 4.0)
    with np.errstate(all="ignore"):
        real, strict = REAL.call(function, x), STRICT.call(function, x)
    inside = x > 0 if LAWS[function].domain == "> 0" else x >= 0
    np.testing.assert_array_equal(np.isfinite(real), inside)
    np.testing.assert_array_equal(np.isnan(strict), ~inside)


@pytest.mark.parametrize("name", sorted(set(MAKERS)))
def test_operator_says_whether_it_is_partial(name: str) -> None:
    """Small integers, zeros among them, leave an element undefined just where an operator is partial."""
    rng, undefined = np.random.default_rng(5), False
    for _ in range(12):
        case = MAKERS[name](rng)
        inputs = [rng.integers(-2, 3, shape).astype(float) for shape in case.shapes]
        for place, extent in case.indices.items():  # others are refused, not computed with
            inputs[place] = rng.integers(0, extent, case.shapes[place]).astype(float)
        with np.errstate(all="ignore"):
            undefined |= bool(np.isnan(evaluate(name, inputs, case.attributes, STRICT)).any())
    assert undefined == OPERATORS[name].partial


@pytest.mark.parametrize("arithmetic", [REAL, FIELD], ids=["real", "field"])
@pytest.mark.parametrize("function", sorted(LAWS))
def test_laws_hold(function: str, arithmetic: Arithmetic) -> None:
    laws, x = LAWS[function], points(arithmetic, function)
    y = np.roll(x, 1)
    values = arithmetic.call(function, x)
    zero = arithmetic.integers(np.zeros(1, dtype=np.int64))
    if laws.monotone:
        expected = arithmetic.maximum(values, arithmetic.call(function, y))
        np.testing.assert_array_equal(arithmetic.call(function, arithmetic.maximum(x, y)), expected)
        assert np.all(np.diff(order(arithmetic, values)[np.argsort(order(arithmetic, x))]) >= 0)
    if laws.idempotent:
        np.testing.assert_array_equal(arithmetic.call(function, values), values)
    if laws.odd:
        np.testing.assert_array_equal(arithmetic.call(function, arithmetic.neg(x)), arithmetic.neg(values))
    if laws.nonnegative:
        np.testing.assert_array_equal(arithmetic.call("relu", values), values)
    if laws.positive and arithmetic is REAL:
        assert np.all(values > 0)
    if laws.contracts and arithmetic is REAL:
        assert np.all(values <= np.maximum(x, 0))
    if laws.exceeds and arithmetic is REAL:
        assert np.all(values >= x)
    if laws.zero:
        np.testing.assert_array_equal(arithmetic.call(function, zero), zero)


def continued(function: str, x: np.ndarray) -> np.ndarray:
    """The function, and 0 where it is not defined, as proofs take it."""
    domain = LAWS[function].domain
    inside = x > 0 if domain == "> 0" else x >= 0 if domain else np.ones(x.shape, dtype=bool)
    values = np.zeros_like(x)
    values[inside] = REAL.call(function, x[inside])
    return values


#: dense about 0 and 1, where two functions come nearest, and far out; exp(50) is about 5e21
DENSE = np.unique(np.concatenate([np.linspace(-4, 4, 40_001), np.linspace(-50, 50, 2_001),
                                  *(sign * np.geomspace(1e-12, 50, 4_001) for sign in (-1, 1))]))


@pytest.mark.parametrize("lower, upper", sorted(BELOW))
def test_one_function_is_never_above_the_other(lower: str, upper: str) -> None:
    assert np.all(continued(lower, DENSE) <= continued(upper, DENSE))


@pytest.mark.parametrize("function, argument", sorted(VALUES))
def test_values_of_functions(function: str, argument: Fraction) -> None:
    [value] = REAL.call(function, np.array([float(argument)]))
    assert value == VALUES[function, argument]


@pytest.mark.parametrize("function", sorted(set(LAWS) - {"relu"}))
def test_laws_about_a_functions_argument_hold_at_every_number(function: str) -> None:
    """Also where the function is taken as 0; and what is no law is seen not to be one."""
    values = continued(function, DENSE)
    assert np.all(values <= np.maximum(DENSE, 0)) == LAWS[function].contracts
    assert np.all(values >= DENSE) == LAWS[function].exceeds
    assert np.all(values <= 1) == LAWS[function].at_most_one
    assert np.all(np.diff(values) <= np.diff(DENSE) + 1e-15) == LAWS[function].gentle
    assert np.all(np.diff(values) >= 0) == LAWS[function].grows_continued
    assert np.array_equal(continued(function, -DENSE), -values) == LAWS[function].odd


@pytest.mark.parametrize("function", OPAQUE)
def test_a_function_of_the_field_is_not_additive(function: str) -> None:
    """What holds in no law must not hold by accident: sums, products and the function itself are told apart."""
    rng = np.random.default_rng(4)
    x, y = FIELD.random(rng, (1000,)), FIELD.random(rng, (1000,))
    values, others = FIELD.call(function, x), FIELD.call(function, y)
    assert np.mean(FIELD.call(function, FIELD.add(x, y)) == FIELD.add(values, others)) < 0.01
    assert np.mean(FIELD.call(function, FIELD.mul(x, y)) == FIELD.mul(values, others)) < 0.01
    assert np.mean(FIELD.call(function, values) == values) < 0.01
    for another in set(OPAQUE) - {function}:
        assert np.mean(FIELD.call(another, x) == values) < 0.01


def test_checker_grants_what_the_laws_say() -> None:
    """The checker of certificates has facts of its own, so that a slip in the table cannot make it believe a proof."""
    granted = {"grows_continued": GROWING, "at_most_one": AT_MOST_ONE, "idempotent": IDEMPOTENT,
               "nonnegative": NONNEGATIVE, "positive": POSITIVE, "zero": ZERO, "odd": ODD,
               "contracts": CONTRACTING, "exceeds": EXCEEDING, "gentle": GENTLE}
    for law, functions in granted.items():
        # what relu is, a maximum, is known of it besides
        assert {name for name, laws in LAWS.items() if getattr(laws, law)} - {"relu"} == functions
    assert set(BELOW) == BELOW_GRANTED
    assert VALUES == VALUES_GRANTED
    for name in VANISHING - {"1/"}:
        assert REAL.call(name, np.zeros(1)) == 0
