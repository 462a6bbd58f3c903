"""Explicit padding becomes part of what reads it, where that means the same."""

from __future__ import annotations

import pytest
from relax_evaluation import assert_same_values, assert_unchanged, module, operators, weight
from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

from mlc.graph.simplify import FoldPadding


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_padding_of_a_convolution(rank: int) -> None:
    widths = [0, 0, 0, 0, *[1, 2, 0, 3, 2, 2][: 2 * rank]]
    x = relax.Var("x", relax.TensorType((2, 4, *(7, 6, 5)[:rank]), "float32"))
    builder = relax.BlockBuilder()
    convolve = (op.nn.conv1d, op.nn.conv2d, op.nn.conv3d)[rank - 1]
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            padded = builder.emit(op.nn.pad(x, widths))
            kernel = weight(6, 2, *[3] * rank)
            y = builder.emit_output(convolve(padded, kernel, strides=[2] * rank, padding=[1] * rank, groups=2))
        builder.emit_func_output(y)
    mod = module(builder.finalize()["main"])
    after = FoldPadding(mod)
    assert operators(after) == [f"nn.conv{rank}d"]
    assert_same_values(mod, after)


@pytest.mark.parametrize(("own", "counts"), [(0, True), (0, False), (1, True)])
def test_padding_of_an_average(own: int, counts: bool) -> None:
    @R.function(private=True)
    def func(x: R.Tensor((1, 4, 7, 6), "float32")):
        with R.dataflow():
            p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 2, 2, 0])
            y = R.nn.avg_pool2d(p, (3, 3), strides=(2, 2), padding=(own, own), count_include_pad=counts)
            R.output(y)
        return y

    after = FoldPadding(module(func))
    assert operators(after) == ["nn.avg_pool2d"]
    assert_same_values(func, after)


def test_other_padding_stays() -> None:
    w = weight(4, 4, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((1, 4, 7, 6), "float32"), z: R.Tensor((1, 3, 7, 6), "float32")):
        with R.dataflow():
            ones = R.nn.conv2d(R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=1.0), w)
            channels = R.nn.conv2d(R.nn.pad(z, pad_width=[0, 0, 0, 1, 0, 0, 0, 0]), w)
            mirrored = R.nn.conv2d(R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_mode="reflect"), w)
            peak = R.nn.max_pool2d(R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1]), (3, 3))  # zeros may be the peak
            inside = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1])
            mean = R.nn.avg_pool2d(inside, (3, 3), padding=(1, 1))  # counts one padding and not the other
            R.output(ones, channels, mirrored, peak, mean)
        return (ones, channels, mirrored, peak, mean)

    assert_unchanged(FoldPadding, func)
