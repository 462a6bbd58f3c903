"""Kernels of images whose height and width are free: whole tiles, even chunks, one axis of pixels, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from harness import TARGET
from tvm import te, tirx

from mlc.graph.kernels.blocked import conv2d_nchwc, depthwise_nchwc
from mlc.graph.task import normalise
from mlc.shapes import Free, Range
from schedules import registry
from schedules.analysis import evaluate, walk
from schedules.even_chunks import with_even_chunks
from schedules.flatten_spatial import FLAT, flattened
from schedules.free import SIZES
from schedules.lowering import PIPELINE
from schedules.space import first_seed
from schedules.tail_tiles import whole_tiles

HIGH = 40


def _image(make: Callable[..., Any], weight: tuple[int, ...], low: int = 8, blocks: int = 2) -> tirx.PrimFunc:
    """``make`` of an image of free height and width and of a weight, with something added and cut off."""
    height, width = tirx.Var("h", "int64"), tirx.Var("w", "int64")
    data, kernel = te.placeholder((1, blocks, height, width, 16), name="x"), te.placeholder(weight, name="k")
    made = make(data, kernel)
    out = te.compute(made.shape, lambda *i: te.max(made(*i) + 1, 0), name="y")
    free = {name: Free(name, Range(low, HIGH), 16) for name in "hw"}
    return normalise(te.create_prim_func([data, kernel, out]), free)


def _pointwise(low: int = 8) -> tirx.PrimFunc:
    return _image(lambda x, k: conv2d_nchwc(x, k, (1, 1), (0,) * 4, (1, 1), 1), (3, 2, 1, 1, 16, 16), low)


def _depthwise(stride: int, kernel: int = 3, low: int = 8) -> tirx.PrimFunc:
    pads = (kernel // 2,) * 4
    return _image(lambda x, k: depthwise_nchwc(x, k, (stride,) * 2, pads, (1, 1)), (2, 1, kernel, kernel, 1, 16), low)


def _scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return first_seed(registry.find(func, TARGET), func, TARGET)[0].mod["main"].with_attr("target", TARGET)


def _guarded(func: tirx.PrimFunc) -> int:
    found: list[Any] = []
    walk(func.body, (tvm.s_tir.SBlockRealize, lambda each: found.append(each.predicate)))
    return sum(not isinstance(each, tirx.IntImm) for each in found)


@pytest.mark.parametrize("func", [_pointwise(), _depthwise(1), _depthwise(2)], ids=["pointwise", "1", "2"])
def test_nothing_is_tested_where_every_size_has_a_tile(func: tirx.PrimFunc) -> None:
    scheduled = _scheduled(func)
    assert _guarded(scheduled)
    assert not _guarded(whole_tiles(scheduled))


def test_tiles_are_no_longer_than_the_shortest_row() -> None:
    space = registry.find(_depthwise(1), TARGET)
    for low, longest in ((8, 8), (4, 4), (2, 2)):
        assert first_seed(space, _depthwise(1, low=low), TARGET)[1]["tile"] <= longest


def test_pixels_are_one_axis_of_pointwise_convolutions_alone() -> None:
    func = _pointwise()
    assert [list(map(int, each)) for each in func.attrs[SIZES]] == [[64, HIGH * HIGH, 256]]
    assert list(func.attrs[FLAT]) == [2, -1, 2]
    assert flattened(func).same_as(func)
    assert FLAT not in _depthwise(1).attrs
    other = _image(lambda x, k: conv2d_nchwc(x, k, (2, 2), (0,) * 4, (1, 1), 1), (3, 2, 1, 1, 16, 16))
    assert FLAT not in other.attrs, "a stride leaves pixels out"


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_chunks_are_even(cores: int) -> None:
    """As many as a multiple of the cores, all rows in one of them, none with more than were planned."""
    rows = tirx.Var("n", "int64")
    data = te.placeholder((rows, 16), name="x")
    func = normalise(te.create_prim_func([data, te.compute((rows, 16), lambda i, j: data[i, j] * 2, name="y")]),
                     {"n": Free("n", Range(1, 200), 64)})
    sch = tvm.s_tir.Schedule(func)
    i, j = sch.get_loops(sch.get_sblock("y"))
    chunk, _ = sch.split(i, [None, 16])
    sch.parallel(chunk)
    sch.vectorize(j)
    clipped = whole_tiles(sch.mod["main"])
    loops: list[tirx.For] = []
    walk(with_even_chunks(clipped, cores, tvm.sym.Analyzer()).body, (tirx.For, loops.append))
    outer = next(loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL)
    inner = next(loop for loop in loops if loop.kind == tirx.ForKind.SERIAL)
    (size,) = tirx.analysis.undefined_vars(outer.extent)
    for n in (1, 2, 5, 16, 17, 28, 33, 64, 100, 199):
        number = int(evaluate(outer.extent, {size: n}))
        lengths = [int(evaluate(inner.extent, {size: n, outer.loop_var: at})) for at in range(number)]
        assert sum(lengths) == n and max(lengths) <= 16 and min(lengths) > 0
        assert number % cores == 0 or number == n
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("others", "outer"), [(4, True), (4, False), (3, True)])
def test_chunks_stay_where_another_loop_shares_out_the_work(others: int, outer: bool) -> None:
    """Two cores have half of four columns each, with all chunks of their rows; of three columns, half of the chunks."""
    rows = tirx.Var("n", "int64")
    data = te.placeholder((rows, others, 16), name="x")
    func = normalise(te.create_prim_func([data, te.compute(data.shape, lambda *i: data(*i) * 2, name="y")]),
                     {"n": Free("n", Range(1, 200), 64)})
    sch = tvm.s_tir.Schedule(func)
    i, j, k = sch.get_loops(sch.get_sblock("y"))
    chunk, row = sch.split(i, [None, 16])
    sch.reorder(*((chunk, j) if outer else (j, chunk)), row, k)
    sch.parallel(sch.fuse(*((chunk, j) if outer else (j, chunk))))
    sch.vectorize(k)
    made = with_even_chunks(whole_tiles(sch.mod["main"]), 2, tvm.sym.Analyzer())
    loops: list[tirx.For] = []
    realizes: list[tvm.s_tir.SBlockRealize] = []
    walk(made.body, (tirx.For, loops.append), (tvm.s_tir.SBlockRealize, realizes.append))
    parallel = next(loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL)
    serial = next(loop for loop in loops if loop.kind == tirx.ForKind.SERIAL)
    place = next(realize for realize in realizes if len(realize.block.iter_vars) == 3).iter_values
    (size,) = tirx.analysis.undefined_vars(parallel.extent)
    for n in (1, 16, 17, 40, 199):
        steps, done = int(evaluate(parallel.extent, {size: n})), [[], []]
        for step in range(steps):
            at = {size: n, parallel.loop_var: step}
            for r in range(int(evaluate(serial.extent, at))):
                row, column = (int(evaluate(each, {**at, serial.loop_var: r})) for each in place[:2])
                done[2 * step // steps].append((row, column))
        assert sorted(done[0] + done[1]) == [(row, column) for row in range(n) for column in range(others)]
        if others % 2 == 0:
            assert steps == -(-n // 16) * others and len(done[0]) == len(done[1])


def _expected(x: np.ndarray, k: np.ndarray, stride: int, depthwise: bool) -> np.ndarray:
    pad = k.shape[2] // 2
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)])
    total: Any = 0
    for r in range(k.shape[2]):
        for s in range(k.shape[3]):
            height, width = (padded.shape[a] - k.shape[a] + 1 for a in (2, 3))
            part = padded[:, :, r : r + height : stride, s : s + width : stride]
            total = total + (part * k[:, 0, r, s, 0][None, :, None, None] if depthwise
                             else np.einsum("nbhwi,obij->nohwj", part, k[:, :, r, s].astype(np.float64)))
    return np.maximum(total + 1, 0)


@pytest.mark.parametrize(("func", "stride"), [
    (_pointwise(), 1), (_pointwise(low=1), 1), (_depthwise(1), 1), (_depthwise(2), 2), (_depthwise(1, 5, low=2), 1),
], ids=["pointwise", "pointwise from 1", "depthwise", "depthwise 2", "depthwise 5x5 from 2"])
@pytest.mark.parametrize("target", [TARGET, None], ids=["own", "x86-64-v3"])
def test_images_are_right_at_every_size(func: tirx.PrimFunc, stride: int, target: Any) -> None:
    from mlc.target import resolve

    target = resolve("x86-64-v3", 2).tvm if target is None else target
    space = registry.find(func, target)
    tvm.get_global_func("runtime.config_threadpool")(1, 2)
    library = tvm.compile(first_seed(space, func, target)[0].mod, target=target, tir_pipeline=PIPELINE)
    rng, depthwise = np.random.default_rng(0), "depthwise" in space.name
    k = rng.standard_normal([int(d) for d in func.params[1].shape]).astype(np.float32)
    least = 1 if FLAT in func.attrs and int(func.attrs[SIZES][0][0]) == 1 else 8 if k.shape[2] < 5 else 2
    for height, width in ((least, least), (least, HIGH), (HIGH, least), (9, 13), (16, 16), (23, 31), (HIGH, HIGH)):
        x = rng.standard_normal((1, 2, height, width, 16)).astype(np.float32)
        expected = _expected(x, k, stride, depthwise)
        y = tvm.runtime.tensor(np.full(expected.shape, np.nan, np.float32))
        library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(k), y)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4, err_msg=f"{height}x{width}")
