"""Attention of a few queries: every seed against float64, on narrower vectors too, and as pieces of a free range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from attention_cases import grown
from harness import CORES, TARGET, Case, SpaceContract, pytest_generate_tests
from scipy.special import softmax
from tvm import te, tirx

from mlc.graph.ir.int32_indices import narrowed
from mlc.graph.kernels.query_blocks import QUERIES, Sizes, attention
from mlc.graph.task import normalise
from mlc.shapes import Free, Range
from mlc.sizes import scope, size_of
from mlc.target import resolve
from schedules.cpu.attention import ATTENTION
from schedules.cpu.attention_few import ATTENTION_FEW
from schedules.lowering import PIPELINE
from schedules.math import expand_math
from schedules.pieces import Piece, boxed, with_pieces
from schedules.registry import find
from schedules.space import first_seed, schedule_with

__all__ = ["pytest_generate_tests"]


def _reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | float, zeros: bool = False
) -> np.ndarray:
    """Of ``q [tokens, heads, depth]`` over ``k`` and ``v [keys, groups, ..]``, with ``mask [tokens, keys]``."""
    q, k, v = (np.swapaxes(each.astype("float64"), 0, 1) for each in (q, k, v))
    k, v = (np.repeat(each, len(q) // len(each), 0) for each in (k, v))
    weights = softmax(q @ k.transpose(0, 2, 1) * k.shape[-1] ** -0.5 + mask, -1)
    return np.swapaxes((np.nan_to_num(weights) if zeros else weights) @ v, 0, 1)


def _cached(
    heads: int, groups: int, tokens: int, keys: int, depth: int, masked: bool = False, zeros: bool = False
) -> tuple[Callable[[], tirx.PrimFunc], Callable]:
    """Queries ``[tokens, heads, depth]`` over a cache ``[keys, groups, depth]``, one group for several heads."""
    def build() -> tirx.PrimFunc:
        q = te.placeholder((tokens, heads, depth), name="q")
        k, v = (te.placeholder((keys, groups, depth), name=name) for name in "kv")
        masks = [te.placeholder((keys, tokens), name="mask")] if masked else []
        of = heads // groups
        out = attention(
            Sizes((heads,), tokens, keys, depth, depth), depth**-0.5, lambda h, i, d: q[i, h, d],
            lambda h, j, d: k[j, h // of, d], lambda h, j, d: v[j, h // of, d],
            (lambda h, j, i: masks[0][j, i]) if masked else None, (1, 0, 2), zeros,
        )
        return narrowed(te.create_prim_func([q, k, v, *masks, out]))

    if masked:
        return build, lambda q, k, v, mask: _reference(q, k, v, mask.T, zeros)
    return build, lambda q, k, v: _reference(q, k, v, 0.0)


class TestAttentionFew(SpaceContract):
    space = ATTENTION_FEW
    cases = (
        Case("one_query", *_cached(4, 4, 1, 80, 64)),
        Case("grouped_heads", *_cached(8, 2, 1, 37, 32)),
        Case("three_masked", *_cached(2, 2, 3, 33, 24, masked=True)),
        Case("seven_of_one_key", *_cached(3, 1, 7, 1, 20)),
        Case("present", *grown(4, 1, 52, 32, rows=3)),
    )


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize(("tokens", "keys", "depth"), [(1, 50, 64), (5, 17, 20)])
def test_narrower_vectors(target: str, tokens: int, keys: int, depth: int) -> None:
    build, reference = _cached(4, 2, tokens, keys, depth)
    func, on, rng = build(), resolve(target, threads=CORES).tvm, np.random.default_rng(depth)
    q, k, v = (rng.standard_normal(shape).astype("float32")
               for shape in ((tokens, 4, depth), (keys, 2, depth), (keys, 2, depth)))
    sch, _ = first_seed(ATTENTION_FEW, func, on)
    out = tvm.runtime.tensor(np.full(q.shape, np.nan, "float32"))
    tvm.compile(expand_math(sch.mod["main"]), target=on)(*map(tvm.runtime.tensor, (q, k, v)), out)
    np.testing.assert_allclose(out.numpy(), reference(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zeros", [False, True])
def test_rows_that_a_mask_forbids_whole(zeros: bool) -> None:
    """They are zeros where that is asked for, and NaN as softmax says elsewhere; large scores do not overflow."""
    build, reference = _cached(2, 2, 3, 21, 16, masked=True, zeros=zeros)
    rng = np.random.default_rng(4)
    q, k, v = (30 * rng.standard_normal(shape).astype("float32") for shape in ((3, 2, 16), (21, 2, 16), (21, 2, 16)))
    mask = np.where(rng.random((21, 3)) < 0.5, 0, -np.inf).astype("float32")
    mask[:, 1] = -np.inf
    sch, _ = first_seed(ATTENTION_FEW, build(), TARGET)
    out = tvm.runtime.tensor(np.full(q.shape, 7, "float32"))
    tvm.compile(expand_math(sch.mod["main"]), target=TARGET, tir_pipeline=PIPELINE)(
        *map(tvm.runtime.tensor, (q, k, v, mask)), out)
    found, wanted = out.numpy(), reference(q, k, v, mask.astype("float64"))
    assert (found[1] == 0).all() if zeros else np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], wanted[[0, 2]], rtol=1e-4, atol=1e-4 * np.abs(v).max())


CAPACITY, HEADS, GROUPS, DEPTH = 70, 4, 2, 16
FREE = {"s": Free("s", Range(1, CAPACITY), 16), "p": Free("p", Range(0, CAPACITY - 1), 32)}


def _growing() -> tirx.PrimFunc:
    """``s`` queries behind ``p`` keys of former ones, masked."""
    s, p = tirx.Var("s", "int64"), tirx.Var("p", "int64")
    with scope(FREE):
        q, past = te.placeholder((s, HEADS, DEPTH), name="q"), te.placeholder((p,), "uint8", name="past")
        k, v = (te.placeholder((p + s, GROUPS, DEPTH), name=name) for name in "kv")
        mask = te.placeholder((p + s, (s + QUERIES - 1) // QUERIES * QUERIES), name="mask")
        of = HEADS // GROUPS
        out = attention(
            Sizes((HEADS,), size_of(s), size_of(p + s), DEPTH, DEPTH), DEPTH**-0.5, lambda h, i, d: q[i, h, d],
            lambda h, j, d: k[j, h // of, d], lambda h, j, d: v[j, h // of, d], lambda h, j, i: mask[j, i], (1, 0, 2),
        )
        return normalise(te.create_prim_func([q, past, k, v, mask, out]), FREE)


def test_a_free_number_of_queries_has_pieces_for_few() -> None:
    """One and a few queries, causal behind any past, beside more of them in the wider kernel."""
    func, pieces = _growing(), []
    assert find(func, TARGET) is ATTENTION
    for low, high in ((1, 1), (2, 4)):
        box = ((low, high), (0, CAPACITY - 1))
        part = boxed(func, box, (high, 32))
        assert find(part, TARGET) is ATTENTION_FEW
        pieces.append(Piece(box, expand_math(first_seed(ATTENTION_FEW, part, TARGET)[0].mod["main"])))
    whole = expand_math(first_seed(ATTENTION, func, TARGET)[0].mod["main"])
    library = tvm.compile(tvm.IRModule({"main": with_pieces(whole, pieces)}), target=TARGET, tir_pipeline=PIPELINE)
    rng = np.random.default_rng(2)
    for s in (1, 2, 3, 4, 5, 17):
        for p in (0, 1, 14, 15, 16, 31, CAPACITY - s):
            q, k, v = (rng.standard_normal(shape).astype("float32") for shape in (
                (s, HEADS, DEPTH), (p + s, GROUPS, DEPTH), (p + s, GROUPS, DEPTH)))
            mask = np.zeros((p + s, -(-s // QUERIES) * QUERIES), "float32")
            mask[:, :s][np.arange(p + s)[:, None] > p + np.arange(s)] = -np.inf
            out = tvm.runtime.tensor(np.full(q.shape, np.nan, "float32"))
            library["main"](*map(tvm.runtime.tensor, (q, np.zeros(p, "uint8"), k, v, mask)), out)
            np.testing.assert_allclose(out.numpy(), _reference(q, k, v, mask[:, :s].T.astype("float64")), rtol=1e-5,
                                       atol=1e-5, err_msg=f"{s} behind {p}")


def test_random_decisions_of_a_part_keep_its_result() -> None:
    func = boxed(_growing(), ((1, 1), (0, CAPACITY - 1)), (1, 32))
    decisions = {"heads": 1, "m": 1, "kd": 1, "f": 1, "kj": 16}
    sch = schedule_with(ATTENTION_FEW, func, TARGET, decisions)
    library = tvm.compile(expand_math(sch.mod["main"]), target=TARGET, tir_pipeline=PIPELINE)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape).astype("float32") for shape in (
        (1, HEADS, DEPTH), (20, GROUPS, DEPTH), (20, GROUPS, DEPTH)))
    out = tvm.runtime.tensor(np.full(q.shape, np.nan, "float32"))
    library(*map(tvm.runtime.tensor, (q, np.zeros(19, "uint8"), k, v, np.zeros((20, QUERIES), "float32"))), out)
    np.testing.assert_allclose(out.numpy(), _reference(q, k, v, 0.0), rtol=1e-5, atol=1e-5)
