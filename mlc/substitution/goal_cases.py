"""Proof steps: case distinctions for a goal that is stuck, on a guard or on which member of a maximum is the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeAlias

from mlc.operators.index import Condition
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_simplify import nested_guards
from mlc.substitution.maxima import largest
from mlc.substitution.normal import (
    Function,
    Largest,
    Member,
    Normal,
    Stuck,
    Term,
    collected,
    free_names,
    negations,
    refreshed,
    refreshed_member,
)

__all__ = ["branched", "by_cases", "by_guard"]

#: cases inside each other, and maxima that are tried at one stand
_CASES, _TRIES = 4, 2
#: takes a goal to its end
Proves: TypeAlias = "Callable[[Goal], list[list[Any]]]"


def by_cases(goal: Goal, prove: Proves) -> bool:
    """Ends the goal by cases, each of which is proved; False where none are found."""
    if goal.cases >= _CASES:
        return False
    if next(_guards(goal), None) is not None:
        return by_guard(goal, prove)
    for path, guards, atom, k in [*_choices(goal)][:_TRIES]:
        known = goal.known()
        witnesses = [known.holds(g) for g in guards]
        goal.ordered.add((atom, k))
        if any(each is None for each in witnesses):
            continue
        one, other = [atom.members[k]], [*atom.members[:k], *atom.members[k + 1:]]
        found = _proved(goal, prove, [((), _above(goal, *sides)) for sides in ((one, other), (other, one))])
        if found is not None:
            goal.step("order", path, [[goal.witness_text(w) for w in ws or ()] for ws in witnesses], [k], found)
            goal.terms.clear()
            return True
    return False


def by_guard(goal: Goal, prove: Proves) -> bool:
    """A case distinction on a guard of the context alone."""
    guard = next(_guards(goal), None) if goal.cases < _CASES else None
    found = None if guard is None else _proved(goal, prove, [(case, ()) for case in ((guard,), *negations([guard]))])
    if guard is None or found is None:
        return False
    goal.step("case", *goal.guard_text(guard, ()), found)
    goal.terms.clear()
    return True


def branched(goal: Goal) -> Goal:
    """The same goal, before any step."""
    branch = copy(goal)
    branch.context, branch.facts, branch.terms = list(goal.context), list(goal.facts), dict(goal.terms)
    branch.new, branch.ordered = set(goal.new), set(goal.ordered)
    branch.steps, branch.tried, branch.settled = [], set(), set()
    branch.reduced, branch.still, branch.held = set(), set(), set()
    branch.fresh_facts()
    return branch


def _proved(goal: Goal, prove: Proves, cases: Sequence[tuple[tuple[Condition, ...], Normal]]) -> list[Any] | None:
    proofs = []
    for guards, known in cases:
        branch = branched(goal)
        branch.facts, branch.divisors = [*goal.facts, *inequalities(guards)], (*goal.divisors, *known)
        branch.cases += 1
        try:
            steps = prove(branch)
        except Stuck:
            return None
        proofs.append(steps)
    return proofs


def _above(goal: Goal, one: Sequence[Member], other: Sequence[Member]) -> Normal:
    """What is at least 0 where the largest of ``one`` is not below that of ``other``."""
    fresh = goal.expander.fresh
    whole = largest([refreshed_member(m, fresh) for m in one], fresh)
    found = []
    for member in (refreshed_member(m, fresh) for m in other):
        body = collected((*(refreshed(t, fresh) for t in whole), *(replace(t, factor=-t.factor) for t in member.body)))
        found.append(Term(Fraction(1), member.variables, member.guards, (Function("", body),)))
    return tuple(found)


def _guards(goal: Goal) -> Iterator[Condition]:
    """Guards on the context within atoms that may hold or not."""
    scope, known = set(goal.context), goal.known()
    for term in (*(goal.terms[n] for n in sorted(goal.terms)), *goal.divisors):
        for guard in (*term.guards, *(g for atom in term.atoms for g in nested_guards(atom))):
            symbols = guard.poly.symbols
            if scope.isdisjoint(symbols) or not all(n in scope or n[0] not in "$@" for n in symbols):
                continue
            if known.holds(guard) is None and all(
                    goal.known(case).contradictory() is None for case in ((guard,), *negations([guard]))):
                yield guard


def _choices(goal: Goal) -> Iterator[tuple[list[int], list[Condition], Largest, int]]:
    """Maxima of the context with the place of each, the guards of the terms around it, and the number of a member."""
    scope, seen = set(goal.context), set[Any]()
    for path, guards, atom in sorted(_maxima(sorted(goal.terms.items())), key=lambda each: len(str(each[2]))):
        if atom in seen or len(atom.members) < 2 or not all(n in scope or n[0] not in "$@" for n in free_names(atom)):
            continue
        seen.add(atom)
        for k in range(1 if len(atom.members) == 2 else len(atom.members)):
            if (atom, k) not in goal.ordered:
                yield path, guards, atom, k


def _maxima(terms: Sequence[tuple[int, Term]]) -> Iterator[tuple[list[int], list[Condition], Largest]]:
    for number, term in terms:
        if term.variables:
            continue
        for place, atom in enumerate(term.atoms):
            inner: list[tuple[list[int], Normal]] = []
            if isinstance(atom, Function):
                inner = [([], atom.arg)]
            elif isinstance(atom, Largest):
                yield [number, place], [*term.guards], atom
                inner = [([k], m.body) for k, m in enumerate(atom.members)]
            for begin, body in inner:
                for path, guards, found in _maxima(list(enumerate(body))):
                    yield [number, place, *begin, *path], [*term.guards, *guards], found
