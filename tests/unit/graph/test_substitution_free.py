"""Proved rules on graphs with free sizes: what fires at a fixed batch fires at a free one, and every batch is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from substitution_rules import rule
from tvm import tirx

import mlc
from mlc.graph.substitute.check import same_where_changed
from mlc.graph.substitute.choose import Decision
from mlc.networks import ablation
from mlc.shapes import Free, Range
from mlc.sizes import Size, scope
from mlc.substitution.egraph import EGraph
from mlc.substitution.rewrite import Rewrite
from mlc.substitution.terms import TermBuilder, TermGraph
from mlc.testing.targets import runs

#: the largest batch
TOP = 6
#: what graphs are priced for, so that these tests do not depend on what this machine is
V3 = "x86-64-v3"
TARGET = V3 if runs(V3) else "native"
NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "repvgg_training": lambda: ablation.repvgg_training(12, (16, 32)),
    "resnext_branches": lambda: ablation.resnext_branches(8, 32, 4, 4, 1),
    "rnn_unrolled": lambda: ablation.rnn_unrolled(2, 64),
}


def free_batch(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its first dimensions free."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return proto


def compiled(proto: onnx.ModelProto, batch: str) -> tuple[mlc.Executable, Decision]:
    decisions: list[Decision] = []
    shapes = {v.name: ",".join([batch, *(str(d.dim_value) for d in v.type.tensor_type.shape.dim[1:])])
              for v in proto.graph.input}
    exe = mlc.compile(proto, TARGET, log=False, shapes=shapes, on_decision=decisions.append)
    return exe, decisions[0]


def fired(decision: Decision) -> set[str]:
    return set().union(*(candidate.rules for candidate in decision.found.candidates))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name == "repvgg_training" else ()) for name in NETWORKS
])
def test_rules_fire_at_a_free_batch_and_every_batch_is_right(name: str) -> None:
    proto = free_batch(NETWORKS[name]())
    _, pinned = compiled(proto, "4")
    exe, decision = compiled(proto, f"1..{TOP}")
    if TARGET == V3:
        assert fired(pinned)
        assert fired(pinned) <= fired(decision)
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for batch in (1, 3, TOP):
        rng = np.random.default_rng(batch)
        inputs = {each.name: rng.standard_normal([batch, *each.shape[1:]]).astype(np.float32)
                  for each in reference.get_inputs()}
        for expected, found in zip(reference.run(None, inputs), exe(*inputs.values()), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=str(batch))


def free(low: int, high: int) -> Free:
    return Free("n", Range(low, high), low)


def variables(*names: str) -> list[Any]:
    return [Size(tirx.Var(name, "int64")) for name in names]


def twice(*shape: Any) -> TermGraph:
    """relu(relu(x)) of a shape."""
    build = TermBuilder()
    once = build.add("relu", (build.add("input", (), shape, id=0),), shape)
    return build.graph([build.add("relu", (once,), shape)])


def found(graph: TermGraph, *conditions: str, inputs: str = "x[a,b]") -> bool:
    """Whether a rule with these conditions would be applied."""
    assumed = Rewrite(rule("assumed", inputs, "relu(relu(x))", "relu(x)", conditions=conditions, proved=False),
                      assumed=True)
    egraph, _ = EGraph.of(graph)
    return any([assumed.build(egraph, match) for match in list(assumed.matches(egraph))])


@pytest.mark.parametrize(("low", "high", "condition", "expected"), [
    (4, 8, "a >= 4", True), (1, 8, "a >= 4", False), (1, 3, "a >= 4", False), (4, 8, "a >= 5", False),
    (3, 3, "a == 3", True), (3, 4, "a == 3", False), (1, 8, "a*b - b >= 0", True), (1, 8, "a - b >= 0", False),
    (1, 3, "b - a >= 0", True), (1, 4, "b - a >= 0", False),
])
def test_rule_is_applied_where_the_whole_range_admits_it(low: int, high: int, condition: str, expected: bool) -> None:
    """b is 3."""
    with scope({"n": free(low, high)}):
        (n,) = variables("n")
        assert found(twice(n, 3), condition) is expected


@pytest.mark.parametrize(("multiple", "expected"), [(2, True), (6, True), (1, False), (3, False)])
def test_divisor_divides_every_size(multiple: int, expected: bool) -> None:
    with scope({"n": free(1, 8)}):
        (n,) = variables("n")
        assert found(twice(n * multiple, 5), "a % 2 == 0") is expected


def test_two_free_sizes_of_one_range_are_not_equal() -> None:
    with scope({"n": free(1, 8), "m": replace(free(1, 8), name="m")}):
        n, m = variables("n", "m")
        assert found(twice(n, n), "a == b")
        assert not found(twice(n, m), "a == b")
        assert found(twice(n, n), inputs="x[a,a]")
        assert not found(twice(n, m), inputs="x[a,a]")


def test_conditions_on_sizes_hold_for_each_size_of_the_range() -> None:
    """What is decided of a random linear condition is what trying every size says."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        low = int(rng.integers(1, 5))
        high = low + int(rng.integers(0, 6))
        factor, offset = (int(each) for each in rng.integers(-4, 5, 2))
        relation = str(rng.choice([">=", "=="]))
        text = f"{factor}*a + {offset} {relation} 0"
        holds = [factor * n + offset == 0 if relation == "==" else factor * n + offset >= 0
                 for n in range(low, high + 1)]
        with scope({"n": free(low, high)}):
            (n,) = variables("n")
            assert found(twice(n, 3), text) is all(holds), (text, low, high)


def reduced(op: str, batch: Any) -> TermGraph:
    build = TermBuilder()
    image = build.add("input", (), (batch, 3), id=0)
    return build.graph([build.add(op, (image,), (3,), axes=(0,), keepdims=0)])


def test_graphs_that_agree_at_one_size_only_are_told_apart() -> None:
    """A sum is a mean where there is one row."""
    with scope({"n": free(1, 8)}):
        (n,) = variables("n")
        assert same_where_changed(reduced("sum", n), reduced("mean", n)) is False
        assert same_where_changed(reduced("sum", n), reduced("sum", n)) is True
    with scope({}):
        assert same_where_changed(reduced("sum", 1), reduced("mean", 1)) is True


def test_term_that_was_forgotten_is_not_found_again() -> None:
    build = TermBuilder()
    place = build.add("input", (), (2, 3), id=0)
    first = build.add("relu", (place,), (2, 3))
    build.forget(first)
    assert [term.op for term in build.terms] == ["input"]
    assert build.add("relu", (place,), (2, 3)) == first
    assert [term.op for term in build.terms] == ["input", "relu"]
