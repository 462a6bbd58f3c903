"""Proof steps on the members of maxima: case distinctions, dominated members, logarithms of maxima."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

from mlc.operators.index import Condition, Poly, Symbol
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_divide import replace_term
from mlc.substitution.goal_known import above
from mlc.substitution.goal_simplify import nested_guards
from mlc.substitution.goal_tools import Tools, others
from mlc.substitution.maxima import largest, made
from mlc.substitution.normal import Function, Largest, Member, Stuck, Term, negations, refreshed_member

__all__ = ["climb", "lose", "take_apart"]


def climb(goal: Goal, tools: Tools) -> bool:
    """Makes the logarithm of a maximum one of logarithms."""
    if not any(isinstance(d.atoms[0], Function) and d.atoms[0].name == "log" for d in goal.divisors):
        return False
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if not (isinstance(atom, Function) and atom.name == "log" and len(atom.arg) == 1) or atom in goal.held:
                continue
            [inner] = atom.arg
            if inner.factor <= 0 or inner.variables or inner.guards or len(inner.atoms) != 1 or not isinstance(
                    inner.atoms[0], Largest):
                continue
            goal.held.add(atom)
            members = [refreshed_member(m, goal.expander.fresh) for m in inner.atoms[0].members]
            bodies = [tuple(dataclasses.replace(t, factor=t.factor * inner.factor) for t in m.body) for m in members]
            proofs = []
            for m, body in zip(members, bodies, strict=True):
                facts = [*goal.facts, *inequalities(term.guards), *inequalities(m.guards)]
                proofs.append(above(goal, [*term.variables, *m.variables], facts, body, tools))
                if proofs[-1] is None:
                    break
            else:
                goal.step("climb", number, place, proofs)
                fresh = goal.expander.fresh
                replace_term(goal, number, others(term, place), largest(
                    [dataclasses.replace(m, body=made("log", b, fresh)) for m, b in zip(members, bodies, strict=True)],
                    fresh))
                return True
    return False


def take_apart(goal: Goal) -> bool:
    """Takes a member of a maximum apart by a guard that may hold or not."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Largest) and ("part", atom, term.guards) not in goal.still:
                for k in range(len(atom.members)):
                    if _parted(goal, number, place, k):
                        return True
                goal.still.add(("part", atom, term.guards))
    return False


def _parted(goal: Goal, number: int, place: int, k: int) -> bool:
    term = goal.terms[number]
    atom = term.atoms[place]
    assert isinstance(atom, Largest)
    member, known = atom.members[k], goal.known(term.guards)
    here = goal.known((*term.guards, *member.guards))
    scope = {*goal.context, *term.variables, *member.variables}
    names = (*term.variables, *member.variables)
    for guard in (g for t in member.body for g in (*t.guards, *(g for a in t.atoms for g in nested_guards(a)))):
        if (guard.poly.symbols.isdisjoint(member.variables) or here.holds(guard) is not None
                or not all(n in scope or n[0] not in "$@" for n in guard.poly.symbols)):
            continue
        cases: list[Any] = []
        found = []
        for case in ((guard,), *negations([guard])):
            part = dataclasses.replace(member, guards=(*member.guards, *case))
            none = goal.known((*term.guards, *part.guards)).contradictory()
            if none is not None:
                cases.append(["none", goal.witness_text(none, names)])
                continue
            for guess in product(_points(goal, term, part), repeat=len(member.variables)):
                at = dict(zip(member.variables, guess, strict=True))
                witnesses = [known.holds(Condition(g.poly.substitute(at), g.relation)) for g in part.guards]
                if all(w is not None for w in witnesses):
                    cases.append(["some", [goal.text(v, term.variables) for v in guess],
                                  [[goal.witness_text(w, term.variables) for w in ws or ()] for ws in witnesses]])
                    found.append(part)
                    break
            else:
                break
        else:
            if len(found) < 2:
                continue
            goal.step("part", number, place, k, *goal.guard_text(guard, names), cases)
            fresh = goal.expander.fresh
            members = [refreshed_member(m, fresh) for m in (*atom.members[:k], *found, *atom.members[k + 1:])]
            replace_term(goal, number, others(term, place), largest(members, fresh))
            return True
    return False


def _points(goal: Goal, term: Term, member: Member) -> list[Poly]:
    """Values that a variable of a member may have: 0, and the ends of its ranges."""
    found = [Poly({})]
    for guard in member.guards:
        for name in member.variables:
            factor = dict(guard.poly.terms).get((Symbol(name),), 0)
            rest = guard.poly - Poly({(Symbol(name),): factor})
            if factor == 1 and rest.symbols.isdisjoint(member.variables):
                found.append(-rest)
    return list(dict.fromkeys([*found, *map(Poly.symbol, (*goal.context, *term.variables))]))[:8]


def lose(goal: Goal, tools: Tools) -> bool:
    """Takes a member away from a maximum that is known not to be above the others."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if not isinstance(atom, Largest) or not 1 < len(atom.members) <= 4 or atom in goal.held:
                continue
            for k, member in enumerate(atom.members):
                fresh = goal.expander.fresh
                rest = largest([refreshed_member(m, fresh) for m in (*atom.members[:k], *atom.members[k + 1:])], fresh)
                facts = [*goal.facts, *inequalities(term.guards), *inequalities(member.guards)]
                try:
                    steps = tools.at_least(Goal(goal.expander, [*goal.context, *term.variables, *member.variables],
                                                facts, rest, member.body, goal.divisors, goal.depth + 1))
                except Stuck:
                    continue
                goal.step("lose", number, place, k, steps)
                replace_term(goal, number, others(term, place), rest)
                return True
            goal.held.add(atom)
    return False
