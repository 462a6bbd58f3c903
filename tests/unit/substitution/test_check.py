"""The checker refuses certificates and rules that were tampered with."""

import ast
import copy
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

import mlc.substitution.check
from mlc.substitution.check import CertificateError, check, check_rule
from mlc.substitution.check.integers import bounded, spend
from mlc.substitution.codec import RuleError, content_hash, dump_rule, load_rule
from mlc.substitution.prove import certified
from mlc.substitution.shipped import shipped_rules
from tests.fuzz.certificates import eaten_guard_steps

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
    leaves = [(path, value) for path, value in places(data["certificate"]["outputs"])
              if path[-3:-1] != ("steps", 0) and path[1] != "defined"]
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


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_demand_that_is_not_covered_is_noticed(rules, name, way):
    data = rules[name]

    def groups(certificate):
        outputs = certificate["outputs"] if way == "forward" else certificate["backward"] or []
        return [(output["defined"] if way == "forward" else output) for output in outputs]

    for place, proofs in enumerate(groups(data["certificate"])):
        for group, steps in proofs.items():
            for step, (word, *_) in enumerate(steps):
                if word in ("cover", "drop", "sign"):
                    wrong = copy.deepcopy(data)
                    groups(wrong["certificate"])[place][group].pop(step)
                    with pytest.raises(CertificateError):
                        check(wrong)
            wrong = copy.deepcopy(data)
            del groups(wrong["certificate"])[place][group]
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


def node(op, *inputs, **attributes):
    return {"op": op, "inputs": list(inputs), "attributes": attributes}


def product_rule(*target, inner=6):
    nodes = [node("matmul", "a", "b")]
    sides = [{"nodes": side, "outputs": [f"%{len(side) - 1}"]} for side in (nodes, [*nodes, *target])]
    return load_rule({"name": "product", "inputs": {"a": ["m", inner], "b": [inner, "n"]}, "source": sides[0],
                      "target": sides[1], "conditions": []})


def forged(rule, steps):
    """A certificate that is right but for the steps."""
    certificate = dict(certified(product_rule()).certificate) | {"rule": content_hash(rule)}
    certificate = copy.deepcopy(certificate)
    certificate["outputs"][0]["steps"] = steps
    return dump_rule(replace(rule, certificate=certificate))


def test_part_does_not_become_the_whole():
    """a @ b = 2 (a @ b), if a quotient may be resolved by the guard that it stands in."""
    with pytest.raises(CertificateError, match="witness"):
        check(forged(product_rule(node("add", "%0", "%0")), eaten_guard_steps(3, 6)))


@pytest.mark.parametrize("quotient", ["1//$0", "($0+1)//$0", "$0//@0", "(@0*$0)//$0", "1//(m-n)", "$0//0", "$0//(0-1)",
                                      "$0 % @1", "1//(1//m)"])
def test_divisor_must_be_at_least_one(quotient):
    """Both cases of a split by a quotient that means nothing might be dropped."""
    steps = [["split", 0, quotient, "=="], ["drop", 0, []], ["drop", 3, []], ["drop", 4, []]]
    with pytest.raises(CertificateError, match="plainly at least 1"):
        check(forged(product_rule(node("neg", "%0")), steps))


@pytest.mark.parametrize("text", ["9" * 80, "(" * 60 + "1" + ")" * 60, "-" * 60 + "1", "*".join(["(@0+@1+$0+m)"] * 12),
                                  "@0" + "*@0" * 40, "1" * 5000, "$c0", "@9", "z", "", "1+", "1e9", None, [], {}, 1.5])
def test_hostile_texts_are_refused_soon(text):
    start = time.process_time()
    with pytest.raises(CertificateError):
        check(forged(product_rule(node("neg", "%0")), [["split", 0, text, ">="]] * 3))
    assert time.process_time() - start < 5


def test_work_is_bounded():
    """Products of large sums in a witness, again and again."""
    wide = "+".join(f"{k}*@0*@1*$0" + "*m" * (k % 5) + "*n" * (k // 5) for k in range(1, 25))
    steps = [["guard", 0, wide, ">=", [[["1", [8, 8, 8, 8]]]]]]
    with pytest.raises(CertificateError):
        check(forged(product_rule(node("neg", "%0")), [["split", 0, wide, ">="], *steps * 300]))


def deep(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(("steps", "reason"), [
    ([["split", 0, "x" * 600_000, ">="]], "at most 512 KiB"),
    ([["split", 0, "x" * 4_000, ">="]] * 200, "at most 512 KiB"),
    ([[0] * 300_000], "at most 200,000 lists"),
    ([["split", 0, 10**400_000, ">="]] * 20, "at most 512 KiB"),
    (deep(5_000), "at most 110 deep"),
])
def test_certificates_that_are_too_large_are_refused_unread(steps, reason):
    with pytest.raises(CertificateError, match=reason) as error:
        check(forged(product_rule(node("neg", "%0")), steps))
    assert "\n" not in str(error.value)


def test_shipped_certificates_are_far_from_the_largest():
    """They are at most a tenth of it, so that those of larger rules have room."""
    rules = shipped_rules()
    assert max(len(json.dumps(rule.certificate, default=dict)) for rule in rules) * 10 < 512 << 10
    longest = max(rules, key=lambda rule: len(json.dumps(rule.certificate, default=dict)))
    copies = dict(longest.certificate)
    check_rule(replace(longest, certificate={**copies, "more": [copies] * 9}))
    with pytest.raises(CertificateError, match="at most"):
        check_rule(replace(longest, certificate={**copies, "more": [copies] * 40}))
    copies["more"] = [copies]
    with pytest.raises(CertificateError, match="deep"):
        check_rule(replace(longest, certificate=copies))


#: whatever grows is counted: guards of a term, quotients of texts, sums that are written again and again
GROWING = {
    "guards": [["split", 0, f"$0-{k}", ">="] for k in range(990)],
    "quotients": [["split", 0, "+".join(f"(@0+{k})//m" for k in range(250)), "=="]] * 120,
}


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_counted(name):
    with pytest.raises(CertificateError, match="too long to check"):
        check(forged(product_rule(node("neg", "%0")), GROWING[name]))


def test_a_check_leaves_no_limit_behind():
    """The search for proofs asks for the checker's arithmetic as well, for hours."""
    with pytest.raises(CertificateError, match="too long"), bounded(10):
        spend(11)
    for _ in range(10):
        spend(10_000_000)


def test_undefined_terms_of_the_target_do_not_vanish():
    """relu(x) is not relu(x) + (1/x - 1/x), whatever the certificate says of values."""
    source = [node("relu", "x")]
    target = [*source, node("reciprocal", "x"), node("sub", "%1", "%1"), node("add", "%0", "%2")]
    rules = [load_rule({"name": "r", "inputs": {"x": ["m"]}, "conditions": [],
                        "source": {"nodes": source, "outputs": ["%0"]},
                        "target": {"nodes": side, "outputs": [f"%{len(side) - 1}"]}}) for side in (source, target)]
    certificate = copy.deepcopy(dict(certified(rules[0]).certificate)) | {"rule": content_hash(rules[1])}
    proof = certificate["outputs"][0]
    reciprocal = same = [["merge", 0, 1, [], [], [], [], [0], [[[[], []]]]]]
    members = [[0, [], [], same], [1, [], [], []]]
    proof["steps"] = [["merge", 0, 1, [], [], [], [], [0], [[members, members]]],
                      ["merge", 2, 3, [], [], [], [], [0], [reciprocal]]]
    for steps in (None, [], [["sign", 0]], [["drop", 0, None]], [["cover", 0, 0, [], [], reciprocal]]):
        proof["defined"] = {**proof["defined"], **({} if steps is None else {"": steps})}
        with pytest.raises(CertificateError):
            check(dump_rule(replace(rules[1], certificate=certificate)))


def pointwise_rule(target):
    """maximum(maximum(a, b), c) and another side."""
    source = [node("maximum", "a", "b"), node("maximum", "%0", "c")]
    sides = [{"nodes": side, "outputs": [f"%{len(side) - 1}"]} for side in (source, target)]
    return load_rule({"name": "largest", "inputs": {name: ["m"] for name in "abc"}, "source": sides[0],
                      "target": sides[1], "conditions": []})


SAME = [["merge", 0, 1, [], [], [], [], [0], [[[[], []]]]]]


def covered(*members, backward):
    rule = pointwise_rule([node("maximum", "a", "b")])
    whole = pointwise_rule([node("maximum", "a", "b"), node("maximum", "%0", "c")])
    certificate = copy.deepcopy(dict(certified(whole).certificate)) | {"rule": content_hash(rule)}
    proof = certificate["outputs"][0]
    proof["steps"] = [["merge", 0, 1, [], [], [], [], [0], [[list(members), backward]]]]
    return dump_rule(replace(rule, certificate=certificate))


@pytest.mark.parametrize("third", [
    None, [0, [], [], []], [0, [], [], SAME], [2, [], [], SAME], [-1, [], [], SAME], [True, [], [], SAME],
    ["none", []], ["none", [["1", [0]]]], ["split", "@0", ">=", []], ["split", "@0-1", ">=", [[0, [], [], SAME]]],
    ["split", "0", "==", [[0, [], [], SAME], ["none", []], ["none", []]]], [0, ["@0"], [], SAME],
    ["split", "1", ">=", [["none", [["1", [0]]]], [0, [], [], SAME]]], [[0, [], [], SAME]], {}, [], "none",
])
def test_every_member_of_a_maximum_is_covered(third):
    """max(a, b, c) is not max(a, b), whatever the certificate says of c."""
    ways = [[0, [], [], SAME], [1, [], [], SAME]]
    with pytest.raises(CertificateError):
        check(covered(*ways, *([] if third is None else [third]), backward=ways))


def test_maximum_of_three_covers_its_members_in_any_order():
    rule = pointwise_rule([node("maximum", "c", "b"), node("maximum", "a", "%0")])
    check(dump_rule(certified(rule)))
    [steps] = [output["steps"] for output in certified(rule).certificate["outputs"]]
    forth, back = steps[0][-1][0]
    assert sorted(proof[0] for proof in forth) == sorted(proof[0] for proof in back) == [0, 1, 2]


@pytest.mark.parametrize("certificate", [None, {}, {"format": 1}, {"format": 2}, {"format": 3}, [], "yes"])
def test_malformed_certificate_is_refused(certificate):
    data = {**FAMILIES["assoc"], "certificate": certificate}
    if isinstance(certificate, dict) and "format" in certificate:
        certificate["rule"] = content_hash(load_rule(data))
    with pytest.raises(CertificateError, match="rule assoc: "):
        check(data)
