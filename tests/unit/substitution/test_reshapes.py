"""Reshapes: the laws that the library has, their wrong neighbours, and what generator and prover need for them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mlc.operators.index import FloorDiv, Poly
from mlc.substitution.applicable import signatures
from mlc.substitution.check import CertificateError, check
from mlc.substitution.check.integers import Quotient, translated
from mlc.substitution.check.witness import check_division
from mlc.substitution.codec import RuleError, condition_text, content_hash, dump_rule, load_rule, parse_size
from mlc.substitution.derive import derivable
from mlc.substitution.entailment import Facts
from mlc.substitution.fingerprint import agree, assignments
from mlc.substitution.graph import Graph
from mlc.substitution.prove import Proved, Refuted, certified, prove
from mlc.substitution.quotients import resolve
from mlc.substitution.refute import find_counterexample, judge
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules
from mlc.substitution.space import area_of
from mlc.substitution.unify import generalise, merged_sizes, products
from tests.unit.substitution.mutants import mutants


@cache
def reshapes() -> tuple[Rule, ...]:
    return tuple(rule for rule in shipped_rules() if area_of(rule.name) == "reshapes")


def law(inputs: dict[str, str], source: list[list[Any]], target: list[list[Any]], *conditions: str) -> Rule:
    """A rule of one output: nodes are ``[op, inputs, attributes]``; an integer among the inputs is a node."""

    def graph(nodes: list[list[Any]]) -> dict[str, Any]:
        made = [{"op": op, "inputs": [f"%{i}" if isinstance(i, int) else i for i in given],
                 "attributes": dict(*attributes)} for op, given, *attributes in nodes]
        return {"nodes": made, "outputs": [f"%{len(made) - 1}" if made else "a"]}

    return load_rule({"name": "law", "inputs": {name: shape.split() for name, shape in inputs.items()},
                      "source": graph(source), "target": graph(target), "conditions": list(conditions)})


def to(*shape: str | int) -> dict[str, Any]:
    return {"shape": list(shape)}


SAME = law({"a": "n m"}, [["reshape", ["a"], to("n", "m")]], [])
TWICE = law({"a": "n m"}, [["reshape", ["a"], to("p", "q", "r")], ["reshape", [0], to("s", "t")]],
            [["reshape", ["a"], to("s", "t")]], "n*m == p*q*r", "p*q*r == s*t")
ADD = law({"a": "n m", "b": "n m"},
          [["reshape", ["a"], to("p", "q", "r")], ["reshape", ["b"], to("p", "q", "r")], ["add", [0, 1]]],
          [["add", ["a", "b"]], ["reshape", [0], to("p", "q", "r")]], "n*m == p*q*r")
FUNCTION = law({"a": "n m"}, [["relu", ["a"]], ["reshape", [0], to("n*m")]],
               [["reshape", ["a"], to("n*m")], ["relu", [0]]])
SCALAR = law({"a": "n m", "b": ""}, [["mul", ["a", "b"]], ["reshape", [0], to("n*m")]],
             [["reshape", ["a"], to("n*m")], ["mul", ["b", 0]]])
BIAS = law({"a": "n m c", "b": "1 1 c"},
           [["reshape", ["a"], to("n*m", "c")], ["reshape", ["b"], to(1, "c")], ["add", [0, 1]]],
           [["add", ["a", "b"]], ["reshape", [0], to("n*m", "c")]])
KEPT = law({"a": "n m c", "b": "n m d"},
           [["reshape", ["a"], to("n*m", "c")], ["reshape", ["b"], to("n*m", "d")], ["concat", [0, 1], {"axis": 1}]],
           [["concat", ["a", "b"], {"axis": 2}], ["reshape", [0], to("n*m", "c+d")]])
OUTER = law({"a": "n m c", "b": "k m c"},
            [["reshape", ["a"], to("n*m", "c")], ["reshape", ["b"], to("k*m", "c")], ["concat", [0, 1], {"axis": 0}]],
            [["concat", ["a", "b"], {"axis": 0}], ["reshape", [0], to("n*m+k*m", "c")]])
CUT = law({"a": "i+j+k-2 m c"},
          [["slice", ["a"], {"axis": 0, "begin": "i-1", "end": "i+j-1"}], ["reshape", [0], to("j*m", "c")]],
          [["reshape", ["a"], to("(i+j+k-2)*m", "c")],
           ["slice", [0], {"axis": 0, "begin": "(i-1)*m", "end": "(i+j-1)*m"}]])
UNIT = law({"a": "1 n m"}, [["transpose", ["a"], {"perm": [1, 2, 0]}]], [["reshape", ["a"], to("n", "m", 1)]])
MOVED = law({"a": "n m c"}, [["transpose", ["a"], {"perm": [2, 0, 1]}], ["reshape", [0], to("c", "n*m")]],
            [["reshape", ["a"], to("n*m", "c")], ["transpose", [0], {"perm": [1, 0]}]])
BATCH = law({"a": "1 m k", "b": "1 k n"},
            [["reshape", ["a"], to("m", "k")], ["reshape", ["b"], to("k", "n")], ["matmul", [0, 1]]],
            [["matmul", ["a", "b"]], ["reshape", [0], to("m", "n")]])
LAWS = {"same": SAME, "twice": TWICE, "add": ADD, "function": FUNCTION, "scalar": SCALAR, "bias": BIAS, "kept": KEPT,
        "outer": OUTER, "cut": CUT, "unit": UNIT, "moved": MOVED, "batch": BATCH}


@pytest.mark.parametrize("name", sorted(LAWS))
def test_law_is_proved_and_in_the_library(name: str) -> None:
    """The checker takes the proof, and the rules of the library give the law."""
    found = prove(LAWS[name], refute=False)
    assert isinstance(found, Proved)
    check(json.loads(json.dumps(dump_rule(replace(LAWS[name], certificate=found.certificate)))))
    assert derivable(shipped_rules(), [LAWS[name]]) == [True]


WRONG = {
    "twice, other sizes": law({"a": "n m"}, [["reshape", ["a"], to("m", "n")]], []),
    "a transpose is no reshape": law({"a": "n m"}, [["transpose", ["a"], {"perm": [1, 0]}]],
                                     [["reshape", ["a"], to("m", "n")]]),
    "only one operand": law({"a": "n m", "b": "n m"}, [["add", ["a", "b"]], ["reshape", [0], to("m", "n")]],
                            [["reshape", ["a"], to("m", "n")], ["reshape", ["a"], to("m", "n")], ["add", [0, 1]]]),
    "a bias of the merged axis": law(
        {"a": "n n n", "b": "1 n 1"}, [["add", ["a", "b"]], ["reshape", [0], to("n*n", "n")]],
        [["reshape", ["a"], to("n*n", "n")], ["reshape", ["b"], to(1, "n")], ["add", [0, 1]]]),
    "joined inside": law(
        {"a": "n m c", "b": "n k c"},
        [["reshape", ["a"], to("n*m", "c")], ["reshape", ["b"], to("n*k", "c")], ["concat", [0, 1], {"axis": 0}]],
        [["concat", ["a", "b"], {"axis": 1}], ["reshape", [0], to("n*m+n*k", "c")]]),
    "cut by the wrong stride": law(
        {"a": "i+j+k-2 m c"},
        [["slice", ["a"], {"axis": 0, "begin": "i-1", "end": "i+j-1"}], ["reshape", [0], to("j*m", "c")]],
        [["reshape", ["a"], to("(i+j+k-2)*m", "c")],
         ["slice", [0], {"axis": 0, "begin": "i-1", "end": "i+j*m-1"}]]),
    "merged in the other order": law(
        {"a": "n m c"}, [["transpose", ["a"], {"perm": [2, 1, 0]}], ["reshape", [0], to("c", "n*m")]],
        [["reshape", ["a"], to("n*m", "c")], ["transpose", [0], {"perm": [1, 0]}]]),
    "moved with an axis that is not 1": law(
        {"a": "2 n m"}, [["transpose", ["a"], {"perm": [1, 2, 0]}]], [["reshape", ["a"], to("n", "m", 2)]]),
    "rows of two batches": law(
        {"a": "2 m k", "b": "2 k n"},
        [["reshape", ["a"], to("2*m", "k")], ["reshape", ["b"], to("k", "2*n")], ["matmul", [0, 1]],
         ["reshape", [2], to(4, "m", "n")], ["slice", [3], {"axis": 0, "begin": 0, "end": 2}]],
        [["matmul", ["a", "b"]]]),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_neighbour_has_a_counterexample(name: str) -> None:
    found = prove(WRONG[name])
    assert isinstance(found, Refuted) and isinstance(judge(WRONG[name], found.sizes), Refuted)
    assert derivable(shipped_rules(), [WRONG[name]]) == [False]


def test_equal_numbers_of_elements_are_a_condition() -> None:
    """They are told by no one shape; of three, two equations say it."""
    free = replace(TWICE, conditions=())
    made = generalise(free)
    assert made is not None
    assert {condition_text(c) for c in made.conditions} == {"m*n == p*q*r", "p*q*r == s*t"}
    assert generalise(law({"a": "n m"}, [["reshape", ["a"], to("p")]], [["reshape", ["a"], to("n*m")]])) is not None
    assert generalise(law({"a": "n m", "b": "p q"}, [["add", ["a", "b"]]], [["add", ["b", "a"]]])).conditions == ()
    assert products(parse_size("a*b-c*d")) and not products(parse_size("a*b-2*c*d")) and not products(parse_size("a*b"))


def test_sizes_that_are_drawn_meet_equal_products() -> None:
    drawn = list(assignments(TWICE, 8))
    assert len(drawn) == 8 and len({tuple(sizes.values()) for sizes in drawn}) == 8
    assert all(sizes["n"] * sizes["m"] == sizes["s"] * sizes["t"] and agree(TWICE, sizes) for sizes in drawn)


@pytest.mark.parametrize("divisor", ["c", "c*d"])
def test_a_quotient_of_a_quotient_is_one(divisor: str) -> None:
    """Whatever is divided; and the witnesses are those of this quotient alone."""
    facts = [*(Poly.symbol(name) - 1 for name in "abcd"), Poly.symbol("@0")]
    numerator = parse_size("@0*a+b")
    inner = numerator // parse_size("a*b")
    quotient = FloorDiv(inner, parse_size(divisor))
    found = resolve(quotient, Facts(facts))
    assert found is not None and found[0] == numerator // parse_size(f"a*b*{divisor}")
    by, low, high = json.loads(json.dumps([str(found[0]), _texts(found[1]), _texts(found[2])]))
    known, given = Quotient(translated(inner), translated(parse_size(divisor))), [translated(fact) for fact in facts]

    def read(text: Any) -> Any:
        return translated(parse_size(text))

    check_division(known, read(by), low, high, given, read)
    for wrong in (f"{by}+1", str(numerator // parse_size("a*b")), str(numerator // parse_size(divisor))):
        with pytest.raises(CertificateError):
            check_division(known, read(wrong), low, high, given, read)


def _texts(witness: Any) -> Any:
    if isinstance(witness, Poly):
        return str(witness)
    return list(map(_texts, witness)) if isinstance(witness, list) else witness


def test_a_quotient_by_what_may_be_negative_is_left_alone() -> None:
    inner = parse_size("@0") // parse_size("@1")
    assert resolve(FloorDiv(inner, Poly.symbol("c")), Facts([Poly.symbol("c") - 1])) is None


def test_a_condition_cannot_be_left_out() -> None:
    """A certificate is for its rule: not for one without a condition, not for other shapes."""
    rule = certified(law({"a": "n m"}, [["reshape", ["a"], to("p", "q")], ["relu", [0]]],
                         [["relu", ["a"]], ["reshape", [0], to("p", "q")]], "n*m == p*q"))
    for data in (dump_rule(replace(rule, conditions=())), _other_shape(dump_rule(rule))):
        with pytest.raises(CertificateError, match="hash differs"):
            check(data)
        data["certificate"] = {**data["certificate"], "rule": content_hash(load_rule(data))}
        if data["conditions"]:
            with pytest.raises(CertificateError):
                check(data)


def _other_shape(data: dict[str, Any]) -> dict[str, Any]:
    changed = json.loads(json.dumps(data))
    node = changed["target"]["nodes"][-1]
    node["attributes"]["shape"] = node["attributes"]["shape"][::-1]
    return changed


def test_operators_are_at_the_ranks_that_reshapes_make() -> None:
    assert signatures(ADD.source, ADD.shapes) == {("reshape", 3), ("add", 3)}
    assert signatures(ADD.target, ADD.shapes) == {("reshape", 3), ("add", 2)}


def test_no_mutant_of_a_reshape_is_proved() -> None:
    found, proved = 0, []
    for _, mutant in mutants(list(reshapes()), seed=1):
        if found >= 40:
            break
        with suppress(RuleError):
            if find_counterexample(mutant, tries=6) is not None:
                found += 1
                proved += [mutant] * isinstance(prove(mutant, refute=False), Proved)
    assert found == 40 and not proved


def test_the_name_of_a_product_of_sizes_is_the_same_in_every_process() -> None:
    for letters in ("n m", "m n", "b a d c"):
        size = parse_size("*".join(letters.split()))
        rule = Rule("r", {"x": (size,)}, Graph((), ("x",)), Graph((), ("x",)))
        assert merged_sizes(rule).shapes["x"] == (Poly.symbol(f"{min(letters.split())}'"),)
