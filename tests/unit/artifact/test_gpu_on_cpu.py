"""What a GPU computes of rounded operands, by this machine's CPU: as the emulated tensor cores round them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from mlc.artifact import compile_module
from mlc.artifact.gpu_on_cpu import for_cpu
from mlc.graph.pipeline import lower
from mlc.options import CompileOptions
from mlc.target import resolve

RNG = np.random.default_rng(0)
#: with tensor cores, and the CPU that stands in for them
GPU, CPU = resolve("cuda:sm_80"), resolve("native")


def tf32(x: np.ndarray) -> np.ndarray:
    """To nearest, ties away from zero, as ``cvt.rna.tf32.f32``."""
    return ((x.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


ROUNDED = {"tf32": tf32, "f16": lambda x: x.astype(np.float16), "bf16": lambda x: x.astype(ml_dtypes.bfloat16)}
of_each = pytest.mark.parametrize("precision", ROUNDED)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def network(shape: tuple[int, ...], body: Any) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return builder.finalize()


def computed(mod: tvm.IRModule, precision: str, x: np.ndarray) -> np.ndarray:
    with_precision = lower(mod, GPU, options=CompileOptions.of(precision=precision)).module
    (found,) = compile_module(for_cpu(with_precision, GPU), CPU)(x)
    return np.asarray(found)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@of_each
def test_operands_of_a_product_are_rounded(precision: str) -> None:
    x, w = weight(64, 256), weight(256, 128)
    x[0, :2] = (1.0 + 2.0**-11, 3e4)  # half of tf32's and float16's last bit
    mod = network(x.shape, lambda b, v: b.emit(op.matmul(v, relax.const(w))))
    a, b = (ROUNDED[precision](each).astype(np.float64) for each in (x, w))
    found = computed(mod, precision, x)
    assert apart(found, a @ b) < 1e-6 < 1e-5 < apart(found, x.astype(np.float64) @ w)


@of_each
def test_a_convolution_and_what_follows_it(precision: str) -> None:
    """In 16 bits the image between two convolutions is stored rounded, as the second reads it."""
    first, second = weight(32, 16, 3, 3) / 12, weight(32, 32, 1, 1) / 6

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.nn.relu(b.emit(op.nn.conv2d(x, relax.const(first), padding=1))))
        return b.emit(op.nn.conv2d(y, relax.const(second)))

    x = weight(1, 16, 14, 14)
    mod, around = network(x.shape, body), np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    rounded = ROUNDED[precision]
    windows = np.lib.stride_tricks.sliding_window_view(rounded(around).astype(np.float64), (3, 3), axis=(2, 3))
    inner = np.einsum("bcyxij,ocij->boyx", windows, rounded(first).astype(np.float64)).clip(0).astype("float32")
    expected = np.einsum("bcyx,oc->boyx", rounded(inner).astype(np.float64), rounded(second[..., 0, 0]).astype(float))
    # where two sums are on two sides of a tie, one operand differs by its last bit
    assert apart(computed(mod, precision, x), expected) < {"tf32": 1e-4, "f16": 1e-4, "bf16": 1e-3}[precision]


@of_each
def test_gelu_before_a_conversion(precision: str) -> None:
    """TVM's own conversion to bfloat16 does not compile behind ``erf``."""
    first, second = weight(64, 96) / 8, weight(96, 64) / 8

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return b.emit(op.matmul(b.emit(op.nn.gelu(b.emit(op.matmul(x, relax.const(first))))), relax.const(second)))

    x = weight(32, 64)
    mod = network(x.shape, body)
    error = apart(computed(mod, precision, x), computed(mod, "f32", x))
    assert 1e-5 < error < (1e-2 if precision == "bf16" else 2e-3)


def test_what_no_tensor_core_computes_is_exact() -> None:
    """A depthwise convolution may be rounded to tf32, but its kernel does not."""
    w = weight(32, 1, 3, 3)
    mod = network((1, 32, 14, 14), lambda b, v: b.emit(op.nn.conv2d(v, relax.const(w), padding=1, groups=32)))
    x = weight(1, 32, 14, 14)
    np.testing.assert_array_equal(computed(mod, "tf32", x), computed(mod, "f32", x))


@of_each
def test_attention(precision: str) -> None:
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        scores = b.emit(op.matmul(x, b.emit(op.permute_dims(x, [0, 1, 3, 2]))))
        scaled = b.emit(op.multiply(scores, relax.const(0.125, "float32")))
        return b.emit(op.matmul(b.emit(op.nn.softmax(scaled)), x))

    x = weight(1, 4, 48, 64)
    mod = network(x.shape, body)
    error = apart(computed(mod, precision, x), computed(mod, "f32", x))
    assert 1e-5 < error < (2e-2 if precision == "bf16" else 2e-3)
