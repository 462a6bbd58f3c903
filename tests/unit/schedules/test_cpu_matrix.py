"""Products of two rows by two columns an instruction, on an emulated machine: exact, and on the instructions asked for.
"""

from __future__ import annotations

import re
import zlib
from functools import partial

import numpy as np
import pytest
import tvm
from harness import ELSEWHERE, Case, SpaceContract, pytest_generate_tests
from test_cpu_bfloat import dense
from test_cpu_integer import _as_uint8, _extreme, _requantised
from tvm import s_tir, te, tirx

from mlc.graph.kernels import bfloat
from mlc.graph.kernels.integer import dense_integer, pack_dense, packed_operand
from mlc.target import resolve
from mlc.testing import aarch64
from schedules.cpu.gemm import GEMM_BFLOAT, GEMM_INTEGER
from schedules.cpu.gemm_matrix import GEMM_MATRIX, pays
from schedules.intrin.matrix import BFLOAT_PAIRS, BYTE_PAIRS, DEPTHS
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.math import expand_math
from schedules.registry import find
from schedules.space import first_seed

__all__ = ["pytest_generate_tests"]

V1 = resolve("aarch64:neoverse-v1", threads=1).tvm


def integers(m: int, n: int, k: int, batch: tuple[int, ...] = (), to_uint8: bool = False) -> Case:
    """uint8 ``[*batch, m, k]`` by int8 ``[k, n]``, with the largest sums there can be."""
    name = f"bytes_{'x'.join(map(str, (*batch, m, k, n)))}{'-uint8' * to_uint8}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    data, weight = _extreme(rng, (*batch, m, k), "uint8"), _extreme(rng, (k, n), "int8")
    data[..., 0, :], weight[:, 0] = 255, -128
    packed = pack_dense(weight, BYTE_PAIRS)
    columns = packed.shape[0] * 16
    whole = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, -k % 8)])
    sums = np.zeros((*batch, m, columns), "int64")
    sums[..., :n] = data.astype("int64") @ weight.astype("int64")
    scale = rng.uniform(1e-4, 1e-3, columns).astype("float32")

    def build() -> list[te.Tensor]:
        x, w = te.placeholder(whole.shape, "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
        product = dense_integer(x, w)
        if not to_uint8:
            return [x, w, product]
        return [x, w, s := te.placeholder((columns,), name="scale"), _requantised(product, s)]

    if to_uint8:
        return Case(name, build, lambda *_: _as_uint8(sums, scale), data=lambda: [whole, packed, scale])
    return Case(name, build, lambda *_: sums, data=lambda: [whole, packed])


#: the same of bfloat16, with a bias and a ReLU on demand
bfloats = partial(dense, step=DEPTHS[BFLOAT_PAIRS][1], prefix="bfloats_")


def quantised(m: int, n: int, k: int) -> Case:
    """Rows that the function itself makes bytes of."""
    rng = np.random.default_rng(m * n * k)
    rows, weight = rng.uniform(-4, 4, (m, k)).astype("float32"), _extreme(rng, (k, n), "int8")
    packed = pack_dense(weight, BYTE_PAIRS)
    expected = np.clip(np.rint(rows * np.float32(32)) + 30, 0, 255).astype("int64") @ weight.astype("int64")

    def build() -> list[te.Tensor]:
        x, w = te.placeholder(rows.shape, name="x"), te.placeholder(packed.shape, "int8", name="w")

        def byte(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
            nearest = tirx.min(tirx.round(x[i, j] * 32.0) + 30.0, tirx.const(255.0, "float32")).astype("int32")
            return tirx.max(nearest, tirx.const(0, "int32")).astype("uint8")

        return [x, w, dense_integer(te.compute(x.shape, byte, name="quantised"), w)]

    return Case(f"quantised_{m}x{k}x{n}", build, lambda *_: expected, data=lambda: [rows, packed])


CASES = (
    integers(72, 64, 64), integers(50, 70, 38, to_uint8=True), integers(22, 33, 100, (3,)), integers(2, 96, 256),
    quantised(18, 48, 64), bfloats(40, 64, 96), bfloats(26, 50, 33, epilogue=True), bfloats(6, 32, 20, (2, 3)),
)


def emulated(sch: s_tir.Schedule, target: tvm.target.Target, case: Case) -> float:
    """The error of a schedule's results."""
    inputs, outputs = case.arrays()
    kernel = tvm.IRModule({"main": expand_math(sch.mod["main"])})
    return case.error(inputs, aarch64.run(kernel, target, [*inputs, *outputs])[len(inputs) :])


class TestMatrix(SpaceContract):
    space = GEMM_MATRIX
    cases = CASES

    @property
    def target(self) -> tvm.target.Target:
        return ELSEWHERE

    def check(self, case: Case, sch: s_tir.Schedule) -> None:
        if aarch64.missing():
            pytest.skip(f"{aarch64.missing()} must be installed")
        assert emulated(sch, ELSEWHERE, case) <= case.rtol


def test_both_operands_may_be_activations() -> None:
    """A second operand that is packed by a kernel lies as a constant does."""
    weight = np.random.default_rng(0).integers(-128, 128, (2, 19, 21), "int8")
    x = te.placeholder(weight.shape, "int8", name="x")
    out = tvm.runtime.tensor(np.full((2, 2, 3, 16, 8), 77, "int8"))
    tvm.compile(te.create_prim_func([x, packed_operand(x, BYTE_PAIRS)]), "llvm")(tvm.runtime.tensor(weight), out)
    np.testing.assert_array_equal(out.numpy(), [pack_dense(each, BYTE_PAIRS) for each in weight])


def test_packed_weights() -> None:
    """Element by element; what pads is zero."""
    weight = np.arange(1, 10 * 18 + 1).reshape(10, 18) % 127 + 1
    for packed, depth in ((pack_dense(weight.astype("int8"), BYTE_PAIRS), 8), (bfloat.pack_dense(weight, 4), 4)):
        steps = -(-10 // depth)
        assert packed.shape == (2, steps, 16, depth)
        assert (str(packed.dtype), depth) in DEPTHS.values()
        for k in range(steps * depth):
            for n in range(32):
                assert packed[n // 16, k // depth, n % 16, k % depth] == (weight[k, n] if k < 10 and n < 18 else 0)


@pytest.mark.parametrize(("word", "case"), [("usmmla", integers(48, 64, 256)), ("bfmmla", bfloats(48, 64, 256))])
@pytest.mark.parametrize("cpu", ["neoverse-n2", "neoverse-v1"])
def test_instructions_of_a_product(cpu: str, word: str, case: Case) -> None:
    """A pass through the loop has one for each vector of sums and each step, half a register is joined for each row,
    and nothing is spilt. In all there are half as many as of dot products."""
    on = resolve(f"aarch64:{cpu}", threads=1).tvm
    sch, tile = first_seed(GEMM_MATRIX, case.func(), on)
    text = str(tvm.compile(sch.mod, on, tir_pipeline=PIPELINE).mod.inspect_source("asm"))
    inner = max(re.split(r"^\.LBB\w+:", text, flags=re.M), key=lambda part: part.count(f"\t{word}\t"))
    loop = re.split(r"^\tb\.ne", inner, flags=re.M)[0]
    sums = tile["m"] * tile["n"] // 4
    assert len(re.findall(rf"\t{word}\t", loop)) == sums * tile["k"]
    joined = len(re.findall(r"\tmov\tv\d+\.d\[1\]|\tld1\t\{ ?v\d+\.d ?\}\[1\]|\tzip1\tv\d+\.2d", loop))
    assert joined <= tile["m"] // 2 * tile["k"]
    assert not re.search(r"\bq\d+, \[sp|\bq\d+, q\d+, \[sp", loop), "the inner loop spills"
    assert sums >= 12, "too few sums hide the latency"
    assert not re.search(r"\t[us]dot\t|\tusdot\t|\tbfdot\t", text)


def test_sums_are_taken_apart_in_registers() -> None:
    """What a tile's vectors become rows by are permutations; nothing of them goes through memory."""
    case = integers(48, 64, 256, to_uint8=True)
    sch, tile = first_seed(GEMM_MATRIX, case.func(), V1)
    text = str(tvm.compile(sch.mod, V1, tir_pipeline=PIPELINE).mod.inspect_source("asm"))
    body = max(text.split(".globl"), key=lambda part: part.count("\tusmmla\t"))
    assert len(re.findall(r"\tzip[12]\tv\d+\.2d|\tmov\tv\d+\.d\[1\]", body)) >= tile["m"] * tile["n"] // 4
    assert not re.search(r"\tld[rp]\ts\d+, \[sp|\tldr\tw\d+, \[sp", body)


def test_only_machines_that_multiply_pairs_take_them() -> None:
    names = ("neoverse-n1", "neoverse-n2", "neoverse-v1", "cortex-a76")
    machines = [resolve(f"llvm -mtriple=aarch64-linux-gnu -mcpu={name}").tvm for name in names]
    assert [cpu_machine(on).matrix_per_cycle for on in machines] == [0.0, 2.0, 4.0, 0.0]
    for form, case in ((BYTE_PAIRS, CASES[0]), (BFLOAT_PAIRS, CASES[-3])):
        assert [find(case.func(), on) is GEMM_MATRIX for on in machines] == [False, True, True, False]
        assert [pays(64, 64, 64, form, on) for on in machines] == [False, True, True, False]
    assert not any(space.matches(CASES[0].func(), V1) for space in (GEMM_INTEGER, GEMM_BFLOAT))


def test_few_rows_stay_with_dot_products() -> None:
    """A row alone would be half of every product, and a weight that comes from the second cache takes its time by any
    instruction."""
    assert [pays(rows, 768, 768, BYTE_PAIRS, V1) for rows in (1, 2, 32, 33)] == [False, False, True, True]
    slow = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-v1 -model=matrix=1.5", threads=1).tvm
    assert not pays(64, 768, 768, BYTE_PAIRS, slow), "where calibration says that they are slow"
