"""Reductions in steps, for dot-product instructions that add several products to each lane.

Weights end in what a step reads of a panel or block of columns: ``[..., n, s]`` of ``s`` products for each of ``n``
lanes. Operands are cast to the type of the sum before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te

from mlc.graph.kernels.blocked import convolved

__all__ = ["conv2d_nchwc_stepped", "dense_stepped"]


def dense_stepped(data: te.Tensor, weight: te.Tensor, dtype: str, op: str) -> te.Tensor:
    """Product of ``[..., M, K]``, ``K`` whole steps, with a weight ``[N/n, K/s, n, s]``, or one for each of the first
    dimensions of ``data``, to ``[..., M, N]`` of ``dtype``. ``op`` is the block's annotation and name."""
    *batch, panels, steps, width, size = weight.shape
    rk, re = te.reduce_axis((0, steps), name="rk"), te.reduce_axis((0, size), name="re")

    def product(*index):  # type: ignore[no-untyped-def]
        *rows, j = index
        value = data[(*rows, rk * size + re)].astype(dtype)
        factor = weight[(*rows[: len(batch)], j // width, rk, j % width, re)].astype(dtype)
        return te.sum(value * factor, axis=[rk, re])

    return te.compute((*data.shape[:-1], panels * width), product, name=op, attrs={"mlc.op": op})


def conv2d_nchwc_stepped(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], dilation: Sequence[int], groups: int, dtype: str,
    op: str,
) -> te.Tensor:
    """Convolution of padded images ``[N, IC/i, H, W, i]`` with a weight ``[OC/o, IC/groups/i, KH, KW, i/s, o, s]`` to
    ``[N, OC/o, OH, OW, o]`` of ``dtype``. ``op`` is the block's annotation."""
    *_, steps, lanes, size = weight.shape
    rq, re = te.reduce_axis((0, steps), name="rq"), te.reduce_axis((0, size), name="re")

    def product(place, _group, block, lane):  # type: ignore[no-untyped-def]
        return data[(*place, rq * size + re)].astype(dtype) * weight[(*block, rq, lane, re)].astype(dtype)

    return convolved(data, weight, lanes, strides, dilation, groups, [rq, re], product, op,
                     name=op.replace("_nchwc", ""))
