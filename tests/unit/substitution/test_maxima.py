"""The normal form of maxima: what it proves, what it must not, and that the checker has the same of its own."""

import json
import re
from dataclasses import replace

import pytest

from mlc.substitution.check import CertificateError, check_rule
from mlc.substitution.codec import content_hash, dump_rule
from mlc.substitution.completeness import derivations
from mlc.substitution.prove import Proved, prove
from mlc.substitution.refute import find_counterexample
from mlc.substitution.shipped import FOLDER, shipped_rules
from tests.unit.graph.substitution_rules import rule

INPUTS = "a[n,m] b[n,m] c[n,m]"


@pytest.mark.parametrize("source, target", [
    ("maximum(a, a)", "a"),
    ("minimum(a, a)", "a"),
    ("maximum(maximum(a, b), c)", "maximum(a, maximum(c, b))"),
    ("minimum(minimum(a, b), c)", "minimum(c, minimum(b, a))"),
    ("maximum(a, minimum(a, b))", "a"),
    ("minimum(maximum(a, b), a)", "a"),
    ("maximum(a, relu(a))", "relu(a)"),
    ("maximum(b, relu(a))", "relu(maximum(a, b))"),
    ("relu(sigmoid(a))", "sigmoid(a)"),
    ("relu(mul(a, a))", "mul(a, a)"),
    ("maximum(relu(a), neg(exp(b)))", "relu(a)"),
    ("maximum(a, relu(tanh(a)))", "relu(a)"),
    ("tanh(relu(a))", "relu(tanh(a))"),
    ("maximum(sigmoid(a), sigmoid(b))", "sigmoid(maximum(a, b))"),
    ("relu(add(relu(a), relu(a)))", "relu(add(a, relu(a)))"),
    ("relu(add(a, a))", "add(relu(a), relu(a))"),
    ("maximum(add(a, b), add(c, b))", "add(maximum(c, a), b)"),
    ("relu(concat(a, b, axis=0))", "concat(relu(a), relu(b), axis=0)"),
    ("max(relu(a), axes=(1,))", "relu(max(a, axes=(1,)))"),
    ("max(maximum(a, b), axes=(1,))", "maximum(max(b, axes=(1,)), max(a, axes=(1,)))"),
    ("max(concat(a, b, axis=1), axes=(1,))", "maximum(max(a, axes=(1,)), max(b, axes=(1,)))"),
    ("max(max(a, axes=(1,)), axes=(0,))", "max(a, axes=(0,1))"),
    ("tanh(neg(a))", "neg(tanh(a))"),
    ("erf(sub(a, b))", "neg(erf(sub(b, a)))"),
    ("gelu(neg(a))", "sub(gelu(a), a)"),
    ("maximum(exp(a), erf(a))", "exp(a)"),
    ("minimum(tanh(a), exp(a))", "tanh(a)"),
    ("minimum(relu(a), tanh(a))", "tanh(a)"),
])
def test_laws_of_maxima_are_proved_both_ways(source, target):
    check_rule(rule("law", INPUTS, source, target))
    if not set("abc") & set(source) - set(target):  # the way back binds every input
        check_rule(rule("law", INPUTS, target, source))


@pytest.mark.parametrize("source, target", [
    ("maximum(a, b)", "a"),
    ("relu(a)", "a"),
    ("relu(tanh(a))", "tanh(a)"),
    ("maximum(sigmoid(a), tanh(a))", "sigmoid(a)"),
    ("maximum(tanh(a), sigmoid(tanh(a)))", "sigmoid(tanh(a))"),
    ("maximum(a, tanh(a))", "a"),
    ("minimum(a, relu(a))", "relu(a)"),
    ("maximum(add(a, a), a)", "add(a, a)"),
    ("relu(sub(a, exp(b)))", "relu(a)"),
    ("relu(mul(a, b))", "mul(relu(a), relu(b))"),
    ("maximum(a, minimum(b, c))", "maximum(a, b)"),
    ("relu(sub(a, relu(b)))", "relu(sub(a, b))"),
    ("max(add(a, b), axes=(1,))", "add(max(a, axes=(1,)), max(b, axes=(1,)))"),
    ("max(concat(a, b, axis=1), axes=(1,))", "max(a, axes=(1,))"),
    ("exp(neg(a))", "neg(exp(a))"),
    ("sigmoid(neg(a))", "neg(sigmoid(a))"),
    ("erf(neg(a))", "erf(a)"),
    ("tanh(sub(a, b))", "neg(tanh(a))"),
    ("maximum(exp(a), erf(a))", "erf(a)"),
    ("maximum(exp(a), erf(b))", "exp(a)"),
    ("maximum(tanh(a), sigmoid(a))", "tanh(a)"),
    ("minimum(relu(a), tanh(b))", "tanh(b)"),
    ("maximum(sqrt(a), exp(a))", "sqrt(a)"),
    ("maximum(log(a), sqrt(a))", "log(a)"),
    ("maximum(log(b), sqrt(a))", "sqrt(a)"),
])
def test_what_is_no_law_of_maxima_is_not_proved(source, target):
    wrong = rule("no law", INPUTS, source, target, proved=False)
    assert not isinstance(prove(wrong, refute=False), Proved)
    assert find_counterexample(wrong) is not None


@pytest.mark.parametrize("source, target", [
    ("maximum(log(a), sqrt(a))", "sqrt(a)"),
    ("maximum(exp(a), log(a))", "exp(a)"),
    ("maximum(exp(a), log(exp(a)))", "exp(a)"),
    ("minimum(tanh(a), sqrt(a))", "tanh(a)"),
    ("maximum(sqrt(a), erf(a))", "sqrt(a)"),
    ("maximum(relu(a), log(a))", "relu(a)"),
    ("minimum(relu(a), log(a))", "log(a)"),
])
def test_functions_that_are_not_defined_everywhere_are_compared(source, target):
    """Where the other is defined that is gone, from left to right alone."""
    proved = rule("law", INPUTS, source, target)
    check_rule(proved)
    demanded, left = (set(re.findall(r"(?:log|sqrt)\(a\)", side)) for side in (source, target))
    assert (proved.certificate["backward"] is None) == (demanded != left)


@pytest.mark.parametrize("source, target", [
    ("maximum(relu(a), erf(a))", "relu(a)"),
    ("minimum(relu(a), erf(a))", "erf(a)"),
    ("maximum(sqrt(a), erf(sqrt(a)))", "sqrt(a)"),
    ("maximum(div(a, a), sqrt(a))", "sqrt(a)"),
    ("minimum(relu(a), sqrt(a))", "sqrt(a)"),
    ("maximum(a, log(a))", "log(a)"),
])
def test_what_is_so_of_integers_alone_is_not_proved(source, target):
    """erf(0.3) is 0.33, and the root of 0.25 is 0.5."""
    assert not isinstance(prove(rule("no law", INPUTS, source, target, proved=False), refute=False), Proved)


def forged(wrong, right, change):
    """The wrong rule with the certificate of a right one, changed and bound to it."""
    certificate = json.loads(json.dumps(dict(rule("right", INPUTS, *right).certificate)))
    change(certificate["outputs"][0]["steps"])
    wrong = rule("wrong", INPUTS, *wrong, proved=False)
    return replace(wrong, certificate=certificate | {"rule": content_hash(wrong)})


@pytest.mark.parametrize("wrong, right", [
    (("exp(neg(a))", "neg(exp(a))"), ("tanh(neg(a))", "neg(tanh(a))")),
    (("erf(neg(a))", "erf(a)"), ("erf(neg(a))", "neg(erf(a))")),
    (("maximum(exp(a), erf(b))", "exp(a)"), ("maximum(exp(a), erf(a))", "exp(a)")),
    (("maximum(sigmoid(a), erf(a))", "sigmoid(a)"), ("maximum(exp(a), erf(a))", "exp(a)")),
    (("minimum(relu(a), erf(a))", "erf(a)"), ("minimum(relu(a), tanh(a))", "tanh(a)")),
    (("minimum(relu(a), tanh(b))", "tanh(b)"), ("minimum(relu(a), tanh(a))", "tanh(a)")),
])
def test_a_proof_about_functions_is_none_about_others(wrong, right):
    with pytest.raises(CertificateError):
        check_rule(forged(wrong, right, lambda steps: None))


@pytest.mark.parametrize("function", ["sigmoid", "exp", "relu", "sqrt", "log", "", None, ["erf"]])
def test_only_what_is_known_to_be_below_is_put_in_place(function):
    law = ("maximum(exp(a), erf(a))", "exp(a)")

    def change(steps):
        [found] = [step for word, *rest in steps if word == "largest" for proof in rest[-1] for step in proof
                   if step[0] == "below"]
        found[2] = function

    with pytest.raises(CertificateError):
        check_rule(forged(law, law, change))


@pytest.mark.parametrize("step", [["below", 0, "erf"], ["raise", 0], ["raise", 1], ["odd", 0, 0], ["odd", 0, -1],
                                  ["odd", 0, True], ["below", 1, "tanh"]])
def test_bounds_have_no_place_among_equalities(step):
    law = ("maximum(exp(a), erf(a))", "exp(a)")
    with pytest.raises(CertificateError):
        check_rule(forged(law, law, lambda steps: steps.insert(0, step)))


def test_a_function_that_is_steeper_than_1_is_not_dropped():
    """erf(0.3) is 0.33; integers, at which counterexamples are sought, do not show it."""
    wrong = rule("erf", INPUTS, "maximum(a, relu(erf(a)))", "relu(a)", proved=False)
    assert not isinstance(prove(wrong, refute=False), Proved)


def test_undefined_values_are_no_member_to_leave_out():
    """min(a, 1/b) is never above a, but is not defined where b is 0."""
    wrong = rule("partial", INPUTS, "add(a, sub(b, b))", "add(maximum(a, minimum(a, reciprocal(b))), sub(b, b))",
                 proved=False)
    assert not isinstance(prove(wrong, refute=False), Proved)


def test_no_true_rule_is_in_quarantine():
    """What the generator found and did not prove, of sides that the fingerprints call equal."""
    report = json.loads((FOLDER / "generation" / "report.json").read_text())
    assert report["complete"] and report["quarantined"] == []
    assert report["states"]["refuted"] > 0


@pytest.mark.parametrize("source, target", [
    ("maximum(a, a)", "a"), ("relu(sigmoid(a))", "sigmoid(a)"), ("maximum(a, relu(a))", "relu(a)"),
    ("maximum(b, relu(a))", "relu(maximum(a, b))"), ("tanh(relu(a))", "relu(tanh(a))"),
])
def test_library_derives_the_laws(source, target):
    [found] = derivations([_document(rule("law", INPUTS, source, target))], shipped_rules())
    assert found.status == "derived"


def _document(law):
    return dump_rule(replace(law, certificate=None))
