"""Machine code is made by several threads, and it is that of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tvm import tirx
from tvm.script import tirx as T

import mlc
from mlc.artifact import machine_code
from mlc.errors import CodeGenerationError
from mlc.target import Target, resolve

RNG = np.random.default_rng(5)
SIZES = (24, 40, 16, 56, 32, 8)


def _model() -> ModelProto:
    """Products of six sizes, each with its softmax between."""
    nodes, weights, last = [], [], "x"
    for place, (rows, columns) in enumerate(zip(SIZES, SIZES[1:] + SIZES[:1], strict=True)):
        weights.append(numpy_helper.from_array(RNG.standard_normal((rows, columns), dtype=np.float32), f"w{place}"))
        nodes += [helper.make_node("MatMul", [last, f"w{place}"], [f"p{place}"]),
                  helper.make_node("Softmax", [f"p{place}"], [f"s{place}"])]
        last = f"s{place}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [7, 24]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("cores", [1, 4])
def test_a_model_of_several_functions_is_right(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "physical_cores", lambda: cores)
    modules = []
    build = machine_code._library
    monkeypatch.setattr(machine_code, "_library", lambda part, target: modules.append(part) or build(part, target))
    model, x = _model(), RNG.standard_normal((7, 24), dtype=np.float32)
    (found,) = mlc.compile(model, log=False)(x)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(found, session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-6)
    assert len(modules) == 1 if cores == 1 else len(modules) > cores


def _functions(count: int) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    return {tvm.ir.GlobalVar(f"f{place}"): _copy for place in range(count)}


@T.prim_func(private=True, s_tir=True)
def _copy(a: T.Buffer((5,), "float32"), b: T.Buffer((5,), "float32")) -> None:
    T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
    for i in T.serial(5):
        b[i] = a[i]


@pytest.fixture(params=[1, 2, 96])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(machine_code, "physical_cores", lambda: request.param)
    yield request.param


@pytest.mark.parametrize("count", [0, 1, 3, 4, 75, 300])
def test_every_function_is_in_one_module(count: int, cores: int) -> None:
    parts = machine_code._dealt(_functions(count), resolve("x86-64-v3"))
    names = [var.name_hint for part in parts for var in part]
    assert sorted(names) == sorted(f"f{place}" for place in range(count))
    assert all(parts) and len(parts) <= len(machine_code.object_names()) + 1
    assert len(parts) == (count > 0) if cores == 1 or count < 4 else len(parts) == 1 + min(3 * cores, count - 1, 63)


def test_a_gpus_functions_stay_together(cores: int) -> None:
    assert len(machine_code._dealt(_functions(9), resolve("cuda:sm_80"))) == 1


def test_what_fails_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    build = machine_code._library

    def library(part: tvm.IRModule, target: Target) -> tvm.runtime.Module:
        if threading.current_thread() is threading.main_thread():
            return build(part, target)
        raise CodeGenerationError("no such instruction")

    monkeypatch.setattr(machine_code, "physical_cores", lambda: 2)
    monkeypatch.setattr(machine_code, "_library", library)
    with pytest.raises(CodeGenerationError, match="no such instruction"):
        mlc.compile(_model(), log=False)
