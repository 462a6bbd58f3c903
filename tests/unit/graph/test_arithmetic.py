"""Divisions and powers by constants become products and roots; constants are folded."""

from __future__ import annotations

import numpy as np
import pytest
from relax_evaluation import (
    RNG,
    assert_becomes,
    assert_same_values,
    assert_unchanged,
    evaluate,
    module,
    operators,
    values,
    weight,
)
from tvm import relax
from tvm.script import relax as R

from mlc.graph.simplify import CheaperArithmetic, EliminateCommonSubexpressions, FoldConstants


def test_division_subtraction_and_square() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.subtract(x, R.const(2.0, "float32"))
            b = R.divide(a, R.const(4.0, "float32"))
            y = R.power(b, R.const(2.0, "float32"))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.add(x, R.const(-2.0, "float32"))
            b = R.multiply(a, R.const(0.25, "float32"))
            y = R.multiply(b, b)
            R.output(y)
        return y

    assert_becomes(CheaperArithmetic, before, expected)


@pytest.mark.parametrize("exponent", [0.25, 0.5, 0.75, 1.5, 2.0, 3.0, 3.25, -0.5, -0.75, -1.0, -2.0])
def test_powers_without_pow(exponent: float) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.power(x, relax.const(exponent, "float32")))
        builder.emit_func_output(y)
    after = CheaperArithmetic(builder.finalize())
    assert "power" not in operators(after)
    data = RNG.uniform(0.01, 9, 64).astype("float32")
    np.testing.assert_allclose(evaluate(after, data)[0], data.astype("float64") ** exponent, rtol=1e-6)


def test_what_stays() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), n: R.Tensor((3,), "int32")):
        with R.dataflow():
            a = R.power(x, R.const(0.3, "float32"))
            b = R.power(R.const(2.0, "float32"), a)
            c = R.divide(b, R.const(0.0, "float32"))
            d = R.divide(R.const(1.0, "float32"), c)
            e = R.divide(n, R.const(2, "int32"))
            f = R.subtract(e, R.const(1, "int32"))
            R.output(d, f)
        return (d, f)

    assert_unchanged(CheaperArithmetic, before)


def test_constants_fold_by_numpy_and_by_tvm() -> None:
    w, v = weight(6, 4), weight(4)

    @R.function(private=True)
    def before(x: R.Tensor((2, 6), "float32")):
        with R.dataflow():
            t = R.permute_dims(w, axes=[1, 0])
            u = R.reshape(t, (6, 4))
            a = R.matmul(x, u)
            b = R.tanh(R.sin(v))  # no numpy rule for these
            y = R.add(a, b)
            R.output(y)
        return y

    after = FoldConstants(module(before))
    assert operators(after) == ["matmul", "add"]
    product, total = (b.value for b in after["main"].body.blocks[0].bindings)
    np.testing.assert_array_equal(values(product.args[1]), values(w).T.reshape(6, 4))
    np.testing.assert_allclose(values(total.args[1]), np.tanh(np.sin(values(v))), rtol=1e-5)
    assert_same_values(before, after)


def test_a_constant_that_would_grow_stays_an_operator() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((256, 256), "float32")):
        with R.dataflow():
            a = R.full((256, 256), R.const(2.0, "float32"), "float32")
            y = R.add(x, a)
            R.output(y)
        return y

    assert_unchanged(FoldConstants, before)


def test_common_expressions_are_shared() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.exp(x)
            b = R.exp(x)
            y = R.add(a, b)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.exp(x)
            y = R.add(a, a)
            R.output(y)
        return y

    assert_becomes(EliminateCommonSubexpressions, before, expected)
