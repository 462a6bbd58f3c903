"""What a source divides by is not 0 wherever it is defined: what cancels by that, and what does not."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from mlc.substitution.check import CertificateError, check, check_rule
from mlc.substitution.codec import content_hash, dump_rule
from mlc.substitution.prove import Proved, certified, prove
from mlc.substitution.refute import Refuted, defined_somewhere, find_counterexample
from tests.unit.substitution.small_rules import SUM, rule
from tests.unit.substitution.smt import judgement

RIGHT = {
    "a * (b/a) = b": rule(["div b a", "mul a %0"], ["b"]),
    "b * (a/a) = b": rule(["div a a", "mul b %0"], ["b"]),
    "b / (a/a) = b": rule(["div a a", "div b %0"], ["b"]),
    "a / (a/b) = b": rule(["div a b", "div a %0"], ["b"]),
    "1 / (1/a) = a": rule(["reciprocal a", "reciprocal %0"], ["a"]),
    "1 / (a/b) = b/a": rule(["div a b", "reciprocal %0"], ["div b a"]),
    "1 / (ab) = 1/a * 1/b": rule(["mul a b", "reciprocal %0"], ["reciprocal a", "reciprocal b", "mul %0 %1"]),
    "(a+b) / (a+b) * a = a": rule(["add a b", "div %0 %0", "mul a %1"], ["a"]),
    "2a / 2a = a/a": rule(["add a a", "div %0 %0"], ["div a a"]),
    "b * sum(softmax(a)) = b": rule(["softmax a axis=1", f"sum %0 {SUM}", "mul b %1"], ["b"]),
    "sum(b/b * a) = sum(a)": rule(["div b b", "mul %0 a", f"sum %1 {SUM}"], [f"sum a {SUM}"]),
    "relu(a/a) = a/a": rule(["div a a", "relu %0"], ["div a a"]),
    "relu(b * a/a) = relu(b)": rule(["div a a", "mul b %0", "relu %1"], ["relu b"]),
    "tanh(b * a/a) = tanh(b)": rule(["div a a", "mul b %0", "tanh %1"], ["tanh b"]),
    "log(a)/log(a) = a/a": rule(["log a", "div %0 %0"], ["div a a"]),
    "gelu(a)/gelu(a) = a/a": rule(["gelu a", "div %0 %0"], ["div a a"]),
    "relu(a)/relu(a) = a/a": rule(["relu a", "div %0 %0"], ["div a a"]),
    "erf(a - a) = a - a": rule(["sub a a", "erf %0"], ["sub a a"]),
    "max(a) = a, of one element": rule([f"max a {SUM}"], ["a"], a=["m", 1]),
    "min(a, max(a)) = a": rule([f"max a {SUM}", "minimum a %0"], ["a"]),
    "max(a, b) - b = a - min(a, b)": rule(["maximum a b", "sub %0 b"], ["minimum a b", "sub a %0"]),
    "relu(-a) = relu(a) - a": rule(["neg a", "relu %0"], ["relu a", "sub %0 a"]),
    "relu(a) relu(a) = a relu(a)": rule(["relu a", "mul %0 %0"], ["relu a", "mul a %0"]),
    "a / relu(a) = relu(a) / relu(a)": rule(["relu a", "div a %0"], ["relu a", "div %0 %0"]),
    "softmax of one column = sum(softmax(a))": rule([f"mean a {SUM}", "softmax %0 axis=1"],
                                                    ["softmax a axis=1", f"sum %0 {SUM}"]),
    "min(a, exp(a)) = a": rule(["exp a", "minimum a %0"], ["a"]),
    "ab / ab = b/b, of one product": rule(["matmul a b", "div %0 %0"], ["div b b"], a=[1, 1], b=[1, "k"]),
    "(aa)^2 / (aa)^2 = a/a, of one element": rule(["matmul a a", "matmul %0 %0", "div %1 %1"], ["div a a"], a=[1, 1]),
    "erf(aa) / erf(aa) = a/a, of one element": rule(["matmul a a", "erf %0", "div %1 %1"], ["div a a"], a=[1, 1]),
    "1/(aa) / 1/(aa) = a/a, of one element": rule(["matmul a a", "reciprocal %0", "div %1 %1"], ["div a a"], a=[1, 1]),
    "a plus its sum, of one column": rule([f"sum a {SUM}", "add a %0", "div %1 %1"], ["div a a"], a=["m", 1]),
    "a plus its largest, of one column": rule([f"max a {SUM}", "add a %0", "div %1 %1"], ["div a a"], a=["m", 1]),
    "max(a, its mean), of one column": rule([f"mean a {SUM}", "maximum a %0", "div %1 %1"], ["div a a"], a=["m", 1]),
}
#: right of values, but not defined where the source is; or of other values
WRONG = {
    "b = b * (a/a), of no divisor": rule(["add a b"], ["div a a", "add a b", "mul %0 %1"]),
    "a + b = (a+b) * (b/a * a/b)": rule(["div b a", "add a b", "add %0 %1"],
                                        ["div b a", "div a b", "mul %0 %1", "add a b", "mul %2 %3", "add %0 %4"]),
    "of another tensor": rule(["div b b", "mul a %0"], ["div a b"]),
    "sum(a) * sum(1/a) = sum(a/a)": rule([f"sum a {SUM}", "reciprocal a", f"sum %1 {SUM}", "mul %0 %2"],
                                         ["div a a", f"sum %0 {SUM}"]),
    "a / sum(a) summed is not 1/a": rule([f"sum a {SUM}", "div a %0", f"sum %1 {SUM}", "mul a %2"],
                                         ["div a a"]),
    "one zero of a column": rule(["div b b", "mul a %0"], ["reciprocal b", "matmul a %0", "sub %1 %1", "add a %2"],
                                 a=["k", "k"], b=["k", "k"]),
    "exp(a)/exp(a) = a/a": rule(["exp a", "div %0 %0"], ["div a a"]),
    "max(a, b) - b is not a - max(a, b)": rule(["maximum a b", "sub %0 b"], ["maximum a b", "sub a %0"]),
    "relu(-a) is not a - relu(a)": rule(["neg a", "relu %0"], ["relu a", "sub a %0"]),
    "relu(a) relu(b) is not a relu(b)": rule(["relu a", "relu b", "mul %0 %1"], ["relu b", "mul a %0"]),
    "a max(a, b) is not the square": rule(["maximum a b", "mul a %0"], ["maximum a b", "mul %0 %0"]),
    "a sum of roots may be 0": rule(["relu a", "sqrt %0", f"sum %1 {SUM}", "mul b %2"],
                                    ["relu a", "sqrt %0", f"sum %1 {SUM}", "div %2 %2", "mul %2 %3", "mul b %4"]),
    "max(a, max(a)) is not a": rule([f"max a {SUM}", "maximum a %0"], ["a"]),
    "max(a) = a, of two elements": rule([f"max a {SUM}"], [f"mean a {SUM}"], a=["m", 2]),
    "max(a, exp(a)) is not a": rule(["exp a", "maximum a %0"], ["a"]),
    "min(a, tanh(a)) is not a": rule(["tanh a", "minimum a %0"], ["a"]),
    "a plus its sum, of two columns": rule([f"sum a {SUM}", "add a %0", "div %1 %1"], ["div a a"], a=["m", 2]),
    "a plus its largest, of two columns": rule([f"max a {SUM}", "add a %0", "div %1 %1"], ["div a a"], a=["m", 2]),
    "max(a, its mean), of two columns": rule([f"mean a {SUM}", "maximum a %0", "div %1 %1"], ["div a a"], a=["m", 2]),
    "the sum alone, of one column": rule([f"sum a {SUM}", "add a %0", "div %1 %1"], ["reciprocal a"], a=["m", 1]),
}
#: right rules of one column, and the wrong ones of two
COLUMNS = {"a plus its sum, of one column": "a plus its sum, of two columns",
           "a plus its largest, of one column": "a plus its largest, of two columns",
           "max(a, its mean), of one column": "max(a, its mean), of two columns"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RIGHT)
def test_what_cancels_is_proved(name):
    check_rule(certified(RIGHT[name]))
    assert find_counterexample(RIGHT[name]) is None


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_cancel_is_refuted(name):
    assert not isinstance(prove(WRONG[name], refute=False), Proved)
    assert isinstance(find_counterexample(WRONG[name]), Refuted)


@pytest.mark.parametrize("name", ["a * (b/a) = b", "a plus its sum, of one column", "ab / ab = b/b, of one product"])
def test_second_judge_agrees(name):
    assert not judgement(RIGHT[name]).against


@pytest.mark.parametrize("name", ["of another tensor", "a / sum(a) summed is not 1/a"])
def test_second_judge_agrees_of_what_is_wrong(name):
    assert judgement(WRONG[name]).against


def test_nothing_divides_by_more_than_was_divided_by():
    """a * (b/a) is b from left to right alone."""
    for name in ("a * (b/a) = b", "b * (a/a) = b", "1 / (1/a) = a", "1 / (a/b) = b/a", "relu(a)/relu(a) = a/a"):
        assert certified(RIGHT[name]).certificate["backward"] is None, name
    for name in ("1 / (ab) = 1/a * 1/b", "2a / 2a = a/a", "min(a, max(a)) = a"):
        assert certified(RIGHT[name]).certificate["backward"] is not None, name


def test_of_what_is_nowhere_defined_nothing_is_said():
    nowhere = rule(["sub a a", "div b %0"], ["sub b a"])
    assert not defined_somewhere(nowhere) and all(map(defined_somewhere, RIGHT.values()))


def attacked(name, change):
    """A right rule's certificate with its steps changed."""
    data = json.loads(json.dumps(dump_rule(certified(RIGHT[name]))))
    change(data["certificate"]["outputs"][0]["steps"])
    return data


def steps_of(name):
    return certified(RIGHT[name]).certificate["outputs"][0]["steps"]


@pytest.mark.parametrize("name", [name for name in RIGHT if any(
    step[0] in ("unit", "nonzero", "largest") for step in steps_of(name))])
def test_no_step_can_be_left_out(name):
    for place, (word, *_) in enumerate(steps_of(name)):
        if word in ("nonzero", "divisor inside"):  # which may be of a divisor that is not used
            continue
        with pytest.raises(CertificateError):
            check(attacked(name, lambda steps, place=place: steps.pop(place)))


def moved(wrong, right, steps):
    """A wrong rule with the certificate of a right one, bound to it as a forger would, and other steps."""
    certificate = copy.deepcopy(dict(certified(right).certificate)) | {"rule": content_hash(wrong)}
    certificate["outputs"][0]["steps"] = steps
    return dump_rule(replace(wrong, certificate=json.loads(json.dumps(certificate))))


@pytest.mark.parametrize("name", COLUMNS)
def test_a_variable_of_two_values_is_not_fixed_inside(name):
    """A proof for one column is none for two."""
    with pytest.raises(CertificateError):
        check(moved(WRONG[COLUMNS[name]], RIGHT[name], steps_of(name)))


def inner(steps):
    """Every list of steps that others have inside."""
    for step in steps:
        if step[0] in ("inside", "divisor inside"):
            yield step[-1]
            yield from inner(step[-1])


@pytest.mark.parametrize("name", [name for name in RIGHT if any(inner(steps_of(name)))])
def test_no_step_inside_can_be_left_out_or_be_another(name):
    """Those for values; what is divided by may be rewritten for nothing."""
    def all_of(steps):
        return list(inner([step for step in steps if step[0] == "inside"]))

    for place, found in enumerate(all_of(steps_of(name))):
        for k, step in enumerate(found):
            with pytest.raises(CertificateError):
                check(attacked(name, lambda steps, place=place, k=k: all_of(steps)[place].pop(k)))
            if step[0] == "fix":
                for value in ("1", "-1", "$0", "@0+1"):
                    with pytest.raises(CertificateError):
                        check(attacked(name, lambda steps, place=place, k=k, value=value:
                                       all_of(steps)[place][k].__setitem__(3, value)))


KEEPING = [["split", 0, "@0", ">="], ["guard", 0, "0", ">=", [[]]], ["unit", 0, 0, [], []], ["divisor inside", 0, []]]
CHANGING = [
    ["drop", 0, None], ["drop", 0, []], ["count", 0, 0, []], ["merge", 0, 0, [], [], [], [], [], []],
    ["context split", 0, "1", []], ["context fact", "0", []], ["divide variable", 0, 0, "1", []],
    ["division", 0, "0//1", "0", [], []], ["nonzero", 0, [0, 0]], ["put", 0, [], []], ["inside", 0, 0, []],
    ["inside", 0, -1, []], ["inside", 0, True, []], ["inside", 0, 9, []], ["fix", 0, 0, "0", [], []],
    ["case", "@0", ">=", [[], []]], ["order", [0, 0], [], [0], [[], []]], ["void", 0, [], []], ["lower", 0, 0, [], []],
    ["given", None, 0, [], [], "1"], ["below", 0, "log"], ["raise", 0], ["cover", 0, 1, [], [], []], ["sign", 0],
    ["end"], ["run", []], ["rewritten"], [["fix"], 0],
]


@pytest.mark.parametrize("step", CHANGING)
def test_inside_a_sum_stays_what_it_is(step):
    with pytest.raises(CertificateError):
        check(attacked("a plus its sum, of one column", lambda steps: next(inner(steps)).insert(0, step)))


@pytest.mark.parametrize("step", KEEPING)
def test_inside_steps_that_keep_a_sum_are_taken(step):
    check(attacked("a plus its sum, of one column", lambda steps: next(inner(steps)).insert(0, step)))


@pytest.mark.parametrize("step", [step for step in (*CHANGING, *KEEPING) if step[0] not in ("fix", "inside")])
def test_members_of_a_maximum_stay_the_members(step):
    """A member that is split would be two, of which one may have no values."""
    right = rule([f"max a {SUM}", "maximum a %0"], [f"max a {SUM}", "maximum %0 a"])
    with pytest.raises(CertificateError, match="no step within atoms"):
        check(moved(right, right, [["inside", 0, 0, [step]], *certified(right).certificate["outputs"][0]["steps"]]))


@pytest.mark.parametrize("step", [["inside", 0, 0, []], ["inside", 0, -1, []], ["inside", 0, True, []],
                                  ["inside", -1, 0, []], ["divisor inside", -1, []], ["divisor inside", True, []],
                                  ["divisor inside", 9, []]])
def test_inside_of_nothing_is_nothing(step):
    right = rule(["add a b"], ["add b a"])
    with pytest.raises(CertificateError):
        check(moved(right, right, [step, *certified(right).certificate["outputs"][0]["steps"]]))


SAME = [[[], []], [[], []]]


@pytest.mark.parametrize("unit", [["unit", 1, 0, [], []], ["unit", 0, 0, [], []], ["unit", 1, -1, [], []],
                                  ["nonzero", 0, [0, 0]], ["unit", 1, 0, ["@0"], []], ["unit", 1, True, [], []]])
def test_a_divisor_is_one_of_the_source(unit):
    """a + b is not (a + b) * (a/a), though the target divides by a."""
    right = rule(["add a b"], ["add b a"])
    wrong = rule(["add a b"], ["div a a", "add a b", "mul %0 %1"])
    with pytest.raises(CertificateError):
        check(moved(wrong, right, [unit]))


@pytest.mark.parametrize("value, guard", [("0", []), ("@1", []), ("@0", []), ("k", [[[]], [[]]]), ("k-1", [[], []]),
                                          ("-1", [[], []]), ("@1", [[["1", [0]]], [["1", [1]]]]), ("$0", [])])
def test_a_divisor_is_taken_where_it_is_one(value, guard):
    """The values of a divisor's variables are witnessed to be within its guards."""
    right = RIGHT["sum(b/b * a) = sum(a)"]
    [place] = [k for k, step in enumerate(steps_of("sum(b/b * a) = sum(a)")) if step[0] == "unit"]
    with pytest.raises(CertificateError):
        check(attacked("sum(b/b * a) = sum(a)", lambda steps: steps[place].__setitem__(slice(3, 5), [[value], guard])))
    check_rule(certified(right))


@pytest.mark.parametrize("path", [[], [0], [0, 1], [1, 0], [0, -1], [-1, 0], [True, 0], [0, 0, 0], [0, 0, 0, 0],
                                  [0, 0, 1, 0], ["0", 0], [0, 0] * 40, None])
def test_a_part_is_not_0_only_where_nothing_else_would_do(path):
    """exp(a) is not 0, whatever a is."""
    wrong = WRONG["exp(a)/exp(a) = a/a"]
    same = rule(["exp a", "div %0 %0"], ["div %0 %0", "exp a"][::-1])
    with pytest.raises(CertificateError):
        check(moved(wrong, same, [["nonzero", 0, path], ["unit", 0, 1, [], []], ["unit", 1, 0, [], []]]))


@pytest.mark.parametrize("step", [
    ["absorb", 0, 1], ["absorb", 0, 0], ["absorb", 1, 0], ["absorb", 0, -1], ["square", 0, 0], ["square", 0, -1],
    ["square", 1, 0], ["square", True, 0], ["positive", 0, 0, 0, [], []], ["positive", 0, -1, 0, [], []],
    ["largest", 0, 0, 0, [], [], [[], []]], ["largest", 0, -1, 0, [], [], [[], []]],
    ["largest", 0, 0, 1, ["@1"], [[], []], [[], []]], ["largest", 0, 0, 0, [], [], [[["lower", 0, 0, [], []]], []]],
    ["largest", 0, True, 0, [], [], [[], []]], ["largest", 0, 0, 0, [], [], []], ["lower", 0, 0, [], []],
])
def test_no_member_above_another_is_forgotten(step):
    """The larger of a and the largest of its row is not a."""
    right = rule([f"max a {SUM}", "maximum a %0"], [f"max a {SUM}", "maximum %0 a"])
    read = ["merge", 0, 1, [], [], [], [], [0], [SAME]]
    with pytest.raises(CertificateError):
        check(moved(WRONG["max(a, max(a)) is not a"], right, [step, read]))
    with pytest.raises(CertificateError):
        check(moved(WRONG["max(a, max(a)) is not a"], right, [step, ["merge", 1, 2, *read[3:]]]))


def test_bound_names_stay_apart():
    """A divisor that is used twice, within sums over names of its own."""
    twice = rule(["softmax a axis=1", f"sum %0 {SUM}", "mul %1 %1", "mul b %2"], ["b"])
    check_rule(certified(twice))
    with pytest.raises(CertificateError):
        check(moved(rule(["softmax a axis=1", f"sum %0 {SUM}", "mul %1 %1", "mul b %2"], ["add b b"]), twice,
                    certified(twice).certificate["outputs"][0]["steps"]))


def test_a_sum_is_above_0_where_a_value_of_it_is_named():
    """Roots are at least 0, and may all be."""
    right = rule(["relu a", "sqrt %0", f"sum %1 {SUM}", "mul b %2"], ["relu a", "sqrt %0", f"sum %1 {SUM}", "mul %2 b"])
    for value, guards in (("0", [[["1", [0]]], []]), ("@1", [[], []]), ("0", [])):
        data = moved(WRONG["a sum of roots may be 0"], right, steps_of("max(a, b) - b = a - min(a, b)"))
        data["certificate"]["outputs"][0]["defined"][""] = [["positive", 0, 0, [value], guards]]
        with pytest.raises(CertificateError):
            check(data)
