"""Channels-last convolution as an implicit matrix product, for the tensor cores of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import te

from mlc.graph.kernels.blocked import pad_spatial, windows

__all__ = ["conv2d_channels_last", "pack_conv"]


def pack_conv(weight: np.ndarray, filters: int, channels: int) -> np.ndarray:
    """``[O, I, KH, KW]`` as ``[filters, KH, KW, channels]``, zeros where there are more of these."""
    widths = ((0, filters - weight.shape[0]), (0, channels - weight.shape[1]), (0, 0), (0, 0))
    return np.ascontiguousarray(np.pad(weight, widths).transpose(0, 2, 3, 1))


def conv2d_channels_last(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], pads: Sequence[int], dilation: Sequence[int],
    groups: int = 1,
) -> te.Tensor:
    """2-D convolution, added up in float32, or of int8 in int32: ``[N, 1, H, W, groups * I]`` with a weight of
    :func:`pack_conv`, ``[O, KH, KW, I]``, to ``[N, 1, OH, OW, O]``. ``pads`` is ``(top, left, bottom, right)``.

    The products of a pixel are in the order in which its window lies in memory, rows of channels for each place.
    """
    padded, wide = pad_spatial(data, pads), "int32" if data.dtype == "int8" else "float32"
    n, _, h, w, _ = padded.shape
    filters, kh, kw, channels = weight.shape
    (sh, sw), (dh, dw) = strides, dilation
    rh, rw = te.reduce_axis((0, kh), name="rh"), te.reduce_axis((0, kw), name="rw")
    rc = te.reduce_axis((0, channels), name="rc")

    def total(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        channel = rc if groups == 1 else ci // (filters // groups) * channels + rc
        value = padded[ni, bi, hi * sh + rh * dh, wi * sw + rw * dw, channel].astype(wide)
        return te.sum(value * weight[ci, rh, rw, rc].astype(wide), axis=[rh, rw, rc])

    shape = (n, 1, windows(h, kh, sh, dh), windows(w, kw, sw, dw), filters)
    return te.compute(shape, total, name="conv2d")
