from __future__ import annotations

import numpy as np
import tvm
from tvm import s_tir, te, tirx

from mlc.graph.ir.int32_indices import narrowed
from mlc.graph.task import normalise
from schedules.analysis import walk


def _wide(*shape: int) -> list[tirx.IntImm]:
    return [tirx.IntImm("int64", size) for size in shape]


def _scale(dtype: str, *shape: int) -> tirx.PrimFunc:
    x = te.placeholder(_wide(*shape), dtype, name="x")
    return te.create_prim_func([x, te.compute(x.shape, lambda *i: x(*i) * tirx.const(2, dtype), name="y")])


def _loop_types(func: tirx.PrimFunc) -> set[str]:
    found: set[str] = set()
    walk(func.body, (tirx.For, lambda loop: found.add(str(loop.loop_var.ty))))
    return found


def test_indices_become_narrow_and_the_function_keeps_its_meaning() -> None:
    func = _scale("float32", 5, 7)
    narrow = narrowed(func)
    assert _loop_types(func) == {"int64"}
    assert _loop_types(narrow) == {"int32"}
    assert narrowed(narrow).same_as(narrow)
    data = np.random.default_rng(0).standard_normal((5, 7), dtype="float32")
    x, y = tvm.runtime.tensor(data), tvm.runtime.tensor(np.zeros_like(data))
    tvm.compile(tvm.IRModule({"main": narrow}), target="llvm")["main"](x, y)
    np.testing.assert_array_equal(y.numpy(), data * 2)


def test_what_needs_64_bits_keeps_them() -> None:
    integers = _scale("int64", 5, 7)
    assert narrowed(integers).same_as(integers)
    huge = _scale("float32", 2**16, 2**16)
    assert narrowed(huge).same_as(huge)
    x = te.placeholder(_wide(4), "float32", name="x")
    cast = te.create_prim_func([x, te.compute(x.shape, lambda i: x[i].astype("int64").astype("float32"), name="y")])
    assert narrowed(cast).same_as(cast)


def test_lowering_peels_the_ragged_tile_of_a_task() -> None:
    """The four full tiles get a loop of their own without a condition, which is what 32-bit indices are for."""
    sch = s_tir.Schedule(tvm.IRModule({"main": normalise(_scale("float32", 6, 73))}))
    _, columns = sch.get_loops(sch.get_sblock("y"))
    outer, inner = sch.split(columns, [None, 16])
    sch.vectorize(inner)
    sch.annotate(outer, "pragma_loop_partition_hint", True)
    transform = s_tir.transform
    lowered = tvm.ir.transform.Sequential([
        transform.LowerInitBlock(), transform.ConvertBlocksToOpaque(), transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(), tirx.transform.NarrowDataType(32), transform.LoopPartition(),
        tirx.transform.StmtSimplify(),
    ])(sch.mod)
    loops: list[tirx.For] = []
    walk(lowered["main"].body, (tirx.For, loops.append))
    (full,) = [loop for loop in loops if int(loop.extent) == 4]
    conditions: list[tirx.IfThenElse] = []
    walk(full, (tirx.IfThenElse, conditions.append))
    assert not conditions
