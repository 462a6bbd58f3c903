"""Products of float32 with weights of 2, 4 and 8 bits: packed, and unpacked in registers or in panels."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import tvm
from few_bits_cases import columns, product_func
from harness import CORES, TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests

from mlc.graph.kernels.weight_only import PANEL, dense_weight_only, pack_columns, pack_words, rows_of_word
from mlc.target import resolve
from schedules.cpu.gemm_weight_only import GEMM_WEIGHT_ONLY
from schedules.lowering import PIPELINE
from schedules.space import schedule_with

__all__ = ["pytest_generate_tests"]

_func = partial(product_func, dense_weight_only, "uint32", ())


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """``[N/32, R, 32]`` words as ``[K, N]`` integers around 0, by arithmetic that shares nothing with the kernel's."""
    each, half = rows_of_word(bits), 1 << (bits - 1)
    flat = words.astype(np.int64).transpose(1, 0, 2).reshape(words.shape[1], -1) % (1 << 32)
    fields = np.stack([flat // (1 << bits * row) % (1 << bits) for row in range(each)], 1)
    signed = fields - half if bits < 8 else (fields + half) % (1 << bits) - half
    return signed.reshape(-1, flat.shape[1])


def _case(
    name: str, bits: int, block: int, rows: tuple[int, ...], k: int, n: int, zero: bool = False, bias: bool = False
) -> Case:
    def product(x: np.ndarray, words: np.ndarray, scale: np.ndarray, *others: np.ndarray) -> np.ndarray:
        zeros = np.repeat(columns(others[0]) - (1 << bits - 1 if bits < 8 else 0), block, 0)[:k] if zero else 0.0
        weight = (_unpacked(words, bits)[:k] - zeros) * np.repeat(columns(scale), block, 0)[:k]
        return np.maximum(x @ weight + others[-1], 0) if bias else x @ weight

    references: dict[int, Callable[..., np.ndarray]] = {
        3: lambda x, w, s: product(x, w, s), 4: lambda x, w, s, a: product(x, w, s, a),
        5: lambda x, w, s, a, b: product(x, w, s, a, b),
    }
    return Case(name, lambda: _func(bits, block, rows, k, n, zero, bias), references[3 + zero + bias], 1e-5,
                high={1: 1 << 32})


class TestWeightOnly(SpaceContract):
    space = GEMM_WEIGHT_ONLY
    cases = (
        _case("a row of 4 bits", 4, 32, (1,), 256, 96),
        _case("a row of 8 bits, zero points, epilogue", 8, 64, (1, 1), 128, 64, zero=True, bias=True),
        _case("a few rows", 4, 16, (5,), 96, 64, zero=True),
        _case("sixteen rows", 4, 128, (16,), 256, 160, bias=True),
        _case("many rows of 4 bits", 4, 32, (40,), 128, 128),
        _case("rows of 8 bits without zero points, ragged", 8, 32, (3,), 90, 64),
        _case("many rows of 8 bits, zero points", 8, 32, (33,), 96, 64, zero=True, bias=True),
        _case("a sum that ends within a word and a block", 4, 32, (2,), 203, 32, zero=True),
        _case("more than the second cache", 4, 32, (24,), 4096, 64),
        _case("a row of 2 bits", 2, 32, (1,), 256, 96, zero=True),
        _case("rows of 2 bits, ragged", 2, 16, (7,), 203, 64, bias=True),
        _case("blocks that are no whole vectors", 8, 36, (3,), 144, 96, zero=True),
    )


@pytest.mark.parametrize(("bits", "block", "padded"), [
    (2, 203, 208), (4, 203, 208), (4, 32, 224), (8, 203, 204), (8, 36, 216)])
def test_packing_and_unpacking_are_inverse(bits: int, block: int, padded: int) -> None:
    """Columns are filled up to whole panels, rows to whole words of one block or to whole blocks."""
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    integers = rng.integers(-half, half, (203, 70))
    integers[0], integers[1] = -half, half - 1
    words = pack_words(integers, bits, block)
    assert words.dtype == np.uint32 and words.shape == (3, padded * bits // 32, PANEL)
    back = _unpacked(words, bits)
    np.testing.assert_array_equal(back[:203, :70], integers)


def test_several_blocks_are_of_whole_words() -> None:
    with pytest.raises(ValueError, match="whole words of 8 rows, got 20"):
        pack_words(np.zeros((40, 32), "int8"), 4, 20)


def test_columns_lie_in_panels() -> None:
    array = np.arange(3 * 40).reshape(3, 40)
    packed = pack_columns(array)
    assert packed.shape == (2, 3, PANEL)
    np.testing.assert_array_equal(columns(packed)[:, :40], array)
    assert not columns(packed)[:, 40:].any()


X86 = "x86" in str(tvm.target.codegen.llvm_get_system_triple())


@pytest.mark.skipif(not X86, reason="the instructions are x86's")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_word_is_loaded_once_and_unpacked_in_registers(bits: int, level: str) -> None:
    """A vector of weights costs a mask or a shift (of bytes two shifts), a conversion and a multiply-add, and no way
    through memory."""
    target = resolve(level, threads=CORES).tvm
    block = 32 if bits > 2 else 64  # of more words than are unrolled
    func = _case("", bits, block, (1,), 1024, 1024).func()
    seed = next(iter(GEMM_WEIGHT_ONLY.seeds(func, target)))
    sch = schedule_with(GEMM_WEIGHT_ONLY, func, target, seed)
    assembly = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count("vcvtdq2ps"))
    loop = re.split(r"\tj\w+\t\.L", hot)[0]
    count = {name: len(re.findall(rf"\tv{name}", loop)) for name in (
        "cvtdq2ps", "fmadd", "p?and", "psrld", "psrad", "pslld", "mul")}
    each = rows_of_word(bits)
    assert count["cvtdq2ps"] == count["fmadd"] >= 2 * each
    rows, masks = count["fmadd"] // each, count["fmadd"] - count["fmadd"] // each
    wanted = {"p?and": masks, "psrld": rows} if bits < 8 else {"psrad": count["fmadd"], "pslld": masks}
    assert {name: found for name in ("p?and", "psrld", "psrad", "pslld") if (found := count[name])} == wanted
    lines = block * PANEL * bits // 8 // 64
    assert len(re.findall(r"\tprefetch", assembly)) == seed["n"] // PANEL * lines, "a block fetches what one reads"
    assert not count["mul"], "scales wait for the end of a block"
    stored = len(re.findall(r"mov\w*\s+%[xyz]mm\d+, .*\(%rsp", loop))
    assert stored <= count["fmadd"] // 4, "a mask now and then may wait on the stack"


def test_seeds_of_any_number_of_rows_are_values_of_the_knobs() -> None:
    for rows in (1, 7, 16, 64, 521, 2048):
        func = _case("", 4, 32, (rows,), 512, 320).func()
        values = {knob.name: knob.values for knob in GEMM_WEIGHT_ONLY.knobs(func, TARGET)}
        for seed in GEMM_WEIGHT_ONLY.seeds(func, TARGET):
            assert all(seed[name] in values[name] for name in values), seed


def test_infinite_rows_are_not_numbers_and_leave_others_alone() -> None:
    func = _case("", 4, 32, (3,), 64, 32).func()
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((3, 64), dtype="float32"), np.ones((1, 2, 32), "float32")
    words = rng.integers(0, 1 << 32, (1, 8, 32)).astype("uint32")
    x[1, 5] = np.inf
    sch = schedule_with(GEMM_WEIGHT_ONLY, func, TARGET, next(iter(GEMM_WEIGHT_ONLY.seeds(func, TARGET))))
    *_, y = build_and_run(sch.mod, [x, words, scale, np.zeros((3, 32), "float32")])
    assert np.isnan(y[1]).any() and not np.isfinite(y[1]).any() and np.isfinite(y[[0, 2]]).all()
