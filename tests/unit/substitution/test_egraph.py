"""The e-graph under rewrites: shapes, preconditions, directions, limits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mlc.operators.index import Poly, as_poly, equal
from mlc.operators.tensor import ShapeError
from mlc.substitution.applicable import determined, directions
from mlc.substitution.derive import derivable
from mlc.substitution.egraph import EGraph, ENode, Limits
from mlc.substitution.graph import Graph, Node
from mlc.substitution.rewrite import Rewrite
from mlc.substitution.rule import Rule
from mlc.substitution.terms import INPUT, freeze

M, K, N, P, H, W, C, R, S = map(Poly.symbol, "mknphwcrs")
ASSOCIATE = Rule(
    "associate", {"a": (M, K), "b": (K, N), "c": (N, P)},
    Graph((Node("matmul", ("a", "b")), Node("matmul", ((0, 0), "c"))), ((1, 0),)),
    Graph((Node("matmul", ("b", "c")), Node("matmul", ("a", (0, 0)))), ((1, 0),)))
MERGE = Rule(
    "merge", {"a": (M, K), "b": (K, N), "c": (K, P)},
    Graph((Node("matmul", ("a", "b")), Node("matmul", ("a", "c"))), ((0, 0), (1, 0))),
    Graph((Node("concat", ("b", "c"), {"axis": 1}), Node("matmul", ("a", (0, 0))),
           Node("slice", ((1, 0),), {"axis": 1, "begin": as_poly(0), "end": N}),
           Node("slice", ((1, 0),), {"axis": 1, "begin": N, "end": N + P})), ((2, 0), (3, 0))))
FREE = Rule("free", {"a": (M, K)}, Graph((Node("relu", ("a",)),), ((0, 0),)),
            Graph((Node("relu", ("a",)), Node("slice", ((0, 0),), {"axis": 0, "begin": as_poly(0), "end": N})),
                  ((1, 0),)))


def leaf(graph: EGraph, name: str, *shape: int, constant: bool = False) -> int:
    return graph.leaf(INPUT, freeze(id=name), shape, constant=constant)


def apply(graph: EGraph, rule: Rule, turned: bool = False) -> int:
    """How many matches of a rule there were, each built."""
    rewrite = Rewrite(rule, turned=turned, assumed=True)
    matches = list(rewrite.matches(graph))
    for match in matches:
        rewrite.build(graph, match)
    graph.rebuild()
    return len(matches)


@pytest.mark.parametrize("turned", [False, True])
def test_a_rule_fires_both_ways_and_new_nodes_have_shapes(turned: bool) -> None:
    graph = EGraph()
    a, b, c = (leaf(graph, n, *s) for n, s in {"a": (2, 3), "b": (3, 5), "c": (5, 7)}.items())

    def left() -> int:
        return graph.add("matmul", (), (graph.add("matmul", (), (a, b)), c))

    def right() -> int:
        return graph.add("matmul", (), (a, graph.add("matmul", (), (b, c))))

    root = right() if turned else left()
    assert apply(graph, ASSOCIATE, turned) == 1
    before = len(graph)
    assert graph.find(root) == left() == right()
    assert len(graph) == before  # what was asked for was there
    assert graph.shapes[graph.add("matmul", (), (a, b) if turned else (b, c))] == ((2, 5) if turned else (3, 7))


def test_outputs_are_matched_at_once_and_constants_are_known() -> None:
    graph = EGraph()
    a = leaf(graph, "a", 2, 3)
    b, c = leaf(graph, "b", 3, 4, constant=True), leaf(graph, "c", 3, 5, constant=True)
    first, second = graph.add("matmul", (), (a, b)), graph.add("matmul", (), (a, c))
    assert apply(graph, MERGE) == 4  # each with each
    assert graph.find(first) != graph.find(second)
    joined = graph.add("concat", freeze(axis=1), (b, c))
    wide = graph.add("matmul", (), (a, joined))
    assert graph.shapes[wide] == (2, 9)
    assert graph.nodes[wide] == {ENode("matmul", (a, joined), ()): "merge"}
    assert graph.constant[joined] and not graph.constant[wide]
    assert graph.nodes[graph.find(second)][ENode("slice", (wide,), freeze(axis=1, begin=4, end=9))] == "merge"


@pytest.mark.parametrize("channels, fires", [((4, 4), True), ((4, 6), False)])
def test_the_precondition_is_checked(channels: tuple[int, int], fires: bool) -> None:
    first, second = Poly.symbol("o1"), Poly.symbol("o2")
    rule = Rule(
        "grouped", {"x": (N, C, H, W), "y": (N, C, H, W), "v": (first, C, R, S), "w": (second, C, R, S)},
        Graph((Node("conv2d", ("x", "v")), Node("conv2d", ("y", "w")), Node("concat", ((0, 0), (1, 0)), {"axis": 1})),
              ((2, 0),)),
        Graph((Node("concat", ("x", "y"), {"axis": 1}), Node("concat", ("v", "w"), {"axis": 0}),
               Node("conv2d", ((0, 0), (1, 0)), {"groups": 2})), ((2, 0),)),
        (equal(first, second),))
    graph = EGraph()
    x, y = leaf(graph, "x", 1, 3, 8, 9), leaf(graph, "y", 1, 3, 8, 9)
    v, w = leaf(graph, "v", channels[0], 3, 3, 3), leaf(graph, "w", channels[1], 3, 3, 3)
    plain = freeze(**Node("conv2d", ()).completed)
    both = graph.add("concat", freeze(axis=1), (graph.add("conv2d", plain, (x, v)), graph.add("conv2d", plain, (y, w))))
    assert apply(graph, rule) == fires
    grouped = [dict(node.attributes)["groups"] for node in graph.nodes[graph.find(both)] if node.op == "conv2d"]
    assert set(grouped) == ({2} if fires else set())


@pytest.mark.parametrize("size, fires", [(6, True), (7, False)])
def test_sizes_are_solved_for_and_must_divide(size: int, fires: bool) -> None:
    rule = Rule(
        "halves", {"x": (2 * N,)}, Graph((Node("relu", ("x",)),), ((0, 0),)),
        Graph((Node("relu", ("x",)), Node("slice", ((0, 0),), {"axis": 0, "begin": as_poly(0), "end": N}),
               Node("slice", ((0, 0),), {"axis": 0, "begin": N, "end": 2 * N}),
               Node("concat", ((1, 0), (2, 0)), {"axis": 0})), ((3, 0),)))
    assert list(directions(rule)) == [False, True]
    graph = EGraph()
    root = graph.add("relu", (), (leaf(graph, "x", size),))
    assert apply(graph, rule) == fires
    assert any(node.op == "concat" for node in graph.nodes[graph.find(root)]) == fires


@pytest.mark.parametrize("padding, other", [("same", (1, 0, 1, 1)), ("valid", (0, 0, 0, 0))])
def test_equal_paddings_are_one_class(padding: str, other: tuple[int, ...]) -> None:
    for given in ((padding, other), (other, padding)):
        graph = EGraph()
        x, w = leaf(graph, "x", 2, 3, 9, 10), leaf(graph, "w", 8, 3, 3, 3)
        one, two = (graph.add("conv2d", _strided(each), (x, w)) for each in given)
        graph.rebuild()
        assert graph.find(one) == graph.find(two)
        assert {dict(node.attributes)["padding"] for node in graph.nodes[graph.find(one)]} >= {other}


def _strided(padding: Any) -> Any:
    return freeze(padding=padding, stride=(2, 2), dilation=(1, 1), groups=1)


def test_operands_are_exchanged_only_where_that_is_a_law() -> None:
    law = Rule("law", {"a": (M, K), "b": (M, K)}, Graph((Node("add", ("a", "b")),), ((0, 0),)),
               Graph((Node("add", ("b", "a")),), ((0, 0),)))
    assert derivable([], [law]) == [False]
    assert derivable([law], [law]) == [True]
    for commutative, classes in (((), 2), (("add",), 1)):
        graph = EGraph(commutative=commutative)
        x, y = leaf(graph, "x", 2, 3), leaf(graph, "y", 2, 3)
        assert len({graph.add("add", (), (x, y)), graph.add("add", (), (y, x))}) == classes


def test_limits_stop_a_derivation() -> None:
    """Of five products in a row from the left, two steps on each side make what those from the right come to."""
    shapes = {"a": (M, K), "b": (K, N), "c": (N, P), "d": (P, R), "e": (R, S)}
    left = [Node("matmul", ("a", "b")), *(Node("matmul", ((place, 0), name)) for place, name in enumerate("cde"))]
    right = [Node("matmul", ("d", "e")), *(Node("matmul", (name, (place, 0))) for place, name in enumerate("cba"))]
    goal = Rule("goal", shapes, *(Graph(tuple(side), ((3, 0),)) for side in (left, right)))
    assert derivable([ASSOCIATE], [goal]) == [True]
    for limits in (Limits(rounds=1), Limits(nodes=14), Limits(work=4), Limits(seconds=0.0)):
        assert derivable([ASSOCIATE], [goal], limits) == [False]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="the rule associate has no certificate"):
        Rewrite(ASSOCIATE)
    unbound = Rule("unbound", {"a": (M, K), "z": (M, K)}, Graph((Node("relu", ("a",)),), ((0, 0),)),
                   Graph((Node("add", ("a", "z")),), ((0, 0),)))
    assert list(directions(unbound)) == [True]
    assert not determined(FREE)
    assert list(directions(FREE)) == [True]
    graph = EGraph()
    with pytest.raises(ShapeError):
        graph.add("matmul", (), (leaf(graph, "a", 2, 3), leaf(graph, "b", 4, 5)))


def test_an_operand_may_be_merged_with_what_reads_it() -> None:
    """Equal operands make both sums one, of which one is an operand of both."""
    graph = EGraph()
    z, p, r, q = (leaf(graph, name, 2) for name in "zprq")
    graph.merge(z, graph.add("add", (), (p, q)))
    graph.merge(q, graph.add("add", (), (r, q)))
    graph.rebuild()
    graph.merge(p, r)
    graph.rebuild()
    assert graph.find(q) == graph.find(z) and graph.add("add", (), (r, z)) == graph.find(z)
