"""Convolutions by Winograd's algorithm: seeds and random decisions against float64 references."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from contractions import NATIVE, check, random
from harness import Case, SpaceContract, pytest_generate_tests
from numpy.lib.stride_tricks import sliding_window_view
from tvm import s_tir, te, tirx

from mlc.graph.algorithms.filters import transform_weight
from mlc.graph.algorithms.winograd import conv2d_winograd
from mlc.target import resolve
from schedules.cpu.winograd import WINOGRAD
from schedules.space import InvalidDecision, schedule_with

__all__ = ["pytest_generate_tests"]

RNG = np.random.default_rng(3)

WINOGRADS = {
    # images, ic blocks, oc blocks, height, width, pads, m, dilation
    "4x4 tiles": (1, 2, 4, 12, 16, (1, 1, 1, 1), 4, 1),
    "4x4 tiles past the image": (2, 1, 2, 9, 7, (1, 1, 1, 1), 4, 1),
    "2x2 tiles, uneven padding": (1, 3, 2, 8, 5, (1, 0, 2, 1), 2, 1),
    "2x2 tiles, no padding": (1, 2, 6, 8, 10, (0, 0, 0, 0), 2, 1),
    "dilated": (1, 2, 2, 13, 16, (2, 2, 2, 2), 4, 2),
    "small images of a batch": (6, 16, 16, 7, 7, (1, 1, 1, 1), 4, 1),
    "dilated images of a batch": (2, 1, 2, 9, 11, (3, 3, 3, 2), 2, 3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WINOGRADS)
def test_winograd_with_epilogue(name: str, count: int) -> None:
    torch = pytest.importorskip("torch")
    n, icb, ocb, h, w, pads, m, dilation = WINOGRADS[name]
    data = te.placeholder((n, icb, h, w, 16), name="data")
    weight = te.placeholder(((m + 2) ** 2 * ocb, icb * 16, 16), name="weight")
    conv = conv2d_winograd(data, weight, m, pads, (dilation, dilation))
    bias, residual = te.placeholder((1, ocb, 1, 1, 16), name="bias"), te.placeholder(conv.shape, name="residual")
    zero = tirx.const(0, "float32")
    total = te.compute(
        conv.shape, lambda n, o, y, x, c: conv[n, o, y, x, c] + bias[0, o, 0, 0, c] + residual[n, o, y, x, c]
    )
    out = te.compute(conv.shape, lambda *i: tirx.max(total(*i), zero))
    kernel = RNG.standard_normal((ocb * 16, icb * 16, 3, 3)).astype("float32")
    arrays = [random(RNG, data), transform_weight(kernel, m), random(RNG, bias), random(RNG, residual)]
    plain = torch.tensor(arrays[0]).permute(0, 1, 4, 2, 3).reshape(n, icb * 16, h, w).double()
    plain = torch.nn.functional.pad(plain, (pads[1], pads[3], pads[0], pads[2]))
    y = torch.nn.functional.conv2d(plain, torch.tensor(kernel).double(), dilation=dilation)
    y = y.reshape(n, ocb, 16, *y.shape[2:]).permute(0, 1, 3, 4, 2).numpy()
    expected = np.maximum(y + arrays[2] + arrays[3], 0)
    check(WINOGRAD, te.create_prim_func([data, weight, bias, residual, out]), arrays, expected, RNG, count)


@pytest.mark.parametrize("channels", [64, 128])
def test_points_of_a_winograd_tile_lie_in_different_cache_sets(channels: int) -> None:
    blocks = channels // 16
    data = te.placeholder((1, blocks, 32, 32, 16), name="data")
    weight = te.placeholder((36 * blocks, channels, 16), name="weight")
    func = te.create_prim_func([data, weight, conv2d_winograd(data, weight, 4, (1, 1, 1, 1))])
    target = NATIVE
    for decisions in WINOGRAD.seeds(func, target):
        sch = schedule_with(WINOGRAD, func, target, decisions)
        lowered = tvm.transform.Sequential([
            s_tir.transform.LowerInitBlock(), s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(), s_tir.transform.CompactBufferAllocation(),
        ])(sch.mod)
        (found,) = re.findall(r" points = .*strides=\((.*?)\)", lowered.script())
        stride = int(found.split(",")[1])
        assert stride // 16 % 2 and stride % 16 == 0, "a vector is aligned, and two points are not a power of two apart"


def test_weights_beyond_the_first_cache_are_used_often_and_read_in_few_streams() -> None:
    """160 -> 224 channels at 8x8: two tiles and seven output blocks would multiply least, and wait for weights."""
    data = te.placeholder((1, 10, 8, 8, 16), name="data")
    weight = te.placeholder((16 * 14, 160, 16), name="weight")
    func = te.create_prim_func([data, weight, conv2d_winograd(data, weight, 2, (1, 1, 1, 1))])
    first = next(WINOGRAD.seeds(func, resolve("x86-64-v4", threads=2).tvm))
    assert first["t"] >= 4 and first["oc"] <= 4


def test_small_images_of_a_batch_share_a_block() -> None:
    """Eight images of 7x7 read 38 MB of weights once, not eight times."""
    data = te.placeholder((8, 32, 7, 7, 16), name="data")
    weight = te.placeholder((36 * 32, 512, 16), name="weight")
    func = te.create_prim_func([data, weight, conv2d_winograd(data, weight, 4, (1, 1, 1, 1))])
    target = resolve("x86-64-v4", threads=2).tvm
    assert next(WINOGRAD.seeds(func, target))["images"] == 8
    with pytest.raises(InvalidDecision, match="hold them whole"):
        schedule_with(WINOGRAD, func, target, {**next(WINOGRAD.seeds(func, target)), "rows": 1})


def _winograd_case(name: str) -> Case:
    n, icb, ocb, h, w, (top, left, bottom, right), m, d = WINOGRADS[name]
    kernel = np.random.default_rng(h).standard_normal((ocb * 16, icb * 16, 3, 3)).astype("float32")
    image = np.random.default_rng(w).standard_normal((n, icb, h, w, 16)).astype("float32")

    def build() -> list[te.Tensor]:
        data = te.placeholder(image.shape, name="data")
        weight = te.placeholder(((m + 2) ** 2 * ocb, icb * 16, 16), name="weight")
        return [data, weight, conv2d_winograd(data, weight, m, (top, left, bottom, right), (d, d))]

    def reference(data: np.ndarray, _weight: np.ndarray) -> np.ndarray:
        plain = data.transpose(0, 1, 4, 2, 3).reshape(n, icb * 16, h, w)
        padded = np.pad(plain, ((0, 0), (0, 0), (top, bottom), (left, right)))
        windows = sliding_window_view(padded, (2 * d + 1, 2 * d + 1), (2, 3))[..., ::d, ::d]
        sums = np.tensordot(windows, kernel.astype("float64"), ([1, 4, 5], [1, 2, 3]))
        return sums.reshape(*sums.shape[:3], ocb, 16).transpose(0, 3, 1, 2, 4)

    return Case(name, build, reference, data=lambda: [image, transform_weight(kernel, m)])


class TestWinograd(SpaceContract):
    space = WINOGRAD
    cases = tuple(map(_winograd_case, list(WINOGRADS)[:5]))
