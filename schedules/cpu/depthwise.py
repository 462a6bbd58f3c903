"""Depthwise convolution, in plain or blocked layout."""

from __future__ import annotations

from schedules.analysis import FuncInfo
from schedules.cpu.window import WindowSpace

__all__ = ["DEPTHWISE"]


class Depthwise(WindowSpace):
    """Blocks annotated ``mlc.op = "depthwise_nchwc"`` or ``"depthwise_nchwc_integer"``, and every other windowed
    product in which one operand moves with all output axes, so that no input element is shared between channels."""

    name = "cpu.depthwise"

    def takes(self, info: FuncInfo) -> bool:
        anchor = info.reductions[0]
        if anchor.annotation in ("depthwise_nchwc", "depthwise_nchwc_integer"):
            return True
        axes = [s for s in anchor.spatial if anchor.extents[s] > 1]
        moves = [[a.strides[s] for s in axes] for a in anchor.reads]
        return anchor.windowed and anchor.contraction and any(all(m) for m in moves if None not in m)


DEPTHWISE = Depthwise()
