"""What is not 0 as a quotient of what is not, as a sum of what is at least 0, or as the member of a maximum."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

import mlc.substitution.prove as prove_module
from mlc.substitution.check import CertificateError, check, check_rule
from mlc.substitution.check.integers import Guard
from mlc.substitution.check.integers import name as name_of
from mlc.substitution.check.play import Play
from mlc.substitution.check.terms import Term
from mlc.substitution.codec import content_hash, dump_rule
from mlc.substitution.goal_defined import prove_defined
from mlc.substitution.normal import Function
from mlc.substitution.prove import Proved, certified, prove
from mlc.substitution.refute import Refuted, find_counterexample
from tests.unit.substitution.small_rules import SUM, rule
from tests.unit.substitution.test_cases import steps_in

SQUARE = {"a": ["m", "m"]}
RIGHT = {
    "1/(a + 1) = a/(a + aa)": rule(["div a a", "add a %0", "reciprocal %1"], ["mul a a", "add a %0", "div a %1"]),
    "aa/(a + aa) = a/(a + 1)": rule(["mul a a", "add a %0", "div %0 %1"], ["div a a", "add a %0", "div a %1"]),
    "aa/(aa - a) = a/(a - 1)": rule(["mul a a", "sub %0 a", "div %0 %1"], ["div a a", "sub a %0", "div a %1"]),
    "(a-b)/(a-b) = (b-a)/(b-a)": rule(["sub a b", "div %0 %0"], ["sub b a", "div %0 %0"]),
    "sum(sqrt(a)) is not 0": rule(["sqrt a", f"sum %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "mean(log(a)) is not 0": rule(["log a", f"mean %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "max(rsqrt(a)) is not 0": rule(["rsqrt a", f"max %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "softmax(log(a)) is of what is above 0": rule(["log a", "softmax %0 axis=1", f"sum %1 {SUM}"],
                                                  [f"sum a {SUM}", "div %0 %0"]),
    "relu(a) rsqrt(relu(a)) = relu(a) rsqrt(a)": rule(["relu a", "rsqrt %0", "mul %0 %1"],
                                                      ["relu a", "rsqrt a", "mul %0 %1"]),
    "relu(tanh(a)) is not 0": rule(["tanh a", "relu %0", "reciprocal %1"], ["log a", "sub %0 %0", "tanh a",
                                                                             "reciprocal %2", "add %1 %3"]),
    "mean(a) mean(a) is not 0": rule([f"mean a {SUM}", "mul %0 %0", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "gelu(mean(a)) is not 0": rule([f"mean a {SUM}", "gelu %0", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "min(a, sigmoid(a)) is not 0": rule(["sigmoid a", "minimum a %0", "div %1 %1"], ["div a a"]),
    "min(1, a sum of ones) = 1": rule(["div a a", f"sum %0 {SUM}", "minimum %0 %1"], ["div a a"]),
    "max(1, a product of ones)": rule(["div a a", "matmul %0 %0", "maximum %0 %1"], ["div a a", "matmul %0 %0"],
                                      **SQUARE),
}
#: by the names of right ones, whose certificates they must not be shown by
WRONG = {
    "1/(a + 1) = a/(a + aa)": rule(["add a b", "reciprocal %0"], ["mul a a", "mul a b", "add %0 %1", "div a %2"]),
    "aa/(a + aa) = a/(a + 1)": rule(["mul a a", "add a %0", "div %0 %1"], ["div a a", "sub a %0", "div a %1"]),
    "aa/(aa - a) = a/(a - 1)": rule(["mul a a", "sub %0 a", "div %0 %1"], ["div a a", "sub %0 a", "div a %1"]),
    "(a-b)/(a-b) = (b-a)/(b-a)": rule(["sub a b", "div %0 %0"], ["add b a", "div %0 %0"]),
    "sum(sqrt(a)) is not 0": rule(["erf a", f"sum %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "mean(log(a)) is not 0": rule(["tanh a", f"mean %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "max(rsqrt(a)) is not 0": rule(["reciprocal a", f"max %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "softmax(log(a)) is of what is above 0": rule(["sqrt a", "softmax %0 axis=1", f"sum %1 {SUM}"],
                                                  [f"sum a {SUM}", "div %0 %0"]),
    "relu(a) rsqrt(relu(a)) = relu(a) rsqrt(a)": rule(["relu a", "sqrt %0", "mul %0 %1"],
                                                      ["relu a", "sqrt a", "mul %0 %1"]),
    "relu(tanh(a)) is not 0": rule(["tanh a", "reciprocal %0"], ["log a", "sub %0 %0", "tanh a", "reciprocal %2",
                                                                 "add %1 %3"]),
    "mean(a) mean(a) is not 0": rule(["mul a a", f"mean %0 {SUM}", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "gelu(mean(a)) is not 0": rule([f"mean a {SUM}", "sigmoid %0", "div %1 %1"], [f"sum a {SUM}", "div %0 %0"]),
    "min(a, sigmoid(a)) is not 0": rule(["sigmoid a", "maximum a %0", "div %1 %1"], ["div a a"]),
    "min(1, a sum of ones) = 1": rule(["div a a", f"sum %0 {SUM}", "maximum %0 %1"], ["div a a"]),
    "max(1, a product of ones)": rule(["div a a", "matmul %0 %0", "minimum %0 %1"], ["div a a", "matmul %0 %0"],
                                      **SQUARE),
}
WORDS = {"ratio", "some", "larger", "rooted", "groups", "common", "sizes"}


@cache
def right(name):
    return certified(RIGHT[name])


def words_of(name):
    return {step[0] for steps in steps_in(dict(right(name).certificate)) for step in steps}


@pytest.mark.parametrize("name", RIGHT)
def test_is_proved(name):
    check_rule(right(name))
    assert find_counterexample(RIGHT[name], tries=20) is None


def test_every_step_is_used_by_some():
    assert set().union(*map(words_of, RIGHT)) >= WORDS


@pytest.mark.parametrize("name", WRONG)
def test_its_neighbour_is_wrong_and_is_not_proved(name):
    assert isinstance(find_counterexample(WRONG[name]), Refuted)
    assert not isinstance(prove(WRONG[name], refute=False), Proved)
    data = dump_rule(replace(WRONG[name], certificate=dict(right(name).certificate) | {
        "rule": content_hash(WRONG[name])}))
    with pytest.raises(CertificateError):
        check(data)


@pytest.fixture
def forged(monkeypatch):
    """Makes a rule that is right of values, with these steps for where its target is defined: the target has 0 beside
    what the source is, as ``x - x`` of one that may be undefined."""
    def make(source, more, steps):
        def defined(goal):
            functions = any(isinstance(term.atoms[0], Function) for term in goal.terms.values())
            return steps if functions else prove_defined(goal)

        at = len(source) - 1
        lines = [re.sub(r"%(\d+)", lambda found: f"%{int(found[1]) + at + 1}", line) for line in more]
        end = at + len(more)
        found = rule(source, [*source, *lines, f"sub %{end} %{end}", f"add %{at} %{end + 1}"])
        with monkeypatch.context() as patched:
            patched.setattr(prove_module, "prove_defined", defined)
            proof = prove(found, refute=False)
        assert isinstance(proof, Proved)
        certificate = json.loads(json.dumps(dict(proof.certificate)))
        certificate |= {"backward": None, "whole": {**certificate["whole"], "backward": []}}
        return dump_rule(replace(found, certificate=certificate))

    return make


#: two reads are the same
READ = ["merge", 0, 1, [], [], [], [], [0], [[[[], []], [[], []]]]]
#: of the first demand of the target nothing is to be shown but that the source has it
COVERED = ["cover", 0, 2, [], [], [READ]]
BY_SUM = (["div b a"], [f"sum a {SUM}", "reciprocal %0"])
TWICE = ["merge", 0, 1, [], [], [], [], [0, 1], [[[[], []], [[], []]]] * 2]


def test_the_forger_would_be_believed(forged):
    """If the source is of what it says; so that what is refused below is refused for what it says."""
    at, thrice = [0, [], []], [*TWICE[:7], [0, 1, 2], TWICE[8][:1] * 3]
    for step in (["ratio", 1, 0, [], [at] * 2, "1", [TWICE]], ["ratio", 1, 0, [at], [at] * 3, "1", [thrice]]):
        check(forged(["div b a"], ["mul a a", "reciprocal %0"], [COVERED, step]))
    check(forged(["relu a", "reciprocal %0"], ["log a"], [["larger", 0, 0, 0], ["cover", 0, 2, [], [], [max_of()]],
                                                          ["cover", 1, 3, [], [], [READ]]]))


def max_of():
    """Two maxima of a and 0 are the same."""
    ways = [[0, [], [], [READ]], [1, [], [], []]]
    return ["merge", 0, 1, [], [], [], [], [0], [[ways, ways]]]


@pytest.mark.parametrize("step", [
    ["ratio", 1, 0, [], [], "1", []], ["ratio", 1, 0, [[0, [], []]], [[0, [], []]], "0", []],
    ["ratio", 1, 0, [], [[0, [], []]], "1", []], ["ratio", 1, 0, [], [[0, [], []]], "1/0", []],
    ["ratio", 1, 0, [], [[0, [], []]] * 5, "1", []], ["ratio", 1, True, [], [[0, [], []]], "1", []],
    ["ratio", 2, 0, [], [[0, [], []]], "1", [READ]], ["ratio", -1, 0, [], [[0, [], []]], "1", [READ]],
    ["ratio", 1, 0, [[0, [], []]], [[0, [], []]], "1", [READ]], ["ratio", 1, 0, [], [[0, [], []]], "1", [READ]],
    ["some", 1, 0, 0, [], [], [[]], [[0, ["@1"], [[[["1", [4]]]], [[["1", [5]]]]]]]],
    ["some", 1, 0, 0, [], [], [[["given", None, 0, [], [], "1"]]], [[0, ["@1"], [[[["1", [4]]]], [[["1", [5]]]]]]]],
    ["some", 1, 0, 0, [], [], [[["drop", 0, None]]], [[0, ["@1"], [[[["1", [4]]]], [[["1", [5]]]]]]]],
    ["some", 1, 0, 0, [], [], [], []], ["some", 1, 0, 0, [], [], [[]], []],
    ["some", 2, 0, 0, [], [], [[]], [[0, [], []]]], ["larger", 0, 0, 0], ["rooted", 0], ["groups", 0],
    ["common", 0, []], ["common", 0, [[]]], ["common", -1, []], ["groups", True], ["larger", 0, -1, 0],
    ["rooted", -1], ["sizes", [0], []], ["least", 1, 0, [0, [], []], []], ["quotient", 1, 0, [], [], "1", []],
])
def test_a_sum_is_not_known_to_be_defined(forged, step):
    """Of a sum of numbers of both signs nothing is known, though of each that it is not 0."""
    twice = [step, [step[0], 2, *step[2:]]] if step[1] == 1 else [step]  # the sum is written twice, and demanded so
    with pytest.raises(CertificateError, match=r"^(?!.*a demand of the target is covered by one of the source)"):
        check(forged(*BY_SUM, [["cover", 0, 3, *COVERED[3:]], *twice]))


SUMS = ["merge", 0, 1, ["$0"], ["$0"], [[[["1", [6]]]], [[["1", [7]]]]], [[[["1", [6]]]], [[["1", [7]]]]], [0],
        [[[[], []], [[], []]]]]


@pytest.mark.parametrize("source, more, steps, reason", [
    # the larger of two is not 0: neither has to be above 0
    (["maximum a b", "reciprocal %0"], ["log a"], [["larger", 0, 0, 0]], "at most 0"),
    (["relu a", "reciprocal %0"], ["log a"], [["larger", 0, 0, 1]], "one must be 0"),
    (["relu a", "reciprocal %0", "mul b %1"], ["log b"], [["larger", 0, 0, 0], ["cover", 1, 3, [], [], [READ]]],
     "one tensor"),
    # tanh(a) is not 0: a may be below
    (["tanh a", "reciprocal %0"], ["log a"], [["rooted", 0]], "not known"),
    (["exp a", "log %0"], ["log a"], [["rooted", 0]], "not known"),
    (["tanh a", "neg %0", "log %1"], ["log a"], [["rooted", 0]], "not known"),
    # sums over one variable are no product of sums, and a product of two with sums of their own has none in common
    ([f"sum a {SUM}", f"sum b {SUM}", "add %0 %1", "reciprocal %2"], [f"sum a {SUM}", "reciprocal %0"],
     [["common", 0, [[SUMS]]]], "one tensor"),
    ([f"sum a {SUM}", "add %0 b", "reciprocal %1"], [f"sum a {SUM}", "reciprocal %0"], [["common", 0, [[]]]], "left"),
])
def test_what_is_not_0_says_no_more_than_it_does(forged, source, more, steps, reason):
    with pytest.raises(CertificateError, match=reason):
        check(forged(source, more, steps))


def test_sums_over_the_same_are_no_product_of_sums(forged):
    """Of sum(ab) it is not known that sum(a) is not 0: the group is the whole."""
    data = forged(["mul a b", f"sum %0 {SUM}", "reciprocal %1"], [f"sum a {SUM}", "reciprocal %0"], [["groups", 0]])
    with pytest.raises(CertificateError, match="demands of the target are left"):
        check(data)


def test_what_is_known_of_a_variable_is_not_known_of_a_divisor_s():
    """A term that is summed over x adds a divisor for all x; where the term is rewritten for an x that is 0, divisors
    of other x are not: 1/exp(a[0]) is not 0, which follows if the divisor is a sum of nothing at 1."""
    one, x, n = Fraction(1), name_of("$x"), name_of("n")
    exp = ("call", "exp", (Term(one, (), (), (("read", "a", (x,)),)),))
    term = Term(one, ("$x",), (Guard(x, ">="), Guard(n - 1 - x, ">=")),
                (("call", "1/", (Term(one, (), (), (exp,)),)),))
    steps = [["split", 0, "@1 - 1", ">="], ["drop", 0, [["1", [5]], ["1", [8]]]]]  # -x >= 0 and x - 1 >= 0
    inside = [["divisor inside", 0, steps], ["unit", 0, 1, ["1"], [[[["1", [1]]]]]], ["drop", 1, [["1", [6]]]]]
    below = ["drop", 1, [["1", [2]], ["1", [4]]]]
    goal = Play(frozenset({"n"}), [], [n - 1, n - 2], [], [term])
    with pytest.raises(CertificateError, match="adds up"):
        goal.run([["positive", 0, 0, 0, [], []], ["split", 0, "$0", "=="], ["inside", 0, 0, inside], ["drop", 3, None],
                  below])
    assert len(goal.terms) == 3


def test_a_sum_loses_none_of_its_terms():
    """The same as a certificate: sum(1/exp(a)) would be the sum without its first term."""
    made = ["exp %0", "reciprocal %1", f"sum %2 {SUM}"]
    lines = ["slice a axis=1 begin=1 end=3", *made], ["slice a axis=1 begin=0 end=3", *made]
    right, wrong = rule(lines[0], lines[0], a=["m", 3]), rule(lines[1], lines[0], a=["m", 3])
    proof = prove(right, refute=False)
    assert isinstance(proof, Proved) and isinstance(find_counterexample(wrong), Refuted)
    text = json.dumps(dict(proof.certificate)["outputs"])
    same = ["merge", 0, 1, [], [], [], [], [0], [[["merge", 0, 1, [], [], [], [], [0], [[[[], []], [[], []]]]]]]]
    # what is known: m, @0 and @1 are 1 to 4, then $0 >= 0, 2 - $0 >= 0 and what the step before says of it
    inside = [["divisor inside", 1, [["split", 0, "@3 - 1", ">="], ["drop", 0, [["1", [8]], ["1", [11]]]]]],
              ["unit", 0, 2, ["1"], []], ["drop", 1, [["1", [9]]]]]
    steps = [["positive", 0, 0, 0, [], []], ["split", 0, "$0", "=="], ["inside", 0, 0, inside], ["drop", 4, None],
             ["drop", 2, [["1", [5]], ["1", [7]]]],
             ["merge", 3, 1, ["$0-1"], ["$0+1"], [[[["1", [7]]]], [[["1", [6]]]]],
              [[[["1", [5]], ["1", []]]], [[["1", [6]]]], [[["1", [5]]]]], [0], [[same]]]]
    reads = ["cover", 0, 1, ["$0+1"], [[[["1", [5]], ["1", []]]], [[["1", [6]]]]], [[[], []], [[], []]]]
    check(certified_by(right, proof, json.loads(text)))
    outputs = json.loads(text)
    outputs[0] |= {"steps": steps, "defined": {**outputs[0]["defined"], "a": [reads]}}
    with pytest.raises(CertificateError, match="adds up"):
        check(certified_by(wrong, proof, outputs))


def certified_by(found, proof, outputs):
    """The rule with a proof of another one and these outputs, of which nothing is claimed from right to left."""
    certificate = json.loads(json.dumps(dict(proof.certificate)))
    return {**dump_rule(found), "certificate": certificate | {
        "rule": content_hash(found), "outputs": outputs, "backward": None,
        "whole": {**certificate["whole"], "backward": []}}}


def test_what_is_known_in_a_proof_about_a_divisor_is_not_known_of_it():
    """Products of a sum over x, which is not 0, are compared where x is 0: nothing follows for other x."""
    one, x, n = Fraction(1), name_of("$x"), name_of("n")
    reads = [Term(one, (), (), (("read", tensor, (x,)),)) for tensor in "ab"]
    divisor = Term(one, ("$x",), (Guard(x, ">="), Guard(n - 1 - x, ">=")), (("call", "1/", tuple(reads)),))
    goal = Play(frozenset({"n"}), [], [n - 1, n - 2], [divisor])
    inside = ["divisor inside", 0, [["guard", 0, "-@1", ">=", [[["1", [5]]]]]]]  # x <= 0, as is known of the first x
    with pytest.raises(CertificateError, match="adds up"):
        goal.run([["common", 0, [[["case", "@0", "==", [[inside], [], []]]]]]])


@pytest.mark.parametrize("name", RIGHT)
def test_none_of_these_steps_can_be_left_out_or_be_of_less(name):
    """Each is needed, and so is what it is shown by."""
    text = json.dumps(dict(right(name).certificate)["outputs"])

    def attacked(change):
        data = dump_rule(RIGHT[name])
        data["certificate"] = dict(right(name).certificate) | {"outputs": json.loads(text)}
        change([(steps, step) for steps in steps_in(data["certificate"]["outputs"]) for step in steps
                if step[0] in ("ratio", "some", "sizes")])
        with pytest.raises(CertificateError):
            check(data)

    found = [step for steps in steps_in(json.loads(text)) for step in steps if step[0] in ("ratio", "some", "sizes")]
    for place, (word, *_) in enumerate(found):
        if word == "ratio":
            attacked(lambda each, place=place: each[place][1].__setitem__(5, "7"))
            attacked(lambda each, place=place: each[place][1].__setitem__(6, []))
            attacked(lambda each, place=place: each[place][1].__setitem__(4, []))
        elif word == "some":
            attacked(lambda each, place=place: each[place][1].__setitem__(6, [[]]))
            attacked(lambda each, place=place: each[place][1].__setitem__(7, []))
        else:
            attacked(lambda each, place=place: each[place][1].__setitem__(2, []))
            attacked(lambda each, place=place: each[place][0].remove(each[place][1]))
