"""The prover's main loop: terms are simplified, split and cancelled in pairs until none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mlc.operators.index import Condition, Poly
from mlc.operators.scalar import Read
from mlc.substitution.change_of_variables import covers, inverse_of, mappings, skeleton
from mlc.substitution.entailment import Facts, quotients
from mlc.substitution.expand import Expander
from mlc.substitution.goal import ALL_STEPS, Goal, inequalities
from mlc.substitution.goal_attained import attain, by_bounds, each_member, gentle, rises, turned
from mlc.substitution.goal_cases import branched, by_cases, by_guard
from mlc.substitution.goal_divide import multiply_one, named
from mlc.substitution.goal_inside import settle_inside
from mlc.substitution.goal_known import settle_void
from mlc.substitution.goal_largest import bounds, choose_largest, lower_one, rewrite_largest, turn_odd
from mlc.substitution.goal_nonzero import find_nonzero
from mlc.substitution.goal_reduce import loosen, reduce_one
from mlc.substitution.goal_simplify import nested_guards, settle_context, simplify_all
from mlc.substitution.goal_tools import Tools, kept, restored
from mlc.substitution.maxima import not_negative
from mlc.substitution.normal import Atom, Function, Largest, Member, Normal, Number, Stuck, Term, negations, substituted

__all__ = ["TOOLS", "equal_atoms", "plausible", "prove_at_least", "prove_goal"]

#: steps, and functions inside of each other: at first, and in a second attempt (the checker allows more)
_MERGES, _DEPTH, _DEEPER = 80, 6, 9
#: cases of a member of a maximum inside each other
_SPLITS = 3
#: changes of variables that are tried for one output, and in a second attempt
_WORK, _MORE_WORK = 2500, 1000
#: bounds after each other that show a sum to be at least 0, and those that are tried for one output
_BOUNDS, _ALL_BOUNDS = 5, 1_000


def prove_goal(goal: Goal) -> list[list[Any]]:
    """The steps; raises :class:`Stuck`. What is stuck is begun anew with more steps, once."""
    _check_depth(goal)
    if goal.depth or goal.expander.thorough:
        return _search(goal)
    again, last = branched(goal), branched(goal)
    try:
        return _search(goal)
    except Stuck as stuck:
        if any(True for term in again.terms.values() for _ in quotients(term.polys())):
            raise  # windows, of which cases say nothing and cost much
        goal.expander.work, goal.expander.thorough = _WORK - _MORE_WORK, True
        try:
            return _reduced(again)
        except Stuck:
            pass
        finally:
            goal.expander.thorough = False
        if not any(isinstance(a, Largest) for t in last.terms.values() for a in _atoms(t)):
            raise
        goal.expander.work, goal.expander.bounds, goal.expander.steps = _WORK - _MORE_WORK, 0, 0
        goal.expander.thorough = True
        try:
            return _attained(last)
        except Stuck:
            raise stuck from None
        finally:
            goal.expander.thorough = False


def _check_depth(goal: Goal) -> None:
    """Raises :class:`Stuck` for a goal that is too deep inside of others."""
    if goal.depth > (_DEEPER if goal.expander.thorough else _DEPTH):
        raise Stuck("functions are nested too deeply")


def _atoms(term: Term) -> Iterator[Atom]:
    """The atoms of a term, and those within them."""
    for atom in term.atoms:
        yield atom
        bodies = [atom.arg] if isinstance(atom, Function) else (
            [m.body for m in atom.members] if isinstance(atom, Largest) else [])
        yield from (inner for body in bodies for t in body for inner in _atoms(t))


def _search(goal: Goal) -> list[list[Any]]:
    if goal.expander.thorough and goal.expander.work > _WORK:
        raise Stuck("too many pairs of terms to compare")
    settle_context(goal)
    while simplify_all(goal):
        settle_context(goal)
    for _ in range(_MERGES):
        if not goal.terms:
            return goal.steps
        try:
            _merge_one(goal)
        except Stuck:
            if not (settle_inside(goal) or turn_odd(goal) or rewrite_largest(goal) or multiply_one(goal)
                    or choose_largest(goal, prove_at_least)):
                raise
        while simplify_all(goal):
            settle_context(goal)
    raise Stuck(f"too many cases; left over is {goal.show(next(iter(goal.terms.values())))}")


def _reduced(goal: Goal) -> list[list[Any]]:
    """Try again with sums that are first simplified as far as possible, then split into cases."""
    return _by_parts(goal, lambda: find_nonzero(goal, TOOLS), lambda: by_cases(goal, _reduced))


def _attained(goal: Goal) -> list[list[Any]]:
    """Try again by bounds from both sides, and by which member a maximum equals."""
    return _by_parts(goal, lambda: False, lambda: (
        by_guard(goal, _attained) or by_bounds(goal, TOOLS) or attain(goal, _attained, TOOLS, False)))


def _by_parts(goal: Goal, more: Callable[[], bool], last: Callable[[], bool]) -> list[list[Any]]:
    """Makes sums as simple as they get, by ``more`` too; what the search does not show then, ``last`` takes apart."""
    settle_context(goal)
    for _ in range(_MERGES):
        if goal.expander.work > _WORK or goal.expander.bounds > _ALL_BOUNDS:
            break
        while simplify_all(goal):
            settle_context(goal)
        if not goal.terms:
            return goal.steps
        if settle_void(goal) or reduce_one(goal, TOOLS) or turn_odd(goal) or rewrite_largest(goal) or choose_largest(
                goal, prove_at_least) or more():
            continue
        with suppress(Stuck):
            return [*goal.steps, *_search(branched(goal))]
        if not last():
            break
    raise Stuck("neither cases nor bounds are left")


def _equal(goal: Goal) -> list[list[Any]]:
    """The steps that show the terms to be 0; raises :class:`Stuck`."""
    _check_depth(goal)
    settle_context(goal)
    for _ in range(_MERGES):
        while simplify_all(goal):
            settle_context(goal)
        if not goal.terms:
            return goal.steps
        if not reduce_one(goal, TOOLS):
            return [*goal.steps, *_search(branched(goal))]
    raise Stuck("too many steps")


def prove_at_least(goal: Goal) -> list[list[Any]]:
    """The steps that show the terms to be at least 0; raises :class:`Stuck`."""
    _check_depth(goal)
    if goal.expander.bounds > _ALL_BOUNDS:
        raise Stuck("too many bounds")
    settle_context(goal)
    _at_least(goal, _BOUNDS)
    return goal.steps


def _at_least(goal: Goal, depth: int) -> None:
    """Takes the terms down to what is plainly at least 0, by one bound after another, at most ``depth`` of them."""
    for _ in range(_MERGES):
        while simplify_all(goal) or (goal.expander.attains and loosen(goal)):
            settle_context(goal)
        if not_negative(goal.terms.values()):
            return
        try:
            _merge_one(goal)
        except Stuck:
            break
    else:
        raise Stuck("too many cases")
    if goal.expander.attains and (by_guard(goal, prove_at_least) or each_member(goal, prove_at_least)
                                  or _by_member(goal, True)):
        return
    tries = (lower_one, *bounds(goal, prove_at_least)) if goal.expander.thorough else (lower_one,)
    for bound in (*rises(goal, TOOLS), *gentle(goal), *tries, *turned(goal)) if goal.expander.attains else tries:
        state = kept(goal)
        goal.expander.bounds += 1
        if depth < 1 or goal.expander.bounds > _ALL_BOUNDS:
            break
        if bound(goal):
            with suppress(Stuck):
                _at_least(goal, depth - 1 if goal.expander.thorough else depth)
                return
        restored(goal, state)
    if goal.expander.attains and _by_member(goal, False):
        return
    raise Stuck("it may be below 0")


def _by_member(goal: Goal, nested: bool) -> bool:
    """Ends the goal by which member a maximum is; leaves it as it was where that shows nothing."""
    state = kept(goal)
    with suppress(Stuck):
        return attain(goal, prove_at_least, TOOLS, nested)
    restored(goal, state)
    return False


def _merge_one(goal: Goal) -> None:
    """Adds two terms that sum the same, or splits one so that a part of it can be added next."""
    reason = ""
    for i in sorted(goal.terms):
        shape = sorted(map(skeleton, goal.terms[i].atoms))
        for j in sorted(goal.terms):
            if j <= i or sorted(map(skeleton, goal.terms[j].atoms)) != shape or (
                    goal.expander.attains and not _alike(goal.terms[i], goal.terms[j])):
                continue
            if _merge(goal, i, j):
                return
        reason = reason or goal.show(goal.terms[i])
    raise Stuck(f"no other term cancels {reason}")


def _alike(one: Term, other: Term) -> bool:
    """Whether the terms differ in names alone, or have no maxima: others are compared by their members."""
    names = [sorted(map(named, t.atoms)) for t in (one, other)]
    return names[0] == names[1] or not any(isinstance(a, Largest) for t in (one, other) for a in _atoms(t))


def merge_equal(goal: Goal, i: int, j: int) -> bool:
    """Adds two terms that sum the same, without cases."""
    atoms = [sorted(map(skeleton, goal.terms[k].atoms)) for k in (i, j)]
    return atoms[0] == atoms[1] and _merge(goal, i, j, False)


def _merge(goal: Goal, i: int, j: int, splitting: bool = True) -> bool:
    one = goal.terms[i]
    fresh = {v: Poly.symbol(f"{v}$") for v in goal.terms[j].variables}
    other = replace(substituted(goal.terms[j], fresh), variables=tuple(f"{v}$" for v in goal.terms[j].variables))
    for mapping, pairing in mappings(one, other):
        inverse = inverse_of(mapping, one.variables)
        if inverse is None:
            continue
        goal.expander.work += 1
        if goal.expander.work > _WORK:
            raise Stuck("too many pairs of terms to compare")
        moved = substituted(other, mapping)
        here = goal.known(one.guards)
        missing = [g for g in moved.guards if here.holds(g) is None]
        both = goal.known((*one.guards, *missing))
        if both.contradictory() is not None or not plausible(one, moved, pairing, both):
            continue
        if missing and not splitting:
            continue
        if missing:
            goal.split(i, missing[0])
            return True
        there = goal.known(moved.guards)
        missing = [g for g in one.guards if there.holds(g) is None]
        if missing and not splitting:
            continue
        if missing:
            back = {f"{v}$": Poly.symbol(v) for v in goal.terms[j].variables}
            poly = missing[0].poly.substitute(inverse).substitute(back)
            goal.split(j, Condition(poly, missing[0].relation))
            return True
        proofs = _equal_atoms(goal, one, moved, pairing)
        if proofs is None:
            continue
        names = {f"{v}$": Poly.symbol(v) for v in goal.terms[j].variables}
        goal.step(
            "merge", i, j,
            [goal.text(mapping[f"{v}$"], one.variables) for v in goal.terms[j].variables],
            [goal.text(inverse[v].substitute(names), goal.terms[j].variables) for v in one.variables],
            [[goal.witness_text(w, one.variables) for w in here.holds(g) or ()] for g in moved.guards],
            [[goal.witness_text(w, one.variables) for w in there.holds(g) or ()] for g in one.guards],
            list(pairing), proofs,
        )
        factor = one.factor + goal.terms.pop(j).factor
        if factor:
            goal.terms[i] = replace(one, factor=factor)
        else:
            del goal.terms[i]
        return True
    return False


def plausible(one: Term, moved: Term, pairing: tuple[int, ...], facts: Facts) -> bool:
    """Whether reads that meet read the same element; functions are proved when it matters."""
    for place, partner in enumerate(pairing):
        a, b = one.atoms[partner], moved.atoms[place]
        if isinstance(a, (Read, Number)) and _equal_polys(a, b, facts) is None:
            return False
    return True


def _equal_atoms(goal: Goal, one: Term, moved: Term, pairing: tuple[int, ...]) -> list[Any] | None:
    facts = goal.known(one.guards)
    proofs: list[Any] = []
    for place, partner in enumerate(pairing):
        proof = equal_atoms(goal, one.atoms[partner], moved.atoms[place], one, facts)
        if proof is None:
            return None
        proofs.append(proof)
    return proofs


def equal_atoms(goal: Goal, a: Atom, b: Atom, one: Term, facts: Facts) -> Any:
    """What shows that two atoms are equal wherever the guards of ``one`` hold."""
    if isinstance(a, (Read, Number)):
        found = _equal_polys(a, b, facts)
        return None if found is None else [[goal.witness_text(w, one.variables) for w in ws] for ws in found]
    context, base = [*goal.context, *one.variables], [*goal.facts, *inequalities(one.guards)]
    if isinstance(a, Function):
        assert isinstance(b, Function)
        try:
            return _zero(goal, context, base, a.arg, b.arg)
        except Stuck:
            return None
    assert isinstance(a, Largest) and isinstance(b, Largest)
    ways = []
    for ours, theirs in ((a, b), (b, a)):
        ways.append([_covered(goal, m, theirs, context, base) for m in ours.members])
        if None in ways[-1]:
            return None
    return ways


def _covered(goal: Goal, member: Member, other: Largest, context: list[str], base: list[Poly], splits: int = _SPLITS
             ) -> list[Any] | None:
    """What shows that every value of the member is one of the other maximum's."""
    given = [*base, *inequalities(member.guards)]
    here, inner = Facts(given), [*context, *member.variables]
    nested = Goal(goal.expander, inner, given, (), (), goal.divisors)
    there = tuple(t for t in member.body if Facts([*given, *inequalities(t.guards)]).contradictory() is None)
    one = Term(Fraction(1), member.variables, member.guards, (Function("", there),))
    for k, theirs in enumerate(other.members):
        fresh = {v: Poly.symbol(f"{v}$") for v in theirs.variables}
        whole = Term(Fraction(1), (), theirs.guards, (Function("", theirs.body),))
        apart = replace(substituted(whole, fresh), variables=tuple(f"{v}$" for v in theirs.variables))
        for mapping in covers(one, apart):
            moved = substituted(apart, mapping)
            witnesses = [here.holds(g) for g in moved.guards]
            if any(w is None for w in witnesses):
                continue
            [body] = moved.atoms
            assert isinstance(body, Function)
            with suppress(Stuck):
                steps = _zero(goal, inner, given, member.body, body.arg)
                return [k, [nested.text(mapping[f"{v}$"]) for v in theirs.variables],
                        [[nested.witness_text(w) for w in ws or ()] for ws in witnesses], steps]
    bound = set(inner)
    guard = next((g for t in there for g in (*t.guards, *(g for a in t.atoms for g in nested_guards(a)))
                  if splits and here.holds(g) is None
                  and all(n in bound or n[0] not in "$@" for n in g.poly.symbols)), None)
    if guard is None:
        return None
    cases: list[list[Any]] = []
    for case in ((guard,), *negations([guard])):
        part = replace(member, guards=(*member.guards, *case))
        none = Facts([*given, *inequalities(case)]).contradictory()
        found = ["none", nested.witness_text(none)] if none is not None else _covered(
            goal, part, other, context, base, splits - 1)
        if found is None:
            return None
        cases.append(found)
    return ["split", *nested.guard_text(guard, ()), cases]


def _zero(goal: Goal, context: Sequence[str], facts: Sequence[Poly], terms: Normal, others: Normal) -> list[list[Any]]:
    """The steps that show two sums to be equal; raises :class:`Stuck`, at once where the same was stuck before: each
    change of variables that is tried asks for the sums within atoms again, and for those within them."""
    expander, before = goal.expander, goal.expander.attains
    inner = Goal(expander, context, facts, terms, others, goal.divisors, goal.depth + 1)
    known = expander.thorough, inner.depth, inner.said()
    if known in expander.stuck:
        raise Stuck("it was stuck before")
    expander.attains = False
    try:
        return prove_goal(inner)
    except Stuck:
        if not _spent(expander):
            expander.stuck.add(known)
        raise
    finally:
        expander.attains = before


def _spent(expander: Expander) -> bool:
    """Whether what is stuck may be so since no more is tried for an output."""
    return expander.work > _WORK or expander.bounds > _ALL_BOUNDS or expander.steps > ALL_STEPS


def _equal_polys(a: Atom, b: Atom, facts: Facts) -> list[Any] | None:
    """For every index that both have, the witnesses that it is equal; None if one is not."""
    if isinstance(a, Read) and isinstance(b, Read) and a.tensor == b.tensor and len(a.indices) == len(b.indices):
        pairs = list(zip(a.indices, b.indices, strict=True))
    elif isinstance(a, Number) and isinstance(b, Number) and a.inverse == b.inverse:
        pairs = [(a.value, b.value)]
    else:
        return None
    found = []
    for x, y in pairs:
        witnesses = facts.holds(Condition(x - y, "=="))
        if witnesses is None:
            return None
        found.append(witnesses)
    return found


TOOLS = Tools(merge_equal, prove_at_least, choose_largest, _equal)
