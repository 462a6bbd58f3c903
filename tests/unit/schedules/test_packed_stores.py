"""Clipped bytes that are stored several vectors at a time: the same bytes, fewer stores, and nothing else joined."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from harness import TARGET
from tvm import te, tirx
from tvm.script import tirx as T

from mlc.target import resolve
from schedules.lowering import PIPELINE
from schedules.packed_stores import with_packed_stores

#: by lanes: a target whose vectors have so many, and what running its code needs
TARGETS = {4: ("x86-64-v2", "sse4.2"), 8: ("x86-64-v3", "avx2"), 16: ("x86-64-v4", "avx512bw")}
X86 = "x86" in str(tvm.target.codegen.llvm_get_system_triple())
pytestmark = pytest.mark.skipif(not X86, reason="the instructions are x86's")
#: of 32 bits: the ends of every type that the sums pass through, and their neighbours
ENDS = [-(2**31), -(2**31) + 1, -32769, -32768, -129, -128, -1, 0, 1, 127, 128, 255, 256, 32767, 32768, 65536,
        2**31 - 1]


def _function(vectors: int, lanes: int, dtype: str, low: int, high: int) -> tirx.PrimFunc:
    """``y = clip(x ^ 1)`` of ``vectors`` in a row, each stored by itself."""
    size = vectors * lanes
    x = te.placeholder((size,), "int32", "x")
    y = te.compute((size,), lambda i: tirx.max(tirx.min(x[i] ^ 1, high), low).astype(dtype), name="y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    outer, inner = sch.split(loop, [vectors, lanes])
    sch.unroll(outer)
    sch.vectorize(inner)
    return sch.mod["main"].with_attr("global_symbol", "main")


def _compiled(func: tirx.PrimFunc, target: tvm.target.Target) -> tvm.runtime.Module:
    with target:
        return tvm.compile(tvm.IRModule({"main": func}), target, tir_pipeline=PIPELINE)


def _assembly(module: tvm.runtime.Module) -> str:
    return str((module.mod.imports or [module.mod])[0].inspect_source("s"))


def _runs(feature: str) -> bool:
    with TARGET:
        return bool(tvm.target.codegen.llvm_cpu_has_features(feature, TARGET))


@pytest.mark.parametrize(("dtype", "low", "high"), [("uint8", 0, 255), ("int8", -128, 127), ("uint8", 3, 200),
                                                    ("uint8", 0, 254), ("int8", 0, 127), ("int8", -127, 126)])
@pytest.mark.parametrize("lanes", TARGETS)
def test_bytes_are_what_they_were(lanes: int, dtype: str, low: int, high: int) -> None:
    name, feature = TARGETS[lanes]
    vectors = 11  # two fours, a pair and one
    module = _compiled(_function(vectors, lanes, dtype, low, high), resolve(name, threads=1).tvm)
    narrowings = re.findall(r"packuswb" if dtype == "uint8" else r"packsswb", _assembly(module))
    assert len(narrowings) >= 3
    if not _runs(feature):
        pytest.skip(f"this machine lacks {feature}")
    rng = np.random.default_rng(0)
    size = vectors * lanes
    values = np.where(rng.random(size) < 0.5, rng.choice(ENDS, size), rng.integers(-300, 300, size)).astype("int32")
    given, found = tvm.runtime.tensor(values), tvm.runtime.tensor(np.full(size, 77, dtype))
    module.jit()["main"](given, found)
    np.testing.assert_array_equal(found.numpy(), np.clip(values ^ 1, low, high).astype(dtype))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_stores_are_joined_by_fours_and_pairs(count: int) -> None:
    func = _lowered(_function(count, 16, "uint8", 0, 255))
    expected = {1: [16], 2: [32], 3: [32, 16], 4: [64], 5: [64, 16], 7: [64, 32, 16], 8: [64, 64]}[count]
    assert _widths(with_packed_stores(func)) == expected
    assert _widths(func) == [16] * count


def test_what_may_leave_the_range_is_not_joined() -> None:
    for low, high in ((-1, 255), (0, 256), (-5, 400)):
        func = _lowered(_function(4, 16, "uint8", low, high))
        assert with_packed_stores(func).same_as(func)


def test_other_places_are_not_joined() -> None:
    @T.prim_func(s_tir=True)
    def apart(x: T.Buffer((64,), "int32"), y: T.Buffer((128,), "uint8")) -> None:
        for i in T.unroll(4):
            for j in T.vectorized(16):
                with T.sblock("y"):
                    k, m = T.axis.remap("SS", [i, j])
                    y[k * 32 + m] = T.Cast("uint8", T.max(T.min(x[k * 16 + m], 255), 0))

    func = _lowered(apart.with_attr("global_symbol", "main"))
    assert with_packed_stores(func).same_as(func)


def test_what_reads_its_own_result_is_not_joined() -> None:
    @T.prim_func(s_tir=True)
    def shifting(y: T.Buffer((96,), "uint8")) -> None:
        for i in T.unroll(4):
            for j in T.vectorized(16):
                with T.sblock("y"):
                    k, m = T.axis.remap("SS", [i, j])
                    y[k * 16 + 16 + m] = T.Cast(
                        "uint8", T.max(T.min(T.Cast("int32", y[k * 16 + m]) * 2, 255), 0))

    func = _lowered(shifting.with_attr("global_symbol", "main"))
    assert with_packed_stores(func).same_as(func)


def test_a_machine_without_such_vectors_keeps_its_stores() -> None:
    for name in ("x86-64-v3", "llvm -mtriple=aarch64-linux-gnu"):
        func = _lowered(_function(4, 16, "uint8", 0, 255), resolve(name, threads=1).tvm)
        assert with_packed_stores(func).same_as(func)


def _lowered(func: tirx.PrimFunc, target: tvm.target.Target | None = None) -> tirx.PrimFunc:
    """As the pass sees it: loops unrolled, vectors made, buffers of one dimension."""
    target = target or resolve("x86-64-v4", threads=1).tvm
    mod = tvm.IRModule({"main": func.with_attr("target", target)})
    steps = [tvm.s_tir.transform.ConvertBlocksToOpaque(), tvm.s_tir.transform.LowerOpaqueBlock(),
             tvm.tirx.transform.FlattenBuffer(), tvm.tirx.transform.VectorizeLoop(), tvm.tirx.transform.UnrollLoop(),
             tvm.tirx.transform.StmtSimplify()]
    with target:
        return tvm.transform.Sequential(steps)(mod)["main"]


def _widths(func: tirx.PrimFunc) -> list[int]:
    """The bytes of each store, in the order of the statements."""
    body = func.body
    while not isinstance(body, (tirx.SeqStmt, tirx.BufferStore)):
        body = body.body
    statements = body.seq if isinstance(body, tirx.SeqStmt) else [body]
    return [int(s.indices[0].lanes) for s in statements if isinstance(s, tirx.BufferStore)]
