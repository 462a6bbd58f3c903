"""Gathers: laws that are proved beside wrong neighbours, what is defined, and certificates that lie about indices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlc.operators import ShapeError
from mlc.operators.evaluate import FIELD, STRICT, evaluate, reference
from mlc.operators.index import Lookup, Poly
from mlc.substitution.check import CertificateError, check
from mlc.substitution.check.elements import WITHIN
from mlc.substitution.check.integers import bounded, name, parse
from mlc.substitution.codec import content_hash, dump_rule, load_rule
from mlc.substitution.compose import compose
from mlc.substitution.generate import generate
from mlc.substitution.indices import extents
from mlc.substitution.prove import Proved, Refuted, Undecided, prove
from mlc.substitution.refute import at_sizes
from mlc.substitution.shipped import shipped_rules
from mlc.substitution.space import FAMILIES
from tests.unit.graph.substitution_rules import rule

TABLES, BOTH = "x[n,k] y[n,k] i[s]", "x[n,k] y[n,k] i[s] j[s]"
NORM = "layer_norm({}, g, b, inverse_epsilon=e)"

LAWS = {
    "product": ("x[n,k] w[k,m] i[s]", "matmul(gather(x, i), w)", "gather(matmul(x, w), i)"),
    "columns": ("w[m,k] x[k,n] i[s]", "matmul(w, gather(x, i, axis=1))", "gather(matmul(w, x), i, axis=1)"),
    "function": ("x[n,k] i[s,t]", "gelu(gather(x, i))", "gather(gelu(x), i)"),
    "quotient": ("x[n,k] i[s]", "gather(reciprocal(x), i)", "reciprocal(gather(x, i))"),
    "quotient back": ("x[n,k] i[s]", "reciprocal(gather(x, i))", "gather(reciprocal(x), i)"),
    "sum": (TABLES, "add(gather(x, i), gather(y, i))", "gather(add(x, y), i)"),
    "softmax": ("x[n,k] i[s]", "softmax(gather(x, i), axis=1)", "gather(softmax(x, axis=1), i)"),
    "norm": ("x[n,k] g[k] b[k] i[s]", NORM.format("gather(x, i)"), f"gather({NORM.format('x')}, i)"),
    "rows of rows": ("x[n,k] i[s] j[t]", "gather(gather(x, i), j)", "gather(x, gather(i, j))"),
    "joined indices": ("x[n,k] i[s] j[t]", "concat(gather(x, i), gather(x, j), axis=0)",
                       "gather(x, concat(i, j, axis=0))"),
    "joined tables": ("x[n,k] y[n,l] i[s]", "concat(gather(x, i), gather(y, i), axis=1)",
                      "gather(concat(x, y, axis=1), i)"),
    "turned": ("x[n,k] i[s]", "gather(transpose(x, perm=(1,0)), i, axis=1)",
               "transpose(gather(x, i), perm=(1,0))"),
    "turned indices": ("x[n,k] i[s,t]", "transpose(gather(x, i), perm=(1,0,2))",
                       "gather(x, transpose(i, perm=(1,0)))"),
    "flat": ("x[n,k] i[s,t]", "reshape(gather(x, i), shape=(s*t,k))", "gather(x, reshape(i, shape=(s*t,)))"),
    "repeated": ("x[1,k] i[s]", "gather(expand(x, shape=(n,k)), i)", "expand(x, shape=(s,k))"),
    "one row": ("x[n,k] i[]", "relu(gather(x, i))", "gather(relu(x), i)"),
}
WRONG = {
    "other indices": (BOTH, "add(gather(x, i), gather(y, j))", "gather(add(x, y), i)"),
    "other axis": ("x[n,n] i[n]", "gather(x, i)", "gather(x, i, axis=1)"),
    "order of rows": ("x[n,k] i[n] j[n]", "gather(gather(x, i), j)", "gather(gather(x, j), i)"),
    "order of indices": ("x[n,k] i[s] j[s]", "concat(gather(x, i), gather(x, j), axis=0)",
                         "gather(x, concat(j, i, axis=0))"),
    "one index for all": ("x[n,k] i[s]", "gather(x, i)",
                          "gather(x, expand(slice(i, axis=0, begin=0, end=1), shape=(s,)))"),
    "softmax over rows": ("x[n,k] i[s]", "softmax(gather(x, i), axis=0)", "gather(softmax(x, axis=0), i)"),
    "norm of another row": ("x[n,n] i[n]", "softmax(gather(x, i), axis=1)", "gather(softmax(x, axis=1), i, axis=1)"),
    "sum of rows": ("x[n,k] i[s]", "sum(gather(x, i), axes=(0,))", "sum(x, axes=(0,))"),
    "indices in order": ("x[n,k] i[n]", "gather(x, i)", "x"),
    "out of range": ("x[n,k] y[m,k] i[s]", "add(gather(expand(slice(x, axis=0, begin=0, end=1), shape=(m,k)), i), "
                     "expand(slice(x, axis=0, begin=0, end=1), shape=(s,k)))",
                     "add(gather(expand(slice(x, axis=0, begin=0, end=1), shape=(n,k)), i), "
                     "expand(slice(x, axis=0, begin=0, end=1), shape=(s,k)))"),
    "quotient of all rows": ("x[n,k] i[s]", "gather(x, i)",
                             "gather(mul(x, mul(reciprocal(x), x)), i)"),
}


def stated(case: tuple[str, str, str]) -> Any:
    return rule("law", *case, proved=False)


@pytest.mark.parametrize("law", LAWS)
def test_law_is_proved_and_checked(law: str) -> None:
    found = stated(LAWS[law])
    proof = prove(found)
    assert isinstance(proof, Proved)
    check({**dump_rule(found), "certificate": proof.certificate})


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_neighbour_is_not_proved(wrong: str) -> None:
    found = stated(WRONG[wrong])
    assert isinstance(prove(found), Refuted | Undecided)


@pytest.mark.parametrize("wrong", [each for each in WRONG if each not in ("quotient of all rows", "out of range")])
def test_wrong_neighbour_has_a_counterexample(wrong: str) -> None:
    assert isinstance(prove(stated(WRONG[wrong])), Refuted)


def test_a_shorter_table_is_out_of_range() -> None:
    """The values are the same for all integers; at the longer table's last index there is no element."""
    case = ("x[1,k] i[s]", "gather(expand(x, shape=(n+1,k)), i)", "gather(expand(x, shape=(n,k)), i)")
    proof = prove(stated(case), refute=False)
    assert isinstance(proof, Undecided) and "undefined" in proof.reason
    assert isinstance(prove(stated(case)), Refuted)


# --- certificates -----------------------------------------------------------------------------------------------------


def certificate(law: str) -> dict[str, Any]:
    found = stated(LAWS[law])
    proof = prove(found)
    assert isinstance(proof, Proved)
    return {**dump_rule(found), "certificate": proof.certificate}


def moved(data: dict[str, Any], other: str) -> dict[str, Any]:
    """A proof in the name of a wrong rule of the same inputs and number of operators."""
    wrong = stated(WRONG[other])
    return {**dump_rule(wrong), "certificate": {**data["certificate"], "rule": content_hash(wrong)}}


@pytest.mark.parametrize(("law", "wrong"), [("sum", "other indices"), ("softmax", "softmax over rows"),
                                            ("rows of rows", "order of rows"), ("joined indices", "order of indices"),
                                            ("softmax", "norm of another row")])
def test_proof_of_a_law_is_none_of_a_wrong_neighbour(law: str, wrong: str) -> None:
    with pytest.raises(CertificateError):
        check(moved(certificate(law), wrong))


def short_table() -> dict[str, Any]:
    """A certificate of a rule that holds but for the range: its steps, without what covers the index."""
    longer = stated(("x[1,k] i[s]", "gather(expand(x, shape=(n,k)), i)", "gather(expand(x, shape=(n,k)), i)"))
    shorter = stated(("x[1,k] i[s]", "gather(expand(x, shape=(n+1,k)), i)", "gather(expand(x, shape=(n,k)), i)"))
    proof = prove(longer)
    assert isinstance(proof, Proved)
    return {**dump_rule(shorter), "certificate": {**proof.certificate, "rule": content_hash(shorter)}}


def without_range(data: dict[str, Any]) -> None:
    del data["certificate"]["outputs"][0]["defined"][WITHIN]


def whole_range(data: dict[str, Any]) -> None:
    """The index claimed to be a tensor of which all elements are defined."""
    data["certificate"]["whole"]["forward"] = [WITHIN]


def covered_by_a_read(data: dict[str, Any]) -> None:
    data["certificate"]["outputs"][0]["defined"][WITHIN] = data["certificate"]["outputs"][0]["defined"]["x"]


@pytest.mark.parametrize("lie", [lambda data: None, without_range, whole_range, covered_by_a_read])
def test_a_shorter_table_is_not_accepted(lie: Callable[[dict[str, Any]], None]) -> None:
    data = short_table()
    lie(data)
    with pytest.raises(CertificateError):
        check(data)


def test_an_input_cannot_stand_for_the_range() -> None:
    """A source that reads an input of this name at an index and an extent would cover what a gather demands."""
    data = json.loads(json.dumps(short_table()).replace('"x"', json.dumps(WITHIN)))
    data["certificate"]["rule"] = content_hash(load_rule(data))
    with pytest.raises(CertificateError, match="called"):
        check(data)


@pytest.mark.parametrize("text", ["i[", "i[@0", "i[@0,", "i[@0 @1]", "i[,@0]", "[@0]", "i]", "1[@0]", "$0[@0]", "i[@9]",
                                  "i[" * 60 + "@0" + "]" * 60, "i[@0]" * 2, "i[q]", "a.b[@0]", "i[1 // @0]"])
def test_malformed_elements_are_refused(text: str) -> None:
    with bounded(), pytest.raises(CertificateError):
        parse(text, {"@0": name("$c0"), "@1": name("$c1"), "$0": name("$c2")}, {"n"})


def test_elements_are_equal_at_equal_indices_alone() -> None:
    values = {"@0": name("$c0"), "@1": name("$c1")}
    with bounded():
        one, same, other, of_j, more = (parse(text, values, ()) for text in (
            "i[@0 + @1]", "i[@1 + @0]", "i[@0]", "j[@0 + @1]", "i[@0, @1]"))
    assert one == same and one.names == {"$c0", "$c1"}
    assert len({one, other, of_j, more}) == 4
    assert one.substituted({"$c1": parse(0, values, ())}) == other


def test_edited_certificates_are_refused_or_right() -> None:
    """Every step of some proofs left out, one at a time."""
    for law in ("product", "rows of rows", "joined indices"):
        data = certificate(law)
        steps = data["certificate"]["outputs"][0]["steps"]
        for place in range(len(steps)):
            edited = json.loads(json.dumps(data))
            del edited["certificate"]["outputs"][0]["steps"][place]
            with pytest.raises(CertificateError):
                check(edited)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [evaluate, reference])
def test_an_index_outside_is_not_defined(way: Callable[..., Any]) -> None:
    x, i = np.arange(6.0).reshape(3, 2), np.array([2.0, 3.0, -1.0, 0.0])
    [found] = way("gather", [x, i], {"axis": 0}, STRICT)
    np.testing.assert_array_equal(np.isnan(found[:, 0]), [False, True, True, False])
    np.testing.assert_array_equal(found[[0, 3]], x[[2, 0]])


def test_indices_are_not_computed() -> None:
    graph = stated(("x[n,k] i[s]", "gather(x, relu(i))", "gather(x, i)")).source
    [tensor], _ = compose(graph, {"x": (5, 2), "i": (3,)})
    with pytest.raises(ShapeError, match="computes none"):
        tensor[(Poly.symbol("p"), Poly.symbol("q"))]


def test_gathers_at_computed_indices_are_not_proved() -> None:
    one = rule("computed", "x[n,c] i[s]", "relu(gather(x, neg(i), axis=0))", "gather(relu(x), neg(i), axis=0)",
               proved=False)
    found = prove(one, refute=False)
    assert isinstance(found, Undecided) and "computes none" in found.reason


def test_an_element_evaluates_to_that_of_its_tensor() -> None:
    place = Poly.atom(Lookup("i", (Poly.symbol("p") + 1,))) * 2
    assert str(place.substitute({"p": Poly.symbol("q")})) == "2*i[1+q]"
    assert place.symbols == {"p"}


def test_extents_are_those_of_the_shortest_axis() -> None:
    found = stated(("x[n,k] y[k,n] i[s] j[t]", "add(gather(gather(x, i), j), gather(transpose(y, perm=(1,0)), "
                    "gather(i, j)))", "gather(gather(x, i), j)"))
    sizes = at_sizes(found, {"n": 7, "k": 3, "s": 5, "t": 2})
    assert extents(sizes.source, sizes.shapes) == {"i": 7, "j": 5}


def test_field_and_reals_gather_the_same() -> None:
    rng = np.random.default_rng(0)
    x, i = rng.integers(0, 9, (4, 5, 2)), rng.integers(0, 5, (3, 2))
    [exact] = evaluate("gather", [x.astype(np.uint64), i.astype(np.uint64)], {"axis": 1}, FIELD)
    [real] = evaluate("gather", [x.astype(float), i.astype(float)], {"axis": 1})
    np.testing.assert_array_equal(exact, real)
    np.testing.assert_array_equal(real, np.take(x, i, axis=1))


# --- generation -------------------------------------------------------------------------------------------------------


def test_some_families_give_the_shipped_rules() -> None:
    names = ("gather-softmax", "gather-flattened", "gather-gathered")
    made = generate([each for each in FAMILIES if each.name in names])
    assert not made.quarantined
    shipped = {each.name: each for each in shipped_rules()}
    assert len(made.rules) == 3 and all(each.certificate == shipped[each.name].certificate for each in made.rules)
