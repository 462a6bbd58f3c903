"""What constants make of rules: networks in the form in which they are trained or written become those that run.

Each form is a network of small sizes whose weights are constants, or, where nothing may happen, inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from relax_evaluation import assert_same_values, weight
from substitution_rules import rule
from test_substitution_search import CPU, network, prepared
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import optimise
from mlc.graph.substitute.check import difference, identical
from mlc.graph.substitute.choose import Decision, Substitutions
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.rule_benefit import Benefit, benefits_of
from mlc.graph.substitute.rules import shipped_patterns
from mlc.graph.substitute.saturate import Limits, saturate
from mlc.graph.substitute.search import Found, Options, search
from mlc.substitution.egraph import COMMUTATIVE, EGraph
from mlc.substitution.prove import Proved, prove
from mlc.substitution.terms import TermBuilder, TermGraph, freeze

Emit = Callable[..., relax.Expr]
#: gives a weight of a shape: a constant, or an input of the network
Given = Callable[..., relax.Expr]


def adapters(emit: Emit, given: Given, x: relax.Expr, rank: int = 2, count: int = 2) -> relax.Expr:
    """Products of one tensor with biases, each with an adapter of a low rank beside it."""
    width = int(x.ty.shape[1])
    parts = []
    for _ in range(count):
        whole = emit(op.add(emit(op.matmul(x, given(width, width))), given(1, width)))
        low = emit(op.matmul(emit(op.matmul(x, given(width, rank))), given(rank, width)))
        parts.append(emit(op.add(whole, low)))
    return emit(op.concat(parts, axis=0))


def trained(emit: Emit, given: Given, x: relax.Expr, stride: int = 1) -> relax.Expr:
    """A 3x3 and a 1x1 convolution and the image itself, each scaled and shifted by channel, summed."""
    channels = int(x.ty.shape[1])
    parts = []
    for kernel in (3, 1, 0)[: 3 if stride == 1 else 2]:
        part = x
        if kernel:
            filters = given(channels, channels, kernel, kernel)
            part = emit(op.nn.conv2d(x, filters, strides=[stride, stride], padding=[kernel // 2] * 4))
        scaled = emit(op.multiply(part, given(1, channels, 1, 1)))
        parts.append(emit(op.add(scaled, given(1, channels, 1, 1))))
    total = parts[0]
    for part in parts[1:]:
        total = emit(op.add(total, part))
    return emit(op.nn.relu(total))


def branches(emit: Emit, given: Given, x: relax.Expr, count: int = 6, width: int = 4) -> relax.Expr:
    """Bottlenecks of three convolutions beside each other, summed with the image."""
    channels = int(x.ty.shape[1])

    def conv(data: relax.Expr, outputs: int, kernel: int) -> relax.Expr:
        filters = given(outputs, int(data.ty.shape[1]), kernel, kernel)
        y = emit(op.nn.conv2d(data, filters, padding=[kernel // 2] * 4))
        return emit(op.add(y, given(1, outputs, 1, 1)))

    total = x
    for _ in range(count):
        inner = emit(op.nn.relu(conv(emit(op.nn.relu(conv(x, width, 1))), width, 3)))
        total = emit(op.add(total, conv(inner, channels, 1)))
    return emit(op.nn.relu(total))


#: a form with the shape of its input, its products and how many of them need run
FORMS: dict[str, tuple[Callable[..., relax.Expr], tuple[int, ...], int, int]] = {
    "adapters": (adapters, (8, 32), 6, 1),
    "trained": (trained, (1, 16, 8, 8), 2, 1),
    "branches": (branches, (1, 64, 8, 8), 18, 3),
}


def constants(form: str) -> tvm.IRModule:
    """The network with random constants for weights."""
    body, shape, _, _ = FORMS[form]
    return network({"x": shape}, lambda emit, x: body(emit, lambda *sizes: weight(*sizes, low=-0.3, high=0.3), x))


def inputs(form: str) -> tvm.IRModule:
    """The same network with inputs for weights."""
    body, shape, _, _ = FORMS[form]
    sizes: list[tuple[int, ...]] = []

    def noting(*asked: int) -> relax.Expr:
        sizes.append(asked)
        return weight(*asked)

    def reading(emit: Emit, x: relax.Var, *given: relax.Var) -> relax.Expr:
        left = iter(given)
        return body(emit, lambda *_: next(left), x)

    network({"x": shape}, lambda emit, x: body(emit, noting, x))
    return network({"x": shape, **{f"w{place}": each for place, each in enumerate(sizes)}}, reading)


def found(mod: tvm.IRModule) -> Found:
    return search(prepared(mod), shipped_patterns(), CPU.tvm, Options())


def products(graph: TermGraph) -> int:
    """Products that are left at run time."""
    constant = graph.constant_places()
    return sum(t.op in ("matmul", "conv2d") for place, t in enumerate(graph.terms) if place not in constant)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_becomes_what_should_run(form: str) -> None:
    _, _, written, needed = FORMS[form]
    result = found(constants(form))
    own, best = result.candidates[:2]
    assert (products(own.graph), products(best.graph)) == (written, needed)
    assert difference(best.graph, own.graph) < 1e-9
    assert identical(best.graph, own.graph)
    assert_same_values(constants_of(result), result.module(best), 1e-4)


def constants_of(result: Found) -> tvm.IRModule:
    return result.module(result.candidates[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_estimate_prefers_what_should_run(form: str) -> None:
    own, best = found(constants(form)).candidates[:2]
    assert best.estimate < 0.97 * own.estimate


@pytest.mark.parametrize("form", ["adapters", "trained"])
def test_nothing_folds_where_weights_are_inputs(form: str) -> None:
    """Products of one tensor may be joined all the same; none is done away with by sums of weights."""
    result = found(inputs(form))
    for candidate in result.candidates:
        ops = {term.op for term in candidate.graph.terms}
        assert not ops & {"enlarge", "identity_kernel"}
        weights = [t for t in candidate.graph.terms if t.op == "input" and t["id"] > 0]
        assert len(weights) == sum(t.op == "input" and t["id"] > 0 for t in result.candidates[0].graph.terms)
        assert difference(candidate.graph, result.candidates[0].graph) < 1e-9


def test_what_is_found_is_taken() -> None:
    decisions: list[Decision] = []
    optimise(constants("trained"), CPU, substitutions=Substitutions(
        shipped_patterns(), Options(), notify=decisions.append))
    (decision,) = decisions
    assert decision.chosen > 0
    assert products(decision.found.candidates[decision.chosen].graph) == 1


def test_strides_leave_out_the_image() -> None:
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        return trained(emit, lambda *sizes: weight(*sizes, low=-0.3, high=0.3), x, stride=2)

    result = found(network({"x": (1, 16, 9, 9)}, body))
    best = result.candidates[1]
    assert products(best.graph) == 1
    assert identical(best.graph, result.candidates[0].graph)


def test_kinds_ask_for_the_fewest_constants() -> None:
    chain = rule("chain", "x[n,m] a[m,k] b[k,l]", "matmul(matmul(x, a), b)", "matmul(x, matmul(a, b))")
    assert benefits_of(chain) == {frozenset(): Benefit.CHEAPER, frozenset("ab"): Benefit.JOIN}
    biases = rule("biases", "x[n,m] a[n,m] b[n,m]", "add(add(x, a), b)", "add(x, add(a, b))")
    assert benefits_of(biases) == {frozenset("ab"): Benefit.SHORTER}
    join = rule("join", "x[n,m] a[m,k] b[m,k]", "add(matmul(x, a), matmul(x, b))", "matmul(x, add(a, b))")
    assert benefits_of(join) == {frozenset(): Benefit.JOIN}
    assert benefits_of(rule("order", "x[n,m] y[n,m]", "add(x, y)", "add(y, x)")) == {}


def test_a_reshape_is_nothing_at_run_time() -> None:
    twice = rule("twice", "x[n,m]", "reshape(reshape(x, shape=(n*m,)), shape=(m,n))", "reshape(x, shape=(m,n))")
    assert benefits_of(twice) == {}
    moved = rule("moved", "x[1,m]", "transpose(x, perm=(1,0))", "reshape(x, shape=(m,1))")
    assert benefits_of(moved) == {frozenset(): Benefit.SHORTER}


def test_sums_match_in_either_order() -> None:
    factor = Pattern(rule("factor", "x[n,m] y[n,m] z[n,m]", "add(mul(x, y), mul(x, z))", "mul(x, add(y, z))"))
    for first, second in ((0, 1), (1, 0)):
        for third, fourth in ((0, 2), (2, 0)):
            build = TermBuilder()
            leaves = [build.add("input", (), (2, 3), id=i) for i in range(3)]
            left = build.add("mul", (leaves[first], leaves[second]), (2, 3))
            right = build.add("mul", (leaves[third], leaves[fourth]), (2, 3))
            graph = build.graph([build.add("add", (left, right), (2, 3))])
            assert saturate(graph, [factor])[1].matches == {"factor": 1}


def test_operands_that_are_exchanged_are_one_node() -> None:
    graph = EGraph()
    a, b = (graph.leaf("input", freeze(id=i), (2,)) for i in range(2))
    for each in COMMUTATIVE:
        assert graph.add(each, (), (a, b)) == graph.add(each, (), (b, a))
    assert graph.add("sub", (), (a, b)) != graph.add("sub", (), (b, a))


@pytest.mark.parametrize("shapes", ["x[n,m] y[n,m]", "x[n,c,h,w] y[1,c,1,1]"])
@pytest.mark.parametrize("each", COMMUTATIVE)
def test_exchanging_operands_is_proved(each: str, shapes: str) -> None:
    assert isinstance(prove(rule("exchange", shapes, f"{each}(x, y)", f"{each}(y, x)")), Proved)


def _sum(*shapes: tuple[int, ...], constant: tuple[int, ...] = ()) -> TermGraph:
    """A sum from left to right of leaves of these shapes; those at the places ``constant`` are constants."""
    build = TermBuilder()
    leaves = [build.add("constant" if i in constant else "input", (), shape, id=i) for i, shape in enumerate(shapes)]
    total = leaves[0]
    for leaf in leaves[1:]:
        wide = tuple(np.broadcast_shapes(build.shape(total), build.shape(leaf)))
        total = build.add("add", (total, leaf), wide)
    return build.graph([total])


@pytest.mark.parametrize(("whole", "bias"), [((4, 8), (1, 8)), ((2, 4, 8), (1, 1, 8)), ((2, 8, 4, 4), (1, 8, 1, 1)),
                                             ((2, 8, 4, 4), (2, 8, 4, 4))])
def test_constants_of_a_sum_meet(whole: tuple[int, ...], bias: tuple[int, ...]) -> None:
    graph = _sum(whole, bias, whole, bias, whole, constant=(1, 3))
    choices, report = saturate(graph, shipped_patterns(), Limits(nodes=200))
    (root,) = choices.roots
    ends = [[i in choices.constant for i in option.inputs] for option in choices.options[root] if option.op == "add"]
    assert [False, True] in ends
    assert report.nodes < 40


def test_constants_stay_where_no_law_says_that_they_may_move() -> None:
    graph = _sum((2, 8, 4, 4), (1, 8, 4, 1), (2, 8, 4, 4), (1, 8, 4, 1), constant=(1, 3))
    assert saturate(graph, shipped_patterns())[1].matches
    assert not saturate(graph, shipped_patterns(rank=3))[1].matches, "laws of up to three axes say nothing of four"


def test_a_long_sum_is_put_in_one_order() -> None:
    shapes = [(4, 8), (1, 8)] * 24
    graph = _sum(*shapes, constant=tuple(range(1, 48, 2)))
    _, report = saturate(graph, shipped_patterns(), Limits(nodes=1_000))
    assert report.reason == "saturated"
    assert report.nodes < 250
