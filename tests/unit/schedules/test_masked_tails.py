"""Tail tiles along vectors are computed under a mask: right at every size, and they access what is there alone."""

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
from schedules import registry
from schedules.analysis import loads, walk
from schedules.lowering import PIPELINE
from schedules.masked_tails import with_masked_tails
from schedules.space import first_seed

DEPTH, HIGH = 24, 70
RNG = np.random.default_rng(4)
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, HIGH)


def _scores(t: tirx.Var) -> tuple[list[Any], Callable[..., np.ndarray]]:
    """Products of each row with each, rounded to bytes."""
    x, w = te.placeholder((t, DEPTH), name="x"), te.placeholder((DEPTH, t), name="w")
    k = te.reduce_axis((0, DEPTH), name="k")
    s = te.compute((t, t), lambda i, j: te.sum(x[i, k] * w[k, j], k), name="s")
    y = te.compute((t, t), lambda i, j: te.max(te.min(te.round(s[i, j]), 9.0), -9.0).astype("int8"), name="y")
    return [x, w, y], lambda x, w: np.clip(np.round(x.astype(np.float64) @ w), -9, 9).astype(np.int8)


def _window(t: tirx.Var) -> tuple[list[Any], Callable[..., np.ndarray]]:
    """Means of three neighbours in each of some lines, with zeros around."""
    x = te.placeholder((4, t), name="x")
    padded = te.compute((4, t + 2), lambda i, j: te.if_then_else(
        tirx.all(j >= 1, j <= t), x[i, j - 1], tirx.const(0.0, "float32")), name="padded")
    k = te.reduce_axis((0, 3), name="k")
    s = te.compute((4, t), lambda i, j: te.sum(padded[i, j + k], k), name="s")

    def wanted(x: np.ndarray) -> np.ndarray:
        wide = np.pad(x, ((0, 0), (1, 1)))
        return wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]

    return [x, s], wanted


@pytest.mark.parametrize("target", [TARGET, resolve("x86-64-v3").tvm], ids=["native", "avx2"])
@pytest.mark.parametrize("made", [_scores, _window])
def test_every_size_is_right(
    made: Callable[[tirx.Var], tuple[list[Any], Callable[..., np.ndarray]]], target: tvm.target.Target
) -> None:
    tensors, wanted = made(tirx.Var("t", "int64"))
    func = normalise(te.create_prim_func(tensors), {"t": Free("t", Range(1, HIGH), 40)})
    scheduled = first_seed(registry.find(func, target), func, target)[0].mod["main"]
    library = tvm.compile(tvm.IRModule({"main": scheduled}), target=target, tir_pipeline=PIPELINE)
    for t in SIZES:
        shapes = [[t if isinstance(d, tirx.Var) else int(d) for d in each.shape] for each in tensors]
        arrays = [RNG.normal(size=shape).astype(np.float32) for shape in shapes[:-1]]
        expected = wanted(*arrays)
        result = tvm.runtime.tensor(np.full(shapes[-1], 77, str(tensors[-1].dtype)))
        library["main"](*map(tvm.runtime.tensor, arrays), result)
        np.testing.assert_allclose(result.numpy(), expected, atol=1e-5, err_msg=str(t))


def _function(condition: Callable[[Any, Any], Any], value: Callable[..., Any]) -> tirx.PrimFunc:
    """``for s in range(16): if condition: B[n + s] = value``, lowered."""
    a, b = (tirx.decl_buffer([64], "float32", name=name) for name in "ab")
    n, s = tirx.Var("n", "int32"), tirx.Var("s", "int32")
    store = tirx.BufferStore(b, value(a, n, s), [n + s])
    loop = tirx.For(s, tirx.const(0, "int32"), tirx.const(16, "int32"), tirx.ForKind.SERIAL,
                    tirx.IfThenElse(condition(n, s), store, None))
    return tirx.PrimFunc([a, b, n], loop).with_attr("global_symbol", "f")


def _loaded(a: Any, n: Any, s: Any) -> Any:
    return tirx.BufferLoad(a, [n + s]) * 2.0


@pytest.mark.parametrize(("condition", "value", "masked", "tested", "kept"), [
    pytest.param(lambda n, s: n + s < 40, _loaded, True, 0, 0, id="neighbours alone"),
    pytest.param(lambda n, s: n + s < 40, lambda a, n, s: _loaded(a, n, s) + tirx.BufferLoad(a, [n]), True, 1, 0,
                 id="what lanes share is read if the first is there"),
    pytest.param(lambda n, s: n + s >= 3, lambda a, n, s: _loaded(a, n, s) + tirx.BufferLoad(a, [n]), True, 1, 0,
                 id="or the last"),
    pytest.param(lambda n, s: tirx.all(n + s >= 3, n + s < 9), lambda a, n, s: _loaded(a, n, s) + tirx.BufferLoad(
        a, [n]), True, 2, 1, id="of lanes in the middle one by one"),
    pytest.param(lambda n, s: n + s < 40, lambda a, n, s: tirx.BufferLoad(a, [s * 2]), False, 1, 1, id="no neighbours"),
    pytest.param(lambda n, s: n < 40, _loaded, False, 1, 1, id="a condition on all lanes"),
])
def test_what_is_masked(
    condition: Callable[[Any, Any], Any], value: Callable[..., Any], masked: bool, tested: int, kept: int
) -> None:
    func = _function(condition, value)
    made = with_masked_tails(func)
    assert (made is not func) == masked
    tests: list[Any] = []
    loops: list[Any] = []
    walk(made.body, (tirx.IfThenElse, tests.append), (tirx.For, loops.append))
    assert (len(tests), len(loops)) == (tested, kept)


@pytest.mark.parametrize("n", [0, 20, 25, 30, 39, 40, 48])
def test_masked_code_stores_what_the_condition_allows(n: int) -> None:
    func = with_masked_tails(_function(lambda n, s: n + s < 40, _loaded))
    assert not loads(func.body) or "masked" in func.script()
    library = tvm.compile(tvm.IRModule({"f": func.with_attr("tirx.noalias", True)}), target=TARGET)
    given, result = RNG.normal(size=64).astype(np.float32), np.full(64, 5, np.float32)
    expected = result.copy()
    expected[n : min(n + 16, 40)] = 2 * given[n : min(n + 16, 40)]
    made = tvm.runtime.tensor(result)
    library["f"](tvm.runtime.tensor(given), made, n)
    np.testing.assert_array_equal(made.numpy(), expected)
