"""Operators that exporters write out are found again, and their near misses are not."""

from __future__ import annotations

import pytest
from relax_evaluation import assert_becomes, assert_same_values, assert_unchanged, module, network, operators, weight
from tvm import relax
from tvm.script import relax as R

from mlc.graph.simplify import RecogniseGelu, RecogniseLayerNorm, RecogniseSoftmax, UnstackReductions


@R.function(private=True)
def _gelu(x: R.Tensor((2, 8), "float32")):
    with R.dataflow():
        y = R.nn.gelu(x)
        R.output(y)
    return y


@R.function(private=True)
def _gelu_tanh(x: R.Tensor((2, 8), "float32")):
    with R.dataflow():
        y = R.nn.gelu_tanh(x)
        R.output(y)
    return y


def test_gelu_of_torch() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 8), "float32")):
        with R.dataflow():
            a = R.erf(R.divide(x, R.const(1.41421354, "float32")))
            b = R.multiply(x, R.add(a, R.const(1.0, "float32")))
            y = R.multiply(b, R.const(0.5, "float32"))
            R.output(y)
        return y

    assert_same_values(before, assert_becomes(RecogniseGelu, before, _gelu))


def test_gelu_with_the_half_first() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 8), "float32")):
        with R.dataflow():
            a = R.erf(R.multiply(R.const(0.70710677, "float32"), x))
            b = R.add(R.const(1.0, "float32"), a)
            y = R.multiply(b, R.multiply(R.const(0.5, "float32"), x))
            R.output(y)
        return y

    assert_becomes(RecogniseGelu, before, _gelu)


def test_gelu_of_gpt2() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 8), "float32")):
        with R.dataflow():
            h = R.multiply(x, R.const(0.5, "float32"))
            c = R.multiply(R.power(x, R.const(3.0, "float32")), R.const(0.044715, "float32"))
            u = R.multiply(R.add(x, c), R.const(0.797884583, "float32"))
            y = R.multiply(h, R.add(R.tanh(u), R.const(1.0, "float32")))
            R.output(y)
        return y

    assert_same_values(before, assert_becomes(RecogniseGelu, before, _gelu_tanh))


def test_gelu_multiplied_out() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 8), "float32")):
        with R.dataflow():
            c = R.multiply(R.multiply(R.multiply(x, x), x), R.const(0.0356774081, "float32"))
            u = R.add(R.multiply(x, R.const(0.797884583, "float32")), c)
            g = R.add(R.tanh(u), R.const(1.0, "float32"))
            y = R.multiply(R.multiply(R.const(0.5, "float32"), x), g)
            R.output(y)
        return y

    assert_becomes(RecogniseGelu, before, _gelu_tanh)


def test_other_gates_are_no_gelu() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 8), "float32"), z: R.Tensor((2, 8), "float32")):
        with R.dataflow():
            a = R.add(R.erf(x), R.const(1.0, "float32"))  # the argument is not scaled
            b = R.multiply(R.multiply(x, a), R.const(0.5, "float32"))
            c = R.add(R.erf(R.multiply(z, R.const(0.70710677, "float32"))), R.const(1.0, "float32"))
            d = R.multiply(R.multiply(x, c), R.const(0.5, "float32"))  # another variable in the gate
            y = R.add(b, d)
            R.output(y)
        return y

    assert_unchanged(RecogniseGelu, before)


def test_layer_norm_of_torch_with_scale_and_shift() -> None:
    gamma, beta = weight(8), weight(8)

    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 8), "float32")):
        with R.dataflow():
            d = R.subtract(x, R.mean(x, axis=[-1], keepdims=True))
            v = R.mean(R.power(d, R.const(2.0, "float32")), axis=[-1], keepdims=True)
            s = R.sqrt(R.add(v, R.const(1e-5, "float32")))
            y = R.add(R.multiply(R.divide(d, s), gamma), beta)
            R.output(y)
        return y

    after = RecogniseLayerNorm(module(before))
    assert operators(after) == ["nn.layer_norm"]
    assert_same_values(before, after)


def test_layer_norm_over_two_axes_with_a_reciprocal_root() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((3, 4, 8), "float32")):
        with R.dataflow():
            d = R.subtract(x, R.mean(x, axis=[1, 2], keepdims=True))
            v = R.mean(R.multiply(d, d), axis=[1, 2], keepdims=True)
            y = R.multiply(R.rsqrt(R.add(R.const(1e-3, "float32"), v)), d)
            R.output(y)
        return y

    after = RecogniseLayerNorm(module(before))
    assert operators(after) == ["nn.layer_norm"]
    assert_same_values(before, after)


def test_layer_norm_by_the_operator_of_variance() -> None:
    """Instance normalisation as TVM imports it, which is how group normalisation is exported."""
    @R.function(private=True)
    def before(x: R.Tensor((3, 4, 8), "float32")):
        with R.dataflow():
            d = R.subtract(x, R.mean(x, axis=[2], keepdims=True))
            v = R.variance(x, axis=[2], keepdims=True)
            y = R.divide(d, R.sqrt(R.add(v, R.const(1e-3, "float32"))))
            R.output(y)
        return y

    after = RecogniseLayerNorm(module(before))
    assert operators(after) == ["nn.layer_norm"]
    assert_same_values(before, after)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_instance_norm_like_means_are_no_layer_norm(axis: int, written: bool) -> None:
    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        d = builder.emit(R.subtract(x, builder.emit(R.mean(x, axis=[axis], keepdims=True))))
        v = builder.emit(R.mean(builder.emit(R.multiply(d, d)), axis=[axis], keepdims=True) if written
                         else R.variance(x, axis=[axis], keepdims=True))
        s = builder.emit(R.sqrt(builder.emit(R.add(v, R.const(1e-3, "float32")))))
        return R.divide(d, s)

    mod = network((3, 4, 8), body)
    assert RecogniseLayerNorm(mod).same_as(mod)


def test_softmax() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 5, 4), "float32")):
        with R.dataflow():
            e = R.exp(R.subtract(x, R.max(x, axis=[1], keepdims=True)))
            y = R.divide(e, R.sum(e, axis=[1], keepdims=True))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 5, 4), "float32")):
        with R.dataflow():
            y = R.nn.softmax(x, axis=1)
            R.output(y)
        return y

    assert_same_values(before, assert_becomes(RecogniseSoftmax, before, expected))


def test_a_sum_along_another_axis_is_no_softmax_of_the_shifted_input() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 5, 4), "float32")):
        with R.dataflow():
            e = R.exp(R.subtract(x, R.max(x, axis=[1], keepdims=True)))
            y = R.divide(e, R.sum(e, axis=[2], keepdims=True))
            R.output(y)
        return y

    after = RecogniseSoftmax(module(before))
    assert operators(after) == ["max", "subtract", "nn.softmax"]
    assert_same_values(before, after)


def test_sums_of_stacks() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), z: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            s = R.stack((x, z, x), axis=0)
            a = R.sum(s, axis=[0], keepdims=False)
            b = R.mean(R.stack((a, z), axis=2), axis=[-1], keepdims=False)
            y = R.sum(R.stack((b, x), axis=0), axis=[1], keepdims=False)  # along another axis
            R.output(y)
        return y

    after = UnstackReductions(module(before))
    assert operators(after) == ["add", "add", "add", "divide", "stack", "sum"]
    assert_same_values(before, after)
