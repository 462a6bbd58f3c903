"""The checker refuses certificates and rules that were tampered with."""

import ast
import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import mlc.substitution.check
from mlc.substitution.check import CertificateError, check
from mlc.substitution.codec import RuleError, content_hash, dump_rule, load_rule
from mlc.substitution.prove import certified

FAMILIES = {r["name"]: r for r in json.loads((Path(__file__).parent / "families.json").read_text())["rules"]}
CHOSEN = ("groups-cat", "conv-cat", "k-cat", "maxpool-cat", "group-merge", "convconv1", "layernorm-scale")


@pytest.fixture(scope="module")
def rules():
    return {name: json.loads(json.dumps(dump_rule(certified(load_rule(FAMILIES[name]))))) for name in CHOSEN}


def places(value, at=()):
    """Every leaf of a JSON document with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))
    if not isinstance(value, (dict, list)):
        yield at, value


def put(document, path, value):
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def imported(file):
    """The modules of the room that a file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), "imports are absolute"
    return {name for name in names if name.startswith("mlc.substitution")}


def test_checker_shares_no_code_with_the_prover():
    """It and what it imports import nothing of the room but the reader of rules and what a rule is."""
    room = Path(mlc.substitution.check.__file__).parent
    files = list(room.glob("**/*.py"))
    found = set().union(*map(imported, files))
    own = {name for name in found if name.startswith("mlc.substitution.check.")}
    assert len(own) == len(files) - 1, "every file of the checker is looked at"
    trusted = {"codec", "graph", "rule"}
    assert found - own == {f"mlc.substitution.{name}" for name in trusted}
    for name in trusted:
        assert imported(room.parent / f"{name}.py") <= found - own


@pytest.mark.parametrize("name", CHOSEN)
def test_changed_leaf_is_noticed(rules, name):
    """Any number or text of the steps that means something else is refused; one that is another true statement of the
    same kind (a guard that holds too, say) may pass, but not for the rule it was made for with another content."""
    rng = random.Random(name)
    data = rules[name]
    leaves = [(path, value) for path, value in places(data["certificate"]["outputs"]) if path[-3:-1] != ("steps", 0)]
    refused = tried = 0
    for path, value in rng.sample(leaves, min(60, len(leaves))):
        wrong = copy.deepcopy(data)
        if isinstance(value, int):
            other = value + 1
        elif value[:1].isdigit():
            other = str(int(value.split("/")[0]) + 1)
        else:
            other = f"{value}+1"
        put(wrong["certificate"]["outputs"], path, other)
        tried += 1
        try:
            check(wrong)
        except (CertificateError, RuleError):
            refused += 1
    assert refused == tried


@pytest.mark.parametrize("name", CHOSEN)
def test_step_that_is_left_out_is_noticed(rules, name):
    data = rules[name]
    for place, proof in enumerate(data["certificate"]["outputs"]):
        for step in range(len(proof["steps"])):
            wrong = copy.deepcopy(data)
            left_out = wrong["certificate"]["outputs"][place]["steps"].pop(step)
            if left_out[0] in ("merge", "drop", "split", "count"):  # without one of these a term is left
                with pytest.raises(CertificateError):
                    check(wrong)


@pytest.mark.parametrize("change", [
    lambda r: r["source"]["nodes"][0]["attributes"].update(stride=[2, 2]),
    lambda r: r["target"]["nodes"][1].update(inputs=["y", "x"]),
    lambda r: r["target"]["nodes"][2]["attributes"].update(groups="2*g+k-g"),
    lambda r: r["inputs"].update(v=["k*p", "c", 3, 3]),
    lambda r: r.update(conditions=["g == 1"]),
])
def test_certificate_belongs_to_its_rule(rules, change):
    wrong = copy.deepcopy(rules["groups-cat"])
    change(wrong)
    if content_hash(load_rule(wrong)) != wrong["certificate"]["rule"]:
        with pytest.raises(CertificateError, match="hash differs"):
            check(wrong)
        wrong["certificate"]["rule"] = content_hash(load_rule(wrong))
    if wrong["conditions"] == []:  # a stronger condition leaves a proof a proof
        try:
            check(wrong)
        except CertificateError:
            return
        assert wrong["target"] == rules["groups-cat"]["target"] or "g" in str(wrong["target"])


def test_certificate_of_another_rule_does_not_pass(rules):
    """Even with the hash forged, steps prove only what they were made for."""
    right, other = load_rule(rules["conv-cat"]), load_rule(FAMILIES["mm-cat"])
    forged = dict(right.certificate) | {"rule": content_hash(other)}
    with pytest.raises(CertificateError):
        check(dump_rule(replace(other, certificate=forged)))
    wrong = copy.deepcopy(FAMILIES["conv-cat"])
    wrong["target"]["nodes"][0]["inputs"] = ["v", "u"]
    rule = load_rule(wrong)
    forged = dict(right.certificate) | {"rule": content_hash(rule)}
    with pytest.raises(CertificateError):
        check(dump_rule(replace(rule, certificate=forged)))


@pytest.mark.parametrize("certificate", [None, {}, {"format": 1}, {"format": 2}, [], "yes"])
def test_malformed_certificate_is_refused(certificate):
    data = {**FAMILIES["assoc"], "certificate": certificate}
    if isinstance(certificate, dict) and "format" in certificate:
        certificate["rule"] = content_hash(load_rule(data))
    with pytest.raises(CertificateError, match="rule assoc: "):
        check(data)
