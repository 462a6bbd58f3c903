"""Means of windows before and in convolutions; rules with corrections by price: where they pay, where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import pytest
from relax_evaluation import evaluate, weight
from test_substitution_reductions import moved
from test_substitution_search import CPU, network, prepared
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import optimise
from mlc.graph.substitute.choose import Decision, Substitutions
from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.extract import Problem
from mlc.graph.substitute.rule_benefit import Benefit, benefits_of
from mlc.graph.substitute.rules import shipped_patterns
from mlc.graph.substitute.saturate import saturate
from mlc.graph.substitute.search import search
from mlc.operators.index import as_poly
from mlc.operators.shapes import inferred
from mlc.substitution.graph import Graph, concrete
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules
from mlc.substitution.terms import CONSTANT, INPUT, TermBuilder, TermGraph

Emit = Callable[..., relax.Expr]


def shipped(name: str) -> Rule:
    [found] = [rule for rule in shipped_rules() if rule.name.startswith(f"{name}/")]
    return found


def averaged(channels: int, kernel: int, window: int, *, padding: int = 0, counts: bool = True, bias: bool = True,
             filters: int = 64) -> Emit:
    """A convolution, a bias, and means of windows at every other place."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        y = emit(op.nn.conv2d(x, weight(filters, channels, kernel, kernel), padding=[kernel // 2] * 4))
        y = emit(op.add(y, weight(1, filters, 1, 1))) if bias else y
        y = emit(op.nn.avg_pool2d(y, [window, window], [2, 2], [padding] * 4, count_include_pad=counts))
        return emit(op.nn.relu(y))

    return body


def multiplications(graph: TermGraph) -> int:
    """Of the convolutions of run time."""
    constant = graph.constant_places()
    return sum(prod(term.shape) * prod(graph.terms[term.inputs[1]].shape[1:])
               for place, term in enumerate(graph.terms) if term.op == "conv2d" and place not in constant)


@pytest.mark.parametrize("body, part", [
    (averaged(32, 1, 2), 0.26), (averaged(32, 1, 3, padding=1, counts=False), 0.26), (averaged(32, 5, 2), 0.37),
], ids=["single elements", "padding", "windows"])
def test_means_come_before_a_convolution_or_into_its_filter(body: Emit, part: float) -> None:
    own, best = moved(body, (1, 32, 28, 28))
    assert multiplications(best.graph) < part * multiplications(own.graph)


def test_a_rule_with_a_correction_pays_and_is_taken_by_its_price() -> None:
    """Windows of five, then means of three with padding at every other place: 49 products for each, of 100. What is
    lowered computes what numpy does in float64."""
    channels, filters, kernel, extent = 16, 32, 5, 28
    body = averaged(channels, kernel, 3, padding=1, bias=False, filters=filters)
    own, best = moved(body, (1, channels, extent, extent))
    [rule] = best.rules
    assert rule == shipped("windows-corrected").name
    assert multiplications(best.graph) < 0.75 * multiplications(own.graph)

    mod, decisions = network({"x": (1, channels, extent, extent)}, body), list[Decision]()
    optimise(mod, CPU, substitutions=Substitutions(shipped_patterns(), notify=decisions.append))
    [decision] = decisions
    assert decision.reason == "prices" and rule in decision.found.candidates[decision.chosen].rules
    x = np.random.default_rng(3).standard_normal((1, channels, extent, extent)).astype("float32")
    [result] = evaluate(decision.found.module(decision.found.candidates[decision.chosen]), x)
    [filters_of] = [array for array in decision.found.reading.constants if array.shape[-1] == kernel]
    np.testing.assert_allclose(result, by_numpy(x, filters_of), rtol=1e-4, atol=1e-3)


def by_numpy(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Windows by sums of shifted images, in float64: the convolution that keeps the size, means of three at every other
    place with zeros for what is outside, relu."""
    def shifts(image: np.ndarray, reach: int) -> np.ndarray:
        around = np.pad(image, [(0, 0), (0, 0), (reach, reach), (reach, reach)])
        return np.lib.stride_tricks.sliding_window_view(around, (2 * reach + 1, 2 * reach + 1), axis=(2, 3))

    y = np.einsum("nchwkl,ockl->nohw", shifts(x.astype("float64"), w.shape[-1] // 2), w.astype("float64"))
    return np.maximum(shifts(y, 1)[:, :, ::2, ::2].mean((-2, -1)), 0)


def test_a_correction_that_does_not_pay_is_not_taken() -> None:
    """Windows of three have a faster algorithm at every place than those of five at every other."""
    mod = prepared(network({"x": (1, 64, 56, 56)}, averaged(64, 3, 3, padding=1, bias=False)))
    found = search(mod, shipped_patterns(), CPU.tvm)
    assert all(each.estimate >= 0.97 * found.candidates[0].estimate for each in found.candidates)


@pytest.mark.parametrize("batch, channels, extent", [(8, 64, 56), (16, 128, 28), (32, 256, 14), (16, 512, 7),
                                                     (64, 512, 7), (64, 32, 4), (8, 3, 32)])
def test_a_batch_folded_into_space_never_pays(batch: int, channels: int, extent: int) -> None:
    """Its multiplications are the same, the images are copied together and apart, and seams are computed anew."""
    rule = shipped("beside-batch")
    assert not benefits_of(rule) and benefits_of(shipped("windows-corrected")) == {frozenset(): Benefit.CHEAPER}
    sizes = {"n0": batch, "c0": channels, "o0": channels, "h0": extent, "w0": extent,
             **dict.fromkeys(("p0", "p1", "p2", "p3"), 1)}
    source, target = (priced(side, rule, sizes) for side in (rule.source, rule.target))
    assert source < target


def priced(side: Graph, rule: Rule, sizes: Mapping[str, int]) -> float:
    """Seconds of a side of a rule as extraction adds them up, its filters constant."""
    made, places = TermBuilder(), {}
    for number, (name, shape) in enumerate(rule.shapes.items()):
        places[name] = made.add(CONSTANT if name == "b" else INPUT, (), [as_poly(s).evaluate(sizes) for s in shape],
                                id=number)
    for place, node in enumerate(side.nodes):
        attributes = {key: concrete(value, sizes) for key, value in node.completed.items()}
        inputs = [places[ref] for ref in node.inputs]
        shape = inferred(node.op, tuple(map(made.shape, inputs)), attributes)
        places[place, 0] = made.add(node.op, inputs, shape, **attributes)
    graph = made.graph([places[ref] for ref in side.outputs])
    choices, _ = saturate(graph, [])
    costs = Costs(CPU.tvm, 1e6)
    problem = Problem(choices, lambda o, s: costs.of(o, s, choices.shapes, choices.constant), costs.held)
    return problem.seconds(choices.original)
