"""What the CPU pipeline adds to TVM's: weights fetched ahead, register tiles that stay in registers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx, topi

from mlc.graph.kernels.blocked import conv2d_nchwc, dense_packed
from mlc.graph.kernels.integer import dense_integer
from mlc.target import resolve
from schedules.cpu.gemm import GEMM, GEMM_INTEGER
from schedules.cpu.reduction import REDUCTION
from schedules.cpu.tiling import accumulate
from schedules.loop_partition import HINT
from schedules.lowering import PIPELINE
from schedules.prefetch import insert_prefetches, lines_per_step
from schedules.registry import find
from schedules.space import best_seed, schedule_with

TARGET = resolve("x86-64-v4", threads=2)
DECISIONS = {"m": 8, "n": 48, "mb": 4, "nb": 1, "k": 4, "order": 1, "inner": 1, "prefetch": 1, "pack": 0}
ROWS, DEPTH, COLUMNS = 32, 64, 192


def _scheduled(**changes: int) -> tirx.PrimFunc:
    x, w = te.placeholder((ROWS, DEPTH), name="x"), te.placeholder((COLUMNS // 16, DEPTH, 16), name="w")
    product = dense_packed(x, w)
    bias = te.placeholder((COLUMNS,), name="bias")
    y = te.compute(product.shape, lambda i, j: product[i, j] + bias[j], name="y")
    func = te.create_prim_func([x, w, bias, y])
    return schedule_with(GEMM, func, TARGET.tvm, {**DECISIONS, **changes}).mod["main"]


def _fetched_indices(func: tirx.PrimFunc) -> list[list[int]]:
    """The indices of what the function fetches, in the order of its loops."""
    fetched: list[list[int]] = []

    def run(statement: object, values: dict[object, int]) -> None:
        if isinstance(statement, tirx.For):
            for value in range(int(statement.extent)):
                run(statement.body, {**values, statement.loop_var: value})
        elif isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                run(part, values)
        elif isinstance(statement, s_tir.SBlockRealize) and not statement.block.iter_vars:
            run(statement.block.body, values)
        elif isinstance(statement, tirx.Evaluate):
            fetched.append([
                int(tvm.sym.Analyzer().simplify(tvm_ffi.structural_map(
                    index, (tirx.Var, lambda var: tirx.const(values[var], "int32"))
                ))) for index in statement.value.args[0].args[0].indices
            ])

    run(func.body, {})
    return fetched


def _fetched_lines(func: tirx.PrimFunc, block_lines: int = DEPTH) -> list[int]:
    """The offsets, in cache lines of the weight, that the function fetches in the order of its loops.

    ``block_lines`` is the number of lines of one block of the weight.
    """
    lines = []
    for block, *between, line, lane in _fetched_indices(func):
        assert lane == 0 and not any(between)
        lines.append(block * block_lines + line)
    return lines


def test_rows_fetch_the_row_that_memory_has_time_for() -> None:
    """A layer norm of rows of 1 KiB fetches each line of the input once, four rows ahead, and nothing else."""
    rows, columns = 64, 256
    x, gamma, beta = (te.placeholder(shape) for shape in ((rows, columns), (columns,), (columns,)))
    func = te.create_prim_func([x, gamma, beta, topi.nn.layer_norm(x, gamma, beta, [1])])
    seed = next(iter(REDUCTION.seeds(func, TARGET.tvm)))
    assert seed["ahead"] == 1
    sch = schedule_with(REDUCTION, func, TARGET.tvm, seed)
    offsets = [row * columns + column for row, column in _fetched_indices(insert_prefetches(sch.mod["main"]))]
    assert sorted(offsets) == [1024 + line * 16 for line in range(rows * columns // 16)]
    still = schedule_with(REDUCTION, func, TARGET.tvm, {**seed, "ahead": 0}).mod["main"]
    assert insert_prefetches(still).same_as(still)


def test_each_column_of_tiles_fetches_exactly_the_next_one() -> None:
    lines = _fetched_lines(insert_prefetches(_scheduled()))
    column = 3 * DEPTH  # lines of one column of tiles
    steps = ROWS // 8 * (DEPTH // 4)
    each = column // steps
    assert each * steps == column
    expected = [line for number in range(COLUMNS // 48) for line in range((number + 1) * column, (number + 2) * column)]
    assert lines == expected


def test_a_convolution_fetches_its_weights_in_the_order_of_memory() -> None:
    data, weight = te.placeholder((1, 2, 6, 6, 16), name="data"), te.placeholder((4, 2, 3, 3, 16, 16), name="weight")
    out = conv2d_nchwc(data, weight, (1, 1), (0, 0, 0, 0), (1, 1), 1)
    sch = s_tir.Schedule(te.create_prim_func([data, weight, out]))
    block = sch.get_sblock("conv2d_nchwc")
    sch.cache_write(block, 0, "local")
    (copy,) = sch.get_consumers(block)
    _, blocks, rows, *_ = sch.get_loops(copy)
    start = accumulate(sch, block, rows, 5, 16, 4, (1, 1, 1))
    sch.parallel(blocks)
    sch.decompose_reduction(block, start)
    lines = _fetched_lines(insert_prefetches(sch.mod["main"]), 2 * 3 * 3 * 16)
    each = 2 * 3 * 3 * 16  # lines of one block of channels, fetched by four rows of 72 steps
    assert lines == [line for number in range(4) for line in range((number + 1) * each, (number + 2) * each)]


def test_weights_of_bytes_are_fetched_like_float32() -> None:
    """A step of four products has the bytes of one, in a layout with an axis more, behind an intrinsic."""
    vnni = resolve("x86-64-v4 -mattr=+avx512vnni", threads=2)
    x, w = te.placeholder((ROWS, 4 * DEPTH), "uint8"), te.placeholder((COLUMNS // 16, DEPTH, 16, 4), "int8")
    func = te.create_prim_func([x, w, dense_integer(x, w)])
    sch = schedule_with(GEMM_INTEGER, func, vnni.tvm, DECISIONS)
    fetched = _fetched_indices(insert_prefetches(sch.mod["main"]))
    assert [index[:-1] for index in fetched] == _fetched_indices(insert_prefetches(_scheduled()))


def test_without_a_mark_nothing_changes() -> None:
    func = _scheduled(prefetch=0)
    assert insert_prefetches(func).same_as(func)


def test_dense_fetches_are_left_out() -> None:
    assert lines_per_step(100, 100) == 1
    assert lines_per_step(101, 100) == 2
    assert lines_per_step(1600, 100) == 16
    assert lines_per_step(1601, 100) == 0
    # one row tile of few steps would have to fetch a whole column of tiles
    assert _fetched_lines(insert_prefetches(_scheduled(mb=1, k=8))) == []


def test_tiles_stay_in_registers() -> None:
    """The loop that multiplies neither stores nor reloads an accumulator, and the epilogue follows in registers."""
    module = tvm.IRModule({"main": _scheduled()})
    assembly = tvm.compile(module, target=TARGET.tvm, tir_pipeline=PIPELINE).mod.inspect_source("s")
    blocks = re.split(r"\n(?=\.L\w+:)", assembly)
    hot = max(blocks, key=lambda block: block.count("vfmadd"))
    assert "prefetcht1" in hot
    body = hot[: hot.rindex("vfmadd")]
    assert body.count("vfmadd") > 24
    assert not re.search(r"vmov[au]ps\s+%zmm\d+, ", body)
    assert "AllocWorkspace" not in assembly


def test_fetching_past_the_end_is_harmless() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s, dtype="float32") for s in ((ROWS, DEPTH), (COLUMNS // 16, DEPTH, 16), (COLUMNS,))]
    out = tvm.runtime.tensor(np.full((ROWS, COLUMNS), np.nan, "float32"))
    target = resolve("native", threads=2).tvm
    built = tvm.compile(tvm.IRModule({"main": _scheduled()}), target=target, tir_pipeline=PIPELINE)
    built["main"](*map(tvm.runtime.tensor, arrays), out)
    x, w, bias = (a.astype("float64") for a in arrays)
    expected = x @ w.transpose(1, 0, 2).reshape(DEPTH, COLUMNS) + bias
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("offset", [-9, 0, 3, 40])
@pytest.mark.parametrize("lower", [True, False])
def test_a_ragged_loop_is_not_cut_outside_of_itself(offset: int, lower: bool) -> None:
    """A triangle's edge may lie before or behind a tile of a row: TVM took that for iterations and wrote there."""
    x = te.placeholder((64, 15), name="x")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return tirx.Select(j <= i + offset if lower else j >= i + offset, x[i, j], tirx.const(7.0, "float32"))

    func = te.create_prim_func([x, te.compute((64, 15), element, name="y")])
    sch = s_tir.Schedule(func)
    i, j = sch.get_loops(sch.get_sblock("y"))
    tile, row = sch.split(j, [3, None])
    sch.reorder(tile, i, row)
    ragged, lanes = sch.split(row, [None, 4])
    sch.vectorize(lanes)
    sch.annotate(ragged, HINT, True)
    built = tvm.compile(sch.mod, tvm.target.Target({"kind": "llvm"}), tir_pipeline=PIPELINE)
    rng = np.random.default_rng(0)
    data = rng.standard_normal((64, 15)).astype("float32")
    # what is written before or behind shows in the frame
    frame = np.full((3, 64, 15), 5.0, "float32")
    whole = tvm.runtime.tensor(frame)
    inside = tvm.runtime.from_dlpack(np.from_dlpack(whole)[1])
    built["main"](tvm.runtime.tensor(data), inside)
    i, j = np.indices((64, 15))
    frame[1] = np.where(j <= i + offset if lower else j >= i + offset, data, np.float32(7))
    np.testing.assert_array_equal(whole.numpy(), frame)


def test_halves_are_converted_in_registers() -> None:
    """By the instructions of F16C, without which LLVM calls a function for each number."""
    target = resolve("x86-64-v3", threads=1).tvm
    x = te.placeholder((64, 96), "float16", "x")
    y = te.compute(x.shape, lambda i, j: (x[i, j].astype("float32") * 2.5 + 1.0).astype("float16"), name="y")
    func = te.create_prim_func([x, y])
    mod = tvm.IRModule({"main": best_seed(find(func, target), func, target).mod["main"]})
    with target:
        module = tvm.compile(mod, target, tir_pipeline=PIPELINE)
    code = (module.mod.imports or [module.mod])[0].inspect_source("s")
    assert len(re.findall("vcvtph2ps", code)) >= 2 and len(re.findall("vcvtps2ph", code)) >= 2
