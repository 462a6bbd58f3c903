"""Scheduled functions that the cost model's tests share."""

from __future__ import annotations

import tvm
from tvm import s_tir, te, tirx

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2})
AVX2 = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})


def matmul(m: int = 64, n: int = 128, k: int = 96) -> tirx.PrimFunc:
    """``[m, k] x [k, n]`` in float32."""
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    return te.create_prim_func([a, b, c])


def tiled(
    func: tirx.PrimFunc, rows: int = 4, columns: int = 32, vector: int = 16, *, parallel: bool = True
) -> tvm.IRModule:
    """A register tile of ``rows x columns`` accumulated in a local buffer."""
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    block = sch.get_sblock("C")
    out = sch.cache_write(block, 0, "local")
    i, j = sch.get_loops(out)
    i0, i1 = sch.split(i, [None, rows])
    j0, j1, j2 = sch.split(j, [None, columns // vector, vector])
    sch.reorder(i0, j0, i1, j1, j2)
    sch.vectorize(j2)
    sch.compute_at(block, j0, preserve_unit_loops=True)
    ii, jj, kk = sch.get_loops(block)[-3:]
    jv, jl = sch.split(jj, [None, vector])
    sch.reorder(kk, ii, jv, jl)
    sch.vectorize(jl)
    sch.unroll(ii)
    sch.unroll(jv)
    if parallel:
        sch.parallel(i0)
    sch.decompose_reduction(block, kk)
    return sch.mod


def naive(func: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule({"main": func})


def elementwise(n: int = 4096) -> tirx.PrimFunc:
    a = te.placeholder((n, 64), name="A")
    c = te.compute((n, 64), lambda i, j: tirx.exp(a[i, j]) + 1.0, name="C")
    return te.create_prim_func([a, c])
