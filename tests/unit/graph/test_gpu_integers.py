"""Quantised graphs on GPUs: products of int8 on tensor cores, exact at every zero point, where they are priced to pay.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from numpy.lib.stride_tricks import sliding_window_view
from relax_evaluation import RNG, evaluate, network
from tvm import relax
from tvm.relax import op

from mlc.codegen.inspection import Kernel, find_nvdisasm, kernels
from mlc.graph.ir.constants import array_of
from mlc.graph.ir.rewrite import bindings, dtype_of, op_name, shape_of
from mlc.graph.pipeline import Lowered, lower
from mlc.graph.precision.integer_gpu import priced_on_gpu
from mlc.options import CompileOptions
from mlc.target import Target, resolve
from mlc.testing import cuda_emulator
from schedules.cuda.contraction import K, contraction_of
from schedules.registry import find
from schedules.space import best_seed

AMPERE, HOPPER = resolve("cuda:sm_80"), resolve("cuda:sm_90a")
#: powers of two, with which float32 rounds nothing before what is quantised: results are exact, and halves even, as the
#: zero point is that they are rounded with
ACTIVATION, RESULT = 2.0**-5, 2.0**-2
ENDS = [("uint8", 0), ("uint8", 255), ("uint8", 131), ("int8", -128), ("int8", 127)]

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or find_nvdisasm() is None, reason="needs nvcc and nvdisasm")


def extremes(dtype: str, *shape: int) -> np.ndarray:
    """Every fourth number is one end of the type, a fourth of those in whole rows."""
    limits = np.iinfo(dtype)
    made = RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)
    ends = RNG.choice(np.array([limits.min, limits.max], dtype), shape)
    made = np.where(RNG.random(shape) < 0.25, ends, made)
    made[0], made[-1] = limits.min, limits.max
    return made


class Net:
    """A product of quantised numbers with int8 weights, one scale for each output, a bias, ReLU, and quantised again:
    a convolution with a border of one pixel where the weight is one of images."""

    def __init__(self, shape: tuple[int, ...], weight: tuple[int, ...], dtype: str, zero: int) -> None:
        self.shape, self.dtype, self.zero, self.images = shape, dtype, zero, len(weight) == 4
        self.weight, self.axis = extremes("int8", *weight), 0 if self.images else 1
        outputs = weight[self.axis]
        self.scales = RNG.choice(np.array([2.0**-6, 2.0**-7, 2.0**-8], "float32"), outputs)
        self.bias = (RNG.integers(-99, 100, outputs) / 8).astype("float32")
        self.x = extremes(dtype, *shape)

    def module(self, result: str) -> tvm.IRModule:
        def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
            number = relax.const(ACTIVATION, "float32")
            x = b.emit(op.dequantize(x, number, relax.const(self.zero, self.dtype), 0))
            zeros = relax.const(np.zeros(len(self.scales), "int8"))
            w = b.emit(op.dequantize(relax.const(self.weight), relax.const(self.scales), zeros, self.axis))
            y = b.emit(op.nn.conv2d(x, w, padding=1) if self.images else op.matmul(x, w))
            y = b.emit(op.nn.relu(b.emit(op.add(y, relax.const(self.bias.reshape(self._across))))))
            return b.emit(op.quantize(y, relax.const(RESULT, "float32"), relax.const(-8, result), 0, result))

        return network(self.shape, body, self.dtype)

    @property
    def _across(self) -> tuple[int, ...]:
        return (1, -1, 1, 1) if self.images else (-1,)

    def wanted(self) -> np.ndarray:
        """In float64, which is exact."""
        x, w = (self.x.astype("float64") - self.zero) * ACTIVATION, self.weight.astype("float64")
        if self.images:
            padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
            y = np.einsum("nchwrs,fcrs->nfhw", sliding_window_view(padded, (3, 3), axis=(2, 3)), w)
        else:
            y = x @ w
        y = y * self.scales.astype("float64").reshape(self._across) + self.bias.reshape(self._across)
        return np.clip(np.rint(np.maximum(y, 0) / RESULT) - 8, -128, 127)


def emulated(lowered: Lowered, target: Target, x: np.ndarray) -> np.ndarray:
    """What the kernels of a graph compute, one after the other."""
    module, known = lowered.module, {lowered.module["main"].params[0]: x}
    for binding in bindings(module["main"]):
        call = binding.value
        assert op_name(call) == "relax.call_tir", call
        func = module[call.args[0]]
        inputs = [known[arg] if isinstance(arg, relax.Var) else array_of(arg) for arg in call.args[1].fields]
        result = np.zeros(shape_of(binding.var), dtype_of(binding.var))
        scheduled = best_seed(find(func, target.tvm), func, target.tvm).mod["main"]
        cuda_emulator.run(scheduled, target.tvm, [np.array(each) for each in inputs], [result])
        known[binding.var] = result
    return result


def spaces(lowered: Lowered, target: Target = AMPERE) -> list[str]:
    return [find(task.func, target.tvm).name for task in lowered.tasks]


@needs_gxx
@pytest.mark.parametrize(("dtype", "zero"), ENDS)
def test_products_are_exact(dtype: str, zero: int) -> None:
    net = Net((40, 96), (96, 52), dtype, zero)
    lowered = lower(net.module("int8"), AMPERE)
    assert "cuda.mma" in spaces(lowered)
    found, wanted = emulated(lowered, AMPERE, net.x), net.wanted()
    assert {-8, 127} < set(wanted.ravel())
    np.testing.assert_array_equal(found, wanted)


@needs_gxx
@pytest.mark.parametrize(("dtype", "zero"), [
    ("uint8", 255), *(pytest.param(*end, marks=pytest.mark.slow) for end in ENDS if end != ("uint8", 255))])
def test_borders_of_images_are_what_stands_for_zero(dtype: str, zero: int) -> None:
    net = Net((1, 16, 7, 6), (24, 16, 3, 3), dtype, zero)
    lowered = lower(net.module("int8"), AMPERE)
    assert "cuda.mma" in spaces(lowered)
    np.testing.assert_array_equal(emulated(lowered, AMPERE, net.x), net.wanted())


@pytest.mark.parametrize("zero", [-128, 9])
def test_borders_need_no_copy(zero: int) -> None:
    """Of strides, dilations and groups too: what lies outside of an image is added as a constant."""
    weight, scales = RNG.integers(-128, 128, (48, 16, 3, 3)).astype("int8"), RNG.uniform(1, 2, 48).astype("float32")

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        x = b.emit(op.dequantize(x, relax.const(2.0**-7, "float32"), relax.const(zero, "int8"), 0))
        zeros = relax.const(np.zeros(48, "int8"))
        w = b.emit(op.dequantize(relax.const(weight), relax.const(scales / 128), zeros, 0))
        y = b.emit(op.nn.conv2d(x, w, strides=(2, 1), padding=(1, 2, 0, 3), dilation=(1, 2), groups=2))
        return b.emit(op.quantize(y, relax.const(0.25, "float32"), relax.const(3, "int8"), 0, "int8"))

    mod = network((2, 32, 9, 11), body, "int8")
    lowered = lower(mod, AMPERE)
    assert "cuda.mma" in spaces(lowered) and not any("pad" in task.name for task in lowered.tasks)
    x = extremes("int8", 2, 32, 9, 11)
    (wanted,), (found,) = evaluate(mod, x), evaluate(lowered.module, x)
    assert wanted.std() > 1
    off = np.abs(found.astype(int) - wanted.astype(int))
    assert off.max() <= 1 and off.mean() < 0.01, "float32 rounds the model's sums"


def machine_code(lowered: Lowered, target: Target) -> Iterator[Kernel]:
    for task in lowered.tasks:
        scheduled = best_seed(find(task.func, target.tvm), task.func, target.tvm).mod["main"]
        yield from kernels(cuda_emulator.cuda_source(scheduled, target.tvm), str(target.tvm.attrs["arch"]))


@needs_nvcc
@pytest.mark.parametrize("target", [AMPERE, pytest.param(HOPPER, marks=pytest.mark.slow)], ids=["sm_80", "sm_90a"])
def test_products_are_integer_tensor_core_instructions(target: Target) -> None:
    """Operands are copied 16 bytes at a time, biases and scales folded in, and bytes stored four at a time."""
    net = Net((256, 512), (512, 128), "uint8", 3)
    *_, kernel = machine_code(lower(net.module("int8"), target), target)
    assert kernel.count("IMMA.16832.S8.S8") == kernel.count("IMMA") > 0 == kernel.count("HMMA")
    assert kernel.count("LDGSTS.E.BYPASS.128") == kernel.count("LDGSTS") > 0
    assert kernel.count("STG") == kernel.count("STG.E") and not kernel.count("STG.E.U8")
    assert kernel.stack_bytes == kernel.spilled_bytes == 0


def block(layers: int) -> tvm.IRModule:
    """Residual blocks of three convolutions, quantised as networks are: unsigned behind ReLU."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        def again(y: relax.Expr, scale: float, zero: int) -> relax.Expr:
            both = relax.const(scale, "float32"), relax.const(zero, "uint8")
            return b.emit(op.dequantize(b.emit(op.quantize(y, *both, 0, "uint8")), *both, 0))

        y = again(x, 0.05, 128)
        for _ in range(layers):
            left = y
            for filters, channels, size in ((32, 64, 1), (32, 32, 3), (64, 32, 1)):
                integers = relax.const(RNG.integers(-128, 128, (filters, channels, size, size)).astype("int8"))
                scales = relax.const(RNG.uniform(0.3, 0.6, filters).astype("float32") / (75 * (channels**0.5) * size))
                zeros = relax.const(np.zeros(filters, "int8"))
                y = b.emit(op.nn.conv2d(y, b.emit(op.dequantize(integers, scales, zeros, 0)), padding=size // 2))
                if filters == 32:
                    y = again(b.emit(op.nn.relu(y)), 0.03, 0)
            y = again(b.emit(op.nn.relu(b.emit(op.add(again(y, 0.04, 120), left)))), 0.05, 0)
        return y

    return network((1, 64, 14, 14), body)


def test_integers_stay_integers_from_layer_to_layer() -> None:
    """With residual sums in epilogues, and nothing but bytes in between."""
    mod = block(3)
    lowered = lower(mod, AMPERE)
    assert spaces(lowered).count("cuda.mma") >= 4 and {*spaces(lowered)} == {"cuda.mma", "cuda.elementwise"}
    made = [b.var for b in bindings(lowered.module["main"])]
    assert all(dtype_of(var) == "int8" for var in made[:-1])
    x = RNG.uniform(-6, 6, (1, 64, 14, 14)).astype("float32")
    (exact,), (found,) = evaluate(mod, x), evaluate(lowered.module, x)
    assert exact.std() > 0.1 and np.abs(found - exact).max() <= 0.05 * 1.01, "one step of the last quantising"


def attention(dtype: str, zero: int) -> tvm.IRModule:
    """A product of two quantised activations."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        def again(y: relax.Expr, scale: float) -> relax.Expr:
            both = relax.const(scale, "float32"), relax.const(zero, dtype)
            return b.emit(op.dequantize(b.emit(op.quantize(y, *both, 0, dtype)), *both, 0))

        return again(b.emit(op.matmul(again(x, 0.05), again(b.emit(op.permute_dims(x, [0, 2, 1])), 0.05))), 0.3)

    return network((4, 128, 64), body)


@pytest.mark.parametrize(("mod", "products"), [
    (Net((256, 512), (512, 128), "uint8", 3).module("int8"), 1), (Net((40, 96), (96, 52), "int8", 0).module("int8"), 1),
    (block(6), 5), (attention("uint8", 128), 0), (attention("int8", 0), 0),
], ids=["dense", "odd", "blocks", "attention", "signed attention"])
def test_no_product_copies_single_bytes(mod: tvm.IRModule, products: int) -> None:
    """As tensor cores would of bytes that run across the sum: weights are packed along it, two activations are
    multiplied as halves, and images have channels last. (Few small convolutions may keep a plain image, where that is
    priced below two more kernels: ``mlc.graph.layout.channels_last``.)"""
    tasks = lower(mod, AMPERE).tasks
    found = [contraction_of(task.func) for task in tasks if find(task.func, AMPERE.tvm).name == "cuda.mma"]
    of_bytes = [each for each in found if each is not None and "int8" in each.types]
    assert len(of_bytes) == products
    for each in of_bytes:
        assert (each.run_a, each.run_b) == (K, K) and min(each.vector_a, each.vector_b) == 16


def test_integers_are_taken_where_they_pay() -> None:
    """Not without tensor cores for them, of few rows or single channels, or against the user's word; of 16-bit floats
    too, which multiply half as fast."""
    def taken(mod: tvm.IRModule, target: Target = AMPERE, **options: object) -> bool:
        made = lower(mod, target, options=CompileOptions.of(**options))  # type: ignore[arg-type]
        return "cuda.mma" in spaces(made, target) and any(
            "int8" in {str(buffer.dtype) for buffer in task.func.params[:2]} for task in made.tasks
            if find(task.func, target.tvm).name == "cuda.mma")

    dense = Net((64, 128), (128, 64), "uint8", 9).module("int8")
    assert taken(dense) and taken(dense, HOPPER, precision="f16")
    assert not taken(dense, resolve("cuda:sm_75")) and not taken(dense, integers=False)
    assert taken(Net((8, 128), (128, 64), "uint8", 9).module("int8"))
    assert not taken(Net((3, 128), (128, 64), "uint8", 9).module("int8"))
    worth = priced_on_gpu(AMPERE, CompileOptions.of())
    image, filters = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (
        ("x", (1, 32, 9, 9)), ("w", (32, 1, 3, 3))))
    assert not worth(relax.BlockBuilder().normalize(op.nn.conv2d(image, filters, groups=32)))
