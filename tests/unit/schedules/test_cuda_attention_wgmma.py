"""Attention of warpgroups: what is in the machine code, what the emulator computes and counts, and what it finds."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm
from harness import check_orders, emulate, refusal

from mlc.codegen.cuda import find_nvcc, options
from mlc.codegen.inspection import DynamicShared, Kernel, find_nvdisasm, kernels
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_attention import TOLERANCES, attention_case
from schedules import registry
from schedules.cuda.attention import WarpgroupAttention, expanded
from schedules.cuda.heads import heads_of
from schedules.machine import GPUS
from schedules.space import InvalidDecision, first_seed, schedule_with
from schedules.trace import trace_json

SPACE = WarpgroupAttention()
AMPERE, HOPPER = (resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a"))
OPCODES = {"float16": "HGMMA.64x{n}x16.F32", "bfloat16": "HGMMA.64x{n}x16.F32.BF16"}
#: calls that keep what is asynchronous apart
ORDERS = re.compile(
    r"__syncthreads\(\);|mlc_(wait_\w+|expect|arrive|fence_\w+|commit_products)\([^;]*\);")
#: and those by which two warpgroups take turns
TURNS = re.compile(r"mlc_(take|give)_turn_256\([^;]*\);")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def tiles(warps: int, keys: int, stages: int = 2, turns: int = 0) -> dict[str, int]:
    return {"warps": warps, "keys": keys, "stages": stages, "turns": turns}


def scheduled(case: Case, decisions: dict[str, int], target: tvm.target.Target = HOPPER) -> tvm.tirx.PrimFunc:
    return schedule_with(SPACE, case.func(), target, decisions).mod["main"]


def compiled(func: tvm.tirx.PrimFunc) -> Kernel:
    shared = DynamicShared()
    (kernel,) = kernels(cuda_emulator.cuda_source(func, HOPPER, [shared]), "sm_90a", shared.bytes)
    return kernel


def check_promises(kernel: Kernel, decisions: dict[str, int], dtype: str, features: int) -> None:
    assert kernel.stack_bytes == kernel.spilled_bytes == 0 and not kernel.serialised
    assert kernel.blocks and kernel.shared_bytes <= GPUS["90"].shared_bytes
    if find_nvdisasm():
        if kernel.count("USETMAXREG"):  # what one warpgroup gives up is what the others wait for
            assert kernel.registers * 3 >= 24 + 2 * 240
        products = {OPCODES[dtype].format(n=n) for n in (decisions["keys"], -(-features // 16) * 16)}
        assert all(map(kernel.count, products)), f"products must be {products}, got {kernel.instructions}"
        assert bool(kernel.count("BAR.ARV")) == bool(decisions["turns"])
        # an exponential is one instruction: no comparison comes with each
        assert kernel.count("MUFU.EX2") >= decisions["keys"] // 2 > 4 > kernel.count("FSETP.GEU.AND")
        assert kernel.count("UTMALDG") and not any(map(kernel.count, ("LDG", "LDGSTS", "LDL", "STL", "HMMA")))


@needs_nvcc
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("dtype", "depth"), [("bfloat16", 128), ("float16", 64), ("float16", 96)])
@pytest.mark.parametrize("all_seeds", [False, True])
def test_no_seed_spills(dtype: str, depth: int, all_seeds: bool) -> None:
    func = attention_case("long", (1, 16), (2048, 2048, depth, depth), dtype, causal=0).func()
    for decisions in list(SPACE.seeds(func, HOPPER))[: None if all_seeds else 1]:
        kernel = compiled(schedule_with(SPACE, func, HOPPER, decisions).mod["main"])
        check_promises(kernel, dict(decisions), dtype, depth)


@needs_nvcc
@pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("turns", [0, 1])
def test_weights_are_made_while_products_are_under_way(turns: int, tmp_path: Path) -> None:
    """In the machine code, all exponentials of a tile lie between the wait for its scores and that for the sums of the
    tile before: CUDA's compiler moves them if it may."""
    func = attention_case("long", (1, 16), (2048, 2048, 128, 128)).func()
    source = cuda_emulator.cuda_source(
        schedule_with(SPACE, func, HOPPER, tiles(8, 128, 2, turns)).mod["main"], HOPPER, [DynamicShared()])
    (tmp_path / "k.cu").write_text(source)
    cubin = str(tmp_path / "k.cubin")
    subprocess.run([find_nvcc(), "-cubin", "-arch=sm_90a", *options(), "-o", cubin, tmp_path / "k.cu"], check=True)
    code = subprocess.run([str(find_nvdisasm()), "-c", cubin], check=True, capture_output=True, text=True).stdout
    found = "".join({"LE gsb0, 0x1": "(", "LE gsb0, 0x0": ")"}.get(wait, "x") for wait in re.findall(
        r"WARPGROUP\.DEPBAR\.(LE gsb0, 0x\d)|MUFU\.EX2", code))
    assert re.search(r"\(x{66}\)", found), found  # 64 scores of a thread, and two factors of its old sums
    assert ("BAR.ARV" in code) == bool(turns)


def candidates(case: Case, seed: int) -> Iterator[tuple[dict[str, int], tvm.tirx.PrimFunc]]:
    """Random decisions that can be carried out."""
    rng = random.Random(seed)
    while True:
        decisions = {k.name: rng.choice(k.values) for k in SPACE.choices}
        try:
            yield decisions, scheduled(case, decisions)
        except InvalidDecision:
            continue


def test_a_tile_asks_for_the_memory_that_it_is_reckoned_with() -> None:
    """A kernel that asked for more than a block may have would not start."""
    case = attention_case("even", (1, 2), (128, 128, 72, 128))
    shared = DynamicShared()
    cuda_emulator.cuda_source(scheduled(case, tiles(8, 96, 3)), HOPPER, [shared])
    boxes = 2 * 128 * (128 + 3 * 96 * 2)  # all are 128 features wide
    assert list(shared.bytes.values()) == [1024 + boxes + 8 * (1 + 4 * 3)]
    heads = heads_of(case.func())
    assert heads is not None and SPACE.tiles(8, 96, 3).shared_bytes(heads) == 1024 + boxes + 8 * (1 + 4 * 3)


def test_long_queries_have_large_tiles_of_warpgroups_that_take_turns() -> None:
    for depth, least in ((64, 128), (128, 128)):
        func = attention_case("long", (4, 16), (2048, 2048, depth, depth)).func()
        _, first = first_seed(SPACE, func, HOPPER)
        assert first["warps"] == 8 and first["keys"] >= least and first["turns"]
        assert SPACE.price(func, HOPPER, first) < SPACE.price(func, HOPPER, {**first, "turns": 0})


def test_who_takes_what() -> None:
    def found(target: tvm.target.Target, queries: int, keys: int, depth: int = 64, dtype: str = "float16") -> str:
        return registry.find(attention_case("any", (1, 16), (queries, keys, depth, depth), dtype).func(), target).name

    for shape in ((2048, 2048, 128), (1024, 1024, 64), (128, 128, 64), (197, 197, 64)):
        assert found(HOPPER, *shape) == SPACE.name
    assert found(HOPPER, 1, 2048) == found(HOPPER, 40, 40) == "cuda.attention", "too few queries"
    assert found(HOPPER, 512, 512, 32) == "cuda.attention", "half of what is copied would be zeros"
    assert found(HOPPER, 512, 512, 50) == "cuda.attention", "rows must be multiples of 16 bytes apart"
    assert found(HOPPER, 512, 512, 64, "float32") == "cuda.attention_f32"
    for other in ("cuda:sm_80", "cuda:sm_90", "cuda:sm_80,sm_90a"):
        assert found(resolve(other).tvm, 1024, 1024) == "cuda.attention"
    case = attention_case("any", (1, 2), (64, 64, 64, 64))
    with pytest.raises(InvalidDecision, match="needs sm_90a, got sm_80"):
        scheduled(case, tiles(4, 64), AMPERE)
    with pytest.raises(InvalidDecision, match="the tiles must fit 232448 bytes"):
        scheduled(attention_case("deep", (1, 1), (128, 128, 128, 128)), tiles(8, 128, 4))
    with pytest.raises(InvalidDecision, match="2 warpgroups take turns, got 1"):
        scheduled(case, tiles(4, 64, turns=1))
    with pytest.raises(InvalidDecision, match="turns need more than one tile of keys, got 64 keys"):
        scheduled(case, tiles(8, 64, turns=1))


@needs_gxx
@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [0, None])
def test_tiles_that_no_query_sees_are_not_visited_and_no_bank_is_met_twice(causal: int | None) -> None:
    case = attention_case("square", (1, 1), (256, 256, 64, 64), causal=causal)
    error, costs = emulate(case, scheduled(case, tiles(4, 64)), HOPPER)
    assert error <= case.rtol
    products = [cost for cost in costs if cost.what.startswith("wgmma")]
    assert products and all(cost.taken == cost.least for cost in products), products
    scores = sum(cost.requests for cost in products if cost.what == "wgmma a")
    assert scores == (16 if causal is None else 10) * 4 * 16, "the lower triangle of 4 x 4 tiles"


def test_no_score_is_in_memory() -> None:
    kernel = expanded(scheduled(attention_case("long", (1, 2), (256, 512, 64, 64)), tiles(8, 128)))
    kept = list(kernel.body.seq[-1].block.alloc_buffers)
    assert {buffer.scope() for buffer in kept} == {"local", "shared.dyn"}
    assert max(int(buffer.shape[0]) for buffer in kept if buffer.scope() == "local") <= 64


@needs_gxx
@pytest.mark.slow
def test_a_mask_that_hides_whole_tiles() -> None:
    """A query may see nothing of the first tile, or of all but the last key."""
    case = attention_case("hidden", (1, 1), (64, 128, 64, 64), mask=True)
    inputs, outputs = case.arrays()
    inputs[-1][...] = -np.inf
    inputs[-1][..., -1] = 0.0
    cuda_emulator.run(scheduled(case, tiles(4, 64)), HOPPER, inputs, outputs)
    assert case.error(inputs, outputs) <= case.rtol


#: queries, keys, depth, features, causal limit, whether there is a mask, heads that share keys
ODD = [(64, 65, 64, 64, None, False, 1), (65, 64, 64, 64, None, True, 1), (67, 131, 128, 128, 64, False, 1),
       (127, 1, 64, 128, None, False, 1), (129, 130, 128, 64, 1, False, 2), (71, 257, 64, 64, None, True, 2),
       (200, 199, 40, 40, 0, False, 1), (66, 97, 72, 104, 31, False, 1), (191, 63, 96, 96, None, False, 4),
       (64, 300, 80, 80, 236, False, 1), (101, 103, 112, 120, 2, False, 1), (70, 33, 64, 64, 0, False, 1),
       (130, 129, 48, 56, None, True, 2), (77, 78, 128, 40, 1, False, 1), (257, 96, 64, 64, None, False, 1),
       (68, 191, 88, 88, 123, False, 2), (160, 161, 64, 72, 1, True, 1), (99, 100, 104, 64, None, False, 1),
       (64, 128, 128, 128, 64, False, 4), (83, 85, 120, 112, 2, True, 2)]


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes_are_exact_enough(
    dtype: str, shape: tuple[int, int, int, int, int | None, bool, int]
) -> None:
    *sizes, causal, mask, groups = shape
    case = attention_case(f"{shape}", (2, 4), tuple(sizes), dtype, causal=causal, mask=mask, groups=groups)
    _, func = next(candidates(case, sum(sizes)))
    assert emulate(case, func, HOPPER)[0] <= TOLERANCES[dtype]


@needs_gxx
@pytest.mark.slow
def test_blocks_whose_queries_see_no_key_end() -> None:
    """The first 64 of 130 queries, with tiles of 64."""
    case = attention_case("unseen", (1, 1), (130, 66, 64, 64), causal=-64)
    inputs, outputs = case.arrays()
    cuda_emulator.run(scheduled(case, tiles(4, 64)), HOPPER, inputs, outputs)
    with np.errstate(invalid="ignore"):
        wanted = case.reference(*(np.asarray(x, "float64") for x in inputs))[:, 64:]
    assert np.abs(np.asarray(outputs[0], "float64")[:, 64:] - wanted).max() <= 2e-3 * np.abs(wanted).max()


@needs_gxx
def test_each_wait_and_barrier_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is left out, the results are wrong or the kernel does not end: four tiles of keys in two stages."""
    case = attention_case("even", (1, 1), (64, 256, 64, 64))
    assert check_orders(monkeypatch, case, scheduled(case, tiles(4, 64)), HOPPER, ORDERS) == 26


@needs_gxx
def test_each_turn_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is left out, one warpgroup waits for ever, or gives a turn twice: four tiles of keys."""
    case = attention_case("even", (1, 1), (128, 256, 64, 64))
    assert check_orders(monkeypatch, case, scheduled(case, tiles(8, 64, turns=1)), HOPPER, TURNS) == 3


@needs_gxx
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("sizes", "causal", "mask", "groups"), [
    ((130, 200, 64, 64), 70, False, 2), ((128, 65, 64, 64), None, False, 1), ((129, 131, 40, 72), None, True, 1),
    ((150, 66, 64, 64), -64, False, 1)])
def test_warpgroups_in_turn_are_right(
    sizes: tuple[int, int, int, int], causal: int | None, mask: bool, groups: int
) -> None:
    """Odd lengths, a causal limit, few tiles of keys, of which none may be visited, and heads that share their keys."""
    case = attention_case(str(sizes), (1, groups), sizes, causal=causal, mask=mask, groups=groups)
    inputs, outputs = case.arrays()
    cuda_emulator.run(scheduled(case, tiles(8, 64, turns=1)), HOPPER, inputs, outputs)
    seen = slice(max(0, -(causal or 0)), None)  # a query that sees no key has no result
    with np.errstate(invalid="ignore"):
        wanted = case.reference(*(np.asarray(x, "float64") for x in inputs))[:, seen]
    assert np.abs(np.asarray(outputs[0], "float64")[:, seen] - wanted).max() <= case.rtol * np.abs(wanted).max()


def test_a_trace_that_marks_what_is_no_longer_the_attention_is_refused() -> None:
    """The kernel would be made from other blocks than the function has."""
    func = attention_case("even", (1, 2), (64, 64, 64, 64)).func()
    sch = schedule_with(SPACE, func, HOPPER, tiles(4, 64))
    assert not refusal(func, trace_json(sch), HOPPER)
    instructions, decisions = json.loads(trace_json(sch))
    (mark,) = [step for step in instructions if step[0] == "Annotate"]
    for wrong in ([2, 64, 2], [4, 80, 2], [4, 64, 1], [4, 64, 2, 2], [4, 64, 2, 1, 1], [8, 64, 2, 1, 2]):
        mark[1][1] = wrong
        assert "a value as search spaces give it" in refusal(func, json.dumps([instructions, decisions]), HOPPER)
    other = attention_case("rows that no box takes", (1, 2), (64, 64, 50, 50)).func()
    mark[1][1] = [4, 64, 2]
    assert "where boxes can be copied" in refusal(other, trace_json(sch), HOPPER)
    sch.compute_inline(sch.get_sblock("powers"))
    assert "blocks are as they were" in refusal(func, trace_json(sch), HOPPER)


@needs_nvcc
def test_a_mask_leaves_no_seed_without_registers() -> None:
    """Of 128 keys and features, what of a mask is on its way has no room beside scores and sums."""
    func = attention_case("masked", (1, 16), (1390, 227, 64, 128), "bfloat16", mask=True, warpgroups=True).func()
    for decisions in SPACE.seeds(func, HOPPER):
        shared = DynamicShared()
        source = cuda_emulator.cuda_source(schedule_with(SPACE, func, HOPPER, decisions).mod["main"], HOPPER, [shared])
        (kernel,) = kernels(source, "sm_90a", shared.bytes)
        assert kernel.stack_bytes == kernel.spilled_bytes == 0, decisions
