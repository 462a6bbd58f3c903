"""Near misses: where they differ, the parts that correct it, and that what comes of it are the shipped rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlc.operators.index import Poly, as_poly
from mlc.substitution.codec import dump_rule, graph_text
from mlc.substitution.compose import with_sizes
from mlc.substitution.corrected import corrected, corrected_rules
from mlc.substitution.enumerate import Counts
from mlc.substitution.family import Family
from mlc.substitution.generate import generate
from mlc.substitution.graph import Graph, Node
from mlc.substitution.near import slabs
from mlc.substitution.prove import Undecided, prove
from mlc.substitution.refute import at_sizes, draw_sizes, find_counterexample, run
from mlc.substitution.regions import NoPart, cut, part
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules
from mlc.substitution.space import FAMILIES

[BESIDE, WINDOWS] = [family for family in FAMILIES if family.near]
P, N, W = map(Poly.symbol, ("p0", "n0", "w0"))


def shipped(family: Family) -> Rule:
    [found] = [rule for rule in shipped_rules() if rule.name.startswith(f"{family.name}/")]
    return found


def test_the_generator_finds_and_proves_the_shipped_rule_of_a_batch_folded_into_space() -> None:
    made = generate([BESIDE])
    assert list(map(dump_rule, made.rules)) == [dump_rule(shipped(BESIDE))]


def test_a_near_miss_of_means_of_windows_becomes_the_shipped_rule() -> None:
    """All of two axes: edges above and on the left. Its proof, which takes long, is the shipped one."""
    [(near, rule)] = corrected_rules(WINDOWS, Counts())
    whole = shipped(WINDOWS)
    assert rule is not None and rule == replace(whole, name=rule.name)
    found = slabs(near)
    assert found is not None and list(map(str, found.before + found.behind)) == list("00110000")
    assert find_counterexample(near) is not None and find_counterexample(rule) is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_correction_that_is_one_short_is_no_rule(side: str) -> None:
    """Windows of five, where two columns differ on each side: one column is computed anew, and one more is cut of
    the images side by side."""
    whole = with_sizes(shipped(BESIDE), {"p2": as_poly(2), "p3": as_poly(2)})
    assert find_counterexample(whole) is None
    moved = {"left": (("end", as_poly(4), -1), ("begin", as_poly(2), -1)),
             "right": (("begin", W - 4, 1), ("end", W - 2, 1))}[side]
    nodes = [Node(n.op, n.inputs, {k: next((v + by for name, at, by in moved if (k, v) == (name, at)), v)
                                   for k, v in n.attributes.items()} if n.op == "slice" else n.attributes)
             for n in whole.target.nodes]
    wrong = replace(whole, target=Graph(tuple(nodes), whole.target.outputs))
    found = find_counterexample(wrong)
    assert found is not None and found.reason.startswith("output 0 at")
    assert isinstance(prove(wrong, refute=False), Undecided)


def test_graphs_that_agree_nowhere_or_everywhere_are_no_near_misses() -> None:
    shapes = {"a": (N, W)}
    same = Rule("same", shapes, Graph((Node("neg", ("a",)),), ((0, 0),)), Graph((Node("neg", ("a",)),), ((0, 0),)))
    apart = replace(same, target=Graph((Node("relu", ("a",)),), ((0, 0),)))
    assert slabs(same) is None and slabs(apart) is None and corrected(apart) is None


def _conv(x: object, w: object, padding: tuple[Poly | int, ...], stride: int = 1) -> Node:
    return Node("conv2d", (x, w), {"stride": (stride, stride), "padding": padding, "dilation": (1, 1),  # type: ignore[arg-type]
                                   "groups": 1})


PARTS = {
    "convolution": Graph((_conv("x", "w", (P, P, P, P)), Node("relu", ((0, 0),))), ((1, 0),)),
    "stride and mean": Graph((_conv("x", "w", (1, 1, 1, 1), 2),
                              Node("avg_pool2d", ((0, 0),), {"kernel": (2, 3), "stride": (1, 1),
                                                             "padding": (1, 1, 0, 2), "count_include_pad": 1})),
                             ((1, 0),)),
    "largest of turned": Graph((Node("transpose", ("x",), {"perm": (1, 0, 3, 2)}),
                                Node("max_pool2d", ((0, 0),), {"kernel": (3, 3), "stride": (1, 1),
                                                               "padding": (1, 1, 1, 1)})), ((1, 0),)),
    "bias": Graph((_conv("x", "w", (0, 1, 0, 1)), Node("add", ((0, 0), "s"))), ((1, 0),)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_what_is_cut_of_the_whole(name: str) -> None:
    graph = PARTS[name]
    sizes = {"p0": 1}
    shapes = {"x": tuple(map(as_poly, (2, 3, 9, 11))), "w": tuple(map(as_poly, (4, 3, 3, 3))),
              "s": tuple(map(as_poly, (1, 4, 1, 1)))}
    rng = np.random.default_rng(0)
    values = {key: rng.standard_normal([int(s.constant or 0) for s in shape]) for key, shape in shapes.items()}
    for low, high in ((0, 2), (1, 3), (2, 4)):
        ends = (as_poly(low), as_poly(high))
        for box in ((None, None, ends, None), (None, None, None, ends), ((as_poly(1), as_poly(2)), None, ends, ends),
                    (None, (as_poly(1), as_poly(2)), ends, None)):
            nodes: list[Node] = []
            made = Graph((), (part(nodes, graph, shapes, box, [sizes]),))
            whole = list(graph.nodes)
            other = Graph((), (cut(whole, graph.outputs[0], box),))
            results = [run(at_sizes(Rule("", {}, Graph(tuple(n), g.outputs), Graph((), ())), sizes).source, values)
                       for n, g in ((nodes, made), (whole, other))]
            np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-12)


def test_what_nothing_is_known_of_has_no_part() -> None:
    graph = Graph((Node("softmax", ("x",), {"axis": 1}),), ((0, 0),))
    with pytest.raises(NoPart, match="a part of softmax"):
        part([], graph, {"x": (N, W)}, ((as_poly(0), as_poly(1)), None), [{"n0": 2, "w0": 3}])


def test_rules_with_corrections_hold_at_sizes_where_all_is_edge() -> None:
    """The smallest that they admit: one element is left between the edges."""
    whole = shipped(BESIDE)
    small = [sizes for sizes in draw_sizes(whole, 200) if sizes["w0"] == 1 + sizes["p2"] + sizes["p3"]]
    assert small and "concat" in graph_text(whole.target)
    for sizes in small[:5]:
        solved = at_sizes(whole, sizes)
        rng = np.random.default_rng(1)
        values = {n: rng.standard_normal([int(s.constant or 0) for s in shape]) for n, shape in solved.shapes.items()}
        [one], [other] = run(solved.source, values), run(solved.target, values)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
