"""Inputs that make wrong programs visible, and comparisons that let none pass."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import te, topi

from mlc.measure.compiling_runner import params_of
from mlc.measure.data import Param, mismatch, poison, random_arrays

RNG = np.random.default_rng(0)


def test_inputs_are_the_same_everywhere_and_differ_from_each_other() -> None:
    params = [Param((64, 32), "float32", False), Param((64, 32), "float32", False), Param((64,), "float32", True)]
    first, second = random_arrays(params, "normal"), random_arrays(params, "normal")
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], first[1]) and first[0].std() > 0.9 and (first[0] < 0).any()
    positive = random_arrays(params, "positive")
    assert positive[0].min() >= 0.1 and positive[0].max() <= 1.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "int8", "uint8", "int64", "bool"])
def test_every_type_gets_varied_values_of_its_own(dtype: str) -> None:
    (array,) = random_arrays([Param((1000,), dtype, False)], "normal")
    assert str(array.dtype) == dtype and len(np.unique(array.astype(np.float32))) > (1 if dtype == "bool" else 5)


def test_bytes_have_their_extremes() -> None:
    """The sums of short products are exact only if they are where operands are largest."""
    params = [Param((4000,), dtype, False) for dtype in ("uint8", "int8", "int16")]
    ends = [(int(array.min()), int(array.max())) for array in random_arrays(params, "normal")]
    assert ends == [(0, 255), (-128, 127), (-128, 127)]


def test_every_bit_of_a_word_varies() -> None:
    (words,) = random_arrays([Param((1000,), "uint32", False)], "normal")
    assert all(0.4 < (words >> bit & 1).mean() < 0.6 for bit in range(32))


def test_integers_stay_below_their_limits_and_vary() -> None:
    ids, pairs = random_arrays(
        [Param((1, 500), "int64", False, (3,)), Param((200, 2), "int64", False, (1, 128))], "normal"
    )
    assert set(np.unique(ids)) == {0, 1, 2}
    assert set(np.unique(pairs[:, 0])) == {0} and len(np.unique(pairs[:, 1])) > 50 and pairs[:, 1].max() < 128


def test_limits_are_the_extents_that_a_function_indexes() -> None:
    table, ids = te.placeholder((50, 16), name="table"), te.placeholder((1, 9), "int64", name="ids")
    mask, places = te.placeholder((1, 128), "bool", name="mask"), te.placeholder((4, 7, 2), "int64", name="places")
    count = te.placeholder((4, 7), "int64", name="count")
    taken = te.create_prim_func([table, ids, topi.take(table, ids, axis=0)])
    assert [p.limits for p in params_of(taken)] == [(), (50,), ()]
    gathered = te.compute((4, 7), lambda i, j: mask[places[i, j, 0], places[i, j, 1]], name="gathered")
    func = te.create_prim_func([mask, places, gathered])
    assert [p.limits for p in params_of(func)] == [(), (1, 128), ()]
    turned = te.create_prim_func([mask, places, topi.gather_nd(mask, topi.transpose(places, (2, 0, 1)))])
    assert [p.limits for p in params_of(turned)] == [(), (1,), ()], "through a rearrangement the places are lost"
    added = te.create_prim_func([count, te.compute((4, 7), lambda i, j: count[i, j] + count[i, j], name="twice")])
    assert [p.limits for p in params_of(added)] == [(), ()]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int64", "uint8", "bool"])
def test_poison_never_passes(dtype: str) -> None:
    (reference,) = random_arrays([Param((300,), dtype, False)], "normal")
    assert mismatch(reference.copy(), reference, 1e-3) == ""
    assert mismatch(poison(reference), reference, 1e-3).startswith("300 of 300")


def test_the_tolerance_is_relative_to_the_largest_magnitude() -> None:
    reference = RNG.standard_normal(1000).astype(np.float32)
    largest = np.abs(reference).max()
    within, beyond = reference.copy(), reference.copy()
    within[3] += 0.9e-3 * largest
    beyond[3] += 1.1e-3 * largest
    assert mismatch(within, reference, 1e-3) == ""
    assert "1 of 1000 elements differ from the reference, the first at [3]" in mismatch(beyond, reference, 1e-3)


def test_huge_masks_do_not_hide_errors_in_ordinary_values() -> None:
    reference = RNG.standard_normal((10, 10)).astype(np.float32)
    reference[::2, 5] = np.finfo(np.float32).min
    assert mismatch(reference * np.float32(1 - 1e-6), reference, 1e-3) == ""
    output = reference.copy()
    output[2, 3] += 10
    assert "[2, 3]" in mismatch(output, reference, 1e-3)


def test_not_a_number_and_infinity() -> None:
    reference = np.array([1.0, np.inf, -np.inf, 2.0], np.float32)
    assert mismatch(reference.copy(), reference, 1e-3) == ""
    for value, place in ((np.nan, 0), (-np.inf, 1), (np.nan, 1), (1.0, 2), (np.inf, 3)):
        output = reference.copy()
        output[place] = value
        assert f"[{place}]" in mismatch(output, reference, 1e-3)
    nan = np.array([np.nan], np.float32)
    assert mismatch(nan, nan, 1e-3), "NaN never passes, not even for NaN"
    zeros = np.zeros(5, np.float32)
    assert mismatch(zeros.copy(), zeros, 1e-3) == "" and mismatch(zeros + np.float32(1e-30), zeros, 1e-3)


def test_small_types_get_the_tolerance_of_their_own_precision() -> None:
    reference = RNG.standard_normal(1000).astype(ml_dtypes.bfloat16)
    near = (reference.astype(np.float32) + 0.02).astype(ml_dtypes.bfloat16)
    far = (reference.astype(np.float32) + 1).astype(ml_dtypes.bfloat16)
    assert mismatch(near, reference, 1e-3) == "" and mismatch(far, reference, 1e-3)


def test_integers_must_be_equal_and_scalars_work() -> None:
    reference = RNG.integers(0, 8, (4, 4))
    output = reference.copy()
    output[1, 2] += 1
    assert "[1, 2]" in mismatch(output, reference, 1e-3)
    scalar = np.array(3.0, np.float32)
    assert mismatch(scalar.copy(), scalar, 1e-3) == "" and "[]" in mismatch(scalar * 2, scalar, 1e-3)
