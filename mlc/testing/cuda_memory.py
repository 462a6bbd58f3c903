"""Memory-bound functions for GPUs, of any size: norms and sums of rows, a row times a weight, pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, topi

from mlc.testing.cases import Case

__all__ = ["layer_norm", "mean", "narrow_norm", "pooled", "rms_norm", "row_sums", "row_times", "softmax"]

_ROWS, _COLUMNS = "cuda.rows", "cuda.columns"
#: of sums that are rounded once to that type, and of norms
_TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 3e-3}
_NORM_TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}


def softmax(rows: int, columns: int) -> Case:
    def reference(x: np.ndarray) -> np.ndarray:
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    return Case("softmax", lambda: _with_result(topi.nn.softmax, (rows, columns)), reference, 1e-5, space=_ROWS,
                index="int64")


def layer_norm(rows: int, columns: int) -> Case:
    def reference(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b

    return Case("layer_norm", lambda: _with_result(
        lambda x, g, b: topi.nn.layer_norm(x, g, b, [1]), (rows, columns), (columns,), (columns,)), reference, 5e-5,
        space=_ROWS, index="int64")


def rms_norm(rows: int, columns: int) -> Case:
    """Of the sum with what went before, as decoders have it."""
    def build(x: Any, residual: Any, g: Any) -> Any:
        return topi.nn.rms_norm(topi.add(x, residual), g, [1])

    def reference(x: np.ndarray, residual: np.ndarray, g: np.ndarray) -> np.ndarray:
        y = x + residual
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * g

    return Case("rms_norm", lambda: _with_result(build, (rows, columns), (rows, columns), (columns,)), reference, 5e-5,
                space=_ROWS, index="int64")


def narrow_norm(rows: int, columns: int, dtype: str) -> Case:
    """Layer normalisation of 16 bits, computed in float32, with a scale and a shift of float32."""
    def build() -> list[Any]:
        x = te.placeholder((rows, columns), dtype, "x")
        g, b = (te.placeholder((columns,), "float32", name) for name in "gb")
        return [x, g, b, topi.cast(topi.nn.layer_norm(topi.cast(x, "float32"), g, b, [1]), dtype)]

    def reference(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b

    return Case(f"norm_{dtype}", build, reference, _NORM_TOLERANCE[dtype], space=_ROWS, index="int64")


def row_sums(rows: int, columns: int, dtype: str) -> Case:
    def build() -> list[Any]:
        x = te.placeholder((rows, columns), dtype, "x")
        return [x, topi.sum(topi.cast(x, "float32"), 1)]

    return Case(f"sums_{dtype}", build, lambda x: x.sum(1), 1e-5, space="cuda.reduce", index="int64")


def row_times(terms: int, columns: int, dtype: str, result: str = "float32", rows: int = 1) -> Case:
    """Rows of ``dtype`` times a weight, with a bias of float32, rounded to ``result``."""
    def build() -> list[Any]:
        x, w = te.placeholder((rows, terms), dtype, "x"), te.placeholder((terms, columns), dtype, "w")
        bias = te.placeholder((columns,), "float32", "bias")
        k = te.reduce_axis((0, terms), "k")
        product = te.compute((rows, columns), lambda i, j: te.sum(
            x[i, k].astype("float32") * w[k, j].astype("float32"), axis=k), "product")
        return [x, w, bias, topi.cast(topi.add(product, bias), result)]

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return x @ w + bias

    return Case(f"{rows}x{terms}x{columns}_{dtype}_{result}", build, reference, _TOLERANCE[result], space=_COLUMNS,
                index="int64")


def pooled(image: tuple[int, int, int], size: int, dtype: str) -> Case:
    """The largest of windows of an image of channels last, with a border, half as large."""
    height, width, channels = image

    def build() -> list[Any]:
        x = te.placeholder((1, height, width, channels), dtype, "x")
        border = (size // 2,) * 4
        return [x, topi.nn.pool2d(x, (size, size), (2, 2), (1, 1), border, "max", layout="NHWC")]

    def reference(x: np.ndarray) -> np.ndarray:
        pad = size // 2
        padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
        return windows[:, ::2, ::2].max((-2, -1))

    return Case(f"pool{size}_{dtype}", build, reference, 0.0, space=_COLUMNS, index="int64")


def mean(image: tuple[int, int, int]) -> Case:
    """Over the pixels of an image of channels last."""
    def build() -> list[Any]:
        x = te.placeholder((1, *image), "float32", "x")
        return [x, topi.divide(topi.sum(x, [1, 2]), float(image[0] * image[1]))]

    return Case(f"mean{image[0]}", build, lambda x: x.mean((1, 2)), 1e-5, space=_COLUMNS, index="int64")


def _with_result(build: Any, *shapes: tuple[int, ...]) -> list[Any]:
    inputs = [te.placeholder(shape, "float32", f"p{i}") for i, shape in enumerate(shapes)]
    return [*inputs, build(*inputs)]
