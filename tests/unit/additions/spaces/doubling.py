"""Spaces of one elementwise block: a loop over chunks for the threads of a CPU, and a block of threads of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx

from schedules.space import Decisions, Knob, Pick, Space


class _Doubling(Space):
    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return "doubled" in str(func)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return (Knob("inner", (4, 8, 16)),)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        yield {"inner": 8}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        outer, inner = sch.split(sch.fuse(*sch.get_loops(sch.get_sblock("doubled"))), [None, pick("inner")])
        if self.target_kind == "cuda":
            sch.bind(outer, "blockIdx.x")
            sch.bind(inner, "threadIdx.x")
        else:
            sch.parallel(outer)
            sch.vectorize(inner)


class CpuDoubling(_Doubling):
    name, target_kind = "cpu.doubling", "llvm"


class CudaDoubling(_Doubling):
    name, target_kind = "cuda.doubling", "cuda"
