"""Convolutions of images with few channels (the first layer of a network), for tensor cores.

Pixels have four channels each, zeros around the image included, so that a line of a window is one piece of a product's
sum: of 7 pixels of 3 channels 32 numbers, of which the weight has zeros for the eighth pixel and the fourth channels.
Where windows are an even number of pixels apart, every piece begins at a multiple of 16 bytes, and no copy looks for a
border. What is not finite makes NaN of the window beside it too, which multiplies it by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.channels_last import conv2d_channels_last

__all__ = ["COPY", "DEPTH", "LANES", "Lines", "conv2d_lines", "pack_lines", "pixel_lines"]

#: channels of a pixel, of 16 bits, numbers of a copy of 16 bytes, and those that tensor cores multiply at a time
LANES, COPY, DEPTH = 4, 8, 16


@dataclass(frozen=True)
class Lines:
    """Lines of pixels of :data:`LANES` channels for windows of ``window`` lines and columns, of which ``taps`` are
    multiplied; ``out`` are lines and columns of the results, ``height`` lines of the image."""

    window: tuple[int, int]
    taps: int
    strides: tuple[int, int]
    dilation: int
    out: tuple[int, int]
    pads: tuple[int, ...]
    height: int

    @property
    def lines(self) -> int:
        """The number of lines of the image, padding included."""
        return self.height + self.pads[0] + self.pads[2]

    @property
    def columns(self) -> int:
        """The number of columns up to the end of the last window."""
        return (self.out[1] - 1) * self.strides[1] + self.taps


def pack_lines(weight: np.ndarray, filters: int, lines: Lines) -> np.ndarray:
    """``[O, I, KH, KW]`` as ``[filters, KH, taps, LANES]``, zeros where there are more of these."""
    count, channels, _, width = weight.shape
    widths = ((0, filters - count), (0, LANES - channels), (0, 0), (0, lines.taps - width))
    return np.ascontiguousarray(np.pad(weight, widths).transpose(0, 2, 3, 1))


def pixel_lines(x: te.Tensor, lines: Lines) -> te.Tensor:
    """``[N, C, H, W]`` as ``[N, 1, lines, columns, LANES]``, zeros around the image, the last channel again where there
    are no more: so one access stores a pixel."""
    n, channels, height, width = x.shape
    top, left, *_ = lines.pads

    def number(ni, _bi, line, column, lane):  # type: ignore[no-untyped-def]
        inside = tirx.all(line >= top, line < height + top, column >= left, column < width + left)
        value = x[ni, tirx.min(lane, channels - 1), line - top, column - left]
        return tirx.if_then_else(inside, value, tirx.const(0, x.dtype))

    return te.compute((n, 1, lines.lines, lines.columns, LANES), number, name="lines")


def conv2d_lines(data: te.Tensor, weight: te.Tensor, lines: Lines) -> te.Tensor:
    """2-D convolution, added up in float32, of :func:`pixel_lines` with a weight of :func:`pack_lines`, to images
    ``[N, 1, OH, OW, O]``."""
    return conv2d_channels_last(data, weight, lines.strides, (0, 0, 0, 0), (lines.dilation, 1))
