"""Products for tensor cores, laid out by decisions."""

from __future__ import annotations

import shutil

import pytest
import tvm
from tvm import tirx

from mlc.codegen.inspection import Kernel, kernels
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES, product_case
from schedules.cuda.mma import TensorCoreGemm
from schedules.intrin import mma
from schedules.space import schedule_with

SPACE = TensorCoreGemm()
AMPERE, HOPPER = (resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a"))
BY_NAME = {case.name: case for case in CASES}

#: the promised opcode of each type of operands
OPCODES = {"float16": "HMMA.16816.F32", "bfloat16": "HMMA.16816.F32.BF16", "int8": "IMMA.16832.S8.S8",
           "tf32": "HMMA.1688.F32.TF32"}

SUMS = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "tf32": "float32"}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def function(m: int, n: int, k: int, dtype: str = "float16") -> tirx.PrimFunc:
    return product_case("product", (m, k), (n, k), dtype, SUMS[dtype], transposed=True).func()


def kind_of(dtype: str) -> mma.Kind:
    return mma.TENSOR_FLOAT if dtype == "tf32" else mma.kind_of(dtype, SUMS[dtype])


def compiled(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Kernel]:
    return kernels(cuda_emulator.cuda_source(func, target), str(target.attrs["arch"]))


def decisions_of(**knobs: int) -> dict[str, int]:
    return {"block_m": 64, "block_n": 64, "block_k": 64, "warp_m": 32, "warp_n": 32, "stages": 2, "split_k": 1,
            "panel": 1, **knobs}


def function_of(case: Case, decisions: dict[str, int]) -> tirx.PrimFunc:
    return schedule_with(SPACE, case.func(), AMPERE, decisions).mod["main"]
