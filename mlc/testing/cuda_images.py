"""Channels-last convolutions for tensor cores, each with a float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mlc.graph.kernels.transposed import Phases, axes, conv2d_transpose_channels_last, phases_of
from mlc.testing.cases import Case

__all__ = ["IMAGES", "Image", "Transposed", "first_layer"]


@dataclass(frozen=True)
class Image:
    """A convolution of images ``[n, height, width, channels]`` by square windows, with what follows one in a network:
    a bias, a ``residual`` sum in the operands' type, ReLU, and rounding to that type (``tf32``: float32)."""

    size: tuple[int, int, int, int]
    filters: int
    window: int = 3
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    dtype: str = "float16"
    residual: bool = False
    groups: int = 1

    def case(self, name: str, space: str = "cuda.mma") -> Case:
        """Its case, for the space that takes it."""
        def alone(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
            return np.maximum(self._convolved(x, w) + bias, 0)

        def joined(x: np.ndarray, w: np.ndarray, bias: np.ndarray, other: np.ndarray) -> np.ndarray:
            return np.maximum(self._convolved(x, w) + bias + other, 0)

        made = Case(name, self._tensors, joined if self.residual else alone,
                    {"bfloat16": 3e-3}.get(self.dtype, 1e-3), space=space, index="int64")
        return replace(made, build=lambda: _marked(made)) if self.dtype == "tf32" else made

    @property
    def _type(self) -> str:
        return "float32" if self.dtype == "tf32" else self.dtype

    def _tensors(self) -> list[Any]:
        from tvm import te, topi

        from mlc.graph.kernels.channels_last import conv2d_channels_last

        n, height, width, channels = self.size
        x = te.placeholder((n, 1, height, width, channels), self._type, "x")
        w = te.placeholder((self.filters, self.window, self.window, channels // self.groups), self._type, "w")
        bias = te.placeholder((1, 1, 1, 1, self.filters), "float32", "bias")
        y = conv2d_channels_last(x, w, (self.stride,) * 2, (self.pad,) * 4, (self.dilation,) * 2, self.groups)
        others = [te.placeholder(y.shape, self._type, "other")] if self.residual else []
        y = topi.add(y, bias)
        for other in others:
            y = topi.add(y, topi.cast(other, "float32"))
        return [x, w, bias, *others, topi.cast(topi.nn.relu(y), self._type)]

    def _convolved(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        pad, reach = self.pad, (self.window - 1) * self.dilation + 1
        padded = np.pad(x[:, 0], ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        windows = sliding_window_view(padded, (reach, reach), axis=(1, 2))
        windows = windows[:, :: self.stride, :: self.stride, :, :: self.dilation, :: self.dilation]
        parts = zip(np.split(windows, self.groups, 3), np.split(w, self.groups), strict=True)
        return np.concatenate([np.einsum("nhwcrs,frsc->nhwf", *part) for part in parts], -1)[:, None]


def _marked(case: Case) -> Any:
    from schedules.cuda.contraction import with_tf32

    return with_tf32(case.func())


def first_layer(
    name: str, size: tuple[int, int, int, int], filters: int, window: int, stride: int, dtype: str = "float16"
) -> Case:
    """A convolution of lines of pixels of 4 channels, of images ``(n, channels, height, width)`` with padding all
    around, a bias, and ReLU."""
    from mlc.graph.estimate import Convolution
    from mlc.graph.kernels.few_channels import conv2d_lines
    from mlc.graph.layout.channels_last import lines_of

    n, channels, height, width = size
    lines = lines_of(Convolution(n, channels, filters, (height, width), (window,) * 2, (stride,) * 2,
                                 (window // 2,) * 4, (1, 1), 1, 1, filters))
    assert lines is not None, "windows must begin at multiples of 16 bytes"

    def tensors() -> list[Any]:
        from tvm import te, topi

        x = te.placeholder((n, 1, lines.lines, lines.columns, 4), dtype, "x")
        w = te.placeholder((filters, window, lines.taps, 4), dtype, "w")
        bias = te.placeholder((1, 1, 1, 1, filters), "float32", "bias")
        return [x, w, bias, topi.cast(topi.nn.relu(topi.add(conv2d_lines(x, w, lines), bias)), dtype)]

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        windows = sliding_window_view(x[:, 0], (window, lines.taps), axis=(1, 2))[:, ::stride, ::stride]
        return np.maximum(np.einsum("nhwcrs,frsc->nhwf", windows, w)[:, None] + bias, 0)

    return Case(name, tensors, reference, {"bfloat16": 3e-3}.get(dtype, 1e-3), space="cuda.mma", index="int64")


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution of images ``[n, height, width, channels]``, with a bias, ReLU, and rounding to the
    operands' type, for which results are whole phases."""

    size: tuple[int, int, int, int]
    filters: int
    kernel: tuple[int, int] = (4, 4)
    strides: tuple[int, int] = (2, 2)
    pads: tuple[int, int] = (1, 1)
    dtype: str = "float16"

    @property
    def phases(self) -> tuple[Phases, Phases]:
        """Of rows and columns, as the tensor cores' kernels have them."""
        before_after = (*self.pads, *self.pads)
        return phases_of(*axes(self.size[1:3], self.kernel, self.strides, before_after, (0, 0)), self.filters, 64)

    def case(self, name: str, space: str = "cuda.mma") -> Case:
        """Its case, for the space that takes it."""
        def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
            return np.maximum(self._convolved(x[:, 0], w) + bias, 0)

        made = Case(name, self._tensors, reference, {"bfloat16": 3e-3}.get(self.dtype, 1e-3), space=space,
                    index="int64")
        return replace(made, build=lambda: _marked(made)) if self.dtype == "tf32" else made

    def _tensors(self) -> list[Any]:
        from tvm import te, topi

        n, height, width, channels = self.size
        rows, columns = self.phases
        dtype = "float32" if self.dtype == "tf32" else self.dtype
        of_phases = (rows.groups, columns.groups, rows.count, columns.count)
        shape = (*of_phases, self.filters, rows.taps, columns.taps, channels)
        x, w = te.placeholder((n, 1, height, width, channels), dtype, "x"), te.placeholder(shape, dtype, "w")
        bias = te.placeholder((1, 1, 1, 1, self.filters), "float32", "bias")
        y = conv2d_transpose_channels_last(x, w, rows, columns)
        return [x, w, bias, topi.cast(topi.nn.relu(topi.add(y, bias)), dtype)]

    def _convolved(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Phase by phase, from what :class:`mlc.graph.kernels.transposed.Phases` says of windows."""
        rows, columns = self.phases
        padded = np.pad(x, ((0, 0), rows.padding, columns.padding, (0, 0)))
        windows = sliding_window_view(padded, (rows.taps, columns.taps), axis=(1, 2))
        result = np.zeros((len(x), rows.axis.steps, rows.axis.stride, columns.axis.steps, columns.axis.stride,
                           self.filters))
        for g, k, p, q in np.ndindex(w.shape[:4]):
            first = (rows.first + g + rows.padding[0], columns.first + k + columns.padding[0])
            of = windows[:, first[0] :, first[1] :][:, : rows.axis.steps, : columns.axis.steps]
            sums = np.einsum("nhwcrs,frsc->nhwf", of, w[g, k, p, q])
            result[:, :, g * rows.count + p, :, k * columns.count + q] = sums
        shape = (len(x), 1, rows.axis.steps * rows.axis.stride, columns.axis.steps * columns.axis.stride, self.filters)
        return result.reshape(shape)


def _pixels() -> Case:
    """Three channels of images with their channels last as such lines."""
    from mlc.graph.estimate import Convolution
    from mlc.graph.kernels.few_channels import pixel_lines
    from mlc.graph.layout.channels_last import lines_of

    lines = lines_of(Convolution(2, 3, 8, (9, 13), (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1, 1, 8))
    assert lines is not None

    def tensors() -> list[Any]:
        from tvm import te, topi

        x = te.placeholder((2, 9, 13, 3), "float16", "x")
        return [x, pixel_lines(topi.transpose(x, (0, 3, 1, 2)), lines)]

    def reference(x: np.ndarray) -> np.ndarray:
        pixels = np.concatenate([x, x[..., -1:]], -1)
        return np.pad(pixels, ((0, 0), (3, 3), (3, lines.columns - 16), (0, 0)))[:, None]

    return Case("pixels_in_lines", tensors, reference, 0.0, space="cuda.elementwise", index="int64")


IMAGES: tuple[Case, ...] = (
    Image((1, 9, 11, 24), 40, pad=1, residual=True).case("image3x3_residual"),
    Image((2, 13, 10, 16), 24, stride=2, pad=1, dtype="bfloat16").case("image3x3_stride2_bf16"),
    Image((1, 19, 23, 8), 32, 7, 2, 3).case("image7x7_first"),
    first_layer("image7x7_lines", (2, 3, 19, 23), 32, 7, 2),
    _pixels(),
    Image((1, 15, 15, 64), 48, 1, 2).case("image1x1_stride2"),
    Image((1, 10, 9, 32), 24, pad=2, dilation=2).case("image3x3_dilated"),
    Image((1, 8, 12, 16), 24, pad=1, dtype="tf32").case("image3x3_tf32"),
    Image((1, 7, 9, 40), 48, pad=1, groups=2).case("image3x3_groups"),
    Transposed((2, 5, 7, 24), 40).case("image4x4_transposed"),
    Transposed((1, 9, 6, 32), 24, (2, 2), pads=(0, 0), dtype="bfloat16").case("image2x2_transposed_bf16"),
    Transposed((1, 7, 6, 16), 24, (3, 3), dtype="tf32").case("image3x3_transposed_tf32"),
    Transposed((2, 1, 37, 32), 16, (1, 16), (1, 8), (0, 4)).case("line16_transposed"),
    Image((2, 9, 7, 64), 72, pad=1, residual=True).case("image3x3_windows", "cuda.wgmma"),
    Image((2, 15, 14, 96), 64, 1, 2, dtype="bfloat16").case("image1x1_windows_bf16", "cuda.wgmma"),
    Transposed((2, 9, 7, 64), 72).case("image4x4_transposed_windows", "cuda.wgmma"),
    Transposed((3, 8, 9, 96), 64, (2, 2), pads=(0, 0), dtype="bfloat16").case(
        "image2x2_transposed_windows_bf16", "cuda.wgmma"),
    Transposed((2, 1, 67, 64), 40, (1, 8), (1, 4), (0, 2)).case("line8_transposed_windows", "cuda.wgmma"),
)
