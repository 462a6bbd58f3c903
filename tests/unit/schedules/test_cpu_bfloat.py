"""Products of bfloat16 with float32 sums, on instructions that multiply pairs."""

from __future__ import annotations

import re
import zlib

import ml_dtypes
import numpy as np
import pytest
import tvm
from harness import TARGET, Case, SpaceContract, pytest_generate_tests
from tvm import te, tirx

from mlc.graph.kernels.bfloat import STEP, conv2d_nchwc_bfloat, dense_bfloat, has_bfloat_dot, pack_conv, pack_dense
from mlc.target import resolve
from schedules.cpu.conv import CONV2D_BFLOAT
from schedules.cpu.gemm import GEMM_BFLOAT
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import first_seed

__all__ = ["pytest_generate_tests"]


def dense(
    m: int, n: int, k: int, batch: tuple[int, ...] = (), epilogue: bool = False, step: int = STEP, prefix: str = ""
) -> Case:
    """``[*batch, m, k] x [k, n]``, so many terms a step, with a bias and a ReLU on demand."""
    name = f"{prefix}{'x'.join(map(str, (*batch, m, k, n)))}{'-relu' * epilogue}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    data, weight = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((*batch, m, k), (k, n)))
    packed = pack_dense(weight, step)
    columns = packed.shape[0] * 16
    bias = rng.standard_normal(columns).astype("float32")
    whole = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, -k % step)])
    exact = np.zeros((*batch, m, columns))
    exact[..., :n] = data.astype("float64") @ weight.astype("float64")

    def build() -> list[te.Tensor]:
        x, w = (te.placeholder(a.shape, "bfloat16", name) for a, name in ((whole, "x"), (packed, "w")))
        sums = dense_bfloat(x, w)
        if not epilogue:
            return [x, w, sums]
        b, zero = te.placeholder((columns,), name="b"), tirx.const(0, "float32")
        return [x, w, b, te.compute(sums.shape, lambda *i: tirx.max(sums(*i) + b[i[-1]], zero), name="relu")]

    if epilogue:
        return Case(name, build, lambda *_: np.maximum(exact + bias, 0), data=lambda: [whole, packed, bias])
    return Case(name, build, lambda *_: exact, data=lambda: [whole, packed])


CASES = (dense(40, 64, 96), dense(37, 50, 33, epilogue=True), dense(1, 128, 512), dense(9, 32, 20, (2, 3)),
         dense(5, 16, 1024))


def conv(
    image: tuple[int, int, int, int, int], filters: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1
) -> Case:
    """Of ``[N, I/i, H, W, i]`` to ``(O/o, o)`` filters."""
    name = f"{'x'.join(map(str, (*image, *filters)))}-{kernel}-{stride}-{groups}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    n, blocks, height, width, inner = image
    shape = (filters[0], blocks // groups, kernel, kernel, inner, filters[1])
    data, weight = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in (image, shape))
    packed = pack_conv(weight)

    def exact() -> np.ndarray:
        rows, columns = ((extent - kernel) // stride + 1 for extent in (height, width))
        out = np.zeros((n, filters[0], rows, columns, filters[1]))
        each, depth = filters[0] // groups, blocks // groups
        for block, y, x in np.ndindex(filters[0], kernel, kernel):
            first = block // each * depth
            rows_of, columns_of = slice(y, y + stride * rows, stride), slice(x, x + stride * columns, stride)
            window = data.astype("float64")[:, first : first + depth, rows_of, columns_of]
            part = weight[block, :, y, x].astype("float64")
            out[:, block] += np.einsum("nbhwi,bio->nhwo", window, part)
        return out

    def build() -> list[te.Tensor]:
        x, w = (te.placeholder(a.shape, "bfloat16", name) for a, name in ((data, "x"), (packed, "w")))
        return [x, w, conv2d_nchwc_bfloat(x, w, (stride, stride), (1, 1), groups)]

    return Case(name, build, lambda *_: exact(), data=lambda: [data, packed])


CONVOLUTIONS = (conv((1, 2, 9, 7, 16), (3, 16), 3), conv((2, 1, 8, 9, 6), (2, 8), 1),
                conv((1, 4, 9, 9, 8), (2, 16), 3, stride=2, groups=2))
needs_dot = pytest.mark.skipif(not has_bfloat_dot(TARGET), reason="this machine does not multiply pairs of bfloat16")


@needs_dot
class TestGemm(SpaceContract):
    space = GEMM_BFLOAT
    cases = CASES


@needs_dot
class TestConv2d(SpaceContract):
    space = CONV2D_BFLOAT
    cases = CONVOLUTIONS


def test_only_machines_that_multiply_pairs_take_it() -> None:
    takes = {name: find(CASES[0].func(), resolve(name).tvm) is GEMM_BFLOAT for name in (
        "x86-64-v3", "x86-64-v4", "llvm -mcpu=znver4", "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1",
        "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n2",
    )}
    assert list(takes.values()) == [False, False, True, False, True]
    assert list(takes.values()) == [has_bfloat_dot(resolve(name)) for name in takes]


def test_packed_weight() -> None:
    """Element by element; what pads is zero."""
    weight = np.arange(1, 5 * 18 + 1).reshape(5, 18)
    packed = pack_dense(weight)
    assert (packed.shape, packed.dtype) == ((2, 3, 16, 2), ml_dtypes.bfloat16)
    for k in range(6):
        for n in range(32):
            assert packed[n // 16, k // 2, n % 16, k % 2] == (weight[k, n] if k < 5 and n < 18 else 0)


def test_instructions_of_a_product() -> None:
    """A whole number of tiles a pass through the loop, nothing converted and nothing spilt."""
    on = resolve("llvm -mcpu=znver4", threads=1).tvm
    sch, seed = first_seed(GEMM_BFLOAT, dense(240, 192, 1024).func(), on)
    assembly = tvm.compile(sch.mod, on, tir_pipeline=PIPELINE).mod.inspect_source("s")
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count("vdpbf16ps"))
    loop = re.split(r"\tj\w+\t\.L", hot)[0]
    count = len(re.findall(r"\svdpbf16ps\s", loop))
    assert count
    assert count % (seed["m"] * seed["n"] // 16 * seed["k"]) == 0
    assert not re.search(r"vcvt|vpmovzx|vfmadd", loop)
    assert not re.search(r"mov\w*\s+%zmm\d+, .*\(%rsp", loop)
