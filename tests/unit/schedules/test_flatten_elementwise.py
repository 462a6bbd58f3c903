"""Free axes of elementwise functions are one axis, and callers see none of it."""

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
from schedules import registry
from schedules.analysis import walk
from schedules.flatten_spatial import FLAT, FUSED
from schedules.free import SIZES, variables
from schedules.lowering import PIPELINE
from schedules.pieces import Piece, boxed, with_pieces
from schedules.space import first_seed

FREE = {"b": Free("b", Range(1, 8), 2), "t": Free("t", Range(1, 30), 16)}
RNG = np.random.default_rng(2)

Made = tuple[list[Any], Callable[..., np.ndarray]]


def _bias(b: tirx.Var, t: tirx.Var) -> Made:
    x, c = te.placeholder((b, t, 24), name="x"), te.placeholder((24,), name="c")
    h = te.compute(x.shape, lambda *i: x(*i) + c[i[2]], name="h")
    return [x, c, te.compute(x.shape, lambda *i: te.max(h(*i), 0.0), name="y")], lambda x, c: np.maximum(x + c, 0)


def _heads(b: tirx.Var, t: tirx.Var) -> Made:
    """A fixed axis lies between the free ones, and behind them a number that is all that a row is added."""
    x, c = te.placeholder((b, 3, t, 5), name="x"), te.placeholder((1,), name="c")
    return [x, c, te.compute(x.shape, lambda *i: x(*i) * x(*i) + c[0], name="y")], lambda x, c: x * x + c


def _groups(b: tirx.Var, t: tirx.Var) -> Made:
    x, z = te.placeholder((4, b, t), name="x"), te.placeholder((b, t), name="z")
    return [x, z, te.compute(x.shape, lambda g, i, j: x[g, i, j] - z[i, j], name="y")], lambda x, z: x - z


def _rows(b: tirx.Var, t: tirx.Var) -> Made:
    x, k = te.placeholder((b, t, 6), name="x"), te.reduce_axis((0, 6), name="k")
    s = te.compute((b, t), lambda i, j: te.sum(x[i, j, k], k), name="s")
    return [x, te.compute(x.shape, lambda i, j, k: x[i, j, k] - s[i, j], name="y")], lambda x: x - x.sum(-1)[..., None]


def _gathered(b: tirx.Var, t: tirx.Var) -> Made:
    ids, table = te.placeholder((b, t), "int32", name="ids"), te.placeholder((20, 8), name="table")
    y = te.compute((b, t, 8), lambda i, j, k: table[ids[i, j], k], name="y")
    return [ids, table, y], lambda ids, table: table[ids]


def _mean(b: tirx.Var, t: tirx.Var) -> Made:
    x = te.placeholder((3, b, t), name="x")
    i, j = te.reduce_axis((0, b), name="i"), te.reduce_axis((0, t), name="j")
    s = te.compute((3,), lambda g: te.sum(x[g, i, j], [i, j]), name="s")
    return [x, te.compute((3,), lambda g: s[g] / (b * t).astype("float32"), name="y")], lambda x: x.mean((1, 2))


def _function(made: Callable[[tirx.Var, tirx.Var], Made]) -> tirx.PrimFunc:
    return normalise(te.create_prim_func(made(tirx.Var("b", "int64"), tirx.Var("t", "int64"))[0]), FREE)


def _checked(func: tirx.PrimFunc, made: Callable[[tirx.Var, tirx.Var], Made], b: int, t: int) -> None:
    """Compare what is built with numpy at one size."""
    library = tvm.compile(tvm.IRModule({"main": func}), target=TARGET, tir_pipeline=PIPELINE)
    sizes = {"b": b, "t": t}
    tensors, wanted = made(tirx.Var("b", "int64"), tirx.Var("t", "int64"))
    shapes = [[sizes[str(d.name)] if isinstance(d, tirx.Var) else int(d) for d in each.shape] for each in tensors]
    arrays = [RNG.integers(0, 20, shape, np.int32) if "int" in str(each.dtype) else RNG.normal(size=shape).astype(
        np.float32) for shape, each in zip(shapes, tensors, strict=True)]
    given = [tvm.runtime.tensor(array) for array in arrays]
    library["main"](*given)
    np.testing.assert_allclose(given[-1].numpy(), wanted(*arrays[:-1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("made", "places", "fused", "sizes"), [
    (_bias, [0, -1, 0], [0, 0], [1, 240, 32]),
    (_heads, [0, -1, 0], [0, 3, 0], [3, 720, 96]),
    (_groups, [1, 0, 1], [0, 0], [1, 240, 32]),
    (_rows, [0, 0], [0, 0], [1, 240, 32]),
    (_gathered, [0, -1, 0], [0, 0], [1, 240, 32]),
    (_mean, [1, -1], [0, 0], [1, 240, 32]),
])
def test_free_axes_are_one(
    made: Callable[[tirx.Var, tirx.Var], Made], places: list[int], fused: list[int], sizes: list[int]
) -> None:
    func = _function(made)
    assert [list(map(int, each)) for each in func.attrs[SIZES]] == [sizes]
    assert [int(each) for each in func.attrs[FLAT]] == places
    assert [int(each) for each in func.attrs[FUSED]] == fused
    assert len(variables(func)) == 1
    scheduled = first_seed(registry.find(func, TARGET), func, TARGET)[0].mod["main"]
    divided: list[Any] = []
    walk(scheduled.body, (tirx.FloorDiv, divided.append), (tirx.FloorMod, divided.append))
    assert all(isinstance(each.b, tirx.IntImm) for each in divided), "a division by a free size"
    for b, t in ((1, 1), (1, 7), (3, 5), (8, 30)):
        _checked(scheduled, made, b, t)


def test_pieces_are_given_the_tensors_that_they_have() -> None:
    whole, box = _function(_bias), ((1, 40),)
    piece = Piece(box, boxed(whole, box, [10]))
    for b, t in ((1, 1), (2, 20), (3, 14), (8, 30)):
        _checked(with_pieces(whole, [piece]), _bias, b, t)


def _shifted(b: tirx.Var, t: tirx.Var) -> Made:
    x = te.placeholder((b, t, 4), name="x")
    return [x, te.compute(x.shape, lambda i, j, k: x[i, te.max(j - 1, 0), k], name="y")], lambda x: x


def _counted(b: tirx.Var, t: tirx.Var) -> Made:
    x = te.placeholder((b, t, 4), name="x")
    return [x, te.compute(x.shape, lambda i, j, k: x[i, j, k] + j.astype("float32"), name="y")], lambda x: x


def _broadcast(b: tirx.Var, t: tirx.Var) -> Made:
    x, z = te.placeholder((b, t, 4), name="x"), te.placeholder((b, 4), name="z")
    return [x, z, te.compute(x.shape, lambda i, j, k: x[i, j, k] + z[i, k], name="y")], lambda x, z: x


def _transposed(b: tirx.Var, t: tirx.Var) -> Made:
    x = te.placeholder((t, b, 4), name="x")
    return [x, te.compute((b, t, 4), lambda i, j, k: x[j, i, k], name="y")], lambda x: x


def _attended(b: tirx.Var, t: tirx.Var) -> Made:
    """Of two axes of one size, one is summed up."""
    x, k = te.placeholder((b, t, t), name="x"), te.reduce_axis((0, t), name="k")
    return [x, te.compute((b, t), lambda i, j: te.sum(x[i, j, k], k), name="y")], lambda x: x


def _scaled(b: tirx.Var, t: tirx.Var) -> Made:
    x = te.placeholder((b, t, 4), name="x")
    return [x, te.compute(x.shape, lambda *i: x(*i) * t.astype("float32"), name="y")], lambda x: x


@pytest.mark.parametrize("made", [_shifted, _counted, _broadcast, _transposed, _attended, _scaled])
def test_what_depends_on_its_place_keeps_its_axes(made: Callable[[tirx.Var, tirx.Var], Made]) -> None:
    func = _function(made)
    assert FLAT not in func.attrs
    assert len(variables(func)) == 2
