"""The registry of tensor intrinsics, with one that adds four numbers at once on any CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from mlc.target import resolve
from schedules import intrin

NAME = "mlc.test_add4"


def build() -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        x = T.match_buffer(a, (4,), "float32", offset_factor=1)
        y = T.match_buffer(b, (4,), "float32", offset_factor=1)
        z = T.match_buffer(c, (4,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(x[0:4], y[0:4])
            T.writes(z[0:4])
            for i in range(4):
                with T.sblock("add"):
                    v = T.axis.remap("S", [i])
                    z[v] = x[v] + y[v]

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        x = T.match_buffer(a, (4,), "float32", offset_factor=1)
        y = T.match_buffer(b, (4,), "float32", offset_factor=1)
        z = T.match_buffer(c, (4,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(x[0:4], y[0:4])
            T.writes(z[0:4])
            z[T.ramp(0, 1, 4)] = x[T.ramp(0, 1, 4)] + y[T.ramp(0, 1, 4)]

    return description, implementation


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    built: list[str] = []

    def counted() -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
        built.append(NAME)
        return build()

    monkeypatch.setattr(intrin, "_DECLARED", {})
    intrin.declare(intrin.Intrinsic(NAME, lambda target: target.kind.name == "llvm", counted))
    yield built


def test_nothing_is_built_before_it_is_used_and_once_then(declared: list[str]) -> None:
    assert intrin.available(resolve("llvm").tvm) == (NAME,)
    assert intrin.available(resolve("cuda:sm_90").tvm) == ()
    before = list(declared)
    x, y = te.placeholder((8,), name="x"), te.placeholder((8,), name="y")
    func = te.create_prim_func([x, y, te.compute((8,), lambda i: x[i] + y[i], name="sum")])
    sch = s_tir.Schedule(func)
    _, inner = sch.split(sch.get_loops("sum")[0], [None, 4])
    sch.tensorize(inner, intrin.use(NAME))
    assert intrin.use(NAME) == NAME
    assert before == []
    assert len(declared) <= 1, "TVM keeps what an earlier test registered"
    values = [np.random.default_rng(i).standard_normal(8).astype("float32") for i in range(2)]
    out = tvm.runtime.tensor(np.zeros(8, "float32"))
    tvm.compile(sch.mod["main"], target="llvm")(*map(tvm.runtime.tensor, values), out)
    np.testing.assert_array_equal(out.numpy(), values[0] + values[1])


def test_names(declared: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must begin with 'mlc\.'"):
        intrin.Intrinsic("dot_16x4_vnni", lambda _: True, build)
    with pytest.raises(ValueError, match="twice"):
        intrin.declare(intrin.Intrinsic(NAME, lambda _: True, build))
    with pytest.raises(KeyError):
        intrin.use("mlc.unheard_of")
