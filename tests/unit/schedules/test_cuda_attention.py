"""Attention as one kernel: what is in the machine code, what the emulator computes and counts, and what it finds."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from harness import check_orders, emulate, refusal

from mlc.codegen.inspection import DynamicShared, Kernel, find_nvdisasm, kernels
from mlc.cpu import usable_flags
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_attention import TOLERANCES, attention_case
from schedules import registry
from schedules.cuda.attention import Attention, ExactAttention, TensorFloatAttention, expanded
from schedules.cuda.heads import heads_of
from schedules.space import InvalidDecision, first_seed, schedule_with
from schedules.trace import trace_json

AMPERE, HOPPER = (resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a"))
SPACES = {"float16": Attention(), "bfloat16": Attention(), "tf32": TensorFloatAttention(), "float32": ExactAttention()}
OPCODES = {"float16": "HMMA.16816.F32", "bfloat16": "HMMA.16816.F32.BF16", "tf32": "HMMA.1688.F32.TF32",
           "float32": "FFMA"}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def scheduled(
    case: Case, dtype: str, decisions: dict[str, int], target: tvm.target.Target = AMPERE
) -> tvm.tirx.PrimFunc:
    return schedule_with(SPACES[dtype], case.func(), target, decisions).mod["main"]


def tiles(warps: int, keys: int, stages: int = 2) -> dict[str, int]:
    return {"warps": warps, "keys": keys, "stages": stages, "splits": 1}


def compiled(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> Kernel:
    shared = DynamicShared()
    source = cuda_emulator.cuda_source(func, target, [shared])
    (kernel,) = kernels(source, str(target.attrs["arch"]), shared.bytes)
    return kernel


def check_promises(kernel: Kernel, dtype: str) -> None:
    assert kernel.stack_bytes == kernel.spilled_bytes == 0 and kernel.blocks
    if find_nvdisasm():
        assert kernel.count(OPCODES[dtype]), f"products must be {OPCODES[dtype]}, got {kernel.instructions}"
        assert kernel.count("LDGSTS.E.BYPASS.128") and kernel.count("LDGDEPBAR")
        assert not kernel.count("LDG"), "queries, keys and values must come by asynchronous copies"
        assert not kernel.count("LDL") and not kernel.count("STL")
        assert bool(kernel.count("LDSM")) == (dtype != "float32")


@needs_nvcc
@pytest.mark.parametrize("dtype", OPCODES)
def test_a_seed_holds_its_instructions_and_spills_nothing(dtype: str) -> None:
    func = attention_case("long", (1, 16), (1024, 1024, 64, 64), dtype, causal=0).func()
    for target in (AMPERE, HOPPER):
        kernel = compiled(first_seed(SPACES[dtype], func, target)[0].mod["main"], target)
        check_promises(kernel, dtype)
        assert kernel.blocks >= 2 or kernel.threads >= 256
        if find_nvdisasm():
            assert kernel.count("STG") == kernel.count("STG.E.128") > 0, "results must be stored 16 bytes at a time"


def candidates(case: Case, dtype: str, target: tvm.target.Target, seed: int) -> Iterator[tvm.tirx.PrimFunc]:
    """Random decisions that can be carried out."""
    rng, knobs = random.Random(seed), SPACES[dtype].knobs(case.func(), target)
    while True:
        try:
            yield scheduled(case, dtype, {k.name: rng.choice(k.values) for k in knobs}, target)
        except InvalidDecision:
            continue


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_random_candidates_hold_their_instructions(dtype: str, arch: str) -> None:
    target = resolve(f"cuda:{arch}").tvm
    for depth in (64, 128):
        case = attention_case("long", (1, 16), (512, 512, depth, depth), dtype, causal=0)
        drawn = candidates(case, dtype, target, depth)
        for _ in range(5):
            check_promises(compiled(next(drawn), target), dtype)


@pytest.mark.parametrize("dtype", OPCODES)
def test_a_tile_asks_for_the_memory_that_it_is_reckoned_with(dtype: str) -> None:
    """A kernel that asked for more than a block may have would not start."""
    case = attention_case("even", (1, 2), (64, 64, 40, 24), dtype)
    shared = DynamicShared()
    cuda_emulator.cuda_source(scheduled(case, dtype, tiles(2, 32, 3)), AMPERE, [shared])
    space, heads = SPACES[dtype], heads_of(case.func())
    assert list(shared.bytes.values()) == [space.tiles(2, 32, 3).shared_bytes(heads)]


@needs_gxx
@pytest.mark.parametrize("dtype", OPCODES)
def test_copies_and_fetches_meet_no_bank_twice(dtype: str) -> None:
    case = attention_case("even", (1, 1), (32, 128, 64, 64), dtype)
    error, costs = emulate(case, scheduled(case, dtype, tiles(2, 32)), AMPERE)
    assert error <= case.rtol
    shared = [cost for cost in costs if cost.shared and cost.bytes == 16]
    assert len(shared) >= 6
    assert all(cost.taken == cost.least for cost in shared), shared
    assert {cost.bytes for cost in costs if cost.what.startswith("cp.async")} == {16}


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tiles_that_no_query_sees_are_not_visited(dtype: str) -> None:
    copied = {}
    for causal in (None, 0):
        case = attention_case("square", (1, 1), (128, 128, 16, 16), dtype, causal=causal)
        error, costs = emulate(case, scheduled(case, dtype, tiles(1 if dtype == "float16" else 2, 16)), AMPERE)
        assert error <= case.rtol
        copied[causal] = sum(cost.requests for cost in costs if cost.what == "cp.async to")
    queries = 8 if dtype == "float16" else 16  # requests of warps that bring them
    assert copied[0] - queries == (copied[None] - queries) * 36 / 64, "the lower triangle of 8 x 8 tiles"


@pytest.mark.parametrize("dtype", OPCODES)
def test_no_score_is_in_memory(dtype: str) -> None:
    case = attention_case("long", (1, 2), (256, 512, 64, 64), dtype)
    kernel = expanded(scheduled(case, dtype, tiles(2, 32)))
    kept: list[tvm.tirx.Buffer] = list(kernel.body.block.alloc_buffers)
    assert {buffer.scope() for buffer in kept} == {"local", "shared.dyn"}
    assert max(int(buffer.shape[0]) for buffer in kept if buffer.scope() == "local") <= 2 * 64


@needs_gxx
@pytest.mark.parametrize("mask", [-np.inf, -1e9])
def test_a_mask_that_hides_whole_tiles(mask: float) -> None:
    """A query may see nothing of the first tile, or of all but the last key."""
    case = attention_case("hidden", (1, 1), (16, 64, 16, 16), mask=True)
    inputs, outputs = case.arrays()
    inputs[-1][...] = mask
    inputs[-1][..., -1] = 0.0
    cuda_emulator.run(scheduled(case, "float16", tiles(1, 16)), AMPERE, inputs, outputs)
    assert case.error(inputs, outputs) <= case.rtol


#: queries, keys, depth, features, causal limit, whether there is a mask
ODD = [(1, 1, 8, 8, None, False), (1, 77, 64, 64, None, True), (17, 19, 8, 24, None, False),
       (31, 33, 50, 50, 2, False), (33, 31, 64, 64, 0, False), (61, 67, 71, 73, None, True),
       (65, 129, 104, 72, 64, False), (127, 64, 128, 128, 0, False), (64, 127, 96, 96, 63, True),
       (15, 200, 80, 16, 190, False), (100, 7, 32, 128, None, False), (19, 23, 1, 1, None, False),
       (47, 48, 33, 65, 1, True), (16, 16, 16, 16, 0, True), (90, 91, 48, 40, 1, False), (2, 3, 128, 8, 1, False),
       (129, 130, 20, 20, 1, False), (70, 70, 100, 100, 0, False), (9, 150, 112, 120, 141, True),
       (53, 59, 5, 3, None, False)]


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes_are_exact_enough(dtype: str, shape: tuple[int, int, int, int, int | None, bool]) -> None:
    *sizes, causal, mask = shape
    case = attention_case(f"{shape}", (1, 2), tuple(sizes), dtype, causal=causal, mask=mask)
    assert emulate(case, next(candidates(case, dtype, AMPERE, sum(sizes))), AMPERE)[0] <= TOLERANCES[dtype]


@needs_gxx
@pytest.mark.skipif("fma" not in (usable_flags() or ()), reason="needs a CPU that multiplies and adds in one step")
def test_maxima_that_stay_leave_the_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs round no product that a sum takes: what a maximum's is rounded by would come again with every tile."""
    case = attention_case("long", (1, 1), (16, 1024, 16, 16), "float32")
    (query, key, value), outputs = case.arrays()
    query[...], key[...] = 1.0, 203.3
    value[...] = np.linspace(0.0, 1.0, 1024)[:, None, None]
    monkeypatch.setattr(
        cuda_emulator, "_COMPILE", (*cuda_emulator._COMPILE, "-O2", "-mfma", "-ffp-contract=fast"))
    cuda_emulator._compiled.cache_clear()
    inputs = [query, key, value]
    cuda_emulator.run(scheduled(case, "float32", tiles(2, 16)), AMPERE, inputs, outputs)
    assert case.error(inputs, outputs) <= case.rtol


@needs_gxx
def test_each_wait_and_barrier_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is left out, the results are wrong."""
    case = attention_case("even", (1, 1), (64, 96, 32, 16))
    orders = check_orders(monkeypatch, case, scheduled(case, "float16", tiles(4, 16)))
    assert orders == 4, "a wait and a barrier before the queries, and for each tile"


def test_what_is_no_attention_of_this_kind_is_refused() -> None:
    wide = attention_case("wide", (1, 1), (32, 32, 160, 64)).func()
    assert registry.find(wide, AMPERE).name == "cuda.fallback", "more features than registers hold"
    old = resolve("cuda:sm_75").tvm
    assert registry.find(attention_case("old", (1, 1), (32, 32, 64, 64)).func(), old).name == "cuda.fallback"
    case = attention_case("deep", (1, 1), (32, 32, 128, 128))
    with pytest.raises(InvalidDecision, match="the tiles must fit 166912 bytes"):
        scheduled(case, "float16", tiles(8, 128, 4))


def test_a_trace_that_marks_what_is_no_longer_the_attention_is_refused() -> None:
    """The kernel would be made from other blocks than the function has."""
    func = attention_case("even", (1, 2), (32, 32, 16, 16)).func()
    sch = schedule_with(SPACES["float16"], func, AMPERE, tiles(2, 16))
    assert not refusal(func, trace_json(sch), AMPERE)
    sch.compute_inline(sch.get_sblock("powers"))
    assert "blocks are as they were" in refusal(func, trace_json(sch), AMPERE)
    instructions, decisions = json.loads(trace_json(sch))
    (mark,) = [step for step in instructions if step[0] == "Annotate"]
    mark[1][1] = [2, 24, 2]
    assert "a value as search spaces give it" in refusal(func, json.dumps([instructions, decisions]), AMPERE)
