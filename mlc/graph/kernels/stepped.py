"""Products whose sums go in steps: a dot-product instruction adds several products of short numbers to each lane.

Weights end in what a step reads of a panel or block of columns: ``[..., n, s]`` of ``s`` products for each of ``n``
lanes, or ``[..., 2, n, 2]`` of int16, the pairs of :mod:`schedules.intrin.dot`, where the first of the twos is the low
bit of the place in the step. Operands are cast to the type of the sum before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from mlc.graph.kernels.blocked import convolved

__all__ = ["conv2d_nchwc_stepped", "dense_stepped"]

#: a weight's element for a step, a lane and the indices before
_Weight = Callable[[Any, Any, Sequence[Any]], tirx.Expr]


class _Step:
    """The sum's ``axes`` within a step, the ``place`` in it that they name, the products that it takes, and how to
    ``read`` the weight."""

    def __init__(self, weight: te.Tensor) -> None:
        self.size = 4 if str(weight.dtype) == "int16" else int(weight.shape[-1])
        self.read: _Weight
        if str(weight.dtype) == "int16":
            rp, re = te.reduce_axis((0, 2), name="rp"), te.reduce_axis((0, 2), name="re")
            self.axes, self.place = [rp, re], rp + re * 2
            self.read = lambda step, lane, block: weight[(*block, step, rp, lane, re)]
        else:
            re = te.reduce_axis((0, self.size), name="re")
            self.axes, self.place = [re], re
            self.read = lambda step, lane, block: weight[(*block, step, lane, re)]


def dense_stepped(data: te.Tensor, weight: te.Tensor, dtype: str, op: str) -> te.Tensor:
    """Product of ``[..., M, K]``, ``K`` whole steps, with a weight ``[N/n, K/s, n, s]``, or one for each of the first
    dimensions of ``data``, to ``[..., M, N]`` of ``dtype``. ``op`` is the block's annotation and name."""
    step = _Step(weight)
    *batch, panels, steps = weight.shape[: -1 - len(step.axes)]
    rk, width = te.reduce_axis((0, steps), name="rk"), int(weight.shape[-2])

    def product(*index):  # type: ignore[no-untyped-def]
        *rows, j = index
        value = data[(*rows, rk * step.size + step.place)].astype(dtype)
        factor = step.read(rk, j % width, (*rows[: len(batch)], j // width)).astype(dtype)
        return te.sum(value * factor, axis=[rk, *step.axes])

    return te.compute((*data.shape[:-1], panels * width), product, name=op, attrs={"mlc.op": op})


def conv2d_nchwc_stepped(
    data: te.Tensor, weight: te.Tensor, strides: Sequence[int], dilation: Sequence[int], groups: int, dtype: str,
    op: str,
) -> te.Tensor:
    """Convolution of padded images ``[N, IC/i, H, W, i]`` with a weight ``[OC/o, IC/groups/i, KH, KW, i/s, o, s]`` to
    ``[N, OC/o, OH, OW, o]`` of ``dtype``. ``op`` is the block's annotation."""
    step = _Step(weight)
    rq = te.reduce_axis((0, weight.shape[4]), name="rq")

    def product(place, _group, block, lane):  # type: ignore[no-untyped-def]
        value = data[(*place, rq * step.size + step.place)].astype(dtype)
        return value * step.read(rq, lane, block).astype(dtype)

    return convolved(data, weight, weight.shape[-2], strides, dilation, groups, [rq, *step.axes], product, op,
                     name=op.replace("_nchwc", ""))
