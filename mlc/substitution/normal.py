"""The normal form of elements: sums of terms, each a factor, index variables, guards on them, and a product of atoms.

A term is the sum, over all integers that its variables can be under its guards (ranges among them), of factor times
product. Any scalar of the specifications is written so by distributing alone (:mod:`mlc.substitution.expand`);
arguments of functions become sums of terms themselves. A positive size cancels its reciprocal on the way, and maxima
take their normal form (:mod:`mlc.substitution.maxima`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

from mlc.operators.index import Condition, FloorDiv, Lookup, Poly, Symbol, as_poly
from mlc.operators.scalar import Read
from mlc.substitution.entailment import without_remainders

__all__ = ["Atom", "Function", "Largest", "Member", "Normal", "Number", "Stuck", "Term", "apart", "collected",
           "divisor_of", "filled", "free_names", "holds_at_zero", "is_size", "make_term", "mapped", "mapped_member",
           "negations", "reciprocal", "refreshed", "refreshed_member", "replaced", "substituted", "times"]


class Stuck(Exception):
    """The search ends without a proof; the reason."""


@dataclass(frozen=True)
class Number:
    """A size or index as a number, or its reciprocal."""

    value: Poly
    inverse: bool = False


@dataclass(frozen=True)
class Function:
    """A function of a sum of terms; ``1/`` is the reciprocal."""

    name: str
    arg: Normal


@dataclass(frozen=True)
class Member:
    """Of a maximum: the values of a sum over the integers that the guards admit, of which there are some."""

    variables: tuple[str, ...]
    guards: tuple[Condition, ...]
    body: Normal


@dataclass(frozen=True)
class Largest:
    """The largest of the members' values."""

    members: tuple[Member, ...]


Atom: TypeAlias = Read | Number | Function | Largest


@dataclass(frozen=True)
class Term:
    factor: Fraction
    variables: tuple[str, ...] = ()
    guards: tuple[Condition, ...] = ()
    atoms: tuple[Atom, ...] = ()

    def polys(self) -> Iterator[Poly]:
        """Every polynomial in it, those of nested sums as well."""
        for guard in self.guards:
            yield guard.poly
        for atom in self.atoms:
            yield from atom_polys(atom)


Normal: TypeAlias = "tuple[Term, ...]"


def atom_polys(atom: Atom) -> Iterator[Poly]:
    if isinstance(atom, Read):
        yield from atom.indices
    elif isinstance(atom, Number):
        yield atom.value
    elif isinstance(atom, Function):
        for term in atom.arg:
            yield from term.polys()
    else:
        for member in atom.members:
            yield from (g.poly for g in member.guards)
            for term in member.body:
                yield from term.polys()


def negations(guards: Iterable[Condition]) -> list[tuple[Condition, ...]]:
    """Disjoint conjunctions that together say that not all guards hold."""
    found: list[tuple[Condition, ...]] = []
    before: list[Condition] = []
    for guard in guards:
        found.append((*before, Condition(-guard.poly - 1, ">=")))
        if guard.relation == "==":
            found.append((*before, Condition(guard.poly - 1, ">=")))
        before.append(guard)
    return found


def mapped(term: Term, change: Callable[[Poly], Poly]) -> Term:
    """The term with every polynomial changed; guards that become true constants go."""
    guards = (Condition(change(g.poly), g.relation) for g in term.guards)
    return make_term(term.factor, term.variables, guards, (mapped_atom(a, change) for a in term.atoms))


def mapped_atom(atom: Atom, change: Callable[[Poly], Poly]) -> Atom:
    if isinstance(atom, Read):
        return Read(atom.tensor, tuple(map(change, atom.indices)))
    if isinstance(atom, Number):
        return Number(change(atom.value), atom.inverse)
    if isinstance(atom, Function):
        return Function(atom.name, tuple(mapped(t, change) for t in atom.arg))
    return Largest(tuple(mapped_member(m, change) for m in atom.members))


def mapped_member(member: Member, change: Callable[[Poly], Poly]) -> Member:
    guards = tuple(Condition(change(g.poly), g.relation) for g in member.guards)
    return Member(member.variables, guards, tuple(mapped(t, change) for t in member.body))


def substituted(term: Term, values: Mapping[str, Poly]) -> Term:
    return mapped(term, lambda p: without_remainders(p.substitute(values)))


def refreshed(term: Term, fresh: Callable[[], str]) -> Term:
    """The term with names of their own for all that it binds, in its atoms as well."""
    values = {v: fresh() for v in term.variables}
    moved = substituted(replace(term, variables=()), {v: Poly.symbol(n) for v, n in values.items()})
    return replace(moved, variables=tuple(values.values()), atoms=tuple(_refreshed(a, fresh) for a in moved.atoms))


def _refreshed(atom: Atom, fresh: Callable[[], str]) -> Atom:
    if isinstance(atom, Function):
        return Function(atom.name, tuple(refreshed(t, fresh) for t in atom.arg))
    if not isinstance(atom, Largest):
        return atom
    members = (refreshed_member(m, fresh) for m in atom.members)
    return Largest(tuple(replace(m, body=tuple(refreshed(t, fresh) for t in m.body)) for m in members))


def refreshed_member(member: Member, fresh: Callable[[], str]) -> Member:
    """The member with names of its own for its variables alone."""
    names = {v: fresh() for v in member.variables}
    values = {v: Poly.symbol(n) for v, n in names.items()}
    moved = mapped_member(member, lambda p: without_remainders(p.substitute(values)))
    return Member(tuple(names.values()), moved.guards, moved.body)


def replaced(poly: Poly, quotient: FloorDiv, by: Poly) -> Poly:
    """The polynomial with one quotient replaced, inside other quotients as well."""
    if all(isinstance(a, Symbol) for m, _ in poly.terms for a in m):
        return poly
    total = Poly({})
    for monomial, factor in poly.terms:
        product = Poly({(): factor})
        for atom in monomial:
            if atom == quotient:
                product = product * by
            elif isinstance(atom, FloorDiv):
                product = product * (replaced(atom.numerator, quotient, by)
                                     // replaced(atom.denominator, quotient, by))
            elif isinstance(atom, Lookup):
                indices = tuple(replaced(index, quotient, by) for index in atom.indices)
                product = product * Poly.atom(Lookup(atom.tensor, indices))
            else:
                product = product * Poly.atom(atom)
        total = total + product
    return total


def _always(guard: Condition) -> bool:
    value = guard.poly.constant
    return value is not None and (value == 0 if guard.relation == "==" else value >= 0)


def make_term(factor: Fraction, variables: Iterable[str], guards: Iterable[Condition], atoms: Iterable[Atom]) -> Term:
    """A term without guards that hold anyway, without repeated ones, and with sizes cancelled."""
    kept = tuple(dict.fromkeys(g for g in guards if not _always(g)))
    numbers: dict[Poly, int] = {}
    others: list[Atom] = []
    for atom in atoms:
        if not isinstance(atom, Number):
            others.append(atom)
        elif atom.value.constant is not None:
            number = Fraction(atom.value.constant)
            if atom.inverse and not number:
                others.append(atom)
            else:
                factor = factor / number if atom.inverse else factor * number
        elif is_size(atom.value):
            numbers[atom.value] = numbers.get(atom.value, 0) + (-1 if atom.inverse else 1)
        else:
            others.append(atom)
    for size, power in numbers.items():
        others += [Number(size, power < 0)] * abs(power)
    return Term(factor, tuple(variables), kept, tuple(others))


def collected(terms: Normal) -> Normal:
    """The sum with equal products added up, in the order in which they come first."""
    total: dict[Any, Fraction] = {}
    for term in terms:
        key = term.variables, term.guards, term.atoms
        total[key] = total.get(key, Fraction(0)) + term.factor
    return tuple(Term(factor, *key) for key, factor in total.items() if factor)


def reciprocal(value: Normal, fresh: Callable[[], str]) -> Normal:
    """The reciprocal of a product as the product of reciprocals; otherwise opaque."""
    value = collected(value)
    if len(value) != 1 or value[0].variables or value[0].guards:
        return (Term(Fraction(1), atoms=(Function("1/", value),)),)
    product: Normal = (Term(1 / value[0].factor),)
    for atom in value[0].atoms:
        factors: Normal = (Term(Fraction(1), atoms=(Function("1/", (Term(Fraction(1), atoms=(atom,)),)),)),)
        if isinstance(atom, Number) and is_size(atom.value):
            factors = (Term(Fraction(1), atoms=(replace(atom, inverse=not atom.inverse),)),)
        elif isinstance(atom, Function) and atom.name == "1/":
            factors = tuple(refreshed(each, fresh) for each in atom.arg)
        product = tuple(times(a, b) for a in product for b in factors)
    return product


def times(one: Term, other: Term) -> Term:
    """The product of two terms that bind other names."""
    return make_term(one.factor * other.factor, (*one.variables, *other.variables), (*one.guards, *other.guards),
                     (*one.atoms, *other.atoms))


def divisor_of(atom: Atom) -> Atom | None:
    """The atom that this atom is the reciprocal of; None if it is none."""
    if isinstance(atom, Function) and atom.name == "1/" and len(atom.arg) == 1:
        [inner] = atom.arg
        if inner == Term(Fraction(1), atoms=inner.atoms) and len(inner.atoms) == 1:
            return inner.atoms[0]
    return None


def free_names(atom: Atom) -> set[str]:
    """The sizes and variables around an atom that it depends on, without those that it binds."""
    if isinstance(atom, Read):
        return {n for i in atom.indices for n in i.symbols}
    if isinstance(atom, Number):
        return set(atom.value.symbols)
    members = (Member((), (), atom.arg),) if isinstance(atom, Function) else atom.members
    found: set[str] = set()
    for m in members:
        inside = {n for g in m.guards for n in g.poly.symbols}
        for t in m.body:
            inside |= {n for g in t.guards for n in g.poly.symbols}.union(*map(free_names, t.atoms)) - set(t.variables)
        found |= inside - set(m.variables)
    return found


def filled(atom: Atom) -> bool:
    """Whether the maxima in it are of something whatever is around them: of values where their variables are 0."""
    if isinstance(atom, Read | Number):
        return True
    members = (Member((), (), atom.arg),) if isinstance(atom, Function) else atom.members
    return all(holds_at_zero(g, m.variables) for m in members for g in m.guards) and all(
        map(filled, (a for m in members for t in m.body for a in t.atoms)))


def holds_at_zero(guard: Condition, variables: Sequence[str]) -> bool:
    """Whether it plainly holds where those variables are 0, for all sizes."""
    poly = guard.poly.substitute(dict.fromkeys(variables, as_poly(0)))
    if guard.relation == "==":
        return not poly.terms
    above = poly.substitute({name: Poly.symbol(name) + 1 for name in poly.symbols})
    return all(c > 0 and all(isinstance(a, Symbol) and a.name[0] not in "$@" for a in m) for m, c in above.terms)


def apart(argument: Normal) -> tuple[Term, Term]:
    """The one product that is summed as what does not depend on the variables that it is summed over, and the rest,
    among it maxima that may be of nothing where the guards of the product do not hold."""
    [product] = collected(argument)
    outer = tuple(a for a in product.atoms if free_names(a).isdisjoint(product.variables) and filled(a))
    return Term(product.factor, atoms=outer), replace(
        product, factor=Fraction(1), atoms=tuple(a for a in product.atoms if a not in outer))


def is_size(value: Poly) -> bool:
    """A single size symbol, which is at least 1."""
    if len(value.terms) != 1:
        return False
    monomial, factor = value.terms[0]
    return factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol) and monomial[0].name[0] not in "$@"
