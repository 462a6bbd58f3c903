"""Tensor expressions of bfloat16 products with float32 sums, for instructions that multiply pairs.

A step of the sum takes two products, which :mod:`schedules.intrin.dot` has instructions for (``bfloats``). Products are
exact in float32; what is rounded is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import tvm
from tvm import te

from mlc.graph.kernels.blocked import PANEL
from mlc.graph.kernels.stepped import conv2d_nchwc_stepped, dense_stepped
from mlc.graph.kernels.windows import in_blocks
from mlc.target import Target
from schedules.intrin import dot, select

__all__ = [
    "STEP", "conv2d_nchwc_bfloat", "conv2d_of_windows", "dense_bfloat", "has_bfloat_dot", "pack_conv", "pack_dense",
]

#: products of one step of a sum
STEP = 2


def has_bfloat_dot(target: Target | tvm.target.Target) -> bool:
    """Whether the target multiplies pairs of bfloat16."""
    on = target.tvm if isinstance(target, Target) else target
    return any(select(dot.dot(dot.BFLOATS, lanes), on) for lanes in (4, 8, 16))


def pack_dense(weight: np.ndarray, step: int = STEP) -> np.ndarray:
    """``[K, N]`` as ``[N/16, K/2, 16, 2]`` bfloat16, or with another ``step`` than 2, both extents padded with zeros to
    whole panels and steps."""
    depth, columns = weight.shape
    weight = np.pad(weight.astype(ml_dtypes.bfloat16), ((0, -depth % step), (0, -columns % PANEL)))
    steps = weight.reshape(-(-depth // step), step, -(-columns // PANEL), PANEL)
    return np.ascontiguousarray(steps.transpose(2, 0, 3, 1))


def pack_conv(weight: np.ndarray) -> np.ndarray:
    """Blocks ``[O/o, I/i, KH, KW, i, o]``, ``i`` even, as ``[O/o, I/i, KH, KW, i/2, o, 2]`` bfloat16."""
    *blocks, inner, lanes = weight.shape
    steps = weight.astype(ml_dtypes.bfloat16).reshape(*blocks, inner // STEP, STEP, lanes)
    return np.ascontiguousarray(steps.swapaxes(-1, -2))


def dense_bfloat(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Product of bfloat16 ``[..., M, K]``, ``K`` whole steps, with a weight of :func:`pack_dense` to float32
    ``[..., M, N]``, ``N`` whole panels."""
    return dense_stepped(data, weight, "float32", "dense_bfloat")


def conv2d_nchwc_bfloat(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], dilation: Sequence[int], groups: int
) -> te.Tensor:
    """2-D convolution: bfloat16 ``[N, IC/i, H, W, i]``, padded already, with a weight of :func:`pack_conv` to float32
    ``[N, OC/o, OH, OW, o]``. With groups, a group's channels fill whole blocks on both sides.

    Nothing is padded here, since TVM makes float32 of what a function keeps in bfloat16 for itself.
    """
    return conv2d_nchwc_stepped(data, weight, strides, dilation, groups, "float32", "conv2d_nchwc_bfloat")


def conv2d_of_windows(rows: te.Tensor, weight: te.Tensor, height: int, width: int, outer: int) -> te.Tensor:
    """2-D convolution of windows that :func:`mlc.graph.kernels.windows.gathered` has put into rows, with its
    ``filters_matrix`` as :func:`pack_dense` packs it, to float32 ``[N, OC/o, height, width, o]``."""
    return in_blocks(dense_bfloat(rows, weight), height, width, outer)
