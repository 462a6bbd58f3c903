"""The generator: what fingerprints tell apart, the most general sizes, conditions, and a small run end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlc.operators.index import Poly
from mlc.substitution.abstract import abstracted, law_text
from mlc.substitution.candidates import NearMiss, candidate, in_context, joined
from mlc.substitution.codec import graph_text
from mlc.substitution.derive import derivable
from mlc.substitution.enumerate import Counts, Term, _Below, pairs, term_graph
from mlc.substitution.family import Family, Step
from mlc.substitution.fingerprint import agree, assignments
from mlc.substitution.generate import Generation, generate
from mlc.substitution.graph import Graph, Node
from mlc.substitution.publish import write_library
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import read_rules
from mlc.substitution.space import FAMILIES, UNIFORM
from mlc.substitution.unify import generalise, merged_sizes

A, B, C, D = map(Poly.symbol, "abcd")


def _family(*names: str) -> tuple[Family, ...]:
    return tuple(family for family in FAMILIES if family.name in names)


@pytest.fixture(scope="module")
def made() -> Generation:
    """A small run: products, and what they need of concatenations."""
    return generate(_family("elementwise", "join", "slice", "undo", "join-products", "enlarge", "scale"))


def _texts(made: Generation) -> set[str]:
    return {f"{graph_text(r.source)} = {graph_text(r.target)}" for r in made.rules}


def _rule(source: Graph, target: Graph, **shapes: tuple[Poly, ...]) -> Rule:
    return Rule("test", shapes, source, target)


@pytest.mark.parametrize("target, right", [
    (Graph((Node("matmul", ("y", "x")),), ((0, 0),)), False),
    (Graph((Node("matmul", ("x", "y")), Node("transpose", ((0, 0),), {"perm": (1, 0)})), ((1, 0),)), False),
    (Graph((Node("transpose", ("y",), {"perm": (1, 0)}), Node("transpose", ("x",), {"perm": (1, 0)}),
            Node("matmul", ((0, 0), (1, 0))), Node("transpose", ((2, 0),), {"perm": (1, 0)})), ((3, 0),)), True),
])
def test_fingerprints_tell_wrong_pairs_apart(target: Graph, right: bool) -> None:
    rule = _rule(Graph((Node("matmul", ("x", "y")),), ((0, 0),)), target, x=(A, A), y=(A, A))
    sizes = [s for s in assignments(rule, 8) if s["a"] > 1]
    assert sizes and all(agree(rule, s) == right for s in sizes)


def test_a_rule_that_holds_only_at_equal_sizes_is_seen_at_distinct_ones() -> None:
    concat = Graph((Node("concat", ("x", "y"), {"axis": 0}), Node("slice", ((0, 0),), {"axis": 0, "begin": A,
                                                                                      "end": A + B})), ((1, 0),))
    other = Graph((Node("concat", ("x", "y"), {"axis": 0}), Node("slice", ((0, 0),), {"axis": 0, "begin": B,
                                                                                     "end": A + B})), ((1, 0),))
    rule = _rule(concat, other, x=(A,), y=(B,))
    verdicts = {s["a"] == s["b"]: agree(rule, s) for s in assignments(rule, 12)}
    assert verdicts == {True: True, False: False}


def test_assignments_differ_and_meet_the_conditions() -> None:
    rule = replace(_rule(Graph((Node("add", ("x", "y")),), ((0, 0),)), Graph((Node("add", ("y", "x")),), ((0, 0),)),
                         x=(A, B), y=(A, B)), conditions=())
    found = [tuple(s.values()) for s in assignments(rule, 10)]
    assert len(set(found)) == 10 and any(a != b for a, b in found)


def test_unification_finds_the_most_general_sizes() -> None:
    source = Graph((Node("matmul", ("x", "y")), Node("add", ((0, 0), "z"))), ((1, 0),))
    target = Graph((Node("matmul", ("x", "y")), Node("add", ("z", (0, 0)))), ((1, 0),))
    one = {n: (Poly.symbol(f"m_{n}"), Poly.symbol(f"k_{n}")) for n in "xyz"}
    found = generalise(_rule(source, target, **one))
    assert found is not None and len(found.symbols) == 3
    assert found.shapes["x"][1] == found.shapes["y"][0] and found.shapes["x"][0] == found.shapes["z"][0]
    wrong = Graph((Node("transpose", ("x",), {"perm": (1, 0)}),), ((0, 0),))
    square = generalise(_rule(Graph((Node("relu", ("x",)),), ((0, 0),)), wrong, x=one["x"]))
    assert square is not None and square.shapes["x"][0] == square.shapes["x"][1]
    ranks = Graph((Node("sum", ("x",), {"axes": (0,)}),), ((0, 0),))
    assert generalise(_rule(Graph((Node("relu", ("x",)),), ((0, 0),)), ranks, x=one["x"])) is None


def test_a_sum_of_sizes_that_nothing_divides_is_one_size() -> None:
    rule = _rule(Graph((Node("add", ("x", "y")),), ((0, 0),)), Graph((Node("add", ("y", "x")),), ((0, 0),)),
                 x=(A + B,), y=(A + B,))
    assert len(merged_sizes(rule).symbols) == 1
    cut = replace(rule, source=Graph((Node("slice", ("x",), {"axis": 0, "begin": 0, "end": A}),), ((0, 0),)))
    assert merged_sizes(cut).symbols == ("a", "b")


def test_one_representative_for_each_value() -> None:
    [family] = _family("elementwise")
    counts = Counts()
    found = list(pairs(family, counts))
    assert counts.graphs == counts.values + len(found)
    assert all((one.value == other.value).all() for one, other in found)


def test_graphs_are_all_that_there_are() -> None:
    """Against combinations tried one by one: operands with shared parts count these once."""
    [family] = _family("slice")
    terms = [term for pair in pairs(replace(family, depth=3), Counts()) for term in pair]
    known = {term.number: term for term in terms}
    while stack := [part for term in known.values() for part in term.operands if part.number not in known]:
        known |= {part.number: part for part in stack}
    levels: list[list[Term]] = [[], [], []]
    for term in sorted(known.values(), key=lambda term: term.number):
        if len(term.nodes) < 3:
            levels[len(term.nodes)].append(term)
    every = [term for level in levels for term in level]
    assert all(levels)
    for total in (0, 1, 2):
        wanted = [(one, other) for one in every for other in every if len(one.nodes | other.nodes) == total]
        assert list(_Below(levels).operands(2, total)) == wanted


def test_instances_of_one_law_are_one_pair() -> None:
    """What both sides compute alike becomes an input; what they need of it does not."""
    family = replace(_family("elementwise")[0], steps=(Step("relu"), Step("tanh"), Step("add")))
    laws: dict[str, tuple[str, ...]] = {}
    for one, other in pairs(family, Counts()):
        within, left, right = abstracted(family, one, other)
        text = law_text(left, right)
        laws.setdefault(text, tuple(graph_text(term_graph(side)) for side in (left, right)))
        assert left.value.shape == right.value.shape and (left.value == right.value).all()
        assert {*left.inputs, *right.inputs} <= set(within.inputs)
    found = [texts for texts in laws.values() if all("add" not in text for text in texts)]
    assert len(found) == 2, "relu(relu(x)) = relu(x), and relu(tanh(x)) = tanh(relu(x))"
    assert sum(text.count("relu") for texts in found for text in texts) == 5


def test_what_is_known_is_not_found_again(tmp_path: Path) -> None:
    family = replace(UNIFORM[-1], depth=2, steps=(Step("relu"), Step("add")), name="uniform-core")
    alone = generate([family])
    assert "relu(relu(a)) = relu(a)" in _texts(alone) and alone.covered[0].laws < alone.covered[0].pairs
    beyond = generate([family], known=alone.rules)
    assert beyond.complete and not beyond.rules and not beyond.quarantined
    write_library(tmp_path, beyond)
    report = json.loads((tmp_path / "generation" / "report.json").read_text())["uniform"]
    assert report["covered"][0]["steps"] == ["relu", "add"] and "matmul" in report["operators_left"]
    assert report["laws"]["found"] == report["laws"]["proved"] == report["laws"]["proved_and_consequences"] == 2
    assert generate(UNIFORM, seconds=0.5).skipped[-1] == UNIFORM[-1].name


def test_a_uniform_search_decides_the_smallest_first_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of sizes do not make two laws of one; what divides by 0 everywhere is none."""
    steps = tuple(Step(op) for op in ("sub", "div", "relu", "reciprocal"))
    family = replace(UNIFORM[0], depth=2, steps=steps, name="uniform-functions")
    every = generate([family, replace(family, name="uniform-again")])
    assert every.states["distinct"] == generate([family]).states["distinct"]
    assert every.complete and every.states["undefined"] and not every.states["quarantined"]
    assert "reciprocal(reciprocal(a)) = a" in _texts(every)
    now, sizes = iter(range(10_000)), list[int]()
    monkeypatch.setattr("mlc.substitution.generate.time.monotonic", lambda: float(next(now)))
    monkeypatch.setattr("mlc.substitution.generate._certified", lambda _made, rule: sizes.append(len(
        (*rule.source.nodes, *rule.target.nodes))))
    left = generate([family], seconds=36)  # a reading of the clock takes one
    write_library(tmp_path, left)
    said = json.loads((tmp_path / "generation" / "report.json").read_text())["uniform"]["laws"]
    assert not left.complete and sizes == sorted(sizes) and len(sizes) + said["undecided"] == said["found"]
    assert 0 < said["undecided"] == sum(said["undecided_by_operators"].values())


def test_a_condition_is_found_where_a_pair_needs_one() -> None:
    sizes = {"n": 3, "c": 2, "h": 4, "w": 4, "o": 2, "k": 3, "l": 3}
    image, kernel = tuple(map(Poly.symbol, "nchw")), tuple(map(Poly.symbol, "ockl"))
    keep = {"padding": (1, 1, 1, 1)}
    steps = (Step("conv2d", keep), Step("conv2d", {**keep, "groups": 2}), Step("concat", {"axis": 1}),
             Step("concat", {"axis": 0}))
    family = Family("grouped", {"x": image, "y": image, "v": kernel, "w": kernel}, steps, 3, sizes,
                    {"conv2d": 2, "concat": 2}, frozenset("vw"))
    results = [candidate(family, one, other) for one, other in pairs(family, Counts())]
    [merged] = [r for r in results if isinstance(r, Rule) and [n.op for n in r.source.nodes] == ["conv2d", "conv2d",
                "concat"] and len(r.shapes) == 4 and r.target.nodes[-1].attributes.get("groups") == 2]
    first, second = (merged.shapes[node.inputs[1]] for node in merged.source.nodes[:2])
    assert first == second, "both filters have as many outputs"


def test_the_library_of_a_small_run(made: Generation) -> None:
    assert made.complete and all(rule.certificate is not None for rule in made.rules)
    texts = _texts(made)
    for wanted in (
        "add(a, b) = add(b, a)",
        "concat(concat(a, b, axis=1), c, axis=1) = concat(a, concat(b, c, axis=1), axis=1)",
        "concat(matmul(a, b), matmul(a, c), axis=2) = matmul(a, concat(b, c, axis=2))",
        "add(matmul(a, b), matmul(c, d)) = matmul(concat(a, c, axis=2), concat(b, d, axis=1))",
        "concat(slice(a, axis=1, begin=0, end=d0), slice(a, axis=1, begin=d0, end=d0+d1), axis=1) = a",
    ):
        assert wanted in texts
    two = [r for r in made.rules if len(r.source.outputs) == 2]
    assert any({n.op for n in r.source.nodes} == {"matmul"} for r in two), "products that share an operand are merged"
    assert any("enlarge" in {n.op for n in r.target.nodes} for r in two), "a filter is enlarged to another's size"


def test_what_follows_is_not_kept(made: Generation) -> None:
    assert made.states["derived"] > 5 * len(made.rules)
    single = [r for r in made.rules if len(r.source.outputs) == 1]
    for place, rule in enumerate(single[:8]):
        assert not derivable(single[:place] + single[place + 1:], [rule])[0]


def test_a_family_keeps_what_others_derive_where_it_says_so() -> None:
    """The mean over one axis of a transposed matrix follows from that over the other by way of two transposes."""
    families = _family("products", "mean-turned-3")
    laws = {f"mean(transpose(a, perm=(0, 2, 1)), axes=({axis}))" for axis in (1, 2)}
    every = {text.partition(" = ")[0] for text in _texts(generate(families))}
    fewest = {text.partition(" = ")[0] for text in _texts(generate([replace(f, derived=False) for f in families]))}
    assert laws <= every and len(laws & fewest) == 1


def test_derivation_needs_the_rules() -> None:
    sums = generate(_family("elementwise")).rules
    source = Graph((Node("add", ("x", "y")), Node("add", ((0, 0), "z"))), ((1, 0),))
    target = Graph((Node("add", ("z", "y")), Node("add", ((0, 0), "x"))), ((1, 0),))
    rule = _rule(source, target, x=(A, B), y=(A, B), z=(A, B))
    wrong = _rule(source, Graph((Node("mul", ("z", "y")), Node("add", ((0, 0), "x"))), ((1, 0),)), **rule.shapes)
    assert derivable(sums, [rule, wrong]) == [True, False]
    assert derivable([], [rule]) == [False]


def test_a_concatenation_of_products_becomes_two_outputs() -> None:
    source = Graph((Node("matmul", ("x", "y")), Node("matmul", ("x", "z")),
                    Node("concat", ((0, 0), (1, 0)), {"axis": 1})), ((2, 0),))
    target = Graph((Node("concat", ("y", "z"), {"axis": 1}), Node("matmul", ("x", (0, 0)))), ((1, 0),))
    rule = joined(_rule(source, target, x=(A, B), y=(B, C), z=(B, D)))
    assert rule is not None and len(rule.source.outputs) == 2
    assert [n.op for n in rule.target.nodes] == ["concat", "matmul", "slice", "slice"]
    relu = Graph((Node("relu", ("x",)), Node("relu", ("y",)), Node("concat", ((0, 0), (1, 0)), {"axis": 0})), ((2, 0),))
    apart = Graph((Node("concat", ("x", "y"), {"axis": 0}), Node("relu", ((0, 0),))), ((1, 0),))
    assert joined(_rule(relu, apart, x=(A,), y=(B,))) is None, "only products gain from it"
    assert in_context(rule) is None


def test_time_is_kept_and_an_unfinished_run_says_so() -> None:
    made = generate(FAMILIES, seconds=1.0)
    assert not made.complete and made.seconds < 8


def test_the_library_is_written_and_read(made: Generation, tmp_path: Path) -> None:
    write_library(tmp_path, made)
    rules = read_rules(tmp_path)
    assert {r.name for r in rules} == {r.name for r in made.rules} and all(r.certificate for r in rules)
    report = json.loads((tmp_path / "generation" / "report.json").read_text())
    assert report["states"]["proved"] >= len(rules)
    assert {"source", "target", "inputs", "differs_at"} == set(report["near_misses"][0])


def test_near_misses_say_where_they_differ(made: Generation) -> None:
    assert made.near and all(isinstance(miss, NearMiss) for miss in made.near)
    assert any(miss.sizes for miss in made.near) or all(miss.sizes is None for miss in made.near)
