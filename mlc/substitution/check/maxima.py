"""Maxima in normal form, and the functions that go into them.

A maximum is a set of members: of several values, of the values over a range, or of both. ``relu(x)`` is the maximum
of ``x`` and 0. All laws here are of real numbers and hold for every value; those of single functions are the sets
below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

from mlc.substitution.check.integers import need, positive, spend
from mlc.substitution.check.terms import Member, Term, collected, divisor_of, names_of, negated, renamed, spend_on

__all__ = ["AT_MOST_ONE", "BELOW", "CONTRACTING", "EXCEEDING", "GENTLE", "GROWING", "IDEMPOTENT", "NONNEGATIVE",
           "ODD", "POSITIVE", "VALUES", "VANISHING", "ZERO", "above_zero", "at_least_zero", "called", "largest",
           "never_zero", "vanishes"]

_MOST_MEMBERS = 48
_ONE = Term(Fraction(1), (), (), ())

# What is taken for granted of functions, besides where they are defined; tests compare it with the operators' laws.
#: never smaller for a larger argument; the root is taken as 0 below 0
GROWING = frozenset({"sigmoid", "tanh", "exp", "erf", "sqrt"})
#: f(f(x)) = f(x), besides relu
IDEMPOTENT: frozenset[str] = frozenset()
#: above 0
POSITIVE = frozenset({"exp", "sigmoid"})
#: at least 0; where a root is not defined, it is taken as 0
NONNEGATIVE = POSITIVE | {"sqrt"}
#: f(0) = 0
ZERO = frozenset({"tanh", "erf"})
#: f(0) = 0; so it is of the reciprocal, as it is continued
VANISHING = ZERO | {"sqrt", "1/"}
#: f(-x) = -f(x)
ODD = frozenset({"tanh", "erf"})
#: f(x) <= max(x, 0); so it is of the logarithm, as it is continued by 0
CONTRACTING = frozenset({"tanh", "log"})
#: f(x) >= x
EXCEEDING = frozenset({"exp"})
#: f(x) - f(y) <= max(x - y, 0)
GENTLE = frozenset({"tanh", "sigmoid"})
#: at most 1
AT_MOST_ONE = frozenset({"erf", "tanh", "sigmoid"})
#: values
VALUES: dict[tuple[str, Fraction | int], Fraction] = {("sqrt", 1): Fraction(1), ("sqrt", 0): Fraction(0),
                                                      ("exp", 0): Fraction(1), ("log", 1): Fraction(0),
                                                      ("sigmoid", 0): Fraction(1, 2)}
#: f(x) <= g(x), both continued by 0
BELOW = frozenset({("erf", "exp"), ("tanh", "exp"), ("log", "exp"), ("log", "sqrt"), ("tanh", "sqrt"), ("erf", "sqrt")})


def called(function: str, argument: Sequence[Term]) -> list[Term]:
    """The function of a sum: ``relu`` as a maximum, a growing function of a maximum as that of its values."""
    argument = collected(argument)
    if function == "relu":
        return largest([Member((), (), argument), Member((), (), ())])
    if function in ZERO and not argument:
        return []
    if function in IDEMPOTENT and [("call", function)] == [a[:2] for t in argument for a in t.atoms] and (
            argument[0]._replace(atoms=()) == _ONE):
        return list(argument)
    if function in GROWING and len(argument) == 1 and _plain(argument[0]):
        [term] = argument
        return largest([m._replace(body=tuple(called(function, _times(term.factor, m.body))))
                        for m in term.atoms[0][1]])
    return [_ONE._replace(atoms=(("call", function, argument),))]


def largest(members: Iterable[Member]) -> list[Term]:
    """The maximum as a sum: a maximum of what is left, and what is added to all of its members.

    Maxima in members are spread out, members that are never above the others dropped, and a positive factor is taken
    out, so that the largest of the factors inside is 1.
    """
    found = [_bare(m._replace(body=collected(m.body))) for member in members for m in _spread(member)]
    need(len(found) <= _MOST_MEMBERS, f"a maximum must have at most {_MOST_MEMBERS} members")
    left: list[Member] = []
    for place, member in enumerate(found):
        if not _dominated(member, [*left, *found[place + 1:]]):
            left.append(member)
    for _ in left[0].body:
        spend(sum(len(m.body) for m in left))
    same = [t for t in left[0].body if all(t in m.body and not _uses(m, t) for m in left)]
    left = [m._replace(body=tuple(t for t in m.body if t not in same)) for m in left]
    if len(left) == 1 and not left[0].names:
        return [*left[0].body, *same]
    scale = max((abs(t.factor) for m in left for t in m.body), default=Fraction(1))
    if len(left) == 1 and not left[0].body:
        return same
    return [Term(scale, (), (), (("max", tuple(m._replace(body=_times(1 / scale, m.body)) for m in left)),)), *same]


def _plain(term: Term) -> bool:
    """Whether it is a maximum with a positive factor and nothing else."""
    return term.factor > 0 and not term.names and not term.guards and len(term.atoms) == 1 and term.atoms[0][0] == "max"


def _times(factor: Fraction, terms: Iterable[Term]) -> tuple[Term, ...]:
    return tuple(t._replace(factor=factor * t.factor) for t in terms)


def _spread(member: Member) -> list[Member]:
    """``x + c * max(a, b)`` with a positive ``c`` as ``x + c * a`` and ``x + c * b``; every range is of some values, so
    that the largest over all of them is the largest of the largest."""
    place = next((k for k, term in enumerate(member.body) if _plain(term)), None)
    if place is None:
        return [member]
    term = member.body[place]
    rest = (*member.body[:place], *member.body[place + 1:])
    found = []
    for inner in map(renamed, term.atoms[0][1]):
        body = (*rest, *_times(term.factor, inner.body))
        found += _spread(Member((*member.names, *inner.names), (*member.guards, *inner.guards), body))
        need(len(found) <= _MOST_MEMBERS, f"a maximum must have at most {_MOST_MEMBERS} members")
    return found


def _uses(member: Member, term: Term) -> bool:
    """Whether the term depends on the variables of the member."""
    return not set(member.names).isdisjoint(
        {s for g in term.guards for s in g.expr.names}.union(*map(names_of, term.atoms)))


def _bare(member: Member) -> Member:
    """Without its range where the value is the same for all of it: some value there is."""
    return member if any(_uses(member, t) for t in member.body) else Member((), (), member.body)


def _dominated(member: Member, others: Sequence[Member]) -> bool:
    """Whether no value of the member is above all of the others."""
    spend(1 + len(others))
    if any(at_least_zero(m.body) for m in others) and at_least_zero(negated(member.body)):
        return True
    if member.names:
        return False
    bodies = [_factors(m.body) for m in others if not m.names]
    mine = _factors(member.body)
    return (mine in bodies or any(_between(mine, a, b) for a, b in combinations(bodies, 2))
            or _contracted(member.body, others, bodies) or _above(member.body, others))


def _factors(body: Sequence[Term]) -> dict[Any, Fraction]:
    spend_on(body)
    return {term[1:]: term.factor for term in body}


def _between(mine: dict[Any, Fraction], a: dict[Any, Fraction], b: dict[Any, Fraction]) -> bool:
    """Whether it is ``t*a + (1-t)*b`` for a t between 0 and 1: then it is at most the larger of them."""
    spend(len(mine) + len(a) + len(b))
    keys = dict.fromkeys((*mine, *a, *b))
    rows = [(mine.get(k, Fraction(0)), a.get(k, Fraction(0)), b.get(k, Fraction(0))) for k in keys]
    part = next(((m - y) / (x - y) for m, x, y in rows if x != y), Fraction(0))
    return 0 <= part <= 1 and all(m == part * x + (1 - part) * y for m, x, y in rows)


def _contracted(body: Sequence[Term], others: Sequence[Member], bodies: Sequence[Any]) -> bool:
    """f(x) among x and something that is at least 0, where f(x) is at most the larger of x and 0."""
    if len(body) != 1 or body[0]._replace(atoms=()) != _ONE or len(body[0].atoms) != 1:
        return False
    [atom] = body[0].atoms
    return atom[0] == "call" and atom[1] in CONTRACTING and _factors(collected(atom[2])) in bodies and any(
        at_least_zero(m.body) for m in others)


def _above(body: Sequence[Term], others: Sequence[Member]) -> bool:
    """``x - c * max(a, b)`` is at most ``x - c * a``; if that is never above the others, it is not either."""
    for place, term in enumerate(body):
        if _plain(term._replace(factor=-term.factor)):
            rest = (*body[:place], *body[place + 1:])
            if any(_dominated(Member((), (), collected((*rest, *_times(term.factor, m.body)))), others)
                   for m in term.atoms[0][1] if not m.names):
                return True
    return False


def never_zero(term: Term) -> bool:
    """Whether every value of the term is above 0: a product of sizes, of functions that are, and of roots and
    reciprocals of what is."""
    return term.factor > 0 and all(
        positive(a[1]) if a[0] == "number" else a[0] == "call" and (
            a[1] in POSITIVE or (a[1] in ("sqrt", "1/") and above_zero(a[2]))) for a in term.atoms)


def above_zero(terms: Sequence[Term]) -> bool:
    """Whether a sum is plainly above 0: none of its terms is below, and one that is always summed is above."""
    spend(1 + len(terms))
    return at_least_zero(terms) and any(not t.names and not t.guards and never_zero(t) for t in terms)


def vanishes(terms: Iterable[Term], atom: Any) -> bool:
    """Whether the sum is plainly 0 where the atom is: every product has a factor that is."""
    return all(any(_vanishes(factor, atom) for factor in term.atoms) for term in terms)


def _vanishes(one: Any, atom: Any) -> bool:
    spend(1)
    if one == atom:
        return True
    if one[0] == "call":
        return one[1] in VANISHING and vanishes(one[2], atom)
    if one[0] != "max":
        return False
    zero = [vanishes(m.body, atom) for m in one[1]]  # and then no other member is above 0
    return any(zero) and all(z or at_least_zero(negated(m.body)) for z, m in zip(zero, one[1], strict=True))


def at_least_zero(terms: Iterable[Term]) -> bool:
    """Whether every term is plainly at least 0: a positive factor with squares and what is at least 0 by a law."""
    return all(map(_at_least_zero, terms))


def _at_least_zero(term: Term) -> bool:
    spend(1 + len(term.atoms))
    if _plain(term._replace(factor=-term.factor)):
        return all(at_least_zero(negated(m.body)) for m in term.atoms[0][1])
    left: list[Any] = []
    for atom in (divisor_of(a) or a for a in term.atoms):  # a reciprocal has the sign of what it is of, 0 for 0
        if not _nonnegative(atom):
            left.remove(atom) if atom in left else left.append(atom)
    return term.factor > 0 and not left


def _nonnegative(atom: Any) -> bool:
    if atom[0] == "number":
        return positive(atom[1])
    if atom[0] == "max":
        return any(at_least_zero(m.body) for m in atom[1])
    if atom[:2] == ("call", "1/"):
        return at_least_zero(atom[2])
    return atom[0] == "call" and atom[1] in NONNEGATIVE
