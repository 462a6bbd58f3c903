"""What nothing reads is not computed, and nothing else changes."""

from __future__ import annotations

import numpy as np
import tvm
from harness import TARGET
from tvm import te, tirx

from mlc.graph.task import normalise
from mlc.shapes import Free, Range
from schedules.analysis import walk
from schedules.pieces import boxed
from schedules.trimmed import trimmed

FREE = {"n": Free("n", Range(1, 40), 8)}


def _padded() -> tirx.PrimFunc:
    """``y = 2 x + 1`` by way of whole blocks of 16."""
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), name="x")
    blocks = te.compute(((n + 15) // 16, 16), lambda b, i: tirx.if_then_else(
        b * 16 + i < n, x[b * 16 + i] * tirx.const(2.0, "float32"), tirx.const(0.0, "float32")), name="blocks")
    more = te.compute(blocks.shape, lambda b, i: blocks[b, i] + tirx.const(1.0, "float32"), name="more")
    return normalise(te.create_prim_func([x, te.compute((n,), lambda i: more[i // 16, i % 16], name="y")]), FREE)


def _shapes(func: tirx.PrimFunc) -> list[list[object]]:
    found: list[list[object]] = []
    walk(func.body, (tvm.s_tir.SBlock, lambda block: found.extend(
        [int(e) if isinstance(e, tirx.IntImm) else None for e in b.shape] for b in block.alloc_buffers)))
    return found


def test_intermediate_tensors_are_as_large_as_what_is_read() -> None:
    func = _padded()
    assert _shapes(func) == [[None, 16]] * 2
    for (low, high), shape in {(1, 1): [1, 1], (2, 4): [1, 4], (1, 16): [1, 16], (1, 40): [None, 16]}.items():
        part = boxed(func, ((low, high),), (high,))
        assert _shapes(part) == [shape] * 2
        library = tvm.compile(part, target=TARGET)
        for n in range(low, high + 1):
            x = np.random.default_rng(n).standard_normal(n).astype("float32")
            y = tvm.runtime.tensor(np.full(n, np.nan, "float32"))
            library(tvm.runtime.tensor(x), y)
            np.testing.assert_allclose(y.numpy(), 2 * x + 1, rtol=1e-6)


def test_what_no_size_needs_stays() -> None:
    """As in a product with packed weights, of which the last panel is cut off again."""
    n, k = tirx.Var("n", "int64"), te.reduce_axis((0, 8), name="k")
    x, w = te.placeholder((n, 8), name="x"), te.placeholder((2, 8, 16), name="w")
    product = te.compute((n, 32), lambda i, j: te.sum(x[i, k] * w[j // 16, k, j % 16], axis=k), name="product")
    func = normalise(te.create_prim_func([x, w, te.compute((n, 27), lambda i, j: product[i, j], name="y")]), FREE)
    assert _shapes(boxed(func, ((1, 1),), (1,))) == [[1, 32]]


def test_a_function_of_which_all_is_read_stays_the_same() -> None:
    x = te.placeholder((8,), name="x")
    twice = te.compute((8,), lambda i: x[i] + x[i], name="twice")
    func = te.create_prim_func([x, te.compute((8,), lambda i: twice[7 - i], name="y")])
    assert trimmed(func) is func
