from __future__ import annotations

from math import prod

import numpy as np
import pytest
from harness import TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests
from scipy.special import log_softmax, softmax
from tvm import te, tirx, topi

from schedules.cpu.reduction import REDUCTION
from schedules.space import best_seed

__all__ = ["pytest_generate_tests"]


def _p(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype)


def _one(make, *shape: int, dtype: str = "float32"):  # type: ignore[no-untyped-def]
    def build() -> list[te.Tensor]:
        a = _p(*shape, dtype=dtype)
        return [a, make(a)]

    return build


def _layer_norm(*shape: int, residual: bool = False, axis: int = -1):  # type: ignore[no-untyped-def]
    def build() -> list[te.Tensor]:
        a, b, g, c = _p(*shape), _p(*shape), _p(shape[axis]), _p(shape[axis])
        x = topi.add(a, b) if residual else a
        inputs = [a, b] if residual else [a]
        return [*inputs, g, c, topi.nn.layer_norm(x, g, c, [axis % len(shape)])]

    return build


def _norm(x: np.ndarray, g: np.ndarray, c: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + c


def _mean_hw(a: te.Tensor) -> te.Tensor:
    return topi.divide(topi.sum(a, axis=[2, 3], keepdims=True), float(int(a.shape[2]) * int(a.shape[3])))


def _softmax_scaled() -> list[te.Tensor]:
    """An attention's softmax: scaled, masked, and cast afterwards."""
    a, m = _p(1, 4, 40, 128), _p(1, 1, 40, 128)
    x = topi.add(topi.multiply(a, tirx.const(0.125, "float32")), m)
    return [a, m, topi.multiply(topi.nn.softmax(x), tirx.const(3.0, "float32"))]


def _l2(a: te.Tensor) -> te.Tensor:
    return topi.divide(a, topi.sqrt(topi.sum(topi.multiply(a, a), axis=1, keepdims=True)))


class TestReduction(SpaceContract):
    space = REDUCTION
    cases = (
        Case("softmax", _one(topi.nn.softmax, 12, 40, 128), lambda a: softmax(a, -1)),
        Case("softmax_one_row", _one(topi.nn.softmax, 1, 1000), lambda a: softmax(a, -1)),
        Case("softmax_odd", _one(topi.nn.softmax, 33, 77), lambda a: softmax(a, -1)),
        Case("softmax_channels", _one(lambda a: topi.nn.softmax(a, axis=1), 2, 21, 16, 20), lambda a: softmax(a, 1)),
        Case("softmax_scaled", _softmax_scaled, lambda a, m: 3 * softmax(0.125 * a + m, -1)),
        Case("log_softmax", _one(topi.nn.log_softmax, 40, 100), lambda a: log_softmax(a, -1)),
        Case("layer_norm", _layer_norm(1, 32, 768), _norm),
        Case("layer_norm_residual", _layer_norm(1, 32, 768, residual=True), lambda a, b, g, c: _norm(a + b, g, c)),
        Case("mean_pixels", _one(_mean_hw, 1, 200, 7, 7), lambda a: a.mean((2, 3), keepdims=True)),
        Case("mean_pixels_blocked", _one(_mean_hw, 1, 12, 13, 13, 16), lambda a: a.mean((2, 3), keepdims=True)),
        Case(
            "global_pool", _one(lambda a: topi.nn.adaptive_pool(a, (1, 1), "avg"), 1, 64, 13, 13),
            lambda a: a.mean((2, 3), keepdims=True),
        ),
        Case("sum_all", _one(topi.sum, 300, 400), lambda a: a.sum()),
        Case("sum_rows", _one(lambda a: topi.sum(a, axis=0), 300, 250), lambda a: a.sum(0)),
        Case("sum_prime", _one(lambda a: topi.sum(a, axis=1), 20, 997), lambda a: a.sum(1)),
        Case("max_channels", _one(lambda a: topi.max(a, axis=1), 1, 64, 28, 28), lambda a: a.max(1)),
        Case("min_short", _one(lambda a: topi.min(a, axis=-1), 100, 5), lambda a: a.min(-1)),
        Case("argmax", _one(lambda a: topi.argmax(a, axis=1), 40, 1000), lambda a: a.argmax(1).astype("int32")),
        Case("sum_int", _one(lambda a: topi.sum(a, axis=1), 64, 80, dtype="int64"), lambda a: a.sum(1)),
        Case("l2_normalise", _one(_l2, 1, 48, 12, 12), lambda a: a / np.sqrt((a * a).sum(1, keepdims=True))),
        Case("float64", _one(topi.nn.softmax, 30, 64, dtype="float64"), lambda a: softmax(a, -1)),
    )


def test_argmax_takes_the_first_of_equals() -> None:
    a = _p(6, 64)
    sch = best_seed(REDUCTION, te.create_prim_func([a, topi.argmax(a, axis=1)]), TARGET)
    data = np.zeros((6, 64), "float32")
    data[2, 17] = data[2, 40] = 5.0
    got = build_and_run(sch.mod, [data, np.full(6, -9, "int32")])[1]
    np.testing.assert_array_equal(got, data.argmax(1))


def test_a_row_is_computed_at_once() -> None:
    """Every stage of softmax shares the parallel row loop, and its buffers hold one row."""
    a = _p(1536, 128)
    script = best_seed(REDUCTION, te.create_prim_func([a, topi.nn.softmax(a)]), TARGET).mod.script()
    assert script.count("T.parallel") == 1


def _gated(a: te.Tensor) -> te.Tensor:
    """What is made of a row's sum is as large as the result, and read twice by it."""
    c = topi.divide(a, topi.sqrt(topi.sum(topi.multiply(a, a), axis=1, keepdims=True)))
    return topi.multiply(c, topi.tanh(topi.multiply(c, tirx.const(0.7, "float32"))))


@pytest.mark.parametrize("columns", [96, 97 * 3])
def test_a_sum_is_taken_once_a_row_though_the_result_does_not_read_it(columns: int) -> None:
    func = te.create_prim_func(list(_one(_gated, 64, columns)()))
    sch = best_seed(REDUCTION, func, TARGET)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    steps = [prod(int(sch.get(loop).extent) for loop in sch.get_loops(block)) for block in blocks]
    assert max(steps) < 2 * 64 * columns  # a vector may reach beyond the row
    data = np.random.default_rng(0).standard_normal((64, columns)).astype("float32")
    got = build_and_run(sch.mod, [data, np.zeros_like(data)])[1]
    c = data.astype("float64") / np.sqrt((data.astype("float64") ** 2).sum(1, keepdims=True))
    np.testing.assert_allclose(got, c * np.tanh(0.7 * c), rtol=1e-5, atol=1e-7)


def test_softmax_survives_large_inputs_and_masks() -> None:
    a = _p(8, 128)
    sch = best_seed(REDUCTION, te.create_prim_func([a, topi.nn.softmax(a)]), TARGET)
    data = np.random.default_rng(0).normal(0, 50, (8, 128)).astype("float32")
    data[:, 100:] = np.finfo("float32").min
    got = build_and_run(sch.mod, [data, np.zeros_like(data)])[1]
    np.testing.assert_allclose(got, softmax(data.astype("float64"), -1), rtol=1e-5, atol=1e-7)
