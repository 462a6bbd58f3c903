from __future__ import annotations

import numpy as np
from harness import TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests
from scipy.special import softmax
from tvm import te, tirx, topi
from tvm.script import tirx as T

from schedules.cpu.fallback import FALLBACK
from schedules.registry import find
from schedules.space import best_seed

__all__ = ["pytest_generate_tests"]


def _p(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype)


def _attention() -> list[te.Tensor]:
    """Two contractions with a softmax between them: no template takes this."""
    q, k, v = _p(48, 64), _p(48, 64), _p(48, 64)
    return [q, k, v, topi.matmul(topi.nn.softmax(topi.matmul(q, k, transp_b=True)), v)]


def _moments() -> list[te.Tensor]:
    a = _p(40, 300)
    return [a, topi.sum(a, axis=1), topi.max(a, axis=1)]


class TestFallback(SpaceContract):
    space = FALLBACK
    cases = (
        Case("attention", _attention, lambda q, k, v: softmax(q @ k.T, -1) @ v),
        Case("moments", _moments, lambda a: (a.sum(1), a.max(1))),
    )


class TestFallbackTakesEverything(SpaceContract):
    """What other spaces do better is still correct, and no naive nest, under the fallback."""

    space = FALLBACK
    first = False
    cases = (
        Case("relu", lambda: [a := _p(40, 90), topi.nn.relu(a)], lambda a: np.maximum(a, 0)),
        Case("softmax", lambda: [a := _p(40, 90), topi.nn.softmax(a)], lambda a: softmax(a, -1)),
        Case("matmul", lambda: [a := _p(40, 90), b := _p(90, 64), topi.matmul(a, b)], lambda a, b: a @ b),
        Case("transpose", lambda: [a := _p(300, 400), topi.transpose(a)], lambda a: a.T),
    )


def _run(func: tirx.PrimFunc, *arrays: np.ndarray) -> list[np.ndarray]:
    assert find(func, TARGET) is FALLBACK
    return build_and_run(best_seed(FALLBACK, func, TARGET).mod, arrays)


def test_sort_stays_as_it_is() -> None:
    a = _p(16, 50)
    data = np.random.default_rng(0).normal(size=(16, 50)).astype("float32")
    got = _run(te.create_prim_func([a, topi.sort(a)]), data, np.zeros_like(data))
    np.testing.assert_array_equal(got[1], np.sort(data, -1))


def test_top_k() -> None:
    a = _p(16, 50)
    data = np.random.default_rng(1).normal(size=(16, 50)).astype("float32")
    func = te.create_prim_func([a, *topi.topk(a, k=3, axis=1)])
    got = _run(func, data, np.zeros((16, 3), "float32"), np.zeros((16, 3), "int64"))
    np.testing.assert_array_equal(got[1], -np.sort(-data, -1)[:, :3])


def test_cumulative_sum() -> None:
    a = _p(16, 50)
    data = np.random.default_rng(2).normal(size=(16, 50)).astype("float32")
    got = _run(te.create_prim_func([a, topi.cumsum(a, axis=1)]), data, np.zeros_like(data))
    np.testing.assert_allclose(got[1], np.cumsum(data.astype("float64"), 1), rtol=1e-5, atol=1e-5)


def test_a_function_without_blocks() -> None:
    @T.prim_func
    def main(a: T.Buffer((100,), "float32"), b: T.Buffer((100,), "float32")) -> None:
        for i in range(100):
            b[i] = a[i] * 2.0

    data = np.random.default_rng(3).normal(size=100).astype("float32")
    got = _run(main.with_attr("global_symbol", "main"), data, np.zeros_like(data))
    np.testing.assert_array_equal(got[1], data * 2)


def test_an_opaque_block_beside_a_plain_one() -> None:
    """A running sum cannot be moved; the doubling after it is still vectorised."""

    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((4096,), "float32"), c: T.Buffer((4096,), "float32")) -> None:
        T.func_attr({"tirx.noalias": True})
        b = T.sblock_alloc_buffer((4096,))
        for i in range(4096):
            with T.sblock("scan"):
                v = T.axis.opaque(4096, i)
                T.reads(a[0:4096], b[0:4096])
                T.writes(b[0:4096])
                b[v] = a[v] + T.if_then_else(v > 0, b[T.max(v - 1, 0)], T.float32(0))
        for i in range(4096):
            with T.sblock("double"):
                v = T.axis.spatial(4096, i)
                c[v] = b[v] * T.float32(2)

    func = main.with_attr("global_symbol", "main")
    data = np.random.default_rng(4).uniform(size=4096).astype("float32")
    got = _run(func, data, np.zeros_like(data))
    np.testing.assert_allclose(got[1], 2 * np.cumsum(data.astype("float64")), rtol=1e-4)
    assert "T.vectorized" in best_seed(FALLBACK, func, TARGET).mod.script()


def test_empty_tensors() -> None:
    a = _p(0, 90)
    func = te.create_prim_func([a, topi.nn.softmax(a)])
    assert find(func, TARGET) is FALLBACK
    (got,) = build_and_run(best_seed(FALLBACK, func, TARGET).mod, [np.zeros((0, 90), "float32")] * 2)[1:]
    assert got.shape == (0, 90)
