"""Ragged tiles of free sizes: no row is tested in a register tile, no chunk has empty tiles, every size is right."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from harness import TARGET
from tvm import te, tirx

from mlc.artifact.runtime import view
from mlc.graph.kernels.blocked import conv2d_nchwc, dense_packed
from mlc.graph.task import normalise
from mlc.shapes import Free, Range
from schedules.analysis import evaluate, walk
from schedules.cpu.conv import CONV2D
from schedules.cpu.gemm import GEMM
from schedules.free import variables
from schedules.lowering import PIPELINE
from schedules.prefetch import insert_prefetches
from schedules.space import first_seed, schedule_with
from schedules.tail_tiles import whole_tiles

DEPTH, COLUMNS, HIGH = 32, 48, 150
#: tiles of 4 rows, chunks of 32: as many sums as any CPU has registers for
CHUNKS = {"m": 4, "n": 16, "mb": 8, "nb": 1, "k": 4, "order": 1, "inner": 1, "prefetch": 0, "pack": 0}


def _dense(usual: int, add: bool = True, low: int = 1) -> tirx.PrimFunc:
    n = tirx.Var("n", "int64")
    x, w = te.placeholder((n, DEPTH), name="x"), te.placeholder((COLUMNS // 16, DEPTH, 16), name="w")
    product = dense_packed(x, w)
    y = te.compute(product.shape, lambda i, j: product[i, j] + x[i, j % DEPTH], name="y") if add else product
    return normalise(te.create_prim_func([x, w, y]), {"n": Free("n", Range(low, HIGH), usual)})


def _conditions(func: tirx.PrimFunc) -> list[tuple[bool, bool]]:
    """Of each block, whether it has a predicate, and whether it sums."""
    found: list[tuple[bool, bool]] = []

    def look(realize: tvm.s_tir.SBlockRealize) -> None:
        guarded = not isinstance(realize.predicate, tirx.IntImm)
        kinds = [each.iter_type for each in realize.block.iter_vars]
        if kinds:
            found.append((guarded, tirx.IterVar.CommReduce in kinds))

    walk(func.body, (tvm.s_tir.SBlockRealize, look))
    return found


def test_sums_test_nothing_and_only_stores_do() -> None:
    sch = schedule_with(GEMM, _dense(32 * 2), TARGET, CHUNKS)
    before, after = (_conditions(func) for func in (sch.mod["main"], whole_tiles(sch.mod["main"])))
    assert (True, True) in before
    assert (True, True) not in after
    assert after.count((True, False)) == 1


def test_a_chunk_ends_with_the_last_row() -> None:
    """The loop over the tiles of a chunk runs as often as there are tiles with rows."""
    func = whole_tiles(schedule_with(GEMM, _dense(32 * 2), TARGET, CHUNKS).mod["main"])
    extents = []
    walk(func.body, (tirx.For, lambda loop: extents.append(loop.extent)))
    tiles = [extent for extent in extents if isinstance(extent, tirx.Min)]
    assert len(tiles) == 1
    variables = tirx.analysis.undefined_vars(tiles[0])
    for n, chunk, expected in ((1, 0, 1), (4, 0, 1), (5, 0, 2), (32, 0, 8), (33, 1, 1), (64, 1, 8), (70, 1, 8)):
        values = {var: n if str(var.name) == "n" else chunk for var in variables}
        assert evaluate(tiles[0], values) == expected, (n, chunk)


def _library(sch: tvm.s_tir.Schedule) -> tvm.runtime.Module:
    tvm.get_global_func("runtime.config_threadpool")(1, 2)
    return tvm.compile(sch.mod, target=TARGET, tir_pipeline=PIPELINE)


@pytest.mark.parametrize(("usual", "decisions"), [(64, CHUNKS), (4, None), (128, None)])
def test_products_are_right_at_every_number_of_rows(usual: int, decisions: dict[str, int] | None) -> None:
    func = _dense(usual)
    sch = first_seed(GEMM, func, TARGET)[0] if decisions is None else schedule_with(GEMM, func, TARGET, decisions)
    library, rng = _library(sch), np.random.default_rng(0)
    w = rng.standard_normal((COLUMNS // 16, DEPTH, 16)).astype(np.float32)
    plain = w.transpose(1, 0, 2).reshape(DEPTH, COLUMNS).astype(np.float64)
    for n in (*range(1, 16), 31, 32, 33, 63, 64, 65, HIGH):
        x = rng.standard_normal((n, DEPTH)).astype(np.float32)
        y = tvm.runtime.tensor(np.full((n, COLUMNS), np.nan, np.float32))
        library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)
        np.testing.assert_allclose(y.numpy(), x @ plain + x[:, np.arange(COLUMNS) % DEPTH], rtol=1e-4, atol=1e-4)


def _fetched(func: tirx.PrimFunc, n: int) -> list[list[tuple[int, ...]]]:
    """What each step of the sum fetches of the weight, in the order of the loops, in a call with ``n`` rows."""
    steps: list[list[tuple[int, ...]]] = []

    def run(statement: object, values: dict[object, int]) -> None:
        if isinstance(statement, tirx.For):
            if "mlc.prefetch" in statement.annotations:
                raise AssertionError("no mark may stay")
            for value in range(int(evaluate(statement.extent, values))):
                if statement.loop_var.name != "line" and any(isinstance(each, tirx.For) and each.loop_var.name == "line"
                                                             for each in _parts(statement.body)):
                    steps.append([])
                run(statement.body, {**values, statement.loop_var: value})
        elif isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                run(part, values)
        elif isinstance(statement, tirx.Evaluate):
            steps[-1].append(tuple(int(evaluate(index, values)) for index in statement.value.args[0].args[0].indices))
        elif isinstance(statement, tvm.s_tir.SBlockRealize) and not statement.block.iter_vars:
            run(statement.block.body, values)

    run(func.body, dict.fromkeys(variables(func), n))
    return steps


def _parts(body: object) -> list[object]:
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


@pytest.mark.parametrize("low", [1, 12])
def test_weights_are_fetched_ahead_whatever_the_number_of_rows(low: int) -> None:
    """Each column of tiles touches all lines of the next one, the fewer a step the more rows there are."""
    func = _dense(64, low=low)
    marked = schedule_with(GEMM, func, TARGET, {**CHUNKS, "nb": 3, "prefetch": 1}).mod["main"]
    made = insert_prefetches(whole_tiles(marked))
    for n, count in ((12, 2), (16, 1), (24, 1), (32, 1)):  # tiles of 4 rows, eight steps of a sum, 32 lines
        steps = _fetched(made, n)
        assert max(map(len, steps)) == count, n
        column = len(steps) // 3
        lines = {block * DEPTH + line for step in steps[:column] for block, line, lane in step}
        assert lines >= set(range(DEPTH, 2 * DEPTH)), n


def test_rows_behind_the_last_one_stay_as_they_are() -> None:
    library = _library(schedule_with(GEMM, _dense(64, add=False), TARGET, CHUNKS))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((60, DEPTH), (COLUMNS // 16, DEPTH, 16)))
    plain = w.transpose(1, 0, 2).reshape(DEPTH, COLUMNS).astype(np.float64)
    for n in (1, 31, 50):
        whole = tvm.runtime.tensor(np.full((60, COLUMNS), 7.0, np.float32))
        library["main"](tvm.runtime.tensor(x[:n]), tvm.runtime.tensor(w), view(whole, (n, COLUMNS), "float32"))
        np.testing.assert_allclose(whole.numpy()[:n], x[:n] @ plain, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(whole.numpy()[n:], 7.0)


def test_convolutions_are_right_at_every_width() -> None:
    width = tirx.Var("w", "int64")
    data, weight = te.placeholder((1, 1, 9, width, 16), name="x"), te.placeholder((2, 1, 3, 3, 16, 16), name="k")
    func = te.create_prim_func([data, weight, conv2d_nchwc(data, weight, (1, 1), (1, 1, 1, 1), (1, 1), 1)])
    library = _library(first_seed(CONV2D, normalise(func, {"w": Free("w", Range(3, 40), 28)}), TARGET)[0])
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 1, 3, 3, 16, 16)).astype(np.float32)
    for w in range(3, 41):
        x = rng.standard_normal((1, 1, 9, w, 16)).astype(np.float32)
        y = tvm.runtime.tensor(np.full((1, 2, 9, w, 16), np.nan, np.float32))
        library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(k), y)
        padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)])
        expected = sum(np.einsum("nbhwi,obij->nohwj", padded[:, :, r : r + 9, s : s + w], k[:, :, r, s])
                       for r in range(3) for s in range(3))
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4, err_msg=str(w))


@pytest.mark.parametrize("free", ["batch", "height", "width"])
def test_pointwise_convolutions_are_right_at_every_size(free: str) -> None:
    """Pixels are counted through the rows of an image where no call decides how many there are."""
    shape = {"batch": 1, "height": 9, "width": 7}
    batch, *image = {**shape, free: tirx.Var(free, "int64")}.values()
    data = te.placeholder((batch, 1, *image, 16), name="x")
    weight = te.placeholder((2, 1, 1, 1, 16, 16), name="k")
    conv = conv2d_nchwc(data, weight, (1, 1), (0, 0, 0, 0), (1, 1), 1)
    func = te.create_prim_func([data, weight, te.compute(conv.shape, lambda n, b, *i: conv(n, b, *i) + data(n, 0, *i))])
    sch, _ = first_seed(CONV2D, normalise(func, {free: Free(free, Range(1, 20), 7)}), TARGET)
    library = _library(sch)
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 1, 1, 1, 16, 16)).astype(np.float32)
    for size in (1, 2, 6, 7, 13, 20):
        n, height, width = {**shape, free: size}.values()
        x = rng.standard_normal((n, 1, height, width, 16)).astype(np.float32)
        y = tvm.runtime.tensor(np.full((n, 2, height, width, 16), np.nan, np.float32))
        library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(k), y)
        expected = np.einsum("nbhwi,obij->nohwj", x.astype(np.float64), k[:, :, 0, 0]) + x
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4, err_msg=str(size))
