"""The transforms are an identity over the rationals, and the operator built of them stays within its error bound."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import tvm
from tvm import te

from mlc.graph.kernels.winograd import (
    FILTER,
    TILES,
    applicable,
    conv2d_winograd,
    error_bound,
    transform_weight,
    transforms,
)
from mlc.target import resolve
from schedules.cpu.winograd import WINOGRAD
from schedules.lowering import PIPELINE
from schedules.space import best_seed

RNG = np.random.default_rng(11)
TARGET = resolve("native").tvm


def convolved(data: np.ndarray, weight: np.ndarray, pads: tuple[int, int, int, int]) -> np.ndarray:
    top, left, bottom, right = pads
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (FILTER, FILTER), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weight.astype("float64"), optimize=True)


def blocked(array: np.ndarray) -> np.ndarray:
    n, c, h, w = array.shape
    return np.ascontiguousarray(array.reshape(n, c // 16, 16, h, w).transpose(0, 1, 3, 4, 2))


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


CASES = {
    # images, input channels, filters, height, width, pads (top, left, bottom, right)
    "whole tiles": (1, 32, 48, 8, 12, (1, 1, 1, 1)),
    "tiles past the image": (2, 16, 16, 9, 7, (1, 1, 1, 1)),
    "no padding": (1, 16, 32, 11, 6, (0, 0, 0, 0)),
    "uneven padding": (1, 16, 16, 5, 6, (2, 1, 0, 3)),
    "deep": (1, 512, 16, 7, 7, (1, 1, 1, 1)),
}


@pytest.mark.parametrize("m", TILES)
@pytest.mark.parametrize("name", CASES)
def test_error_stays_well_within_its_bound(name: str, m: int) -> None:
    n, c, o, h, w, pads = CASES[name]
    data, weight = (RNG.standard_normal(shape).astype("float32") for shape in ((n, c, h, w), (o, c, 3, 3)))
    inputs = te.placeholder((n, c // 16, h, w, 16), name="data")
    packed = te.placeholder(((m + 2) ** 2 * o // 16, c, 16), name="weight")
    func = te.create_prim_func([inputs, packed, conv2d_winograd(inputs, packed, m, pads)])
    module = tvm.compile(best_seed(WINOGRAD, func, TARGET).mod, target=TARGET, tir_pipeline=PIPELINE)
    expected = blocked(convolved(data, weight, pads))
    result = tvm.runtime.tensor(np.full(expected.shape, np.nan, "float32"))
    module["main"](tvm.runtime.tensor(blocked(data)), tvm.runtime.tensor(transform_weight(weight, m)), result)
    error = np.abs(result.numpy() - expected).max() / np.abs(expected).max()
    assert error < error_bound(m, c) / 4


def test_where_it_applies() -> None:
    assert applicable(64, 64, (3, 3), (1, 1), (1, 1), 1)
    assert not applicable(64, 64, (3, 3), (2, 2), (1, 1), 1)
    assert not applicable(64, 64, (5, 5), (1, 1), (1, 1), 1)
    assert not applicable(64, 64, (3, 3), (1, 1), (2, 2), 1)
    assert not applicable(64, 64, (3, 3), (1, 1), (1, 1), 2)
    assert not applicable(3, 64, (3, 3), (1, 1), (1, 1), 1)
