"""Kernels that are written out as a whole where a schedule has marked what they compute."""

from __future__ import annotations

from tvm import tirx

from schedules.cuda import attention, few_bits, few_bits_weights, wgmma

__all__ = ["written"]


def written(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with the kernel of its marked block in the place of the schedule; itself where none is marked."""
    for each in (attention, wgmma, few_bits, few_bits_weights):
        func = each.expanded(func)
    return func
