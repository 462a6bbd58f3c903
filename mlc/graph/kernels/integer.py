"""Tensor expressions of products of 8-bit integers, and the packings of their weights.

Activations are uint8, weights int8, results the exact int32 sums: zero points, scales and biases are the business of
whoever reads them. Where a sum could leave int32 (more than 66,051 products), it wraps. Sums run over steps of four
products, or of two of 16-bit numbers, in the form that :func:`dot_form` names for a target; see
:mod:`schedules.intrin.dot` for the instructions. The latter's activations are widened in a block before the sum.
Where both operands are activations, as in attention, one of them is packed as a weight at run time.
Blocked layouts are those of :mod:`mlc.graph.kernels.blocked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from mlc.graph.kernels.blocked import PANEL, depthwise_nchwc, pad_spatial, windows
from mlc.graph.kernels.stepped import conv2d_nchwc_stepped, dense_stepped
from mlc.graph.kernels.windows import gathered, in_blocks, outputs
from mlc.target import Target
from schedules.intrin import dot, select
from schedules.intrin.matrix import BYTE_PAIRS

__all__ = [
    "STEP", "conv2d_nchwc_integer", "conv2d_nchwc_tiles", "dense_integer", "depthwise_nchwc_integer",
    "depthwise_nchwc_taps", "dot_form", "has_taps", "pack_conv", "pack_dense", "pack_taps", "packed_operand",
    "widened",
]

#: what every sum's length is a multiple of: whole steps of any form
STEP = 4


def dot_form(target: Target | tvm.target.Target) -> str:
    """``"quads"`` where the target has a dot product of four bytes, else ``"words"``, of 16-bit numbers."""
    return dot.dot_form(target.tvm if isinstance(target, Target) else target)


def pack_dense(weight: np.ndarray, form: str) -> np.ndarray:
    """``[K, N]`` int8 as ``[N/16, K/4, 16, 4]`` int8 for quads, ``[N/16, K/2, 16, 2]`` int16 for words, and
    ``[N/16, K/8, 16, 8]`` int8 for pairs of bytes' rows.

    Both extents are padded with zeros, ``K`` to a multiple of 4, or 8, and ``N`` to whole panels.
    """
    depth, columns = weight.shape
    weight = np.pad(weight, ((0, -depth % max(STEP, _step(form)[0])), (0, -columns % PANEL)))
    return _packed(weight.reshape(-1, -(-columns // PANEL), PANEL).transpose(1, 0, 2), form)


def pack_conv(weight: np.ndarray, inner: int, outer: int, groups: int, form: str) -> np.ndarray:
    """``[O, I/groups, KH, KW]`` int8 as ``[O/o, I/groups/i, KH, KW, i/4, o, 4]`` int8 for quads, and
    ``[O/o, I/groups/i, KH, KW, i/2, o, 2]`` int16 for words.

    ``inner`` is ``i``, a multiple of 4, and ``outer`` is ``o``; each group's channels are padded with zeros to whole
    blocks on both sides. A weight that is in blocks already is ``[O/o, I/groups/i, KH, KW, i, o]``.
    """
    if weight.ndim == 4:
        filters, channels, height, width = weight.shape
        each, depth = filters // groups, -(-channels // inner)
        weight = weight.reshape(groups, each, channels, height, width)
        weight = np.pad(weight, ((0, 0), (0, -each % outer), (0, -channels % inner), (0, 0), (0, 0)))
        weight = weight.reshape(-1, outer, depth, inner, height, width).transpose(0, 2, 4, 5, 3, 1)
    channels, lanes = weight.shape[-2:]
    if (channels, lanes) != (inner, outer) or inner % STEP:
        raise ValueError(f"blocks must be [..., {inner}, {outer}] with whole steps of {STEP}, got {weight.shape}")
    return _packed(weight, form)


def packed_operand(data: te.Tensor, form: str) -> te.Tensor:
    """int8 ``[..., K, N]`` as :func:`pack_dense` packs constants, with the dimensions before the last two in front."""
    *batch, depth, columns = data.shape
    size, dtype = _step(form)
    multiple = max(STEP, size)
    whole, panels = -(-depth // multiple) * multiple, -(-columns // PANEL)

    def element(outer: Sequence[Any], k: Any, lane: Any, dtype: str) -> tirx.Expr:
        *front, panel = outer
        j = panel * PANEL + lane
        inside = [condition for condition, ragged in ((k < depth, depth % multiple), (j < columns, columns % PANEL))
                  if ragged]
        value = data[(*front, k, j)].astype(dtype)
        return tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, dtype)) if inside else value

    return te.compute((*batch, panels, whole // size, PANEL, size),
                      lambda *i: element(i[:-3], i[-3] * size + i[-1], i[-2], dtype), name="packed")


def _step(form: str) -> tuple[int, str]:
    """The products of a step, and the type of their weights."""
    return {dot.QUADS: (4, "int8"), dot.WORDS: (2, "int16"), BYTE_PAIRS: (8, "int8")}[form]


def _packed(weight: np.ndarray, form: str) -> np.ndarray:
    """``[..., i, o]`` as the form's instruction takes it: ``[..., i/s, o, s]`` for steps of ``s``."""
    *others, inner, lanes = weight.shape
    size, dtype = _step(form)
    return np.ascontiguousarray(weight.astype(dtype).reshape(*others, inner // size, size, lanes).swapaxes(-1, -2))


def widened(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """The activations as the instruction takes them that reads this weight."""
    if str(weight.dtype) != "int16":
        return data
    return te.compute(data.shape, lambda *i: data[i].astype("int16"), name="widened")


def conv2d_nchwc_integer(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], pads: Sequence[int], dilation: Sequence[int],
    groups: int, zero: int,
) -> te.Tensor:
    """2-D convolution: uint8 ``[N, IC/i, H, W, i]`` with a weight of :func:`pack_conv` to int32
    ``[N, OC/o, OH, OW, o]``.

    ``pads`` is ``(top, left, bottom, right)``, filled with ``zero``, the activation's zero point. With groups, a
    group's channels fill whole blocks on both sides.
    """
    padded = widened(pad_spatial(data, pads, zero), weight)
    return conv2d_nchwc_stepped(padded, weight, strides, dilation, groups, "int32", "conv2d_nchwc_integer")


def dense_integer(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Product of uint8 ``[..., M, K]``, ``K`` whole steps of the weight's, with a weight of :func:`pack_dense` or of
    :func:`packed_operand` to int32 ``[..., M, N]``, ``N`` whole panels."""
    return dense_stepped(widened(data, weight), weight, "int32", "dense_integer")


def conv2d_nchwc_tiles(
    data: te.Tensor, weight: te.Tensor, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int],
    dilation: Sequence[int], zero: int, outer: int,
) -> te.Tensor:
    """2-D convolution: uint8 ``[N, IC/i, H, W, i]`` with :func:`mlc.graph.kernels.windows.filters_matrix` as
    :func:`pack_dense` packs it to int32 ``[N, OC/o, OH, OW, o]``, as a product of matrices for the tiles of a matrix
    unit, which want rows of 64 bytes: what a window reads is gathered into a row first."""
    padded = pad_spatial(data, pads, zero)
    rows, columns = outputs(padded, kernel, strides, dilation)
    matrix = gathered(padded, kernel, strides, dilation)
    return in_blocks(dense_integer(matrix, weight), rows, columns, outer)


def depthwise_nchwc_integer(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], pads: Sequence[int], dilation: Sequence[int],
    zero: int,
) -> te.Tensor:
    """Depthwise convolution: uint8 ``[N, C/c, H, W, c]`` with int8 ``[C/c, 1, KH, KW, 1, c]`` to int32
    ``[N, C/c, OH, OW, c]``; ``zero`` fills the ``pads``.

    LLVM multiplies what fits 16 bits by ``pmaddwd``.
    """
    return depthwise_nchwc(data, weight, strides, pads, dilation, zero, "int32", "depthwise_nchwc_integer")


def has_taps(target: Target, lanes: int) -> bool:
    """Whether the target multiplies four pixels of each of ``lanes`` channels at once."""
    return select(dot.dot(dot.TAPS, lanes), target.tvm) is not None


def pack_taps(weight: np.ndarray, lanes: int) -> np.ndarray:
    """``[C, 1, KH, KW]`` int8, ``C`` whole blocks of ``lanes``, as ``[C/c, 1, KH, KW/4, 1, c, 4]``, ``KW`` padded with
    zeros to a multiple of 4."""
    channels, _, height, width = weight.shape
    weight = np.pad(weight[:, 0], ((0, 0), (0, 0), (0, -width % STEP)))
    packed = weight.reshape(channels // lanes, lanes, height, -1, STEP).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(packed[:, None, :, :, None])


def depthwise_nchwc_taps(
    data: te.Tensor, weight: te.Tensor, width: int, strides: Sequence[int], pads: Sequence[int], zero: int,
) -> te.Tensor:
    """Depthwise convolution of a window ``width`` pixels wide: uint8 ``[N, C/c, H, W, c]`` with a weight of
    :func:`pack_taps` to int32 ``[N, C/c, OH, OW, c]``; ``zero`` fills the ``pads``. The image is padded further where
    whole steps reach, for what weights of zero multiply."""
    n, blocks, h, w, lanes = data.shape
    kh, quads = weight.shape[2:4]
    (sh, sw), (top, left, bottom, right) = strides, pads
    rows, columns = windows(h + top + bottom, kh, sh, 1), windows(w + left + right, width, sw, 1)
    reached = (int(columns) - 1) * sw + int(quads) * STEP
    padded = pad_spatial(data, (top, left, bottom, max(right, reached - int(w) - left)), zero)
    rb, rh, rw = (te.reduce_axis((0, extent), name=name) for extent, name in ((1, "rb"), (kh, "rh"), (quads, "rw")))
    rq, re = te.reduce_axis((0, 1), name="rq"), te.reduce_axis((0, STEP), name="re")

    def product(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        value = padded[ni, bi + rb, hi * sh + rh, wi * sw + rw * STEP + re, ci]
        return te.sum(value.astype("int32") * weight[bi, rb, rh, rw, rq, ci, re].astype("int32"),
                      axis=[rb, rh, rw, rq, re])

    return te.compute((n, blocks, rows, columns, lanes), product, name="depthwise",
                      attrs={"mlc.op": "depthwise_nchwc_taps"})
