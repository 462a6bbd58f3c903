"""Rows on GPUs: what is fetched how often, in the machine code and in the emulator."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from harness import emulate, without_each
from tvm import te, tirx, topi

from mlc.codegen.cuda import legal_names
from mlc.codegen.inspection import Kernel, find_nvdisasm, kernels
from mlc.graph.kernels.dynamic import normalised
from mlc.measure.data import numpy_dtype
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES
from mlc.testing.cuda_memory import layer_norm, narrow_norm, rms_norm, row_sums, softmax
from schedules import registry
from schedules.cuda.elementwise import Elementwise
from schedules.cuda.reduction import Reduce, Rows
from schedules.space import InvalidDecision, first_seed, schedule_with

SPACE = Rows()
BY_NAME = {case.name: case for case in CASES}
AMPERE, HOPPER = (resolve(f"cuda:{arch}").tvm for arch in ("sm_80", "sm_90a"))

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or find_nvdisasm() is None, reason="needs nvcc and nvdisasm")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def norm_with_extremes(rows: int, columns: int) -> Case:
    """Layer normalisation that says, of each row, the largest of what it gives and of its opposite."""
    def build() -> list[Any]:
        inputs = [te.placeholder(shape, "float32", f"p{i}") for i, shape in enumerate(
            ((1, rows, columns), (columns,), (columns,)))]
        return [*inputs, *normalised(*inputs, [-1], 1e-5)]

    def reference(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b
        return y, np.stack([(-y).max(-1), y.max(-1)], -1)

    return Case(f"norm_with_extremes_{columns}", build, reference, 5e-5, space=SPACE.name, index="int64")


def seeded(case: Case, target: Any = AMPERE) -> tirx.PrimFunc:
    assert registry.find(case.func(), target).name == SPACE.name
    return first_seed(SPACE, case.func(), target)[0].mod["main"]


def compiled(func: tirx.PrimFunc, target: Any) -> Kernel:
    (kernel,) = kernels(cuda_emulator.cuda_source(func, target), str(target.attrs["arch"]))
    return kernel


@needs_nvcc
@pytest.mark.parametrize(("case", "operands"), [
    (softmax(64, 1024), 1), (layer_norm(64, 768), 3), (rms_norm(64, 2048), 3)], ids=str)
def test_each_element_is_fetched_once_in_16_bytes(case: Case, operands: int) -> None:
    """And is in a register until the last stage takes it."""
    for target in (AMPERE, HOPPER):
        kernel = compiled(seeded(case, target), target)
        fetches = int(case.func().params[0].shape[1]) // (4 * kernel.threads)
        assert kernel.stack_bytes == kernel.spilled_bytes == 0
        assert kernel.count("LDG") == kernel.count("LDG.E.128.CONSTANT") == operands * fetches
        assert kernel.count("STG") == kernel.count("STG.E.128") == fetches


@needs_gxx
@pytest.mark.parametrize("case", [softmax(3, 512), rms_norm(3, 256)], ids=str)
def test_rows_are_right_and_fetched_in_whole_sectors(case: Case) -> None:
    error, costs = emulate(case, seeded(case))
    assert error <= case.rtol
    fetched = [cost for cost in costs if not cost.shared]
    assert {cost.bytes for cost in fetched} == {16} and all(cost.taken == cost.least for cost in fetched), fetched


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rows_of_16_bits_take_16_bytes(dtype: str) -> None:
    """Eight numbers at once, each fetched once; the scale and the shift in two accesses each."""
    for columns in (1024, 768):
        kernel = compiled(seeded(narrow_norm(64, columns, dtype)), AMPERE)
        vectors = columns // (8 * kernel.threads)
        assert kernel.stack_bytes == kernel.spilled_bytes == 0 < vectors
        assert kernel.count("LDG") == kernel.count("LDG.E.128") == 5 * vectors
        assert kernel.count("STG") == kernel.count("STG.E.128") == vectors


@needs_nvcc
@pytest.mark.parametrize(("case", "loads", "stores"), [
    (softmax(64, 32000), 10, 10), (layer_norm(64, 32000), 30, 10), (narrow_norm(64, 32000, "float16"), 25, 5),
    pytest.param(narrow_norm(64, 32000, "bfloat16"), 25, 5, marks=pytest.mark.slow),
], ids=str)
def test_rows_of_a_vocabulary_are_held_in_registers(case: Case, loads: int, stores: int) -> None:
    """No power of two divides them by enough threads, 25 warps do: 40 elements each, fetched once."""
    kernel = compiled(seeded(case, HOPPER), HOPPER)
    assert kernel.threads == 800 and kernel.stack_bytes == kernel.spilled_bytes == 0
    assert (kernel.count("LDG"), kernel.count("STG")) == (loads, stores)
    assert kernel.count("LDG.E.128") == loads and kernel.count("STG.E.128") == stores


@pytest.mark.parametrize(("columns", "threads"), [
    (768, 64), (1024, 256), (1536, 128), (8192, 512),  # powers of two, where they divide a row
    (640, 160), (2560, 640), (32000, 800),
    (17152, 1024), (50257, 1024), (65536, 1024),  # what no registers hold
])
def test_long_rows_have_many_threads(columns: int, threads: int) -> None:
    assert next(iter(SPACE.seeds(softmax(4, columns).func(), AMPERE)))["threads"] == threads


@needs_nvcc
def test_rows_that_no_registers_hold_spill_none() -> None:
    for case in (softmax(4, 65536), softmax(4, 17152), narrow_norm(4, 65536, "float16")):
        kernel = compiled(seeded(case), AMPERE)
        assert kernel.threads == 1024 and kernel.stack_bytes == kernel.spilled_bytes == 0


@needs_gxx
@pytest.mark.parametrize("case", [
    softmax(2, 32000), softmax(2, 640), pytest.param(narrow_norm(2, 32000, "float16"), marks=pytest.mark.slow),
], ids=str)
def test_rows_of_any_number_of_warps_are_right(case: Case) -> None:
    """Sums of 25 and of 5 warps are joined."""
    error, costs = emulate(case, seeded(case))
    assert error <= case.rtol
    assert {cost.bytes for cost in costs if not cost.shared} == {16}


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rows_of_16_bits_are_right(dtype: str) -> None:
    case = narrow_norm(3, 512, dtype)
    error, costs = emulate(case, seeded(case))
    assert error <= case.rtol
    assert {cost.bytes for cost in costs if not cost.shared} == {16}


@needs_gxx
@pytest.mark.parametrize("columns", [768, pytest.param(70, marks=pytest.mark.slow)])
def test_rows_have_results_of_their_own(columns: int) -> None:
    """A few numbers for each row, by one of a block's threads, in the kernel that writes the row."""
    case = norm_with_extremes(3, columns)
    error, costs = emulate(case, seeded(case))
    assert error <= case.rtol
    assert columns != 768 or 16 in {cost.bytes for cost in costs if not cost.shared}


def test_rows_are_not_those_of_other_results() -> None:
    """A number for each row that is made of another row's would be of what another block of threads has."""
    x = te.placeholder((4, 64), "float32", "x")
    k = te.reduce_axis((0, 64), "k")
    total = te.compute((4,), lambda i: te.sum(x[i, k], axis=k), "total")
    scaled = te.compute((4, 64), lambda i, j: x[i, j] / total[i], "scaled")
    turned = te.compute((4,), lambda i: total[3 - i], "turned")
    func = te.create_prim_func([x, scaled, turned], index_dtype_override="int64")
    assert not SPACE.matches(func, AMPERE)


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_of_neighbours_fetch_16_bytes(dtype: str) -> None:
    case = row_sums(64, 1024, dtype)
    assert registry.find(case.func(), AMPERE).name == case.space
    kernel = compiled(first_seed(Reduce(), case.func(), AMPERE)[0].mod["main"], AMPERE)
    assert kernel.count("LDG") == kernel.count("LDG.E.128.CONSTANT") > 0 == kernel.stack_bytes


@needs_nvcc
def test_what_is_fetched_of_several_axes_is_in_registers() -> None:
    def build() -> list[Any]:
        x = te.placeholder((128, 768), "float32", "x")
        return [x, topi.max(x, [0, 1])]

    case = Case("largest", build, np.max, space="cuda.reduce", index="int64")
    kernel = compiled(first_seed(Reduce(), case.func(), AMPERE)[0].mod["main"], AMPERE)
    assert kernel.count("LDG.E.128.CONSTANT") > 0 == kernel.stack_bytes == kernel.count("LDL")


@needs_gxx
@pytest.mark.parametrize(("case", "vectors"), [
    (row_sums(3, 512, "float16"), {16}), pytest.param(row_sums(5, 300, "float32"), set(), marks=pytest.mark.slow),
], ids=["whole", "rest"])
def test_sums_of_neighbours_are_right(case: Case, vectors: set[int]) -> None:
    """One by one where vectors would leave a rest."""
    error, costs = emulate(case, first_seed(Reduce(), case.func(), AMPERE)[0].mod["main"])
    assert error <= case.rtol
    assert {cost.bytes for cost in costs if not cost.shared} == vectors


@needs_gxx
def test_each_barrier_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts of a sum, and of the sum; between them TVM has one for what a single thread writes and reads."""
    case = rms_norm(2, 512)
    _, (parts, single, whole) = without_each(monkeypatch, case, legal_names(seeded(case)))
    assert min(parts, whole) > 1e-2 and single <= case.rtol


def test_only_what_is_aligned_is_fetched_as_vectors() -> None:
    """Rows of 250 begin at multiples of 8 bytes, of 33 anywhere."""
    for columns, vector in ((252, 4), (250, 2), (33, 1)):
        func = softmax(4, columns).func()
        assert next(iter(SPACE.seeds(func, AMPERE)))["vector"] == vector
    with pytest.raises(InvalidDecision, match="2 neighbours of a row may be accessed at once, got 4"):
        schedule_with(SPACE, softmax(4, 250).func(), AMPERE, {"threads": 64, "vector": 4, "unroll": 0})


@needs_nvcc
def test_elementwise_functions_of_16_bits_take_four_at_a_time() -> None:
    func, space = BY_NAME["relu_f16"].func(), Elementwise()
    kernel = compiled(schedule_with(space, func, AMPERE, {"threads": 64, "vector": 4}).mod["main"], AMPERE)
    assert kernel.count("LDG") == kernel.count("LDG.E.64.CONSTANT") == 2 and kernel.count("STG.E.64") == 1


def converted(dtype: str, result: str, columns: int = 768) -> Case:
    """The sum of two matrices, rectified and converted."""
    def build() -> list[Any]:
        x, y = (te.placeholder((128, columns), dtype, name) for name in "xy")
        return [x, y, topi.cast(topi.nn.relu(topi.add(x, y)), result)]

    return Case(f"{dtype}_{result}", build, lambda x, y: np.maximum(x + y, 0), 8e-3 if "bfloat16" in (dtype, result)
                else 1e-3, space="cuda.elementwise", index="int64")


#: bits that a thread fetches and stores, of conversions
CONVERSIONS = {
    ("float32", "float16"): (128, 64), ("float32", "bfloat16"): (128, 64), ("bfloat16", "float32"): (64, 128),
    ("bfloat16", "bfloat16"): (64, 64),
}


@needs_nvcc
@pytest.mark.parametrize("types", CONVERSIONS, ids="-".join)
def test_conversions_of_a_layer_take_four_at_a_time(types: tuple[str, str]) -> None:
    """Of 98,304 numbers, which still are 192 blocks of 128 threads."""
    fetched, stored = CONVERSIONS[types]
    target = HOPPER if "bfloat16" in types else AMPERE
    sch, decisions = first_seed(Elementwise(), converted(*types).func(), target)
    kernel = compiled(sch.mod["main"], target)
    assert decisions == {"threads": 128, "vector": 4} and kernel.stack_bytes == 0
    assert kernel.count("LDG") == kernel.count(f"LDG.E.{fetched}.CONSTANT") == 2
    assert kernel.count("STG") == kernel.count(f"STG.E.{stored}") == 1


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("types", "columns"), [
    (("bfloat16", "bfloat16"), 768), (("float32", "bfloat16"), 768), (("bfloat16", "bfloat16"), 770)], ids=str)
def test_conversions_of_vectors_are_right(types: tuple[str, str], columns: int) -> None:
    case = converted(*types, columns)
    error, _ = emulate(case, first_seed(Elementwise(), case.func(), HOPPER)[0].mod["main"], HOPPER)
    assert error <= case.rtol


@needs_nvcc
def test_elements_that_differ_in_a_condition_are_taken_one_by_one() -> None:
    """Three channels filled up to eight: a thread with four of them would store one here, one there."""
    x = te.placeholder((64, 64, 64, 3), "float32", "x")
    filled = te.compute((64, 64, 64, 8), lambda n, i, j, c: tirx.if_then_else(
        c < 3, x[n, i, j, c], tirx.const(0.0, "float32")))
    func = te.create_prim_func([x, filled], index_dtype_override="int64")
    kernel = compiled(first_seed(Elementwise(), func, AMPERE)[0].mod["main"], AMPERE)
    assert kernel.count("STG") == kernel.count("STG.E") == 1


@needs_gxx
@pytest.mark.parametrize("dtype", ["int8", *(
    pytest.param(each, marks=pytest.mark.slow) for each in ("uint8", "bfloat16", "float32"))])
def test_a_border_of_pixels_is_stored_in_vectors(dtype: str) -> None:
    """All channels that a thread has are inside of the image, or none."""
    x = te.placeholder((1, 5, 7, 12), dtype, "x")
    around = [0, 1, 1, 0]
    func = te.create_prim_func([x, topi.nn.pad(x, around, around, tirx.const(5, dtype))], index_dtype_override="int64")
    scheduled = schedule_with(Elementwise(), func, AMPERE, {"threads": 64, "vector": 4}).mod["main"]
    given = np.random.default_rng(5).integers(0, 127, (1, 5, 7, 12)).astype(numpy_dtype(dtype))
    found = np.zeros((1, 7, 9, 12), numpy_dtype(dtype))
    cuda_emulator.run(scheduled, AMPERE, [given], [found])
    wanted = np.pad(given.astype("float32"), [(width, width) for width in around], constant_values=5)
    np.testing.assert_array_equal(found.astype("float32"), wanted)
    if shutil.which("nvcc") and find_nvdisasm():
        kernel = compiled(scheduled, AMPERE)
        assert kernel.count("LDG") == kernel.count("STG") == 1
