"""The comparison of outputs: what agrees, what differs by how much, what is wrong outright."""

from __future__ import annotations

import numpy as np
import pytest

from mlc.bench.run import output_error


def test_relative_error_is_of_the_largest_magnitude():
    reference = [np.float32([100.0, 1e-6])]
    (absolute, relative), why = output_error([np.float32([100.5, 1e-6])], reference)
    assert not why and absolute == pytest.approx(0.5) and relative == pytest.approx(0.005)


def test_the_worst_output_counts():
    reference = [np.ones(3), np.full(3, 1000.0)]
    (absolute, relative), _ = output_error([np.ones(3) * 1.1, np.full(3, 1001.0)], reference)
    assert absolute == pytest.approx(1.0) and relative == pytest.approx(0.1)


def test_an_all_zero_reference_admits_no_error():
    assert output_error([np.zeros(3)], [np.zeros(3)])[0] == (0.0, 0.0)
    assert output_error([np.full(3, 1e-9)], [np.zeros(3)])[0][1] == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_wrong(bad):
    assert "NaN or infinity" in output_error([np.array([1.0, bad])], [np.array([1.0, 2.0])])[1]
    assert "NaN or infinity" in output_error([np.array([1.0, 2.0])], [np.array([1.0, bad])])[1]


def test_equal_infinities_and_nans_agree():
    values = np.array([np.inf, -np.inf, np.nan, 2.0])
    assert output_error([values], [values.copy()]) == ((0.0, 0.0), "")


def test_shapes_and_numbers_of_outputs_must_agree():
    assert "shape" in output_error([np.ones((1, 3))], [np.ones(3)])[1]
    assert "2 outputs" in output_error([np.ones(3)] * 2, [np.ones(3)])[1]


def test_integers_and_booleans_compare():
    assert output_error([np.array([1, 2])], [np.array([1, 4])])[0] == (2.0, 0.5)
    assert output_error([np.array([True, False])], [np.array([True, True])])[0] == (1.0, 1.0)
