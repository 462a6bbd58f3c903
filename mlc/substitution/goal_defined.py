"""Definedness: proves that whatever the target requires to be defined, the source requires too, or is always defined.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS
from mlc.substitution.change_of_variables import covers, skeleton
from mlc.substitution.check.integers import positive, translated
from mlc.substitution.goal import Goal
from mlc.substitution.goal_cases import by_cases
from mlc.substitution.goal_divide import above_zero, add_divisors
from mlc.substitution.goal_inside import settle_defined
from mlc.substitution.goal_known import settle_void
from mlc.substitution.goal_merge import TOOLS, equal_atoms, plausible
from mlc.substitution.goal_nonzero import find_defined
from mlc.substitution.goal_reduce import reduce_demands, settle_above
from mlc.substitution.goal_simplify import settle_context, simplify_all
from mlc.substitution.maxima import not_negative
from mlc.substitution.normal import (
    Atom,
    Function,
    Normal,
    Number,
    Stuck,
    Term,
    apart,
    collected,
    divisor_of,
    is_size,
    substituted,
)

__all__ = ["divisors_of", "prove_defined"]

_ROUNDS, _SPLITS = 120, 12
#: changes of variables after which a second attempt compares no more demands
_COVERS = 500


def divisors_of(demands: Normal) -> Normal:
    """Those among demands, in their order, that are of what is not 0; then the roots, of what is at least 0."""
    return tuple(t for names in (("1/", "log"), ("sqrt",)) for t in demands
                 if isinstance(t.atoms[0], Function) and t.atoms[0].name in names)


def prove_defined(goal: Goal) -> list[list[Any]]:
    """The steps that cover every demand in ``goal.terms`` by one of ``goal.new``; raises :class:`Stuck`."""
    for _ in range(_ROUNDS):
        settle_context(goal)
        while simplify_all(goal):
            settle_context(goal)
        wanted = [n for n in sorted(goal.terms) if n not in goal.new]
        if not wanted:
            return goal.steps
        if not (any(_settle(goal, n, splitting) for splitting in (False, True) for n in wanted)
                or any([_factors(goal, n) for n in sorted(goal.terms)]) or settle_defined(goal) or _parts_known(goal)
                or (goal.expander.thorough and _last(goal))):
            raise Stuck(f"the target may be undefined where the source is not: {goal.show(goal.terms[wanted[0]])}")
    raise Stuck("too many cases")


def _last(goal: Goal) -> bool:
    """What is tried when nothing else is left."""
    bounds = settle_above, find_defined  # either may use up what is tried for an output
    return (_plain(goal) or settle_void(goal)
            or any(settle(goal, TOOLS) for settle in (bounds if goal.expander.attains else reversed(bounds)))
            or reduce_demands(goal, TOOLS) or by_cases(goal, prove_defined))


def _settle(goal: Goal, number: int, splitting: bool) -> bool:
    """Takes one demand away, or splits it."""
    one = goal.terms[number]
    if not splitting and _by_sign(one.atoms[0]):
        goal.step("sign", number)
        del goal.terms[number]
        return True
    [atom] = one.atoms
    found = above_zero(goal, one, atom) if isinstance(atom, Function) and atom.name == "1/" and splitting else None
    if found is not None:
        goal.step("positive", number, *found)
        del goal.terms[number]
        return True
    return any(_cover(goal, number, other, splitting) for other in sorted(goal.new & goal.terms.keys())
               if skeleton(goal.terms[other].atoms[0]) == skeleton(one.atoms[0]))


def _parts_known(goal: Goal) -> bool:
    """Notes what is not 0 since a divisor is not; whether there was any."""
    wanted = (goal.terms[n].atoms[0] for n in sorted(goal.terms) if n not in goal.new)
    before = len(goal.divisors)
    add_divisors(goal, [atom for atom in wanted if isinstance(atom, Function) and atom.name == "1/"])
    for divisor in goal.divisors[before:]:
        goal.append(-1, divisor)
    return len(goal.divisors) > before


def _factors(goal: Goal, number: int) -> bool:
    """Takes a product that is divided by apart, if it is one."""
    term = goal.terms[number]
    [function] = term.atoms
    if not isinstance(function, Function) or function.name != "1/" or len(collected(function.arg)) != 1:
        return False
    product, rest = apart(function.arg)
    alone = product == Term(Fraction(1), atoms=product.atoms) and len(product.atoms) == 1
    inner = bool(rest.variables or rest.guards)
    if product == Term(Fraction(1)) if inner else (alone and divisor_of(product.atoms[0]) is None):
        return False
    goal.step("factors", number)
    del goal.terms[number]
    for atom in product.atoms:
        if not (isinstance(atom, Number) and is_size(atom.value)):
            factor = Term(Fraction(1), atoms=(divisor_of(atom) or atom,))
            goal.append(number, replace(term, atoms=(Function("1/", (factor,)),)))
    if inner:
        goal.append(number, replace(term, atoms=(Function("1/", (rest,)),)))
    return True


def _cover(goal: Goal, i: int, j: int, splitting: bool) -> bool:
    if goal.expander.thorough and goal.expander.work > _COVERS:
        return False  # what is tried at the end needs no comparison
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
        goal.expander.work += goal.expander.thorough
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


def _above_zero(term: Term, roots: bool = False) -> bool:
    """Whether a term is plainly above 0; ``roots`` is whether roots and reciprocals of what is count."""
    return term.factor > 0 and not term.variables and not term.guards and all(
        positive(translated(a.value)) if isinstance(a, Number)
        else isinstance(a, Function) and ((a.name in LAWS and LAWS[a.name].positive) or (
            roots and a.name in ("sqrt", "1/") and not_negative(a.arg) and any(_above_zero(t, True) for t in a.arg)))
        for a in term.atoms)


def _plain(goal: Goal) -> bool:
    """Takes one demand away that is of what is plainly above 0, roots and reciprocals of such among it."""
    for number in sorted(goal.terms.keys() - goal.new):
        [atom] = goal.terms[number].atoms
        if isinstance(atom, Function) and not_negative(atom.arg) and any(_above_zero(t, True) for t in atom.arg):
            goal.step("sign", number)
            del goal.terms[number]
            return True
    return False
