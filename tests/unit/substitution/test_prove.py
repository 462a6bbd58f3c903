"""Families of rules that are proved, their wrong neighbours, and 1,000 mutants of which none is."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from mlc.operators.index import Condition, Poly, equal
from mlc.operators.scalar import Read
from mlc.substitution import goal_merge
from mlc.substitution.check import check
from mlc.substitution.codec import RuleError, dump_rule, load_rule, parse_condition, parse_size
from mlc.substitution.conditions import strengthen, synthesise
from mlc.substitution.normal import Term
from mlc.substitution.prove import Proved, Refuted, certified, prove
from mlc.substitution.refute import find_counterexample, judge
from tests.unit.substitution.mutants import mutants
from tests.unit.substitution.small_rules import rule as law

FAMILIES = {r["name"]: r for r in json.loads((Path(__file__).parent / "families.json").read_text())["rules"]}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family_is_proved_and_checked(name):
    rule = certified(load_rule(FAMILIES[name]))
    check(json.loads(json.dumps(dump_rule(rule))))
    assert find_counterexample(rule, tries=8) is None


def changed(name, side, node, **attributes):
    """The family's rule with attributes of a node replaced, or its inputs by ``inputs``."""
    rule = json.loads(json.dumps(FAMILIES[name]))
    inputs = attributes.pop("inputs", None)
    rule[side]["nodes"][node]["attributes"].update(attributes)
    if inputs:
        rule[side]["nodes"][node]["inputs"] = inputs
    return rule


WRONG = {
    "products in the other order": changed("assoc", "target", 1, inputs=["%0", "a"]),
    "weights joined the other way round": changed("mm-cat", "target", 0, inputs=["c", "b"]),
    "inputs joined the other way round": changed("k-cat", "target", 0, inputs=["c", "a"]),
    "filters joined the other way round": changed("conv-cat", "target", 0, inputs=["v", "u"]),
    "another group count": changed("groups-cat", "target", 2, groups=1),
    "a filter enlarged off centre": changed("enlarge", "target", 0, kernel=[4, 4]),
    "blocks off the diagonal": changed("group-dense-2", "target", 0, before=[0, "c", 0, 0], after=[0, 0, 0, 0]),
    "groups merged without blocks": changed("group-merge", "target", 7, groups="2*g"),
    "batch norm folded with another stride": changed("batchnorm", "target", 6, stride=[2, 2]),
    "a product of transposes in order": changed("mmT", "target", 2, inputs=["%1", "%0"]),
    "a transpose that is not undone": changed("TT", "source", 1, perm=[1, 2, 0]),
    "a slice of the other part": changed("cat-slice", "source", 1, begin=0, end="l"),
    "a maximum over other windows": changed("maxpool-cat", "target", 1, stride=[1, 1]),
    "padding counted": changed("avgpool-cat", "target", 1, count_include_pad=1),
    "an identity kernel with a stride": changed("identity-kernel", "source", 1, stride=[2, 2]),
    "softmax along the joined axis": changed("softmax-cat0", "target", 1, axis=0),
    "the filter of a transposed convolution left alone": changed("tconv", "target", 1, perm=[0, 1, 2, 3]),
    "heads not moved back": changed("headsplit", "source", 2, perm=[0, 1, 2]),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_neighbour_is_refuted(name):
    found = prove(load_rule(WRONG[name]))
    assert isinstance(found, Refuted)
    assert found.reason and all(size >= 1 for size in found.sizes.values())


def test_counterexample_is_one():
    rule = load_rule(WRONG["weights joined the other way round"])
    found = prove(rule)
    assert isinstance(found, Refuted) and isinstance(judge(rule, found.sizes), Refuted)
    assert all(len(found.values[name]) == shape[0] for name, shape in found.shapes.items())


def test_division_by_zero_is_not_cancelled():
    """x*y*y/y is x*y only where y isn't 0, of which the source says nothing."""
    product = {"op": "mul", "inputs": ["x", "y"]}
    rule = {"name": "cancel", "inputs": {"x": ["n"], "y": ["n"]}, "source": {"nodes": [product], "outputs": ["%0"]},
            "target": {"nodes": [product, {"op": "mul", "inputs": ["%0", "y"]}, {"op": "div", "inputs": ["%1", "y"]}],
                       "outputs": ["%2"]}}
    assert not isinstance(prove(load_rule(rule)), Proved)


@pytest.mark.parametrize("op", ["reciprocal", "log", "sqrt", "rsqrt"])
def test_target_is_defined_where_the_source_is(op):
    """x*y + f(y) - f(y) is x*y only where f is defined; the way back is another matter."""
    product = {"op": "mul", "inputs": ["x", "y"]}
    long = {"nodes": [product, {"op": op, "inputs": ["y"]}, {"op": "add", "inputs": ["%0", "%1"]},
                      {"op": "sub", "inputs": ["%2", "%1"]}], "outputs": ["%3"]}
    short = {"nodes": [product], "outputs": ["%0"]}
    rule = {"name": "detour", "inputs": {"x": ["n"], "y": ["n"]}, "source": short, "target": long}
    assert not isinstance(prove(load_rule(rule)), Proved)
    check(dump_rule(certified(load_rule({**rule, "source": long, "target": short}))))


def test_condition_is_synthesised():
    """Two grouped convolutions are one only if all groups are of one size: TASO ships the rule without this."""
    rule = load_rule(FAMILIES["groups-cat"])
    free = replace(rule, shapes={**rule.shapes, "v": (parse_size("k*p"), *rule.shapes["v"][1:])})
    assert isinstance(prove(free), Refuted)
    found = synthesise(free)
    assert found.added == (equal(parse_size("o"), parse_size("p")),)
    assert len(found.counterexamples) == 2
    check(dump_rule(found.rule))
    assert strengthen(rule).conditions == ()


def test_condition_that_is_given_is_used():
    rule = load_rule({**FAMILIES["groups-cat"], "conditions": ["o == p"],
                      "inputs": {**FAMILIES["groups-cat"]["inputs"], "v": ["k*p", "c", 3, 3]}})
    proof = prove(rule)
    assert isinstance(proof, Proved)
    assert not isinstance(prove(replace(rule, conditions=())), Proved)


@pytest.mark.parametrize(("change", "reason"), [
    ({"source": {"nodes": [{"op": "matmul", "inputs": ["a", "z"]}], "outputs": ["%0"]}}, "z is unbound"),
    ({"source": {"nodes": [{"op": "matmul", "inputs": ["a"]}], "outputs": ["%0"]}}, "matmul takes 2 inputs, but got 1"),
    ({"source": {"nodes": [{"op": "matmull", "inputs": ["a", "b"]}], "outputs": ["%0"]}}, "no operator is named"),
    ({"inputs": {"a": ["m", 2], "b": [3, "l"], "c": ["l", "n"]}}, "its source is ill-formed"),
    ({"inputs": {"a": ["m", "k"], "b": ["k)", "l"], "c": ["l", "n"]}}, "a size must"),
    ({"inputs": {"a": ["m", "__import__('os')"], "b": ["k", "l"], "c": ["l", "n"]}}, "a size is made of"),
    ({"conditions": ["q == 1"]}, "q of a condition is unbound"),
    ({"conditions": ["m + 1 == 0"]}, "exclude each other"),
    ({"conditions": ["m >= 3", "m <= 2"]}, "exclude each other"),
    ({"target": {"nodes": [{"op": "matmul", "inputs": ["c", "b"]}], "outputs": ["%0"]}}, "it is wrong"),
    ({"inputs": {**FAMILIES["assoc"]["inputs"], "z": ["m", "n"]},
      "target": {"nodes": [{"op": "relu", "inputs": ["z"]}], "outputs": ["%0"]}}, "z of the target is unbound"),
])
def test_bad_rule_is_refused_with_its_name(change, reason):
    with pytest.raises(RuleError, match="rule assoc: ") as error:
        certified(load_rule({**FAMILIES["assoc"], **change}))
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["2*c+1", "((h+2)//2)*c", "c*g%3", "-(a-b)", "7"])
def test_sizes_are_read_as_they_are_written(text):
    value = parse_size(text)
    assert parse_size(str(value)) == value
    names = {s: 5 + k for k, s in enumerate(sorted(value.symbols))}
    assert value.evaluate(names) == eval(text, {}, names)


def test_conditions_are_read():
    assert parse_condition("a <= 2*b") == parse_condition("2*b >= a")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rule_survives_json(name):
    rule = load_rule(FAMILIES[name])
    assert load_rule(json.loads(json.dumps(dump_rule(rule)))) == rule


def wrong_and_proved(rules, wanted, seed):
    """Of mutants with a counterexample, how many there are and those that are proved all the same."""
    found, proved, kinds = 0, [], {}
    for kind, mutant in mutants(rules, seed):
        if found >= wanted:
            return found, proved, kinds
        try:
            if find_counterexample(mutant, tries=6) is None:
                continue
            found += 1
            kinds[kind] = kinds.get(kind, 0) + 1
            if isinstance(prove(mutant, refute=False), Proved):
                proved.append(mutant)
        except RuleError:
            continue
    raise AssertionError


def sound_rules():
    rules = [load_rule(r) for r in FAMILIES.values() if r["name"] != "symstride"]
    groups = load_rule(FAMILIES["groups-cat"])
    sizes = {**groups.shapes, "v": (parse_size("k*p"), *groups.shapes["v"][1:])}
    return rules + [strengthen(replace(groups, name="conditional", shapes=sizes))]


def test_no_mutant_is_proved():
    found, proved, kinds = wrong_and_proved(sound_rules(), 50, seed=1)
    assert found == 50 and not proved and len(kinds) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_none_of_a_thousand_mutants_is_proved(seed):
    """Ten hundreds, so that each ends soon."""
    found, proved, kinds = wrong_and_proved(sound_rules(), 100, seed)
    assert found == 100 and not proved and len(kinds) >= 8


SOFTMAX = "softmax {} axis=1"
TWICE = [SOFTMAX.format("a"), SOFTMAX.format("%0"), "concat %1 %1 axis=0"]


def test_softmax_of_softmax_of_a_concatenation(monkeypatch):
    """Sums within sums within sums: for each change of variables the same goals come again, and are stuck once."""
    stuck, search = [], goal_merge.prove_goal

    def watched(goal):
        said = goal.expander, goal.expander.thorough, goal.depth, goal.said()
        try:
            return search(goal)
        except goal_merge.Stuck:
            stuck.append(said)
            raise

    monkeypatch.setattr(goal_merge, "prove_goal", watched)
    rule = certified(law(TWICE, ["concat a a axis=0", SOFTMAX.format("%0"), SOFTMAX.format("%1")]))
    assert len(stuck) == len(set(stuck)) > 20
    check(dump_rule(rule))
    assert find_counterexample(rule, tries=8) is None


def test_names_of_variables_say_nothing():
    """Goals that differ in what is read, or where, are others."""
    def said(context, terms):
        expander = goal_merge.Expander()
        reads = tuple(Term(Fraction(1), (v,), (Condition(Poly.symbol(v), ">="),), (
            Read(tensor, (Poly.symbol(context) + Poly.symbol(v),)),)) for v, tensor in terms)
        return goal_merge.Goal(expander, [context], [Poly.symbol(context)], reads).said()

    assert said("@0", [("$v1", "x"), ("$v2", "y")]) == said("$v7", [("$v3", "x"), ("$v9", "y")])
    assert said("@0", [("$v1", "x"), ("$v2", "y")]) != said("@0", [("$v1", "x"), ("$v2", "x")])
    assert said("@0", [("$v1", "x")]) != said("@0", [("$v1", "x"), ("$v2", "x")])
