"""Division of sizes: exact quotients of polynomials, and floor divisions under facts."""

from __future__ import annotations

from collections.abc import Iterator

from mlc.operators.index import FloorDiv, Monomial, Poly
from mlc.substitution.entailment import Facts, Witness

__all__ = ["divided", "resolve"]


def divided(numerator: Poly, divisor: Poly) -> tuple[Poly, Poly]:
    """``(q, r)`` with ``numerator = divisor * q + r``, as many terms in ``q`` as can be told."""
    lead, factor = max(divisor.terms, key=lambda t: (len(t[0]), [str(a) for a in t[0]]))
    quotient, rest, done = Poly({}), numerator, Poly({})
    for _ in range(40):
        found = next(((m, c) for m, c in rest.terms if c % factor == 0 and _without(m, lead) is not None), None)
        if found is None:
            break
        part = _without(found[0], lead)
        assert part is not None
        step = Poly({part: found[1] // factor})
        quotient, rest = quotient + step, rest - divisor * step
    return quotient, rest + done


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in part:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def resolve(quotient: FloorDiv, facts: Facts) -> tuple[Poly, Witness, Witness] | None:
    """A simpler polynomial that the quotient equals, with the witnesses that ``0 <= n - d*q <= d - 1``."""
    n, d = quotient.numerator, quotient.denominator
    nested = _nested(quotient, facts)
    if nested is not None:
        return nested
    for candidate in _candidates(n, d):
        if candidate == Poly.atom(quotient):
            continue
        rest = n - d * candidate
        if facts.refuted(rest) or facts.refuted(d - 1 - rest):
            continue
        low = facts.entails(rest)
        high = facts.entails(d - 1 - rest) if low is not None else None
        if low is not None and high is not None:
            return candidate, low, high
    return None


def _nested(quotient: FloorDiv, facts: Facts) -> tuple[Poly, Witness, Witness] | None:
    """``(n // a) // d`` is ``q = n // (a*d)``, whatever n is, for a product ``a`` of sizes.

    With ``p = n // a``: were ``p - d*q <= -1``, then ``a*(d*q - p - 1)``, ``a*p + a - 1 - n`` and ``n - a*d*q`` would
    all be at least 0, but they add up to -1. Were ``p - d*q >= d``, then so would ``a*(p - d*q - d)``, ``n - a*p`` and
    ``a*d*q + a*d - 1 - n``. The witnesses write ``a`` as a sum of products of what the facts say of its sizes.
    """
    n, d = quotient.numerator, quotient.denominator
    if len(n.terms) != 1 or n.terms[0][1] != 1 or len(n.terms[0][0]) != 1:
        return None
    inner = n.terms[0][0][0]
    if not isinstance(inner, FloorDiv) or len(inner.denominator.terms) != 1 or len(d.terms) != 1:
        return None
    found = inner.numerator // (inner.denominator * d)
    factors = facts.factors(inner.denominator)
    if factors is None or facts.factors(d) is None or found != Poly.atom(FloorDiv(inner.numerator,
                                                                                   inner.denominator * d)):
        return None
    negated = [[str(factor), [-1, *refs]] for factor, refs in factors]
    return (found, [*negated, ["1", [["hi", n]]], ["1", [["lo", found]]]],
            [*negated, ["1", [["lo", n]]], ["1", [["hi", found]]]])


def _candidates(n: Poly, d: Poly) -> Iterator[Poly]:
    quotient, _ = divided(n, d)
    yield quotient
    if len(d.terms) == 1:
        monomial, factor = d.terms[0]
        for atom in dict.fromkeys(monomial) if len(monomial) > 1 or factor > 1 else ():
            outer = Poly.atom(atom)
            whole, _ = divided(n, outer)
            yield whole // divided(d, outer)[0]
        if len(monomial) > 2:
            for atom in dict.fromkeys(monomial):
                inner = divided(d, Poly.atom(atom))[0]
                yield divided(n, inner)[0] // Poly.atom(atom)
    if quotient.terms:
        _, rest = divided(n, d)
        yield quotient + rest // d
    yield quotient - 1
