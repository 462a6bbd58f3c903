from __future__ import annotations

import numpy as np
import tvm
from tvm import s_tir, te, tirx, topi
from tvm.script import tirx as T

from schedules.analysis import analyse, evaluate, nest_of


def _p(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype)


def _only(*tensors: te.Tensor):  # type: ignore[no-untyped-def]
    return analyse(te.create_prim_func(list(tensors)))


def test_the_blocks_of_softmax() -> None:
    a = _p(8, 32)
    info = _only(a, topi.nn.softmax(a))
    assert [b.kind for b in info.blocks] == ["reduction", "injective", "reduction", "injective"]
    assert info.plain and [b.name for b in info.outputs] == ["T_softmax_norm"]
    exp = info["T_softmax_exp"]
    assert exp.expensive == 1 and {b.name for b in info.consumers(exp)} == {"T_softmax_expsum", "T_softmax_norm"}
    assert {b.name for b in info.downstream(info["T_softmax_expsum"])} == {"T_softmax_norm"}


def test_strides_follow_the_index_and_bend_where_it_does() -> None:
    a = _p(1, 32, 5, 7)
    info = _only(a, te.compute((32, 5, 7, 2), lambda c, h, w, i: a[0, (c % 16) * 2 + i, h, w], name="out"))
    (load,) = info["out"].reads
    assert load.strides == (None, 7, 1, 35) and load.periods == (16, 0, 0, 0)


def test_data_dependent_indices_have_no_stride() -> None:
    a, i = _p(50, 8), _p(6, dtype="int64")
    info = _only(a, i, te.compute((6, 8), lambda r, c: a[i[r], c], name="out"))
    load = next(x for x in info["out"].reads if len(x.dims) == 2)
    assert load.strides == (None, 1)


def test_windows_and_contractions_are_told_apart() -> None:
    a, w = _p(1, 4, 9, 9), _p(6, 4, 3, 3)
    conv = _only(a, w, topi.nn.conv2d_nchw(a, w, 1, 0, 1)).reductions[0]
    assert conv.windowed and conv.contraction
    pool = _only(a, topi.nn.pool2d(a, (3, 3), (1, 1), (1, 1), (0, 0, 0, 0), "max")).reductions[0]
    assert pool.windowed and not pool.contraction
    mean = _only(a, topi.sum(a, axis=[2, 3])).reductions[0]
    assert not mean.windowed and not mean.contraction
    x, y = _p(4, 5), _p(5, 6)
    product = _only(x, y, topi.matmul(x, y)).reductions[0]
    assert product.contraction and not product.windowed
    k = te.reduce_axis((0, 5), "k")
    squares = _only(x, te.compute((4,), lambda i: te.sum(x[i, k] * x[i, k], k)))
    assert not squares.reductions[0].contraction


def test_what_is_not_understood_is_not_plain() -> None:
    a = _p(4, 8)
    assert not analyse(te.create_prim_func([a, topi.sort(a)])).plain
    assert not analyse(te.create_prim_func([a, topi.cumsum(a, axis=1)])).plain
    n = tirx.Var("n", "int64")
    b = te.placeholder((n, 4), "float32")
    assert not analyse(te.create_prim_func([b, topi.nn.relu(b)])).plain

    @T.prim_func
    def loop(x: T.Buffer((4,), "float32")) -> None:
        for i in range(4):
            x[i] = T.float32(i)

    assert not analyse(loop).plain


def test_a_condition_that_always_holds_is_none() -> None:
    a = _p(1, 2, 4, 4, 16)
    func = te.create_prim_func([a, topi.layout_transform(a, "NCHW16c", "NCHW")])  # guards an index that cannot leave
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    assert not nest_of(sch, sch.get_child_blocks(sch.get_sblock("root"))[0]).conditions
    b = _p(4, 6)
    func = te.create_prim_func([b, topi.nn.pad(b, [0, 1], [0, 1], name="pad")])
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    assert nest_of(sch, sch.get_sblock("pad")).conditions == {1}


def test_linear_loops() -> None:
    a = _p(3, 4, 5)
    func = te.create_prim_func([a, te.compute(a.shape, lambda i, j, k: a[i, j, k] + a[i, 3 - j, k], name="out")])
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    here = nest_of(sch, sch.get_sblock("out"))
    assert not here.linear(1, 2)  # the reversed axis steps backwards
    assert not here.linear(0, 1)
    func = te.create_prim_func([a, topi.nn.relu(a)])
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    here = nest_of(sch, sch.get_child_blocks(sch.get_sblock("root"))[0])
    assert here.linear(0, 1) and here.linear(1, 2)


def test_evaluate_agrees_with_python() -> None:
    i, j = tirx.Var("i", "int64"), tirx.Var("j", "int64")
    values = np.arange(40)
    expression = tirx.Select(i % 7 < 3, (i * 5 + j) // 4, tirx.Max(i - j, tirx.IntImm("int64", 2)))
    want = [(x * 5 + 3) // 4 if x % 7 < 3 else max(x - 3, 2) for x in range(40)]
    np.testing.assert_array_equal(evaluate(expression, {i: values, j: np.int64(3)}), want)
