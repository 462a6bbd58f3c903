"""One element of an output as a sum of terms, each a product under guards, summed over its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from mlc.operators.index import Condition, Poly, Symbol
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum
from mlc.substitution.check.witness import without_remainders

__all__ = [
    "Term", "changed", "fresh_name", "inequalities", "make_term", "negated", "opposites", "substituted", "symbols_of",
    "terms_of", "undefined",
]


class Term(NamedTuple):
    factor: Fraction
    names: tuple[str, ...]
    guards: tuple[Condition, ...]
    #: ("read", tensor, indices), ("number", poly, inverse), ("call", name, sums), ("max", names, guards, sum)
    atoms: tuple[Any, ...]


_fresh = count()


def fresh_name() -> str:
    """A variable that nothing else is named like."""
    return f"$c{next(_fresh)}"


def make_term(factor: Fraction, names: Iterable[str], guards: Iterable[Condition], atoms: Iterable[Any]) -> Term:
    """Leaves out guards that hold anyway and repeated ones; a size cancels its reciprocal."""
    kept = []
    for guard in guards:
        constant = guard.poly.constant
        if guard not in kept and not (constant is not None and guard.evaluate({})):
            kept.append(guard)
    powers: dict[Poly, int] = {}
    others = []
    for atom in atoms:
        if atom[0] == "number" and atom[1].constant is not None and (atom[1].constant or not atom[2]):
            factor = factor / atom[1].constant if atom[2] else factor * atom[1].constant
        elif atom[0] == "number" and _is_size(atom[1]):
            powers[atom[1]] = powers.get(atom[1], 0) + (-1 if atom[2] else 1)
        else:
            others.append(atom)
    numbers = [("number", p, k < 0) for p, k in powers.items() for _ in range(abs(k))]
    return Term(factor, tuple(names), tuple(kept), (*others, *numbers))


def _is_size(poly: Poly) -> bool:
    (monomial, factor), *more = poly.terms or (((), 0),)
    return not more and factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol) \
        and monomial[0].name[0] not in "$@"


def _make_call(name: str, sums: tuple[Any, ...]) -> Any:
    """relu is idempotent; increasing functions go into a maximum (over at least one value)."""
    if name in ("relu", "sigmoid", "tanh", "exp", "erf") and len(sums[0]) == 1:
        (only,) = sums[0]
        if only.factor == 1 and not only.names and not only.guards and len(only.atoms) == 1:
            (atom,) = only.atoms
            if name == "relu" and atom[:2] == ("call", "relu"):
                return atom
            if atom[0] == "max":
                return ("max", atom[1], atom[2], (Term(Fraction(1), (), (), (_make_call(name, (atom[3],)),)),))
    return ("call", name, sums)


def changed(term: Term, of: Callable[[Poly], Poly]) -> Term:
    """The term with ``of`` of each polynomial in its place."""
    return make_term(term.factor, term.names, [Condition(of(g.poly), g.relation) for g in term.guards],
                     [_changed_atom(a, of) for a in term.atoms])


def _changed_atom(atom: Any, of: Callable[[Poly], Poly]) -> Any:
    if atom[0] == "read":
        return ("read", atom[1], tuple(map(of, atom[2])))
    if atom[0] == "number":
        return ("number", of(atom[1]), atom[2])
    if atom[0] == "call":
        return _make_call(atom[1], tuple(tuple(changed(t, of) for t in terms) for terms in atom[2]))
    return ("max", atom[1], tuple(Condition(of(g.poly), g.relation) for g in atom[2]),
            tuple(changed(t, of) for t in atom[3]))


def substituted(term: Term, values: Mapping[str, Poly]) -> Term:
    """The term with values in place of variables."""
    return changed(term, lambda p: without_remainders(p.substitute(values)))


def symbols_of(atom: Any) -> set[str]:
    """The sizes and variables that an atom depends on."""
    if atom[0] == "read":
        return {s for p in atom[2] for s in p.symbols}
    if atom[0] == "number":
        return set(atom[1].symbols)
    guards, terms = ((), [t for part in atom[2] for t in part]) if atom[0] == "call" else (atom[2], atom[3])
    inner = {s for t in terms for g in t.guards for s in g.poly.symbols} | {s for g in guards for s in g.poly.symbols}
    return inner.union(*(symbols_of(a) for t in terms for a in t.atoms))


def undefined(atoms: Iterable[Any]) -> bool:
    """Whether a reciprocal, a logarithm or a root is among or inside the atoms."""
    calls = [a for a in atoms if a[0] == "call"]
    inner = [t for a in calls for terms in a[2] for t in terms] + [t for a in atoms if a[0] == "max" for t in a[3]]
    return any(a[1] in ("1/", "log", "sqrt") for a in calls) or any(undefined(t.atoms) for t in inner)


def negated(terms: Iterable[Term]) -> list[Term]:
    """What is taken away."""
    return [t._replace(factor=-t.factor) for t in terms]


def opposites(guards: Sequence[Condition]) -> list[tuple[Condition, ...]]:
    """Cases that exclude each other and together say that some guard fails."""
    cases = []
    for k, guard in enumerate(guards):
        cases.append((*guards[:k], Condition(-guard.poly - 1, ">=")))
        if guard.relation == "==":
            cases.append((*guards[:k], Condition(guard.poly - 1, ">=")))
    return cases


def inequalities(guards: Iterable[Condition]) -> list[Poly]:
    """The guards as polynomials of at least 0: one for ``>=``, two for ``==``."""
    return [p for g in guards for p in ([g.poly] if g.relation == ">=" else [g.poly, -g.poly])]


def terms_of(value: Scalar, names: Mapping[str, Poly]) -> list[Term]:
    """The scalar as a sum of terms, by distribution."""
    one = Fraction(1)

    def poly(p: Poly) -> Poly:
        return without_remainders(p.substitute(names))

    match value:
        case Const(number):
            return [Term(number, (), (), ())] if number else []
        case Read(tensor, indices):
            return [Term(one, (), (), (("read", tensor, tuple(map(poly, indices))),))]
        case Size(size):
            return [make_term(Fraction(c), (), (), [("number", Poly.atom(a), False) for a in m])
                    for m, c in poly(size).terms]
        case Add(parts):
            return [t for part in parts for t in terms_of(part, names)]
        case Mul(parts):
            product = [Term(one, (), (), ())]
            for part in parts:
                right = terms_of(part, names)
                product = [make_term(a.factor * b.factor, a.names + b.names, a.guards + b.guards, a.atoms + b.atoms)
                           for a in product for b in right]
            return product
        case Select(conditions, then, otherwise):
            guards = [Condition(poly(c.poly), c.relation) for c in conditions]
            found = [_under(t, guards) for t in terms_of(then, names)]
            return found + [_under(t, case) for case in opposites(guards) for t in terms_of(otherwise, names)]
        case Sum(variables, body):
            bound, inner, ranges = _bound(variables, names)
            return [make_term(t.factor, (*bound, *t.names), (*ranges, *t.guards), t.atoms)
                    for t in terms_of(body, inner)]
        case Max(variables, conditions, body):
            bound, inner, ranges = _bound(variables, names)
            ranges += [Condition(without_remainders(c.poly.substitute(inner)), c.relation) for c in conditions]
            return _largest(tuple(bound), tuple(ranges), terms_of(body, inner))
        case Reciprocal(divisor):
            return _reciprocal(tuple(terms_of(divisor, names)))
        case Call(function, args):
            return [Term(one, (), (), (_make_call(function, tuple(tuple(terms_of(a, names)) for a in args)),))]


def _largest(names: tuple[str, ...], guards: tuple[Condition, ...], body: list[Term]) -> list[Term]:
    """Terms that are the same for all variables of a maximum are added outside of it."""
    same = [t for t in body if not set(names) & set().union(*(g.poly.symbols for g in t.guards),
                                                            *(symbols_of(a) for a in t.atoms))]
    rest = tuple(t for t in body if t not in same)
    return [Term(Fraction(1), (), (), (("max", names, guards, rest),)), *same] if rest else same


def _under(term: Term, guards: Iterable[Condition]) -> Term:
    return make_term(term.factor, term.names, (*guards, *term.guards), term.atoms)


def _bound(variables: Any, names: Mapping[str, Poly]) -> tuple[list[str], dict[str, Poly], list[Condition]]:
    inner, bound, ranges = dict(names), [], []
    for variable, extent in variables:
        bound.append(fresh_name())
        inner[variable] = Poly.symbol(bound[-1])
        top = without_remainders(extent.substitute(names)) - inner[variable] - 1
        ranges += [Condition(inner[variable], ">="), Condition(top, ">=")]
    return bound, inner, ranges


def _reciprocal(terms: tuple[Term, ...]) -> list[Term]:
    """Of a product without variables and guards, the product of the reciprocals."""
    one = Fraction(1)
    if len(terms) != 1 or terms[0].names or terms[0].guards or not terms[0].factor:
        return [Term(one, (), (), (("call", "1/", (terms,)),))]
    atoms = [("number", a[1], not a[2]) if a[0] == "number" and _is_size(a[1])
             else ("call", "1/", ((Term(one, (), (), (a,)),),)) for a in terms[0].atoms]
    return [make_term(1 / terms[0].factor, (), (), atoms)]
