"""Products on tensor cores: what is in the machine code, and what a kernel takes of a multiprocessor."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator

import pytest
import tvm
from mma_products import (
    AMPERE,
    BY_NAME,
    HOPPER,
    OPCODES,
    SPACE,
    compiled,
    decisions_of,
    function,
    function_of,
    kind_of,
    needs_nvcc,
)
from tvm import tirx

from mlc.codegen.inspection import DynamicShared, Kernel, find_nvdisasm
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import epilogue_case, product_case
from mlc.testing.cuda_images import Image
from schedules.cuda.common import CudaSpace
from schedules.cuda.warp_tile import WarpTile
from schedules.cuda.wgmma import WarpgroupGemm
from schedules.machine import GPUS
from schedules.space import InvalidDecision, first_seed, schedule_with


def candidates(func: tirx.PrimFunc, target: tvm.target.Target, seed: int) -> Iterator[tirx.PrimFunc]:
    """Random decisions that can be carried out."""
    rng, knobs = random.Random(seed), SPACE.knobs(func, target)
    while True:
        try:
            yield schedule_with(SPACE, func, target, {k.name: rng.choice(k.values) for k in knobs}).mod["main"]
        except InvalidDecision:
            continue


def check_promises(found: list[Kernel], dtype: str) -> None:
    """Of the one kernel of a product, whose blocks load into registers only what is added up of a cut sum's parts."""
    (kernel,) = found
    assert kernel.stack_bytes == kernel.spilled_bytes == 0
    if find_nvdisasm():
        assert kernel.count("LDSM") and kernel.count(OPCODES[dtype]), kernel.instructions
        assert kernel.count("LDGSTS.E.BYPASS.128") and kernel.count("LDGDEPBAR")
        assert bool(kernel.count("LDG")) == bool(kernel.count("ATOMG")), kernel.instructions
        assert not kernel.count("LDL") and not kernel.count("STL")


@needs_nvcc
@pytest.mark.parametrize("dtype", OPCODES)
def test_a_seed_holds_its_instructions_and_spills_nothing(dtype: str) -> None:
    for target in (AMPERE, HOPPER):
        func = function(1024, 1024, 1024, dtype)
        sch, _ = first_seed(SPACE, func, target)
        check_promises(compiled(sch.mod["main"], target), dtype)


@needs_nvcc
@pytest.mark.parametrize("dtype", OPCODES)
def test_a_random_candidate_holds_its_instructions(dtype: str) -> None:
    check_promises(compiled(next(candidates(function(512, 512, 2048, dtype), AMPERE, 1)), AMPERE), dtype)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_random_candidates_hold_their_instructions(dtype: str, arch: str) -> None:
    """With those of the other types and architectures, 504 candidates."""
    target = resolve(f"cuda:{arch}").tvm
    drawn = candidates(function(512, 512, 2048, dtype), target, 0)
    for _ in range(63):
        check_promises(compiled(next(drawn), target), dtype)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (128, 768, 3072), (2048, 1024, 512), (16, 4096, 4096)])
def test_no_seed_spills(dtype: str, shape: tuple[int, int, int]) -> None:
    for target in (AMPERE, HOPPER):
        func = function(*shape, dtype)
        for decisions in SPACE.seeds(func, target):
            for kernel in compiled(schedule_with(SPACE, func, target, decisions).mod["main"], target):
                assert kernel.stack_bytes == kernel.spilled_bytes == 0, decisions


@pytest.mark.parametrize("dtype", OPCODES)
def test_a_tile_asks_for_the_memory_that_it_is_reckoned_with(dtype: str) -> None:
    """A kernel that asked for more than a block may have would not start."""
    func, kind = function(512, 512, 2048, dtype), kind_of(dtype)
    rng, knobs, compared = random.Random(3), SPACE.knobs(func, AMPERE), 0
    while compared < 2:
        decisions = {k.name: rng.choice(k.values) for k in knobs}
        try:
            scheduled = schedule_with(SPACE, func, AMPERE, decisions).mod["main"]
        except InvalidDecision:
            continue
        shared = DynamicShared()
        cuda_emulator.cuda_source(scheduled, AMPERE, [shared])
        wanted = WarpTile(**decisions).shared_bytes(kind)
        assert list(shared.bytes.values()) == [wanted] and wanted <= GPUS["80"].shared_bytes
        compared += 1


def test_sums_of_the_operands_type_take_the_place_of_one_ring() -> None:
    """Of tf32, whose sums are float32 too: the other ring lies beside them."""
    func, shared = function(512, 512, 2048, "tf32"), DynamicShared()
    large = decisions_of(block_m=128, block_n=256, block_k=128, warp_m=64, warp_n=64)
    cuda_emulator.cuda_source(schedule_with(SPACE, func, HOPPER, large).mod["main"], HOPPER, [shared])
    assert list(shared.bytes.values()) == [172032]
    with pytest.raises(InvalidDecision, match="the tiles must fit 166912 bytes, got 172032"):
        schedule_with(SPACE, func, AMPERE, large)


def test_a_block_that_is_alone_may_use_all_registers() -> None:
    """CUDA's compiler would keep to 128 for a second one, and spill."""
    few = product_case("few", (400, 2048), (2048, 48), "float16", "float32")
    many = product_case("many", (16384, 2048), (2048, 48), "float16", "float32")
    large = decisions_of(block_n=256, warp_n=64, stages=5, split_k=4, panel=4)

    def source(case: Case, decisions: dict[str, int], target: tvm.target.Target) -> str:
        return cuda_emulator.cuda_source(schedule_with(SPACE, case.func(), target, decisions).mod["main"], target)

    assert "__launch_bounds__(256, 1) " in source(many, large, AMPERE)
    assert "__launch_bounds__(256) " in source(many, large, HOPPER), "there is room for two"
    assert "__launch_bounds__(256) " in source(many, {**large, "stages": 2}, AMPERE)
    assert "__launch_bounds__(256, 1) " in source(few, large, HOPPER), "there is room for two, but none comes"
    small = decisions_of(block_m=64, block_n=64, block_k=128, warp_m=32, warp_n=32, stages=4)
    assert "__launch_bounds__(128, 2) " in source(many, small, AMPERE), "shared memory has no room for a third"
    assert "__launch_bounds__(128, 2) " in source(many, {**small, "stages": 2}, AMPERE), "nor for a sixth"
    assert "__launch_bounds__(128) " in source(many, {**small, "block_k": 64, "stages": 2}, AMPERE)
    if shutil.which("nvcc"):
        (kernel,) = compiled(schedule_with(SPACE, few.func(), AMPERE, large).mod["main"], AMPERE)
        assert kernel.registers > 128 and kernel.stack_bytes == kernel.spilled_bytes == 0


@needs_nvcc
def test_blocks_that_shared_memory_has_room_for_share_the_registers() -> None:
    """Three of 128 threads: CUDA's compiler would keep to 128 for a fourth, and spill; of larger tiles two have what
    they need, and a third would have them spill."""
    narrow = decisions_of(block_m=128, stages=4, warp_n=64, panel=8)
    wide = {**narrow, "block_n": 128, "warp_m": 64}
    for target, seed, size in ((AMPERE, narrow, (2048, 1024, 512)), (HOPPER, wide, (4096, 4096, 4096))):
        (kernel,) = compiled(schedule_with(SPACE, function(*size), target, seed).mod["main"], target)
        assert kernel.registers > 128 and kernel.stack_bytes == kernel.spilled_bytes == 0


@needs_nvcc
@pytest.mark.parametrize("filters", [24, 40])
def test_a_seed_of_a_small_image_spills_nothing(filters: int) -> None:
    """CUDA's compiler would keep to 72 registers for seven blocks of 128 threads, of which there are two in all."""
    sch, _ = first_seed(SPACE, Image((1, 9, 11, 3), filters, pad=1).case("first layer").func(), AMPERE)
    (kernel,) = compiled(sch.mod["main"], AMPERE)
    assert kernel.stack_bytes == kernel.spilled_bytes == 0
    if find_nvdisasm():
        assert not kernel.count("LDL") and not kernel.count("STL")


@needs_nvcc
@pytest.mark.parametrize("what", ["gelu", "residual"])
def test_no_compiler_takes_a_store_of_16_bytes_apart(what: str) -> None:
    case = epilogue_case(SPACE.name, what, (70, 136, 128), "float16")
    (kernel,) = compiled(function_of(case, decisions_of(block_n=128, warp_n=64)), AMPERE)
    assert kernel.stack_bytes == kernel.spilled_bytes == 0
    if find_nvdisasm():
        assert kernel.count("STG") == kernel.count("STG.E.128") > 0


@needs_nvcc
@pytest.mark.parametrize(("space", "dtype", "target"), [
    (SPACE, "tf32", AMPERE), (SPACE, "float16", AMPERE), (WarpgroupGemm(), "bfloat16", HOPPER)],
    ids=["mma-tf32", "mma-float16", "wgmma-bfloat16"])
def test_what_is_added_in_float32_is_loaded_16_bytes_at_a_time(
    space: CudaSpace, dtype: str, target: tvm.target.Target
) -> None:
    case = epilogue_case(space.name, "wide residual", (70, 136, 128), dtype)
    sch, _ = first_seed(space, case.func(), target)
    (kernel,) = compiled(sch.mod["main"], target)
    assert kernel.stack_bytes == kernel.spilled_bytes == 0
    if find_nvdisasm():
        assert kernel.count("LDG") == kernel.count("LDG.E.128") > 0
        assert kernel.count("STG") == kernel.count("STG.E.128") > 0


@needs_nvcc
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [4, 8, 15])
def test_few_rows_spill_nothing(rows: int, dtype: str) -> None:
    for target in (AMPERE, HOPPER):
        sch, _ = first_seed(SPACE, function(rows, 4096, 4096, dtype), target)
        check_promises(compiled(sch.mod["main"], target), dtype)


@needs_nvcc
@pytest.mark.parametrize("split_k", [1, 4])
def test_a_convolution_copies_whole_vectors(split_k: int) -> None:
    """Of an image with a border and of a last tile that both cut, in one part or several."""
    case = Image((1, 14, 14, 128), 128, pad=1).case("image")
    (kernel,) = compiled(function_of(case, decisions_of(split_k=split_k)), AMPERE)
    assert kernel.stack_bytes == kernel.spilled_bytes == 0
    if find_nvdisasm():
        assert kernel.count("HMMA.16816.F32") and kernel.count("LDGSTS") == kernel.count("LDGSTS.E.BYPASS.128") > 0
        assert kernel.count("LDG") <= 16 * split_k, "the bias and the parts of a cut sum, no elements of an image"


@needs_nvcc
@pytest.mark.parametrize("stages", [2, 4])
def test_a_plain_convolutions_weights_are_copied_in_whole_vectors(stages: int) -> None:
    """TVM would divide the number of each lane, in vectors of 64-bit integers that CUDA has no types for."""
    func = function_of(BY_NAME["mma_conv3x3_deep"], decisions_of(stages=stages))
    (kernel,) = compiled(func, AMPERE)
    if find_nvdisasm():
        assert kernel.count("HMMA.16816.F32") and kernel.count("LDGSTS") == kernel.count("LDGSTS.E.BYPASS.128") > 0


@needs_nvcc
@pytest.mark.slow
def test_no_seed_of_a_plain_convolution_spills() -> None:
    """Addresses of single elements of an image take registers too."""
    from tvm import te, topi

    x, w = te.placeholder((8, 64, 56, 56), "float16", "x"), te.placeholder((64, 64, 3, 3), "float16", "w")
    func = te.create_prim_func([x, w, topi.nn.conv2d_nchw(x, w, 1, 1, 1, out_dtype="float32")])
    for decisions in SPACE.seeds(func, AMPERE):
        (kernel,) = compiled(schedule_with(SPACE, func, AMPERE, decisions).mod["main"], AMPERE)
        assert kernel.stack_bytes == kernel.spilled_bytes == 0, decisions
