"""Convolutions of integers by transforms: exact, and chosen on any x86 that has no dot products of bytes."""

from __future__ import annotations

import platform
import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from harness import Case as ContractCase
from harness import SpaceContract, pytest_generate_tests
from tvm import te

from mlc.artifact.cpu_features import missing_features, required_features
from mlc.graph.algorithms.winograd_integer import (
    conv2d_winograd_integer,
    integer_tile,
    largest_sum,
    seconds,
    transform_integers,
)
from mlc.graph.estimate import Convolution, Estimate
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target, resolve
from schedules.cpu.winograd import WINOGRAD_INTEGER
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import Decisions, InvalidDecision, first_seed, schedule_with

__all__ = ["pytest_generate_tests"]

X86 = platform.machine() in ("x86_64", "AMD64")
TARGETS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
SHAPE = Convolution(1, 64, 64, (28, 28), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1, 16, 16, element=1)


def convolved(data: np.ndarray, weight: np.ndarray, pads: tuple[int, int, int, int]) -> np.ndarray:
    """In int64: ``[N, C, H, W]`` by ``[O, C, 3, 3]``."""
    top, left, bottom, right = pads
    padded = np.pad(data.astype("int64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weight.astype("int64"), optimize=True)


def in_blocks(images: np.ndarray) -> np.ndarray:
    n, c, h, w = images.shape
    cut = np.pad(images, ((0, 0), (0, -c % 16), (0, 0), (0, 0))).reshape(n, -1, 16, h, w)
    return np.ascontiguousarray(cut.transpose(0, 1, 3, 4, 2))


class Case:
    """Images and filters, with extremes unless ``fill`` gives the only value of each."""

    def __init__(
        self, m: int, image: tuple[int, ...], filters: int, pads: tuple[int, int, int, int],
        fill: tuple[int, int] | None = None,
    ) -> None:
        rng, shape = np.random.default_rng(filters), (filters, image[1], 3, 3)
        data, weight = rng.integers(0, 256, image), rng.integers(-128, 128, shape)
        data = np.where(rng.random(image) < 0.3, rng.choice([0, 255], image), data)
        weight = np.where(rng.random(shape) < 0.3, rng.choice([-128, 127], shape), weight)
        if fill is not None:
            data[...], weight[...] = fill
        data, weight = data.astype("uint8"), weight.astype("int8")
        assert largest_sum(weight) < 2 ** {2: 29, 4: 25}[m]
        self.expected = in_blocks(convolved(data, weight, pads))
        self.arrays = in_blocks(data), transform_integers(weight, m)
        x, w = (te.placeholder(a.shape, str(a.dtype), name=name) for a, name in zip(self.arrays, "xw", strict=True))
        self.func = te.create_prim_func([x, w, conv2d_winograd_integer(x, w, m, pads)])


CASES = {
    "2x2": (2, (1, 32, 9, 11), 32, (1, 1, 1, 1)),
    "4x4": (4, (1, 32, 9, 11), 48, (1, 1, 1, 1)),
    "batch": (4, (2, 40, 13, 6), 20, (0, 1, 1, 0)),
    "largest": (4, (1, 112, 6, 6), 16, (0, 0, 0, 0), (255, 127)),
    "least": (4, (1, 112, 6, 6), 16, (0, 0, 0, 0), (255, -128)),
    "least of 2x2": (2, (1, 512, 4, 4), 16, (0, 0, 0, 0), (255, -128)),
}


def _contract_case(name: str, built: Case) -> ContractCase:
    return ContractCase(name, lambda: built.func, lambda *_: built.expected, data=lambda: built.arrays)


@pytest.mark.skipif(not X86, reason="integers are transformed for pmaddwd, which is x86's")
class TestWinograd(SpaceContract):
    space = WINOGRAD_INTEGER
    cases = tuple(_contract_case(name, Case(*CASES[name])) for name in ("2x2", "batch"))


def built_for(name: str) -> Target:
    target = resolve(name, threads=2)
    if missing := missing_features(platform.machine(), required_features(target.tvm)):
        pytest.skip(f"this machine lacks {missing}")
    return target


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact(case: str, name: str) -> None:
    """Of the first seed, and of random points."""
    target, built, rng = built_for(name).tvm, Case(*CASES[case]), np.random.default_rng(2)
    assert find(built.func, target) is WINOGRAD_INTEGER
    schedules = [first_seed(WINOGRAD_INTEGER, built.func, target)[0]]
    knobs = WINOGRAD_INTEGER.knobs(built.func, target)
    for _ in range(200):
        point: Decisions = {knob.name: int(rng.choice(knob.values)) for knob in knobs}
        if len(schedules) > 1 or point["t"] * point["oc"] * point["k"] > 64:
            continue
        try:
            schedules.append(schedule_with(WINOGRAD_INTEGER, built.func, target, point))
        except InvalidDecision:
            continue
    for sch in schedules:
        out = tvm.runtime.tensor(np.full(built.expected.shape, 77, "int32"))
        module = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE)
        module["main"](*map(tvm.runtime.tensor, built.arrays), out)
        np.testing.assert_array_equal(out.numpy(), built.expected)


@pytest.mark.parametrize("m", [2, 4])
def test_operands_fit_16_bits(m: int) -> None:
    """Of the filters that the transform makes largest."""
    signs = np.array([[1, 1, 1], [1, -1, 1]])
    weight = np.einsum("ai,bj->abij", signs, signs).reshape(4, 1, 3, 3) * 127
    weight[weight < 0] -= 1
    packed = transform_integers(weight.astype("int8"), m)
    matrix = {2: [[-1, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 1]],
              4: [[1, 0, 0], [-1, -1, -1], [-1, 1, -1], [1, 2, 4], [1, -2, 4], [0, 0, 1]]}[m]
    exact = np.einsum("ia,jb,ocab->ijoc", matrix, matrix, weight)
    found = packed.reshape(m + 2, m + 2, 8, 16, 2)[:, :, 0, :4, 0]
    np.testing.assert_array_equal(np.abs(found), np.abs(exact[..., 0]))
    assert 0.98 * {2: 1152, 4: 6272}[m] < np.abs(exact).max() <= {2: 1152, 4: 6272}[m]


@pytest.mark.parametrize("name", [*TARGETS, "x86-64-v4 -mattr=+avx512vnni", "aarch64:cortex-a72"])
def test_where_transforms_are_taken(name: str) -> None:
    """Where products of 16-bit numbers are what there is; not where those of bytes are, nor where there are neither."""
    estimate, weight = Estimate(resolve(name).tvm, 0.0), np.full((64, 64, 3, 3), 5, "int8")
    expected = 4 if name in TARGETS else 0
    assert integer_tile(SHAPE, DEFAULT_OPTIONS, estimate, weight) == expected
    assert not integer_tile(SHAPE, CompileOptions.of(winograd=False), estimate, weight)
    for other in ({"strides": (2, 2)}, {"kernel": (1, 1)}, {"dilation": (2, 2)}, {"groups": 2}):
        assert not integer_tile(replace(SHAPE, **other), DEFAULT_OPTIONS, estimate, weight)
    direct = seconds(SHAPE, CompileOptions.of(winograd=False), estimate)
    assert (seconds(SHAPE, DEFAULT_OPTIONS, estimate) < direct) == bool(expected)


def test_sums_that_transforms_cannot_hold_are_added_up_directly() -> None:
    estimate, wide = Estimate(resolve("x86-64-v3").tvm, 0.0), replace(SHAPE, channels=256, filters=256)
    weight = np.full((256, 256, 3, 3), 57, "int8")
    assert largest_sum(weight) < 2**25 and integer_tile(wide, DEFAULT_OPTIONS, estimate, weight) == 4
    weight[3] = 58
    assert largest_sum(weight) >= 2**25 and integer_tile(wide, DEFAULT_OPTIONS, estimate, weight) == 2
    weight[:, :128], weight[:, 128:] = -127, 127  # what has another sign is not added up
    assert largest_sum(weight) == 255 * 128 * 9 * 127


def test_instructions() -> None:
    """Nothing is widened among the products, and nothing spilt."""
    target, built = resolve("x86-64-v3", threads=2).tvm, Case(4, (1, 64, 28, 28), 64, (1, 1, 1, 1))
    sch = first_seed(WINOGRAD_INTEGER, built.func, target)[0]
    assembly = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    loops = re.split(r"\n(?=\.L\w+:)", assembly)
    hot = re.split(r"\tj\w+\t\.L", max(loops, key=lambda loop: loop.count("vpmaddwd")))[0]
    count = hot.count("vpmaddwd")
    assert count >= 16 and len(re.findall(r"vpaddd\s", hot)) == count
    assert not re.search(r"vpmov|vpunpck|vpsrlw|\(%rsp", hot)
