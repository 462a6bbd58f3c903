"""One element of an output as a sum of terms, each a product under guards, summed over its variables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from mlc.substitution.check.integers import CertificateError, Expr, Guard, need, number, positive, spend

__all__ = [
    "Member", "Term", "changed", "collected", "divisor_of", "filled", "free_names", "fresh_name", "inequalities",
    "is_size", "make_term", "names_of", "negated", "opposites", "reciprocal", "refreshed", "renamed", "spend_on",
    "substituted", "times", "under", "unshared",
]

_MOST_ATOMS, _MOST_TERMS = 64, 400


class Term(NamedTuple):
    """``factor`` times the product of ``atoms``, summed over all integers ``names`` for which the guards hold.

    The guards leave finitely many, since every variable begins with a range and no step takes one away.
    """

    factor: Fraction
    names: tuple[str, ...]
    guards: tuple[Guard, ...]
    #: ("read", tensor, indices), ("number", expr, inverse), ("call", name, sum), ("max", members)
    atoms: tuple[Any, ...]


class Member(NamedTuple):
    """Of a maximum: the values of ``body``, a sum, for all integers ``names`` for which the guards hold; there are
    some."""

    names: tuple[str, ...]
    guards: tuple[Guard, ...]
    body: tuple[Term, ...]


class _Names(threading.local):
    next = count()


_names = _Names()


def fresh_name() -> str:
    """A variable that nothing else is named like; no text of a certificate can name it."""
    return f"$c{next(_names.next)}"


def make_term(factor: Fraction, names: Iterable[str], guards: Iterable[Guard], atoms: Iterable[Any]) -> Term:
    """Leaves out guards that hold anyway and repeated ones; a size, being at least 1, cancels its reciprocal."""
    kept = tuple(dict.fromkeys(guard for guard in guards if not _always(guard)))
    powers: dict[Expr, int] = {}
    others = []
    for atom in atoms:
        if atom[0] != "number":
            others.append(atom)
        elif atom[1].constant is not None and (atom[1].constant or not atom[2]):
            factor = factor / atom[1].constant if atom[2] else factor * atom[1].constant
        elif is_size(atom[1]):
            powers[atom[1]] = powers.get(atom[1], 0) + (-1 if atom[2] else 1)
        else:
            others.append(atom)
    numbers = [("number", p, k < 0) for p, k in powers.items() for _ in range(abs(k))]
    spend(1 + len(others) + len(kept))
    if len(others) + len(numbers) > _MOST_ATOMS:
        raise CertificateError(f"a product must have at most {_MOST_ATOMS} factors")
    return Term(factor, tuple(names), kept, (*others, *numbers))


def _always(guard: Guard) -> bool:
    value = guard.expr.constant
    return value is not None and (value == 0 if guard.relation == "==" else value >= 0)


def is_size(expr: Expr) -> bool:
    """Whether it is one size, which is at least 1."""
    [(monomial, factor)] = expr.terms.items() if len(expr.terms) == 1 else [((), 0)]
    return factor == 1 and len(monomial) == 1 and isinstance(monomial[0], str) and monomial[0][0] not in "$@"


def spend_on(terms: Iterable[Term]) -> None:
    """Spends what it takes to look at all that terms are made of; a part that they share counts wherever it stands."""
    for term in terms:
        spend(1 + len(term.guards) + len(term.atoms))
        for atom in term.atoms:
            if atom[0] == "call":
                spend_on(atom[2])
            elif atom[0] == "max":
                for member in atom[1]:
                    spend(1 + len(member.guards))
                    spend_on(member.body)


def collected(terms: Iterable[Term]) -> tuple[Term, ...]:
    """The same sum with equal products added up."""
    factors: dict[Any, Fraction] = {}
    for term in terms:
        spend_on((term,))
        factors[term[1:]] = factors.get(term[1:], Fraction(0)) + term.factor
    return tuple(Term(factor, *rest) for rest, factor in factors.items() if factor)


def reciprocal(terms: tuple[Term, ...]) -> list[Term]:
    """Of a product without variables and guards, the product of the reciprocals, of which that of ``1/x`` is ``x``: so
    too where something is 0, of which the reciprocal is taken as 0."""
    terms = collected(terms)
    if len(terms) != 1 or terms[0].names or terms[0].guards:
        return [Term(Fraction(1), (), (), (("call", "1/", terms),))]
    product = [Term(1 / terms[0].factor, (), (), ())]
    for atom in terms[0].atoms:
        if atom[0] == "number" and is_size(atom[1]):
            factors = [Term(Fraction(1), (), (), (("number", atom[1], not atom[2]),))]
        elif atom[:2] == ("call", "1/"):
            factors = list(map(refreshed, atom[2]))
        else:
            factors = [Term(Fraction(1), (), (), (("call", "1/", (Term(Fraction(1), (), (), (atom,)),)),))]
        product = [times(a, b) for a in product for b in factors]
        need(len(product) <= _MOST_TERMS, f"a product must have at most {_MOST_TERMS} terms")
    return product


def times(one: Term, other: Term) -> Term:
    """The product of two terms that bind other names."""
    return make_term(one.factor * other.factor, one.names + other.names, one.guards + other.guards,
                     one.atoms + other.atoms)


def divisor_of(atom: Any) -> Any:
    """Of what one atom the atom is the reciprocal; None if it is no such."""
    if atom[:2] != ("call", "1/") or len(atom[2]) != 1:
        return None
    [term] = atom[2]
    return term.atoms[0] if term == Term(Fraction(1), (), (), term.atoms) and len(term.atoms) == 1 else None


def changed(term: Term, of: Callable[[Expr], Expr]) -> Term:
    """The term with ``of`` of each polynomial in its place."""
    return make_term(term.factor, term.names, [_changed_guard(g, of) for g in term.guards],
                     [_changed_atom(a, of) for a in term.atoms])


def _changed_guard(guard: Guard, of: Callable[[Expr], Expr]) -> Guard:
    expr = of(guard.expr)
    return guard if expr is guard.expr else Guard(expr, guard.relation)


def _changed_atom(atom: Any, of: Callable[[Expr], Expr]) -> Any:
    if atom[0] == "read":
        return ("read", atom[1], tuple(map(of, atom[2])))
    if atom[0] == "number":
        return ("number", of(atom[1]), atom[2])
    if atom[0] == "call":
        return ("call", atom[1], tuple(changed(t, of) for t in atom[2]))
    return ("max", tuple(Member(m.names, tuple(Guard(of(g.expr), g.relation) for g in m.guards),
                                tuple(changed(t, of) for t in m.body)) for m in atom[1]))


def substituted(term: Term, values: Mapping[str, Expr]) -> Term:
    """The term with values in place of variables."""
    return changed(term, lambda expr: expr.substituted(values))


def renamed(member: Member) -> Member:
    """The member with names that nothing else has."""
    values = {old: fresh_name() for old in member.names}
    return Member(tuple(values.values()), tuple(Guard(g.expr.renamed(values), g.relation) for g in member.guards),
                  tuple(changed(t, lambda expr: expr.renamed(values)) for t in member.body))


def unshared(term: Term) -> Term:
    """The term with names that nothing else has for what it is summed over."""
    if not term.names:
        return term
    apart = renamed(Member(term.names, term.guards, (term._replace(names=(), guards=()),)))
    [body] = apart.body
    return body._replace(names=apart.names, guards=apart.guards)


def refreshed(term: Term) -> Term:
    """The term with names that nothing else has for all that it binds, in its atoms as well."""
    apart = unshared(term)
    spend(1 + len(apart.atoms))
    return apart._replace(atoms=tuple(map(_refreshed, apart.atoms)))


def _refreshed(atom: Any) -> Any:
    if atom[0] == "call":
        return ("call", atom[1], tuple(map(refreshed, atom[2])))
    if atom[0] == "max":
        spend(1 + len(atom[1]))
        members = map(renamed, atom[1])
        return ("max", tuple(m._replace(body=tuple(map(refreshed, m.body))) for m in members))
    return atom


def names_of(atom: Any) -> set[str]:
    """The sizes and variables that an atom depends on."""
    if atom[0] == "read":
        return {s for p in atom[2] for s in p.names}
    if atom[0] == "number":
        return set(atom[1].names)
    members = (Member((), (), atom[2]),) if atom[0] == "call" else atom[1]
    terms = [t for m in members for t in m.body]
    guards = [g for part in (*members, *terms) for g in part.guards]
    return {s for g in guards for s in g.expr.names}.union(*(names_of(a) for t in terms for a in t.atoms))


def free_names(atom: Any) -> set[str]:
    """The sizes and variables around an atom that it depends on, without those that it binds."""
    spend(1)
    if atom[0] in ("read", "number"):
        return names_of(atom)
    members = (Member((), (), atom[2]),) if atom[0] == "call" else atom[1]
    found: set[str] = set()
    for m in members:
        inside = {s for g in m.guards for s in g.expr.names}
        for t in m.body:
            inner = {s for g in t.guards for s in g.expr.names}.union(*map(free_names, t.atoms))
            inside |= inner - set(t.names)
        found |= inside - set(m.names)
    return found


def filled(atom: Any) -> bool:
    """Whether the maxima in it are of something whatever is around them: of values where their variables are 0."""
    spend(1)
    if atom[0] in ("read", "number"):
        return True
    members = (Member((), (), atom[2]),) if atom[0] == "call" else atom[1]
    return all(_at_zero(g, m.names) for m in members for g in m.guards) and all(
        map(filled, (a for m in members for t in m.body for a in t.atoms)))


def _at_zero(guard: Guard, names: Iterable[str]) -> bool:
    """Whether it plainly holds where those variables are 0, for all sizes."""
    expr = guard.expr.substituted(dict.fromkeys(names, number(0)))
    return expr.constant == 0 if guard.relation == "==" else positive(expr + 1)


def negated(terms: Iterable[Term]) -> list[Term]:
    """What is taken away."""
    found = [t._replace(factor=-t.factor) for t in terms]
    spend(len(found))
    return found


def opposites(guards: Sequence[Guard]) -> list[tuple[Guard, ...]]:
    """Cases that exclude each other and together say that some guard fails."""
    cases = []
    for k, guard in enumerate(guards):
        cases.append((*guards[:k], Guard(-guard.expr - 1, ">=")))
        if guard.relation == "==":
            cases.append((*guards[:k], Guard(guard.expr - 1, ">=")))
    return cases


def inequalities(guards: Iterable[Guard]) -> list[Expr]:
    """The guards as polynomials of at least 0: one for ``>=``, two for ``==``."""
    return [p for g in guards for p in ([g.expr] if g.relation == ">=" else [g.expr, -g.expr])]


def under(term: Term, guards: Iterable[Guard]) -> Term:
    """The part of the term where further guards hold."""
    return make_term(term.factor, term.names, (*guards, *term.guards), term.atoms)
