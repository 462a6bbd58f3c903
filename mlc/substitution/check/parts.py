"""Parts of terms that a step of a certificate names, and what it must show of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mlc.substitution.check.integers import Expr, Guard, name, need
from mlc.substitution.check.terms import Member, Term, collected, filled, free_names, substituted
from mlc.substitution.check.witness import Reader, check_guard

__all__ = ["apart", "implied", "make_guard", "maximum_at", "member_of", "one_to_one", "part_at"]

#: numbers of a path, three for each level of functions
_LONGEST = 36


def member_of(body: Sequence[Term]) -> Term:
    """A sum as the only atom of a term."""
    return Term(Fraction(1), (), (), (("call", "", tuple(body)),))


def part_at(terms: Sequence[Term], path: Sequence[Any]) -> Any:
    """The atom at a place of a sum, or in a sum that it is of; by numbers of terms, atoms and members in turn. None of
    the sums has variables of its own, so that the part stands for one number."""
    need(len(path) <= _LONGEST and all(type(k) is int and k >= 0 for k in path), "a path must be of few numbers")
    term, place, *rest = path
    need(not terms[term].names, "a part must not depend on what is summed over")
    atom = terms[term].atoms[place]
    if not rest:
        return atom
    if atom[0] == "call":
        return part_at(atom[2], rest)
    need(atom[0] == "max" and not atom[1][rest[0]].names, "a part must not depend on what is gone over")
    return part_at(atom[1][rest[0]].body, rest[1:])


def maximum_at(terms: Any, path: Sequence[Any]) -> tuple[tuple[Member, ...], list[Guard]]:
    """The members of the maximum at a place, which is named like that of :func:`part_at`, and the guards of the terms
    that it stands in. Of those that a maximum goes over on the way there are some values."""
    need(len(path) <= _LONGEST and all(type(k) is int and k >= 0 for k in path), "a path must be of few numbers")
    term, place, *rest = path
    atom = terms[term].atoms[place]
    need(not terms[term].names, "what is compared must not stand in a sum")
    if atom[0] == "call":
        members, guards = maximum_at(atom[2], rest)
    else:
        need(atom[0] == "max", "only members of a maximum are compared")
        members, guards = maximum_at(atom[1][rest[0]].body, rest[1:]) if rest else (atom[1], [])
    return members, [*terms[term].guards, *guards]


def apart(argument: Sequence[Term]) -> tuple[Term, Term]:
    """The one product that is summed as what does not depend on the variables that it is summed over, and the rest,
    among it maxima that may be of nothing where the guards of the product do not hold."""
    argument = collected(argument)
    need(len(argument) == 1, "only the reciprocal of one product is taken apart")
    [product] = argument
    outer = [a for a in product.atoms if free_names(a).isdisjoint(product.names) and filled(a)]
    rest = product._replace(factor=Fraction(1), atoms=tuple(a for a in product.atoms if a not in outer))
    return Term(product.factor, (), (), tuple(outer)), rest


def one_to_one(names: Sequence[str], other: Term, others: Sequence[str], into: Mapping[str, Expr],
               outof: Mapping[str, Expr]) -> Term:
    """``other`` in the variables ``names``, for a bijection between all integers of the one and of the other."""
    need(len(names) == len(others), "terms must have as many variables")
    need(all(p.substituted(outof) == name(n) for n, p in into.items())
         and all(p.substituted(into) == name(n) for n, p in outof.items()), "variables must map one to one")
    return substituted(other, into)


def implied(guards: Sequence[Guard], witnesses: Sequence[Any], facts: Sequence[Expr], read: Reader) -> None:
    """Every guard follows from the facts."""
    need(len(guards) == len(witnesses), "every guard must be implied")
    for guard, found in zip(guards, witnesses, strict=True):
        check_guard(guard, found, facts, read)


def make_guard(expr: Expr, relation: str) -> Guard:
    need(relation in ("==", ">="), f"unknown relation {str(relation)[:20]!r}")
    return Guard(expr, relation)
