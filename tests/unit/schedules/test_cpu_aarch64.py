"""Every CPU space for a machine with NEON: seeds fit its registers and compile to its object code on any machine."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import test_cpu_attention
import test_cpu_attention_few
import test_cpu_bfloat
import test_cpu_digits
import test_cpu_elementwise
import test_cpu_fallback
import test_cpu_integer
import test_cpu_lookup
import test_cpu_recurrent
import test_cpu_reduction
import test_cpu_rounded
import test_cpu_staging
import test_cpu_weight_only
import test_cpu_window
import tvm
from harness import Case
from tvm import te, tirx

from mlc.graph.algorithms.winograd import conv2d_winograd
from mlc.graph.kernels.blocked import dense_packed
from mlc.target import resolve
from mlc.testing import aarch64
from schedules.cpu import SPACES
from schedules.cpu.conv import CONV2D_INTEGER
from schedules.cpu.gemm import GEMM, GEMM_BFLOAT, GEMM_INTEGER
from schedules.cpu.winograd import WINOGRAD
from schedules.intrin.dot import QUADS
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.math import expand_math
from schedules.space import Space, first_seed

NEON = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1", threads=4).tvm
_AARCH64 = 183  # e_machine of ELF


def _gemm() -> list[te.Tensor]:
    a, b = te.placeholder((64, 96), name="a"), te.placeholder((6, 96, 16), name="b")
    return [a, b, dense_packed(a, b)]


def _winograd() -> list[te.Tensor]:
    data, weight = te.placeholder((1, 2, 12, 16, 16), name="data"), te.placeholder((36 * 2, 32, 16), name="weight")
    return [data, weight, conv2d_winograd(data, weight, 4, (1, 1, 1, 1))]


_CONTRACTS = (
    test_cpu_attention.TestAttention, test_cpu_elementwise.TestElementwise, test_cpu_fallback.TestFallback,
    test_cpu_reduction.TestReduction, test_cpu_staging.TestStagedInput, test_cpu_window.TestPooling,
    test_cpu_window.TestDepthwise, test_cpu_window.TestContraction, test_cpu_weight_only.TestWeightOnly,
    test_cpu_recurrent.TestRecurrent, test_cpu_attention_few.TestAttentionFew, test_cpu_rounded.TestRounded,
    test_cpu_digits.TestDigits, test_cpu_lookup.TestLookup,
)
_CASES: list[tuple[Space, Case]] = [
    (GEMM, Case("gemm", _gemm, lambda: None)), (WINOGRAD, Case("winograd", _winograd, lambda: None)),
    *((contract.space, case) for contract in _CONTRACTS for case in contract.cases[:2]),
    (GEMM_INTEGER, Case("dense", lambda: test_cpu_integer.DENSE["ragged"](QUADS).func, lambda: None)),
    (CONV2D_INTEGER, Case("conv", lambda: test_cpu_integer.CONVOLUTIONS["padded"](QUADS).func, lambda: None)),
]


def _assembly(func: tirx.PrimFunc, path: Path) -> str:
    """The assembly of ``func``, which is also written to ``path`` as object code."""
    module = tvm.compile(tvm.IRModule({"main": expand_math(func)}), NEON, tir_pipeline=PIPELINE).mod
    module.write_to_file(str(path), "o")
    return str(module.inspect_source("asm"))


def test_every_space_has_a_case() -> None:
    # this CPU has no bfloat16, and its dot products of bytes leave nothing to transforms in 16 bits
    others = {"cpu.conv2d_bfloat", "cpu.gemm_bfloat", "cpu.conv2d_winograd_integer",
              "cpu.conv2d_bytes", "cpu.gemm_bytes", "cpu.remainder",  # nor products that saturate
              "cpu.gemm_matrix",  # nor products of pairs of rows
              "cpu.depthwise_integer",  # nor permutations of bytes across a register of 512 bits
              "cpu.gemm_tiles"}  # nor a matrix unit
    assert {space.name for space, _ in _CASES} == {space.name for space in SPACES} - others


@pytest.mark.parametrize(("cpu", "word"), [("neoverse-n1", "sdot"), ("neoverse-n2", "usdot"), ("neoverse-n2", "bfdot")])
def test_products_are_dot_products(cpu: str, word: str) -> None:
    """As many as the register tile has; with signed operands alone, one more for each vector of weights."""
    on = resolve(f"llvm -mtriple=aarch64-linux-gnu -mcpu={cpu}", threads=1).tvm
    case = test_cpu_bfloat.dense(48, 64, 256) if word == "bfdot" else None
    product = test_cpu_integer._Dense(QUADS, m=48, n=64, k=256)
    func = product.func if case is None else case.func()
    space = GEMM_INTEGER if case is None else GEMM_BFLOAT
    sch, tile = first_seed(space, func, on)
    text = tvm.compile(sch.mod, on, tir_pipeline=PIPELINE).mod.inspect_source("asm")
    inner = max(re.split(r"^\.LBB\w+:", text, flags=re.M), key=lambda part: part.count(f"\t{word}\t"))
    vectors = tile["n"] // 4 * tile["k"]
    count = len(re.findall(rf"\t{word}\t", inner))
    assert count and count % (tile["m"] * vectors + (vectors if word == "sdot" else 0)) == 0
    if word != "sdot":  # what the weights add takes the registers that others have for tiles of this size
        assert not re.search(r"\bq\d+, \[sp", inner), "the inner loop spills"
    if not aarch64.missing():
        inputs = product.arrays if case is None else case.arrays()[0]
        expected = product.expected if case is None else case.reference()
        out = np.zeros(expected.shape, str(func.params[-1].dtype))
        found = aarch64.run(sch.mod, on, [*inputs, out])[-1]
        assert np.abs(found - expected).max() <= (0 if case is None else 1e-5 * np.abs(expected).max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("space", "case"), _CASES, ids=[f"{s.name}-{c.name}" for s, c in _CASES])
def test_seeds_build(space: Space, case: Case, tmp_path: Path) -> None:
    sch, _ = first_seed(space, case.func(), NEON)
    text, path = _assembly(sch.mod["main"], tmp_path / "kernel.o"), tmp_path / "kernel.o"
    header = path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and struct.unpack_from("<H", header, 18) == (_AARCH64,)
    assert re.search(r"\bv\d+\.(4s|16b|2d|8b)|\bq\d+", text), "no vector register is used"


def test_register_tiles_are_those_of_neon(tmp_path: Path) -> None:
    machine = cpu_machine(NEON)
    assert (machine.vector_bytes, machine.vector_registers, machine.lanes()) == (16, 32, 4)
    sch, tile = first_seed(GEMM, Case("gemm", _gemm, lambda: None).func(), NEON)
    accumulators = tile["m"] * tile["n"] // machine.lanes()
    assert 12 <= accumulators <= 24, f"a tile of {accumulators} registers leaves the others idle, or spills"
    text = _assembly(sch.mod["main"], tmp_path / "gemm.o")
    inner = max(re.split(r"^\.L\w+:", text, flags=re.M), key=lambda part: len(re.findall(r"\bfmla\b", part)))
    assert len(re.findall(r"\bfmla\b", inner)) >= accumulators, "multiply-adds are not fused"
    assert not re.search(r"\bq\d+, \[sp", inner), "the inner loop spills"
