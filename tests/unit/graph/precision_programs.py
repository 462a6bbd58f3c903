"""Programs of quantised tensors, and whether a pass leaves what they compute."""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import tvm
from relax_evaluation import RNG, evaluate
from tvm import relax
from tvm.relax import op

from mlc.artifact.cpu_features import missing_features, required_features
from mlc.graph.ir.rewrite import dtype_of
from mlc.target import Target, resolve

V3, NATIVE = resolve("x86-64-v3", threads=2), resolve("native", threads=2)

Body = Callable[[relax.BlockBuilder, relax.Expr], relax.Expr]


def quantise(b: relax.BlockBuilder, x: relax.Expr, scale: float, zero: int, dtype: str = "uint8") -> relax.Expr:
    return b.emit(op.quantize(x, relax.const(scale, "float32"), relax.const(zero, dtype), 0, dtype))


def dequantise(b: relax.BlockBuilder, q: relax.Expr, scale: float, zero: int) -> relax.Expr:
    return b.emit(op.dequantize(q, relax.const(scale, "float32"), relax.const(zero, dtype_of(q)), 0))


#: as float32 holds it
SCALE = np.float32(0.03)


def image(b: relax.BlockBuilder, x: relax.Expr, zero: int = 3, dtype: str = "uint8") -> relax.Expr:
    """``x`` as quantised numbers."""
    return dequantise(b, quantise(b, x, 0.03, zero, dtype), 0.03, zero)


def weights(b: relax.BlockBuilder, shape: tuple[int, ...], axis: int, dtype: str = "int8", zero: int = 0) -> relax.Expr:
    """A constant with a scale for each index of ``axis``."""
    limits = np.iinfo(dtype)
    integers = RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)
    scales = RNG.uniform(0.002, 0.01, shape[axis]).astype("float32")
    zeros = np.full(shape[axis], zero, dtype)
    return b.emit(op.dequantize(relax.const(integers), relax.const(scales), relax.const(zeros), axis))


def passed(mod: tvm.IRModule, *passes: tvm.transform.Pass) -> tvm.IRModule:
    for each in passes:
        mod = each(mod)
    return mod


def assert_same(mod: tvm.IRModule, changed: tvm.IRModule, *inputs: np.ndarray, tolerance: float = 0.0) -> None:
    for old, new in zip(evaluate(mod, *inputs), evaluate(changed, *inputs), strict=True):
        assert old.dtype == new.dtype and np.asarray(old, "float64").std() > 0
        np.testing.assert_allclose(np.asarray(new, "float64"), np.asarray(old, "float64"), rtol=0, atol=tolerance)


def numbers(*shape: int) -> np.ndarray:
    """With what quantising saturates at both ends."""
    return RNG.uniform(-6, 6, shape).astype("float32")


def targets_here() -> list[Target]:
    """This machine, and the level whose products are of pairs where it can run that."""
    runs = not missing_features(platform.machine(), required_features(V3.tvm))
    return [NATIVE, *([V3] if runs and platform.machine() == "x86_64" else [])]
