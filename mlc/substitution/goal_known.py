"""Facts that hold in every goal: divisors that are nonzero, and what is positive because of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS
from mlc.substitution.goal import Goal
from mlc.substitution.goal_divide import guesses
from mlc.substitution.goal_tools import Tools
from mlc.substitution.normal import (
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

__all__ = ["above", "parts_of", "settle_void", "split_divisors"]


def settle_void(goal: Goal) -> bool:
    """Ends a goal in which something is 0 that is known not to be."""
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        if function.name in ("1/", "log") and not collected(function.arg):
            for guess in guesses(goal, Term(Fraction(1)), len(divisor.variables)):
                moved = substituted(dataclasses.replace(divisor, variables=()),
                                    dict(zip(divisor.variables, guess, strict=True)))
                witnesses = [goal.known().holds(guard) for guard in moved.guards]
                if all(each is not None for each in witnesses):
                    goal.step("void", place, [goal.text(each) for each in guess],
                              [[goal.witness_text(w) for w in each or ()] for each in witnesses])
                    goal.terms.clear()
                    return True
    return False


def parts_of(divisor: Term) -> list[Term]:
    """The divisors that the factors of what one is of are."""
    [function] = divisor.atoms
    assert isinstance(function, Function)
    if function.name not in ("1/", "log") or len(collected(function.arg)) != 1:
        return []
    whole, rest = apart(function.arg)
    found: list[Normal] = []
    for atom in whole.atoms:
        if not (isinstance(atom, Number) and is_size(atom.value)):
            found.append((Term(Fraction(1), atoms=(divisor_of(atom) or atom,)),))
        if isinstance(atom, Function) and atom.arg and (
                atom.name in ("1/", "sqrt") or (atom.name in LAWS and LAWS[atom.name].zero)):
            found.append(collected(atom.arg))
    found += [(rest,)] if rest.variables or rest.guards else []
    return [dataclasses.replace(divisor, atoms=(Function("1/", each),)) for each in found]


def split_divisors(goal: Goal) -> bool:
    """One more divisor for each factor of one."""
    for place, divisor in enumerate(goal.divisors):
        more = parts_of(divisor)
        if any(each not in goal.divisors for each in more) and ("parts", divisor) not in goal.still:
            goal.still.add(("parts", divisor))
            goal.step("parts", place)
            goal.divisors = (*goal.divisors, *more)
            return True
    wanted = {a for t in goal.terms.values() for a in t.atoms if isinstance(a, Function) and a.name == "1/"}
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        less = Function("1/", tuple(dataclasses.replace(t, factor=-t.factor) for t in function.arg))
        more = [dataclasses.replace(divisor, atoms=(less,))]
        if function.name in ("1/", "log") and ("less", divisor) not in goal.still and more[0] not in goal.divisors and (
                any(set(less.arg) == set(each.arg) for each in wanted)):
            goal.still.add(("less", divisor))
            goal.step("negate", place)
            goal.divisors = (*goal.divisors, *more)
            return True
    return False


def above(goal: Goal, variables: Sequence[str], facts: Sequence[Poly], argument: Normal, tools: Tools
          ) -> list[Any] | None:
    """What shows that a sum is at least something that the source takes a logarithm of."""
    inner = Goal(goal.expander, [*goal.context, *variables], facts, (), (), goal.divisors, goal.depth + 1)
    known = inner.known()
    stand = Term(Fraction(1), tuple(variables))
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        root = function.arg[0] if isinstance(function, Function) and len(function.arg) == 1 else None
        rooted = root is not None and root == Term(root.factor, atoms=root.atoms) and len(root.atoms) == 1 and (
            isinstance(root.atoms[0], Function) and root.atoms[0].name == "sqrt")
        if not isinstance(function, Function) or not (function.name == "log" or (function.name == "1/" and rooted)):
            continue
        for guess in guesses(goal, stand, len(divisor.variables)):
            moved = substituted(dataclasses.replace(divisor, variables=()),
                                dict(zip(divisor.variables, guess, strict=True)))
            witnesses = [known.holds(guard) for guard in moved.guards]
            if any(each is None for each in witnesses):
                continue
            [function] = moved.atoms
            assert isinstance(function, Function)
            least = function.arg
            if function.name == "1/":
                inside = least[0].atoms[0]
                assert isinstance(inside, Function)
                least = inside.arg
            try:
                steps = tools.at_least(Goal(goal.expander, [*goal.context, *variables], facts, argument, least,
                                            goal.divisors, goal.depth + 1))
            except Stuck:
                continue
            return [place, [goal.text(each, variables) for each in guess],
                    [[goal.witness_text(w, variables) for w in each or ()] for each in witnesses], steps]
    return None
