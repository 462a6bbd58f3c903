"""Makes a goal that is stuck simpler, by steps that leave every sum what it is: atoms that are numbers, sums within
atoms, and what the modules for :mod:`quotients <mlc.substitution.goal_cancel>` and
:mod:`maxima <mlc.substitution.goal_members>` find."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS, VALUES
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_cancel import cancel
from mlc.substitution.goal_divide import replace_term
from mlc.substitution.goal_known import above, split_divisors
from mlc.substitution.goal_members import climb, lose, take_apart
from mlc.substitution.goal_simplify import simplify_all
from mlc.substitution.goal_tools import Tools, others
from mlc.substitution.maxima import largest, made
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Member,
    Normal,
    Stuck,
    Term,
    apart,
    collected,
    reciprocal,
    refreshed_member,
    times,
)

__all__ = ["loosen", "reduce_demands", "reduce_one", "settle_above"]

#: rounds within one sum, and how deep sums within sums are looked at
_ROUNDS, _DEPTH = 12, 9


def reduce_one(goal: Goal, tools: Tools) -> bool:
    """Makes the goal simpler; False where nothing is found."""
    return (_simple(goal, tools) or split_divisors(goal) or reduce_divisors(goal, tools) or _inside(goal, tools)
            or _extract(goal) or _merged(goal, tools) or cancel(goal, tools) or lose(goal, tools))


def _simple(goal: Goal, tools: Tools) -> bool:
    return _zero(goal) or _value(goal) or loosen(goal) or climb(goal, tools) or take_apart(goal)


def _zero(goal: Goal) -> bool:
    """Takes a term away that has a function of 0 which is 0."""
    for number in sorted(goal.terms):
        for atom in goal.terms[number].atoms:
            if isinstance(atom, Function) and not atom.arg and (
                    atom.name in ("1/", "sqrt") or (atom.name in LAWS and LAWS[atom.name].zero)):
                goal.step("drop", number, None)
                del goal.terms[number]
                return True
    return False


def _value(goal: Goal) -> bool:
    """Puts numbers in place of functions of numbers, and x in place of log(exp(x))."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            found = _known(atom)
            if found is not None:
                goal.step("value", number, place)
                replace_term(goal, number, others(term, place), found)
                return True
    return False


def _known(atom: Atom) -> Normal | None:
    if not isinstance(atom, Function) or not atom.name:
        return None
    argument = collected(atom.arg)
    if len(argument) > 1:
        return None
    one = argument[0] if argument else Term(Fraction(0))
    if one != Term(one.factor, atoms=one.atoms):
        return None
    if not one.atoms:
        value = VALUES.get((atom.name, one.factor))
        return None if value is None else ((Term(value),) if value else ())
    [*rest] = one.atoms
    if atom.name == "log" and one.factor == 1 and len(rest) == 1 and isinstance(rest[0], Function) and (
            rest[0].name == "exp"):
        return rest[0].arg
    return None


def reduce_divisors(goal: Goal, tools: Tools) -> bool:
    """One more divisor for each that is of a sum which can be made simpler."""
    before = len(goal.divisors)
    for place in range(before):
        divisor = goal.divisors[place]
        if divisor in goal.reduced or goal.depth >= _DEPTH:
            continue
        goal.reduced.add(divisor)
        [function] = divisor.atoms
        assert isinstance(function, Function)
        facts = [*goal.facts, *inequalities(divisor.guards)]
        steps, terms = _sum(goal, divisor.variables, facts, function.arg, tools)
        if steps:
            more = dataclasses.replace(divisor, atoms=(Function(function.name, collected(terms)),))
            goal.step("divisor inside", place, steps)
            goal.divisors = (*goal.divisors, more)
            goal.reduced.add(more)
            goal.settled.add(len(goal.divisors) - 1)
    return len(goal.divisors) > before


def reduce_demands(goal: Goal, tools: Tools) -> bool:
    """The same for terms that are definedness demands, each of which stays one."""
    first = len(goal.divisors)
    changed = split_divisors(goal) or reduce_divisors(goal, tools)
    for divisor in goal.divisors[first:]:
        goal.append(-1, divisor)
    for number in sorted(goal.terms):
        term = goal.terms[number]
        [atom] = term.atoms
        if isinstance(atom, Function) and (atom, term.guards) not in goal.still:
            goal.still.add((atom, term.guards))
            facts = [*goal.facts, *inequalities(term.guards)]
            steps, terms = _sum(goal, term.variables, facts, atom.arg, tools)
            if steps:
                goal.step("inside", number, 0, steps)
                goal.terms[number] = dataclasses.replace(term, atoms=(Function(atom.name, collected(terms)),))
                changed = True
    return changed


def settle_above(goal: Goal, tools: Tools) -> bool:
    """Takes demands away of what is seen to be above 0, or at least 0 where that suffices."""
    for number in sorted(goal.terms.keys() - goal.new):
        term = goal.terms[number]
        [atom] = term.atoms
        if not isinstance(atom, Function):
            continue
        facts = [*goal.facts, *inequalities(term.guards)]
        if atom.name == "sqrt":
            try:
                steps = tools.at_least(Goal(goal.expander, [*goal.context, *term.variables], facts, atom.arg, (),
                                            goal.divisors, goal.depth + 1))
            except Stuck:
                continue
            goal.step("above", number, None, steps)
        else:
            found = above(goal, term.variables, facts, atom.arg, tools)
            if found is None:
                continue
            goal.step("above", number, found[:3], found[3])
        del goal.terms[number]
        return True
    return False


def _inside(goal: Goal, tools: Tools) -> bool:
    """Rewrites what one atom is of."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            steps, sums = _rewritten(goal, term, atom, tools)
            if steps:
                goal.step("inside", number, place, steps)
                replace_term(goal, number, others(term, place), sums)
                return True
    return False


def _rewritten(goal: Goal, term: Term, atom: Atom, tools: Tools) -> tuple[list[Any], Normal]:
    """The steps within an atom of the term, and the sum that it is then."""
    fresh, facts = goal.expander.fresh, [*goal.facts, *inequalities(term.guards)]
    if isinstance(atom, Function):
        if (atom.name, atom.arg, term.guards) in goal.still:
            return [], ()
        steps, found = _sum(goal, term.variables, facts, atom.arg, tools)
        if not steps:
            goal.still.add((atom.name, atom.arg, term.guards))
            return steps, ()
        if atom.name == "1/":
            return steps, reciprocal(found, fresh)
        return steps, made(atom.name, found, fresh) if atom.name else (_member(collected(found)),)
    if not isinstance(atom, Largest) or (atom, term.guards) in goal.still:
        return [], ()
    members = [dataclasses.replace(_member(m.body), variables=m.variables, guards=m.guards)
               for m in (refreshed_member(one, fresh) for one in atom.members)]
    inner = Goal(goal.expander, [*goal.context, *term.variables], facts, tuple(members), (), goal.divisors,
                 goal.depth + 1)
    for number in sorted(inner.terms):
        each = inner.terms[number]
        steps, sums = _rewritten(inner, each, each.atoms[0], tools)
        if steps:
            inner.step("inside", number, 0, steps)
            replace_term(inner, number, (), sums)
    if not inner.steps:
        goal.still.add((atom, term.guards))
        return [], ()
    return inner.steps, largest([Member(t.variables, t.guards, t.atoms[0].arg) for _, t in sorted(inner.terms.items())
                                 if isinstance(t.atoms[0], Function)], fresh)


def _sum(goal: Goal, variables: Sequence[str], facts: Sequence[Poly], terms: Sequence[Term], tools: Tools
         ) -> tuple[list[Any], Normal]:
    """The steps that make a sum simpler, and the sum then."""
    if goal.depth >= _DEPTH:
        return [], ()
    inner = Goal(goal.expander, [*goal.context, *variables], facts, tuple(terms), (), goal.divisors, goal.depth + 1)
    inner.reduced = set(goal.divisors)
    for _ in range(_ROUNDS):
        simplify_all(inner)
        if not (_simple(inner, tools) or _inside(inner, tools) or _extract(inner) or _merged(inner, tools)
                or cancel(inner, tools) or tools.choose(inner, tools.at_least) or lose(inner, tools)):
            break
    return inner.steps, tuple(t for _, t in sorted(inner.terms.items()))


def _member(body: Normal) -> Term:
    """A sum as the only atom of a term."""
    return Term(Fraction(1), atoms=(Function("", tuple(body)),))


def _extract(goal: Goal) -> bool:
    """Takes out of the reciprocal of a sum what does not depend on what is summed over."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Function) and atom.name == "1/" and len(collected(atom.arg)) == 1:
                whole, rest = apart(atom.arg)
                if (rest.variables or rest.guards) and whole != Term(Fraction(1)):
                    goal.step("extract", number, place)
                    inner = Term(Fraction(1), atoms=(Function("1/", (rest,)),))
                    replace_term(goal, number, others(term, place),
                                 [times(each, inner) for each in reciprocal((whole,), goal.expander.fresh)])
                    return True
    return False


def loosen(goal: Goal) -> bool:
    """Leaves out a guard on the context that holds anyway."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for k, guard in enumerate(term.guards):
            rest = (*term.guards[:k], *term.guards[k + 1:])
            if guard.poly.symbols.isdisjoint(term.variables):
                witnesses = goal.known(rest).holds(guard)
                if witnesses is not None:
                    goal.step("loosen", number, k, [goal.witness_text(w, term.variables) for w in witnesses])
                    goal.terms[number] = dataclasses.replace(term, guards=rest)
                    return True
    return False


def _merged(goal: Goal, tools: Tools) -> bool:
    """Adds two terms up that are the same."""
    return any(tools.merge(goal, i, j) for i in sorted(goal.terms) for j in sorted(goal.terms)
               if i < j and i in goal.terms and j in goal.terms)
