"""``mlc rules verify`` and ``mlc rules show`` on files of rules."""

import json
from pathlib import Path

import pytest

from mlc.cli.main import main
from mlc.substitution.codec import dump_rule, load_rule
from mlc.substitution.prove import certified

RULE = {"name": "join", "inputs": {"a": ["m", "k"], "b": ["k", "n"], "c": ["k", "l"]},
        "source": {"nodes": [{"op": "matmul", "inputs": ["a", "b"]}, {"op": "matmul", "inputs": ["a", "c"]},
                             {"op": "concat", "inputs": ["%0", "%1"], "attributes": {"axis": 1}}], "outputs": ["%2"]},
        "target": {"nodes": [{"op": "concat", "inputs": ["b", "c"], "attributes": {"axis": 1}},
                             {"op": "matmul", "inputs": ["a", "%0"]}], "outputs": ["%1"]}}
WRONG = {**RULE, "name": "crossed", "target": {**RULE["target"], "nodes": [
    {"op": "concat", "inputs": ["c", "b"], "attributes": {"axis": 1}}, {"op": "matmul", "inputs": ["a", "%0"]}]}}
TASO = Path(__file__).parents[4] / "shared" / "data" / "taso_rules.json"


def written(path, *rules):
    path.write_text(json.dumps({"rules": rules}))
    return str(path)


def verify(capsys, file):
    code = main(["rules", "verify", file, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_verify_proves(tmp_path, capsys):
    code, document = verify(capsys, written(tmp_path / "r.json", RULE))
    assert code == 0
    assert document["rules"] == [{"id": "join", "status": "proved", "precondition": None, "counterexample": None,
                                  "reason": None}]


def test_verify_refutes_with_a_counterexample(tmp_path, capsys):
    code, document = verify(capsys, written(tmp_path / "r.json", RULE, WRONG))
    found = document["rules"][1]
    assert code == 1 and [r["status"] for r in document["rules"]] == ["proved", found["status"]]
    assert found["status"] in ("refuted", "conditional") and found["counterexample"]["values"]


def test_verify_checks_certificates(tmp_path, capsys):
    rule = json.loads(json.dumps(dump_rule(certified(load_rule(RULE)))))
    assert verify(capsys, written(tmp_path / "right.json", rule))[0] == 0
    rule["target"]["nodes"][0]["inputs"] = ["c", "b"]
    code, document = verify(capsys, written(tmp_path / "wrong.json", rule))
    assert code == 1 and "hash differs" in document["rules"][0]["reason"]


def test_verify_tells_what_is_proved_of_nothing(tmp_path, capsys):
    """A source that divides by 0 everywhere equals anything that is as well."""
    zero = {"op": "sub", "inputs": ["a", "a"]}
    nothing = {"name": "nothing", "inputs": {"a": ["m"]},
               "source": {"nodes": [zero, {"op": "div", "inputs": ["a", "%0"]}], "outputs": ["%1"]},
               "target": {"nodes": [zero, {"op": "reciprocal", "inputs": ["%0"]},
                                    {"op": "mul", "inputs": ["a", "%1"]}], "outputs": ["%2"]}}
    code, document = verify(capsys, written(tmp_path / "r.json", nothing, RULE))
    assert code == 0 and [r["status"] for r in document["rules"]] == ["proved", "proved"]
    assert "of nothing" in document["rules"][0]["reason"] and document["rules"][1]["reason"] is None


def test_verify_prints_one_line_for_each_rule_and_a_summary(tmp_path, capsys):
    assert main(["rules", "verify", written(tmp_path / "r.json", RULE)]) == 0
    assert capsys.readouterr().out.splitlines() == ["join  proved", "1 rules: 1 proved"]


@pytest.mark.parametrize(("text", "reason"), [
    ("[", "must be JSON"), ("[]", "at least one rule"), ('[{"name": "odd"}]', "rule odd: it must have 'inputs'"),
    ('[3]', "rule without a name"),
])
def test_bad_file_is_one_line(tmp_path, capsys, text, reason):
    (tmp_path / "bad.json").write_text(text)
    assert main(["rules", "verify", str(tmp_path / "bad.json")]) == 1
    line = capsys.readouterr().err
    assert reason in line and line.count("\n") == 1


ONE = {"name": "odd", "inputs": {"x": ["m"]}, "source": {"nodes": [{"op": "neg", "inputs": ["x"]}], "outputs": ["%0"]},
       "target": {"nodes": [{"op": "neg", "inputs": ["x"]}], "outputs": ["%0"]}}


@pytest.mark.parametrize(("changes", "reason"), [
    ({"inputs": {"x": ["*".join(["m"] * 200)]}}, "at most 16 factors"),
    ({"inputs": {"x": [float("nan")]}}, "a size is an integer or a text"),
    ({"source": {"nodes": [{"op": "neg", "inputs": ["%1"]}, {"op": "neg", "inputs": ["%0"]}], "outputs": ["%0"]}},
     "a ref must be to a node before"),
    ({"conditions": 5}, "every part must be a list, an object or a text"),
    ({"source": {"nodes": {"a": 1}, "outputs": "%0"}}, "every part must be a list, an object or a text"),
    ({"source": 3, "target": None, "inputs": [1]}, "the inputs are an object"),
])
def test_absurd_rules_are_one_line(tmp_path, capsys, changes, reason):
    assert main(["rules", "verify", written(tmp_path / "r.json", {**ONE, **changes})]) == 1
    line = capsys.readouterr().err
    assert "rule odd: " in line and reason in line and line.count("\n") == 1


def test_more_rules_than_a_file_may_hold(tmp_path, capsys):
    assert main(["rules", "verify", written(tmp_path / "r.json", *[ONE] * 10_001)]) == 1
    line = capsys.readouterr().err
    assert "at most 10,000" in line and line.count("\n") == 1


def test_a_name_is_printed_in_one_line(tmp_path, capsys):
    assert main(["rules", "verify", written(tmp_path / "r.json", {**ONE, "name": "a\nb\x1b[2J\x00"})]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and all(c.isprintable() for c in out.replace("\n", ""))


def test_a_certificate_that_is_too_large_is_one_line(tmp_path, capsys):
    rule = {**ONE, "certificate": {"format": 3, "rule": "x" * 10**6}}
    assert main(["rules", "verify", written(tmp_path / "r.json", rule)]) == 1
    assert "odd  undecided: its certificate is not valid: rule odd: it must be written in at most 512 KiB\n" in (
        capsys.readouterr().out)


def test_missing_file_is_one_line(tmp_path, capsys):
    assert main(["rules", "verify", str(tmp_path / "none.json")]) == 1
    assert "must be readable" in capsys.readouterr().err


def test_bad_rule_is_named(tmp_path, capsys):
    bad = {**RULE, "source": {**RULE["source"], "outputs": ["z"]}}
    assert main(["rules", "verify", written(tmp_path / "r.json", bad)]) == 1
    assert "rule join: the variable z is unbound" in capsys.readouterr().err


def side(*nodes, outputs=("%0",)):
    made = [{"op": op, "inputs": list(inputs), "attributes": attributes} for op, inputs, attributes in nodes]
    return {"nodes": made, "outputs": list(outputs)}


PRODUCT = side(("matmul", "ab", {}))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"target": side(("matmul", "az", {}))}, "the variable z is unbound: the rule's inputs are a, b"),
    ({"target": side(("matmul", "ab", {}), ("slice", ["%0"], {"axis": 0, "begin": 0, "end": "q"}), outputs=["%1"])},
     "the size q of slice is unbound"),
    ({"source": side(("matmul", "a", {}))}, "matmul takes 2 inputs, but got 1 in the source"),
    ({"target": side(("matmul", "abb", {}))}, "matmul takes 2 inputs, but got 3 in the target"),
    ({"source": side(("conv2d", "ab", {"stride": [1, 1], "padding": [0, 0, 0, 0], "dilation": [1, 1], "groups": 1}))},
     "its source is ill-formed: conv2d takes an input and a filter of rank 4"),
    ({"target": side(("matmul", "ab", {}), outputs=["%0", "%0"])}, "as many outputs, but got 1 and 2"),
    ({"source": side(("matmull", "ab", {}))}, "no operator is named matmull"),
    ({"conditions": ["m > k"]}, "a condition is `a == b`"),
    ({"inputs": ["a", "b"]}, "the inputs are an object with a list of sizes for each name"),
    ({"inputs": {"a": "mk", "b": ["k", "n"]}}, "the inputs are an object with a list of sizes for each name"),
])
def test_what_means_nothing_is_refused_by_name(changes, reason, tmp_path, capsys):
    rule = {"name": "odd", "inputs": {"a": ["m", "k"], "b": ["k", "n"]}, "source": PRODUCT, "target": PRODUCT}
    assert main(["rules", "verify", written(tmp_path / "r.json", {**rule, **changes})]) == 1
    line = capsys.readouterr().err
    assert "rule odd: " in line and reason in line and line.count("\n") == 1


def test_what_cannot_be_proved_is_undecided_with_a_reason(tmp_path, capsys):
    target = side(("exp", "a", {}), ("exp", "b", {}), ("mul", ["%0", "%1"], {}), outputs=["%2"])
    rule = {"name": "power", "inputs": {"a": ["m"], "b": ["m"]}, "target": target,
            "source": side(("add", ["a", "b"], {}), ("exp", ["%0"], {}), outputs=["%1"])}
    code, document = verify(capsys, written(tmp_path / "r.json", rule))
    (found,) = document["rules"]
    assert code == 1 and (found["id"], found["status"]) == ("power", "undecided") and found["reason"]


def test_a_mismatch_of_shapes_is_a_condition_or_refused(tmp_path, capsys):
    turned = side(("matmul", "ab", {}), ("transpose", ["%0"], {"perm": [1, 0]}), outputs=["%1"])
    rule = {"name": "turned", "inputs": {"a": ["m", "k"], "b": ["k", "n"]}, "source": PRODUCT, "target": turned}
    code, document = verify(capsys, written(tmp_path / "r.json", rule))
    (found,) = document["rules"]
    assert code == 0 and found["status"] == "conditional" and "m == n" in found["precondition"]


def test_show(tmp_path, capsys):
    rule = json.loads(json.dumps(dump_rule(certified(load_rule(RULE)))))
    file = written(tmp_path / "r.json", rule)
    assert main(["rules", "show", "join", "--file", file]) == 0
    out = capsys.readouterr().out
    assert "concat(matmul(a, b), matmul(a, c), axis=1)" in out and "certificate: " in out
    assert main(["rules", "show", "joint", "--file", file]) == 2


#: TASO's rules that hold under a condition alone; the other 105 of 133 hold as they stand, for every rank
CONDITIONAL = {70, 81, 84, 95, 98, 99, 100, 103, 104, 105, *range(110, 119), 120, *range(125, 133)}


@pytest.mark.skipif(not TASO.is_file(), reason="needs TASO's rules beside the repository")
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_tasos_rules(step, tmp_path, capsys):
    """Each of them, or every fifth."""
    rules = json.loads(TASO.read_text())[::step]
    (tmp_path / "taso.json").write_text(json.dumps(rules))
    code = main(["rules", "verify", str(tmp_path / "taso.json"), "--seconds", "300", "--json"])
    document = json.loads(capsys.readouterr().out)
    found = {r["id"]: r for r in document["rules"]}
    assert {i: r for i, r in found.items() if r["status"] not in ("proved", "conditional")} == {}
    assert code == 0 and set(found) == set(range(0, 133, step))
    assert {i for i, r in found.items() if r["status"] == "conditional"} == CONDITIONAL & set(found)
    for i in {99, 100, 130, 131} & set(found):
        assert "o10 == o11" in found[i]["precondition"] and found[i]["counterexample"]
    assert all(bool(r["precondition"]) == (r["status"] == "conditional") for r in found.values())
