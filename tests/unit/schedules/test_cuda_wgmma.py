"""Products of warpgroups: what is in the machine code, what the emulator computes and counts, and what it finds."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from itertools import product

import pytest
import tvm
from harness import check_orders, emulate, refusal
from tvm import tirx

from mlc.codegen.inspection import DynamicShared, Kernel, find_nvdisasm, kernels
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES, epilogue_case, product_case
from schedules import registry
from schedules.cuda.product import product_of
from schedules.cuda.warpgroups import FEW_REGISTERS, MANY_REGISTERS, GroupTile
from schedules.cuda.wgmma import WarpgroupGemm
from schedules.machine import GPUS
from schedules.space import InvalidDecision, first_seed, schedule_with
from schedules.trace import trace_json

SPACE = WarpgroupGemm()
HOPPER = resolve("cuda:sm_90a").tvm
#: so few multiprocessors that a block takes several tiles
SMALL = tvm.target.Target({**HOPPER.export(), "model": "sms=2"})
OPCODES = {"float16": "HGMMA.64x{n}x16.F32", "bfloat16": "HGMMA.64x{n}x16.F32.BF16"}
LIMITS = {"float16": 1e-3, "bfloat16": 3e-3}
BY_NAME = {case.name: case for case in CASES}
#: calls that keep what is asynchronous apart
ORDERS = re.compile(
    r"__syncthreads\(\);|mlc_(wait_\w+|expect|arrive\w*|fence_\w+|commit_\w+|meet_\w+)\([^;]*\);")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def tile(**knobs: int) -> dict[str, int]:
    return {"block_m": 64, "block_n": 64, "block_k": 64, "consumers": 1, "stages": 3, "panel": 1, "boxed": 0,
            "cluster": 1, "persistent": 0, **knobs}


def case_of(m: int, n: int, k: int, dtype: str = "float16", transposed: bool = True) -> Case:
    return product_case(f"{m}x{n}x{k}", (m, k), (n, k) if transposed else (k, n), dtype, "float32", transposed,
                        SPACE.name)


def scheduled(case: Case, decisions: dict[str, int], target: tvm.target.Target = HOPPER) -> tirx.PrimFunc:
    return schedule_with(SPACE, case.func(), target, decisions).mod["main"]


def compiled(func: tirx.PrimFunc) -> Kernel:
    shared = DynamicShared()
    (kernel,) = kernels(cuda_emulator.cuda_source(func, HOPPER, [shared]), "sm_90a", shared.bytes)
    return kernel


def check_promises(kernel: Kernel, decisions: dict[str, int], dtype: str) -> None:
    assert kernel.stack_bytes == kernel.spilled_bytes == 0 and not kernel.serialised
    assert kernel.blocks and kernel.shared_bytes <= GPUS["90"].shared_bytes
    if kernel.instructions and kernel.count("USETMAXREG"):  # what one warpgroup gives up is what the others wait for
        assert kernel.registers * 3 >= FEW_REGISTERS + 2 * MANY_REGISTERS
    if find_nvdisasm():
        assert kernel.count("UTMALDG") and kernel.count(OPCODES[dtype].format(n=decisions["block_n"])), kernel
        assert not kernel.count("LDL") and not kernel.count("STL")
        assert not kernel.count("LDG") and not kernel.count("LDGSTS"), "operands must come in boxes"
        assert kernel.count("STG") == kernel.count("STG.E.128")
        boxed = bool(decisions["boxed"])
        assert bool(kernel.count("UTMALDG.2D.MULTICAST")) == (decisions["cluster"] > 1)
        assert bool(kernel.count("STSM")) == bool(kernel.count("UTMASTG")) == boxed != bool(kernel.count("STG"))


@needs_nvcc
@pytest.mark.parametrize("dtype", OPCODES)
def test_a_seed_holds_its_instructions_and_spills_nothing(dtype: str) -> None:
    sch, decisions = first_seed(SPACE, case_of(4096, 4096, 4096, dtype, False).func(), HOPPER)
    check_promises(compiled(sch.mod["main"]), decisions, dtype)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (128, 768, 3072), (2048, 1024, 512), (64, 4096, 4096)], ids=str)
def test_no_seed_spills(dtype: str, shape: tuple[int, int, int]) -> None:
    func = case_of(*shape, dtype).func()
    for decisions in SPACE.seeds(func, HOPPER):
        check_promises(compiled(schedule_with(SPACE, func, HOPPER, decisions).mod["main"]), dict(decisions), dtype)


def candidates(
    case: Case, seed: int, target: tvm.target.Target = HOPPER
) -> Iterator[tuple[dict[str, int], tirx.PrimFunc]]:
    """Random decisions that can be carried out."""
    rng, knobs = random.Random(seed), SPACE.knobs(case.func(), target)
    while True:
        decisions = {k.name: rng.choice(k.values) for k in knobs}
        try:
            yield decisions, scheduled(case, decisions, target)
        except InvalidDecision:
            continue


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_random_candidates_hold_their_instructions(dtype: str, transposed: bool) -> None:
    drawn = candidates(case_of(2048, 1024, 1024, dtype, transposed), 1)
    for _ in range(12):
        decisions, func = next(drawn)
        check_promises(compiled(func), decisions, dtype)


def test_a_tile_asks_for_the_memory_that_it_is_reckoned_with() -> None:
    """A kernel that asked for more than a block may have would not start."""
    case = epilogue_case(SPACE.name, "cast", (256, 256, 256), "float16")
    for decisions, stored in (
        (tile(), 11 << 10), (tile(boxed=1), 16 << 10),
        (tile(block_m=128, block_n=256, consumers=2, stages=4), 21 << 10),
        (tile(block_m=128, block_n=256, consumers=2, stages=4, boxed=1), 32 << 10),
    ):
        shared = DynamicShared()
        cuda_emulator.cuda_source(scheduled(case, decisions), HOPPER, [shared])
        wide = (decisions["block_m"] + decisions["block_n"]) * decisions["block_k"] * 2
        assert list(shared.bytes.values()) == [stored + 1024 + decisions["stages"] * (wide + 16)]


@pytest.mark.parametrize("shape", [(2048, 2048, 4096), (4096, 2048, 1024), (8192, 8192, 8192)], ids=str)
def test_large_products_have_large_tiles(shape: tuple[int, int, int]) -> None:
    _, first = first_seed(SPACE, case_of(*shape).func(), HOPPER)
    assert first["block_m"] * first["block_n"] >= 128 * 256 and first["stages"] >= 4


@pytest.mark.parametrize("what", ["cast", "gelu", "residual"])
@pytest.mark.parametrize("shape", [
    (2048, 768, 768), (2048, 2304, 768), (2048, 3072, 768), (2048, 768, 3072), (2048, 3072, 3072)], ids=str)
def test_products_of_few_large_tiles_have_smaller_ones(shape: tuple[int, int, int], what: str) -> None:
    """Tiles of 128 by 256 would leave multiprocessors idle: of 2048 by 2304 they are 144, a second round of 12 on 132
    multiprocessors; of 768 columns 48. The outside model of an H200 (``tests.performance.outside_model``) has the first
    seed's tiles as its own best of all, and the best of 128 by 256 behind them (us):

    | product        | first seed, stages  | seed | 128x256 |
    |----------------|---------------------|------|---------|
    | 2048x768x768   |  64x192x128, 3      | 15.1 |    23.3 |
    | 2048x2304x768  |  64x192x128, 3      | 27.1 |    39.0 |
    | 2048x3072x768  | 128x192x64, 5       | 33.0 |    39.3 |
    | 2048x768x3072  |  64x192x128, 3      | 27.0 |    55.1 |
    | 2048x3072x3072 | 128x192x64, 5       | 80.7 |   102.9 |

    Three stages of depth 128 are what shared memory holds, and as many steps on the way as six of depth 64.
    """
    func = epilogue_case(SPACE.name, what, shape, "float16").func()
    _, first = first_seed(SPACE, func, HOPPER)
    knobs = {knob.name: knob.values for knob in SPACE.knobs(func, HOPPER)}
    free = {name: knobs[name] for name in ("boxed", "cluster", "persistent")}
    large = [tile(block_m=128, block_n=256, consumers=2, stages=4, panel=8, **dict(zip(free, each, strict=True)))
             for each in product(*free.values())]
    price, others = SPACE.price(func, HOPPER, first), [SPACE.price(func, HOPPER, each) for each in large]
    assert price is not None and all(other is not None and price <= other for other in others)
    assert first["stages"] * first["block_k"] >= 4 * 64
    more = {**first, "stages": first["stages"] + 1}
    assert first["stages"] >= 4 or GroupTile(**{
        name: more[name] for name in more if name != "persistent"}).shared_bytes > GPUS["90"].shared_bytes


def test_who_takes_what() -> None:
    func = case_of(128, 128, 128).func()
    assert registry.find(func, HOPPER).name == SPACE.name
    assert registry.find(case_of(64, 256, 16384).func(), HOPPER).name == "cuda.mma", "its sum is cut over idle blocks"
    for other in ("cuda:sm_80", "cuda:sm_90", "cuda:sm_80,sm_90a"):
        assert registry.find(func, resolve(other).tvm).name == "cuda.mma"
    with pytest.raises(InvalidDecision, match="need sm_90a, got sm_80"):
        scheduled(case_of(128, 128, 128), tile(), resolve("cuda:sm_80").tvm)
    for refused in (case_of(128, 128, 132), case_of(128, 132, 128, transposed=False), BY_NAME["mma_conv3x3"],
                    BY_NAME["mma_s8_rows_first"]):
        assert registry.find(refused.func(), HOPPER).name == "cuda.mma", "rows must be multiples of 16 bytes apart"
    with pytest.raises(InvalidDecision, match="at most 128 sums, got 256"):
        scheduled(case_of(256, 256, 256), tile(block_m=256, block_n=256, consumers=2))


def test_operands_are_read_from_the_function() -> None:
    batched = product_of(BY_NAME["wgmma_bf16_batched"].func())
    assert batched is not None
    assert (batched.a.sizes, batched.a.strides) == ((72, 65, 2), (144, 144 * 65))
    assert (batched.b.sizes, batched.b.strides) == ((64, 72, 2), (128, 128 * 72)) and batched.b.across


@needs_gxx
@pytest.mark.parametrize(("dtype", "transposed", "knobs"), [
    ("float16", True, {"block_m": 128, "consumers": 2}), ("bfloat16", False, {"block_n": 128, "block_k": 128}),
])
def test_products_and_stores_meet_no_bank_twice(dtype: str, transposed: bool, knobs: dict[str, int]) -> None:
    case = case_of(128, 128, 256, dtype, transposed)
    error, costs = emulate(case, scheduled(case, tile(**knobs)), HOPPER)
    assert error <= 1e-6, "the products are exact, and the sums those of float32"
    products = [cost for cost in costs if cost.what.startswith("wgmma")]
    ends = [cost for cost in costs if cost not in products]
    assert len(products) >= 2 and ends and {cost.bytes for cost in ends} == {8, 16}
    assert all(cost.taken == cost.least for cost in costs), costs


@needs_gxx
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize(("what", "boxed"), [("gelu", 1), ("cast", 1), ("gelu", 0), ("residual", 0)])
def test_results_of_16_bits_leave_in_boxes_or_16_bytes_at_a_time(dtype: str, what: str, boxed: int) -> None:
    """Of several tiles a block, the last of which the result's edges cut."""
    case = epilogue_case(SPACE.name, what, (200, 136, 72), dtype)
    func = scheduled(case, tile(boxed=boxed, persistent=1, block_n=128), SMALL)
    error, costs = emulate(case, func, HOPPER)
    assert error <= {"float16": 1e-3, "bfloat16": 1e-2}[dtype], "one rounding to 16 bits, of residuals two"
    assert all(cost.taken == cost.least for cost in costs if cost.shared), costs
    stores = {cost.what: cost.bytes for cost in costs if cost.what in ("stmatrix", "st.global")}
    assert stores == ({"stmatrix": 16} if boxed else {"st.global": 16})


@needs_nvcc
@pytest.mark.parametrize(
    ("what", "boxed", "rows", "columns"),
    [("gelu", 1, 128, 256), ("gelu", 1, 256, 128), ("gelu", 1, 128, 192), ("residual", 0, 128, 256)])
def test_large_tiles_with_epilogues_spill_nothing(what: str, boxed: int, rows: int, columns: int) -> None:
    case = epilogue_case(SPACE.name, what, (2048, 2048, 1024), "float16")
    decisions = tile(block_m=rows, block_n=columns, consumers=2, stages=4, boxed=boxed, persistent=1)
    kernel = compiled(scheduled(case, decisions))
    assert kernel.stack_bytes == kernel.spilled_bytes == 0 and not kernel.serialised and kernel.blocks
    assert kernel.registers * 3 >= FEW_REGISTERS + 2 * MANY_REGISTERS
    if find_nvdisasm():
        assert kernel.count("USETMAXREG") and not kernel.count("LDL") and not kernel.count("STL")
        assert kernel.count("STG") == kernel.count("STG.E.128") and bool(kernel.count("UTMASTG")) == bool(boxed)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_no_seed_of_a_product_with_gelu_spills(transposed: bool) -> None:
    func = epilogue_case(SPACE.name, "gelu", (4096, 4096, 4096), "float16", transposed=transposed).func()
    seeds = [dict(decisions) for decisions in SPACE.seeds(func, HOPPER)]
    assert any(seed["block_m"] == 256 for seed in seeds), "two parts of a warpgroup, results of both in registers"
    for decisions in seeds:
        kernel = compiled(schedule_with(SPACE, func, HOPPER, decisions).mod["main"])
        assert kernel.stack_bytes == kernel.spilled_bytes == 0 and not kernel.serialised and kernel.blocks, decisions
        if find_nvdisasm():
            assert kernel.count("HGMMA") and not kernel.count("LDL") and not kernel.count("STL"), decisions


def test_who_may_store_boxes() -> None:
    """Results of 16 bits whose rows lie multiples of 16 bytes apart, and nothing as large to be read."""
    assert {k.name: k.values for k in SPACE.knobs(case_of(128, 128, 128).func(), HOPPER)}["boxed"] == (0,)
    with pytest.raises(InvalidDecision, match="knob boxed must be one of"):
        scheduled(case_of(128, 128, 128), tile(boxed=1))
    for what, n, boxes in (("cast", 128, True), ("gelu", 136, True), ("residual", 128, False), ("cast", 132, False)):
        # by columns, so that the operand's rows are aligned whatever the result's are
        case = epilogue_case(SPACE.name, what, (128, n, 128), "float16", transposed=True)
        found = product_of(case.func())
        assert found is not None and (found.results is not None) == boxes, (what, n)


#: m, n, k: prime, one more and one less than a tile; k is a multiple of 8, and n where operands run along it
ODD = [(67, 71, 72), (65, 129, 104), (63 + 64, 127, 96), (64, 64, 64), (128, 65, 136), (70, 97, 88), (200, 68, 200),
       (97, 131, 192), (66, 66, 1000), (101, 103, 328)]


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes_are_exact_enough(dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for transposed in (True, False):
        case = case_of(m, n if transposed else n // 8 * 8, k, dtype, transposed)
        _, func = next(candidates(case, sum(shape), SMALL))
        assert emulate(case, func, HOPPER)[0] <= LIMITS[dtype]


@needs_gxx
def test_each_wait_and_barrier_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is left out, the results are wrong or the kernel does not end: blocks of two tiles, five steps."""
    case = case_of(128, 128, 320)
    func = scheduled(case, tile(persistent=1), SMALL)
    assert check_orders(monkeypatch, case, func, HOPPER, ORDERS) == 14


@needs_gxx
def test_each_wait_of_results_in_boxes_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of two tiles, each of three boxes a warp: the first box of a tile takes the last one's other place."""
    case = epilogue_case(SPACE.name, "cast", (128, 192, 320), "float16")
    func = scheduled(case, tile(persistent=1, block_n=192, boxed=1), tvm.target.Target({
        **HOPPER.export(), "model": "sms=1"}))
    assert check_orders(monkeypatch, case, func, HOPPER, ORDERS) == 24


@needs_gxx
def test_each_wait_of_clusters_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks, each of two tiles and four steps: they give stages back to each other, and wait at the end."""
    case = case_of(256, 64, 256)
    func = scheduled(case, tile(persistent=1, cluster=2), SMALL)
    assert check_orders(monkeypatch, case, func, HOPPER, ORDERS) == 15


@needs_gxx
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(200, 136, 264), (130, 72, 200)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("knobs", [{"block_k": 128}, {"block_n": 128, "boxed": 1}, {"block_m": 128, "consumers": 2}])
def test_clusters_of_odd_shapes_are_exact_enough(
    shape: tuple[int, int, int], transposed: bool, knobs: dict[str, int],
) -> None:
    """The last cluster along m has a block without rows, or a part of one."""
    case = epilogue_case(SPACE.name, "gelu", shape, "float16", transposed=transposed)
    func = scheduled(case, tile(persistent=1, cluster=2, **knobs), SMALL)
    error, costs = emulate(case, func, HOPPER)
    assert error <= LIMITS["float16"] and all(cost.taken == cost.least for cost in costs if cost.shared)


def test_a_kernel_of_clusters_is_compiled_for_such() -> None:
    for cluster in (1, 2):
        source = cuda_emulator.cuda_source(scheduled(case_of(256, 128, 128), tile(cluster=cluster)), HOPPER)
        assert source.count("__cluster_dims__(2, 1, 1)") == cluster - 1
    with pytest.raises(InvalidDecision, match="a cluster must fit the GPU, got 1 multiprocessors"):
        scheduled(case_of(256, 128, 128), tile(cluster=2), tvm.target.Target({**HOPPER.export(), "model": "sms=1"}))


def test_a_trace_that_marks_what_is_no_longer_the_product_is_refused() -> None:
    """The kernel would be made from other blocks than the function has."""
    func = BY_NAME["wgmma_f16_gelu"].func()
    sch = schedule_with(SPACE, func, HOPPER, tile())
    assert not refusal(func, trace_json(sch), HOPPER)
    instructions, decisions = json.loads(trace_json(sch))
    (mark,) = [step for step in instructions if step[0] == "Annotate"]
    for wrong in ([64, 64, 32, 1, 3, 1, 0, 1, 4], [64, 64, 64, 2, 3, 1, 0, 1, 4], [64, 64, 64, 1, 3, 1, 2, 1, 4],
                  [64, 64, 64, 1, 3, 1, 0, 1, 0], [64, 64, 64, 1, 3, 1, 0, 2, 3], [64, 64, 64, 1, 3, 1, 0, 1]):
        mark[1][1] = wrong
        assert "a value as search spaces give it" in refusal(func, json.dumps([instructions, decisions]), HOPPER)
    sch.set_scope(sch.get_sblock("product"), 0, "local")
    assert "blocks are as they were" in refusal(func, trace_json(sch), HOPPER)
