"""Sums that are cut over blocks: one kernel, the last block of a tile adds up. What the emulator finds missing, what is
in the machine code, and what must stay two kernels."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from harness import emulated_error
from tvm import s_tir, te, tirx

from mlc.codegen.inspection import find_nvdisasm, kernels
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import product_case
from schedules.cuda.gemm import TiledGemm
from schedules.cuda.joined import joined
from schedules.cuda.mma import TensorCoreGemm
from schedules.space import schedule_with

AMPERE = resolve("cuda:sm_80").tvm
SIMT = {"block_m": 32, "block_n": 32, "block_k": 16, "thread_m": 4, "thread_n": 4, "vector": 1, "unroll": 0}
WARPS = {"block_m": 64, "block_n": 64, "block_k": 64, "warp_m": 32, "warp_n": 32, "stages": 2, "panel": 1}
#: a step of what a block does when it has written its part, and the same with OUT for whether it is left out
STEPS = {
    "its threads meet": ("  __syncthreads();\n  int last", "  if (!OUT) __syncthreads();\n  int last"),
    "one tells what they wrote": ("__threadfence();\n    last =", "if (!OUT) __threadfence();\n    last ="),
    "and asks what others did": ("__threadfence();\n  }\n  return", "if (!OUT) __threadfence();\n  }\n  return"),
    "all of them add up": ("return __syncthreads_or(last);",
                           "if (OUT) { __syncthreads(); return last; } return __syncthreads_or(last);"),
    "the last one resets": (", 4u - 1u) ==", ", OUT ? ~0u : 4u - 1u) =="),
    "the others are not last": ("== 4u - 1u;", "== (OUT ? 2u : 4u - 1u);"),
}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def cut(dtype: str) -> tuple[Case, tirx.PrimFunc]:
    """A product of odd sizes, its sum cut in four: in float32 on the units that all GPUs have, else on tensor cores."""
    space, decisions, k = (TiledGemm(), SIMT, 300) if dtype == "float32" else (TensorCoreGemm(), WARPS, 1100)
    case = product_case("cut", (70, k), (k, 90), dtype, "float32")
    return case, schedule_with(space, case.func(), AMPERE, {**decisions, "split_k": 4}).mod["main"]


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_kernel_adds_up_whatever_block_comes_last(dtype: str) -> None:
    """Two runs, the second with the blocks in the opposite order: both right, and the same to the last bit."""
    case, scheduled = cut(dtype)
    assert len(list(cuda_emulator.launches(scheduled))) == 1
    found = []
    for repeats in (1, 2):
        inputs, outputs = case.arrays()
        cuda_emulator.run(scheduled, AMPERE, inputs, outputs, repeats)
        assert case.error(inputs, outputs) <= case.rtol
        found.append(outputs[0])
    assert np.array_equal(*found)


@needs_gxx
def test_each_step_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is left out, the results of one of two runs are wrong."""
    case, scheduled = cut("float32")
    source = cuda_emulator.cuda_source(scheduled, AMPERE)
    for place, (step, (there, switched)) in enumerate(STEPS.items()):
        assert source.count(there) == 1, step
        source = source.replace(there, switched.replace("OUT", f"LEFT_OUT({place})"))
    assert emulated_error(monkeypatch, case, scheduled, source, 2) <= case.rtol
    for place, step in enumerate(STEPS):
        assert emulated_error(monkeypatch, case, scheduled, source, 2, left_out=place) > 10 * case.rtol, step


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_machine_code_tells_and_spills_nothing(dtype: str) -> None:
    source = cuda_emulator.cuda_source(cut(dtype)[1], AMPERE)
    for arch in ("sm_80", "sm_90a"):
        (kernel,) = kernels(source, arch)
        assert kernel.stack_bytes == kernel.spilled_bytes == 0
        if find_nvdisasm():
            assert kernel.count("MEMBAR") == 2 and kernel.count("ATOMG") == 1, kernel.instructions


def two_kernels(shift: int, threads: int = 64, given: bool = False) -> tirx.PrimFunc:
    """Blocks 0 to 7 write a row of 64 each; then blocks 0 to 3 add up rows t and t + 4, the tile's number moved by
    ``shift``. The rows are a result too if ``given``."""
    x = te.placeholder((2, 4, 64), name="x")
    part = te.compute((2, 4, 64), lambda p, t, i: x[p, t, i] * 2.0, name="part")
    total = te.compute(
        (4, 64), lambda t, i: part[0, (t + shift) % 4, i] + part[1, (t + shift) % 4, i], name="total"
    )
    sch = s_tir.Schedule(te.create_prim_func([x, *([part] if given else []), total]))
    p, t, i = sch.get_loops(sch.get_sblock("part"))
    sch.bind(sch.fuse(p, t), "blockIdx.x")
    sch.bind(i, "threadIdx.x")
    t, i = sch.get_loops(sch.get_sblock("total"))
    sch.bind(t, "blockIdx.x")
    _, i = sch.split(i, [None, threads])
    sch.bind(i, "threadIdx.x")
    return sch.mod["main"]


@needs_gxx
@pytest.mark.parametrize(("shift", "threads", "count"), [(0, 64, 1), (1, 64, 2), (0, 32, 2)])
def test_what_reads_other_tiles_stays_apart(shift: int, threads: int, count: int) -> None:
    """A block that reads what it was not told is written would be wrong now and then."""
    func = two_kernels(shift, threads)
    assert len(list(cuda_emulator.launches(func))) == count
    assert (joined(func) is func) == (count == 2)
    x, total = np.random.default_rng(0).standard_normal((2, 4, 64)).astype("float32"), np.zeros((4, 64), "float32")
    cuda_emulator.run(func, AMPERE, [x], [total])
    np.testing.assert_allclose(total, np.roll(2 * x.sum(0), -shift, 0), rtol=1e-5, atol=1e-6)


@needs_gxx
def test_parts_that_are_a_result_stay_the_callers() -> None:
    func = two_kernels(0, given=True)
    assert len(list(cuda_emulator.launches(func))) == 1 and isinstance(joined(func).body, s_tir.SBlockRealize)
    x = np.random.default_rng(0).standard_normal((2, 4, 64)).astype("float32")
    part, total = np.zeros((2, 4, 64), "float32"), np.zeros((4, 64), "float32")
    cuda_emulator.run(func, AMPERE, [x], [part, total])
    np.testing.assert_array_equal(part, 2 * x)
    np.testing.assert_allclose(total, 2 * x.sum(0), rtol=1e-5, atol=1e-6)


def test_the_host_allocates_the_parts() -> None:
    """TVM refuses memory of all blocks that is allocated within a kernel."""
    whole = joined(cut("float32")[1]).body
    assert isinstance(whole, tirx.SeqStmt) and isinstance(whole.seq[0], tirx.AllocBuffer)
    assert str(whole.seq[0].buffer.scope()) in ("", "global")
    assert isinstance(whole.seq[1], s_tir.SBlockRealize) and not any(
        buffer.same_as(whole.seq[0].buffer) for buffer in whole.seq[1].block.alloc_buffers
    )
