"""LSTM, GRU and RNN against onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from tvm import relax

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
NAMES = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")


@dataclass(frozen=True)
class Node:
    """One recurrent node with random weights. ``optional`` are the inputs that it has beyond X, W and R.

    Weights are constants and states are inputs, unless ``constant`` says otherwise.
    """

    operator: str
    steps: int = 3
    batch: int = 1
    features: int = 6
    hidden: int = 16
    optional: tuple[str, ...] = ("B",)
    outputs: tuple[bool, ...] = (True, True, True)
    constant: tuple[str, ...] = ("W", "R", "B", "sequence_lens", "P")
    dtype: str = "float32"
    lengths: tuple[int, ...] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        """The inputs as they are in layout 0."""
        rng = np.random.default_rng(0)
        ways = 2 if self.attributes.get("direction") == "bidirectional" else 1
        rows, state = GATES[self.operator] * self.hidden, (ways, self.batch, self.hidden)
        shapes = {
            "X": (self.steps, self.batch, self.features), "W": (ways, rows, self.features),
            "R": (ways, rows, self.hidden), "B": (ways, 2 * rows), "initial_h": state, "initial_c": state,
            "P": (ways, 3 * self.hidden),
        }
        arrays = {name: rng.uniform(-1, 1, shape).astype(self.dtype) for name, shape in shapes.items()}
        lengths = self.lengths or (self.steps,) * self.batch
        arrays["sequence_lens"] = np.array(lengths, "int32")
        return {name: array for name, array in arrays.items() if name in ("X", "W", "R", *self.optional)}

    def inputs(self) -> dict[str, np.ndarray]:
        """The arrays that are inputs of the model, in the node's layout."""
        arrays = {name: array for name, array in self.arrays().items() if name not in self.constant}
        if not self.attributes.get("layout"):
            return arrays
        moved = ("X", "initial_h", "initial_c")
        return {n: np.ascontiguousarray(a.swapaxes(0, 1)) if n in moved else a for n, a in arrays.items()}

    def model(self) -> onnx.ModelProto:
        arrays = self.arrays()
        names = [name if name in arrays else "" for name in NAMES]
        states = ("Y", "Y_h", "Y_c") if self.operator == "LSTM" else ("Y", "Y_h")
        outputs = [name if used else "" for name, used in zip(states, self.outputs, strict=False)]
        node = helper.make_node(
            self.operator, names[: max(map(names.index, arrays)) + 1], outputs, name="unit", hidden_size=self.hidden,
            **self.attributes,
        )
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            [node], "recurrent",
            [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
             for n, a in self.inputs().items()],
            [helper.make_tensor_value_info(name, kind, [None] * (4 if name == "Y" else 3)) for name in outputs if name],
            [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in self.constant],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def expected(self) -> list[np.ndarray]:
        """What onnxruntime computes, which knows layout 0 and float32 only."""
        plain = replace(self, dtype="float32", attributes={k: v for k, v in self.attributes.items() if k != "layout"})
        session = onnxruntime.InferenceSession(plain.model().SerializeToString(), providers=["CPUExecutionProvider"])
        outputs = session.run(None, plain.inputs())
        if self.attributes.get("layout"):
            return [np.moveaxis(array, -2, 0) for array in outputs]
        return outputs


def check(node: Node, tolerance: float = 1e-5) -> None:
    actual = mlc.compile(node.model(), substitutions=False)(**node.inputs())  # which take half of the time
    for a, b in zip(actual, node.expected(), strict=True):
        assert a.dtype == node.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_directions(operator: str, direction: str, batch: int) -> None:
    states = ("initial_h", "initial_c") if operator == "LSTM" else ("initial_h",)
    check(Node(operator, batch=batch, optional=("B", *states), attributes={"direction": direction}))


@pytest.mark.parametrize("operator", GATES)
def test_batch_first(operator: str) -> None:
    check(Node(operator, batch=3, optional=("initial_h",), attributes={"layout": 1, "direction": "bidirectional"}))


@pytest.mark.parametrize("optional", [(), ("initial_h",), ("initial_c",), ("B", "initial_c", "P")], ids="+".join)
def test_optional_inputs_of_lstm(optional: tuple[str, ...]) -> None:
    check(Node("LSTM", optional=optional, hidden=5, batch=2))


def test_peepholes() -> None:
    check(Node("LSTM", optional=("B", "P"), attributes={"direction": "bidirectional"}))


@pytest.mark.parametrize("optional", [(), ("B", "initial_h")], ids="+".join)
@pytest.mark.parametrize("after", [0, 1])
def test_linear_before_reset(after: int, optional: tuple[str, ...]) -> None:
    check(Node("GRU", optional=optional, hidden=5, batch=2, attributes={"linear_before_reset": after}))


@pytest.mark.parametrize("operator", GATES)
def test_a_single_step(operator: str) -> None:
    check(Node(operator, steps=1))


@pytest.mark.parametrize("operator", GATES)
def test_clipping(operator: str) -> None:
    check(Node(operator, attributes={"clip": 0.2}))


@pytest.mark.parametrize(
    "attributes",
    [
        {"activations": ["HardSigmoid", "Softsign", "Relu"]},
        {"activations": ["Sigmoid", "LeakyRelu", "Softplus"]},
        {"activations": ["hardsigmoid", "LEAKYRELU", "tanh"], "activation_alpha": [0.3, 0.2],
         "activation_beta": [0.4]},
        {"activations": ["HardSigmoid", "Elu", "Tanh"], "activation_alpha": [0.3]},
    ],
    ids=str,
)
def test_activations(attributes: dict[str, Any]) -> None:
    check(Node("LSTM", attributes=attributes))


def test_activations_of_a_direction_that_there_is_not() -> None:
    """ONNX's default of RNN is Tanh twice, which onnxruntime writes into what it saves."""
    check(Node("RNN", attributes={"activations": ["Tanh", "Tanh"]}))
    check(Node("RNN", attributes={"activations": ["Relu", "Tanh"]}))


def test_activations_of_each_direction() -> None:
    names = ["Relu", "Softsign", "Sigmoid", "Tanh"]
    check(Node("GRU", attributes={"direction": "bidirectional", "activations": names}))


@pytest.mark.parametrize("outputs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_unused_outputs_are_left_out(outputs: tuple[bool, ...]) -> None:
    check(Node("LSTM", outputs=outputs))


@pytest.mark.parametrize("operator", GATES)
def test_weights_that_are_inputs(operator: str) -> None:
    check(Node(operator, batch=2, hidden=5, constant=()))


def test_weights_that_are_inputs_with_the_reset_after_the_product() -> None:
    check(Node("GRU", batch=2, constant=(), attributes={"linear_before_reset": 1}))


@pytest.mark.parametrize("attributes", [{"clip": 0.2}, {"activations": ["HardSigmoid", "Softsign", "Relu"]}], ids=str)
def test_constants_alone(attributes: dict[str, Any]) -> None:
    """Not folded by the reference, which passes over these attributes."""
    check(Node("LSTM", constant=("X", "W", "R", "B"), attributes=attributes))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("float64", 1e-5)])
def test_types_are_kept(dtype: str, tolerance: float) -> None:
    check(Node("LSTM", optional=("B", "P", "initial_h"), dtype=dtype, attributes={"clip": 2.0}), tolerance)


def test_initial_states_of_zeros_need_no_product() -> None:
    """PyTorch's exporter writes them out."""
    node = Node("LSTM", optional=("B", "initial_h", "initial_c"))
    model = node.model()
    for name in ("initial_h", "initial_c"):
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, node.hidden), "float32"), name))
    del model.graph.input[1:]
    values = [b.value for b in bindings(load_model(model).mod["main"])]
    assert sum(isinstance(v, relax.Call) and op_name(v) == "relax.matmul" for v in values) == node.steps
    bare = replace(node, optional=("B",))
    for a, b in zip(mlc.compile(model)(bare.inputs()["X"]), mlc.compile(bare.model())(**bare.inputs()), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("lengths", [(3, 3), (3, 2), (1, 3)])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_sequences_of_several_lengths(operator: str, direction: str, constant: bool, lengths: tuple[int, int]) -> None:
    states = ("initial_h", "initial_c") if operator == "LSTM" else ("initial_h",)
    node = Node(operator, batch=2, optional=("B", "sequence_lens", *states), lengths=lengths,
                attributes={"direction": direction})
    check(node if constant else replace(node, constant=("W", "R", "B")))


@pytest.mark.parametrize("operator", GATES)
def test_sequences_of_several_lengths_in_a_kernel(operator: str) -> None:
    """Of more steps than are unrolled, the batch first, one sequence without a step."""
    optional = ("B", "sequence_lens", *(("P",) if operator == "LSTM" else ()))
    check(Node(operator, steps=33, batch=4, optional=optional, lengths=(33, 7, 0, 20), constant=("W", "R", "B", "P"),
               attributes={"direction": "bidirectional", "layout": 1}), tolerance=1e-4)


@pytest.mark.parametrize("attributes", [
    {"clip": 2.0}, {"activations": ["Tanh", "Tanh", "Tanh"]}, {"activations": ["Sigmoid", "Relu", "Tanh"]},
], ids=["clip", "gates", "cell"])
def test_the_last_cell_of_gates_that_do_not_shut_is_refused(attributes: dict[str, Any]) -> None:
    node = Node("LSTM", batch=2, optional=("sequence_lens",), lengths=(3, 2), attributes=attributes)
    fails(node, "its gates must be sigmoids that are not clipped, .* for its last cell to be known; leave Y_c out")
    check(replace(node, outputs=(True, True, False)))


@pytest.mark.parametrize("padding", [1e9, np.nan])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_what_lies_behind_a_sequence_is_not_read(direction: str, padding: float) -> None:
    node = Node("LSTM", batch=2, optional=("B", "sequence_lens"), lengths=(3, 1), attributes={"direction": direction})
    given = node.inputs()
    given["X"][1:, 1] = 0
    exe, wanted = mlc.compile(node.model(), substitutions=False), node.expected()
    zeros = exe(**given)
    given["X"][1:, 1] = padding
    for first, second, expected in zip(zeros, exe(**given), wanted, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(second, expected, rtol=1e-5, atol=1e-5)


def fails(node: Node, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(node.model())
    text = str(caught.value)
    assert f"{node.operator} (unit)" in text
    assert "\n" not in text


def test_sequences_longer_than_the_input_are_refused() -> None:
    node = Node("GRU", batch=2, optional=("sequence_lens",), lengths=(3, 4))
    fails(node, "sequence_lens must be from 0 to the number of steps, 3, but are 3 to 4")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"activations": ["Sigmoid", "Affine", "Tanh"]}, "activations must be 3 of .*, got Sigmoid, Affine, Tanh"),
        ({"activations": ["Sigmoid", "Tanh"]}, "activations must be 3 of .*, got Sigmoid, Tanh"),
        ({"input_forget": 1}, "input_forget must be 0"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_told(attributes: dict[str, Any], reason: str) -> None:
    fails(Node("LSTM", attributes=attributes), reason)
