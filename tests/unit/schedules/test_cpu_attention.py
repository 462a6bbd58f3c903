"""Attention in one kernel: every seed and random decisions against float64, on AVX2 too."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import tvm
from attention_cases import grown
from harness import TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests
from scipy.special import softmax
from tvm import s_tir, te, tirx

from mlc.graph.ir.int32_indices import narrowed
from mlc.graph.kernels.query_blocks import QUERIES, Sizes, attention
from mlc.target import resolve
from schedules.analysis import walk
from schedules.cpu.attention import ATTENTION
from schedules.math import expand_math
from schedules.space import InvalidDecision, schedule_with

__all__ = ["pytest_generate_tests"]


def _projected(heads: int, tokens: int, depth: int, mask: str = "") -> tuple[Callable[[], tirx.PrimFunc], Callable]:
    """Self-attention over the projections ``[tokens, 3 * heads * depth]`` as GPT-2 has them; the result is ``[tokens,
    heads, depth]``. ``mask``: one number a key, or one for each pair of tokens."""
    width, padded = heads * depth, -(-tokens // QUERIES) * QUERIES

    def build() -> tirx.PrimFunc:
        x = te.placeholder((tokens, 3 * width), name="x")
        masks = {"": [], "keys": [te.placeholder((1, tokens, 1), name="mask")],
                 "pairs": [te.placeholder((1, tokens, padded), name="mask")]}[mask]
        load = [lambda h, i, d, first=first: x[i, first * width + h * depth + d] for first in range(3)]
        add = (lambda h, j, i: masks[0][0, j, 0 if mask == "keys" else i]) if mask else None
        sizes = Sizes((heads,), tokens, tokens, depth, depth)
        out = attention(sizes, depth**-0.5, *load, add, (1, 0, 2))
        return narrowed(te.create_prim_func([x, *masks, out]))

    def plain(x: np.ndarray, added: np.ndarray | float) -> np.ndarray:
        q, k, v = x.reshape(tokens, 3, heads, depth).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1) * depth**-0.5 + added
        return (softmax(scores, -1) @ v).transpose(1, 0, 2)

    def masked(x: np.ndarray, m: np.ndarray) -> np.ndarray:
        return plain(x, np.swapaxes(m, 1, 2)[:, :tokens] if mask == "pairs" else np.swapaxes(m, 1, 2))

    return build, masked if mask else (lambda x: plain(x, 0.0))


def _crossed() -> tirx.PrimFunc:
    """Two batch axes, fewer keys than queries, other features in the values, one head of keys for three of queries."""
    q, k = te.placeholder((2, 3, 33, 24), name="q"), te.placeholder((2, 24, 10), name="k")
    v = te.placeholder((2, 10, 20), name="v")
    out = attention(
        Sizes((2, 3), 33, 10, 24, 20), 1.0, lambda b, h, i, d: q[b, h, i, d], lambda b, h, j, d: k[b, d, j],
        lambda b, h, j, f: v[b, j, f], None, (0, 1, 2, 3),
    )
    return narrowed(te.create_prim_func([q, k, v, out]))


def _crossed_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return softmax(q @ k[:, None], -1) @ v[:, None]


class TestAttention(SpaceContract):
    space = ATTENTION
    cases = (
        Case("heads_64", *_projected(3, 64, 64)),
        Case("present", *grown(2, 17, 20, 16)),
        Case("heads_32_masked_keys", *_projected(2, 48, 32, "keys")),
        Case("heads_80", *_projected(2, 32, 80)),
        Case("odd_tokens", *_projected(2, 197, 64)),
        Case("odd_tokens_masked_pairs", *_projected(2, 37, 16, "pairs")),
        Case("less_than_a_block", *_projected(4, 9, 8)),
        Case("crossed", _crossed, _crossed_reference),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize(("heads", "tokens", "depth"), [(2, 64, 64), (1, 41, 32), (1, 32, 80)])
def test_narrower_vectors(target: str, heads: int, tokens: int, depth: int) -> None:
    build, reference = _projected(heads, tokens, depth)
    func, on = build(), resolve(target).tvm
    x = np.random.default_rng(depth).standard_normal((tokens, 3 * heads * depth)).astype("float32")
    expected = reference(x.astype("float64"))
    tried = 0
    for decisions in list(ATTENTION.seeds(func, on))[:3]:
        try:
            sch = schedule_with(ATTENTION, func, on, decisions)
        except InvalidDecision:
            continue
        out = tvm.runtime.tensor(np.full(expected.shape, np.nan, "float32"))
        tvm.compile(expand_math(sch.mod["main"]), target=on)(tvm.runtime.tensor(x), out)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
        tried += 1
    assert tried


def test_large_scores_and_masked_keys() -> None:
    """Scores of hundreds do not overflow, and what -inf or the lowest number masks has no influence."""
    build, reference = _projected(2, 24, 16, "keys")
    func = build()
    rng = np.random.default_rng(1)
    x = 30 * rng.standard_normal((24, 96)).astype("float32")
    for lowest in (-np.inf, np.finfo("float32").min):
        mask = np.where(rng.random((1, 24, 1)) < 0.5, 0, lowest).astype("float32")
        expected = reference(x.astype("float64"), mask.astype("float64"))
        sch = schedule_with(ATTENTION, func, TARGET, next(iter(ATTENTION.seeds(func, TARGET))))
        mod = tvm.IRModule({"main": expand_math(sch.mod["main"])})
        got = build_and_run(mod, [x, mask, np.zeros(expected.shape, "float32")])[2]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_the_scores_are_never_whole() -> None:
    """No buffer of the kernel holds the scores of more than a few blocks of queries."""
    tokens = 512
    build, _ = _projected(2, tokens, 32)
    func = build()
    sch = schedule_with(ATTENTION, func, TARGET, next(iter(ATTENTION.seeds(func, TARGET))))
    passes = tvm.s_tir.transform
    mod = sch.mod
    for each in (passes.PlanAndUpdateBufferAllocationLocation, passes.ConvertBlocksToOpaque,
                 passes.CompactBufferAllocation):
        mod = each()(mod)
    sizes: list[int] = []

    def block(node: s_tir.SBlock) -> None:
        sizes.extend(prod(int(extent) for extent in buffer.shape) for buffer in node.alloc_buffers)

    walk(mod["main"].body, (s_tir.SBlock, block))
    assert QUERIES * tokens <= max(sizes) <= 4 * QUERIES * tokens
