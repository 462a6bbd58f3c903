"""Reductions of columns on GPUs: how wide what is fetched is, in the machine code and in the emulator, and results."""

from __future__ import annotations

import shutil

import pytest
from harness import check_orders, emulate

from mlc.codegen.cuda import legal_names
from mlc.codegen.inspection import find_nvdisasm, kernels
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES
from mlc.testing.cuda_memory import mean, pooled, row_times
from schedules import registry
from schedules.cuda.columns import Columns
from schedules.space import InvalidDecision, first_seed, schedule_with

SPACE = Columns()
BY_NAME = {case.name: case for case in CASES}
AMPERE, HOPPER = (resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a"))

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or find_nvdisasm() is None, reason="needs nvcc and nvdisasm")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


@needs_nvcc
@pytest.mark.parametrize("case", [
    row_times(2048, 1000, "float16"),  # ResNet-50's last product
    pytest.param(row_times(768, 768, "bfloat16", "bfloat16"), marks=pytest.mark.slow),
    pytest.param(row_times(4096, 4096, "float16", "float16"), marks=pytest.mark.slow),
    pytest.param(row_times(1024, 1000, "float32"), marks=pytest.mark.slow),
    pytest.param(row_times(768, 3072, "float16", rows=3), marks=pytest.mark.slow),
    pooled((112, 112, 64), 3, "float32"),
    pytest.param(pooled((56, 56, 64), 3, "float16"), marks=pytest.mark.slow),
    pytest.param(pooled((56, 56, 64), 2, "float16"), marks=pytest.mark.slow),
    pytest.param(mean((7, 7, 2048)), marks=pytest.mark.slow),
], ids=str)
def test_main_loops_fetch_16_bytes(case: Case) -> None:
    """And nothing is in the stack. Narrower are only the parts of a cut sum, which each thread stores and reads."""
    for target in (AMPERE, HOPPER):
        assert registry.find(case.func(), target).name == SPACE.name
        sch, decisions = first_seed(SPACE, case.func(), target)
        (kernel,) = kernels(cuda_emulator.cuda_source(sch.mod["main"], target), str(target.attrs["arch"]))
        assert kernel.stack_bytes == kernel.spilled_bytes == 0
        assert kernel.count("LDG.E.128") >= min(2, len(case.func().params) - 1), "of a product, both operands"
        if decisions["parts"] == 1:
            assert kernel.count("LDG") == kernel.count("LDG.E.128")
            assert kernel.count("STG") == kernel.count("STG.E.128") > 0
        else:
            assert kernel.count("LDG") - kernel.count("LDG.E.128") <= 2 * decisions["parts"]


@needs_nvcc
@pytest.mark.parametrize(("together", "wide"), [(2, "LDS.128"), (4, "LDS.64")])
def test_few_threads_add_up_vectors_in_registers(together: int, wide: str) -> None:
    """Of eight neighbours, each thread half or a quarter, of the sums of all threads."""
    case = row_times(2048, 1024, "float16")
    sch = schedule_with(SPACE, case.func(), HOPPER, {"lanes": 64, "together": together, "parts": 8})
    (kernel,) = kernels(cuda_emulator.cuda_source(sch.mod["main"], HOPPER), "sm_90a")
    assert kernel.count(wide) > 0 == kernel.stack_bytes == kernel.count("LDL")


def test_seeds_fill_the_gpu() -> None:
    """A third of the multiprocessors, and as many bytes under way as reach them in 0.6 microseconds at 3.35 TB/s, or
    half of a small weight."""
    for terms, columns in ((2048, 1000), (768, 768), (4096, 4096), (4096, 14336)):
        best = next(iter(SPACE.seeds(row_times(terms, columns, "float16").func(), HOPPER)))
        blocks, share = columns // 8 // best["lanes"] * best["parts"], terms // best["parts"] // best["together"]
        under_way = blocks * best["lanes"] * best["together"] * 16 * min(8, share)
        assert blocks >= 44 and under_way >= min(2e6, terms * columns), best


def test_threads_that_would_share_nothing_are_refused() -> None:
    func = row_times(64, 40, "float16").func()
    for tile, reason in (((5, 1, 1), "32 to 1024 threads, got 5"), ((64, 1, 2), "threads must share the parts"),
                         ((64, 16, 1), "equal numbers of terms"), ((5, 16, 2), "must divide 8 results of a part")):
        with pytest.raises(InvalidDecision, match=reason):
            schedule_with(SPACE, func, HOPPER, dict(zip(("lanes", "together", "parts"), tile, strict=True)))


def test_what_is_not_side_by_side_is_left_alone() -> None:
    """Columns at odd places, images with channels first, and sums over what lies side by side."""
    for name in ("vector_matrix", "vector_matrix_transposed", "max_pool", "global_pool", "sum_columns", "sum_all"):
        assert not SPACE.matches(BY_NAME[name].func(), AMPERE)
        assert registry.find(BY_NAME[name].func(), AMPERE).name == "cuda.reduce"


#: threads that share results, blocks that do, and vectors that a block has; as each width allows
ODD = [
    (row_times(77, 56, "float16", "float16"), [(7, 7, 1), (7, 11, 1)]),
    (row_times(200, 40, "bfloat16", "bfloat16"), [(5, 25, 1), (5, 8, 5)]),
    (row_times(96, 256, "float16", "float16"), [(32, 6, 1), (16, 2, 3)]),
    (row_times(90, 132, "float32"), [(33, 5, 1), (33, 2, 9)]),
    (row_times(66, 68, "float16"), [(17, 11, 1), (17, 2, 3)]),  # vectors of four
    (row_times(65, 34, "float32", rows=3), [(17, 13, 1)]),  # of two
    (row_times(35, 24, "bfloat16", rows=2), [(64, 1, 1), (3, 35, 1)]),
    (pooled((13, 10, 24), 3, "float16"), [(105, 1, 1)]),
    (pooled((12, 9, 20), 5, "float32"), [(150, 1, 1)]),
    (mean((5, 9, 20)), [(5, 9, 1), (5, 15, 1), (32, 1, 1)]),
]
#: those that are tried each time; the emulator's compiler takes seconds
_QUICK = ((5, 8, 5),)


@needs_gxx
@pytest.mark.parametrize(("case", "tile"), [
    pytest.param(case, tile, id=f"{case}-{'-'.join(map(str, tile))}", marks=() if tile in _QUICK else pytest.mark.slow)
    for case, tiles in ODD for tile in tiles])
def test_odd_sizes_are_right_and_fetched_as_vectors(case: Case, tile: tuple[int, int, int]) -> None:
    decisions = dict(zip(("lanes", "together", "parts"), tile, strict=True))
    scheduled = schedule_with(SPACE, case.func(), HOPPER, decisions).mod["main"]
    assert len(list(cuda_emulator.launches(scheduled))) == 1, "the last of blocks with parts of a sum adds them up"
    error, costs = emulate(case, scheduled, HOPPER)
    assert error <= case.rtol
    wide = sum(cost.requests for cost in costs if not cost.shared and cost.bytes >= 8)
    assert wide >= sum(cost.requests for cost in costs if not cost.shared and cost.bytes < 8)
    shared = [cost for cost in costs if cost.shared]
    assert sum(cost.taken for cost in shared) <= 1.1 * sum(cost.least for cost in shared)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("tile", [(5, 16, 1), (5, 8, 4)], ids=["threads", "blocks"])
def test_each_barrier_is_needed(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int, int]) -> None:
    decisions = dict(zip(("lanes", "together", "parts"), tile, strict=True))
    case = row_times(128, 40, "float16")
    scheduled = schedule_with(SPACE, case.func(), HOPPER, decisions).mod["main"]
    assert check_orders(monkeypatch, case, legal_names(scheduled), HOPPER) == (2 if tile[2] == 1 else 1)
