"""TASO's format: ranks, groups, splits; rules that are right, right under a condition, and wrong."""

import json

import pytest

from mlc.substitution.check import check
from mlc.substitution.codec import RuleError, dump_rule
from mlc.substitution.taso import read_taso
from mlc.substitution.verify import verdict

CONV = {"kernel_h": 3, "kernel_w": 3, "stride_h": 1, "stride_w": 1, "pad": "same", "acti": "none"}


def op(name, *inputs, **attr):
    return {"op": name, "in": list(inputs), "attr": attr}


def concat(a, b, axis, rank):
    return op("concat", a, b, num_inputs=2, axis=axis, numdim=rank)


def of(source, target, outputs=None):
    return {"id": 7, "src": source, "dst": target,
            "outputs": outputs or [[f"{len(source) - 1}.0", f"{len(target) - 1}.0"]]}


DISTRIBUTE = of([op("ewadd", "?1", "?2"), op("ewmul", "?3", "0.0")],
                [op("ewmul", "?1", "?3"), op("ewmul", "?2", "?3"), op("ewadd", "0.0", "1.0")])
ASSOCIATE = of([op("matmul", "?1", "?2", acti="none"), op("matmul", "0.0", "?3", acti="none")],
               [op("matmul", "?2", "?3", acti="none"), op("matmul", "?1", "0.0", acti="none")])
ONE_INPUT = of([op("conv2d", "?1", "?2", **CONV), op("conv2d", "?1", "?3", **CONV), concat("0.0", "1.0", 1, 4)],
               [concat("?2", "?3", 0, 4), op("conv2d", "?1", "0.0", **CONV)])
TWO_INPUTS = of([op("conv2d", "?1", "?2", **CONV), op("conv2d", "?4", "?3", **CONV), concat("0.0", "1.0", 1, 4)],
                [concat("?1", "?4", 1, 4), concat("?2", "?3", 0, 4), op("conv2d", "0.0", "1.0", **CONV)])
FUSED = of([op("conv2d", "?1", "?2", **CONV), op("relu", "0.0")],
           [op("conv2d", "?1", "?2", **{**CONV, "acti": "relu"})])
SPLIT = of([op("relu", "?1"), op("relu", "?2")],
           [concat("?1", "?2", 1, 2), op("relu", "0.0"), op("split", "1.0", num_outputs=2, axis=1)],
           [["0.0", "2.0"], ["1.0", "2.1"]])
WRONG = of([op("matmul", "?1", "?2", acti="none"), op("relu", "0.0")],
           [op("relu", "?1"), op("matmul", "0.0", "?2", acti="none")])


@pytest.mark.parametrize(("data", "ranks"), [(DISTRIBUTE, 5), (ASSOCIATE, 4), (FUSED, 1)])
def test_right_rule_is_proved_at_every_rank(data, ranks):
    rules = read_taso(data)
    found = verdict(7, rules)
    assert found.status == "proved" and len(rules) == len(found.rules) == ranks
    for rule in found.rules:
        check(json.loads(json.dumps(dump_rule(rule))))


@pytest.mark.parametrize(("data", "condition"), [
    (TWO_INPUTS, {"c2 == c3", "o2 == o3"}), (ONE_INPUT, {"c2 == c3", "g1 == 1"}), (SPLIT, {"i1 == i2"})])
def test_rule_is_right_under_the_weakest_condition(data, condition):
    found = verdict(7, read_taso(data))
    assert found.status == "conditional"
    assert set(found.precondition.split(" where ")[0].split(" and ")) == condition
    assert found.counterexample is not None
    for rule in found.rules:
        check(json.loads(json.dumps(dump_rule(rule))))


def test_wrong_rule_is_refuted():
    found = verdict(7, read_taso(WRONG))
    assert found.status == "refuted" and found.counterexample.values
    json.dumps(found.document())


def test_split_is_at_the_joint():
    (rule,) = read_taso(SPLIT)
    low, high = rule.target.nodes[2], rule.target.nodes[3]
    assert low.attributes["end"] == high.attributes["begin"] == rule.shapes["x1"][1]


@pytest.mark.parametrize("data", [
    {"id": 3}, {"id": 3, "src": [], "dst": [], "outputs": []}, of([op("sofmax", "?1")], [op("relu", "?1")]),
    of([op("relu", "?1"), op("relu", "?2")], [op("relu", "?1"), op("split", "0.0", num_outputs=2, axis=0)]),
])
def test_what_is_not_tasos_format_is_refused(data):
    with pytest.raises(RuleError, match="rule taso-"):
        verdict(3, read_taso(data))
