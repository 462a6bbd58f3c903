"""An element of a tensor, as its operators' specifications write it, as a sum of terms."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mlc.operators.index import Poly
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum, Within
from mlc.substitution.check.integers import CertificateError, Expr, Guard, guard_of, name, need, translated
from mlc.substitution.check.maxima import called, largest
from mlc.substitution.check.terms import Member, Term, fresh_name, make_term, opposites, reciprocal, times, under

__all__ = ["WITHIN", "bind", "terms_of"]

_MOST_TERMS = 400
#: the tensor whose element at an index and an extent is defined where the index is one of 0 to the extent less one: no
#: input is called so
WITHIN = "0 <= index < extent"


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
                product = [times(a, b) for a in product for b in right]
            return product
        case Select(conditions, then, otherwise):
            guards = [Guard(g.expr.substituted(names), g.relation) for g in map(guard_of, conditions)]
            found, others = [under(t, guards) for t in terms_of(then, names)], terms_of(otherwise, names)
            return _few(found + [under(t, case) for case in opposites(guards) for t in others] if others else found)
        case Within(_, _, there):
            return terms_of(there, names)
        case Sum(variables, body):
            bound, inner, ranges = bind(variables, names)
            return [make_term(t.factor, (*bound, *t.names), (*ranges, *t.guards), t.atoms)
                    for t in terms_of(body, inner)]
        case Max(variables, conditions, body):
            bound, inner, ranges = bind(variables, names)
            ranges += [Guard(g.expr.substituted(inner), g.relation) for g in map(guard_of, conditions)]
            return largest([Member(tuple(bound), tuple(ranges), tuple(terms_of(body, inner)))])
        case Reciprocal(divisor):
            return reciprocal(tuple(terms_of(divisor, names)))
        case Call("max", args):
            return largest(Member((), (), tuple(terms_of(a, names))) for a in args)
        case Call(function, (argument,)):
            return called(function, terms_of(argument, names))
    raise CertificateError(f"{str(value)[:60]} is no expression")


def _few(terms: list[Term]) -> list[Term]:
    need(len(terms) <= _MOST_TERMS, f"a sum must have at most {_MOST_TERMS} terms")
    return terms


def bind(variables: Any, names: Mapping[str, Expr]) -> tuple[list[str], dict[str, Expr], list[Guard]]:
    """Fresh names for bound variables, what is then known by name, and the variables' ranges."""
    inner, bound, ranges = dict(names), [], []
    for variable, extent in variables:
        bound.append(fresh_name())
        inner[variable] = index = name(bound[-1])
        ranges += [Guard(index, ">="), Guard(translated(extent).substituted(names) - index - 1, ">=")]
    return bound, inner, ranges
