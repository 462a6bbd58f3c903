"""Products of activations in three digits with weights of 4 and 8 bits: as exact as multiply-adds of float32."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import tvm
from few_bits_cases import columns, product_func, unpacked_bytes
from harness import CORES, TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests

from mlc.graph.kernels.digits import dense_digits, has_digits
from mlc.graph.kernels.rounded import has_rounded, pack_bytes
from mlc.graph.kernels.weight_only import PANEL, dense_weight_only, pack_columns, pack_words
from mlc.target import resolve
from schedules.cpu.gemm_digits import GEMM_DIGITS
from schedules.cpu.gemm_weight_only import GEMM_WEIGHT_ONLY
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.math import expand_math
from schedules.space import schedule_with

__all__ = ["pytest_generate_tests"]

_func = partial(product_func, dense_digits, "uint8", (4,))

_BITS = [bits for bits in (4, 8) if has_rounded(resolve("native"), bits)]
needs_products = pytest.mark.skipif(not _BITS, reason="this CPU has no products of bytes in whole vectors")
each_width = pytest.mark.parametrize("bits", _BITS)


def _case(
    name: str, block: int, rows: tuple[int, ...], k: int, n: int, zero: bool = False, bias: bool = False, bits: int = 4
) -> Case:
    def product(x: np.ndarray, packed: np.ndarray, scale: np.ndarray, *others: np.ndarray) -> np.ndarray:
        zeros = np.repeat(columns(others[0]) - 2 ** (bits - 1), block, 0)[:k] if zero else 0.0
        weight = (unpacked_bytes(packed, bits)[:k] - zeros) * np.repeat(columns(scale), block, 0)[:k]
        return np.maximum(x @ weight + others[-1], 0) if bias else x @ weight

    references = {
        3: lambda x, w, s: product(x, w, s), 4: lambda x, w, s, a: product(x, w, s, a),
        5: lambda x, w, s, a, b: product(x, w, s, a, b),
    }
    func = partial(_func, bits, block, rows, k, n, zero, bias)
    return Case(name, lambda: expand_math(func()), references[3 + zero + bias], 1e-5, high={1: 256})


@needs_products
class TestDigits(SpaceContract):
    space = GEMM_DIGITS
    cases = (
        _case("a row", 32, (1,), 256, 96),
        _case("a few rows, zero points, epilogue", 16, (1, 5), 96, 64, zero=True, bias=True),
        _case("many rows", 128, (19,), 256, 160),
        _case("a sum that ends within a word and a block", 32, (3,), 203, 32, zero=True),
        _case("one block, ended within a word", 203, (2,), 203, 64, bias=True),
        *((
            _case("a row of 8 bits", 32, (1,), 256, 96, bits=8),
            _case("a few rows of 8 bits, zero points, epilogue", 16, (1, 5), 96, 64, zero=True, bias=True, bits=8),
            _case("many rows of 8 bits in the longest blocks", 256, (19,), 512, 160, bits=8),
            _case("8 bits, a sum that ends within a word and a block", 32, (3,), 203, 32, zero=True, bits=8),
        ) if 8 in _BITS else ()),
    )


def _weights(k: int, n: int, block: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random integers, with a scale for each block, and what both stand for."""
    rng, half = np.random.default_rng(k), 1 << (bits - 1)
    integers, scale = rng.integers(-half, half, (k, n)), rng.uniform(0.5, 1.5, (k // block, n)).astype("float32")
    return integers, scale, integers * np.repeat(scale.astype("float64"), block, 0)


def _by_digits(x: np.ndarray, integers: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    func = expand_math(_func(bits, len(integers) // len(scale), x.shape[:1], *integers.shape, False, False))
    sch = schedule_with(GEMM_DIGITS, func, TARGET, next(iter(GEMM_DIGITS.seeds(func, TARGET))))
    packed = pack_bytes(integers, bits, len(integers) // len(scale))
    return build_and_run(sch.mod, [x, packed, pack_columns(scale), np.zeros((len(x), integers.shape[1]), "f4")])[-1]


def _by_multiply_adds(x: np.ndarray, integers: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    block = len(integers) // len(scale)
    func = product_func(dense_weight_only, "uint32", (), bits, block, x.shape[:1], *integers.shape, False, False)
    sch = schedule_with(GEMM_WEIGHT_ONLY, func, TARGET, next(iter(GEMM_WEIGHT_ONLY.seeds(func, TARGET))))
    words = pack_words(integers, bits, block)
    return build_and_run(sch.mod, [x, words, pack_columns(scale), np.zeros((len(x), integers.shape[1]), "f4")])[-1]


def _in_order(x: np.ndarray, integers: np.ndarray, scale: np.ndarray, _bits: int) -> np.ndarray:
    """Sums of float32, a product after the other."""
    weight = integers.astype("float32") * np.repeat(scale, len(integers) // len(scale), 0)
    return np.add.accumulate(x[:, :, None] * weight, axis=1)[:, -1]


@pytest.mark.sampled(2)
@needs_products
@each_width
@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize(("kind", "most"), [("normal", 0.9), ("outliers", 1.0), ("many sizes", 1.1)])
def test_errors_are_those_of_multiply_adds_at_most(kind: str, most: float, block: int, bits: int) -> None:
    """Of numbers of many sizes a few make most of any sum, which both round. Multiply-adds by integers of 8 bits, block
    by block, are better than those by 4 bits; digits are as good by either, and better than sums of float32 in order.
    """
    rng = np.random.default_rng(block)
    x = rng.standard_normal((16, 1024), dtype="float32")
    if kind == "outliers":
        x[:, ::57] *= 1000
    if kind == "many sizes":
        x *= np.exp(3 * rng.standard_normal(x.shape, dtype="float32"))
    integers, scale, weight = _weights(1024, 64, block, bits)
    exact = x.astype("float64") @ weight
    sizes = np.sqrt((exact**2).mean(axis=1, keepdims=True))
    digits, fused = (np.sqrt((((of(x, integers, scale, bits) - exact) / sizes) ** 2).mean())
                     for of in (_by_digits, _by_multiply_adds if bits == 4 else _in_order))
    assert 0 < digits <= most * fused


@needs_products
@each_width
def test_an_error_is_bounded_by_half_a_step_of_each_block(bits: int) -> None:
    """The last rows are hard to hold: others than the largest, of either sign, are at half a step of it, or one of many
    that are all as large."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((6, 256), dtype="float32")
    for row, largest in enumerate((1.0, -1.0, 1.9999999), 2):
        x[row] = (np.arange(256) % 5 + 0.5) * largest / 8355000
        x[row, ::32] = largest
    x[5] = np.where(rng.integers(0, 2, 256), 3.3, -3.3)
    integers, scale, weight = _weights(256, 64, 32, bits)
    largest = np.repeat(np.abs(x).reshape(6, 8, 32).max(axis=-1), 32, axis=-1).astype("float64")
    bound = (6e-8 * largest + 1.2e-7 * np.abs(x)) @ np.abs(weight)
    sums = 2.0**-22 * np.abs(x).astype("float64") @ np.abs(weight)  # of eight blocks, each rounded a few times
    error = np.abs(_by_digits(x, integers, scale, bits) - x.astype("float64") @ weight)
    assert (error <= bound + sums).all()
    assert error.max() > 0


@needs_products
@each_width
@pytest.mark.parametrize("block", [32, 256])
def test_digits_of_any_size_are_taken_together(block: int, bits: int) -> None:
    """Integers up to the largest that three digits are made of, with every carry, against weights at both ends. Of the
    longest block and 8 bits the sums are the largest that 32 bits hold."""
    rng, half = np.random.default_rng(3), 1 << (bits - 1)
    x = rng.integers(-8355000, 8355001, (5, 2 * block)).astype("float32")
    x[0], x[1] = 8355000, -8355000
    x[2], x[3] = 0x7F80, -0x8081  # a digit at its end carries, one before it
    x[2:, ::32] = 8355000
    integers = rng.integers(-half, half, (2 * block, 32))
    integers[:, 0], integers[:, 1] = -half, half - 1
    y = _by_digits(x, integers, np.ones((2, 32), "float32"), bits)
    np.testing.assert_allclose(y, x.astype("float64") @ integers, rtol=3e-7, atol=2 * block * half)


@needs_products
@each_width
def test_what_is_no_number_spoils_its_row_alone(bits: int) -> None:
    """Zeros, the largest numbers and those that are nearly none do not."""
    rng = np.random.default_rng(0)
    x, integers = rng.standard_normal((7, 64), dtype="float32"), rng.integers(-8, 8, (64, 32))
    x[1, 5], x[2, 40], x[3, :32], x[4, :32], x[5, 3], x[6, 60] = np.inf, np.nan, 0.0, 1e-42, 1e37, -np.inf
    y = _by_digits(x, integers, np.ones((2, 32), "float32"), bits)
    assert not np.isfinite(y[[1, 2, 6]]).any()
    fine = x[[0, 3, 4, 5]].astype("float64")
    np.testing.assert_allclose(y[[0, 3, 4, 5]], fine @ integers, rtol=1e-6, atol=1e-5 * np.abs(fine).max())


@pytest.mark.parametrize(("level", "rows", "block", "wanted"), [
    ("x86-64-v4 -mattr=+avx512vnni", 1, 32, (True, True)), ("x86-64-v4 -mattr=+avx512vnni", 64, 16, (False, False)),
    ("x86-64-v4 -mattr=+avx512vnni", 64, 32, (True, True)), ("x86-64-v4 -mattr=+avx512vnni", 1, 4096, (False, False)),
    ("x86-64-v3 -mattr=+avxvnni", 16, 32, (True, True)), ("x86-64-v3", 1, 32, (True, False)),
    ("x86-64-v3", 2, 32, (False, False)), ("x86-64", 1, 32, (False, False)),
])
def test_digits_are_taken_where_they_are_fewer_operations(
    level: str, rows: int, block: int, wanted: tuple[bool, bool],
) -> None:
    target = resolve(level, threads=CORES)
    assert tuple(has_digits(target, bits, rows, block) for bits in (4, 8)) == wanted
    assert not has_digits(target, 2, rows, block)


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4 -mattr=+avx512vnni"])
def test_seeds_of_any_number_of_rows_are_values_of_the_knobs(level: str) -> None:
    target = resolve(level, threads=CORES).tvm
    for rows in (1, 7, 16, 64, 521):
        func = _func(4, 32, (rows,), 512, 320, False, False)
        assert GEMM_DIGITS.matches(func, target)
        values = {knob.name: knob.values for knob in GEMM_DIGITS.knobs(func, target)}
        for seed in GEMM_DIGITS.seeds(func, target):
            assert all(seed[name] in values[name] for name in values), seed


@pytest.mark.skipif("x86" not in str(tvm.target.codegen.llvm_get_system_triple()), reason="the instructions are x86's")
@pytest.mark.parametrize("rows", [1, 4])
def test_bytes_meet_digits_as_they_are(rows: int) -> None:
    """Three dot products for a vector of weights and a row; nothing is unpacked or left on the stack."""
    target = resolve("x86-64-v4 -mattr=+avx512vnni", threads=CORES).tvm
    func = expand_math(_func(8, 32, (rows,), 1024, 1024, False, False))
    seed = next(iter(GEMM_DIGITS.seeds(func, target)))
    sch = schedule_with(GEMM_DIGITS, func, target, seed)
    assembly = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count("vpdpbusd"))
    loop = re.split(r"\tj\w+\t\.L", hot)[0]
    vectors = seed["n"] // cpu_machine(target).lanes()
    assert len(re.findall(r"\tvpdpbusd\t", loop)) % (3 * vectors * rows) == 0
    assert not re.findall(r"\tvp(?:and|srl|sra|movsx|movzx)\w*\t", loop)
    assert not re.findall(r"mov\w*\s+%[xyz]mm\d+, .*\(%rsp", loop)


@pytest.mark.skipif("x86" not in str(tvm.target.codegen.llvm_get_system_triple()), reason="the instructions are x86's")
@pytest.mark.parametrize(("level", "word", "each"), [
    ("x86-64-v3", "vpmaddubsw", 2), ("x86-64-v4 -mattr=+avx512vnni", "vpdpbusd", 2),
])
@pytest.mark.parametrize(("rows", "block"), [(1, 32), (4, 32), (2, 128)])
def test_nibbles_are_unpacked_once_for_all_digits_and_rows(
    rows: int, block: int, level: str, word: str, each: int,
) -> None:
    """A vector of bytes costs two masks and a shift; four words are unrolled, of which registers hold the sums."""
    target = resolve(level, threads=CORES).tvm
    func = expand_math(_func(4, block, (rows,), 1024, 1024, False, False))
    seed = next(iter(GEMM_DIGITS.seeds(func, target)))
    sch = schedule_with(GEMM_DIGITS, func, target, seed)
    assembly = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count(word))
    loop = re.split(r"\tj\w+\t\.L", hot)[0]
    vectors = seed["n"] // cpu_machine(target).lanes()
    words = 4 * vectors
    assert len(re.findall(rf"\t{word}\t", loop)) == 3 * each * words * seed["m"]
    assert len(re.findall(r"\tvp?and\w*\t", loop)) == 2 * words
    assert len(re.findall(r"\tvpsrl\w\t", loop)) == words
    panels, lines = seed["n"] // PANEL, block * PANEL // 2 // 64
    assert len(re.findall(r"\tprefetch", assembly)) == panels * lines, "a block fetches as much as it reads, once"
    if word == "vpdpbusd":  # pairs have products on their way; those that wait on the stack take no time
        assert not re.findall(r"mov\w*\s+%[xyz]mm\d+, .*\(%rsp", loop)
