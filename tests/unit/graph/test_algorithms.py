"""What every algorithm must do: its own shapes, the direct result, its own bound on the error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

from mlc.graph.algorithms.registry import algorithms, offered
from mlc.graph.algorithms.winograd import ALGORITHMS
from mlc.graph.estimate import Convolution, Estimate
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.shapes import Free, Range
from mlc.sizes import Size, scope
from mlc.target import resolve
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import best_seed

RNG = np.random.default_rng(11)
TARGET = resolve("native").tvm


def conv(channels: int, filters: int, size: tuple[int, int], pads: tuple[int, ...], **others: Any) -> Convolution:
    """3x3 at stride 1 in blocks of 16, but for what ``others`` say."""
    shape = {"n": 1, "kernel": (3, 3), "strides": (1, 1), "dilation": (1, 1), "groups": 1, "block_in": 16,
             "block_out": 16, **others}
    return Convolution(channels=channels, filters=filters, size=size, pads=pads, **shape)


CASES = {
    "whole tiles": conv(32, 48, (8, 12), (1, 1, 1, 1)),
    "tiles past the image": conv(16, 16, (9, 7), (1, 1, 1, 1), n=2),
    "no padding": conv(16, 32, (11, 6), (0, 0, 0, 0)),
    "uneven padding": conv(16, 16, (5, 6), (2, 1, 0, 3)),
    "deep": conv(512, 16, (7, 7), (1, 1, 1, 1)),
    "dilation": conv(32, 48, (12, 14), (2, 2, 2, 2), dilation=(2, 2), n=2),
    "uneven dilation": conv(16, 32, (13, 11), (3, 1, 3, 1), dilation=(3, 1)),
    "dilation and no padding": conv(16, 16, (15, 18), (0, 0, 0, 0), dilation=(2, 4)),
    "dilation of half the image": conv(16, 16, (9, 9), (6, 6, 6, 6), dilation=(6, 6)),
    "strides and dilation": conv(16, 16, (12, 11), (1, 2, 3, 0), kernel=(2, 3), strides=(2, 1), dilation=(1, 2)),
    "groups": conv(32, 64, (6, 7), (1, 1, 1, 1), groups=2),
    "narrow and half blocks": conv(3, 24, (9, 9), (0, 0, 0, 0), kernel=(1, 5), block_in=3, block_out=8),
    "each channel by itself": conv(32, 32, (7, 9), (1, 1, 1, 1), n=2, strides=(2, 2), groups=32),
}
APPLIED = [(name, case) for case, each in CASES.items() for name in [a.name for a in offered(each, DEFAULT_OPTIONS)]]


def convolved(data: np.ndarray, weight: np.ndarray, case: Convolution) -> np.ndarray:
    """In float64."""
    (top, left, bottom, right), (sh, sw), (dh, dw), (kh, kw) = case.pads, case.strides, case.dilation, case.kernel
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    window = ((kh - 1) * dh + 1, (kw - 1) * dw + 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, window, axis=(2, 3))[:, :, ::sh, ::sw, ::dh, ::dw]
    windows = windows.reshape(case.n, case.groups, -1, *windows.shape[2:])
    grouped = weight.astype("float64").reshape(case.groups, -1, *weight.shape[1:])
    result = np.einsum("ngchwij,gocij->ngohw", windows, grouped, optimize=True)
    return result.reshape(case.n, case.filters, *result.shape[3:])


def blocked(array: np.ndarray, size: int) -> np.ndarray:
    n, c, h, w = array.shape
    return np.ascontiguousarray(array.reshape(n, c // size, size, h, w).transpose(0, 1, 3, 4, 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "case"), APPLIED)
def test_error_stays_well_within_its_bound(name: str, case: str) -> None:
    algorithm, shape = algorithms()[name], CASES[case]
    data = RNG.standard_normal((shape.n, shape.channels, *shape.size)).astype("float32")
    weight = RNG.standard_normal((shape.filters, shape.channels // shape.groups, *shape.kernel)).astype("float32")
    func = algorithm.function(shape).with_attr("global_symbol", "main")
    packed = algorithm.pack(weight, shape)
    assert packed.shape == algorithm.weight_shape(shape) and packed.dtype == np.float32
    module = tvm.compile(best_seed(find(func, TARGET), func, TARGET).mod, target=TARGET, tir_pipeline=PIPELINE)
    expected = blocked(convolved(data, weight, shape), shape.block_out)
    assert expected.shape[2:4] == shape.out
    result = tvm.runtime.tensor(np.full(expected.shape, np.nan, "float32"))
    module["main"](*map(tvm.runtime.tensor, (blocked(data, shape.block_in), np.ascontiguousarray(packed))), result)
    error = np.abs(result.numpy() - expected).max() / np.abs(expected).max()
    assert error < algorithm.error_bound(shape) / 4


def test_each_algorithm_applies_somewhere_and_has_names_of_its_own() -> None:
    every = algorithms().values()
    assert {name for name, _ in APPLIED} == set(algorithms())
    assert {each.op for each in every if each.direct}.isdisjoint(each.op for each in every if not each.direct)


@pytest.mark.parametrize("case", CASES)
def test_one_direct_algorithm_comes_first_and_nothing_forbids_it(case: str) -> None:
    first, *others = offered(CASES[case], DEFAULT_OPTIONS)
    assert first.direct and not any(each.direct for each in others)
    forbidden = CompileOptions(frozenset(name for each in algorithms().values() for name in (each.name, each.family)))
    assert offered(CASES[case], forbidden) == [first]
    assert all(each.seconds(CASES[case], Estimate(TARGET, 0.0)) > 0 for each in (first, *others))


@pytest.mark.parametrize(("change", "applies"), [
    ({}, True), ({"strides": (2, 2)}, False), ({"kernel": (5, 5)}, False), ({"dilation": (2, 2)}, True),
    ({"groups": 2}, False), ({"channels": 3, "block_in": 3}, False), ({"block_out": 8}, False), ({"element": 1}, False),
])
def test_where_winograd_applies(change: dict[str, Any], applies: bool) -> None:
    shape = replace(conv(64, 64, (14, 14), (1, 1, 1, 1)), **change)
    assert any(each.family == "winograd" for each in offered(shape, DEFAULT_OPTIONS)) == applies


def test_winograd_of_a_free_batch_reads_its_weights_for_each_image() -> None:
    """Its kernel multiplies one image at a time there: 36 points of large weights are read for four tiles."""
    fixed, estimate = conv(512, 512, (7, 7), (1, 1, 1, 1), n=4), Estimate(resolve("x86-64-v3", threads=2).tvm, 1e9)
    with scope({"n": Free("n", Range(1, 8), 4)}):
        free = replace(fixed, n=Size(tirx.Var("n", "int64")))
        assert ALGORITHMS[-1].seconds(free, estimate) > 1.5 * ALGORITHMS[-1].seconds(fixed, estimate)
