"""Products of activations rounded to 8 bits with weights of 4 and 8 bits."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import tvm
from few_bits_cases import columns, product_func, unpacked_bytes
from harness import CORES, TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests

from mlc.graph.kernels.rounded import dense_rounded, half_range, has_rounded, pack_bytes
from mlc.graph.kernels.weight_only import PANEL, pack_columns
from mlc.target import resolve
from schedules.cpu.gemm_rounded import GEMM_ROUNDED
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.math import expand_math
from schedules.space import schedule_with

__all__ = ["pytest_generate_tests"]

_func = partial(product_func, dense_rounded, "uint8", (4,))

needs_products = pytest.mark.skipif(not has_rounded(resolve("native"), 4),
                                    reason="this CPU has no products of bytes in whole vectors")


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """Each block of each row as whole multiples of a 127th of its largest magnitude."""
    x = x.astype(np.float32)
    filled = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    blocks = filled.reshape(*x.shape[:-1], -1, block)
    largest = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), np.float32(1e-36))
    steps = np.rint(blocks * (np.float32(127) / largest)).astype(np.float64)
    return (steps * largest / 127).reshape(filled.shape)[..., : x.shape[-1]]


def _case(
    name: str, bits: int, block: int, rows: tuple[int, ...], k: int, n: int, zero: bool = False, bias: bool = False
) -> Case:
    def product(x: np.ndarray, packed: np.ndarray, scale: np.ndarray, *others: np.ndarray) -> np.ndarray:
        zeros = np.repeat(columns(others[0]) - half_range(bits), block, 0)[:k] if zero else 0.0
        weight = (unpacked_bytes(packed, bits)[:k] - zeros) * np.repeat(columns(scale), block, 0)[:k]
        found = rounded(x, block) @ weight
        return np.maximum(found + others[-1], 0) if bias else found

    references = {
        3: lambda x, w, s: product(x, w, s), 4: lambda x, w, s, a: product(x, w, s, a),
        5: lambda x, w, s, a, b: product(x, w, s, a, b),
    }
    return Case(name, lambda: expand_math(_func(bits, block, rows, k, n, zero, bias)), references[3 + zero + bias],
                1e-5, high={1: 256})


@needs_products
class TestRounded(SpaceContract):
    space = GEMM_ROUNDED
    cases = (
        _case("a row of 4 bits", 4, 32, (1,), 256, 96),
        _case("a few rows, zero points, epilogue", 4, 16, (1, 5), 96, 64, zero=True, bias=True),
        _case("many rows", 4, 128, (40,), 256, 160),
        _case("a sum that ends within a word and a block", 4, 32, (3,), 203, 32, zero=True),
    ) + ((
        _case("a row of 8 bits", 8, 64, (1,), 128, 64, zero=True),
        _case("many rows of 8 bits, ragged", 8, 32, (33,), 90, 64, bias=True),
    ) if has_rounded(resolve("native"), 8) else ())


@pytest.mark.parametrize(("bits", "block"), [(4, 203), (4, 32), (8, 203), (8, 36)])
def test_packing_and_unpacking_are_inverse(bits: int, block: int) -> None:
    half = half_range(bits)
    integers = np.random.default_rng(bits).integers(-half, half, (203, 70))
    integers[0], integers[1] = -half, half - 1
    packed = pack_bytes(integers, bits, block)
    assert packed.dtype == np.uint8 and packed.shape[0] == 3 and packed.shape[2:] == (PANEL, 4)
    np.testing.assert_array_equal(unpacked_bytes(packed, bits)[:203, :70], integers)


def test_several_blocks_are_of_whole_words() -> None:
    with pytest.raises(ValueError, match="whole words of 8 rows, got 20"):
        pack_bytes(np.zeros((40, 32), "int8"), 4, 20)


def _results(x: np.ndarray, integers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    func = expand_math(_func(4, 32, x.shape[:1], *integers.shape, False, False))
    sch = schedule_with(GEMM_ROUNDED, func, TARGET, next(iter(GEMM_ROUNDED.seeds(func, TARGET))))
    zeros = np.zeros((len(x), integers.shape[1]), "float32")
    return build_and_run(sch.mod, [x, pack_bytes(integers, 4, 32), pack_columns(scale), zeros])[-1]


@needs_products
def test_rounding_is_what_the_description_says() -> None:
    """Against float64 of numbers that are not rounded."""
    rng = np.random.default_rng(1)
    x, integers = rng.standard_normal((8, 512), dtype="float32"), rng.integers(-8, 8, (512, 64))
    scale = rng.uniform(0.5, 1.5, (16, 64)).astype("float32")
    exact = x.astype("float64") @ (integers * np.repeat(scale, 32, 0))
    error = _results(x, integers, scale) - exact
    assert 2e-3 < np.sqrt((error**2).mean() / (exact**2).mean()) < 8e-3


@needs_products
def test_what_is_no_number_or_nearly_none() -> None:
    """It spoils its row alone; zeros and numbers too small to have an inverse are no trouble."""
    rng = np.random.default_rng(0)
    x, integers = rng.standard_normal((5, 64), dtype="float32"), rng.integers(-8, 8, (64, 32))
    x[1, 5], x[2, 40], x[3, :32], x[4, :32] = np.inf, np.nan, 0.0, 1e-42
    scale = np.ones((2, 32), "float32")
    y = _results(x, integers, scale)
    assert not np.isfinite(y[1:3]).any()
    np.testing.assert_allclose(y[[0, 3, 4]], rounded(x[[0, 3, 4]], 32) @ integers, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4 -mattr=+avx512vnni"])
def test_seeds_of_any_number_of_rows_are_values_of_the_knobs(level: str) -> None:
    target = resolve(level, threads=CORES).tvm
    for rows in (1, 7, 16, 64, 521, 2048):
        func = _func(4, 32, (rows,), 512, 320, False, False)
        assert GEMM_ROUNDED.matches(func, target)
        values = {knob.name: knob.values for knob in GEMM_ROUNDED.knobs(func, target)}
        for seed in GEMM_ROUNDED.seeds(func, target):
            assert all(seed[name] in values[name] for name in values), seed


@pytest.mark.skipif("x86" not in str(tvm.target.codegen.llvm_get_system_triple()), reason="the instructions are x86's")
@pytest.mark.parametrize(("level", "word", "each"), [
    ("x86-64-v3", "vpmaddubsw", 2), ("x86-64-v3", "vpmaddwd", 1), ("x86-64-v4 -mattr=+avx512vnni", "vpdpbusd", 2),
])
def test_nibbles_are_unpacked_once_for_all_rows(level: str, word: str, each: int) -> None:
    """Two masks for a vector of bytes, whatever the rows; a block's words are all unrolled."""
    target = resolve(level, threads=CORES).tvm
    func = expand_math(_func(4, 32, (32,), 1024, 1024, False, False))
    seed = next(iter(GEMM_ROUNDED.seeds(func, target)))
    sch = schedule_with(GEMM_ROUNDED, func, target, seed)
    assembly = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count(word))
    vectors = seed["n"] // cpu_machine(target).lanes()
    assert len(re.findall(rf"\t{word}\t", hot)) == each * 4 * seed["m"] * vectors
    assert len(re.findall(r"\tvp?and\w*\t", hot)) == 2 * 4 * vectors
