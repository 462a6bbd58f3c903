"""One element of an output as a sum of terms, each a product under guards, summed over its variables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from mlc.operators.index import Poly
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum
from mlc.substitution.check.integers import Expr, Guard, guard_of, name, need, spend, translated

__all__ = [
    "GROWING", "IDEMPOTENT", "POSITIVE", "Term", "changed", "fresh_name", "inequalities", "make_term", "names_of",
    "negated", "opposites", "substituted", "terms_of", "under",
]

_MOST_TERMS, _MOST_ATOMS = 400, 64

# What is taken for granted of functions, besides where they are defined; tests compare it with the operators' laws.
#: defined everywhere, and never smaller for a larger argument
GROWING = frozenset({"relu", "sigmoid", "tanh", "exp", "erf"})
#: f(f(x)) = f(x)
IDEMPOTENT = frozenset({"relu"})
#: above 0
POSITIVE = frozenset({"exp", "sigmoid"})


class Term(NamedTuple):
    """``factor`` times the product of ``atoms``, summed over all integers ``names`` for which the guards hold.

    The guards leave finitely many, since every variable begins with a range and no step takes one away.
    """

    factor: Fraction
    names: tuple[str, ...]
    guards: tuple[Guard, ...]
    #: ("read", tensor, indices), ("number", expr, inverse), ("call", name, sums), ("max", names, guards, sum)
    atoms: tuple[Any, ...]


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
    spend(1 + len(others))
    need(len(others) + len(numbers) <= _MOST_ATOMS, f"a product must have at most {_MOST_ATOMS} factors")
    return Term(factor, tuple(names), kept, (*others, *numbers))


def _always(guard: Guard) -> bool:
    value = guard.expr.constant
    return value is not None and (value == 0 if guard.relation == "==" else value >= 0)


def is_size(expr: Expr) -> bool:
    """Whether it is one size, which is at least 1."""
    [(monomial, factor)] = expr.terms.items() if len(expr.terms) == 1 else [((), 0)]
    return factor == 1 and len(monomial) == 1 and isinstance(monomial[0], str) and monomial[0][0] not in "$@"


def _make_call(function: str, sums: tuple[Any, ...]) -> Any:
    """f(f(x)) is f(x) where f is idempotent; growing functions go into a maximum (over at least one value)."""
    if (function in GROWING or function in IDEMPOTENT) and len(sums[0]) == 1:
        (only,) = sums[0]
        if only.factor == 1 and not only.names and not only.guards and len(only.atoms) == 1:
            (atom,) = only.atoms
            if function in IDEMPOTENT and atom[:2] == ("call", function):
                return atom
            if function in GROWING and atom[0] == "max":
                inner = Term(Fraction(1), (), (), (_make_call(function, (atom[3],)),))
                return ("max", atom[1], atom[2], (inner,))
    return ("call", function, sums)


def changed(term: Term, of: Callable[[Expr], Expr]) -> Term:
    """The term with ``of`` of each polynomial in its place."""
    return make_term(term.factor, term.names, [Guard(of(g.expr), g.relation) for g in term.guards],
                     [_changed_atom(a, of) for a in term.atoms])


def _changed_atom(atom: Any, of: Callable[[Expr], Expr]) -> Any:
    if atom[0] == "read":
        return ("read", atom[1], tuple(map(of, atom[2])))
    if atom[0] == "number":
        return ("number", of(atom[1]), atom[2])
    if atom[0] == "call":
        return _make_call(atom[1], tuple(tuple(changed(t, of) for t in terms) for terms in atom[2]))
    return ("max", atom[1], tuple(Guard(of(g.expr), g.relation) for g in atom[2]),
            tuple(changed(t, of) for t in atom[3]))


def substituted(term: Term, values: Mapping[str, Expr]) -> Term:
    """The term with values in place of variables."""
    return changed(term, lambda expr: expr.substituted(values))


def names_of(atom: Any) -> set[str]:
    """The sizes and variables that an atom depends on."""
    if atom[0] == "read":
        return {s for p in atom[2] for s in p.names}
    if atom[0] == "number":
        return set(atom[1].names)
    guards, terms = ((), [t for part in atom[2] for t in part]) if atom[0] == "call" else (atom[2], atom[3])
    inner = {s for t in terms for g in t.guards for s in g.expr.names} | {s for g in guards for s in g.expr.names}
    return inner.union(*(names_of(a) for t in terms for a in t.atoms))


def negated(terms: Iterable[Term]) -> list[Term]:
    """What is taken away."""
    return [t._replace(factor=-t.factor) for t in terms]


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


def terms_of(value: Scalar, names: Mapping[str, Expr]) -> list[Term]:
    """The scalar as a sum of terms, by distribution; ``names`` are the variables around it.

    Functions that are not defined everywhere are taken as 0 elsewhere: what that leaves open is shown on its own
    (:mod:`mlc.substitution.check.defined`).
    """
    one = Fraction(1)

    def expr(p: Poly) -> Expr:
        return translated(p).substituted(names)

    match value:
        case Const(constant):
            return [Term(constant, (), (), ())] if constant else []
        case Read(tensor, indices):
            return [Term(one, (), (), (("read", tensor, tuple(map(expr, indices))),))]
        case Size(size):
            return [make_term(Fraction(c), (), (), [("number", Expr({(a,): 1}), False) for a in m])
                    for m, c in expr(size).ordered()]
        case Add(parts):
            return _few([t for part in parts for t in terms_of(part, names)])
        case Mul(parts):
            product = [Term(one, (), (), ())]
            for part in parts:
                right = terms_of(part, names)
                need(len(product) * len(right) <= _MOST_TERMS, f"a product must have at most {_MOST_TERMS} terms")
                product = [make_term(a.factor * b.factor, a.names + b.names, a.guards + b.guards, a.atoms + b.atoms)
                           for a in product for b in right]
            return product
        case Select(conditions, then, otherwise):
            guards = [Guard(g.expr.substituted(names), g.relation) for g in map(guard_of, conditions)]
            found = [under(t, guards) for t in terms_of(then, names)]
            return _few(found + [under(t, case) for case in opposites(guards) for t in terms_of(otherwise, names)])
        case Sum(variables, body):
            bound, inner, ranges = bind(variables, names)
            return [make_term(t.factor, (*bound, *t.names), (*ranges, *t.guards), t.atoms)
                    for t in terms_of(body, inner)]
        case Max(variables, conditions, body):
            bound, inner, ranges = bind(variables, names)
            ranges += [Guard(g.expr.substituted(inner), g.relation) for g in map(guard_of, conditions)]
            return _largest(tuple(bound), tuple(ranges), terms_of(body, inner))
        case Reciprocal(divisor):
            return _reciprocal(tuple(terms_of(divisor, names)))
        case Call(function, args):
            return [Term(one, (), (), (_make_call(function, tuple(tuple(terms_of(a, names)) for a in args)),))]


def _few(terms: list[Term]) -> list[Term]:
    need(len(terms) <= _MOST_TERMS, f"a sum must have at most {_MOST_TERMS} terms")
    return terms


def _largest(names: tuple[str, ...], guards: tuple[Guard, ...], body: list[Term]) -> list[Term]:
    """Terms that are the same for all variables of a maximum are added outside of it."""
    same = [t for t in body if not set(names) & set().union(*(g.expr.names for g in t.guards),
                                                            *(names_of(a) for a in t.atoms))]
    rest = tuple(t for t in body if t not in same)
    return [Term(Fraction(1), (), (), (("max", names, guards, rest),)), *same] if rest else same


def under(term: Term, guards: Iterable[Guard]) -> Term:
    """The part of the term where further guards hold."""
    return make_term(term.factor, term.names, (*guards, *term.guards), term.atoms)


def bind(variables: Any, names: Mapping[str, Expr]) -> tuple[list[str], dict[str, Expr], list[Guard]]:
    """Fresh names for bound variables, what is then known by name, and the variables' ranges."""
    inner, bound, ranges = dict(names), [], []
    for variable, extent in variables:
        bound.append(fresh_name())
        inner[variable] = index = name(bound[-1])
        ranges += [Guard(index, ">="), Guard(translated(extent).substituted(names) - index - 1, ">=")]
    return bound, inner, ranges


def _reciprocal(terms: tuple[Term, ...]) -> list[Term]:
    """Of a product without variables and guards, the product of the reciprocals: so too where one of them is of 0."""
    one = Fraction(1)
    if len(terms) != 1 or terms[0].names or terms[0].guards or not terms[0].factor:
        return [Term(one, (), (), (("call", "1/", (terms,)),))]
    atoms = [("number", a[1], not a[2]) if a[0] == "number" and is_size(a[1])
             else ("call", "1/", ((Term(one, (), (), (a,)),),)) for a in terms[0].atoms]
    return [make_term(1 / terms[0].factor, (), (), atoms)]


