"""Batch norms, scales and shifts end up in the weights before them, where that is allowed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from relax_evaluation import (
    RNG,
    assert_becomes,
    assert_same_values,
    assert_unchanged,
    evaluate,
    module,
    network,
    operators,
    values,
    weight,
)
from tvm import relax
from tvm.script import relax as R

from mlc.graph.simplify import FoldAffine, SimplifyBatchNorm

FOLD = tvm.transform.Sequential([SimplifyBatchNorm, FoldAffine])


def _norm_parameters(channels: int) -> list[relax.Expr]:
    return [weight(channels), weight(channels), weight(channels), weight(channels, low=0.5, high=2.0)]


def _normed(bb: relax.BlockBuilder, x: relax.Expr, channels: int, axis: int = 1) -> relax.Expr:
    norm = bb.emit(relax.op.nn.batch_norm(x, *_norm_parameters(channels), axis=axis, training=False))
    return relax.TupleGetItem(norm, 0)


def test_batch_norm_becomes_scale_and_shift() -> None:
    gamma, beta, mean, variance = _norm_parameters(3)

    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4, 5), "float32")):
        with R.dataflow():
            n = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, epsilon=1e-3, training=False)
            y = n[0]
            R.output(y)
        return y

    scale = values(gamma) / np.sqrt(values(variance) + 1e-3)
    s = relax.const(scale.reshape(3, 1, 1))
    t = relax.const((values(beta) - values(mean) * scale).reshape(3, 1, 1))
    after = SimplifyBatchNorm(module(before))
    assert operators(after) == ["multiply", "add"]
    found = [b.value.args[1] for b in after["main"].body.blocks[0].bindings]
    np.testing.assert_allclose(values(found[0]), values(s), rtol=1e-6)
    np.testing.assert_allclose(values(found[1]), values(t), rtol=1e-5, atol=1e-6)
    x = RNG.standard_normal((2, 3, 4, 5)).astype("float32")
    parameters = [torch.from_numpy(values(p)) for p in (mean, variance, gamma, beta)]
    reference = torch.nn.functional.batch_norm(torch.from_numpy(x), *parameters, training=False, eps=1e-3)
    np.testing.assert_allclose(evaluate(after, x)[0], reference.numpy(), rtol=1e-5, atol=1e-5)


def test_training_mode_and_unknown_parameters_stay() -> None:
    gamma, beta, mean, variance = _norm_parameters(3)

    @R.function(private=True)
    def training(x: R.Tensor((2, 3, 4, 5), "float32")):
        with R.dataflow():
            n = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, training=True)
            y = n[0]
            R.output(y)
        return y

    @R.function(private=True)
    def unknown(x: R.Tensor((2, 3, 4, 5), "float32"), g: R.Tensor((3,), "float32")):
        with R.dataflow():
            n = R.nn.batch_norm(x, g, beta, mean, variance, axis=1, training=False)
            y = n[0]
            R.output(y)
        return y

    assert_unchanged(SimplifyBatchNorm, training)
    assert_unchanged(SimplifyBatchNorm, unknown)


def _conv1d(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return _normed(bb, bb.emit(relax.op.nn.conv1d(x, weight(6, 2, 3), groups=2)), 6)


def _conv2d(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    y = bb.emit(relax.op.nn.conv2d(x, weight(6, 2, 3, 3), padding=1, groups=2))
    return _normed(bb, bb.emit(relax.op.add(y, weight(1, 6, 1, 1))), 6)


def _channels_last(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    y = relax.op.nn.conv2d(x, weight(3, 3, 5, 6), data_layout="NHWC", kernel_layout="HWIO", out_layout="NHWC")
    return _normed(bb, bb.emit(y), 6, axis=3)


def _transposed(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    y = relax.op.nn.conv2d_transpose(x, weight(4, 3, 3, 3), strides=(2, 2), groups=2)
    return _normed(bb, bb.emit(y), 6)


def _dense(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    y = bb.emit(relax.op.add(bb.emit(relax.op.matmul(x, weight(5, 7))), weight(7)))
    return relax.op.multiply(y, weight(7))


@pytest.mark.parametrize(
    ("shape", "body", "kept"),
    [
        ((2, 4, 9), _conv1d, ["nn.conv1d", "add"]),
        ((2, 4, 6, 6), _conv2d, ["nn.conv2d", "add"]),
        ((2, 6, 6, 5), _channels_last, ["nn.conv2d", "add"]),
        ((2, 4, 5, 5), _transposed, ["nn.conv2d_transpose", "add"]),
        ((2, 3, 5), _dense, ["matmul", "add"]),
    ],
)
def test_scales_go_into_the_weights_before_them(shape, body, kept) -> None:  # type: ignore[no-untyped-def]
    before = network(shape, body)
    after = FOLD(before)
    assert operators(after) == kept
    assert_same_values(before, after)


def _conv_input(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return relax.op.nn.conv2d(bb.emit(relax.op.multiply(x, weight(1, 4, 1, 1))), weight(6, 2, 3, 3), groups=2)


def _transposed_input(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    y = bb.emit(relax.op.multiply(x, weight(4, 1, 1)))
    return relax.op.nn.conv2d_transpose(y, weight(4, 3, 3, 3), groups=2)


def _dense_input(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return relax.op.matmul(bb.emit(relax.op.multiply(weight(5), x)), weight(5, 7))


@pytest.mark.parametrize(
    ("shape", "body", "kept"),
    [
        ((2, 4, 6, 6), _conv_input, ["nn.conv2d"]),
        ((2, 4, 5, 5), _transposed_input, ["nn.conv2d_transpose"]),
        ((2, 3, 5), _dense_input, ["matmul"]),
    ],
)
def test_scales_go_into_the_weights_after_them(shape, body, kept) -> None:  # type: ignore[no-untyped-def]
    before = network(shape, body)
    after = FoldAffine(before)
    assert operators(after) == kept
    assert_same_values(before, after)


def test_a_result_used_twice_is_not_scaled() -> None:
    w, s = weight(4, 3, 1, 1), weight(4, 1, 1)

    @R.function(private=True)
    def before(x: R.Tensor((1, 3, 4, 4), "float32")):
        with R.dataflow():
            y = R.nn.conv2d(x, w)
            z = R.multiply(y, s)
            u = R.add(z, y)
            R.output(u)
        return u

    assert_unchanged(FoldAffine, before)


def test_a_scale_per_pixel_stays() -> None:
    w, s = weight(4, 3, 1, 1), weight(4, 4)

    @R.function(private=True)
    def before(x: R.Tensor((1, 3, 4, 4), "float32")):
        with R.dataflow():
            y = R.multiply(R.nn.conv2d(x, w), s)
            R.output(y)
        return y

    assert_unchanged(FoldAffine, before)


def test_unknown_weights_stay() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 3, 4, 4), "float32"), w: R.Tensor((4, 3, 1, 1), "float32")):
        with R.dataflow():
            y = R.multiply(R.nn.conv2d(x, w), R.const(2.0, "float32"))
            R.output(y)
        return y

    assert_unchanged(FoldAffine, before)


def test_scales_and_shifts_gather() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.add(x, R.const(2.0, "float32"))
            b = R.multiply(a, R.const(3.0, "float32"))
            c = R.add(R.const(1.0, "float32"), b)
            y = R.multiply(c, R.const(0.5, "float32"))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.multiply(x, R.const(1.5, "float32"))
            y = R.add(a, R.const(3.5, "float32"))
            R.output(y)
        return y

    assert_becomes(FoldAffine, before, expected)


def test_constants_that_would_grow_are_not_merged() -> None:
    row, column = weight(1, 64), weight(64, 1)

    @R.function(private=True)
    def before(x: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            y = R.multiply(R.multiply(x, row), column)
            R.output(y)
        return y

    assert_unchanged(FoldAffine, before)


def test_whole_numbers_are_left_alone() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((4,), "int32")):
        with R.dataflow():
            y = R.multiply(R.add(x, R.const(2, "int32")), R.const(3, "int32"))
            R.output(y)
        return y

    assert_unchanged(FoldAffine, before)
