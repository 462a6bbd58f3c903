"""Witnesses that a polynomial is at least 0, and the quotients that they resolve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, TypeAlias

from mlc.errors import MlcError
from mlc.operators.index import Condition, FloorDiv, Mod, Poly, Symbol, as_poly
from mlc.substitution.codec import parse_fraction, parse_size

__all__ = [
    "CertificateError", "Reader", "as_quotient", "check_condition", "check_division", "check_witness", "need",
    "swapped", "without_remainders",
]

#: what reads the texts of a certificate
Reader: TypeAlias = Callable[[str], Poly]


class CertificateError(MlcError):
    """A certificate does not show that its rule holds: the step and the reason."""


def need(true: Any, reason: str) -> None:
    """Raises :class:`CertificateError` where it is not so."""
    if not true:
        raise CertificateError(reason)


def check_condition(condition: Condition, witnesses: Sequence[Any], facts: Sequence[Poly], read: Reader = parse_size
                    ) -> None:
    """One witness shows ``>=``, two show ``==``."""
    goals = [condition.poly] if condition.relation == ">=" else [condition.poly, -condition.poly]
    need(len(witnesses) == len(goals), f"{condition} has {len(witnesses)} witnesses")
    for goal, witness in zip(goals, witnesses, strict=True):
        check_witness(witness, goal, facts, read)


def check_witness(witness: Sequence[Any], goal: Poly | None, facts: Sequence[Poly], read: Reader = parse_size) -> None:
    """Shows ``goal >= 0``; without a goal, that the facts contradict each other."""
    factors = [parse_fraction(factor) for factor, _ in witness]
    need(all(f > 0 for f in factors), "the factors of a witness must be positive")
    scale = lcm(*(f.denominator for f in factors)) if factors else 1
    total, opposite = as_poly(0), False
    for factor, (_, refs) in zip(factors, witness, strict=True):
        product = as_poly(int(factor * scale))
        for ref in refs:
            if ref == -1 and goal is not None:
                opposite, fact = True, -goal - 1
            elif isinstance(ref, int):
                need(0 <= ref < len(facts), "a witness must refer to facts")
                fact = facts[ref]
            else:
                fact = _axiom(ref, facts, read)
            product = product * fact
        total = total + product
    direct = goal is not None and not opposite and total == goal * scale
    need(direct or total == as_poly(-scale), f"a witness of {goal} >= 0 adds up to {total}")


def _axiom(ref: Sequence[Any], facts: Sequence[Poly], read: Reader) -> Poly:
    """What holds of a quotient by its definition, for a divisor that is plainly at least 1."""
    value = read(ref[1])
    atom = as_quotient(value)
    n, d = atom.numerator, atom.denominator
    need(d.terms and all(c > 0 and all(isinstance(a, Symbol) and a.name[0] not in "$@" for a in m)
                         for m, c in d.terms), f"the divisor {d} must be plainly positive")
    if ref[0] == "lo":
        return n - d * value
    if ref[0] == "hi":
        return d * value + d - 1 - n
    need(ref[0] == "pos", f"unknown fact {ref[0]!r}")
    check_witness(ref[2], n, facts, read)
    return value


def check_division(atom: FloorDiv, value: Poly, low: Any, high: Any, facts: Sequence[Poly], read: Reader) -> None:
    """The quotient is ``value``: what that leaves is at least 0 and less than the divisor."""
    rest = atom.numerator - atom.denominator * value
    check_witness(low, rest, facts, read)
    check_witness(high, atom.denominator - 1 - rest, facts, read)


def as_quotient(poly: Poly) -> FloorDiv:
    """The one quotient that the polynomial is."""
    need(len(poly.terms) == 1 and poly.terms[0][1] == 1 and len(poly.terms[0][0]) == 1, f"{poly} is no quotient")
    atom = poly.terms[0][0][0]
    need(isinstance(atom, FloorDiv), f"{poly} is no quotient")
    assert isinstance(atom, FloorDiv)
    return atom


def _walk(poly: Poly, of: Callable[[FloorDiv | Mod, Poly, Poly], Poly]) -> Poly:
    """The polynomial with quotients and remainders replaced, inner ones first."""
    total = as_poly(0)
    for monomial, factor in poly.terms:
        product = as_poly(factor)
        for atom in monomial:
            if isinstance(atom, Symbol):
                product = product * Poly.atom(atom)
            else:
                product = product * of(atom, _walk(atom.numerator, of), _walk(atom.denominator, of))
        total = total + product
    return total


def without_remainders(poly: Poly) -> Poly:
    """Remainders as ``n - d * (n // d)``."""
    return _walk(poly, lambda atom, n, d: n - d * (n // d) if isinstance(atom, Mod) else n // d)


def swapped(poly: Poly, quotient: FloorDiv, by: Poly) -> Poly:
    """The polynomial with ``by`` in place of the quotient, wherever that stands."""
    return _walk(poly, lambda atom, n, d: by if atom == quotient else n // d)
