"""NaN and infinities go through compiled elementwise operators as they go through numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import mlc

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38)
#: a multiple of no vector's width, so that the vectors' rest is tried too
VALUES = np.array([*SPECIAL, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 20.0, -20.0, 100.0, -100.0] * 3, "float32")
UNARY: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in (
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp",
        "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round",
        "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu",
    )),
    ("Gelu", {"approximate": "tanh"}),
    ("LogSoftmax", {"axis": 0}),
    ("Shrink", {"lambd": 0.5, "bias": 0.1}),
    ("Softmax", {"axis": 0}),
)
WITH_A_CONSTANT = (
    ("Clip", (-1.0, 1.0)), ("Clip", (0.0, 6.0)), ("Max", (0.5,)), ("Min", (0.5,)), ("PRelu", (0.25,)), ("Pow", (2.0,)),
    ("Pow", (3.0,)), ("Add", (0.0,)), ("Mul", (1.0,)), ("Div", (2.0,)),
)


def _agree(node: onnx.NodeProto, constants: tuple[float, ...], *inputs: np.ndarray) -> None:
    names = [name for name in node.input if name.startswith("x")]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(n, TensorProto.FLOAT, inputs[0].shape) for n in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, inputs[0].shape)],
        [helper.make_tensor(f"c{i}", TensorProto.FLOAT, [], [value]) for i, value in enumerate(constants)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    with np.errstate(all="ignore"):
        (wanted,) = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    (found,) = mlc.compile(model, log=False)(*inputs)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)  # Softplus(-20) is 2e-9, and 0 here


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "attributes"), UNARY)
def test_of_one_tensor(name: str, attributes: dict[str, Any]) -> None:
    _agree(helper.make_node(name, ["x"], ["y"], **attributes), (), VALUES)


@pytest.mark.parametrize(("name", "constants"), WITH_A_CONSTANT)
def test_of_a_tensor_and_constants(name: str, constants: tuple[float, ...]) -> None:
    _agree(helper.make_node(name, ["x", *(f"c{i}" for i in range(len(constants)))], ["y"]), constants, VALUES)


@pytest.mark.parametrize("name", ["Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"])
def test_of_two_tensors(name: str) -> None:
    pairs = np.meshgrid(VALUES[:19], VALUES[:19])
    _agree(helper.make_node(name, ["x0", "x1"], ["y"]), (), *(np.ascontiguousarray(side.ravel()) for side in pairs))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_what_is_not_less_may_be_not_a_number(dtype: str) -> None:
    """Not of a comparison, by itself and of several: TVM makes the opposite comparison of it, which NaN fails too."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Less", ["x", "d"], ["other"])]
    outputs = []
    for name in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        nodes += [
            helper.make_node(name, ["x", "c"], [name]), helper.make_node("Not", [name], [f"{name} not"]),
            helper.make_node("And", [name, "other"], [f"{name} and"]),
            helper.make_node("Or", [f"{name} not", "other"], [f"{name} or"]),
            *(helper.make_node("Not", [f"{name} {way}"], [f"{name} not {way}"]) for way in ("and", "or", "not")),
            helper.make_node("Where", [f"{name} not", "x", "c"], [f"{name} where"]),
        ]
        outputs += [helper.make_tensor_value_info(f"{name} {way}", TensorProto.BOOL, VALUES.shape)
                    for way in ("not", "not and", "not or", "not not")]
        outputs.append(helper.make_tensor_value_info(f"{name} where", kind, VALUES.shape))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, VALUES.shape)], outputs,
        [helper.make_tensor("c", kind, [], [0.5]), helper.make_tensor("d", kind, [], [-0.25])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    with np.errstate(over="ignore"):
        x = VALUES.astype(dtype)
    exe = mlc.compile(model, log=False)
    for found, wanted in zip(exe(x), ReferenceEvaluator(model).run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.filterwarnings("error")
def test_what_differs_may_be_not_a_number() -> None:
    torch = pytest.importorskip("torch")

    class Differs(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, y: Any) -> Any:
            return torch.where(torch.exp(x) != y, x, y), x != 0.5, torch.logical_not(x != y)

    x, y = torch.from_numpy(VALUES.copy()), torch.from_numpy(VALUES[::-1].copy())
    exe = mlc.compile(Differs(), example_inputs=(x, y), log=False)
    for found, wanted in zip(exe(x.numpy(), y.numpy()), Differs()(x, y), strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())
