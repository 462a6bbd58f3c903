"""Kernels for sizes that a call decides: what the emulator computes, and what is in the machine code."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest
import tvm
from tvm import tirx

from mlc.codegen import prepared
from mlc.codegen.inspection import DynamicShared, find_nvdisasm, kernels
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cuda_free import FREE, FreeCase
from schedules import registry
from schedules.capped import capped, of_most_rows
from schedules.free import SIZES, free_function, shown_function, variables
from schedules.pieces import boxed
from schedules.space import InvalidDecision, first_seed

TARGETS = {arch: resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a")}
#: what sizes are tried with: the least, odd ones, and some that tiles divide
VALUES = (1, 33, 64, 130)

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def scheduled(case: FreeCase, target: tvm.target.Target) -> tirx.PrimFunc:
    """By the first space that has a seed for free sizes, too, as a build takes it."""
    func = case.func()
    for space in registry.matching(func, target):
        with contextlib.suppress(InvalidDecision):
            return first_seed(space, func, target)[0].mod["main"]
    raise AssertionError(f"no space schedules {case}")


def sizes_of(case: FreeCase) -> list[dict[str, int]]:
    """Each size with each of the values that its range has, beside others for the rest."""
    found = []
    for first, value in enumerate(VALUES):
        values = (VALUES[(first + 3 * i) % len(VALUES)] for i in range(1, len(case.free)))
        chosen = [value, *values]
        found.append({name: min(size, high, 5 if name == "batch" else high)
                      for (name, (_, high, _)), size in zip(case.free.items(), chosen, strict=True)})
    return found


@needs_gxx
@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", FREE, ids=str)
def test_one_kernel_serves_all_sizes(case: FreeCase, arch: str) -> None:
    func, target = case.func(), TARGETS[arch]
    assert registry.find(func, target).name == case.spaces.get(arch, registry.find(func, target).name)
    kernel = prepared(scheduled(case, target), target)
    for sizes in sizes_of(case):
        arguments, output = case.arguments(sizes), case.output(sizes)
        if case.name.endswith("masked"):  # the last query sees no key
            arguments[-1][..., -1, :] = -np.inf
        wanted = case.wanted(arguments)
        cuda_emulator.run(kernel, target, arguments, [output])
        error = np.abs(output - wanted).max() / max(np.abs(wanted).max(), 1e-6)
        assert error <= case.rtol, f"{sizes}: {error}"


@needs_nvcc
@pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("name", "arch", "opcodes"), [
    ("product_f16", "sm_80", ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "LDSM")),
    ("product_f16", "sm_90a", ("HGMMA", "UTMALDG")),
    ("window_float16", "sm_80", ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "LDSM")),
    ("attention_f16", "sm_80", ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "LDSM")),
    ("decode_f16", "sm_90a", ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "LDSM")),
])
def test_they_are_those_of_fixed_sizes(name: str, arch: str, opcodes: tuple[str, ...]) -> None:
    """Tensor cores, whole copies, nothing in local memory."""
    case, shared = next(each for each in FREE if each.name == name), DynamicShared()
    func = prepared(scheduled(case, TARGETS[arch]), TARGETS[arch])
    (kernel,) = kernels(cuda_emulator.cuda_source(func, TARGETS[arch], [shared]), arch, shared.bytes)
    assert kernel.stack_bytes == kernel.spilled_bytes == kernel.count("LDL") == kernel.count("STL") == 0
    assert kernel.blocks and all(kernel.count(opcode) for opcode in opcodes), kernel.instructions


@needs_gxx
@pytest.mark.parametrize(("low", "high"), [(3, 8), (9, 64)])
def test_few_rows_are_computed_as_the_most(low: int, high: int) -> None:
    """By a sum that is cut over blocks: rows that are not there are neither read nor stored."""
    case = next(each for each in FREE if each.name == "long_sum")
    func, target = boxed(case.func(), ((low, high),), [high]), TARGETS["sm_80"]
    most = of_most_rows(func)
    assert most is not None and most[1] == [0, -1, -1, 0]
    sch, decisions = first_seed(registry.find(most[0], target), most[0], target)
    assert decisions["split_k"] > 1
    kernel = prepared(capped(sch.mod["main"], most[1]), target)
    for rows in (low, high - 1, high):
        sizes = {"n": rows}
        arguments, output = case.arguments(sizes), case.output(sizes)
        cuda_emulator.run(kernel, target, arguments, [output], repeats=2)
        wanted = case.wanted(arguments)
        assert np.abs(output - wanted).max() / np.abs(wanted).max() <= case.rtol


def test_rows_that_depend_on_others_are_not() -> None:
    """Nor what is no row of a tensor."""
    for name in ("broadcast", "attention_f16", "decode_f16"):
        assert of_most_rows(next(each for each in FREE if each.name == name).func()) is None, name


def test_spaces_are_shown_sizes_that_nothing_divides() -> None:
    """What they find of these holds for all: no vector, no whole tile."""
    case = next(each for each in FREE if each.name == "broadcast")
    func = case.func()
    shown = shown_function(func, TARGETS["sm_80"])
    assert [int(size) for size in shown.params[0].shape] == [3, 63, 24]
    assert free_function(shown).same_as(func) and free_function(func) is None
    assert shown_function(func, tvm.target.Target({"kind": "llvm"})).params[0].shape[1] == 64, "CPUs mask what is over"
    few = func.with_attr(SIZES, [[1, 2, 1], [8, 9, 8]])
    assert [int(size) for size in shown_function(few, TARGETS["sm_80"]).params[0].shape] == [3, 9, 24]


def test_a_product_of_sizes_is_one() -> None:
    """Rows of which nothing depends on either size."""
    case = next(each for each in FREE if each.name == "product_f16")
    func = case.func()
    (rows,) = variables(func)
    assert [list(map(int, size)) for size in func.attrs[SIZES]] == [[1, 4096**2, 24**2]]
    assert not any(isinstance(param.ty, tvm.ir.PrimType) for param in func.params)
    assert func.params[0].shape[0].same_as(rows)
