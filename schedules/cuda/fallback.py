"""The space that matches everything: each part of the function gets a kernel of its own."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx

from schedules.cuda.common import bind_leaf, inline_injective, leaves, limits, refresh, uniform
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["Fallback"]


class Fallback(Space):
    """Whatever no other space knows: correct on a GPU, a thread for each result where that is possible."""

    name = "cuda.fallback"
    by_size = False
    target_kind = "cuda"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return True

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return (Knob("threads", tuple(t for t in (64, 128, 256, 512) if t <= limits(target).threads_per_block)),)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        (threads,) = self.knobs(func, target)
        yield from ({"threads": t} for t in sorted(threads.values, key=lambda t: abs(t - 256)))

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        threads = pick("threads")
        found = leaves(sch)
        inlined = inline_injective(sch, found) if uniform(leaf.info for leaf in found) else found
        for leaf in refresh(sch, inlined):
            bind_leaf(sch, leaf, limits(target), threads)
