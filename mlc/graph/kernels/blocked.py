"""Tensor expressions of the operators that work on blocked layouts and packed weights.

``NCHW[c]c``: an activation ``[N, C, H, W]`` is stored as ``[N, ceil(C/c), H, W, c]``; lanes past ``C`` are padding
whose values are finite and meaningless, and every weight that meets them is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

__all__ = [
    "BANDED", "CONVOLUTION", "PANEL", "conv2d_nchwc", "dense_packed", "depthwise_nchwc", "pad_spatial", "windows",
]

#: attribute of a function that convolves in blocked layouts: its algorithm, strides, padding, dilation and groups
CONVOLUTION = "mlc.convolution"
#: the algorithm of one that reads channels near its outputs alone, which there is no other for
BANDED = "banded"

#: columns of one panel of a packed weight: one AVX-512 or two AVX2 vectors of float32
PANEL = 16

#: ``(group, channel of the group) -> (block, lane)``
ChannelSource = Callable[[tirx.Expr, tirx.Expr], tuple[tirx.Expr, tirx.Expr]]


def windows(extent: Any, kernel: Any, stride: Any, dilation: Any) -> Any:
    """How many windows of ``kernel`` places fit in a padded extent; numbers or expressions."""
    return (extent - (kernel - 1) * dilation - 1) // stride + 1


def pad_spatial(data: te.Tensor, pads: Sequence[int], value: float = 0) -> te.Tensor:
    """Pad the two spatial axes of ``[N, C, H, W, c]`` by ``(top, left, bottom, right)`` with ``value``; no padding, no
    block."""
    top, left, bottom, right = pads
    if not any(pads):
        return data
    n, cb, h, w, c = data.shape
    around = tirx.const(value, data.dtype)

    def padded(ni, ci, hi, wi, li):  # type: ignore[no-untyped-def]
        inside = tirx.all(hi >= top, hi < h + top, wi >= left, wi < w + left)
        return tirx.if_then_else(inside, data[ni, ci, hi - top, wi - left, li], around)

    return te.compute((n, cb, h + top + bottom, w + left + right, c), padded, name="padded")


def conv2d_nchwc(
    data: te.Tensor,
    weight: te.Tensor,
    strides: Sequence[int],
    pads: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    source: ChannelSource | None = None,
) -> te.Tensor:
    """2-D convolution: ``[N, IC/i, H, W, i] * [OC/o, IC/groups/i, KH, KW, i, o] -> [N, OC/o, OH, OW, o]``.

    ``pads`` is ``(top, left, bottom, right)``. With groups, a group's channels fill whole blocks on both sides.
    ``source`` says for a group and its ``r``-th input channel in which block and lane that channel is, where channels
    are not in order; the weight is then ``[OC/o, 1, KH, KW, IC/groups, o]``.
    """
    padded = pad_spatial(data, pads)
    n, _, h, w, _ = padded.shape
    oc_blocks, ic_blocks, kh, kw, ic, oc = weight.shape
    (sh, sw), (dh, dw) = strides, dilation
    out_h, out_w = windows(h, kh, sh, dh), windows(w, kw, sw, dw)
    per_group = oc_blocks // groups
    rb, rh = te.reduce_axis((0, ic_blocks), name="rb"), te.reduce_axis((0, kh), name="rh")
    rw, rc = te.reduce_axis((0, kw), name="rw"), te.reduce_axis((0, ic), name="rc")

    def product(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        channel = rb if groups == 1 else (bi // per_group) * ic_blocks + rb
        block, lane = (channel, rc) if source is None else source(bi // per_group, rc)
        value = padded[ni, block, hi * sh + rh * dh, wi * sw + rw * dw, lane]
        return te.sum(value * weight[bi, rb, rh, rw, rc, ci], axis=[rb, rh, rw, rc])

    shape = (n, oc_blocks, out_h, out_w, oc)
    return te.compute(shape, product, name="conv2d_nchwc", attrs={"mlc.op": "conv2d_nchwc"})


def depthwise_nchwc(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], pads: Sequence[int], dilation: Sequence[int]
) -> te.Tensor:
    """Depthwise convolution: ``[N, C/c, H, W, c] * [C/c, 1, KH, KW, 1, c] -> [N, C/c, OH, OW, c]``."""
    padded = pad_spatial(data, pads)
    n, cb, h, w, c = padded.shape
    _, _, kh, kw, _, _ = weight.shape
    (sh, sw), (dh, dw) = strides, dilation
    out_h, out_w = windows(h, kh, sh, dh), windows(w, kw, sw, dw)
    rh, rw = te.reduce_axis((0, kh), name="rh"), te.reduce_axis((0, kw), name="rw")

    def product(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        value = padded[ni, bi, hi * sh + rh * dh, wi * sw + rw * dw, ci]
        return te.sum(value * weight[bi, 0, rh, rw, 0, ci], axis=[rh, rw])

    return te.compute((n, cb, out_h, out_w, c), product, name="depthwise", attrs={"mlc.op": "depthwise_nchwc"})


def dense_packed(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Product with a packed weight: ``[..., M, K] * [N/n, K, n] -> [..., M, N]``."""
    blocks, depth, width = weight.shape
    rk = te.reduce_axis((0, depth), name="rk")

    def product(*index):  # type: ignore[no-untyped-def]
        *rows, j = index
        return te.sum(data[(*rows, rk)] * weight[j // width, rk, j % width], axis=[rk])

    shape = (*data.shape[:-1], blocks * width)
    return te.compute(shape, product, name="dense_packed", attrs={"mlc.op": "dense_packed"})
