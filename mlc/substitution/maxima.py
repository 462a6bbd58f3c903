"""The normal form of maxima, and reasoning about signs.

``max`` of two, ``relu`` and the largest over a range are one atom, a set of members. In order: maxima inside members
are spread out (a positive multiple of one, added to others), a member that is the same over its range loses it, what
others are never below is dropped, what all have is added outside, and the factors inside are scaled to at most 1. The
checker has the same form, from facts of its own (:mod:`mlc.substitution.check.maxima`, with the reasons); both number
members alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS, Laws
from mlc.substitution.check.integers import positive, translated
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Member,
    Normal,
    Number,
    Stuck,
    Term,
    collected,
    divisor_of,
    mapped_member,
)

__all__ = ["largest", "made", "not_negative"]

_MEMBERS = 48
_LAWLESS = Laws("")
#: hands out names of variables
Fresh = Callable[[], str]


def made(name: str, arg: Normal, fresh: Fresh) -> Normal:
    """A function of a sum, by its laws."""
    if name == "relu":
        return largest([Member((), (), arg), Member((), (), ())], fresh)
    laws, arg = LAWS.get(name, _LAWLESS), collected(arg)
    if not arg and laws.zero:
        return ()
    inner = _only(arg)
    if laws.idempotent and isinstance(inner, Function) and inner.name == name and arg[0].factor == 1:
        return arg
    if laws.grows_continued and isinstance(inner, Largest) and arg[0].factor > 0:
        return largest([replace(m, body=made(name, _scaled(m.body, arg[0].factor), fresh)) for m in inner.members],
                       fresh)
    return (Term(Fraction(1), atoms=(Function(name, arg),)),)


def largest(members: Iterable[Member], fresh: Fresh) -> Normal:
    """The maximum of the members as a sum; raises :class:`Stuck` where there are too many."""
    found = []
    for member in members:
        for apart in _apart(member, fresh):
            found.append(_Candidate.of(apart))
            if len(found) > _MEMBERS:
                raise Stuck(f"a maximum has more than {_MEMBERS} members")
    place = 0
    while place < len(found):
        if found[place].below(found[:place] + found[place + 1:]):
            del found[place]
        else:
            place += 1
    shared = [t for t in found[0].member.body if all(c.shares(t) for c in found)]
    kept = [replace(c.member, body=tuple(t for t in c.member.body if t not in shared)) for c in found]
    if len(kept) == 1 and not (kept[0].variables and kept[0].body):
        return (*kept[0].body, *shared)
    unit = max(abs(t.factor) for m in kept for t in m.body)
    atom = Largest(tuple(replace(m, body=_scaled(m.body, 1 / unit)) for m in kept))
    return (Term(unit, atoms=(atom,)), *shared)


def not_negative(terms: Iterable[Term]) -> bool:
    """Whether a sum is at least 0 by the signs of its terms."""
    return all(_at_least_zero(t, 1) for t in terms)


def _scaled(terms: Iterable[Term], factor: Fraction) -> Normal:
    return tuple(replace(t, factor=t.factor * factor) for t in terms)


def _only(terms: Normal) -> Atom | None:
    """The atom that the sum is a multiple of, if it is that of one."""
    if len(terms) == 1 and not terms[0].variables and not terms[0].guards and len(terms[0].atoms) == 1:
        return terms[0].atoms[0]
    return None


def _inner(term: Term) -> tuple[Member, ...]:
    """The members of the maximum that the term is a multiple of; none if it is another term."""
    atom = _only((term,))
    return atom.members if isinstance(atom, Largest) else ()


def _apart(member: Member, fresh: Fresh) -> Iterator[Member]:
    """The member with each maximum in its sum (a positive multiple) replaced by its members."""
    for place, term in enumerate(member.body):
        inside = _inner(term)
        if not inside or term.factor < 0:
            continue
        others = member.body[:place] + member.body[place + 1:]
        for each in inside:
            names = {v: fresh() for v in each.variables}
            values = {v: Poly.symbol(n) for v, n in names.items()}
            moved = mapped_member(each, lambda p, values=values: p.substitute(values))  # type: ignore[misc]
            yield from _apart(Member((*member.variables, *names.values()), (*member.guards, *moved.guards),
                                     (*others, *_scaled(moved.body, term.factor))), fresh)
        return
    yield member


def _added(terms: Iterable[Term]) -> dict[Any, Fraction]:
    """The factors of a sum by what they multiply, in the order in which that comes first."""
    total: dict[Any, Fraction] = defaultdict(Fraction)
    for term in terms:
        total[term.variables, term.guards, term.atoms] += term.factor
    return {key: factor for key, factor in total.items() if factor}


def _at_least_zero(term: Term, sign: int) -> bool:
    """Whether the term, or its opposite for a ``sign`` of -1, is at least 0 by its factors."""
    sign = sign if term.factor > 0 else -sign
    inside = _inner(term)
    if inside:
        bodies = [all(_at_least_zero(t, sign) for t in m.body) for m in inside]
        return any(bodies) if sign > 0 else all(bodies)
    odd: list[Atom] = []
    for atom in (divisor_of(a) or a for a in term.atoms):
        if _not_negative(atom):
            continue
        if atom in odd:
            odd.remove(atom)
        else:
            odd.append(atom)
    return sign > 0 and not odd


def _not_negative(atom: Atom) -> bool:
    if isinstance(atom, Number):
        return positive(translated(atom.value))
    if isinstance(atom, Largest):
        return any(not_negative(m.body) for m in atom.members)
    if isinstance(atom, Function) and atom.name == "1/":
        return not_negative(atom.arg)
    return isinstance(atom, Function) and atom.name in LAWS and LAWS[atom.name].nonnegative


@dataclass(frozen=True)
class _Candidate:
    """A member with its sum as factors."""

    member: Member

    @staticmethod
    def of(member: Member) -> _Candidate:
        """Equal products added up, and the range left out where nothing depends on it."""
        body = tuple(Term(factor, *key) for key, factor in _added(member.body).items())
        free = not any(set(member.variables) & p.symbols for t in body for p in t.polys())
        return _Candidate(Member((), (), body) if free else replace(member, body=body))

    @cached_property
    def factors(self) -> dict[Any, Fraction]:
        return _added(self.member.body)

    def shares(self, term: Term) -> bool:
        """Whether the term is added to all values of the member."""
        return term in self.member.body and not any(set(self.member.variables) & p.symbols for p in term.polys())

    def below(self, others: Sequence[_Candidate]) -> bool:
        """Whether the others are never all below a value of the member."""
        body = self.member.body
        floor = any(not_negative(o.member.body) for o in others)
        if floor and all(_at_least_zero(t, -1) for t in body):
            return True
        if self.member.variables:
            return False
        sums = [o.factors for o in others if not o.member.variables]
        if self.factors in sums or any(_on_the_way(self.factors, a, b) for k, a in enumerate(sums) for b in sums[:k]):
            return True
        atom = _only(body)
        if (floor and isinstance(atom, Function) and body[0].factor == 1 and LAWS.get(atom.name, _LAWLESS).contracts
                and _added(atom.arg) in sums):
            return True
        return any(_Candidate.of(Member((), (), lower)).below(others) for lower in _bounds(body))


def _bounds(body: Normal) -> Iterator[Normal]:
    """Sums that are never below the body: with a member in place of a maximum that is taken away."""
    for place, term in enumerate(body):
        if term.factor < 0:
            for each in _inner(term):
                if not each.variables:
                    yield (*body[:place], *body[place + 1:], *_scaled(each.body, term.factor))


def _on_the_way(c: dict[Any, Fraction], a: dict[Any, Fraction], b: dict[Any, Fraction]) -> bool:
    """Whether ``c = t*a + (1-t)*b`` for a t from 0 to 1."""
    part = None
    for key in c.keys() | a.keys() | b.keys():
        x, y, z = (each.get(key, Fraction(0)) for each in (a, b, c))
        if x == y:
            if z != x:
                return False
        elif part is None:
            part = (z - y) / (x - y)
        elif part != (z - y) / (x - y):
            return False
    return part is not None and 0 <= part <= 1
