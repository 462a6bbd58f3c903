"""Proof steps: terms are multiplied by ``a * (1/a)``, which is 1 wherever the source divides by ``a``, to match others
with ``1/a``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count, islice, product
from typing import Any, NamedTuple

from mlc.operators.index import Condition, Poly
from mlc.operators.laws import LAWS
from mlc.operators.scalar import Read
from mlc.substitution.change_of_variables import skeleton
from mlc.substitution.check.integers import positive, translated
from mlc.substitution.goal import Goal
from mlc.substitution.maxima import not_negative
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Normal,
    Number,
    Term,
    divisor_of,
    make_term,
    reciprocal,
    refreshed,
    substituted,
    times,
)

__all__ = ["NOT_ZERO", "above_zero", "add_divisors", "add_positive", "guesses", "kind_of", "kinds_of", "multiply_one",
           "named", "never_zero", "replace_term", "vanishes"]

#: products with 1 in a goal, values of a divisor's variables that are looked at for one, divisors that are added
NOT_ZERO = ("1/", "log")
_PRODUCTS, _GUESSES, _MORE = 8, 30, 8


def multiply_one(goal: Goal) -> bool:
    """Multiplies one term by ``a * (1/a)``; False where no divisor is one of another term.

    First comes what makes it a product of the same kinds of atoms as another one, which it may then cancel.
    """
    if sum(step[0] == "unit" for step in goal.steps) >= _PRODUCTS:
        return False
    inside = (atom for term in goal.terms.values() for atom in term.atoms)
    add_divisors(goal, [each for each in inside if isinstance(each, Function) and each.name == "1/"])
    add_positive(goal)
    ways = [(not fits, way.size, number, way) for number in sorted(goal.terms) for way, fits in _ways(goal, number)]
    ways = ways or [(False, way.size, number, way) for number in sorted(goal.terms) for way in _relus(goal, number)]
    if not ways:
        return False
    *_, number, way = min(ways, key=lambda found: found[:3])
    term, known = goal.terms[number], goal.known(goal.terms[number].guards)
    goal.step("unit", number, way.place, [goal.text(value, term.variables) for value in way.values],
              [[goal.witness_text(w, term.variables) for w in known.holds(g) or ()] for g in way.guards])
    fresh = goal.expander.fresh
    replace_term(goal, number, term.atoms, [times(refreshed(a, fresh), refreshed(b, fresh)) for a in way.argument
                                            for b in reciprocal(way.argument, fresh)])
    return True


def add_divisors(goal: Goal, wanted: Sequence[Function]) -> bool:
    """More divisors of the kinds of ``wanted``: parts without which what is divided by is 0; whether there was any."""
    kinds, known = set(map(kind_of, wanted)), set(goal.divisors)
    before = len(known)
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        for path, part in _parts(function.arg) if function.name in NOT_ZERO else ():
            whole = Term(Fraction(1), atoms=(divisor_of(part) or part,))
            more = dataclasses.replace(divisor, atoms=(Function("1/", (whole,)),))
            if kind_of(more.atoms[0]) in kinds and more not in known and len(known) < before + _MORE and vanishes(
                    function.arg, part):
                goal.step("nonzero", place, path)
                goal.divisors = (*goal.divisors, more)
                known.add(more)
    return len(known) > before


def above_zero(goal: Goal, term: Term, atom: Function) -> list[Any] | None:
    """What shows that what a reciprocal is of is above 0 where the term stands: one of its products, values of that
    one's variables, witnesses of its guards."""
    if not not_negative(atom.arg):
        return None
    known = goal.known(term.guards)
    for k, part in enumerate(atom.arg):
        if part.factor <= 0 or not all(map(never_zero, part.atoms)):
            continue
        whole = dataclasses.replace(part, variables=())
        for guess in guesses(goal, term, len(part.variables)):
            guards = substituted(whole, dict(zip(part.variables, guess, strict=True))).guards
            witnesses = [known.holds(guard) for guard in guards]
            if all(each is not None for each in witnesses):
                return [k, [goal.text(each, term.variables) for each in guess],
                        [[goal.witness_text(w, term.variables) for w in each or ()] for each in witnesses]]
    return None


def never_zero(atom: Atom) -> bool:
    if isinstance(atom, Number):
        return positive(translated(atom.value))
    return isinstance(atom, Function) and atom.name in LAWS and LAWS[atom.name].positive


def add_positive(goal: Goal) -> None:
    """A divisor for each reciprocal of what is plainly above 0, if none is of its kind."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            known = (each for divisor in goal.divisors for each in divisor.atoms)
            if isinstance(atom, Function) and atom.name == "1/" and (
                    named(atom) not in set(map(named, known)) if goal.expander.thorough
                    else kind_of(atom) not in set(map(kind_of, known))):
                found = above_zero(goal, term, atom)
                if found is not None:
                    goal.step("positive", number, place, *found)
                    goal.divisors = (*goal.divisors, Term(Fraction(1), term.variables, term.guards, (atom,)))


def _parts(terms: Normal) -> Iterator[tuple[list[int], Atom]]:
    """The atoms of a sum and of the sums that these are of, each with its path; none that a variable runs over."""
    for place, term in enumerate(terms):
        for number, atom in enumerate(() if term.variables else term.atoms):
            yield [place, number], atom
            inner: Iterable[tuple[list[int], Normal]] = ()
            if isinstance(atom, Function):
                inner = [([], atom.arg)]
            elif isinstance(atom, Largest):
                inner = [([k], m.body) for k, m in enumerate(atom.members) if not m.variables]
            for begin, body in inner:
                yield from (([place, number, *begin, *path], part) for path, part in _parts(body))


def vanishes(terms: Normal, atom: Atom) -> bool:
    """Whether the sum is plainly 0 where the atom is: every product has a factor that is."""
    return all(any(_vanishes(each, atom) for each in term.atoms) for term in terms)


def _vanishes(one: Atom, atom: Atom) -> bool:
    if one == atom:
        return True
    if isinstance(one, Function):
        zero = one.name in ("sqrt", "1/") or (one.name in LAWS and LAWS[one.name].zero)
        return zero and vanishes(one.arg, atom)
    if not isinstance(one, Largest):
        return False
    gone = [vanishes(m.body, atom) for m in one.members]
    return any(gone) and all(z or not_negative(dataclasses.replace(t, factor=-t.factor) for t in m.body)
                             for z, m in zip(gone, one.members, strict=True))


def replace_term(goal: Goal, number: int, atoms: Sequence[Atom], sums: Iterable[Term]) -> None:
    """The term with a sum beside ``atoms``, which are all that it keeps."""
    term = goal.terms.pop(number)
    for part in (refreshed(each, goal.expander.fresh) for each in sums):
        goal.append(number, make_term(term.factor * part.factor, (*term.variables, *part.variables),
                                      (*term.guards, *part.guards), (*atoms, *part.atoms)))


def guesses(goal: Goal, term: Term, count: int) -> Iterator[tuple[Poly, ...]]:
    """Values that as many variables may have where the term stands; where maxima are, the last ones first."""
    values = [*map(Poly.symbol, (*term.variables, *goal.context)), Poly({})]
    if goal.expander.attains:
        scope = {*term.variables, *goal.context}
        read = [i for each in goal.terms.values() for a in each.atoms for i in _indices(a)]
        values = [*dict.fromkeys(i for i in (*read, *map(Poly.symbol, reversed(goal.context)), *values)
                                 if all(n in scope or n[0] not in "$@" for n in i.symbols))]
    return islice(product(values, repeat=count), _GUESSES)


def _indices(atom: Atom) -> Iterator[Poly]:
    """Where elements are read that an atom is of, but for plain variables."""
    if isinstance(atom, Read):
        yield from (i for i in atom.indices if len(i.terms) > 1)
    bodies = [atom.arg] if isinstance(atom, Function) else (
        [m.body for m in atom.members] if isinstance(atom, Largest) else [])
    for inner in (a for body in bodies for t in body for a in t.atoms):
        yield from _indices(inner)


class _Way(NamedTuple):
    """A divisor by its place, values of its variables, the guards that these have to meet, and what it divides by."""

    place: int
    values: tuple[Poly, ...]
    guards: tuple[Condition, ...]
    argument: Normal

    @property
    def size(self) -> int:
        """How many atoms there are in what is divided by."""
        return sum(len(term.atoms) for term in self.argument)


def _ways(goal: Goal, number: int) -> Iterator[tuple[_Way, bool]]:
    """Divisors that another term has more often than this one, with values of their variables that are seen to be
    admitted; and whether a part of the product is of the kinds of another term."""
    term = goal.terms[number]
    mine, known = kinds_of(term), goal.known(term.guards)
    others = [kinds_of(other) for place, other in goal.terms.items() if place != number]
    for place, divisor in enumerate(goal.divisors):
        if isinstance(divisor.atoms[0], Function) and divisor.atoms[0].name not in NOT_ZERO:
            continue
        inverse = [kinds_of(each) for each in reciprocal(_argument(divisor), goal.expander.fresh)]
        if not any(wanted <= each - mine for each in others for wanted in inverse):
            continue
        seen: set[Normal] = set()
        for guess in guesses(goal, term, len(divisor.variables)):
            moved = substituted(divisor, dict(zip(divisor.variables, guess, strict=True)))
            argument = _argument(moved)
            if argument in seen or any(known.holds(guard) is None for guard in moved.guards):
                continue
            seen.add(argument)
            fits = any(mine + kinds_of(part) + wanted in others for part in argument for wanted in inverse)
            yield _Way(place, guess, moved.guards, argument), fits


def _relus(goal: Goal, number: int) -> Iterator[_Way]:
    """The divisor of ``x * (1/max(x, 0))``: with the maximum beside it, x is that too."""
    term = goal.terms[number]
    known = goal.known(term.guards)
    for atom in term.atoms:
        inner = atom.arg[0].atoms if isinstance(atom, Function) and atom.name == "1/" and len(atom.arg) == 1 else ()
        if len(inner) != 1 or not isinstance(inner[0], Largest) or inner[0] in term.atoms:
            continue
        if not any(m.body and set(m.body[0].atoms) <= set(term.atoms) for m in inner[0].members):
            continue
        for place, divisor in enumerate(goal.divisors):
            if divisor.atoms == (atom,) and all(known.holds(guard) is not None for guard in divisor.guards):
                yield _Way(place, (), divisor.guards, _argument(divisor))


def _argument(divisor: Term) -> Normal:
    """What is divided by."""
    [function] = divisor.atoms
    assert isinstance(function, Function)
    return function.arg


def kinds_of(term: Term) -> Counter[str]:
    """The kinds of atoms that are multiplied."""
    return Counter(map(kind_of, term.atoms))


def named(atom: Atom) -> str:
    """A text that atoms share which differ in the names that they bind."""
    names = (f"$b{k}" for k in count())
    return str(refreshed(Term(Fraction(1), atoms=(atom,)), lambda: next(names)).atoms)


def kind_of(atom: Atom) -> str:
    if isinstance(atom, Function):
        inner = (f"{len(term.variables)}{'*'.join(sorted(map(kind_of, term.atoms)))}" for term in atom.arg)
        return f"{atom.name}({'+'.join(inner)})"
    return skeleton(atom)
