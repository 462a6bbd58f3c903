"""Proof steps: removes variables with only one value from the sums inside functions and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mlc.operators.index import Poly
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_divide import replace_term
from mlc.substitution.goal_simplify import fix
from mlc.substitution.maxima import largest, made
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Member,
    Normal,
    Term,
    collected,
    reciprocal,
    refreshed_member,
)

__all__ = ["settle_defined", "settle_inside"]


def settle_inside(goal: Goal) -> bool:
    """Fixes variables within atoms and divisors of the goal; False where none has one value."""
    changed = _settle_divisors(goal)
    for number in sorted(goal.terms):
        changed |= _settle(goal, number)
    return bool(changed)


def settle_defined(goal: Goal) -> bool:
    """The same for terms that are definedness demands, each of which stays one."""
    first = len(goal.divisors)
    changed = bool(_settle_divisors(goal))
    for divisor in goal.divisors[first:]:
        goal.append(-1, divisor)
    for number in sorted(goal.terms):
        term = goal.terms[number]
        [atom] = term.atoms
        if isinstance(atom, Function):
            steps, terms = _rewritten(goal, term.variables, _facts(goal, term), atom.arg)
            if steps:
                goal.step("inside", number, 0, steps)
                goal.terms[number] = replace(term, atoms=(Function(atom.name, collected(terms)),))
                changed = True
    return changed


def _settle_divisors(goal: Goal) -> bool:
    """One more divisor for each within which a variable has one value."""
    before = len(goal.divisors)
    for place in range(before):
        if place in goal.settled:
            continue
        goal.settled.add(place)
        divisor = goal.divisors[place]
        [function] = divisor.atoms
        assert isinstance(function, Function)
        steps, terms = _rewritten(goal, divisor.variables, _facts(goal, divisor), function.arg)
        if steps:
            goal.step("divisor inside", place, steps)
            goal.settled.add(len(goal.divisors))
            more = replace(divisor, atoms=(Function(function.name, collected(terms)),))
            goal.divisors = (*goal.divisors, more)
    return len(goal.divisors) > before


def _settle(goal: Goal, number: int) -> bool:
    """Rewrites one atom of the term; the terms that take its place have the others."""
    term = goal.terms[number]
    for place, atom in enumerate(term.atoms):
        steps, sums = _within(goal, term, atom)
        if steps:
            first = max(goal.terms) + 1
            goal.step("inside", number, place, steps)
            replace_term(goal, number, (*term.atoms[:place], *term.atoms[place + 1:]), sums)
            for more in [n for n in sorted(goal.terms) if n >= first]:
                _settle(goal, more)
            return True
    return False


def _within(goal: Goal, term: Term, atom: Atom) -> tuple[list[Any], Normal]:
    """The steps within an atom of the term, and the sum that it is then."""
    fresh, facts = goal.expander.fresh, _facts(goal, term)
    if isinstance(atom, Function):
        steps, found = _rewritten(goal, term.variables, facts, atom.arg)
        if not steps:
            return steps, ()
        if atom.name == "1/":
            return steps, reciprocal(found, fresh)
        return steps, made(atom.name, found, fresh) if atom.name else (_member(collected(found)),)
    if isinstance(atom, Largest):
        members = [replace(_member(m.body), variables=m.variables, guards=m.guards)
                   for m in (refreshed_member(each, fresh) for each in atom.members)]
        steps, found = _rewritten(goal, term.variables, facts, members)
        if steps:
            return steps, largest([Member(t.variables, t.guards, t.atoms[0].arg) for t in found
                                   if isinstance(t.atoms[0], Function)], fresh)
    return [], ()


def _rewritten(goal: Goal, variables: Sequence[str], facts: Sequence[Poly], terms: Sequence[Term]
               ) -> tuple[list[Any], Normal]:
    """The steps that fix every variable of one value in a sum, and the sum then."""
    inner = Goal(goal.expander, [*goal.context, *variables], facts, tuple(terms), (), goal.divisors, goal.depth + 1)
    for number in list(inner.terms):
        while fix(inner, number, inner.terms[number], inner.known(inner.terms[number].guards)):
            pass
        _settle(inner, number)
    return inner.steps, tuple(inner.terms.values())


def _member(body: Normal) -> Term:
    """A sum as the only atom of a term."""
    return Term(Fraction(1), atoms=(Function("", tuple(body)),))


def _facts(goal: Goal, term: Term) -> list[Poly]:
    return [*goal.facts, *inequalities(term.guards)]
