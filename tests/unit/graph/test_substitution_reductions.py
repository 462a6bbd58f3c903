"""Sums, means and largest elements that are taken before what is linear, or grows, rather than after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from relax_evaluation import assert_same_values, weight
from substitution_rules import rule
from test_substitution_search import CPU, network, prepared
from tvm import relax
from tvm.relax import op

from mlc.graph.substitute.check import difference, identical
from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.gain_bound import gain_bound
from mlc.graph.substitute.read import read
from mlc.graph.substitute.rule_benefit import Benefit, benefits_of
from mlc.graph.substitute.rules import shipped_patterns
from mlc.graph.substitute.search import Candidate, Options, search
from mlc.substitution.terms import TermGraph

Emit = Callable[..., relax.Expr]
#: a batch of sets of rows
SHAPE = BATCH, ROWS, WIDTH = (4, 96, 64)


def pooled(reduce: Callable[..., relax.Expr], last: str = "", bias: bool = True) -> Emit:
    """Two layers of every row, what is taken of the rows, and a layer of that: an encoder of sets."""

    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        for function in ("relu", last):
            x = emit(op.matmul(x, weight(WIDTH, WIDTH)))
            x = emit(op.add(x, weight(WIDTH))) if bias else x
            x = emit(getattr(op.nn, function)(x)) if function else x
        x = emit(reduce(x, axis=[1]))
        return emit(op.matmul(x, weight(WIDTH, WIDTH)))

    return body


def rows(graph: TermGraph) -> list[int]:
    """How many rows each product of run time has."""
    constant = graph.constant_places()
    return sorted(term.shape[-2] for place, term in enumerate(graph.terms)
                  if term.op == "matmul" and place not in constant)


@pytest.mark.parametrize("body", [
    pooled(op.mean), pooled(op.sum, bias=False), pooled(op.mean, bias=False),
], ids=["mean", "sum", "no bias"])
def test_layer_before_a_mean_is_computed_of_the_mean(body: Emit) -> None:
    own, best = moved(body, SHAPE)
    assert rows(own.graph).count(BATCH * ROWS) == 2 and rows(best.graph).count(BATCH * ROWS) == 1


@pytest.mark.parametrize("reduce", [op.mean, op.sum])
def test_an_axis_that_stays_is_no_obstacle(reduce: Callable[..., relax.Expr]) -> None:
    """The row that is left is added to all rows."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        y = emit(op.nn.relu(emit(op.matmul(x, weight(WIDTH, WIDTH)))))
        y = emit(op.matmul(y, weight(WIDTH, WIDTH)))
        y = emit(op.multiply(y, weight(WIDTH)) if reduce is op.sum else op.add(y, weight(WIDTH)))
        return emit(op.add(x, emit(reduce(y, axis=[1], keepdims=True))))

    own, best = moved(body, SHAPE)
    assert rows(own.graph).count(BATCH * ROWS) == 2 and rows(best.graph).count(BATCH * ROWS) == 1


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("reduce", [op.mean, op.sum])
def test_pooling_comes_before_a_convolution_by_single_elements(
    reduce: Callable[..., relax.Expr], keepdims: bool
) -> None:
    """A classifier of every place of an image, whose scores are pooled."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        y = emit(op.nn.relu(emit(op.nn.conv2d(x, weight(64, 16, 3, 3), padding=[1, 1, 1, 1]))))
        y = emit(op.nn.conv2d(y, weight(96, 64, 1, 1)))
        y = emit(op.add(y, weight(1, 96, 1, 1))) if reduce is op.mean else y
        return emit(reduce(y, axis=[2, 3], keepdims=keepdims))

    own, best = moved(body, (2, 16, 14, 14))
    places = [sorted(term.shape[-1] for term in each.graph.terms if term.op == "conv2d") for each in (own, best)]
    assert places == [[14, 14], [1, 14]]


def moved(body: Emit, shape: tuple[int, ...]) -> tuple[Candidate, Candidate]:
    """A network's own graph and the cheapest that was found, equal, and at most as cheap as was promised."""
    mod = prepared(network({"x": shape}, body))
    reading = read(mod["main"])
    found = search(mod, shipped_patterns(), CPU.tvm, Options(), reading=reading)
    own, best = found.candidates[:2]
    assert difference(best.graph, own.graph) < 1e-9 and identical(best.graph, own.graph)
    assert_same_values(found.module(own), found.module(best), 1e-4)
    costs = Costs(CPU.tvm, sum(array.nbytes for array in reading.constants))
    gained = 1.0 - best.estimate / own.estimate
    assert gain_bound(reading.graph.live(), shipped_patterns(), costs) >= gained > 0.05
    return own, best


@pytest.mark.parametrize("body", [pooled(op.mean, last="relu"), pooled(op.max)], ids=["relu", "max"])
def test_nothing_is_promised_where_a_layer_cannot_be_moved(body: Emit) -> None:
    """Products are moved before neither a mean of relu nor the largest of rows."""
    mod = prepared(network({"x": SHAPE}, body))
    found = search(mod, shipped_patterns(), CPU.tvm, Options())
    assert all(rows(each.graph).count(BATCH * ROWS) == 2 for each in found.candidates)


def test_rules_that_reduce_earlier_are_of_use() -> None:
    layer = rule("layer", "a[m,k] b[k,n]", "mean(matmul(a, b), axes=(0,), keepdims=1)",
                 "matmul(mean(a, axes=(0,), keepdims=1), b)")
    assert benefits_of(layer) == {frozenset(): Benefit.SMALLER}
    assert benefits_of(layer.turned) == {}
    grows = rule("grows", "a[m,k]", "max(relu(a), axes=(1,))", "relu(max(a, axes=(1,)))")
    assert benefits_of(grows) == {frozenset(): Benefit.SMALLER}
    linear = rule("linear", "a[m,k] b[m,k]", "add(sum(a, axes=(1,)), sum(b, axes=(1,)))", "sum(add(a, b), axes=(1,))")
    assert benefits_of(linear) == {frozenset(): Benefit.SHORTER}
    # the sum of a constant is one
    assert benefits_of(linear.turned) == {frozenset("a"): Benefit.SMALLER, frozenset("b"): Benefit.SMALLER}
