"""Which functions check their arguments as they run, and which calls do not build."""

from __future__ import annotations

import copy
import math

import numpy as np
import onnx
import onnx.reference
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te
from tvm.script import relax as R

import mlc
from mlc.artifact import emit
from mlc.artifact.executable import Executable
from mlc.errors import ArtifactError, BuildError
from mlc.target import resolve
from schedules.lowering import FITS

RNG = np.random.default_rng(5)


def _chain(height: int | str = 12) -> onnx.ModelProto:
    """Two convolutions, of which the first alone reads what the caller hands in, and means of both."""
    weights = [RNG.standard_normal(shape, dtype="float32") * 0.3 for shape in ((8, 3, 3, 3), (8, 8, 3, 3))]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1] * 4), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w1"], ["c"], pads=[1] * 4),
        helper.make_node("Concat", ["b", "c"], ["d"], axis=1),
        helper.make_node("GlobalAveragePool", ["d"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "chain", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, height, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 1, 1])],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _checks(monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto, **options: object) -> tuple[mlc.Executable, dict]:
    """The built model, and for each of its functions whether it checks its arguments."""
    finals, finalise = [], emit.finalise
    monkeypatch.setattr(emit, "finalise", lambda mod, target: finals.append(finalise(mod, target)) or finals[-1])
    exe = mlc.compile(model, log=False, **options)
    return exe, {
        str(var.name_hint): not (func.attrs and FITS in func.attrs) for var, func in finals[-1].functions_items()
        if isinstance(func, tvm.tirx.PrimFunc)
    }


def test_what_callers_hand_in_is_checked_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _chain()
    exe, checks = _checks(monkeypatch, model)
    assert len(checks) > 2 and sum(checks.values()) == 1, checks
    x = RNG.standard_normal((1, 3, 12, 12), dtype="float32")
    (wanted,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    assert wanted.std() > 0.1
    np.testing.assert_allclose(exe(x)[0], wanted, atol=1e-5)


def test_free_sizes_are_checked_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, checks = _checks(monkeypatch, _chain("h"), shapes={"x": (1, 3, "4..40", 12)})
    assert sum(checks.values()) > 1


def _double() -> tvm.tirx.PrimFunc:
    x = te.placeholder((4, 8), "float32", "x")
    return te.create_prim_func([x, te.compute((4, 8), lambda i, j: x[i, j] * 2.0, "y")])


def _two_calls(shape: tuple[int, ...], dtype: str = "float32") -> tvm.IRModule:
    """``main(x) = double(double(x))``, whose first call is said to make another shape or type."""
    builder = relax.BlockBuilder()
    var = builder.add_func(_double().with_attr("global_symbol", "double"), "double")
    x = relax.Var("x", R.Tensor((4, 8), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            first = builder.emit(relax.call_tir(var, [x], R.Tensor(shape, dtype)))
            second = builder.emit_output(relax.call_tir(var, [first], R.Tensor((4, 8), "float32")))
        builder.emit_func_output(second)
    return builder.finalize()


@pytest.mark.parametrize(("shape", "dtype"), [((4, 9), "float32"), ((8, 4), "float32"), ((4, 8), "int32")])
def test_a_call_that_does_not_fit_does_not_build(shape: tuple[int, ...], dtype: str) -> None:
    """What a function no longer checks as it runs."""
    with pytest.raises(BuildError, match=r"type mismatch: expected .*4, 8.*float32") as caught:
        emit.finalise(_two_calls(shape, dtype), resolve("native"))
    assert "\n" not in str(caught.value)


def test_a_function_that_some_caller_feeds_checks_always() -> None:
    final = emit.finalise(_two_calls((4, 8)), resolve("native"))
    (double,) = (func for func in final.functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    assert not (double.attrs and FITS in double.attrs)


@pytest.mark.parametrize("shape", [(1, 8, 3, 3), (576,)])
def test_weights_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """The functions that read them no longer look, and would read past a shorter one's end."""
    exe = mlc.compile(_chain(), log=False)
    for place, entry in enumerate(exe.metadata["weights"]):
        other = copy.deepcopy(exe.metadata)
        other["weights"][place] = {**{k: v for k, v in entry.items() if k != "made"}, "shape": list(shape)}
        weights = list(exe.variant.weights)
        weights[place] = np.zeros(4 * math.prod(shape), np.uint8)
        with pytest.raises(ArtifactError, match="compile the model again") as caught:
            Executable(exe.variant.code, other, weights)._start()
        assert "\n" not in str(caught.value)
