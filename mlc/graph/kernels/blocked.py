"""Tensor expressions of operators on blocked layouts and packed weights.

``NCHW[c]c``: an activation ``[N, C, H, W]`` is stored as ``[N, ceil(C/c), H, W, c]``; lanes past ``C`` are padding
whose values are finite and meaningless, and every weight that meets them is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

__all__ = [
    "BANDED", "CONVOLUTION", "PANEL", "conv2d_nchwc", "convolved", "dense_packed", "depthwise_nchwc", "pad_spatial",
    "windows",
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
    rc = te.reduce_axis((0, weight.shape[4]), name="rc")

    def product(place, group, block, lane):  # type: ignore[no-untyped-def]
        image, channel, *pixel = place
        channel, depth = (channel, rc) if source is None else source(group, rc)
        return padded[(image, channel, *pixel, depth)] * weight[(*block, rc, lane)]

    padded = pad_spatial(data, pads)
    return convolved(padded, weight, weight.shape[-1], strides, dilation, groups, [rc], product, "conv2d_nchwc")


def convolved(
    data: te.Tensor, weight: te.Tensor, lanes: Any, strides: Sequence[int], dilation: Sequence[int], groups: int,
    axes: Sequence[Any], product: Callable[..., tirx.Expr], op: str, name: str = "",
) -> te.Tensor:
    """The convolution of a padded image with a weight ``[OC/o, IC/groups/i, KH, KW, ...]`` as the sum over blocks of
    input channels, the window, and ``axes`` of ``product(place, group, block, lane)``.

    ``place`` are the indices of a pixel in ``data`` up to its lanes, ``block`` the first four of the weight, ``lane``
    one of the ``lanes`` of the result. ``op`` is the block's annotation, and its name too where ``name`` is empty.
    """
    n, _, h, w, _ = data.shape
    oc_blocks, ic_blocks, kh, kw = weight.shape[:4]
    (sh, sw), (dh, dw) = strides, dilation
    per_group = oc_blocks // groups
    rb, rh = te.reduce_axis((0, ic_blocks), name="rb"), te.reduce_axis((0, kh), name="rh")
    rw = te.reduce_axis((0, kw), name="rw")

    def total(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        group = bi // per_group
        place = (ni, rb if groups == 1 else group * ic_blocks + rb, hi * sh + rh * dh, wi * sw + rw * dw)
        return te.sum(product(place, group, (bi, rb, rh, rw), ci), axis=[rb, rh, rw, *axes])

    shape = (n, oc_blocks, windows(h, kh, sh, dh), windows(w, kw, sw, dw), lanes)
    return te.compute(shape, total, name=name or op, attrs={"mlc.op": op})


def depthwise_nchwc(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], pads: Sequence[int], dilation: Sequence[int],
    zero: float = 0, dtype: str = "", op: str = "depthwise_nchwc",
) -> te.Tensor:
    """Depthwise convolution: ``[N, C/c, H, W, c] * [C/c, 1, KH, KW, 1, c] -> [N, C/c, OH, OW, c]``, summed in
    ``dtype`` (left out, the data's). ``zero`` fills the ``pads``; ``op`` is the block's annotation."""
    padded, dtype = pad_spatial(data, pads, zero), dtype or str(data.dtype)
    n, cb, h, w, c = padded.shape
    _, _, kh, kw, _, _ = weight.shape
    (sh, sw), (dh, dw) = strides, dilation
    rh, rw = te.reduce_axis((0, kh), name="rh"), te.reduce_axis((0, kw), name="rw")

    def product(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        value = padded[ni, bi, hi * sh + rh * dh, wi * sw + rw * dw, ci].astype(dtype)
        return te.sum(value * weight[bi, 0, rh, rw, 0, ci].astype(dtype), axis=[rh, rw])

    shape = (n, cb, windows(h, kh, sh, dh), windows(w, kw, sw, dw), c)
    return te.compute(shape, product, name=op.replace("_nchwc", ""), attrs={"mlc.op": op})


def dense_packed(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Product with a packed weight: ``[..., M, K] * [N/n, K, n] -> [..., M, N]``."""
    blocks, depth, width = weight.shape
    rk = te.reduce_axis((0, depth), name="rk")

    def product(*index):  # type: ignore[no-untyped-def]
        *rows, j = index
        return te.sum(data[(*rows, rk)] * weight[j // width, rk, j % width], axis=[rk])

    shape = (*data.shape[:-1], blocks * width)
    return te.compute(shape, product, name="dense_packed", attrs={"mlc.op": "dense_packed"})
