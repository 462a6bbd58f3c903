"""Proves that what the target demands to be defined the source demands too, or that it is defined anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS
from mlc.substitution.change_of_variables import covers, skeleton
from mlc.substitution.check.integers import positive, translated
from mlc.substitution.goal import Goal
from mlc.substitution.goal_merge import equal_atoms, plausible
from mlc.substitution.goal_simplify import settle_context, simplify_all
from mlc.substitution.maxima import not_negative
from mlc.substitution.normal import Atom, Function, Number, Stuck, Term, substituted

__all__ = ["prove_defined"]

_ROUNDS, _SPLITS = 120, 12


def prove_defined(goal: Goal) -> list[list[Any]]:
    """The steps that cover every demand in ``goal.terms`` by one of ``goal.new``; raises :class:`Stuck`."""
    for _ in range(_ROUNDS):
        settle_context(goal)
        while simplify_all(goal):
            settle_context(goal)
        wanted = [n for n in sorted(goal.terms) if n not in goal.new]
        if not wanted:
            return goal.steps
        if not any(_settle(goal, n, splitting) for splitting in (False, True) for n in wanted):
            raise Stuck(f"the target may be undefined where the source is not: {goal.show(goal.terms[wanted[0]])}")
    raise Stuck("too many cases")


def _settle(goal: Goal, number: int, splitting: bool) -> bool:
    """Takes one demand away, or splits it."""
    one = goal.terms[number]
    if not splitting and _by_sign(one.atoms[0]):
        goal.step("sign", number)
        del goal.terms[number]
        return True
    return any(_cover(goal, number, other, splitting) for other in sorted(goal.new & goal.terms.keys())
               if skeleton(goal.terms[other].atoms[0]) == skeleton(one.atoms[0]))


def _cover(goal: Goal, i: int, j: int, splitting: bool) -> bool:
    one = goal.terms[i]
    names = {v: Poly.symbol(f"{v}$") for v in goal.terms[j].variables}
    other = replace(substituted(goal.terms[j], names), variables=tuple(f"{v}$" for v in goal.terms[j].variables))
    here = goal.known(one.guards)
    for mapping in covers(one, other):
        moved = substituted(other, mapping)
        missing = [g for g in moved.guards if here.holds(g) is None]
        if missing and not splitting:
            continue
        both = goal.known((*one.guards, *missing))
        if both.contradictory() is not None or not plausible(one, moved, (0,), both):
            continue
        if missing:
            if sum(step[0] == "split" for step in goal.steps) >= _SPLITS:
                raise Stuck("too many cases")
            goal.split(i, missing[0])
            return True
        proof = equal_atoms(goal, one.atoms[0], moved.atoms[0], one, here)
        if proof is None:
            continue
        goal.step("cover", i, j, [goal.text(mapping[f"{v}$"], one.variables) for v in goal.terms[j].variables],
                  [[goal.witness_text(w, one.variables) for w in here.holds(g) or ()] for g in moved.guards], proof)
        del goal.terms[i]
        return True
    return False


def _by_sign(atom: Atom) -> bool:
    """Whether a function's argument is in its domain by its signs alone."""
    if not isinstance(atom, Function):
        return False
    from_zero = atom.name in LAWS and LAWS[atom.name].domain == ">= 0"
    return not_negative(atom.arg) and (from_zero or any(map(_above_zero, atom.arg)))


def _above_zero(term: Term) -> bool:
    return term.factor > 0 and not term.variables and not term.guards and all(
        positive(translated(a.value)) if isinstance(a, Number)
        else isinstance(a, Function) and a.name in LAWS and LAWS[a.name].positive for a in term.atoms)
