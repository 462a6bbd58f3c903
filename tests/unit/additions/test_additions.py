"""What it takes to add something: how many files are touched, the new one counted.

| what | files | test |
|---|---|---|
| an ONNX operator | 1 | here |
| an operator of the language of rules | 1 | ``tests/unit/operators/test_added_operator.py`` |
| an algorithm | 1 | ``tests/unit/graph/test_added_algorithm.py`` |
| a strategy | 1 | here |
| a friendly target | 1 | here |
| a CPU or CUDA space | 2 | here |

Each adds one by what is touched alone, and sees it at work.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from tvm import relax, te

import mlc
from mlc import target as targets
from mlc.cli.main import main
from mlc.errors import ModelError
from mlc.frontend.onnx_converters import CONVERTERS
from mlc.graph.task import Task, normalise
from mlc.measure.measurer import MeasureResult
from mlc.target import Friendly, resolve
from mlc.testing import cuda_emulator
from mlc.tuning import TuneOptions, strategy
from mlc.tuning.candidate import TaskSpace
from schedules import cpu, cuda, registry
from schedules.lowering import PIPELINE
from schedules.space import best_seed

HERE = Path(__file__).parent
CPU = resolve("x86-64-v3", threads=2)
RNG = np.random.default_rng(3)


def doubled() -> Task:
    x = te.placeholder((16, 40), name="x")
    y = te.compute(x.shape, lambda i, j: x[i, j] * 2 + 1, name="doubled")
    return Task("doubled", normalise(te.create_prim_func([x, y])), CPU)


def test_an_onnx_operator_is_a_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM's importer does not have this one: without the entry it is refused."""
    def determinant(_builder: relax.BlockBuilder, inputs: list[relax.Expr], _attrs: dict[str, int]) -> relax.Expr:
        """Of matrices of 2 x 2."""
        (x,) = inputs
        a, b, c, d = (relax.op.take(relax.op.reshape(x, (8, 4)), relax.const(place, "int64"), 1) for place in range(4))
        return relax.op.subtract(relax.op.multiply(a, d), relax.op.multiply(b, c))

    border = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in (("x", [8, 2, 2]), ("y", [8]))]
    node = helper.make_node("Det", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "unit", border[:1], border[1:]),
                              opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    with pytest.raises(ModelError, match="Det"):
        mlc.compile(model, log=False)
    monkeypatch.setitem(CONVERTERS, "Det", determinant)
    matrices = RNG.standard_normal((8, 2, 2)).astype("float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": matrices})
    np.testing.assert_allclose(mlc.compile(model, log=False)(matrices)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of ``strategies`` as if it lay in the package."""
    monkeypatch.setattr(strategy, "__path__", [*strategy.__path__, str(HERE / "strategies")])
    yield
    sys.modules.pop(f"{strategy.__name__}.backwards", None)


@pytest.mark.usefixtures("backwards", "doubling")
def test_a_strategy_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert TuneOptions(strategy="backwards").strategy in strategy.strategy_names()
    assert main(["tune", "--help"]) == 0
    assert "{backwards,coordinate," in capsys.readouterr().out
    space = TaskSpace(doubled())
    search = strategy.create("backwards", space, random.Random(0), lambda found: np.zeros(len(found)))
    points = []
    while batch := search.ask(2):
        search.tell(batch, [MeasureResult((1e-6,)) for _ in batch])
        points += [candidate.point for candidate in batch]
    assert points == [(8,), (16,), (4,)]  # the seed comes first


def test_a_friendly_target_is_an_entry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(targets.FRIENDLY, "cascade", Friendly("llvm -mcpu=x86-64-v4 -num-cores=2", "two wide cores"))
    targets._resolve.cache_clear()
    found = resolve("cascade -model=ghz=3.2")
    assert found.canonical == resolve("x86-64-v4", threads=2).canonical and found.name == "cascade -model=ghz=3.2"
    assert main(["targets"]) == 0
    assert "two wide cores" in capsys.readouterr().out
    monkeypatch.undo()
    targets._resolve.cache_clear()
    with pytest.raises(mlc.errors.TargetError, match="cascade"):
        resolve("cascade")


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of ``spaces``, listed before the others of its two target kinds."""
    monkeypatch.syspath_prepend(str(HERE / "spaces"))
    from doubling import CpuDoubling, CudaDoubling

    monkeypatch.setattr(cpu, "SPACES", (CpuDoubling(), *cpu.SPACES))
    monkeypatch.setattr(cuda, "SPACES", (CudaDoubling(), *cuda.SPACES))


@pytest.mark.usefixtures("doubling")
def test_a_cpu_space_is_a_file_and_a_line_of_the_list() -> None:
    task = doubled()
    space = TaskSpace(task)
    assert space.size == 3 and registry.by_name("cpu.doubling", "llvm") is registry.find(task.func, CPU.tvm)
    native = resolve("native").tvm
    scheduled = best_seed(registry.find(task.func, native), task.func, native)
    module = tvm.compile(scheduled.mod, target=native, tir_pipeline=PIPELINE)
    x, y = RNG.standard_normal((16, 40)).astype("float32"), tvm.runtime.tensor(np.zeros((16, 40), "float32"))
    module["main"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x * 2 + 1)


@pytest.mark.usefixtures("doubling")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")
def test_a_cuda_space_is_a_file_and_a_line_of_the_list() -> None:
    func, target = doubled().func, resolve("cuda:sm_80").tvm
    space = registry.find(func, target)
    assert space.name == "cuda.doubling" and registry.by_name("cuda.doubling", "llvm") is None
    x, y = RNG.standard_normal((16, 40)).astype("float32"), np.zeros((16, 40), "float32")
    cuda_emulator.run(best_seed(space, func, target).mod["main"], target, [x], [y])
    np.testing.assert_array_equal(y, x * 2 + 1)
