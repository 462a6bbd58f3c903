"""Products on tensor cores: what is in the machine code, what the emulator computes and counts, and what it finds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm_ffi
from harness import check_orders, emulate, refusal
from mma_products import AMPERE, HOPPER, OPCODES, SPACE, SUMS, decisions_of, function, function_of, kind_of, needs_gxx
from tvm import te, topi

from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import epilogue_case, product_case
from mlc.testing.cuda_images import Image
from mlc.testing.cuda_twin import run, twin
from schedules import registry
from schedules.cuda.contraction import with_tf32
from schedules.cuda.gemm import TiledGemm
from schedules.cuda.warp_tile import WarpTile
from schedules.intrin import mma
from schedules.machine import GPUS
from schedules.space import InvalidDecision, first_seed, schedule_with
from schedules.trace import trace_json
from tests.performance.outside_model import SHAPES


def test_seeds_fill_the_gpu() -> None:
    """Large products have large tiles that two blocks of a multiprocessor, or three stages, keep busy; where a grid of
    such would leave most of the GPU idle, tiles are small or the sum is cut."""
    _, large = first_seed(SPACE, function(4096, 4096, 4096), HOPPER)
    assert large["block_m"] * large["block_n"] >= 128 * 128 and large["split_k"] == 1 and large["stages"] >= 3
    _, small = first_seed(SPACE, function(64, 1024, 4096), HOPPER)
    blocks = (1024 // small["block_n"]) * small["split_k"]
    assert blocks >= 64


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_seeds_keep_a_multiprocessor_busy(dtype: str, arch: str) -> None:
    """By reckoned registers, of 50 products: the first seed has room for a second block, or 64 sums a thread and three
    stages, and so do the others unless the grid has no second block for a multiprocessor."""
    target, gpu, kind = resolve(f"cuda:{arch}").tvm, GPUS[arch[3:5]], kind_of(dtype)
    for m, n, k in SHAPES:
        for place, decisions in enumerate(SPACE.seeds(function(m, n, k, dtype), target)):
            tile = WarpTile(**decisions)
            twice = gpu.resident(tile.threads, tile.registers, tile.shared_bytes(kind)) >= 2
            many = tile.warp_m * tile.warp_n // mma.WARP >= 64 and tile.stages >= 3
            blocks = -(-m // tile.block_m) * -(-n // tile.block_n) * tile.split_k
            alone = place > 0 and blocks <= gpu.multiprocessors
            assert twice or many or alone, (m, n, k, decisions)


def test_who_takes_what() -> None:
    func = function(128, 128, 128)
    assert registry.find(func, AMPERE).name == registry.find(func, resolve("cuda:sm_80,sm_90a").tvm).name == SPACE.name
    assert registry.find(func, resolve("cuda:sm_75").tvm).name == "cuda.gemm"
    with pytest.raises(InvalidDecision, match="need sm_80 or later, got sm_75"):
        schedule_with(SPACE, func, resolve("cuda:sm_75").tvm, next(iter(SPACE.seeds(func, AMPERE))))
    assert registry.find(function(1 << 16, 128, 1 << 15), AMPERE).name == "cuda.gemm", "its offsets need 64 bits"
    half_sums = product_case("product", (64, 64), (64, 64), "float16", "float16").func()
    assert registry.find(half_sums, AMPERE).name == "cuda.gemm", "tensor cores here add up in float32"


def test_a_trace_that_permutes_in_one_place_alone_is_refused() -> None:
    """It would fetch other elements than were copied."""
    func = function(64, 64, 128)
    sch = schedule_with(SPACE, func, AMPERE, decisions_of())
    instructions, decisions = json.loads(trace_json(sch))
    assert not refusal(func, json.dumps([instructions, decisions]), AMPERE)
    places = [i for i, step in enumerate(instructions) if step[0] == "Annotate" and step[2] == ["permuted_layout"]]
    assert len(places) == 4
    taken = dict(decisions)
    for place in places:
        left = [step for i, step in enumerate(instructions) if i != place]
        moved = [[i - (i > place), value] for i, value in taken.items()]
        assert "every access of a permuted buffer must permute it" in refusal(func, json.dumps([left, moved]), AMPERE)


@needs_gxx
@pytest.mark.parametrize(("dtype", "transposed", "knobs"), [
    ("float16", False, {"stages": 3}), ("float16", True, {"block_k": 128}), ("bfloat16", False, {"warp_m": 64}),
    ("int8", True, {"stages": 4}), ("tf32", True, {}), ("tf32", False, {"stages": 3}),
])
def test_a_main_loop_meets_no_bank_twice(dtype: str, transposed: bool, knobs: dict[str, int]) -> None:
    """Copies of 16 bytes, and in shared memory as many waves as bytes take; 128 bytes of a row of bytes."""
    depth = 512 if dtype == "int8" else 256
    columns = (128, depth) if transposed else (depth, 128)
    case = product_case("even", (64, depth), columns, dtype, SUMS[dtype], transposed)
    error, costs = emulate(case, function_of(
        case, decisions_of(**({"block_k": 128} if dtype in ("int8", "tf32") else {}) | knobs)))
    assert error <= case.rtol
    loop = [cost for cost in costs if cost.what.startswith(("cp.async", "ldmatrix"))]
    assert {cost.bytes for cost in loop} == {16} and len(loop) >= 6 - 2 * (dtype == "tf32" and not transposed)
    assert all(cost.taken == cost.least for cost in loop), loop
    ends = [cost for cost in costs if cost not in loop]
    assert ends and sum(cost.taken for cost in ends) <= 1.1 * sum(cost.least for cost in ends), ends


#: the last columns of a tile are no tile of their own, and what is added to the sums
EPILOGUES = [
    ((64, 128), "gelu"), ((70, 72), "residual"), ((70, 200), "gelu"), ((67, 52), "gelu"), ((35, 51), "residual"),
    ((33, 56), "cast"),
]


@needs_gxx
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("shape", "what"), EPILOGUES, ids=str)
@pytest.mark.parametrize("block_n", [64, 128])
def test_results_of_16_bits_are_stored_16_bytes_at_a_time(
    shape: tuple[int, int], what: str, dtype: str, block_n: int,
) -> None:
    """Where their rows lie so, and in no shape do lanes that are served together meet in a bank."""
    (m, n), decisions = shape, decisions_of(block_n=block_n, warp_n=64 if block_n > 64 else 32)
    case = epilogue_case(SPACE.name, what, (m, n, 64), dtype)
    error, costs = emulate(case, function_of(case, decisions))
    assert error <= {"float16": 1e-3, "bfloat16": 1e-2}[dtype], "one rounding to 16 bits, of residuals two"
    ends = [cost for cost in costs if not cost.what.startswith(("cp.async", "ldmatrix"))]
    assert all(cost.taken == cost.least for cost in ends if cost.shared), ends
    assert any(cost.what == "st.global" and cost.bytes == 16 for cost in ends) == (n % 8 == 0)


@pytest.mark.parametrize("split_k", [2, 4])
def test_cut_sums_add_up(split_k: int) -> None:
    case = product_case("cut", (64, 1100), (1100, 70), "float16", "float32")
    sch = schedule_with(SPACE, case.func(), AMPERE, decisions_of(split_k=split_k))
    inputs, outputs = case.arrays()
    assert case.error(inputs, run(twin(sch, case.func()), inputs, outputs)) <= case.rtol


#: m, n, k: prime, one more and one less than a tile, single columns beyond one
ODD = [(61, 67, 71), (65, 129, 97), (63, 127, 95), (17, 16, 64), (128, 65, 130), (70, 50, 66), (33, 200, 68),
       (97, 31, 192), (16, 16, 1000), (101, 103, 107)]


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPCODES)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes_are_exact_enough(dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for transposed in (False, True):
        case = product_case(f"{shape}", (m, k), (n, k) if transposed else (k, n), dtype, SUMS[dtype], transposed)
        error, _ = emulate(case, function_of(case, decisions_of(block_k=128 if dtype == "tf32" else 64)))
        assert error <= {"float16": 1e-3, "bfloat16": 3e-3, "int8": 0.0, "tf32": 1e-3}[dtype]


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", *(
    pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "tf32", "int8"))])
def test_each_wait_and_barrier_is_needed(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Whichever is left out, the results are wrong."""
    depth = 384 if dtype == "int8" else 160
    columns = (64, depth) if dtype == "int8" else (depth, 64)
    case = product_case("even", (64, depth), columns, dtype, SUMS[dtype], transposed=dtype == "int8")
    decisions = decisions_of(block_k=128 if dtype in ("tf32", "int8") else 64)
    assert check_orders(monkeypatch, case, function_of(case, decisions)) >= 5


def test_few_rows_are_for_tensor_cores_all_the_same() -> None:
    """Most of a tile is zeros then, but the price is that of the other operand's copies."""
    for target in (AMPERE, HOPPER):
        for dtype in ("float16", "bfloat16", "int8"):
            for m, n, name in ((3, 4096, "cuda.reduce"), (4, 4096, SPACE.name), (8, 768, SPACE.name),
                               (15, 64, SPACE.name), (4096, 8, SPACE.name), (8, 8, "cuda.gemm")):
                assert registry.find(function(m, n, 1024, dtype), target).name == name, (m, n)
        func = function(8, 4096, 4096)
        few, simt = (SPACE.price(func, target, next(iter(SPACE.seeds(func, target)))),
                     TiledGemm().price(func, target, next(iter(TiledGemm().seeds(func, target)))))
        assert few is not None and simt is not None and few < 0.7 * simt
    image = Image((1, 14, 14, 64), 8, pad=1).case("of few filters").func()
    assert registry.find(image, AMPERE).name == "cuda.conv"


@needs_gxx
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", [(4, 72, 136), (8, 40, 272), (15, 130, 96), (70, 5, 128)], ids=str)
def test_few_rows_are_right(sizes: tuple[int, int, int], dtype: str) -> None:
    m, n, k = sizes
    case = product_case("few", (m, k), (n, k), dtype, SUMS[dtype], transposed=True)
    sch, _ = first_seed(SPACE, case.func(), AMPERE)
    error, _ = emulate(case, sch.mod["main"])
    assert error <= {"float16": 1e-3, "bfloat16": 3e-3, "int8": 0.0}[dtype]


@needs_gxx
@pytest.mark.parametrize("columns", [8, 24])
def test_few_columns_of_16_bits_are_right(columns: int) -> None:
    """Fewer than a panel of sums has, which then lie in none."""
    case = epilogue_case(SPACE.name, "cast", (40, columns, 64), "float16")
    sch, _ = first_seed(SPACE, case.func(), AMPERE)
    error, _ = emulate(case, sch.mod["main"])
    assert error <= case.rtol


SHORT = [
    Image((1, 9, 11, 3), 24, pad=1).case("27 of a first layer"), Image((1, 8, 8, 16), 32, 1, dtype="tf32").case("tf32"),
    product_case("24", (40, 24), (24, 48), "float16", "float32"),
    product_case("bytes", (40, 20), (48, 20), "int8", "int32", transposed=True),
]


@needs_gxx
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_short_sums_are_filled_up_with_zeros(case: Case) -> None:
    """Where tensor cores are quicker all the same."""
    func = case.func()
    assert registry.find(func, AMPERE).name == SPACE.name
    sch, decisions = first_seed(SPACE, func, AMPERE)
    assert decisions["stages"] == 2 and emulate(case, sch.mod["main"])[0] <= case.rtol


def test_sums_that_would_be_zeros_but_for_an_eighth_are_not_for_tensor_cores() -> None:
    for depth, name in ((8, SPACE.name), (7, "cuda.gemm")):
        func = product_case("short", (64, depth), (depth, 64), "float16", "float32").func()
        assert registry.find(func, AMPERE).name == name


@pytest.mark.parametrize("side", "ab")
def test_fetches_of_single_elements_meet_no_bank_twice(side: str) -> None:
    """Of float32 that runs across ``k``, whose rows are eight words longer than a multiple of the banks."""
    fetches = np.indices((32, 4)).reshape(2, -1)
    rows, k = mma.point(side, *fetches)
    threads, elements = mma.place(mma.TENSOR_FLOAT, side, rows, k)
    np.testing.assert_array_equal([threads, elements], fetches)
    for block in (64, 128, 256):
        banks = ((block + 8) * k + rows).reshape(32, 4) % 32
        assert all(len(set(each)) == 32 for each in banks.T)


def test_float32_is_multiplied_as_tf32_only_where_it_may_be() -> None:
    exact = product_case("exact", (64, 64), (64, 64), "float32", "").func()
    assert registry.find(exact, AMPERE).name == "cuda.gemm"
    assert registry.find(with_tf32(exact), AMPERE).name == SPACE.name
    assert registry.find(with_tf32(exact), resolve("cuda:sm_75").tvm).name == "cuda.gemm"
    narrow = product_case("half", (64, 64), (64, 64), "float16", "float32").func()
    assert tvm_ffi.structural_equal(with_tf32(narrow), narrow)


@needs_gxx
def test_what_is_chosen_by_the_sum_itself_is_no_guard() -> None:
    """Of a leaky ReLU's results in float32: its condition depends on what is loaded, not on where that lies."""
    x, w, bias = (te.placeholder(shape, dtype, name) for name, shape, dtype in (
        ("x", (40, 64), "float16"), ("w", (64, 64), "float16"), ("bias", (64,), "float32")))
    total = topi.add(topi.nn.matmul(x, w, out_dtype="float32"), bias)
    func = te.create_prim_func([x, w, bias, topi.nn.leaky_relu(total, 0.25)])
    assert registry.find(func, AMPERE).name == SPACE.name
    rng = np.random.default_rng(6)
    given = [rng.standard_normal(shape).astype(dtype) for shape, dtype in (
        ((40, 64), "float16"), ((64, 64), "float16"), ((64,), "float32"))]
    (sch, _), found = first_seed(SPACE, func, AMPERE), np.zeros((40, 64), "float32")
    cuda_emulator.run(sch.mod["main"], AMPERE, given, [found])
    wanted = given[0].astype("float32") @ given[1].astype("float32") + given[2]
    np.testing.assert_allclose(found, np.where(wanted > 0, wanted, 0.25 * wanted), rtol=1e-3, atol=1e-3)
