"""Proof steps: cancellation of quotients, ``x * 1/x * rest`` as the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice, product
from typing import Any

from mlc.operators.index import Condition, Poly, Symbol
from mlc.substitution.goal import Goal
from mlc.substitution.goal_divide import add_divisors, add_positive, guesses, kind_of, replace_term
from mlc.substitution.goal_tools import Tools, kept, restored
from mlc.substitution.normal import (
    Function,
    Normal,
    Stuck,
    Term,
    collected,
    free_names,
    make_term,
    reciprocal,
    refreshed,
    substituted,
    times,
)

__all__ = ["cancel"]

#: units that are tried for one quotient
_UNITS = 8


def cancel(goal: Goal, tools: Tools) -> bool:
    """Puts the rest of a product in place of ``x * 1/x * rest``: adds the rest and takes it away, and what is taken
    away becomes the product by a unit."""
    inverse = [atom for term in goal.terms.values() for atom in term.atoms
               if isinstance(atom, Function) and atom.name == "1/"]
    if not inverse:
        return False
    state = kept(goal)
    add_divisors(goal, inverse)
    add_positive(goal)
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Function) and atom.name == "1/" and atom.arg and (
                    _cancelled(goal, number, term, place, atom, tools)):
                return True
    restored(goal, state)
    return False


def _cancelled(goal: Goal, number: int, term: Term, place: int, atom: Function, tools: Tools) -> bool:
    for part in collected(atom.arg):
        places = _matched(term, place, part)
        if places is None:
            continue
        if part.variables and not _goes(term, places):
            places = next((each for each in _others(term, place, part) if _goes(term, each)), places)
        left = [a for k, a in enumerate(term.atoms) if k not in places]
        free = set[str]().union(*map(free_names, left))
        gone = [v for v in term.variables if v not in free and any(v in free_names(term.atoms[k]) for k in places)]
        gone = gone if part.variables else []
        if len(gone) != len(part.variables):
            continue
        using = [g for g in term.guards if not g.poly.symbols.isdisjoint(gone)]
        rest = make_term(term.factor / part.factor, [v for v in term.variables if v not in gone],
                         [g for g in term.guards if g not in using], left)
        known = goal.known(rest.guards)
        plain, ends = [*guesses(goal, rest, len(gone))], [*_ends(gone, using)]
        for place_of, guess in enumerate((*plain, *ends)):
            at = dict(zip(gone, guess, strict=True))
            moved = [substituted(Term(Fraction(1), guards=(g,)), at) for g in using]
            guards = [g for t in moved for g in t.guards] if place_of < len(plain) else [
                Condition(g.poly.substitute(at), g.relation) for g in using]  # those that hold anyway, too
            witnesses = [known.holds(g) for g in guards]
            if len(guards) != len(using) or any(w is None for w in witnesses):
                continue
            words = [[goal.text(each, rest.variables) for each in guess],
                     [[goal.witness_text(w, rest.variables) for w in ws or ()] for ws in witnesses]]
            return _replaced(goal, number, places, [term.variables.index(v) for v in gone], rest, atom, words, tools)
    return False


def _matched(term: Term, place: int, part: Term) -> list[int] | None:
    """The places of atoms of the kinds of a part's, and that of the reciprocal."""
    left = [k for k in range(len(term.atoms)) if k != place]
    found = [place]
    for atom in part.atoms:
        fit = [k for k in left if kind_of(term.atoms[k]) == kind_of(atom)]
        if not fit:
            return None
        one = next((k for k in fit if term.atoms[k] == atom), fit[0])
        found.append(one)
        left.remove(one)
    return found


def _goes(term: Term, places: list[int]) -> bool:
    """Whether a variable is of the atoms at these places alone."""
    left = set[str]().union(*(free_names(a) for k, a in enumerate(term.atoms) if k not in places))
    return any(v not in left and any(v in free_names(term.atoms[k]) for k in places) for v in term.variables)


def _ends(gone: Sequence[str], guards: Sequence[Condition]) -> Iterator[tuple[Poly, ...]]:
    """The least values that guards leave variables."""
    ends = [[Poly.symbol(v) - g.poly for g in guards if dict(g.poly.terms).get((Symbol(v),)) == 1
             and v not in (g.poly - Poly.symbol(v)).symbols] for v in gone]
    yield from islice(product(*ends), _UNITS)


def _others(term: Term, place: int, part: Term) -> Iterator[list[int]]:
    """More places of such atoms."""
    fits = [[k for k, a in enumerate(term.atoms) if k != place and kind_of(a) == kind_of(each)] for each in part.atoms]
    for found in islice(product(*fits), _UNITS):
        if len(set(found)) == len(found):
            yield [place, *found]


def _replaced(goal: Goal, number: int, places: list[int], gone: list[int], rest: Term, atom: Function,
              words: list[Any], tools: Tools) -> bool:
    for place, values, guards, argument in _units(goal, rest, atom):
        state = kept(goal)
        try:
            goal.step("insert", number, sorted(places), gone, str(rest.factor), *words)
            first = goal.count
            goal.append(number, refreshed(rest, goal.expander.fresh))
            goal.append(number, refreshed(dataclasses.replace(rest, factor=-rest.factor), goal.expander.fresh))
            taken = goal.terms[first + 1]
            known = goal.known(taken.guards)
            moved = substituted(Term(Fraction(1), guards=guards), dict(zip(rest.variables, map(
                Poly.symbol, taken.variables), strict=True)))
            if len(moved.guards) == len(guards) and all(known.holds(g) is not None for g in moved.guards):
                names = dict(zip(rest.variables, map(Poly.symbol, taken.variables), strict=True))
                goal.step("unit", first + 1, place, [goal.text(v.substitute(names), taken.variables) for v in values],
                          [[goal.witness_text(w, taken.variables) for w in known.holds(g) or ()]
                           for g in moved.guards])
                argument = tuple(substituted(t, names) for t in argument)
                fresh = goal.expander.fresh
                begin = goal.count
                replace_term(goal, first + 1, taken.atoms, [
                    times(refreshed(a, fresh), refreshed(b, fresh)) for a in argument
                    for b in reciprocal(argument, fresh)])
                for new in range(begin, goal.count):
                    if not any(tools.merge(goal, other, new) for other in sorted(goal.terms)
                               if other not in (first, new) and other in goal.terms and other < begin):
                        break
                else:
                    if number not in goal.terms:
                        return True
        except Stuck:
            pass
        restored(goal, state)
    return False


def _units(goal: Goal, rest: Term, atom: Function) -> Iterator[tuple[int, tuple[Poly, ...], Any, Normal]]:
    """Divisors of the kind of a reciprocal, with values of their variables where the rest stands."""
    known, found = goal.known(rest.guards), []
    for place, divisor in sorted(enumerate(goal.divisors), key=lambda each: each[1].atoms[0] != atom):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        if function.name not in ("1/", "log") or kind_of(Function("1/", function.arg)) != kind_of(atom):
            continue
        for guess in (*guesses(goal, rest, len(divisor.variables)), *_ends(divisor.variables, divisor.guards)):
            moved = substituted(dataclasses.replace(divisor, variables=()),
                                dict(zip(divisor.variables, guess, strict=True)))
            if any(known.holds(guard) is None for guard in moved.guards):
                continue
            [function] = moved.atoms
            assert isinstance(function, Function)
            found.append((place, guess, moved.guards, function.arg))
    yield from sorted(found, key=lambda way: way[3] != atom.arg)[:_UNITS]
