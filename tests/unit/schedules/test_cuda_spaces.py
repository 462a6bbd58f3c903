"""What is peculiar to CUDA spaces; the contract that they keep is in test_space_contract."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from harness import thread_axes
from tvm import s_tir, te, tirx, topi

from mlc.target import resolve
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES
from mlc.testing.cuda_twin import run, twin
from schedules import registry
from schedules.analysis import expression_size
from schedules.cuda import SPACES, common, contraction, reduction
from schedules.space import InvalidDecision, best_seed, schedule_with

TARGET = resolve("cuda:sm_90").tvm
BY_NAME = {case.name: case for case in CASES}


def error_on_cpu(case: Case, sch: s_tir.Schedule) -> float:
    inputs, outputs = case.arrays()
    return case.error(inputs, run(twin(sch, case.func()), inputs, outputs))


@pytest.mark.parametrize("name", ["conv3x3_deep", "conv1x1_even"])
def test_cut_sums_add_up(name: str) -> None:
    case = BY_NAME[name]
    func = case.func()
    space = registry.find(func, TARGET)
    knobs = {k.name: k.values for k in space.knobs(func, TARGET)}
    if 4 not in knobs["split_k"]:
        assert contraction.contraction_of(func).size(contraction.K) < 256  # too short to cut
        return
    decisions = dict(next(iter(space.seeds(func, TARGET))), split_k=4, block_k=16)
    sch = schedule_with(space, func, TARGET, decisions)
    assert len(thread_axes(sch.mod["main"])) == 2, "the parts, and their sum"
    assert error_on_cpu(case, sch) <= case.rtol


def test_seeds_fill_the_gpu() -> None:
    """A 7x7 image alone gives too few tiles for a GPU, so its sum is cut; a large product is not."""
    deep = te.placeholder((1, 512, 7, 7), name="x"), te.placeholder((512, 512, 3, 3), name="w")
    small = te.create_prim_func([*deep, topi.nn.conv2d_nchw(*deep, 1, 1, 1)], index_dtype_override="int64")
    square = te.placeholder((4096, 4096), name="x"), te.placeholder((4096, 4096), name="w")
    large = te.create_prim_func([*square, topi.matmul(*square)], index_dtype_override="int64")
    first = {}
    for name, func in (("small", small), ("large", large)):
        first[name] = next(iter(registry.find(func, TARGET).seeds(func, TARGET)))
    assert first["small"]["split_k"] > 1
    assert first["large"]["split_k"] == 1
    assert first["large"]["block_m"] * first["large"]["block_n"] >= 64 * 128


def test_contraction_sees_layout_and_vectors() -> None:
    even = contraction.contraction_of(BY_NAME["dense_even"].func())
    assert (even.run_a, even.run_b, even.vector_a, even.vector_b) == ("k", "n", 4, 4)
    transposed = contraction.contraction_of(BY_NAME["dense_transposed"].func())
    assert (transposed.run_b, transposed.vector_b) == ("k", 4)
    odd = contraction.contraction_of(BY_NAME["dense_odd"].func())
    assert (odd.vector_a, odd.vector_b) == (2, 1)  # rows of 70 and of 51 elements
    padded = contraction.contraction_of(BY_NAME["conv3x3_bias_relu"].func())
    assert padded.vector_b == 1, "an aligned access would read across the border of the image"
    groups = contraction.contraction_of(BY_NAME["conv3x3_groups"].func())
    assert [groups.size(r) for r in "bmnk"] == [4, 12, 81, 72]


def mixed_indices() -> tirx.PrimFunc:
    """32-bit reduction iterators beside 64-bit data-parallel ones."""
    shapes = ((1, 16, 8, 8), (32, 16, 3, 3), (1, 32, 1, 1))
    data, weight, bias = (te.placeholder([tirx.const(n, "int64") for n in shape], name="x") for shape in shapes)
    one = tirx.const(1, "int64")
    result = topi.add(topi.nn.conv2d_nchw(data, weight, [one] * 2, [one] * 4, [one] * 2), bias)
    return te.create_prim_func([data, weight, bias, result])


def test_mixed_index_types_are_only_bound() -> None:
    assert registry.find(mixed_indices(), TARGET).name == "cuda.fallback"


def test_reduction_that_tvm_would_not_join_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM leaves a reduction over threads as it is where a cast hides its pattern: wrong sums, without an error."""
    func = mixed_indices()
    monkeypatch.setattr(reduction, "uniform", lambda _blocks: True)
    space = next(s for s in SPACES if s.name == "cuda.reduce")
    with pytest.raises(InvalidDecision, match="must be one that TVM can join, but conv2d_nchw is not"):
        schedule_with(space, func, TARGET, {"threads_together": 32, "threads_apart": 1, "unroll": 0})


def test_single_opaque_block_is_refused_in_one_line() -> None:
    x = te.placeholder((4,), name="x")

    def body(ins: list, outs: list) -> tirx.Stmt:
        return tirx.BufferStore(outs[0], ins[0][0], [0])

    func = te.create_prim_func([x, te.extern([(4,)], [x], body, name="opaque", dtype="float32")])
    with pytest.raises(InvalidDecision, match="must stand under a root block"):
        best_seed(registry.find(func, TARGET), func, TARGET)


def test_knob_values_outside_the_limits_are_refused() -> None:
    func = BY_NAME["dense_even"].func()
    space = registry.find(func, TARGET)
    seed = dict(next(iter(space.seeds(func, TARGET))))
    with pytest.raises(InvalidDecision, match="32 to 1024 threads, got 2048"):
        schedule_with(space, func, TARGET, {**seed, "block_m": 128, "block_n": 128, "thread_m": 2, "thread_n": 4})
    small = tvm.target.Target({**resolve("cuda:sm_80").tvm.export(), "max_shared_memory_per_block": 4096})
    with pytest.raises(InvalidDecision, match="must fit 4096 bytes"):
        schedule_with(space, func, small, {**seed, "block_m": 64, "block_n": 64, "block_k": 32})


def test_large_expressions_are_not_inlined_twice() -> None:
    """Each stage uses the one before twice: inlining all thirty would print a billion terms."""
    def doubled(before: te.Tensor, name: str) -> te.Tensor:
        return te.compute((64,), lambda j: before[j] * te.exp(before[j]), name=name)

    stage = x = te.placeholder((64,), name="x")
    for i in range(30):
        stage = doubled(stage, f"stage{i}")
    func = te.create_prim_func([x, stage], index_dtype_override="int64")
    sch = best_seed(registry.find(func, TARGET), func, TARGET)
    kernels = thread_axes(sch.mod["main"])
    assert 2 <= len(kernels) < 30
    largest = max(expression_size(leaf.info.block.body) for leaf in common.leaves(sch))
    assert largest <= common._MAX_EXPRESSION


def test_twin_keeps_every_access_in_order() -> None:
    """The twin is a function without threads, scopes or intrinsics."""
    case = BY_NAME["conv3x3_bias_relu"]
    func = case.func()
    plain = twin(best_seed(registry.find(func, TARGET), func, TARGET), func)
    assert all(not nest for nest in thread_axes(plain))
    assert {b.scope() for b in plain.body.block.alloc_buffers} == {"global"}
    inputs, outputs = case.arrays()
    assert not np.isnan(run(plain, inputs, outputs)[0]).any()
