"""Small tasks and a small space that the tests of the tuner share."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, te, tirx

from mlc.graph.task import Task, normalise
from mlc.target import resolve
from schedules.space import Decisions, InvalidDecision, Knob, Pick, Space

TARGET = resolve("x86-64-v4", threads=2)


def matmul(m: int, n: int, k: int, *, weight: int = 1) -> Task:
    """``[m, k] x [k, n]`` in float32."""
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    return Task(f"matmul_{m}x{n}x{k}", normalise(te.create_prim_func([a, b, c])), TARGET, weight)


class TiledMatmul(Space):
    """Three knobs: rows and columns of a tile, and the unrolling of the sum; tiles must divide the matrix."""

    name = "test.tiled_matmul"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return True

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return Knob("rows", (1, 2, 3, 4, 8, 16)), Knob("columns", (4, 8, 16, 32, 64)), Knob("unroll", (1, 2, 4, 8))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        yield {"rows": 3, "columns": 16, "unroll": 1}  # 3 divides no test matrix: not the default
        yield {"rows": 1, "columns": 16, "unroll": 1}
        yield {"rows": 2, "columns": 16, "unroll": 1}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        block = sch.get_sblock("C")
        i, j, k = sch.get_loops(block)
        rows, columns, unroll = pick("rows"), pick("columns"), pick("unroll")
        if int(sch.get(i).extent) % rows or int(sch.get(j).extent) % columns:
            raise InvalidDecision("a tile must divide the matrix")
        i0, i1 = sch.split(i, [None, rows])
        j0, j1 = sch.split(j, [None, columns])
        k0, k1 = sch.split(k, [None, unroll])
        sch.reorder(i0, j0, k0, k1, i1, j1)
        sch.vectorize(j1)
        sch.parallel(i0)
        sch.unroll(i1)
        sch.unroll(k1)
        sch.decompose_reduction(block, k0)
