"""Elements as sums of terms: a factor, index variables, guards on them, and a product of atoms.

A term is the sum, over all integers that its variables can be under its guards (ranges among them), of factor times
product. :func:`expand` writes any scalar of the specifications so, by distributing alone; arguments of functions
become sums of terms themselves. Laws are applied on the way: a positive size cancels its reciprocal, relu of relu is
relu, an increasing function of a maximum is the maximum of its values, and what is the same for all of its variables
is added outside of a maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import TypeAlias

from mlc.operators.index import Condition, FloorDiv, Poly, Symbol
from mlc.operators.laws import LAWS, Laws
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum
from mlc.substitution.check.integers import positive, translated
from mlc.substitution.entailment import without_remainders

__all__ = ["Atom", "Expander", "Function", "Largest", "Normal", "Number", "Term", "negations",
           "substituted"]


@dataclass(frozen=True)
class Number:
    """A size or index as a number, or its reciprocal."""

    value: Poly
    inverse: bool = False


@dataclass(frozen=True)
class Function:
    """A function of sums of terms; ``1/`` is the reciprocal."""

    name: str
    args: tuple[Normal, ...]


@dataclass(frozen=True)
class Largest:
    """The largest body over the integers that the guards admit."""

    variables: tuple[str, ...]
    guards: tuple[Condition, ...]
    body: Normal


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
#: of reciprocals and of the larger of two
_LAWLESS = Laws("")


def atom_polys(atom: Atom) -> Iterator[Poly]:
    if isinstance(atom, Read):
        yield from atom.indices
    elif isinstance(atom, Number):
        yield atom.value
    elif isinstance(atom, Function):
        for arg in atom.args:
            for term in arg:
                yield from term.polys()
    else:
        yield from (g.poly for g in atom.guards)
        for term in atom.body:
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
        return make_function(atom.name, tuple(tuple(mapped(t, change) for t in arg) for arg in atom.args))
    guards = tuple(Condition(change(g.poly), g.relation) for g in atom.guards)
    return Largest(atom.variables, guards, tuple(mapped(t, change) for t in atom.body))


def substituted(term: Term, values: Mapping[str, Poly]) -> Term:
    return mapped(term, lambda p: without_remainders(p.substitute(values)))


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
        elif _is_size(atom.value):
            numbers[atom.value] = numbers.get(atom.value, 0) + (-1 if atom.inverse else 1)
        else:
            others.append(atom)
    for size, power in numbers.items():
        others += [Number(size, power < 0)] * abs(power)
    return Term(factor, tuple(variables), kept, tuple(others))


def _is_size(value: Poly) -> bool:
    """A single size symbol, which is at least 1."""
    if len(value.terms) != 1:
        return False
    monomial, factor = value.terms[0]
    return factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol) and monomial[0].name[0] not in "$@"


def make_function(name: str, args: tuple[Normal, ...]) -> Atom:
    """An idempotent function of itself is itself; a growing one of a maximum is the maximum of its values."""
    laws = LAWS.get(name, _LAWLESS)
    if (laws.grows or laws.idempotent) and len(args[0]) == 1:
        term = args[0][0]
        if term.factor == 1 and not term.variables and not term.guards and len(term.atoms) == 1:
            inner = term.atoms[0]
            if laws.idempotent and isinstance(inner, Function) and inner.name == name:
                return inner
            if laws.grows and isinstance(inner, Largest):
                body = (Term(Fraction(1), atoms=(make_function(name, (inner.body,)),)),)
                return Largest(inner.variables, inner.guards, body)
    return Function(name, args)


def _largest(variables: tuple[str, ...], guards: tuple[Condition, ...], body: Normal) -> Normal:
    """The maximum, with the terms that are the same for all of its variables added outside."""
    inside = [t for t in body if any(n in p.symbols for n in variables for p in t.polys())]
    outside = [t for t in body if t not in inside]
    if not inside:
        return tuple(outside)
    return (Term(Fraction(1), atoms=(Largest(variables, guards, tuple(inside)),)), *outside)


class Expander:
    """Expands scalars; hands out names of variables that nothing else uses."""

    def __init__(self) -> None:
        self._names = count()
        #: what the search has spent on the terms made here
        self.work = 0

    def fresh(self) -> str:
        return f"$v{next(self._names)}"

    def expand(self, value: Scalar, names: Mapping[str, Poly] | None = None) -> Normal:
        """The terms whose sum is ``value``, in the order of distribution; ``names`` renames variables."""
        names = names or {}
        if isinstance(value, Const):
            return (Term(value.value),) if value.value else ()
        if isinstance(value, Read):
            return (Term(Fraction(1), atoms=(Read(value.tensor, tuple(self._poly(i, names) for i in value.indices)),)),)
        if isinstance(value, Size):
            poly = self._poly(value.poly, names)
            return tuple(make_term(Fraction(c), (), (), [Number(Poly.atom(a)) for a in m]) for m, c in poly.terms)
        if isinstance(value, Add):
            return tuple(t for part in value.terms for t in self.expand(part, names))
        if isinstance(value, Mul):
            product: Normal = (Term(Fraction(1)),)
            for part in value.factors:
                right = self.expand(part, names)
                product = tuple(self._times(a, b) for a in product for b in right)
            return product
        if isinstance(value, Select):
            guards = tuple(Condition(self._poly(c.poly, names), c.relation) for c in value.conditions)
            found = [self._guarded(t, guards) for t in self.expand(value.then, names)]
            for case in negations(guards):
                found += [self._guarded(t, case) for t in self.expand(value.otherwise, names)]
            return tuple(found)
        if isinstance(value, (Sum, Max)):
            inner, variables, ranges = self._bind(value.variables, names)
            if isinstance(value, Sum):
                return tuple(make_term(t.factor, (*variables, *t.variables), (*ranges, *t.guards), t.atoms)
                             for t in self.expand(value.body, inner))
            ranges += [Condition(self._poly(c.poly, inner), c.relation) for c in value.conditions]
            return _largest(tuple(variables), tuple(ranges), self.expand(value.body, inner))
        if isinstance(value, Reciprocal):
            return self._reciprocal(self.expand(value.value, names))
        return (Term(Fraction(1), atoms=(make_function(value.function,
                                                       tuple(self.expand(a, names) for a in value.args)),)),)

    def demands(self, value: Scalar, names: Mapping[str, Poly] | None = None) -> Normal:
        """What has to be defined for ``value`` to be: the reads and partial functions of it, before anything cancels,
        each the one atom of a term (:mod:`mlc.substitution.check.defined` says what that means)."""
        return tuple(dict.fromkeys(self._demands(value, names or {})))

    def _demands(self, value: Scalar, names: Mapping[str, Poly]) -> Iterator[Term]:
        if isinstance(value, Read):
            yield from self.expand(value, names)
        elif isinstance(value, (Add, Mul)):
            for part in value.terms if isinstance(value, Add) else value.factors:
                yield from self._demands(part, names)
        elif isinstance(value, Select):
            guards = tuple(Condition(self._poly(c.poly, names), c.relation) for c in value.conditions)
            yield from (self._guarded(t, guards) for t in self._demands(value.then, names))
            for case in negations(guards):
                yield from (self._guarded(t, case) for t in self._demands(value.otherwise, names))
        elif isinstance(value, (Sum, Max)):
            inner, variables, ranges = self._bind(value.variables, names)
            if isinstance(value, Max):
                ranges += [Condition(self._poly(c.poly, inner), c.relation) for c in value.conditions]
            for t in self._demands(value.body, inner):
                yield make_term(t.factor, (*variables, *t.variables), (*ranges, *t.guards), t.atoms)
        elif isinstance(value, Reciprocal):
            yield from self._demands(value.value, names)
            divisor = value.value
            sized = isinstance(divisor, Size) and positive(translated(self._poly(divisor.poly, names)))
            if not sized and not (isinstance(divisor, Const) and divisor.value):
                yield self._calls("1/", divisor, names)
        elif isinstance(value, Call):
            for part in value.args:
                yield from self._demands(part, names)
            if value.function != "max" and LAWS[value.function].domain:
                yield self._calls(value.function, value.args[0], names)

    def _calls(self, function: str, argument: Scalar, names: Mapping[str, Poly]) -> Term:
        return Term(Fraction(1), atoms=(Function(function, (self.expand(argument, names),)),))

    @staticmethod
    def _poly(poly: Poly, names: Mapping[str, Poly]) -> Poly:
        return without_remainders(poly.substitute(names))

    def _bind(self, variables: Iterable[tuple[str, Poly]], names: Mapping[str, Poly]
              ) -> tuple[dict[str, Poly], list[str], list[Condition]]:
        inner, fresh, guards = dict(names), [], []
        for name, extent in variables:
            new = self.fresh()
            inner[name] = Poly.symbol(new)
            fresh.append(new)
            guards += [Condition(inner[name], ">="), Condition(self._poly(extent, names) - inner[name] - 1, ">=")]
        return inner, fresh, guards

    @staticmethod
    def _guarded(term: Term, guards: tuple[Condition, ...]) -> Term:
        return make_term(term.factor, term.variables, (*guards, *term.guards), term.atoms)

    @staticmethod
    def _times(a: Term, b: Term) -> Term:
        return make_term(a.factor * b.factor, (*a.variables, *b.variables), (*a.guards, *b.guards),
                         (*a.atoms, *b.atoms))

    @staticmethod
    def _reciprocal(value: Normal) -> Normal:
        """Of a product, the product of reciprocals; else opaque."""
        if len(value) != 1 or value[0].variables or value[0].guards or not value[0].factor:
            return (Term(Fraction(1), atoms=(Function("1/", (value,)),)),)
        atoms = [replace(a, inverse=not a.inverse) if isinstance(a, Number) and _is_size(a.value)
                 else Function("1/", ((Term(Fraction(1), atoms=(a,)),),)) for a in value[0].atoms]
        return (make_term(1 / value[0].factor, (), (), atoms),)
