"""Reductions along free axes take a vector a step, and are right for every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from harness import TARGET
from tvm import te, tirx

from mlc.graph.task import normalise
from mlc.shapes import Free, Range
from mlc.target import resolve
from schedules.analysis import evaluate, walk
from schedules.compact_buffers import compacted
from schedules.cpu.reduction import REDUCTION
from schedules.lowering import PIPELINE
from schedules.partial_sums import PARTIALS, with_partial_sums
from schedules.space import first_seed

ROWS, HIGH = 3, 100
RNG = np.random.default_rng(8)
#: with each number of a first vector, and with ends before, at and after those of a second
LENGTHS = (*range(1, 36), 63, 64, 65, 95, 96, 97, HIGH)

Made = tuple[list[Any], Callable[[np.ndarray], np.ndarray]]


def _sum(n: tirx.Var, dtype: str) -> Made:
    x, k = te.placeholder((ROWS, n), dtype, name="x"), te.reduce_axis((0, n), name="k")
    return [x, te.compute((ROWS,), lambda i: te.sum(x[i, k] * x[i, k], k), name="y")], lambda x: (x * x).sum(1)


def _extreme(reduced: Callable[..., Any], wanted: Callable[..., np.ndarray], n: tirx.Var, dtype: str) -> Made:
    x, k = te.placeholder((ROWS, n), dtype, name="x"), te.reduce_axis((0, n), name="k")
    return [x, te.compute((ROWS,), lambda i: reduced(x[i, k], k), name="y")], lambda x: wanted(x, 1)


def _max(n: tirx.Var, dtype: str) -> Made:
    return _extreme(te.max, np.max, n, dtype)


def _min(n: tirx.Var, dtype: str) -> Made:
    return _extreme(te.min, np.min, n, dtype)


def _softmax(n: tirx.Var, dtype: str) -> Made:
    x = te.placeholder((ROWS, n), dtype, name="x")
    k, j = (te.reduce_axis((0, n), name=name) for name in "kj")
    most = te.compute((ROWS,), lambda i: te.max(x[i, k], k), name="most")
    power = te.compute(x.shape, lambda i, c: te.exp(x[i, c] - most[i]), name="power")
    total = te.compute((ROWS,), lambda i: te.sum(power[i, j], j), name="total")

    def wanted(x: np.ndarray) -> np.ndarray:
        powers = np.exp(x - x.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    return [x, te.compute(x.shape, lambda i, c: power[i, c] / total[i], name="y")], wanted


def _function(made: Callable[[tirx.Var, str], Made], dtype: str, low: int = 1) -> tirx.PrimFunc:
    tensors, _ = made(tirx.Var("n", "int64"), dtype)
    return normalise(te.create_prim_func(tensors), {"n": Free("n", Range(low, HIGH), 64)})


@pytest.mark.parametrize(("made", "dtype"), [
    *((made, dtype) for made in (_sum, _max, _min) for dtype in ("float32", "int32", "float64")),
    (_softmax, "float32"), (_softmax, "float64"),
])
def test_every_length_is_right(made: Callable[[tirx.Var, str], Made], dtype: str) -> None:
    func = _function(made, dtype)
    scheduled = first_seed(REDUCTION, func, TARGET)[0].mod["main"]
    library = tvm.compile(tvm.IRModule({"main": scheduled}), target=TARGET, tir_pipeline=PIPELINE)
    _, wanted = made(tirx.Var("n", "int64"), dtype)
    for n in LENGTHS:
        x = (RNG.normal(size=(ROWS, n)) * 40 - 60).astype(dtype) if made is not _softmax else RNG.normal(
            size=(ROWS, n)).astype(dtype)
        expected = wanted(x)
        y = tvm.runtime.tensor(np.full(expected.shape, 7, dtype))
        library["main"](tvm.runtime.tensor(x), y)
        np.testing.assert_allclose(y.numpy(), expected, rtol=2e-6 if made in (_sum, _softmax) else 0, err_msg=str(n))


def _widths(func: tirx.PrimFunc) -> set[int]:
    """The extents of its vectorised loops."""
    found: list[Any] = []
    walk(func.body, (tirx.For, found.append))
    return {int(loop.extent) for loop in found if loop.kind == tirx.ForKind.VECTORIZED}


@pytest.mark.parametrize("low", [1, 8, 96])
def test_short_sums_have_code_only_where_there_are_any(low: int) -> None:
    scheduled = first_seed(REDUCTION, _function(_sum, "float32", low), TARGET)[0].mod["main"]
    before = compacted(scheduled)
    loops: list[Any] = []
    walk(before.body, (tirx.For, loops.append))
    (count,) = (int(loop.annotations[PARTIALS]) for loop in loops if PARTIALS in loop.annotations)
    after = with_partial_sums(before)
    conditions: list[Any] = []
    left: list[Any] = []
    walk(after.body, (tirx.IfThenElse, conditions.append), (tirx.For, left.append))
    assert not any(PARTIALS in loop.annotations for loop in left)
    assert count in _widths(after)
    assert len(conditions) == (0 if low >= count else 1 if low >= 8 or count == 8 else 2)




def test_rows_are_shared_by_the_cores_where_the_batch_may_be_one() -> None:
    batch, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    x, k = te.placeholder((batch, 64, n), name="x"), te.reduce_axis((0, n), name="k")
    y = te.compute((batch, 64), lambda b, c: te.sum(x[b, c, k], k), name="y")
    free = {"b": Free("b", Range(1, 4), 2), "n": Free("n", Range(1000, 9000), 3000)}
    func = normalise(te.create_prim_func([x, y]), free)
    target = resolve("x86-64-v3", threads=2).tvm
    scheduled = first_seed(REDUCTION, func, target)[0].mod["main"]
    loops: list[Any] = []
    walk(scheduled.body, (tirx.For, loops.append))
    (shared,) = (loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL)
    (var,) = tirx.analysis.undefined_vars(shared.extent)
    assert evaluate(shared.extent, {var: 1}) == 64
