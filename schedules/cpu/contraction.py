"""Contractions without a packed template: convolutions in plain layouts, of one or three dimensions, grouped or
transposed, and matrix products of unusual shapes and types."""

from __future__ import annotations

from schedules.analysis import FuncInfo
from schedules.cpu.window import WindowSpace

__all__ = ["CONTRACTION"]


class Contraction(WindowSpace):
    """Any single sum of products with an output axis that is contiguous in an operand."""

    name = "cpu.contraction"

    def takes(self, info: FuncInfo) -> bool:
        return info.reductions[0].contraction


CONTRACTION = Contraction()
