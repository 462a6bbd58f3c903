"""The families of tensor intrinsics: each keeps what its entry says, on this machine or emulated."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from mlc.graph.kernels.integer import dense_integer
from mlc.target import resolve
from mlc.testing import aarch64, amx, cuda_emulator
from mlc.testing.intrinsics import in_tiles, is_for_warps, kernel_of, largest_errors, on_cpu
from schedules import intrin
from schedules.intrin.dot import QUADS, dot
from schedules.intrin.transpose import transpose
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import InvalidDecision, best_seed
from schedules.trace import replay, trace_json

NAME = "mlc.test_add4"


def description() -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def added(a: T.handle, b: T.handle, c: T.handle) -> None:
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

    return added


def implementation(_description: tirx.PrimFunc) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def vector(a: T.handle, b: T.handle, c: T.handle) -> None:
        x = T.match_buffer(a, (4,), "float32", offset_factor=1)
        y = T.match_buffer(b, (4,), "float32", offset_factor=1)
        z = T.match_buffer(c, (4,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(x[0:4], y[0:4])
            T.writes(z[0:4])
            z[T.ramp(0, 1, 4)] = x[T.ramp(0, 1, 4)] + y[T.ramp(0, 1, 4)]

    return vector


def entry(name: str = NAME, describe: Callable[[], tirx.PrimFunc] = description) -> intrin.Intrinsic:
    types = ("float32", "float32", "float32")
    return intrin.Intrinsic(name, types, ((),), describe, implementation, lambda a, b, _: a + b, "addps")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of the only intrinsic there is has been built."""
    described: list[str] = []

    def counted() -> tirx.PrimFunc:
        described.append(NAME)
        return description()

    monkeypatch.setattr(intrin, "_DECLARED", {})
    monkeypatch.setattr(intrin, "_FAMILIES", ())
    intrin.declare(entry(describe=counted))
    return described


def test_nothing_is_built_before_it_is_used_and_once_then(built: list[str]) -> None:
    assert intrin.available(resolve("llvm").tvm) == (NAME,)
    assert intrin.available(resolve("cuda:sm_90").tvm) == ()
    before = list(built)
    x, y = te.placeholder((8,), name="x"), te.placeholder((8,), name="y")
    func = te.create_prim_func([x, y, te.compute((8,), lambda i: x[i] + y[i], name="sum")])
    sch = s_tir.Schedule(func)
    _, inner = sch.split(sch.get_loops("sum")[0], [None, 4])
    sch.tensorize(inner, intrin.use(NAME))
    assert intrin.use(NAME) == NAME
    assert before == []
    assert len(built) <= 1, "TVM keeps what an earlier test registered"
    values = [np.random.default_rng(i).standard_normal(8).astype("float32") for i in range(2)]
    out = tvm.runtime.tensor(np.zeros(8, "float32"))
    tvm.compile(sch.mod["main"], target="llvm")(*map(tvm.runtime.tensor, values), out)
    np.testing.assert_array_equal(out.numpy(), values[0] + values[1])


def test_names(built: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must begin with 'mlc\.'"):
        entry("dot_16x4_vnni")
    with pytest.raises(ValueError, match="twice"):
        intrin.declare(entry())
    with pytest.raises(KeyError, match="must be one of a family"):
        intrin.use("mlc.unheard_of")


NATIVE = resolve("native", threads=1).tvm
GPU = resolve("cuda:sm_80").tvm
AARCH64 = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n2", threads=1).tvm
#: between them, they have every instruction
ELSEWHERE = ("llvm -mcpu=znver4", "llvm -mcpu=alderlake", "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n2",
             "llvm -mcpu=sapphirerapids")
#: those of tiles that are tested each time
SAMPLED = ("quads2x2x16", "quads1x3x12", "bfloats2x2x16", "bfloats3x1x4", "zero_int32_2x2", "store_float32_2x2_global")
ENTRIES = [
    pytest.param(i, id=i.name, marks=[pytest.mark.slow] if i.computes.startswith("tiles_")
                 and not i.computes.endswith(SAMPLED) else [])
    for i in intrin.declared()
]


def call(
    module: tvm.IRModule, arrays: list[np.ndarray], target: tvm.target.Target = NATIVE
) -> list[np.ndarray]:
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    tvm.compile(module, target, tir_pipeline=PIPELINE)["main"](*tensors)
    return [t.numpy() for t in tensors]


def call_in_tiles(module: tvm.IRModule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """On this CPU with the instructions of tiles emulated."""
    amx.install()
    return call(module, arrays, amx.target().tvm)


def emulate(module: tvm.IRModule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """A warp's function in the emulator, plain loops on this CPU."""
    func = module["main"]
    if not is_for_warps(func):
        return call(tvm.IRModule({"main": on_cpu(func)}), arrays)
    cuda_emulator.run(kernel_of(func), GPU, arrays[:-1], arrays[-1:])
    return arrays


@pytest.mark.sampled(2)
@pytest.mark.parametrize("intrinsic", ENTRIES)
def test_every_intrinsic_computes_its_specification(intrinsic: intrin.Intrinsic) -> None:
    if intrinsic.supported(GPU):
        errors = largest_errors(intrinsic, emulate)
    elif intrinsic.supported(NATIVE):
        errors = largest_errors(intrinsic, call)
    elif intrinsic.computes.startswith("tiles_"):
        if amx.missing():
            pytest.skip(f"to emulate {intrinsic.needs}, {amx.missing()} must be there")
        errors = largest_errors(intrinsic, call_in_tiles)
    elif not intrinsic.supported(AARCH64):
        pytest.skip(f"this machine does not have {intrinsic.needs}")
    elif aarch64.missing():
        pytest.skip(f"to emulate {intrinsic.needs}, {aarch64.missing()} must be installed")
    else:
        errors = largest_errors(intrinsic, lambda module, arrays: aarch64.run(module, AARCH64, arrays))
    assert max(errors) <= intrinsic.tolerance


@pytest.mark.sampled(2)
@pytest.mark.parametrize("intrinsic", ENTRIES)
def test_every_intrinsic_becomes_its_instruction(intrinsic: intrin.Intrinsic) -> None:
    """In the assembly of a target that has it, whichever machine this is."""
    if intrinsic.supported(GPU):
        kernel = kernel_of(intrinsic.implementation(intrinsic.description()))
        assert re.search(intrinsic.instruction, cuda_emulator.cuda_source(kernel, GPU))
        return
    target = next(t for t in (resolve(name).tvm for name in ELSEWHERE) if intrinsic.supported(t))
    module = tvm.IRModule({"main": in_tiles(intrinsic, intrinsic.implementation(intrinsic.description()))})
    assembly = tvm.compile(module, target, tir_pipeline=PIPELINE).mod.inspect_source("s")
    assert re.search(rf"\t\w*({intrinsic.instruction})\w*\s", assembly)


def test_a_wrong_implementation_shows() -> None:
    """The self-test compares both functions, and with the specification."""
    right = entry()
    wrong = replace(right, implementation=lambda described: tvm_ffi.structural_map(
        implementation(described), (tirx.Add, lambda add: tirx.Sub(add.a, add.b))))
    assert max(largest_errors(right, call)) < 1e-6
    assert largest_errors(wrong, call)[1] > 0.1
    assert min(largest_errors(replace(right, specification=lambda a, b, _: a - b), call)) > 0.1
    with pytest.raises(ValueError, match="must describe a function of its types"):
        largest_errors(replace(right, types=("int8", "int8", "int32")), call)


def test_whoever_has_it_computes_it() -> None:
    """One description, several machines; the plainer instruction where the better one is missing."""
    names = {name: intrin.select(dot(QUADS, 4), resolve(name).tvm) for name in (
        "llvm -mcpu=alderlake", "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1", ELSEWHERE[2], "x86-64-v3",
        "cuda:sm_90",
    )}
    assert list(names.values()) == [
        "mlc.dot_quads4", "mlc.dot_quads4.sdot", "mlc.dot_quads4.usdot", None, None,
    ]


def test_an_architecture_of_a_gpu_has_those_before_it() -> None:
    mma = replace(entry("mlc.test_mma"), kind="cuda", features=(("sm_80",),))
    assert [mma.supported(resolve(name).tvm) for name in ("cuda:sm_75", "cuda:sm_80", "cuda:sm_90", "llvm")] == [
        False, True, True, False,
    ]
    of_hopper = replace(mma, features=(("sm_90a",),))
    ninety = resolve("cuda:sm_90").tvm
    alone = tvm.target.Target({**ninety.export(), "arch": "sm_90a"})
    assert [of_hopper.supported(target) for target in (ninety, alone)] == [False, True]


def test_a_trace_for_another_machine_is_refused_in_one_line() -> None:
    x, w = te.placeholder((8, 16), "uint8"), te.placeholder((1, 4, 16, 4), "int8")
    func = te.create_prim_func([x, w, dense_integer(x, w)])
    with_dots, without = resolve("llvm -mcpu=alderlake").tvm, resolve("x86-64-v3").tvm
    trace = trace_json(best_seed(find(func, with_dots), func, with_dots))
    assert "mlc.dot_quads8" in trace
    assert replay(func, trace, with_dots).mod is not None
    with pytest.raises(InvalidDecision, match=r"dot_quads8 needs avx512vnni and avx512vl, or avxvnni, which \S+ does"):
        replay(func, trace, without)


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
