"""The registry of tensor intrinsics, with one that adds four numbers at once on any CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from mlc.target import resolve
from schedules import intrin
from schedules.intrin.transpose import transpose
from schedules.trace import trace_json

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
    monkeypatch.setattr(intrin, "_FAMILIES", ())
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


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("target", ["native", "x86-64-v2"])
def test_transposition_in_registers(lanes: int, target: str) -> None:
    """A matrix of 2 x 3 tiles, whose rows are longer than what is transposed, by whole tiles."""
    rows, columns = 2 * lanes, 3 * lanes
    x = te.placeholder((rows, columns + 5), name="x")
    func = te.create_prim_func([x, te.compute((columns, rows), lambda j, i: x[i, j + 3], name="turned")])
    sch = s_tir.Schedule(func)
    j, i = sch.get_loops("turned")
    (jo, ji), (io, ii) = sch.split(j, [None, lanes]), sch.split(i, [None, lanes])
    sch.reorder(jo, io, ji, ii)
    sch.tensorize(ji, intrin.use(transpose(lanes)))
    values = np.random.default_rng(lanes).standard_normal((rows, columns + 5)).astype("float32")
    out = tvm.runtime.tensor(np.zeros((columns, rows), "float32"))
    tvm.compile(sch.mod["main"], target=resolve(target).tvm)(tvm.runtime.tensor(values), out)
    np.testing.assert_array_equal(out.numpy(), values[:, 3 : columns + 3].T)


def test_a_trace_brings_its_intrinsics_along() -> None:
    """Replayed where nothing has registered them, as in a worker that measures."""
    program = """
from tvm import te, s_tir
from schedules.trace import replay
import sys
x = te.placeholder((32, 16), name="x")
func = te.create_prim_func([x, te.compute((16, 32), lambda j, i: x[i, j], name="turned")])
print("Shuffle" in replay(func, sys.stdin.read()).mod.script())
"""
    x = te.placeholder((32, 16), name="x")
    func = te.create_prim_func([x, te.compute((16, 32), lambda j, i: x[i, j], name="turned")])
    sch = s_tir.Schedule(func)
    j, i = sch.get_loops("turned")
    (jo, ji), (io, ii) = sch.split(j, [None, 8]), sch.split(i, [None, 8])
    sch.reorder(jo, io, ji, ii)
    sch.tensorize(ji, intrin.use(transpose(8)))
    done = subprocess.run([sys.executable, "-c", program], input=trace_json(sch), text=True, capture_output=True)
    assert done.stdout == "True\n", done.stderr
