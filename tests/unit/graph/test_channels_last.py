"""Channels last on GPUs: who works there, what is converted, and that the results are the model's."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, evaluate, network, weight
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.layout import channels_last
from mlc.graph.layout.channels_last import ChannelsLast
from mlc.graph.pipeline import Lowered, lower
from mlc.options import CompileOptions
from mlc.target import resolve
from schedules.cuda.contraction import contraction_of
from schedules.registry import find

GPU = resolve("cuda:sm_80")


def lowered(mod: tvm.IRModule, precision: str = "f16") -> Lowered:
    return lower(mod, GPU, options=CompileOptions.of(precision=precision))


def convolved(b: relax.BlockBuilder, x: relax.Expr, filters: int, window: int = 3, stride: int = 1, groups: int = 1,
              other: relax.Expr | None = None) -> relax.Expr:
    """A convolution with a bias, the sum with another image, and ReLU."""
    channels = int(x.ty.shape.values[1]) // groups
    scale = (channels * window**2) ** -0.5
    y = b.emit(op.nn.conv2d(x, weight(filters, channels, window, window, low=-scale, high=scale), strides=stride,
                            padding=window // 2, groups=groups))
    y = b.emit(op.add(y, weight(1, filters, 1, 1)))
    return b.emit(op.nn.relu(y if other is None else b.emit(op.add(y, other))))


def residual(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """A first layer of three channels, a maximum, two blocks with a sum, one of a single pixel at the end."""
    y = convolved(b, x, 32, 7, 2)
    y = b.emit(op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1, 1, 1)))
    for _ in range(2):
        y = convolved(b, convolved(b, y, 40), 32, 1, other=y)
    y = convolved(b, y, 48, 3, 2)
    return b.emit(op.reshape(b.emit(op.mean(y, [2, 3], keepdims=True)), (1, 48)))


def branches(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Odd channels, parts that are joined and cut, groups, each channel by itself, an image of another size."""
    y = convolved(b, x, 40)
    y = b.emit(op.concat([convolved(b, y, 24, 1), convolved(b, y, 16), y], axis=1))
    y = convolved(b, y, 48, groups=2)
    y = convolved(b, y, 48, groups=48)
    y = b.emit(op.strided_slice(y, [1], [8], [40]))
    y = convolved(b, y, 21)
    y = b.emit(op.image.resize2d(y, relax.ShapeExpr((22, 26)), layout="NCHW", method="nearest_neighbor",
                                 coordinate_transformation_mode="asymmetric", rounding_method="floor"))
    return convolved(b, y, 35)


def stretched(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """An image that grows twice, once to an odd size, beside the one before, as a decoder of masks has it."""
    y = convolved(b, x, 24)
    y = b.emit(op.nn.relu(transposed(b, y, 20, 4)))
    y = b.emit(op.concat([y, b.emit(op.nn.relu(transposed(b, convolved(b, x, 16), 12, 2, padding=0)))], axis=1))
    return convolved(b, transposed(b, y, 16, 3), 24, 1)


def transposed(b: relax.BlockBuilder, x: relax.Expr, filters: int, window: int, padding: int = 1) -> relax.Expr:
    """A transposed convolution of stride 2 with a bias."""
    channels = int(x.ty.shape.values[1])
    scale = 2 * (channels * window**2) ** -0.5
    y = op.nn.conv2d_transpose(x, weight(channels, filters, window, window, low=-scale, high=scale), strides=2,
                               padding=padding)
    return b.emit(op.add(b.emit(y), weight(1, filters, 1, 1)))


NETWORKS = {"residual": ((1, 3, 45, 37), residual), "branches": ((2, 19, 11, 13), branches),
            "stretched": ((2, 16, 9, 7), stretched)}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose threads wait so long for single elements that small networks are worth a transpose too."""
    monkeypatch.setattr(channels_last, "_WAITING", 100_000)
    monkeypatch.setattr(channels_last, "_ASYNCHRONOUS", 16)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("name", "precision"), [*itertools.product(NETWORKS, ["f16", "bf16", "tf32"])])
def test_results_are_the_models(name: str, precision: str) -> None:
    """As TVM computes the functions on a CPU."""
    shape, body = NETWORKS[name]
    mod, x = network(shape, body), RNG.standard_normal(shape).astype("float32")
    after = lowered(mod, precision)
    assert any(len(p.shape) == 5 for task in after.tasks for p in task.func.params)
    (exact,), (found,) = evaluate(mod, x), evaluate(after.module, x)
    most = {"f16": 3e-3, "bf16": 3e-2, "tf32": 1e-5}[precision]
    assert np.abs(found - exact).max() <= most * np.abs(exact).max()


@pytest.mark.usefixtures("late")
def test_nothing_is_transposed_between_convolutions() -> None:
    """One kernel brings the image there, in the type that is multiplied; each sum and maximum is part of another."""
    shape, body = NETWORKS["residual"]
    spaces: Counter[str] = Counter()
    for task in lowered(network(shape, body)).tasks:
        space = find(task.func, GPU.tvm).name
        spaces[space] += task.weight
    assert spaces == {"cuda.elementwise": 1, "cuda.mma": 6, "cuda.columns": 2}


@pytest.mark.parametrize(("kernel", "stride", "spaces"), [
    (2, 2, {"cuda.mma": 1, "cuda.elementwise": 2}), (4, 2, {"cuda.mma": 1, "cuda.elementwise": 2}),
    # an odd size is cut out of whole phases
    (3, 2, {"cuda.mma": 1, "cuda.elementwise": 2})])
def test_a_transposed_convolution_is_one_product(kernel: int, stride: int, spaces: dict[str, int]) -> None:
    """With its bias and activation, between the transposes of the only image."""
    mod = network((8, 128, 56, 56), lambda b, x: b.emit(op.nn.relu(transposed(b, x, 64, kernel, padding=kernel // 2 - (
        kernel == 2)))))
    found = lowered(mod).tasks
    assert Counter(find(task.func, GPU.tvm).name for task in found) == spaces
    (product,) = (task.func for task in found if find(task.func, GPU.tvm).name == "cuda.mma")
    contraction = contraction_of(product)
    assert contraction is not None
    taps = 1 if kernel == 2 else 4
    assert contraction.size("k") == 128 * taps and contraction.size("b") * contraction.size("n") == 4 * 64


def first(shape: tuple[int, ...], filters: int, window: int, stride: int, precision: str = "f16") -> Lowered:
    """A first layer."""
    return lowered(network(shape, lambda b, x: convolved(b, x, filters, window, stride)), precision)


@pytest.mark.parametrize(("channels", "window", "stride", "depth"), [
    (3, 7, 2, 7 * 32), (2, 5, 2, 5 * 32), (4, 3, 2, 3 * 16), (3, 7, 1, None), (5, 7, 2, None)])
def test_few_channels_become_lines(channels: int, window: int, stride: int, depth: int | None) -> None:
    """Of which every copy has 16 bytes, where windows begin at multiples of these; else whole copies of channels."""
    found = [t.func for t in first((8, channels, 224, 224), 64, window, stride).tasks]
    (product,) = (func for func in found if find(func, GPU.tvm).name == "cuda.mma")
    contraction = contraction_of(product)
    assert contraction is not None and contraction.size("k") == (depth or window**2 * 8)
    assert contraction.vector_a == contraction.vector_b == 8
    assert len(found) == 3, "one kernel makes lines, and one a plain image of the result"


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("precision", ["f16", "bf16"])
@pytest.mark.parametrize(("shape", "window", "stride"), [
    ((2, 3, 65, 58), 7, 2), ((1, 2, 167, 93), 5, 2), ((1, 4, 40, 41), 3, 2), ((1, 2, 71, 64), 4, 4)])
def test_lines_are_the_image(shape: tuple[int, ...], window: int, stride: int, precision: str) -> None:
    """Odd sizes, and windows that end beyond the image, as TVM convolves on a CPU what is not rounded."""
    mod = network(shape, lambda b, x: convolved(b, x, 24, window, stride))
    after = lowered(mod, precision)
    assert any(int(p.shape[-1]) == 4 for task in after.tasks for p in task.func.params)
    x = RNG.standard_normal(shape).astype("float32")
    (exact,), (found,) = evaluate(mod, x), evaluate(after.module, x)
    assert np.abs(found - exact).max() <= {"f16": 3e-3, "bf16": 3e-2}[precision] * np.abs(exact).max()


def test_tf32_has_no_lines() -> None:
    lines = [p for t in first((8, 3, 224, 224), 64, 7, 2, "tf32").tasks for p in t.func.params if int(p.shape[-1]) == 4]
    assert not lines


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("channels", "groups", "last"), [
    (64, 2, True), (48, 2, True), (64, 16, False), (42, 2, False)])
def test_groups_keep_channels_last_where_they_are_large(channels: int, groups: int, last: bool) -> None:
    """Of 16 filters at least, and of channels that are whole copies: others are multiplied in the plain layout."""
    mod = network((1, channels, 9, 11), lambda b, x: b.emit(op.nn.relu(b.emit(
        op.nn.conv2d(x, weight(channels, channels // groups, 3, 3), padding=1, groups=groups)))))
    products = [t.func for t in lowered(mod).tasks if find(t.func, GPU.tvm).name != "cuda.elementwise"]
    assert [any(len(param.shape) == 5 for param in func.params) for func in products] == [last]


def test_float32_and_older_gpus_keep_their_layout() -> None:
    shape, body = NETWORKS["residual"]
    mod = network(shape, body)
    assert ChannelsLast(GPU, CompileOptions.of())(mod).same_as(mod)
    assert ChannelsLast(resolve("cuda:sm_75"), CompileOptions.of())(mod).same_as(mod)
    assert ChannelsLast(resolve("native"), CompileOptions.of(precision="f16"))(mod).same_as(mod)


def test_a_single_small_convolution_is_not_worth_a_transpose() -> None:
    """Of rows of pixels that are copied as they are, by a kernel that takes no longer than the transpose would."""
    mod = network((1, 64, 8, 8), lambda b, x: b.emit(op.nn.relu(b.emit(op.nn.conv2d(x, weight(64, 64, 1, 1))))))
    after = ChannelsLast(GPU, CompileOptions.of(precision="tf32"))(mod)
    assert op_name(next(bindings(after["main"])).value) == "relax.nn.conv2d"
