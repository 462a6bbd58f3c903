"""The quick ways of evaluation equal the specification, over float64 and exactly over the prime field."""

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from mlc.operators import OPERATORS
from mlc.operators.arithmetic import FIELD, PRIME, REAL
from mlc.operators.evaluate import evaluate, reference

sys.path.insert(0, str(Path(__file__).parent))
from cases import MAKERS


def test_every_operator_has_random_instances() -> None:
    assert set(MAKERS) == set(OPERATORS)


@pytest.mark.parametrize("op", sorted(OPERATORS))
@pytest.mark.parametrize("arithmetic", [REAL, FIELD], ids=["real", "field"])
def test_evaluation_equals_the_specification(op: str, arithmetic: object) -> None:
    rng = np.random.default_rng(zlib.crc32(op.encode()))
    for _ in range(25):
        case = MAKERS[op](rng)
        inputs = case.inputs(arithmetic, rng)  # type: ignore[arg-type]
        quick = evaluate(op, inputs, case.attributes, arithmetic)  # type: ignore[arg-type]
        slow = reference(op, inputs, case.attributes, arithmetic)  # type: ignore[arg-type]
        for found, expected in zip(quick, slow, strict=True):
            assert found.shape == expected.shape, case
            assert found.dtype == expected.dtype == arithmetic.dtype, case  # type: ignore[attr-defined]
            if arithmetic is FIELD:
                np.testing.assert_array_equal(found, expected, str(case))
            else:
                np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11, err_msg=str(case))


def as_integers(array: np.ndarray) -> list[int]:
    return [int(value) for value in array.ravel()]


def test_the_field_is_arithmetic_modulo_the_prime() -> None:
    rng = np.random.default_rng(1)
    edges = np.array([0, 1, 2, PRIME - 1, PRIME - 2, PRIME // 2, PRIME // 2 + 1, 2**32, 2**32 - 1], dtype=np.uint64)
    a = np.concatenate([np.repeat(edges, len(edges)), FIELD.random(rng, (500,))])
    b = np.concatenate([np.tile(edges, len(edges)), FIELD.random(rng, (500,))])
    for found, rule in [
        (FIELD.add(a, b), lambda x, y: x + y),
        (FIELD.sub(a, b), lambda x, y: x - y),
        (FIELD.mul(a, b), lambda x, y: x * y),
        (FIELD.neg(a), lambda x, y: -x),
        (FIELD.reciprocal(a), lambda x, y: pow(x, PRIME - 2, PRIME)),
    ]:
        assert as_integers(found) == [rule(int(x), int(y)) % PRIME for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("inner", [1, 7, 40, 2500])
def test_products_in_the_field_are_exact(inner: int) -> None:
    rng = np.random.default_rng(inner)
    a, b = FIELD.random(rng, (3, inner)), FIELD.random(rng, (inner, 2))
    a[0], b[:, 0] = PRIME - 1, PRIME - 1
    expected = a.astype(object) @ b.astype(object) % PRIME
    assert as_integers(FIELD.matmul(a, b)) == as_integers(expected)
    assert int(FIELD.total(a, (0, 1))) == int(a.astype(object).sum()) % PRIME


def test_larger_goes_by_signed_representatives() -> None:
    rng = np.random.default_rng(2)
    a, b = FIELD.random(rng, (200,)), FIELD.random(rng, (200,))

    def signed(value: int) -> int:
        return value if value <= PRIME // 2 else value - PRIME

    expected = [max(signed(int(x)), signed(int(y))) % PRIME for x, y in zip(a, b, strict=True)]
    assert as_integers(FIELD.maximum(a, b)) == expected
    assert as_integers(FIELD.call("relu", a)) == [max(0, signed(int(x))) for x in a]


@pytest.mark.parametrize("arithmetic", [REAL, FIELD], ids=["real", "field"])
@pytest.mark.parametrize("way", [evaluate, reference])
def test_the_largest_of_no_elements_is_the_lowest_number(way: object, arithmetic: object) -> None:
    empty = np.zeros((2, 0), arithmetic.dtype)  # type: ignore[attr-defined]
    found, = way("max", [empty], {"axes": (1,), "keepdims": False}, arithmetic)  # type: ignore[operator]
    np.testing.assert_array_equal(found, np.full(2, arithmetic.lowest))  # type: ignore[attr-defined]
