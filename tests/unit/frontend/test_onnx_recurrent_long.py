"""LSTM, GRU and RNN of many steps, one kernel over them, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm_ffi
from test_onnx_recurrent import GATES
from test_onnx_recurrent import Node as Short

import mlc
from mlc.frontend import onnx_recurrent
from mlc.frontend.onnx_recurrent import MOST_UNROLLED
from mlc.graph.task import from_json, to_json
from schedules.cpu.recurrent import RECURRENT
from schedules.space import schedule_with
from schedules.trace import replay, trace_json

LONG = MOST_UNROLLED + 3


class Node(Short):
    """Its recurrent weights are such that errors do not grow from step to step."""

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = super().arrays()
        return {**arrays, "R": arrays["R"] / np.sqrt(np.float32(self.hidden))}


def names(node: Node, target: str = "native") -> list[str]:
    return [task.name for task in mlc.Compilation.of(node.model(), target, substitutions=False).tasks()]


def check(node: Node, tolerance: float = 2e-5, threads: int = 2) -> None:
    """Compiled with a kernel, and as onnxruntime computes it."""
    compilation = mlc.Compilation.of(node.model(), threads=threads, substitutions=False)
    assert "recurrent" in [task.name for task in compilation.tasks()]
    for a, b in zip(compilation.build()(**node.inputs()), node.expected(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_directions(operator: str, direction: str) -> None:
    states = ("initial_h", "initial_c") if operator == "LSTM" else ("initial_h",)
    check(Node(operator, LONG, 3, 5, 21, ("B", *states), attributes={"direction": direction, "linear_before_reset": 1}
               if operator == "GRU" else {"direction": direction}))


@pytest.mark.parametrize("seed", range(4))
def test_random_sizes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    operator = str(rng.choice(["LSTM", "GRU", "RNN"]))
    steps, batch, features, hidden = (int(rng.integers(*ends)) for ends in ((17, 60), (1, 9), (1, 40), (1, 70)))
    check(Node(operator, steps, batch, features, hidden, ("B", "initial_h"),
               attributes={"linear_before_reset": 1} if operator == "GRU" else {}), threads=1 + seed % 2)


def test_parts_of_the_batch_on_cores_of_their_own() -> None:
    """So much work that the batch is cut, whose parts must not see each other's states."""
    check(Node("LSTM", 64, 4, 8, 64, ("B", "initial_h", "initial_c")))


@pytest.mark.parametrize(("optional", "attributes"), [
    (("B", "P"), {"direction": "bidirectional"}),
    ((), {"activations": ["HardSigmoid", "Softsign", "Elu"], "activation_alpha": [0.3, 0.7]}),
    (("B",), {"layout": 1, "direction": "bidirectional"}),
], ids=["peepholes", "activations", "layout"])
def test_what_else_an_lstm_has(optional: tuple[str, ...], attributes: dict[str, Any]) -> None:
    check(Node("LSTM", LONG, 2, 6, 16, optional, attributes=attributes))


def test_clipping_is_that_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX clips what goes into every activation; onnxruntime leaves one out."""
    node = Node("LSTM", LONG, 2, 6, 16, ("initial_c",), attributes={"clip": 0.3})
    found = mlc.compile(node.model(), substitutions=False)(**node.inputs())
    monkeypatch.setattr(onnx_recurrent, "MOST_UNROLLED", LONG)
    for a, b in zip(found, mlc.compile(node.model(), substitutions=False)(**node.inputs()), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_weights_that_are_inputs() -> None:
    check(Node("LSTM", LONG, 1, 6, 10, ("B",), constant=()))


@pytest.mark.parametrize(("batch", "hidden", "attributes"), [
    (1, 21, {"direction": "bidirectional"}), (6, 32, {"direction": "reverse"}),
    (2, 64, {"activations": ["HardSigmoid", "Relu"], "clip": 0.5}),
], ids=["both-ways", "reverse", "activations"])
def test_a_reset_before_its_product(batch: int, hidden: int, attributes: dict[str, Any]) -> None:
    """A step has two products, the second with what the first has made."""
    check(Node("GRU", LONG, batch, 5, hidden, ("B", "initial_h"), attributes=attributes))


def test_parts_of_a_batch_whose_steps_have_two_products() -> None:
    check(Node("GRU", 64, 4, 8, 64, ("B", "initial_h")))


@pytest.mark.slow
def test_what_no_kernel_computes_is_unrolled() -> None:
    """Directions of other activations."""
    node = Node("GRU", LONG, 2, 4, 5, attributes={
        "linear_before_reset": 1, "direction": "bidirectional", "activations": ["Sigmoid", "Tanh", "Sigmoid", "Relu"]})
    assert "recurrent" not in names(node)
    for a, b in zip(mlc.compile(node.model(), substitutions=False)(**node.inputs()), node.expected(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_short_layers_and_gpus_have_every_step() -> None:
    assert "recurrent" not in names(Node("LSTM", MOST_UNROLLED))
    assert "recurrent" not in names(Node("RNN", LONG, hidden=4), "cuda:sm_90")


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_every_seed_can_be_carried_out(target: str, operator: str) -> None:
    """On all widths of vectors, with one row and with several; their traces too, on a function of their own."""
    for batch in (1, 6):
        node = Node(operator, LONG, batch, 8, 48)
        tasks = mlc.Compilation.of(node.model(), target, threads=2, substitutions=False).tasks()
        (task,) = [each for each in tasks if each.name == "recurrent"]
        func, described = from_json(to_json(task.func)), task.target.tvm
        for decisions in RECURRENT.seeds(task.func, described):
            scheduled = schedule_with(RECURRENT, task.func, described, decisions)
            replayed = replay(func, trace_json(scheduled), described)
            assert tvm_ffi.structural_equal(scheduled.mod, replayed.mod, map_free_vars=True)
