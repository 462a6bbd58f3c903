"""Products of three in the cheap order, and products of what is repeated, which are computed once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from relax_evaluation import weight
from substitution_rules import rule
from test_substitution_reductions import moved
from test_substitution_search import network, prepared
from tvm import relax
from tvm.relax import op

from mlc.graph.substitute.match import repeated
from mlc.graph.substitute.read import read
from mlc.graph.substitute.rule_benefit import Benefit, benefits_of
from mlc.graph.substitute.rules import shipped_patterns
from mlc.graph.substitute.saturate import saturate
from mlc.graph.substitute.sums import shared
from mlc.substitution.egraph import EGraph
from mlc.substitution.terms import CONSTANT, INPUT, TermBuilder, TermGraph

Emit = Callable[..., relax.Expr]
KEYS, DEPTH = 256, 16


def multiplications(graph: TermGraph) -> int:
    """Of the products of matrices and the convolutions by single elements of run time."""
    constant = graph.constant_places()
    return sum(
        math.prod(term.shape) * graph.terms[term.inputs[0]].shape[-1 if term.op == "matmul" else 1]
        for place, term in enumerate(graph.terms) if term.op in ("matmul", "conv2d") and place not in constant)


def _rows(emit: Emit, x: relax.Var) -> relax.Expr:
    """A positive number for each row."""
    return emit(op.add(emit(op.abs(emit(op.sum(x, axis=[-1], keepdims=True)))), relax.const(1.0)))


BETWEEN: dict[str, Callable[[Emit, relax.Expr, relax.Var], relax.Expr]] = {
    "nothing": lambda emit, y, x: y,
    "a scale": lambda emit, y, x: emit(op.multiply(y, relax.const(0.25))),
    "a scale of rows": lambda emit, y, x: emit(op.multiply(y, _rows(emit, x))),
    "a quotient of rows": lambda emit, y, x: emit(op.divide(y, _rows(emit, x))),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
def test_scores_of_all_pairs_are_not_computed(between: str, batch: tuple[int, ...]) -> None:
    """Attention without a softmax: keys times values are small."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        k, v = (emit(op.matmul(x, weight(*batch, DEPTH, DEPTH))) for _ in range(2))
        turned = emit(op.permute_dims(k, [*range(len(batch)), len(batch) + 1, len(batch)]))
        y = BETWEEN[between](emit, emit(op.matmul(x, turned)), x)
        return emit(op.matmul(y, v))

    own, best = moved(body, (*batch, KEYS, DEPTH))
    assert multiplications(best.graph) < 0.3 * multiplications(own.graph)


def test_an_order_that_is_no_cheaper_stays() -> None:
    """The low rank comes first as it is; all at once would be a product of two full matrices."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        low = emit(op.matmul(x, emit(op.permute_dims(x, [1, 0]))))
        return emit(op.matmul(low, emit(op.nn.relu(x))))

    graph = read(prepared(network({"x": (4, 64)}, body))["main"]).graph
    choices, report = saturate(graph, [each for each in shipped_patterns()
                                       if Benefit.CHEAPER in each.benefits.values()])
    assert not report.matches and len(choices.original) == len(graph.terms)


def _repeats(shape: tuple[int, ...], whole: tuple[int, ...], axis: int, first: bool) -> Emit:
    """A layer of rows with the mean of all of them beside each."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        spread = emit(op.broadcast_to(emit(op.mean(x, axis=[0 if len(shape) == 2 else 1], keepdims=True)), whole))
        y = emit(op.concat([spread, x] if first else [x, spread], axis=axis))
        y = emit(op.matmul(y, weight(2 * shape[-1], 64)))
        return emit(op.nn.relu(emit(op.add(y, weight(64)))))

    return body


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("batch", [(), (1,)], ids=["rows", "a batch of one"])
def test_what_is_beside_every_row_is_multiplied_once(batch: tuple[int, ...], first: bool) -> None:
    shape = (*batch, 512, 64)
    own, best = moved(_repeats(shape, shape, len(shape) - 1, first), shape)
    assert multiplications(best.graph) < 0.6 * multiplications(own.graph)


def test_what_is_beside_every_place_is_convolved_once() -> None:
    """The largest of each channel beside all places, as networks that segment points have it."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        spread = emit(op.broadcast_to(emit(op.max(x, axis=[2], keepdims=True)), (2, 64, 256)))
        y = emit(op.reshape(emit(op.concat([spread, x], axis=1)), (2, 128, 1, 256)))
        return emit(op.nn.relu(emit(op.nn.conv2d(y, weight(64, 128, 1, 1)))))

    own, best = moved(body, (2, 64, 256))
    assert multiplications(best.graph) < 0.6 * multiplications(own.graph)


def test_parts_of_which_none_is_repeated_stay_together() -> None:
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        both = emit(op.concat([x, emit(op.nn.relu(x))], axis=1))
        spread = emit(op.broadcast_to(emit(op.mean(x, axis=[0], keepdims=True)), (32, 16)))
        return emit(op.add(emit(op.matmul(both, weight(32, 16))), emit(op.matmul(spread, weight(16, 16)))))

    graph = read(prepared(network({"x": (32, 16)}, body))["main"]).graph
    apart = [each for each in shipped_patterns() if each.benefit is Benefit.APART]
    assert apart and not saturate(graph, apart)[1].matches


def test_what_was_repeated_is_seen_through_views_of_itself() -> None:
    """Classes may hold reshapes of each other; the walk ends."""
    graph = EGraph()
    x = graph.leaf("input", (("id", 0),), (1, 4))
    spread = graph.add("expand", (("shape", (3, 4)),), (x,))
    flat = graph.add("reshape", (("shape", (12,)),), (spread,))
    back = graph.add("reshape", (("shape", (3, 4)),), (flat,))
    graph.merge(spread, back)
    graph.rebuild()
    assert repeated(graph, flat) and repeated(graph, spread) and not repeated(graph, x)


def test_rules_of_orders_and_of_what_is_repeated_are_of_use() -> None:
    apart = rule("apart", "a[m,i] b[m,j] c[i+j,n]", "matmul(concat(a, b, axis=1), c)",
                 "add(matmul(a, slice(c, axis=0, begin=0, end=i)), matmul(b, slice(c, axis=0, begin=i, end=i+j)))")
    assert benefits_of(apart)[frozenset()] is Benefit.APART
    once = rule("once", "a[1,k] b[k,n]", "matmul(expand(a, shape=(m,k)), b)", "expand(matmul(a, b), shape=(m,n))")
    assert benefits_of(once) == {frozenset(): Benefit.SMALLER}
    assert benefits_of(once.turned) == {frozenset("a"): Benefit.SHORTER}  # a constant that is repeated is one
    view = rule("view", "a[1,1,k]", "reshape(expand(a, shape=(1,m,k)), shape=(m,k))",
                "expand(reshape(a, shape=(1,k)), shape=(m,k))")
    assert benefits_of(view) == {frozenset(): Benefit.SMALLER} and benefits_of(view.turned) == {}
    cut = rule("cut", "a[m,k] b[k,n+l]", "slice(matmul(a, b), axis=1, begin=0, end=n)",
               "matmul(a, slice(b, axis=1, begin=0, end=n))")
    assert Benefit.CHEAPER not in benefits_of(cut).values()


@pytest.mark.parametrize(("terms", "groups"), [(20, 1), (5000, 0)])
def test_sums_of_thousands_of_terms_stay_in_their_order(terms: int, groups: int) -> None:
    """They would be read one within the other, as deep as Python goes."""
    builder = TermBuilder()
    x = builder.add(INPUT, (), (4, 4), id=0)
    whole = x
    for each in range(terms):
        product = builder.add("matmul", (x, builder.add(CONSTANT, (), (4, 4), id=each)), (4, 4))
        whole = builder.add("add", (whole, product), (4, 4))
    assert len(shared(builder.graph([whole]))) == groups
