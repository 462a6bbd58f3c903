"""Maxima that one of their members is, and bounds from both sides: what such steps must show is asked for."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache

import pytest

from mlc.substitution.check import CertificateError, check
from mlc.substitution.check.integers import Guard, bounded, name, parse
from mlc.substitution.check.maxima import GENTLE, GROWING, never_zero
from mlc.substitution.check.play import AtLeast, Play
from mlc.substitution.check.terms import Member, Term
from mlc.substitution.codec import dump_rule
from mlc.substitution.prove import certified
from tests.unit.substitution.small_rules import BY_CASES
from tests.unit.substitution.test_cases import steps_in

ROWS, SLOPE, ROOT = ("max(min(a, c)) = min(max(a), c)", "max(a - tanh(a)) = max(a) - tanh(max(a))",
                     "log(min(a, b)) = min(log(a), log(b))")
ONE = Fraction(1)


@cache
def proved(law):
    return json.dumps(dump_rule(certified(BY_CASES[law])))


def tampered(law, word, change):
    """The rule with each step of that name changed in turn."""
    count = sum(step[0] == word for steps in steps_in(json.loads(proved(law))["certificate"]) for step in steps)
    assert count
    for place in range(count):
        data = json.loads(proved(law))
        found = [(steps, step) for steps in steps_in(data["certificate"]) for step in steps if step[0] == word]
        change(*found[place])
        yield data


@pytest.mark.parametrize("law, word, change", [
    (ROWS, "attain", lambda steps, step: step[5].pop()),
    (ROWS, "attain", lambda steps, step: step[5].append([])),
    (ROWS, "attain", lambda steps, step: step[5].clear()),
    (ROWS, "attain", lambda steps, step: step.__setitem__(2, 7)),
    (ROWS, "attain", lambda steps, step: step.__setitem__(2, -1)),
    (ROWS, "attain", lambda steps, step: step.__setitem__(3, ["k"])),
    (ROWS, "attain", lambda steps, step: step.__setitem__(3, [])),
    (ROWS, "attain", lambda steps, step: step[4].pop()),
    (ROWS, "attain", lambda steps, step: step.__setitem__(1, [*step[1], 0])),
    (ROWS, "attain", lambda steps, step: step.__setitem__(1, step[1] * 40)),
    (ROWS, "attain", lambda steps, step: step.__setitem__(1, [True, False])),
    (ROWS, "attain", lambda steps, step: steps.remove(step)),
    (ROWS, "both", lambda steps, step: step.pop()),
    (ROWS, "both", lambda steps, step: step.__setitem__(1, [])),
    (ROWS, "both", lambda steps, step: step.__setitem__(2, [])),
    (ROWS, "both", lambda steps, step: step.__setitem__(1, step[2])),
    (ROWS, "both", lambda steps, step: step.__setitem__(2, step[1])),
    (ROWS, "each", lambda steps, step: step[3].pop()),
    (ROWS, "each", lambda steps, step: step[3].append([])),
    (ROWS, "each", lambda steps, step: steps.remove(step)),
    (SLOPE, "gentle", lambda steps, step: step.reverse()),
    (SLOPE, "gentle", lambda steps, step: step.__setitem__(1, step[2])),
    (SLOPE, "gentle", lambda steps, step: step.__setitem__(2, 99)),
    (ROOT, "rise", lambda steps, step: step.__setitem__(4, [])),
    (ROOT, "rise", lambda steps, step: step.__setitem__(3, [["given", None, 0, [], [], "1"]])),
    (ROOT, "rise", lambda steps, step: step.__setitem__(2, step[1])),
])
def test_what_a_step_leaves_out_is_noticed(law, word, change):
    for data in tampered(law, word, change):
        with pytest.raises(CertificateError):
            check(data)


def read(index):
    return ("read", "a", (index,))


def call(function, *atoms, factor=ONE):
    return Term(factor, (), (), (("call", function, (Term(ONE, (), (), tuple(atoms)),)),))


def row(low=0):
    """The largest a[i] for i from ``low`` to n - 1; that of few rows may be of nothing."""
    i = name("$i")
    return ("max", (Member(("$i",), (Guard(i - low, ">="), Guard(name("n") - 1 - i, ">=")),
                           (Term(ONE, (), (), (read(i),)),)),))


def play(kind, *terms, facts=()):
    return kind(frozenset({"n"}), ["$x", "$y"], [name("n") - 1, *facts], [], terms)


X, Y = name("$x"), name("$y")


@pytest.mark.parametrize("low, message", [(0, "plainly"), (1, "adds up"), (5, "adds up")])
def test_a_maximum_that_may_be_of_nothing_is_not_attained(low, message):
    """Of n rows, there is one; where that is shown, what is left to show is that the largest is at least 0."""
    with pytest.raises(CertificateError, match=message):
        play(AtLeast, Term(ONE, (), (), (row(low),))).run(
            [["attain", [0, 0], 0, [str(low)], [[[["1", [0]]]]], [[]]]])


def test_a_maximum_that_depends_on_what_is_summed_over_is_not_attained():
    members = (Member((), (), (Term(ONE, (), (), (read(name("$s")),)),)), Member((), (), ()))
    term = Term(ONE, ("$s",), (Guard(name("$s"), ">="), Guard(name("n") - 1 - name("$s"), ">=")), (("max", members),))
    with pytest.raises(CertificateError, match="of the context"):
        play(AtLeast, term).run([["attain", [0, 0], 0, [], [], [[], []]]])


def rows_of(low):
    """The largest, for j from 0 to n - 1, of -1 times the largest a[j, w] for w from ``low`` to n - 1."""
    j, w = name("$j"), name("$w")
    inner = ("max", (Member(("$w",), (Guard(w - low, ">="), Guard(name("n") - 1 - w, ">=")),
                            (Term(ONE, (), (), (("read", "a", (j, w)),)),)),))
    return ("max", (Member(("$j",), (Guard(j, ">="), Guard(name("n") - 1 - j, ">=")),
                           (Term(-ONE, (), (), (inner,)),)),))


def test_a_maximum_inside_of_it_must_be_of_something_where_guards_do_not_hold():
    """Where x is n or more, those of a[j, w] from x on are of nothing; of one of them that is taken away, each member
    is shown to be at most the rest, -1, since there is none. Only guards that do not hold there say that x < n."""
    never = [["1", [1]], ["1", [4]], ["1", [5]]]
    steps = [["given", None, 0, ["@2"], [[[["1", [2]]]], [[["1", [3]]]]], "1"], ["drop", 0, [["1", [1]], ["1", [4]]]],
             ["each", 3, 0, [[["drop", 0, never], ["drop", 1, never], ["drop", 2, never]]]]]
    term = Term(ONE, (), (Guard(name("n") - 1 - X, ">="),), (rows_of(X),))
    with pytest.raises(CertificateError, match="of nothing"):
        play(AtLeast, term, Term(-ONE, (), (), ()), facts=[X - name("n")]).run(
            [["attain", [0, 0], 0, ["0"], [[[["1", [0]]]]], [steps]]])


@pytest.mark.parametrize("low, guards, message", [(X, (), "plainly"), (X, (X,), "of nothing"), (0, (X,), "plainly")])
def test_a_maximum_inside_of_it_is_of_something_where_it_is_evaluated(low, guards, message):
    term = Term(ONE, (), tuple(Guard(g, ">=") for g in guards), (rows_of(name("n") * 0 + low),))
    with pytest.raises(CertificateError, match=message):
        play(AtLeast, term).run([["attain", [0, 0], 0, ["0"], [[[["1", [0]]]]], [[]]]])


@pytest.mark.parametrize("function", ["erf", "exp", "sqrt", "log", "1/", ""])
def test_only_differences_of_gentle_functions_are_bounded(function):
    assert function not in GENTLE
    with pytest.raises(CertificateError, match="faster"):
        play(AtLeast, call(function, read(X), factor=-ONE), call(function, read(Y))).run([["gentle", 0, 1]])


def test_a_sum_that_is_added_is_not_bounded_from_below():
    with pytest.raises(CertificateError, match="taken away"):
        play(AtLeast, call("tanh", read(X)), call("tanh", read(Y), factor=-ONE)).run([["gentle", 0, 1]])
    with pytest.raises(CertificateError, match="taken away"):
        play(AtLeast, call("tanh", read(X), factor=-2 * ONE), call("tanh", read(Y))).run([["gentle", 0, 1]])


@pytest.mark.parametrize("function, message", [("1/", "not known to grow"), ("", "not known to grow"),
                                               ("sigmoid", "plainly"), ("exp", "plainly")])
def test_what_does_not_grow_or_is_not_larger_does_not_rise(function, message):
    assert (function in GROWING) == (message == "plainly")
    with pytest.raises(CertificateError, match=message):
        play(AtLeast, call(function, read(X)), call(function, read(Y), factor=-ONE)).run([["rise", 0, 1, [], []]])


def test_each_member_is_of_a_maximum_that_is_taken_away():
    for factor, message in ((ONE, "taken away"), (-ONE, "plainly")):
        with pytest.raises(CertificateError, match=message):
            play(AtLeast, Term(factor, (), (), (row(),))).run([["each", 0, 0, [[]]]])
    with pytest.raises(CertificateError, match="at least 0"):  # times a[x], which may be below
        play(AtLeast, Term(-ONE, (), (), (row(), read(X)))).run([["each", 0, 0, [[]]]])


def test_bounds_end_no_rewriting():
    with pytest.raises(CertificateError):
        play(Play, call("exp", read(X))).run([["inside", 0, 0, [["both", [], []]]]])
    with pytest.raises(CertificateError):
        play(Play, call("exp", read(X))).run([["both", [], []]])  # it is above 0, and not below


@pytest.mark.parametrize("function, number, above", [("sqrt", 2, True), ("1/", 2, True), ("sqrt", 0, False),
                                                     ("sqrt", -2, False), ("1/", -2, False), ("erf", 2, False)])
def test_roots_and_reciprocals_of_what_is_above_0_are(function, number, above):
    inner = (Term(Fraction(number), (), (), ()),) if number else ()
    assert never_zero(Term(ONE, (), (), (("call", function, inner),))) == above
    assert not never_zero(Term(ONE, (), (), (("call", function, (*inner, Term(ONE, (), (), (read(X),)))),)))


def test_a_maximum_that_may_be_of_nothing_is_taken_out_of_no_sum():
    """1 / (1/max(a[5:]) if n > 5, else 0): where n is at most 5, it is 0, but no product with a largest of nothing, of
    which each member would be at most -1."""
    guard = Guard(name("n") - 6, ">=")
    inner = Term(ONE, (), (guard,), (("call", "1/", (Term(ONE, (), (), (row(5),)),)),))
    never = [["1", [1]], ["1", [2]], ["1", [3]]]
    with pytest.raises(CertificateError, match="no such maximum"):
        play(AtLeast, Term(-ONE, (), (), (("call", "1/", (inner,)),)), Term(-ONE, (), (), ()),
             facts=[-name("n") + 5]).run(
            [["extract", 0, 0], ["each", 2, 0, [[["drop", 0, never], ["drop", 1, never]]]]])


@pytest.mark.parametrize("extent, taken", [(name("n"), True), (name("n") + X, False)])
def test_a_maximum_that_may_be_of_nothing_is_not_counted(extent, taken):
    """The largest of a[x + 1:], as many times as there are s from 0 on: where there are none, it may be of nothing."""
    s = name("$s")
    term = Term(ONE, ("$s",), (Guard(s, ">="), Guard(extent - 1 - s, ">=")), (row(X + 1),))
    goal = play(Play, term, facts=[X])
    with pytest.raises(CertificateError, match="are left" if taken else "of nothing"):
        goal.run([["count", 0, 0, [["1", [0]], ["1", []]] if taken else [["1", [0]], ["1", [1]], ["1", []]]]])


@pytest.mark.parametrize(("beside", "divisors", "context", "kept"), [
    ((), (), (), True),
    (("$b",), (), (), True),
    (("$a",), (), (), False),
    ((), ("$a",), (), False),
    ((), (), ("$a",), False),
])
def test_a_term_keeps_its_names_where_it_binds_them_alone(beside, divisors, context, kept):
    """Else what is known of a variable there were known of another one, which only has its name."""
    def term(*names):
        return Term(Fraction(1), names, tuple(Guard(name(n), ">=") for n in names), (("read", "x", ()),))

    given = [Term(Fraction(1), (n,), (), (("call", "1/", (term(),)),)) for n in divisors]
    play = Play(frozenset(), context, [], given, [term("$a"), *map(term, beside)])
    assert (play.at(0)[0].names == ("$a",)) == kept
    assert play.terms[0].guards == (Guard(name(play.terms[0].names[0]), ">="),)


def test_a_term_whose_atoms_bind_its_names_gets_others():
    inner = Term(Fraction(1), ("$a",), (Guard(name("$a"), ">="),), (("read", "x", (name("$a"),)),))
    for atom in (("call", "exp", (inner,)), ("max", (Member(("$a",), inner.guards, ()),))):
        play = Play(frozenset(), (), [], [], [inner._replace(atoms=(atom,))])
        assert play.at(0)[0].names != ("$a",)


@pytest.mark.parametrize("text", ["3*@0*$0*n + $1 - 2", "(@0 + $1)//2 * $0", "i[$0, @0 + 1] * $1", "n + 7"])
def test_names_are_renamed_as_they_are_replaced(text):
    values = {"@0": name("$x"), "$0": name("$y"), "$1": name("$z")}
    expr = parse(text, values, ["n"])
    new = {"$x": "$c900", "$y": "$c1", "$w": "$c2"}
    assert expr.renamed(new) == expr.substituted({old: name(to) for old, to in new.items()})
    assert str(expr.renamed(new)) == str(expr.substituted({old: name(to) for old, to in new.items()}))


def test_many_terms_in_many_cases_take_too_long():
    """Each case has all of the terms again, though its steps are none."""
    def cases(depth):
        return [["case", "@0", ">=", [cases(depth - 1)] * 2]] if depth else []

    for depth, taken in ((1, True), (8, False)):
        with bounded(100_000):
            goal = play(AtLeast, *[call("exp", read(X))] * 1000)
            if taken:
                goal.run(cases(depth))
                continue
            with pytest.raises(CertificateError, match="too long"):
                goal.run(cases(depth))
