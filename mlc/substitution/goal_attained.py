"""Proof steps: sums that are 0 because they are both at least and at most 0; maxima that equal one of their members."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_cases import branched
from mlc.substitution.goal_divide import guesses, named, replace_term
from mlc.substitution.goal_known import above
from mlc.substitution.goal_tools import Tools, others
from mlc.substitution.maxima import largest, made, not_negative
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Member,
    Normal,
    Stuck,
    Term,
    collected,
    filled,
    free_names,
    mapped_member,
    reciprocal,
    refreshed,
    refreshed_member,
    substituted,
)

__all__ = ["attain", "by_bounds", "each_member", "gentle", "rises", "turned"]

#: maxima inside each other's cases of which one value is taken
_CASES = 4
#: takes a goal to its end
Proves = Callable[[Goal], list[list[Any]]]


def by_bounds(goal: Goal, tools: Tools) -> bool:
    """Ends the goal, if its terms are seen to be at least 0 and at most."""
    proofs = []
    if not goal.cases:
        goal.expander.bounds = goal.expander.work = goal.expander.steps = 0
    for sign in (1, -1):
        terms = tuple(dataclasses.replace(t, factor=sign * t.factor) for _, t in sorted(goal.terms.items()))
        inner = Goal(goal.expander, goal.context, goal.facts, terms, (), goal.divisors, goal.depth + 1)
        inner.cases = goal.cases
        before, goal.expander.attains = goal.expander.attains, True
        try:
            proofs.append(tools.at_least(inner))
        except Stuck:
            return False
        finally:
            goal.expander.attains = before
    goal.step("both", *proofs)
    goal.terms.clear()
    return True


def each_member(goal: Goal, at_least: Proves) -> bool:
    """Ends a goal of what is at least 0, if it is with each member in place of a maximum that is taken away; False
    where there is no such. Raises :class:`Stuck` where one is not seen to be."""
    for number, term in sorted(goal.terms.items()):
        if term.factor >= 0 or term.variables or term.guards:
            continue
        for place, atom in enumerate(term.atoms):
            left = others(term, place)
            if not isinstance(atom, Largest) or not all(not_negative((Term(Fraction(1), atoms=(a,)),)) for a in left):
                continue
            rest = tuple(t for n, t in sorted(goal.terms.items()) if n != number)
            proofs = []
            for member in (refreshed_member(m, goal.expander.fresh) for m in atom.members):
                products = tuple(dataclasses.replace(t, factor=t.factor * term.factor, atoms=(*left, *t.atoms))
                                 for t in (refreshed(t, goal.expander.fresh) for t in member.body))
                inner = Goal(goal.expander, [*goal.context, *member.variables],
                             [*goal.facts, *inequalities(member.guards)], (*rest, *products), (), goal.divisors,
                             goal.depth + 1)
                inner.cases = goal.cases
                proofs.append(at_least(inner))
            goal.step("each", number, place, proofs)
            goal.terms.clear()
            return True
    return False


def attain(goal: Goal, prove: Proves, tools: Tools, nested: bool = True) -> bool:
    """Ends the goal by cases of which member a maximum is, each of which is proved; False where no maximum is found.
    Of those that are ``nested`` in others, or in functions, or of all."""
    if goal.cases >= _CASES:
        return False
    for path, atom in _maxima(goal, nested):
        value = _some_value(goal, atom)
        if value is None:
            continue
        proofs = []
        for k, member in enumerate(atom.members):
            branch = branched(goal)
            branch.cases += 1
            one = refreshed_member(member, goal.expander.fresh)
            first = len(branch.divisors)
            branch.context += one.variables
            branch.facts += inequalities(one.guards)
            branch.divisors = (*branch.divisors, *_not_above(goal, atom, one.body))
            branch.fresh_facts()
            _put_member(branch, atom, k, one.variables, first, tools)
            proofs.append([*branch.steps, *prove(_begun(branch))])
        goal.step("attain", path, *value, proofs)
        goal.terms.clear()
        return True
    return False


def rises(goal: Goal, tools: Tools) -> Iterator[Callable[[Goal], bool]]:
    """What puts f(y) in place of f(x) beside a negative multiple of f(y), for an f that grows."""
    calls = [(n, t, t.atoms[0]) for n, t in sorted(goal.terms.items()) if len(t.atoms) == 1]
    for i, one, a in calls:
        for j, other, b in calls:
            if (isinstance(a, Function) and isinstance(b, Function) and one.factor > 0 > other.factor
                    and a.name == b.name and a.name in LAWS and (LAWS[a.name].grows_continued or a.name == "log")
                    and not other.variables and not other.guards):
                yield partial(_rise, i=i, j=j, tools=tools)


def gentle(goal: Goal) -> Iterator[Callable[[Goal], bool]]:
    """What takes the larger of x - y and 0 away in place of f(x) - f(y), for an f that grows no faster than x."""
    calls = [(n, t, t.atoms[0]) for n, t in sorted(goal.terms.items())
             if len(t.atoms) == 1 and not t.variables and not t.guards]
    for i, one, a in calls:
        for j, other, b in calls:
            if (isinstance(a, Function) and isinstance(b, Function) and one.factor < 0 and a.name == b.name
                    and one.factor == -other.factor and a.name in LAWS and LAWS[a.name].gentle):
                yield partial(_gentle, i=i, j=j)


def turned(goal: Goal) -> Iterator[Callable[[Goal], bool]]:
    """What takes f(-x) away in place of f(x), of which an upper bound is known, beside one maximum."""
    if [isinstance(a, Largest) for t in goal.terms.values() for a in t.atoms].count(True) != 1 or len(goal.terms) != 2:
        return
    for number, term in sorted(goal.terms.items()):
        if term.factor > 0 and len(term.atoms) == 1 and isinstance(term.atoms[0], Function) and (
                term.atoms[0].name in LAWS and LAWS[term.atoms[0].name].odd and LAWS[term.atoms[0].name].contracts):
            yield partial(_turned, number=number)


def _turned(goal: Goal, number: int) -> bool:
    [atom] = goal.terms[number].atoms
    assert isinstance(atom, Function)
    goal.step("odd", number, 0)
    less = made(atom.name, tuple(dataclasses.replace(t, factor=-t.factor) for t in atom.arg), goal.expander.fresh)
    replace_term(goal, number, (), [dataclasses.replace(t, factor=-t.factor) for t in less])
    return True


def _gentle(goal: Goal, i: int, j: int) -> bool:
    [one], [other] = goal.terms[i].atoms, goal.terms[j].atoms
    assert isinstance(one, Function) and isinstance(other, Function)
    fresh = goal.expander.fresh
    goal.step("gentle", i, j)
    del goal.terms[j]
    less = tuple(dataclasses.replace(t, factor=-t.factor) for t in other.arg)
    replace_term(goal, i, (), made("relu", tuple(refreshed(t, fresh) for t in (*one.arg, *less)), fresh))
    return True


def _rise(goal: Goal, i: int, j: int, tools: Tools) -> bool:
    term, [atom], [lower] = goal.terms[i], goal.terms[i].atoms, goal.terms[j].atoms
    assert isinstance(atom, Function) and isinstance(lower, Function)
    facts = [*goal.facts, *inequalities(term.guards)]
    try:
        steps = tools.at_least(Goal(goal.expander, [*goal.context, *term.variables], facts, atom.arg, lower.arg,
                                    goal.divisors, goal.depth + 1))
    except Stuck:
        return False
    known = above(goal, term.variables, facts, lower.arg, tools) if atom.name == "log" else []
    if known is None:
        return False
    goal.step("rise", i, j, steps, known)
    replace_term(goal, i, (), (Term(Fraction(1), atoms=(lower,)),))
    return True


def _begun(goal: Goal) -> Goal:
    """The same goal without its steps so far, which precede those to come."""
    goal.steps = []
    return goal


def _maxima(goal: Goal, nested: bool) -> Iterator[tuple[list[int], Largest]]:
    """Maxima of the context with the place of each, small ones first. Those inside of one that stands under guards, or
    in a sum, must be of something even where the guards do not hold."""
    scope, seen = set(goal.context), set[str]()

    def of(terms: Sequence[tuple[int, Term]], level: int, always: bool) -> Iterator[tuple[list[int], Largest]]:
        for number, term in terms:
            here = always and not term.variables and not term.guards
            for place, atom in enumerate(term.atoms):
                inner: list[tuple[list[int], Normal]] = []
                if isinstance(atom, Function):
                    inner = [([], atom.arg)]
                elif isinstance(atom, Largest):
                    if (level or not nested or len(term.atoms) > 1) and (here or all(
                            map(filled, (a for m in atom.members for t in m.body for a in t.atoms)))):
                        yield [number, place], atom
                    inner = [([k], m.body) for k, m in enumerate(atom.members)]
                for begin, body in inner:
                    for path, found in of(list(enumerate(body)), level + 1, here):
                        yield [number, place, *begin, *path], found

    for path, atom in sorted(of(sorted(goal.terms.items()), 0, True), key=lambda each: len(str(each[1]))):
        name = named(atom)
        if name not in seen and all(n in scope or n[0] not in "$@" for n in free_names(atom)):
            seen.add(name)
            yield path, atom


def _some_value(goal: Goal, atom: Largest) -> list[Any] | None:
    """A member, values of its variables, and witnesses that they meet its guards."""
    known, stand = goal.known(), Term(Fraction(1))
    for k, member in enumerate(atom.members):
        for guess in guesses(goal, stand, len(member.variables)):
            at = dict(zip(member.variables, guess, strict=True))
            moved = mapped_member(member, lambda p, at=at: p.substitute(at))  # type: ignore[misc]
            witnesses = [known.holds(g) for g in moved.guards]
            if all(w is not None for w in witnesses):
                return [k, [goal.text(v) for v in guess], [[goal.witness_text(w) for w in ws or ()]
                                                           for ws in witnesses]]
    return None


def _not_above(goal: Goal, atom: Largest, body: Normal) -> Normal:
    """What is at least 0 if the sum is the largest."""
    fresh, found = goal.expander.fresh, []
    for m in (refreshed_member(each, fresh) for each in atom.members):
        less = collected((*(refreshed(t, fresh) for t in body), *(dataclasses.replace(t, factor=-t.factor)
                                                                  for t in m.body)))
        found.append(Term(Fraction(1), m.variables, m.guards, (Function("", less),)))
    return tuple(found)


def _put_member(goal: Goal, wanted: Largest, k: int, variables: Sequence[str], first: int, tools: Tools) -> None:
    """Puts member k in place of a maximum wherever that stands, at values that are ``variables`` of the context. From
    the divisor ``first`` on it is known of each member that it is not above that one."""
    name = named(wanted)
    for place in range(first):
        divisor = goal.divisors[place]
        [function] = divisor.atoms
        if isinstance(function, Function) and name in _named_within(function):
            facts = [*goal.facts, *inequalities(divisor.guards)]
            inner = Goal(goal.expander, [*goal.context, *divisor.variables], facts, function.arg, (), goal.divisors,
                         goal.depth + 1)
            _put_all(inner, name, k, variables, first, tools)
            if inner.steps:
                found = collected(tuple(t for _, t in sorted(inner.terms.items())))
                goal.step("divisor inside", place, inner.steps)
                goal.divisors = (*goal.divisors, dataclasses.replace(divisor, atoms=(Function(function.name, found),)))
    _put_all(goal, name, k, variables, first, tools)


def _put_one(goal: Goal, number: int, name: str, k: int, variables: Sequence[str], first: int, tools: Tools) -> bool:
    if number not in goal.terms:
        return False
    term, fresh = goal.terms[number], goal.expander.fresh
    facts = [*goal.facts, *inequalities(term.guards)]
    for place, atom in enumerate(term.atoms):
        if isinstance(atom, Largest) and named(atom) == name:
            body = _instance(goal, term, atom, k, variables)
            if body is None:
                return False
            proofs = [_known(goal, term, m, body[1], first + n, facts, tools) for n, m in enumerate(atom.members)]
            goal.step("largest", number, place, k, *body[0], proofs)
            replace_term(goal, number, others(term, place), body[1])
            return True
        if name not in _named_within(atom):
            continue
        inner = Goal(goal.expander, [*goal.context, *term.variables], facts, (), (), goal.divisors, goal.depth + 1)
        sums: Normal = ()
        if isinstance(atom, Function):
            inner.terms, inner.count = dict(enumerate(atom.arg)), len(atom.arg)
            _put_all(inner, name, k, variables, first, tools)
            found = tuple(t for _, t in sorted(inner.terms.items()))
            if atom.name == "1/":
                sums = reciprocal(found, fresh)
            else:
                sums = made(atom.name, found, fresh) if atom.name else (_member(collected(found)),)
        elif isinstance(atom, Largest):
            members = [dataclasses.replace(_member(m.body), variables=m.variables, guards=m.guards)
                       for m in (refreshed_member(each, fresh) for each in atom.members)]
            inner.terms, inner.count = dict(enumerate(members)), len(members)
            _put_all(inner, name, k, variables, first, tools)
            sums = largest([Member(t.variables, t.guards, t.atoms[0].arg) for _, t in sorted(inner.terms.items())
                            if isinstance(t.atoms[0], Function)], fresh)
        if inner.steps:
            goal.step("inside", number, place, inner.steps)
            replace_term(goal, number, others(term, place), sums)
            return True
    return False


def _put_all(goal: Goal, name: str, k: int, variables: Sequence[str], first: int, tools: Tools) -> None:
    pending = sorted(goal.terms)
    while pending:
        number, before = pending.pop(0), goal.count
        if _put_one(goal, number, name, k, variables, first, tools):
            pending = [n for n in range(before, goal.count) if n in goal.terms] + pending


def _instance(goal: Goal, term: Term, atom: Largest, k: int, variables: Sequence[str]
              ) -> tuple[list[Any], Normal] | None:
    """The values of member k's variables and witnesses of its guards, and its sum there."""
    member, known = atom.members[k], goal.known(term.guards)
    values = [Poly.symbol(v) for v in variables]
    whole = Term(Fraction(1), (), member.guards, (Function("", member.body),))
    moved = substituted(whole, dict(zip(member.variables, values, strict=True)))
    witnesses = [known.holds(g) for g in moved.guards]
    if any(w is None for w in witnesses):
        return None
    [function] = moved.atoms
    assert isinstance(function, Function)
    return [[goal.text(v, term.variables) for v in values],
            [[goal.witness_text(w, term.variables) for w in ws or ()] for ws in witnesses]], function.arg


def _known(goal: Goal, term: Term, member: Member, body: Normal, place: int, facts: Sequence[Poly], tools: Tools
           ) -> list[list[Any]]:
    """What shows that a member is not above the largest: the divisor that says so."""
    inner = Goal(goal.expander, [*goal.context, *term.variables, *member.variables],
                 [*facts, *inequalities(member.guards)], body, member.body, goal.divisors, goal.depth + 1)
    divisor, known, fresh = goal.divisors[place], inner.known(), goal.expander.fresh
    values = [Poly.symbol(v) for v in member.variables]
    moved = substituted(dataclasses.replace(divisor, variables=()), dict(zip(divisor.variables, values, strict=True)))
    witnesses = [known.holds(g) for g in moved.guards]
    [function] = moved.atoms
    if any(w is None for w in witnesses) or not isinstance(function, Function):
        raise Stuck("a member may be above the largest")
    inner.step("given", None, place, [inner.text(v) for v in values],
               [[inner.witness_text(w) for w in ws or ()] for ws in witnesses], "1")
    for one in (refreshed(t, fresh) for t in function.arg):
        inner.append(-1, refreshed(dataclasses.replace(one, factor=-one.factor), fresh))
    return tools.at_least(inner)


def _named_within(atom: Atom) -> set[str]:
    """The names of the maxima within an atom."""
    bodies = [atom.arg] if isinstance(atom, Function) else (
        [m.body for m in atom.members] if isinstance(atom, Largest) else [])
    found = set[str]()
    for inner in (a for body in bodies for t in body for a in t.atoms):
        found |= _named_within(inner) | ({named(inner)} if isinstance(inner, Largest) else set())
    return found


def _member(body: Normal) -> Term:
    """A sum as the only atom of a term."""
    return Term(Fraction(1), atoms=(Function("", tuple(body)),))
