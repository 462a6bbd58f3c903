"""Equality saturation: shapes, preconditions at the premises, limits, and what is refused."""

from __future__ import annotations

import pytest

from mlc.operators.index import Poly, as_poly, equal
from mlc.operators.tensor import ShapeError
from mlc.substitution.egraph import EGraph, Limits
from mlc.substitution.graph import Graph, Node
from mlc.substitution.rule import Rule

M, K, N, P, H, W, C, R, S = map(Poly.symbol, "mknphwcrs")
PROOF = {"method": "given"}
ASSOCIATE = Rule(
    "associate", {"a": (M, K), "b": (K, N), "c": (N, P)},
    Graph((Node("matmul", ("a", "b")), Node("matmul", ((0, 0), "c"))), ((1, 0),)),
    Graph((Node("matmul", ("b", "c")), Node("matmul", ("a", (0, 0)))), ((1, 0),)), certificate=PROOF)
MERGE = Rule(
    "merge", {"a": (M, K), "b": (K, N), "c": (K, P)},
    Graph((Node("matmul", ("a", "b")), Node("matmul", ("a", "c"))), ((0, 0), (1, 0))),
    Graph((Node("concat", ("b", "c"), {"axis": 1}), Node("matmul", ("a", (0, 0))),
           Node("slice", ((1, 0),), {"axis": 1, "begin": as_poly(0), "end": N}),
           Node("slice", ((1, 0),), {"axis": 1, "begin": N, "end": N + P})), ((2, 0), (3, 0))), certificate=PROOF)


def test_a_rule_fires_both_ways_and_new_nodes_have_shapes() -> None:
    graph = EGraph([ASSOCIATE])
    a, b, c = (graph.add_input(n, s) for n, s in {"a": (2, 3), "b": (3, 5), "c": (5, 7)}.items())
    left = graph.add("matmul", (graph.add("matmul", (a, b)), c))
    report = graph.run()
    assert report.reason == "saturated" and report.matches["associate"] >= 1
    bc = graph.add("matmul", (b, c))
    assert graph.equal(left, graph.add("matmul", (a, bc)))
    assert graph.export()[graph.find(bc)].shape == (3, 7)
    again = EGraph([ASSOCIATE])
    a, b, c = (again.add_input(n, s) for n, s in {"a": (2, 3), "b": (3, 5), "c": (5, 7)}.items())
    right = again.add("matmul", (a, again.add("matmul", (b, c))))
    again.run()
    assert again.equal(right, again.add("matmul", (again.add("matmul", (a, b)), c)))


def test_outputs_are_matched_at_once_and_constants_are_known() -> None:
    graph = EGraph([MERGE])
    a = graph.add_input("a", (2, 3))
    b, c = graph.add_input("b", (3, 4), weight=True), graph.add_input("c", (3, 5), weight=True)
    first, second = graph.add("matmul", (a, b)), graph.add("matmul", (a, c))
    graph.run(Limits(grow=1))
    classes = graph.export()
    assert not graph.equal(first, second)
    [wide] = [k for k in classes.values() if k.shape == (2, 9) and k.nodes[0].inputs[1] == graph.find(
        graph.add("concat", (b, c), {"axis": 1}))]
    assert wide.nodes[0].op == "matmul" and wide.nodes[0].rule == "merge" and not wide.weight
    assert classes[wide.nodes[0].inputs[1]].weight
    sliced = [n for n in classes[graph.find(second)].nodes if n.op == "slice" and n.attributes["begin"] == 4]
    assert sliced and sliced[0].attributes == {"axis": 1, "begin": 4, "end": 9}


@pytest.mark.parametrize("channels, fires", [((4, 4), True), ((4, 6), False)])
def test_the_precondition_is_checked(channels: tuple[int, int], fires: bool) -> None:
    first, second = Poly.symbol("o1"), Poly.symbol("o2")
    rule = Rule(
        "grouped", {"x": (N, C, H, W), "y": (N, C, H, W), "v": (first, C, R, S), "w": (second, C, R, S)},
        Graph((Node("conv2d", ("x", "v")), Node("conv2d", ("y", "w")), Node("concat", ((0, 0), (1, 0)), {"axis": 1})),
              ((2, 0),)),
        Graph((Node("concat", ("x", "y"), {"axis": 1}), Node("concat", ("v", "w"), {"axis": 0}),
               Node("conv2d", ((0, 0), (1, 0)), {"groups": 2})), ((2, 0),)),
        (equal(first, second),), PROOF)
    graph = EGraph([rule])
    x, y = graph.add_input("x", (1, 3, 8, 9)), graph.add_input("y", (1, 3, 8, 9))
    v, w = graph.add_input("v", (channels[0], 3, 3, 3)), graph.add_input("w", (channels[1], 3, 3, 3))
    both = graph.add("concat", (graph.add("conv2d", (x, v)), graph.add("conv2d", (y, w))), {"axis": 1})
    graph.run()
    nodes = graph.export()[graph.find(both)].nodes
    assert any(node.op == "conv2d" and node.attributes["groups"] == 2 for node in nodes) == fires


def test_sizes_are_solved_for_and_must_divide() -> None:
    rule = Rule(
        "halves", {"x": (2 * N,)}, Graph((Node("relu", ("x",)),), ((0, 0),)),
        Graph((Node("relu", ("x",)), Node("slice", ((0, 0),), {"axis": 0, "begin": as_poly(0), "end": N}),
               Node("slice", ((0, 0),), {"axis": 0, "begin": N, "end": 2 * N}),
               Node("concat", ((1, 0), (2, 0)), {"axis": 0})), ((3, 0),)), certificate=PROOF)
    for size, fires in ((6, True), (7, False)):
        graph = EGraph([rule])
        y = graph.add("relu", (graph.add_input("x", (size,)),))
        graph.run(Limits(grow=1))
        assert any(node.op == "concat" for node in graph.export()[graph.find(y)].nodes) == fires


def test_equal_paddings_are_one_node() -> None:
    graph = EGraph()
    x, w = graph.add_input("x", (2, 3, 9, 10)), graph.add_input("w", (8, 3, 3, 3))
    same = graph.add("conv2d", (x, w), {"padding": "same", "stride": (2, 2)})
    assert same == graph.add("conv2d", (x, w), {"padding": (1, 0, 1, 1), "stride": (2, 2)})
    assert same.shape == (2, 8, 5, 5)
    assert graph.add("concat", (x, x), {"axis": -1}) == graph.add("concat", (x, x), {"axis": 3})


def test_limits_stop_a_run_without_end() -> None:
    graph = EGraph([MERGE])
    a = graph.add_input("a", (2, 3))
    for place in range(4):
        graph.add("matmul", (a, graph.add_input(f"w{place}", (3, 4 + place))))
    assert graph.run(Limits(grow=9, nodes=500)).reason == "nodes"
    assert graph.run(Limits(seconds=0)).reason in ("seconds", "nodes")


def test_what_is_refused() -> None:
    bare = Rule("bare", ASSOCIATE.shapes, ASSOCIATE.source, ASSOCIATE.target)
    with pytest.raises(ValueError, match="the rule bare has no certificate"):
        EGraph([bare])
    unbound = Rule("unbound", {"a": (M, K), "z": (M, K)}, Graph((Node("relu", ("a",)),), ((0, 0),)),
                   Graph((Node("add", ("a", "z")),), ((0, 0),)), certificate=PROOF)
    with pytest.raises(ValueError, match="the rule unbound reads z, which its source does not"):
        EGraph([unbound])
    free = Rule("free", {"a": (M, K)}, Graph((Node("relu", ("a",)),), ((0, 0),)),
                Graph((Node("relu", ("a",)), Node("slice", ((0, 0),), {"axis": 0, "begin": as_poly(0), "end": N})),
                      ((1, 0),)), certificate=PROOF)
    with pytest.raises(ValueError, match="free does not determine n"):
        EGraph([free])
    graph = EGraph()
    with pytest.raises(ShapeError):
        graph.add("matmul", (graph.add_input("a", (2, 3)), graph.add_input("b", (4, 5))))
