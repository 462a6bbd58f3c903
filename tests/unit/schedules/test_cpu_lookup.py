"""Products of float32 with codes of 4 bits that are looked up in a table, in registers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from few_bits_cases import columns
from harness import CORES, TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests
from tvm import te, tirx

from mlc.graph.kernels.lookup import dense_lookup, has_lookup, pack_codes
from mlc.graph.kernels.weight_only import PANEL
from mlc.target import resolve
from schedules.cpu.gemm_lookup import GEMM_LOOKUP
from schedules.intrin import select
from schedules.intrin.lookup import lookup
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.space import schedule_with

__all__ = ["pytest_generate_tests"]

needs_lookups = pytest.mark.skipif(select(lookup(min(PANEL, cpu_machine(TARGET).lanes())), TARGET) is None,
                                   reason="this CPU has no lookups in registers")


def _func(block: int, rows: tuple[int, ...], k: int, n: int, bias: bool) -> tirx.PrimFunc:
    panels, blocks = -(-n // PANEL), -(-k // block)
    steps = blocks * -(-min(k, block) // 8)
    inputs = [te.placeholder(shape, dtype, name=name) for name, shape, dtype in (
        ("x", (*rows, k), "float32"), ("words", (panels, steps, PANEL), "uint32"),
        ("scale", (panels, blocks, PANEL), "float32"), ("table", (16,), "float32"))]
    result = dense_lookup(*inputs, block)
    if not bias:
        return te.create_prim_func([*inputs, result])
    added, zero = te.placeholder((panels * PANEL,), "float32", name="bias"), tirx.const(0.0, "float32")
    relu = te.compute(result.shape, lambda *i: te.max(result[i] + added[i[-1]], zero), name="relu")
    return te.create_prim_func([*inputs, added, relu])


def _codes(words: np.ndarray) -> np.ndarray:
    """``[N/32, R, 32]`` words as ``[K, N]`` codes."""
    flat = columns(words).astype(np.int64)
    return np.stack([flat // 16**k % 16 for k in range(8)], 1).reshape(-1, flat.shape[1])


def _case(name: str, block: int, rows: tuple[int, ...], k: int, n: int, bias: bool = False) -> Case:
    def product(x: np.ndarray, words: np.ndarray, scale: np.ndarray, table: np.ndarray) -> np.ndarray:
        return x @ (table[_codes(words)[:k]] * np.repeat(columns(scale), block, 0)[:k])

    def rectified(x: np.ndarray, words: np.ndarray, scale: np.ndarray, table: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.maximum(product(x, words, scale, table) + b, 0)

    return Case(name, lambda: _func(block, rows, k, n, bias), rectified if bias else product, 1e-5, high={1: 1 << 32})


@needs_lookups
class TestLookup(SpaceContract):
    space = GEMM_LOOKUP
    cases = (
        _case("a row", 32, (1,), 256, 96),
        _case("a few rows, epilogue", 16, (1, 5), 96, 64, bias=True),
        _case("many rows", 64, (19,), 256, 160),
        _case("a sum that ends within a word and a block", 32, (3,), 203, 32),
        _case("one block, ended within a word", 203, (2,), 203, 64, bias=True),
    )


def test_packing_keeps_codes() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (203, 70))
    codes[0], codes[1] = 0, 15
    words = pack_codes(codes, 203)
    assert words.dtype == np.uint32 and words.shape == (3, 26, PANEL)
    np.testing.assert_array_equal(_codes(words)[:203, :70], codes)


#: by target: an instruction that looks up, and how many of it and of what puts bytes together a vector of words takes
_TAKEN = {
    "x86-64-v4": (r"vperm(?:d|ps)", 8, 0), "x86-64-v3": ("vpshufb", 9, 16),
    "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1": ("tbl", 9, 16),
}


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("level", _TAKEN)
def test_words_are_looked_up_in_registers_once_for_all_rows(level: str, rows: int) -> None:
    """A word's eight numbers take their instructions and, for each row, a multiply-add, and stay in registers; of
    sixteen of these (AVX2) a row leaves too few for all, since LLVM shuffles ahead."""
    target = resolve(level, threads=CORES).tvm
    func = _func(64, (rows,), 1024, 1024, bias=False)
    seed = next(iter(GEMM_LOOKUP.seeds(func, target)))
    assert seed["m"] == rows
    sch = schedule_with(GEMM_LOOKUP, func, target, seed)
    assembly = tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    loops = [re.split(r"\t(?:j\w+|b\.\w+)\t\.L", block)[0] for block in re.split(r"\n(?=\.L\w+:)", assembly)]
    multiply, (instruction, looked_up, joined) = r"\tv?fm(?:add\w*|la)\t", _TAKEN[level]
    loop = max(loops, key=lambda text: len(re.findall(multiply, text)))
    vectors = len(re.findall(multiply, loop)) // (8 * rows)
    assert vectors >= 1 and len(re.findall(multiply, loop)) == vectors * 8 * rows
    assert len(re.findall(rf"\t{instruction}\t", loop)) == vectors * looked_up
    assert len(re.findall(r"\tvpunpck\w+|\tzip[12]\t", loop)) == vectors * joined
    stored = len(re.findall(r"mov\w*\s+%[xyz]mm\d+, .*\(%rsp|\tst[rp]\tq\d+.*\[sp", loop))
    assert stored <= rows + 2 * (level == "x86-64-v3" and rows == 1), "sums alone may be written"


def test_seeds_of_any_number_of_rows_are_values_of_the_knobs() -> None:
    for rows in (1, 7, 16, 64, 521):
        func = _func(32, (rows,), 512, 320, bias=False)
        values = {knob.name: knob.values for knob in GEMM_LOOKUP.knobs(func, TARGET)}
        for seed in GEMM_LOOKUP.seeds(func, TARGET):
            assert all(seed[name] in values[name] for name in values), seed


@needs_lookups
def test_what_is_no_number_spoils_its_row_alone() -> None:
    rng = np.random.default_rng(0)
    x, table = rng.standard_normal((3, 64), dtype="float32"), rng.standard_normal(16, dtype="float32")
    words, scale = rng.integers(0, 1 << 32, (1, 8, 32)).astype("uint32"), np.ones((1, 2, 32), "float32")
    x[1, 5], table[3] = np.nan, 0.0
    func = _func(32, (3,), 64, 32, bias=False)
    sch = schedule_with(GEMM_LOOKUP, func, TARGET, next(iter(GEMM_LOOKUP.seeds(func, TARGET))))
    *_, y = build_and_run(sch.mod, [x, words, scale, table, np.zeros((3, 32), "float32")])
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_lookups_are_taken_where_bytes_are_what_counts() -> None:
    """Weights that come from memory, and few rows; neither many rows nor what a cache holds by several, unless a lookup
    takes one instruction; and never on a target without any."""
    wide, short, old = (resolve(f"{name} -model=l3=8M", threads=1) for name in ("x86-64-v4", "x86-64-v3", "x86-64"))
    every, many, few = (1, 4, 64), 64 << 20, 1 << 18
    assert [has_lookup(wide, rows, 1 << 22, many) for rows in every] == [True] * 3
    assert [has_lookup(short, rows, 1 << 22, many) for rows in every] == [True, True, False]
    assert [has_lookup(short, rows, few, few) for rows in every] == [True, False, False]
    assert not any(has_lookup(old, rows, 1 << 22, many) for rows in every)
