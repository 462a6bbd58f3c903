"""A convolution in blocked layouts as a matrix product (im2col): each window is gathered into a row.

That is for a matrix unit, which adds up whole rows of 64 bytes: blocks of channels are shorter. Rows of zeros make
whole tiles of pixels. The product is that of :mod:`mlc.graph.kernels.stepped`, and its result is put into blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.blocked import windows
from schedules.intrin.tiles import TILE

__all__ = ["filters_matrix", "gathered", "in_blocks", "outputs"]


def filters_matrix(weight: np.ndarray, inner: int, outer: int) -> np.ndarray:
    """``[O, I, KH, KW]`` as the matrix ``[KH * KW * I, O]`` by which :func:`gathered` rows are multiplied, ``I`` and
    ``O`` padded with zeros to whole blocks of ``inner`` and ``outer`` channels."""
    filters, channels, height, width = weight.shape
    weight = np.pad(weight, ((0, -filters % outer), (0, -channels % inner), (0, 0), (0, 0)))
    return weight.transpose(2, 3, 1, 0).reshape(height * width * weight.shape[1], -1)


def outputs(
    padded: te.Tensor, kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Rows and columns of windows of padded images ``[N, IC/i, H, W, i]`` of one size."""
    _, _, height, width, _ = padded.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel, strides, dilation
    return int(windows(height, kh, sh, dh)), int(windows(width, kw, sw, dw))


def gathered(padded: te.Tensor, kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> te.Tensor:
    """Padded images ``[N, IC/i, H, W, i]`` as ``[N, P, KH * KW * IC]``, a row for each window and ``P`` whole tiles."""
    n, blocks, _, _, lanes = padded.shape
    (_, kw), (sh, sw), (dh, dw) = kernel, strides, dilation
    rows, columns = outputs(padded, kernel, strides, dilation)
    pixels, depth = rows * columns, kernel[0] * kw * int(blocks) * int(lanes)

    def value(ni, pi, ki):  # type: ignore[no-untyped-def]
        lane, block = ki % lanes, ki // lanes % blocks
        row, column = ki // (lanes * blocks * kw), ki // (lanes * blocks) % kw
        found = padded[ni, block, pi // columns * sh + row * dh, pi % columns * sw + column * dw, lane]
        return tirx.if_then_else(pi < pixels, found, tirx.const(0, padded.dtype)) if pixels % TILE else found

    return te.compute((n, -(-pixels // TILE) * TILE, depth), value, name="gathered")


def in_blocks(product: te.Tensor, rows: int, columns: int, outer: int) -> te.Tensor:
    """``[N, P, O]``, of which the first ``rows * columns`` of ``P`` are kept, as ``[N, O/o, rows, columns, o]``."""
    n, _, filters = product.shape
    shape = (n, filters // outer, rows, columns, outer)
    return te.compute(shape, lambda ni, bi, hi, wi, ci: product[ni, hi * columns + wi, bi * outer + ci],
                      name="in_blocks")
