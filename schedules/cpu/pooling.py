"""Pooling: maximum, average, and normalisation over neighbouring channels."""

from __future__ import annotations

from schedules.analysis import FuncInfo
from schedules.cpu.window import WindowSpace

__all__ = ["POOLING"]


class Pooling(WindowSpace):
    """Plain (``NCHW``) and blocked (``NCHW[c]c``) pooling with the padding and what follows fused."""

    name = "cpu.pooling"

    def takes(self, info: FuncInfo) -> bool:
        anchor = info.reductions[0]
        return anchor.windowed and not anchor.contraction


POOLING = Pooling()
