"""Which nodes of the user's model each tensor function comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.compilation import Compilation
from mlc.frontend.origins import label, labelled, node_of, variable_name
from mlc.networks.ablation import bert_qkv


def _model(nodes: list[Any], weights: dict[str, np.ndarray], shape: tuple[int, ...], out: str) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "model", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, [None] * len(shape))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _block(names: bool = True) -> onnx.ModelProto:
    """Two convolutions of different shapes, the first with a batch normalisation and a ReLU, then a mean."""
    rng = np.random.default_rng(0)

    def named(name: str) -> dict[str, str]:
        return {"name": name} if names else {}

    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], **named("stem/conv"), pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "g", "b", "m", "v"], ["n1"], **named("stem/bn")),
        helper.make_node("Relu", ["n1"], ["r1"], **named("stem/relu")),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], **named("head/conv")),
        helper.make_node("Sigmoid", ["c2"], ["s"], **named("head/sigmoid")),
        helper.make_node("GlobalAveragePool", ["s"], ["y"], **named("head/pool")),
    ]
    vector = {name: rng.uniform(0.5, 1.5, 16).astype("f4") for name in "gbmv"}
    weights = {"w1": rng.standard_normal((16, 8, 3, 3)).astype("f4"),
               "w2": rng.standard_normal((24, 16, 1, 1)).astype("f4"), **vector}
    return _model(nodes, weights, (1, 8, 14, 14), "y")


def _origins(model: Any, **options: Any) -> dict[str, tuple[tuple[str, ...], ...]]:
    compilation = Compilation.of(model, **options)
    return labelled(compilation.lowered().origins, compilation.model.nodes)


def _calls(origins: dict[str, tuple[tuple[str, ...], ...]]) -> list[set[str]]:
    return [set(call) for calls in origins.values() for call in calls]


def test_merged_nodes_are_all_named() -> None:
    """Normalisation is folded into the convolution's weights, ReLU is computed behind it: all three are said."""
    calls = _calls(_origins(_block()))
    assert {"stem/conv", "stem/bn", "stem/relu"} in calls
    assert {"head/conv", "head/sigmoid"} in calls
    assert {"head/pool"} in calls
    assert all(calls)


def test_nodes_without_names_are_called_by_operator_and_output() -> None:
    calls = _calls(_origins(_block(names=False)))
    assert {"Conv -> c1", "BatchNormalization -> n1", "Relu -> r1"} in calls
    assert label(_block(names=False).graph.node[0]) == "Conv -> c1"


def test_each_call_of_a_shared_function_has_its_own_nodes() -> None:
    rng = np.random.default_rng(1)
    nodes, last = [], "x"
    for i in range(3):
        nodes += [helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"], name=f"layer{i}/matmul"),
                  helper.make_node("Relu", [f"m{i}"], [f"r{i}"], name=f"layer{i}/relu")]
        last = f"r{i}"
    model = _model(nodes, {f"w{i}": rng.standard_normal((64, 64)).astype("f4") for i in range(3)}, (32, 64), last)
    (calls,) = [calls for calls in _origins(model).values() if len(calls) == 3]
    assert [set(call) for call in calls] == [{f"layer{i}/matmul", f"layer{i}/relu"} for i in range(3)]


def test_parallel_products_of_one_value_are_told_apart() -> None:
    """Equal functions of the same input differ in their weights only."""
    rng = np.random.default_rng(2)
    names = ["left", "right"]
    nodes = [helper.make_node("Conv", ["x", f"w_{n}"], [n], name=n) for n in names]
    nodes += [helper.make_node("Sigmoid", [n], [f"{n}_s"], name=f"{n}/sigmoid") for n in names]
    nodes += [helper.make_node("MaxPool", [f"{n}_s"], [f"{n}_p"], name=f"{n}/pool", kernel_shape=[3, 3]) for n in names]
    nodes += [helper.make_node("Mul", ["left_p", "right_p"], ["y"], name="both")]
    model = _model(nodes, {f"w_{n}": rng.standard_normal((16, 8, 3, 3)).astype("f4") for n in names}, (1, 8, 14, 14),
                   "y")
    calls = _calls(_origins(model, substitutions=False))
    assert {"left"} in calls and {"right"} in calls
    for side, other in (names, names[::-1]):
        assert [call for call in calls if f"{side}/pool" in call and f"{other}/pool" not in call]
    assert sum("both" in call for call in calls) >= 1


def test_a_transformer_keeps_its_layers_apart() -> None:
    """Each layer's functions come from that layer's nodes, through attention, merged products and substitutions."""
    model = bert_qkv()
    order = {label(node): place for place, node in enumerate(model.graph.node)}
    norms = [place for place, node in enumerate(model.graph.node) if node.op_type == "LayerNormalization"]
    for call in _calls(_origins(model)):
        places = sorted(order[name] for name in call)
        crossed = [norm for norm in norms if places[0] < norm < places[-1]]
        assert not crossed, sorted(call)
    named = set().union(*_calls(_origins(model)))
    assert {label(node) for node in model.graph.node if node.op_type in ("MatMul", "Softmax")} <= named


def test_functions_of_the_model_are_named_by_the_node_that_calls_them() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["sq"]), helper.make_node("Exp", ["sq"], ["b"])]
    function = helper.make_function("own", "Square", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    nodes = [helper.make_node("Square", ["x"], ["s"], domain="own", name="my square"),
             helper.make_node("Neg", ["s"], ["y"], name="negated")]
    model = _model(nodes, {}, (4, 8), "y")
    model.functions.append(function)
    model.opset_import.add(domain="own", version=1)
    assert _calls(_origins(model)) == [{"my square", "negated"}]


def test_pytorch_says_modules() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Linear(16, 32)
            self.tail = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(32, 8))

        def forward(self, x: Any) -> Any:
            return self.tail(self.stem(x))

    origins = _origins(Net(), example_inputs=(torch.randn(64, 16),))
    assert {"stem/linear", "tail.0/tanh"} in _calls(origins)
    assert {"tail.1/linear_1"} in _calls(origins)


def test_keys_do_not_depend_on_names() -> None:
    """Logs are shared between models: the same operators called otherwise are the same tasks."""
    named, unnamed = (Compilation.of(_block(names)).tasks() for names in (True, False))
    assert [task.key for task in named] == [task.key for task in unnamed]


def test_artifacts_and_reports_say_nodes() -> None:
    functions = mlc.compile(_block()).metadata["functions"]
    assert all(len(f["origins"]) == f["calls"] for f in functions)
    assert sum("stem/bn" in call for f in functions for call in f["origins"]) >= 1


def test_errors_say_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlc.artifact import schedule

    def refuse(task: Any) -> Any:
        raise ValueError("no schedule today")

    monkeypatch.setattr(schedule, "_seeded", refuse)
    with pytest.raises(mlc.errors.BuildError, match=r"function \w+ \(of [^)]*stem/conv") as caught:
        Compilation.of(_block(), substitutions=False, winograd=False).build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("place", "operator"), [(0, "Conv"), (12, "com.microsoft::Gelu"), (7, "gelu")])
def test_names_of_variables_can_be_read_back(place: int, operator: str) -> None:
    name = variable_name(place, operator)
    assert name.isidentifier() and node_of(name) == node_of(f"{name}1") == node_of(f"{name}_2") == place
    assert node_of("lv12") is None and node_of("gv") is None
