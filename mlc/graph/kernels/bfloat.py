"""Tensor expressions of products of bfloat16 with float32 sums, on instructions that multiply pairs.

A step of the sum takes two products, which :mod:`schedules.intrin.dot` has instructions for (``bfloats``). Products are
exact in float32; what is rounded is the sum.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import tvm
from tvm import te

from mlc.graph.kernels.integer import PANEL
from mlc.target import Target
from schedules.intrin import dot, select

__all__ = ["STEP", "dense_bfloat", "has_bfloat_dot", "pack_dense"]

#: products of one step of a sum
STEP = 2


def has_bfloat_dot(target: Target | tvm.target.Target) -> bool:
    """Whether the target multiplies pairs of bfloat16."""
    on = target.tvm if isinstance(target, Target) else target
    return any(select(dot.dot(dot.BFLOATS, lanes), on) for lanes in (4, 8, 16))


def pack_dense(weight: np.ndarray) -> np.ndarray:
    """``[K, N]`` as ``[N/16, K/2, 16, 2]`` bfloat16, both extents padded with zeros to whole panels and steps."""
    depth, columns = weight.shape
    weight = np.pad(weight.astype(ml_dtypes.bfloat16), ((0, -depth % STEP), (0, -columns % PANEL)))
    steps = weight.reshape(-(-depth // STEP), STEP, -(-columns // PANEL), PANEL)
    return np.ascontiguousarray(steps.transpose(2, 0, 3, 1))


def dense_bfloat(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Product of bfloat16 ``[..., M, K]``, ``K`` even, with a weight of :func:`pack_dense` to float32 ``[..., M, N]``,
    ``N`` whole panels."""
    panels, steps = weight.shape[:2]
    rk, re = te.reduce_axis((0, steps), name="rk"), te.reduce_axis((0, STEP), name="re")

    def product(*index):  # type: ignore[no-untyped-def]
        *rows, j = index
        value = data[(*rows, rk * STEP + re)].astype("float32")
        return te.sum(value * weight[j // PANEL, rk, j % PANEL, re].astype("float32"), axis=[rk, re])

    shape = (*data.shape[:-1], panels * PANEL)
    return te.compute(shape, product, name="dense_bfloat", attrs={"mlc.op": "dense_bfloat"})
