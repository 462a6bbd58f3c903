"""Transposed convolutions of quantised models add up integers: bit for bit what onnx's reference evaluator says, where
scales are powers of two and so nothing rounds before the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import te

import mlc
from mlc.frontend import load_model
from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.kernels.integer import dot_form, pack_conv
from mlc.graph.kernels.transposed import axes, conv2d_transpose_nchwc, phase_weight
from mlc.graph.pipeline import lower
from mlc.target import Target, resolve
from mlc.testing import aarch64
from schedules.cpu.conv import CONV2D_INTEGER
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import InvalidDecision, feasible_seeds, schedule_with

V3, NATIVE = resolve("x86-64-v3", threads=2), resolve("native", threads=2)
N1 = resolve("aarch64:cortex-a76", threads=1)


@dataclass(frozen=True)
class Layer:
    """A transposed convolution of ``channels`` to ``filters``."""

    channels: int
    filters: int
    kernel: int
    stride: int
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    extra: int = 0
    size: tuple[int, int] = (5, 7)
    signed: bool = False
    zero: int = 0
    per_channel: bool = True
    groups: int = 1
    dilation: int = 1


LAYERS = {
    "doubling": Layer(24, 40, 2, 2), "of a GAN": Layer(32, 20, 4, 2, (1, 1, 1, 1)),
    "of a U-net": Layer(16, 16, 3, 2, (1, 1, 1, 1), 1), "zero point": Layer(20, 33, 3, 2, (1, 0, 1, 1), 1, zero=7),
    "signed": Layer(18, 8, 4, 2, (1, 1, 1, 1), signed=True, per_channel=False),
    "signed zero point": Layer(9, 17, 3, 3, (0, 1, 1, 0), signed=True, zero=-128), "plain": Layer(12, 10, 3, 1),
    "fourfold": Layer(16, 32, 8, 4, (2, 2, 2, 2), size=(3, 4)), "one pixel": Layer(40, 24, 4, 1, size=(1, 1)),
    "groups": Layer(32, 32, 3, 2, (1, 1, 1, 1), 1, zero=9, groups=2),
    "one scale": Layer(64, 64, 4, 2, groups=2, per_channel=False),
    "dilated": Layer(16, 24, 3, 2, (2, 1, 2, 1), 1, zero=200, dilation=2),
}


def model(layer: Layer, together: bool = False) -> onnx.ModelProto:
    """Integers to integers through DequantizeLinear, ConvTranspose with a bias, and QuantizeLinear. With groups
    ``together``, of which the evaluator knows none, other groups' weights are zeros."""
    rng = np.random.default_rng(layer.channels * 100 + layer.filters)
    groups = 1 if together else layer.groups
    kind, number = (np.int8, TensorProto.INT8) if layer.signed else (np.uint8, TensorProto.UINT8)
    shape = (layer.channels, layer.filters // layer.groups, layer.kernel, layer.kernel)
    ends = rng.choice([-128, 127], shape)
    weight = np.where(rng.random(shape) < 1 / 3, ends, rng.integers(-128, 128, shape)).astype("int8")
    count = shape[1] if layer.per_channel else 1
    scales = (2.0 ** -rng.integers(5, 9, count)).astype("float32")
    bias = (rng.integers(-4096, 4096, layer.filters) * np.resize(scales, layer.filters) * 2.0**-4).astype("float32")
    if together:
        group = np.arange(layer.channels)[:, None, None, None] * layer.groups // layer.channels
        weight = np.concatenate([np.where(group == g, weight, np.int8(0)) for g in range(layer.groups)], 1)
        if layer.per_channel:
            count, scales = layer.filters, np.tile(scales, layer.groups)
    zeros = np.zeros(count, "int8")
    constants = {
        "xs": np.float32(2.0**-4), "xz": kind(layer.zero), "w": weight, "ws": scales if count > 1 else scales[0],
        "wz": zeros if count > 1 else zeros[0], "b": bias, "ys": np.float32(0.5), "yz": np.uint8(110),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], **({"axis": 1} if count > 1 else {})),
        helper.make_node("ConvTranspose", ["xf", "wf", "b"], ["yf"], strides=[layer.stride] * 2, pads=[*layer.pads],
                         output_padding=[layer.extra] * 2, kernel_shape=[layer.kernel] * 2, group=groups,
                         dilations=[layer.dilation] * 2),
        helper.make_node("QuantizeLinear", ["yf", "ys", "yz"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "layer", [helper.make_tensor_value_info("x", number, [2, layer.channels, *layer.size])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [None] * 4)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def activations(layer: Layer) -> np.ndarray:
    """Random, with every third value at an end of its range."""
    low, high = (-128, 127) if layer.signed else (0, 255)
    rng, shape = np.random.default_rng(3), (2, layer.channels, *layer.size)
    values = np.where(rng.random(shape) < 1 / 3, rng.choice([low, high], shape), rng.integers(low, high + 1, shape))
    return values.astype("int8" if layer.signed else "uint8")


def spaces(layer: Layer, target: Target) -> list[str]:
    return [find(task.func, target.tvm).name for task in lower(load_model(model(layer)).mod, target).tasks]


@pytest.mark.parametrize("name", LAYERS)
def test_integers_are_those_of_the_reference(name: str) -> None:
    layer = LAYERS[name]
    x = activations(layer)
    (expected,) = ReferenceEvaluator(model(layer, together=True)).run(None, {"x": x})
    assert 0 < np.mean(expected == 255) < 0.5 and expected.std() > 10
    (found,) = mlc.compile(model(layer), NATIVE, log=False)(x)
    np.testing.assert_array_equal(found, expected)
    for target in (V3, N1):
        assert "cpu.conv2d_integer" in spaces(layer, target)
    assert "cpu.conv2d_nchwc" not in spaces(layer, N1)


def test_lines_are_images_of_one_row() -> None:
    """With a scale for each channel, whose axis is the second."""
    rng = np.random.default_rng(5)
    constants = {
        "xs": np.float32(2.0**-4), "xz": np.uint8(77), "w": rng.choice([-128, -3, 50, 127], (16, 24, 4)).astype("int8"),
        "ws": (2.0 ** -rng.integers(5, 9, 24)).astype("float32"), "wz": np.zeros(24, "int8"),
        "ys": np.float32(0.5), "yz": np.uint8(110),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], axis=1),
        helper.make_node("ConvTranspose", ["xf", "wf"], ["yf"], strides=[2], pads=[1, 2], kernel_shape=[4]),
        helper.make_node("QuantizeLinear", ["yf", "ys", "yz"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "line", [helper.make_tensor_value_info("x", TensorProto.UINT8, [2, 16, 21])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [None] * 3)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()])
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    x = rng.choice(np.array([0, 1, 100, 255], "uint8"), (2, 16, 21))
    (expected,) = ReferenceEvaluator(given).run(None, {"x": x})
    assert expected.std() > 10
    np.testing.assert_array_equal(mlc.compile(given, NATIVE, log=False)(x)[0], expected)
    names = [find(task.func, V3.tvm).name for task in lower(load_model(given).mod, V3).tasks]
    assert "cpu.conv2d_integer" in names


def test_large_images_with_a_zero_point_stay_floats() -> None:
    """What the zero point adds would be another image of 32-bit numbers."""
    assert "cpu.conv2d_integer" not in spaces(Layer(16, 32, 2, 2, size=(64, 80), zero=9), N1)
    assert "cpu.conv2d_integer" in spaces(Layer(16, 32, 2, 2, size=(64, 80)), N1)


def _scattered(data: np.ndarray, weight: np.ndarray, stride: int, pads: tuple[int, ...], groups: int) -> np.ndarray:
    """The definition in int64."""
    (n, channels, height, width), (_, each, kh, kw) = data.shape, weight.shape
    whole = np.zeros((n, groups, each, (height - 1) * stride + kh, (width - 1) * stride + kw), "int64")
    images = data.astype("int64").reshape(n, groups, -1, height, width)
    filters = weight.astype("int64").reshape(groups, channels // groups, each, kh, kw)
    for y, x in np.ndindex(height, width):
        part = np.einsum("ngi,gioyx->ngoyx", images[..., y, x], filters)
        whole[..., y * stride : y * stride + kh, x * stride : x * stride + kw] += part
    whole = whole.reshape(n, groups * each, *whole.shape[3:])
    return whole[:, :, pads[0] : whole.shape[2] - pads[2], pads[1] : whole.shape[3] - pads[3]]


@pytest.mark.parametrize(
    ("kernel", "pads", "groups"), [(4, (1, 1, 1, 1), 1), (2, (0, 0, 0, 0), 1), (4, (1, 1, 1, 1), 2)])
@pytest.mark.parametrize("target", [V3, N1], ids=["words", "quads"])
def test_every_schedule_is_exact(target: Target, kernel: int, pads: tuple[int, ...], groups: int) -> None:
    """Of both forms, seeds and random decisions; those of aarch64 emulated."""
    if target is N1 and aarch64.missing():
        pytest.skip(f"{aarch64.missing()} must be installed")
    rng = np.random.default_rng(kernel + groups)
    data = rng.choice(np.array([0, 1, 100, 255], "uint8"), (1, 32, 6, 5))
    weight = rng.choice(np.array([-128, -3, 50, 127], "int8"), (32, 32 // groups, kernel, kernel))
    expected = _scattered(data, weight, 2, pads, groups)
    rows, columns = axes((6, 5), (kernel, kernel), (2, 2), pads, (0, 0))
    inner, out = ChannelBlocks(32, groups), ChannelBlocks(32, groups)
    cut = out.cut(phase_weight(weight, rows, columns, groups), 1)
    cut = ChannelBlocks(32 // groups, size=16).cut(cut, 3)
    blocks = cut.transpose(0, 1, 3, 5, 6, 4, 2).reshape(-1, *(cut.shape[i] for i in (3, 5, 6, 4, 2)))
    packed = pack_conv(blocks, 16, 16, groups, dot_form(target))
    blocked = np.ascontiguousarray(inner.cut(data, 1).transpose(0, 1, 3, 4, 2))
    x = te.placeholder(blocked.shape, "uint8", name="x")
    w = te.placeholder(packed.shape, str(packed.dtype), name="w")
    func = te.create_prim_func([x, w, conv2d_transpose_nchwc(x, w, rows, columns, groups)])
    wanted = out.cut(expected, 1).transpose(0, 1, 3, 4, 2)
    assert find(func, target.tvm) is CONV2D_INTEGER
    made = [sch for (sch, _), _ in zip(feasible_seeds(CONV2D_INTEGER, func, target.tvm), range(2), strict=False)]
    knobs = CONV2D_INTEGER.knobs(func, target.tvm)
    for _ in range(60):
        try:
            point = {knob.name: int(rng.choice(knob.values)) for knob in knobs}
            made.append(schedule_with(CONV2D_INTEGER, func, target.tvm, point))
        except InvalidDecision:
            continue
        if len(made) > 3:
            break
    for sch in made:
        arguments = [blocked, packed, np.full(wanted.shape, 77, "int32")]
        if target is N1:
            arguments = aarch64.run(sch.mod, N1.tvm, arguments)
        else:
            tensors = [tvm.runtime.tensor(each) for each in arguments]
            tvm.compile(sch.mod, target.tvm, tir_pipeline=PIPELINE)["main"](*tensors)
            arguments = [each.numpy() for each in tensors]
        np.testing.assert_array_equal(arguments[-1], wanted)
