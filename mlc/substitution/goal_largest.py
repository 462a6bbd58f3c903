"""Proof steps: maxima that equal one of their members because no other member exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from mlc.operators.index import Condition, Poly
from mlc.operators.laws import BELOW, LAWS, VALUES
from mlc.substitution.change_of_variables import covers
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_divide import guesses, kinds_of, replace_term
from mlc.substitution.maxima import largest, made
from mlc.substitution.normal import (
    Function,
    Largest,
    Normal,
    Number,
    Stuck,
    Term,
    collected,
    make_term,
    refreshed,
    refreshed_member,
    substituted,
)

__all__ = ["bounds", "choose_largest", "lower_one", "rewrite_largest", "turn_odd"]

#: members of a maximum that is looked at, choices in a goal, and what is tried at one stand
_MEMBERS, _CHOICES, _TRIES = 6, 4, 4
#: shows that the terms of a goal are at least 0
AtLeast: TypeAlias = "Callable[[Goal], list[list[Any]]]"


class _Value(NamedTuple):
    """Member ``k`` at values of its variables, as texts, with witnesses of its guards and its sum there."""

    k: int
    values: list[str]
    guards: list[Any]
    body: Normal


def choose_largest(goal: Goal, at_least: AtLeast) -> bool:
    """Takes a member for one maximum; False where none is seen to be the largest."""
    if sum(step[0] == "largest" for step in goal.steps) >= _CHOICES:
        return False
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if not isinstance(atom, Largest) or len(atom.members) > _MEMBERS:
                continue
            for value in _values(goal, term, atom):
                proofs = _none_above(goal, term, atom, value, at_least)
                if proofs is not None:
                    goal.step("largest", number, place, value.k, value.values, value.guards, proofs)
                    replace_term(goal, number, (*term.atoms[:place], *term.atoms[place + 1:]), value.body)
                    return True
    return False


def rewrite_largest(goal: Goal) -> bool:
    """Adds a term to a maximum of which it takes a part of a member away, or has a maximum with 0 twice for what it is
    of beside it; False where there is no such."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Largest) and (_square(goal, number, place, atom) or _absorb(goal, number, atom)):
                return True
    return False


def _square(goal: Goal, number: int, place: int, atom: Largest) -> bool:
    term = goal.terms[number]
    bodies = sorted((m.body for m in atom.members if not m.variables and not m.guards), key=len)
    if len(atom.members) != 2 or list(map(len, bodies)) != [0, 1]:
        return False
    [inner] = bodies[1]
    left = [*term.atoms[:place], *term.atoms[place + 1:]]
    if inner.variables or inner.guards or not inner.factor or not inner.atoms:
        return False
    for each in inner.atoms:
        if each not in left:
            return False
        left.remove(each)
    goal.step("square", number, place)
    goal.terms[number] = make_term(term.factor / inner.factor, term.variables, term.guards, (*left, atom, atom))
    return True


def _absorb(goal: Goal, number: int, atom: Largest) -> bool:
    term = goal.terms[number]
    if term.variables or term.guards or len(term.atoms) != 1 or not term.factor:
        return False
    for other in sorted(goal.terms):
        added = goal.terms[other]
        added = replace(added, factor=added.factor / term.factor)
        if other == number or not any(replace(added, factor=-added.factor) in m.body for m in atom.members):
            continue
        goal.step("absorb", number, other)
        fresh = goal.expander.fresh
        members = [replace(m, body=(*m.body, refreshed(added, fresh)))
                   for m in (refreshed_member(each, fresh) for each in atom.members)]
        del goal.terms[number], goal.terms[other]
        for part in largest(members, fresh):
            goal.append(number, replace(part, factor=part.factor * term.factor))
        return True
    return False


def _none_above(goal: Goal, term: Term, atom: Largest, value: _Value, at_least: AtLeast) -> list[Any] | None:
    """What shows of each member that it is not above the value."""
    proofs = []
    for member in atom.members:
        context = [*goal.context, *term.variables, *member.variables]
        facts = [*goal.facts, *inequalities(term.guards), *inequalities(member.guards)]
        try:
            proofs.append(at_least(Goal(goal.expander, context, facts, value.body, member.body, goal.divisors,
                                        goal.depth + 1)))
        except Stuck:
            return None
    return proofs


def lower_one(goal: Goal) -> bool:
    """Puts something that is not above it in place of a term, such that it may cancel another one."""
    kinds = [kinds_of(term) for term in goal.terms.values()]
    if _compare(goal):
        return True
    for number in sorted(goal.terms):
        term = goal.terms[number]
        if term.factor <= 0 or len(term.atoms) != 1:
            continue
        [atom] = term.atoms
        if isinstance(atom, Largest):
            for value in _values(goal, term, atom):
                if any(kinds_of(part) in kinds for part in value.body):
                    goal.step("lower", number, value.k, value.values, value.guards)
                    replace_term(goal, number, (), value.body)
                    return True
        elif isinstance(atom, Function) and atom.name in LAWS and LAWS[atom.name].exceeds:
            goal.step("lower", number, 0, [], [])
            replace_term(goal, number, (), atom.arg)
            return True
    return False


def bounds(goal: Goal, at_least: AtLeast) -> Iterator[Callable[[Goal], bool]]:
    """What else may take the terms down, one bound at a time, most promising first."""
    terms = dict(sorted(goal.terms.items()))
    numbers = [n for n, t in terms.items() if not t.variables and not t.guards and t.factor.denominator == 1
               and all(isinstance(a, Number) and not a.inverse for a in t.atoms)]
    if any(terms[n].factor < 0 for n in numbers):
        yield partial(_sizes, places=numbers)
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        if isinstance(function, Function) and function.name in ("", "log", "sqrt"):
            pairs = [(term.factor, term.factor / part.factor, -1 if part.variables or not term.variables else n)
                     for n, term in terms.items() for part in function.arg
                     if term.factor * part.factor > 0 and kinds_of(part) == kinds_of(term)]
            for _, factor, over in sorted(set(pairs)):  # what is below 0 first
                yield partial(_given, place=place, factor=factor, over=over)
    for n, term in terms.items():
        for other in terms.values():
            if len(term.variables) == 1 and term.factor > 0 > other.factor and not other.variables and (
                    kinds_of(term) == kinds_of(other)):
                for point in (Poly({}), *map(Poly.symbol, goal.context)):
                    guard = Condition(Poly.symbol(term.variables[0]) - point, "==")
                    if goal.known((*term.guards, guard)).contradictory() is None and guard not in term.guards:
                        yield partial(_split, number=n, guard=guard)
    for number, term in terms.items():
        if len(term.atoms) != 1:
            continue
        [atom] = term.atoms
        if isinstance(atom, Function) and atom.name in LAWS:
            laws = LAWS[atom.name]
            if laws.exceeds and term.factor > 0:
                yield partial(_put, number=number, words=["lower", number, 0, [], []], sums=atom.arg)
            for lower, upper in sorted(BELOW):
                if upper == atom.name and term.factor > 0:
                    yield partial(_put, number=number, words=["below", number, lower],
                                  sums=made(lower, atom.arg, goal.expander.fresh))
            inner = collected(atom.arg)
            single = len(inner) == 1 == len(inner[0].atoms) and inner[0] == Term(Fraction(1), atoms=inner[0].atoms)
            call = inner[0].atoms[0] if single else None
            if (atom.name == "sqrt" and term.factor > 0 and isinstance(call, Function) and call.name in LAWS
                    and LAWS[call.name].at_most_one):
                yield partial(_put, number=number, words=["root", number], sums=atom.arg)
            if laws.contracts and term.factor < 0:
                yield partial(_put, number=number, words=["raise", number],
                              sums=made("relu", atom.arg, goal.expander.fresh))
            if laws.grows_continued:
                yield partial(_grow, number=number, at_least=at_least)
            if laws.at_most_one and term.factor < 0:
                yield partial(_put, number=number, words=["bound", number], sums=(Term(Fraction(1)),))
        elif isinstance(atom, Largest) and term.factor > 0:
            for value in _values(goal, term, atom):
                yield partial(_put, number=number, words=["lower", number, value.k, value.values, value.guards],
                              sums=value.body)


def _sizes(goal: Goal, places: list[int]) -> bool:
    """Takes sizes away whose sum is at least 0."""
    total = Poly({})
    for n in places:
        value = Poly({(): goal.terms[n].factor.numerator})
        for atom in goal.terms[n].atoms:
            assert isinstance(atom, Number)
            value = value * atom.value
        total = total + value
    witness = goal.known().entails(total)
    if witness is None:
        return False
    goal.step("sizes", places, goal.witness_text(witness))
    for n in places:
        del goal.terms[n]
    return True


def _put(goal: Goal, number: int, words: list[Any], sums: Normal) -> bool:
    goal.step(*words)
    replace_term(goal, number, (), sums)
    return True


def _split(goal: Goal, number: int, guard: Condition) -> bool:
    goal.split(number, guard)
    return True


def _given(goal: Goal, place: int, factor: Fraction, over: int) -> bool:
    """Takes away a multiple of what is known to be at least 0, or its sum over what a term goes over."""
    divisor, fresh = goal.divisors[place], goal.expander.fresh
    stand = Term(Fraction(1)) if over < 0 else refreshed(replace(goal.terms[over], atoms=()), fresh)
    known, ways = goal.known(stand.guards), list[tuple[bool, int, Any]]()
    atoms = [t.atoms for t in goal.terms.values()]
    for guess in (*guesses(goal, stand, len(divisor.variables)), *_matches(goal, divisor)):
        moved = substituted(replace(divisor, variables=()), dict(zip(divisor.variables, guess, strict=True)))
        witnesses = [known.holds(guard) for guard in moved.guards]
        if any(each is None for each in witnesses):
            continue
        [function] = moved.atoms
        assert isinstance(function, Function)
        strange = not any(t.atoms in atoms for t in function.arg)
        if not goal.expander.attains or any(t.atoms == term.atoms and t.factor * term.factor > 0
                                            for t in collected(function.arg)
                                            for term in goal.terms.values()):
            ways.append((strange, len(ways), (guess, witnesses, function)))
    for _, _, (guess, witnesses, function) in sorted(ways, key=lambda way: way[:2]):
        goal.step("given", None if over < 0 else over, place, [goal.text(each, stand.variables) for each in guess],
                  [[goal.witness_text(w, stand.variables) for w in each or ()] for each in witnesses], str(factor))
        for term in (refreshed(each, fresh) for each in function.arg):
            less = Term(-term.factor * factor, (*stand.variables, *term.variables), (*stand.guards, *term.guards),
                        term.atoms)
            goal.append(-1, refreshed(less, fresh))
        return True
    return False


def _matches(goal: Goal, divisor: Term) -> Iterator[tuple[Poly, ...]]:
    """Values at which a divisor may be of what a term is, where maxima are looked at closely."""
    [function] = divisor.atoms
    if not goal.expander.attains or not divisor.variables or not isinstance(function, Function):
        return
    scope = set(goal.context)
    for term in goal.terms.values():
        for part in function.arg:
            if len(term.atoms) == len(part.atoms) == 1 and not term.variables and kinds_of(term) == kinds_of(part):
                for found in covers(replace(term, guards=()), replace(divisor, guards=(), atoms=part.atoms)):
                    values = tuple(found[v] for v in divisor.variables)
                    if all(n in scope or n[0] not in "$@" for each in values for n in each.symbols):
                        yield values


def _grow(goal: Goal, number: int, at_least: AtLeast) -> bool:
    """Puts f(0) in place of f(x), if x is seen to be on one side of 0."""
    term = goal.terms[number]
    [atom] = term.atoms
    assert isinstance(atom, Function)
    one, other = (atom.arg, ()) if term.factor > 0 else ((), atom.arg)
    try:
        steps = at_least(Goal(goal.expander, [*goal.context, *term.variables],
                              [*goal.facts, *inequalities(term.guards)], one, other, goal.divisors, goal.depth + 1))
    except Stuck:
        return False
    goal.step("grow", number, steps)
    value = VALUES.get((atom.name, Fraction(0)))
    replace_term(goal, number, (), made(atom.name, (), goal.expander.fresh) if value is None else (Term(value),))
    return True


def _compare(goal: Goal) -> bool:
    """Puts f(x) in place of g(x) beside a negative multiple of f(x), or the larger of x and 0 in place of one that is
    taken away, by what is known of the functions."""
    calls = {number: term.atoms[0] for number, term in sorted(goal.terms.items())
             if len(term.atoms) == 1 and isinstance(term.atoms[0], Function)}
    taken = {number: atom for number, atom in calls.items() if goal.terms[number].factor < 0}
    fresh = goal.expander.fresh
    for number, atom in calls.items():
        for other in taken.values() if goal.terms[number].factor > 0 else ():
            if (other.name, atom.name) in BELOW:
                goal.step("below", number, other.name)
                replace_term(goal, number, (), made(other.name, atom.arg, fresh))
                return True
    for number, atom in taken.items():
        if atom.name in LAWS and LAWS[atom.name].contracts:
            goal.step("raise", number)
            replace_term(goal, number, (), made("relu", atom.arg, fresh))
            return True
    return False


def turn_odd(goal: Goal) -> bool:
    """Puts -f(x) in place of f(-x), of the two x the one whose first product is positive; False where there is none."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if (isinstance(atom, Function) and atom.name in LAWS and LAWS[atom.name].odd and atom.arg
                    and min(atom.arg, key=lambda each: str(each.atoms)).factor < 0):
                goal.step("odd", number, place)
                sums = made(atom.name, tuple(replace(t, factor=-t.factor) for t in atom.arg), goal.expander.fresh)
                replace_term(goal, number, (*term.atoms[:place], *term.atoms[place + 1:]),
                             [replace(t, factor=-t.factor) for t in sums])
                return True
    return False


def _values(goal: Goal, term: Term, atom: Largest) -> Iterator[_Value]:
    known = goal.known(term.guards)
    tried = 0
    for k, member in enumerate(atom.members):
        whole = Term(Fraction(1), (), member.guards, (Function("", member.body),))
        for guess in guesses(goal, term, len(member.variables)):
            moved = substituted(whole, dict(zip(member.variables, guess, strict=True)))
            witnesses = [known.holds(guard) for guard in moved.guards]
            if any(each is None for each in witnesses):
                continue
            [body] = moved.atoms
            assert isinstance(body, Function)
            yield _Value(k, [goal.text(each, term.variables) for each in guess],
                         [[goal.witness_text(w, term.variables) for w in each or ()] for each in witnesses], body.arg)
            tried += 1
            if tried == _TRIES * len(atom.members):
                return
