"""The transforms are an identity over the rationals; ``test_algorithms.py`` runs the operator built of them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mlc.graph.algorithms.filters import FILTER, transform_weight, transforms

RNG = np.random.default_rng(11)
TILES = (2, 4)


@pytest.mark.parametrize("m", TILES)
def test_transforms_are_exact(m: int) -> None:
    matrices = transforms(m)
    d = [Fraction(int(v)) for v in RNG.integers(-9, 10, m + FILTER - 1)]
    g = [Fraction(int(v)) for v in RNG.integers(-9, 10, FILTER)]

    def times(matrix: tuple[tuple[Fraction, ...], ...], vector: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]

    points = [a * b for a, b in zip(times(matrices.input, d), times(matrices.filter, g), strict=True)]
    expected = [sum((d[i + k] * g[k] for k in range(FILTER)), Fraction(0)) for i in range(m)]
    assert times(matrices.output, points) == expected


@pytest.mark.parametrize("m", TILES)
def test_transformed_weights(m: int) -> None:
    weight = RNG.standard_normal((20, 18, 3, 3)).astype("float32")  # neither channel count fills its blocks
    packed = transform_weight(weight, m)
    size = m + 2
    assert packed.shape == (size * size * 2, 32, 16)
    matrix = np.array(transforms(m).filter, "float64")
    points = packed.reshape(size, size, 2, 32, 16)
    expected = matrix @ weight[17, 5].astype("float64") @ matrix.T
    np.testing.assert_allclose(points[:, :, 1, 5, 1], expected, rtol=1e-6, atol=1e-7)
    assert not points[:, :, :, 18:].any() and not points[:, :, 1, :, 4:].any()
