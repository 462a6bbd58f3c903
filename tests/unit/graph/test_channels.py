"""Channel shuffles and windows: moved and turned into convolutions without a change of values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from relax_evaluation import RNG, assert_same_values, assert_unchanged, evaluate, module, operators, weight
from tvm import relax
from tvm.script import relax as R

from mlc.graph.pipeline import optimise
from mlc.graph.simplify import ConvolveChannelWindows, MergeMovement, SinkShuffles
from mlc.target import resolve


def _lrn(channels: int, before: int, after: int) -> tvm.IRModule:
    @R.function(private=True)
    def func(x: R.Tensor((1, channels, 3, 4), "float32")):
        with R.dataflow():
            p = R.nn.pad(R.multiply(x, x), pad_width=[0, 0, before, after, 0, 0, 0, 0])
            a = R.strided_slice(p, axes=[1], begin=[0], end=[channels])
            b = R.strided_slice(p, axes=[1], begin=[2], end=[channels + 2])
            c = R.strided_slice(p, axes=[1], begin=[4], end=[channels + 4])
            y = R.add(R.add(a, b), c)
            R.output(y)
        return y

    return module(func)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (0, 4)])
def test_a_window_of_channels_is_a_convolution(before: int, after: int) -> None:
    mod = _lrn(7, before, after)
    after_pass = ConvolveChannelWindows(mod)
    assert operators(after_pass) == ["multiply", "nn.conv2d"]
    assert_same_values(mod, after_pass)


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize(("channels", "before", "after"), [(64, 2, 2), (50, 0, 4), (72, 5, 1), (48, 7, 0)])
def test_a_band_of_channels_is_read_alone(channels: int, before: int, after: int) -> None:
    """A block of channels, 16 or 8, reads those of the window besides its own, and no others."""
    band = sum(np.eye(channels, k=k) * RNG.uniform(0.5, 1.0) for k in range(-before, after + 1))
    w, band = weight(channels, 8, 1, 1), relax.const(band[:, :, None, None].astype("float32"))

    @R.function(private=True)
    def func(x: R.Tensor((2, 8, 6, 5), "float32")):
        with R.dataflow():
            y = R.nn.conv2d(x, w)
            p = R.nn.max_pool2d(y, (2, 2))
            z = R.nn.relu(R.nn.conv2d(R.multiply(p, p), band))
            R.output(z)
        return z

    mod = optimise(module(func), resolve("native"))
    weights = [p for g, f in mod.functions_items() if "conv2d" in g.name_hint for p in f.params if len(p.shape) == 6]
    assert sorted(int(p.shape[4]) for p in weights) == [8, int(weights[0].shape[5]) + before + after]
    assert_same_values(func, mod)


@pytest.mark.usefixtures("always_blocked")
def test_local_response_normalisation_stays_in_the_blocked_layout() -> None:
    w = weight(32, 3, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((1, 3, 6, 5), "float32")):
        with R.dataflow():
            y = R.nn.conv2d(x, w)
            p = R.nn.pad(R.multiply(y, y), pad_width=[0, 0, 1, 1, 0, 0, 0, 0])
            a = R.strided_slice(p, axes=[1], begin=[0], end=[32])
            b = R.strided_slice(p, axes=[1], begin=[1], end=[33])
            c = R.strided_slice(p, axes=[1], begin=[2], end=[34])
            s = R.add(R.add(a, b), c)
            d = R.add(R.multiply(s, R.const(0.1 / 3, "float32")), R.const(2.0, "float32"))
            z = R.divide(y, R.power(d, R.const(0.75, "float32")))
            R.output(z)
        return z

    mod = optimise(module(func), resolve("native"))
    kernels = [f.name_hint for f in mod.functions if f.name_hint != "main"]
    assert sum("conv2d" in name for name in kernels) == 2 and len(kernels) == 4, kernels
    x = RNG.standard_normal((1, 3, 6, 5)).astype("float32")
    y = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w.value.numpy()))
    reference = torch.nn.functional.local_response_norm(y, 3, alpha=0.1, beta=0.75, k=2.0)
    np.testing.assert_allclose(evaluate(mod, x)[0], reference.numpy(), rtol=1e-5, atol=1e-6)


def test_slices_of_something_that_is_needed_elsewhere_stay() -> None:
    @R.function(private=True)
    def func(x: R.Tensor((1, 4, 3, 4), "float32")):
        with R.dataflow():
            p = R.nn.pad(x, pad_width=[0, 0, 1, 1, 0, 0, 0, 0])
            a = R.strided_slice(p, axes=[1], begin=[0], end=[4])
            b = R.strided_slice(p, axes=[1], begin=[1], end=[5])
            c = R.strided_slice(p, axes=[1], begin=[2], end=[6])
            y = R.add(R.add(a, b), c)
            R.output(y, p)
        return (y, p)

    assert_unchanged(ConvolveChannelWindows, func)


def test_a_shuffle_moves_past_a_depthwise_convolution() -> None:
    w, b, s = weight(6, 1, 3, 3), weight(6, 1, 1), weight(1, 6, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((2, 6, 5, 5), "float32")):
        with R.dataflow():
            c = R.permute_dims(R.reshape(x, (2, 3, 2, 5, 5)), axes=[0, 2, 1, 3, 4])
            d = R.nn.conv2d(R.reshape(c, (2, 6, 5, 5)), w, padding=1, strides=2, groups=6)
            y = R.multiply(R.add(d, b), s)
            R.output(y)
        return y

    after = SinkShuffles(module(func))
    assert operators(after) == ["nn.conv2d", "add", "multiply", "reshape", "permute_dims", "reshape"]
    assert_same_values(func, after)


def test_a_shuffle_and_its_inverse_cancel() -> None:
    w = weight(6, 1, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((2, 6, 5, 5), "float32")):
        with R.dataflow():
            c = R.permute_dims(R.reshape(x, (2, 3, 2, 5, 5)), axes=[0, 2, 1, 3, 4])
            d = R.nn.conv2d(R.reshape(c, (2, 6, 5, 5)), w, padding=1, groups=6)
            e = R.permute_dims(R.reshape(d, (2, 2, 3, 5, 5)), axes=[0, 2, 1, 3, 4])
            y = R.reshape(e, (2, 6, 5, 5))
            R.output(y)
        return y

    after = tvm.transform.Sequential([SinkShuffles, MergeMovement])(module(func))
    assert operators(after) == ["nn.conv2d"]
    assert_same_values(func, after)


def test_a_shuffle_before_a_grouped_convolution_stays() -> None:
    w = weight(6, 2, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((2, 6, 5, 5), "float32")):
        with R.dataflow():
            c = R.permute_dims(R.reshape(x, (2, 3, 2, 5, 5)), axes=[0, 2, 1, 3, 4])
            y = R.nn.conv2d(R.reshape(c, (2, 6, 5, 5)), w, padding=1, groups=3)
            R.output(y)
        return y

    assert_unchanged(SinkShuffles, func)
