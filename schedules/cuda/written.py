"""Kernels that are written out as a whole where a schedule has marked what they compute."""

from __future__ import annotations

from tvm import tirx

from schedules.cuda import attention, few_bits, wgmma

__all__ = ["written"]


def written(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with the kernel of its marked block in the place of the schedule; itself where none is marked."""
    return few_bits.expanded(wgmma.expanded(attention.expanded(func)))
