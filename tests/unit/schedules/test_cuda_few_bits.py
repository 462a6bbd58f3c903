"""Products with packed weights on GPUs: results in the emulator, the machine code, and what is chosen."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import tvm_ffi
from harness import check_orders, emulate
from tvm import tirx

from mlc.codegen.cuda import legal_names
from mlc.codegen.inspection import Kernel, find_nvdisasm, kernels
from mlc.graph.kernels.few_bits import pack_integers, pack_scales
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cuda_cases import CASES
from mlc.testing.cuda_few_bits import PackedProduct
from schedules import registry
from schedules.cuda.few_bits import FewBitsProduct
from schedules.cuda.few_bits_form import MARK, few_bits_of
from schedules.cuda.few_bits_weights import FewBitsWeights
from schedules.cuda.packed import Packing
from schedules.space import Decisions, InvalidDecision, best_seed, first_seed, schedule_with
from schedules.trace import replay, trace_json

SPACE, WEIGHTS = FewBitsProduct(), FewBitsWeights()
BY_NAME = {case.name: case for case in CASES}
AMPERE, HOPPER = (resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a"))

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or find_nvdisasm() is None, reason="needs nvcc and nvdisasm")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def tile(rows: int, columns: int, beside: int, together: int, parts: int, ahead: int) -> Decisions:
    return {"rows": rows, "columns": columns, "beside": beside, "together": together, "parts": parts, "ahead": ahead}


def code(func: tirx.PrimFunc, target: object) -> Kernel:
    (kernel,) = kernels(cuda_emulator.cuda_source(func, target), str(target.attrs["arch"]))
    return kernel


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("depth", "block"), [(77, 1000), (100, 16), (130, 32), (288, 48), (256, 256)])
def test_every_number_and_scale_has_one_place(bits: int, depth: int, block: int) -> None:
    packing, half = Packing(bits, block, 37, depth), 1 << (bits - 1)
    rng = np.random.default_rng(0)
    integers = rng.integers(-half, half, (depth, 37)).astype(np.int8)
    column, k = np.meshgrid(np.arange(37), np.arange(depth))
    at, bit = packing.place(column, k)
    words = pack_integers(integers, packing)
    assert np.array_equal((words[tuple(at)] >> bit.astype(np.uint32) & (2 * half - 1)).astype(int) - half, integers)
    assert len(set(zip(*(each.ravel() for each in np.broadcast_arrays(*at, bit)), strict=True))) == integers.size
    assert words.nbytes <= packing.tiles[0] * 16 * packing.tiles[1] * packing.tile_depth * bits // 8
    scales = rng.standard_normal((packing.blocks, 37))
    found = pack_scales(scales, packing)[tuple(packing.scale_place(column, k // block))]
    assert np.array_equal(found, np.repeat(scales, block, 0)[:depth])


def test_blocks_that_instructions_would_cut_are_refused() -> None:
    assert "multiples of 16" in str(Packing(4, 24, 64, 256).misfit)
    assert Packing(4, 24, 64, 24).misfit is None


#: odd sizes, blocks that do not divide the depth, and tiles that do not divide either
ODD = [
    (PackedProduct(1, 200, 50), tile(8, 1, 4, 1, 1, 4)),
    (PackedProduct(1, 4096, 24, 4, 128, "bfloat16", "whole", "bfloat16"), tile(8, 1, 2, 4, 4, 4)),
    (PackedProduct(2, 333, 70, 2, 64, "float16", "fractional"), tile(8, 2, 1, 2, 1, 1)),
    (PackedProduct(7, 520, 100, 8, 32, "float16", "whole", epilogue=True), tile(8, 2, 2, 4, 2, 2)),
    (PackedProduct(8, 96, 130, 4, 16), tile(8, 4, 2, 1, 1, 2)),
    (PackedProduct(13, 1000, 40, 4, 32, "bfloat16", scales="float32"), tile(16, 1, 1, 2, 3, 2)),
    (PackedProduct(16, 640, 48, 2, 32, "bfloat16", "whole", "bfloat16"), tile(8, 1, 1, 2, 1, 2)),
    (PackedProduct(33, 260, 36, 4, 96, "float16", "whole", epilogue=True), tile(32, 1, 2, 1, 2, 2)),
    (PackedProduct(50, 192, 64, 8, 16, "float16"), tile(64, 2, 1, 1, 1, 1)),
    (PackedProduct(70, 512, 17, 8, 192, "bfloat16", "whole"), tile(32, 2, 1, 2, 2, 4)),
    (PackedProduct(1, 200, 50, 4, 32, "float32", "whole", "float32"), tile(8, 1, 2, 2, 1, 2)),
    (PackedProduct(3, 77, 20, 2, 1000, "float32"), tile(8, 2, 1, 1, 1, 1)),
    (PackedProduct(11, 320, 33, 8, 16, "float32", "fractional", "float32", True), tile(8, 1, 2, 2, 2, 2)),
    (PackedProduct(16, 100, 96, 4, 64, "float32", scales="float32"), tile(8, 2, 2, 1, 1, 1)),
]
#: those that are tried each time
_QUICK = (1, 3, 7, 12)


@needs_gxx
@pytest.mark.parametrize(("product", "decisions"), [
    pytest.param(*each, id=f"{each[0]}-{'-'.join(map(str, each[1].values()))}",
                 marks=() if number in _QUICK else pytest.mark.slow) for number, each in enumerate(ODD)])
def test_odd_sizes_are_right(product: PackedProduct, decisions: Decisions) -> None:
    case = product.case()
    scheduled = schedule_with(SPACE, case.func(), HOPPER, decisions).mod["main"]
    assert len(list(cuda_emulator.launches(scheduled))) == 1
    error, costs = emulate(case, scheduled, HOPPER)
    assert error <= case.rtol
    words = [cost for cost in costs if not cost.shared and cost.what == "uint4" and cost.taken == cost.least]
    assert sum(cost.taken for cost in words) * 32 >= product.packing.words_shape[0] * 512, "16 bytes a lane"
    shared = [cost for cost in costs if cost.shared]
    assert 0 < sum(cost.taken for cost in shared) <= 1.1 * sum(cost.least for cost in shared), shared


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_products_are_right(seed: int) -> None:
    """With random tiles, too."""
    rng = random.Random(seed)
    dtype = rng.choice(("float16", "bfloat16", "float32"))
    product = PackedProduct(
        rng.choice((1, 1, 2, 5, 8, 9, 16, 30, 65)), rng.randint(20, 900), rng.randint(1, 150), rng.choice((2, 4, 8)),
        rng.choice((16, 32, 48, 64, 128, 160, 256, 2000)), dtype, rng.choice(("", "whole", "fractional")),
        rng.choice((dtype, "float32")), rng.random() < 0.5)
    case, tried = product.case(), 0
    knobs = SPACE.knobs(case.func(), HOPPER)
    while tried < 2:
        try:
            sch = schedule_with(SPACE, case.func(), HOPPER, {knob.name: rng.choice(knob.values) for knob in knobs})
        except InvalidDecision:
            continue
        error, _ = emulate(case, sch.mod["main"], HOPPER)
        # fractional zero points are rounded with the weights, as the model's own are
        assert error <= case.rtol, product
        tried += 1


@needs_gxx
@pytest.mark.parametrize("product", [
    PackedProduct(1, 200, 50), PackedProduct(1, 77, 20, 2, 16, "float32", "fractional", "float32"),
    pytest.param(PackedProduct(1, 264, 33, 8, 96, "bfloat16", "whole"), marks=pytest.mark.slow),
], ids=str)
def test_weights_are_unpacked(product: PackedProduct) -> None:
    case = product.weights_case()
    assert registry.find(case.func(), HOPPER).name == WEIGHTS.name
    error, _ = emulate(case, best_seed(WEIGHTS, case.func(), HOPPER).mod["main"], HOPPER)
    assert error <= case.rtol


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("decisions", [tile(8, 1, 1, 4, 1, 1), tile(8, 1, 1, 2, 2, 1)], ids=["threads", "blocks"])
def test_each_barrier_is_needed(monkeypatch: pytest.MonkeyPatch, decisions: Decisions) -> None:
    case = PackedProduct(3, 256, 40).case()
    scheduled = schedule_with(SPACE, case.func(), HOPPER, decisions).mod["main"]
    assert check_orders(monkeypatch, case, legal_names(scheduled), HOPPER) == 1


#: what decoding and prefilling multiply; those of every type, and the widest of each kernel
LARGE = [
    PackedProduct(1, 4096, 4096), PackedProduct(16, 4096, 11008, 4, 128, "bfloat16", "whole", "bfloat16"),
    PackedProduct(1, 4096, 4096, 4, 32, "float32", scales="float32"),
    PackedProduct(64, 4096, 4096, 4, 64), PackedProduct(8, 4096, 4096, 8, 4096, "float16"),
    PackedProduct(2, 11008, 4096, 2, 64, "float16", "whole"), PackedProduct(40, 4096, 4096, 2, 16, "bfloat16"),
    PackedProduct(16, 4096, 4096, 8, 32, "float32", "whole", "float32"),
]


@needs_nvcc
@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("product", [pytest.param(each, marks=() if number < 2 else pytest.mark.slow)
                                     for number, each in enumerate(LARGE)], ids=str)
def test_words_are_fetched_as_16_bytes_and_nothing_spills(product: PackedProduct, target: object) -> None:
    func = product.case().func()
    assert registry.find(func, target).name == SPACE.name
    for count, decisions in enumerate(SPACE.seeds(func, target)):
        kernel = code(schedule_with(SPACE, func, target, decisions).mod["main"], target)
        assert kernel.stack_bytes == kernel.spilled_bytes == 0, decisions
        assert kernel.count("LDL") == kernel.count("STL") == 0
        assert kernel.count("LDG.E.128") >= decisions["ahead"] * decisions["columns"]
        assert bool(kernel.count("HMMA")) == (product.dtype != "float32")
        assert kernel.count("I2F") == 0, "conversions take four times as long"
        if count == 1:
            break


@needs_nvcc
@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_weights_are_stored_as_16_bytes(target: object) -> None:
    func = PackedProduct(1, 4096, 4096, zeros="whole").weights_case().func()
    sch, decisions = first_seed(WEIGHTS, func, target)
    kernel = code(sch.mod["main"], target)
    assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") == decisions["tiles"]
    assert kernel.count("STG") == kernel.count("STG.E.128") == 4 * decisions["tiles"]


def test_seeds_fill_the_gpu() -> None:
    """Nearly half of the multiprocessors, and as many bytes under way as come in 0.6 microseconds at 3.35 TB/s."""
    for m, k, n in ((1, 4096, 4096), (1, 4096, 11008), (16, 4096, 4096), (1, 14336, 4096), (1, 4096, 1024)):
        func = PackedProduct(m, k, n).case().func()
        best = next(iter(SPACE.seeds(func, HOPPER)))
        groups = -(-n // (16 * best["columns"] * best["beside"]))
        blocks = groups * best["parts"] * -(-m // best["rows"])
        under_way = blocks * best["beside"] * best["together"] * best["columns"] * best["ahead"] * 512
        assert blocks >= 64 and under_way >= min(2e6, k * n // 2), (best, blocks)
        assert SPACE.price(func, HOPPER, best) <= 2.5 * (k * n / 2) / 3.35e12 + 4e-6


def test_tiles_that_do_not_fit_are_refused() -> None:
    func = PackedProduct(1, 256, 64).case().func()
    schedule_with(SPACE, func, HOPPER, tile(8, 1, 1, 1, 1, 2))
    for decisions, reason in ((tile(8, 1, 4, 16, 1, 1), "at most 1024 threads"),
                              (tile(8, 4, 2, 1, 1, 1), "no more tiles"), (tile(8, 1, 1, 4, 4, 1), "a tile along k"),
                              (tile(16, 1, 1, 1, 1, 1), "must be one of")):
        with pytest.raises(InvalidDecision, match=reason):
            schedule_with(SPACE, func, HOPPER, decisions)


def test_many_rows_and_other_functions_are_left_alone() -> None:
    assert not SPACE.matches(PackedProduct(300, 256, 64).case().func(), HOPPER)
    for name in ("dense_odd", "mma_f16_odd", "vector_matrix"):
        assert not SPACE.matches(BY_NAME[name].func(), HOPPER)
        assert not WEIGHTS.matches(BY_NAME[name].func(), HOPPER)


def test_marks_elsewhere_are_refused() -> None:
    """A trace may not mark what is no product with packed weights, nor change its blocks."""
    packed, other = PackedProduct(1, 256, 64).case().func(), BY_NAME["dense_odd"].func()
    trace = trace_json(best_seed(SPACE, packed, HOPPER))
    assert MARK in trace and tvm_ffi.structural_equal(
        replay(packed, trace, HOPPER).mod, best_seed(SPACE, packed, HOPPER).mod)
    with pytest.raises(InvalidDecision):
        replay(other, trace, HOPPER)
    assert few_bits_of(other) is None
