"""Witnesses that a polynomial is at least 0, and the quotients that they resolve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, TypeAlias

from mlc.substitution.check.integers import CertificateError, Expr, Guard, Quotient, combined, need, number, walked
from mlc.substitution.codec import parse_fraction

__all__ = ["Reader", "as_quotient", "check_division", "check_guard", "check_witness", "swapped"]

#: what reads the texts of a certificate
Reader: TypeAlias = Callable[[Any], Expr]
#: products of a witness, factors of one, and witnesses inside each other
_PRODUCTS, _FACTORS, _DEPTH = 400, 12, 8


def check_guard(guard: Guard, witnesses: Sequence[Any], facts: Sequence[Expr], read: Reader) -> None:
    """One witness shows ``>=``, two show ``==``."""
    goals = [guard.expr] if guard.relation == ">=" else [guard.expr, -guard.expr]
    if len(witnesses) != len(goals):
        raise CertificateError(f"{guard} must have {len(goals)} witnesses, but has {len(witnesses)}")
    for goal, witness in zip(goals, witnesses, strict=True):
        check_witness(witness, goal, facts, read)


def check_witness(witness: Sequence[Any], goal: Expr | None, facts: Sequence[Expr], read: Reader, depth: int = 0
                  ) -> None:
    """Shows ``goal >= 0``; without a goal, that the facts contradict each other.

    Products of what is at least 0, with positive factors, add up to the goal; or to -1, with the opposite of the goal,
    ``-goal - 1 >= 0``, among them. The second is a contradiction, so that the goal holds: integers lie 1 apart.
    """
    need(len(witness) <= _PRODUCTS and depth <= _DEPTH, "a witness is too long")
    if not witness and goal is not None and not goal.terms:
        return
    factors = [parse_fraction(factor) for factor, _ in witness]
    scale = lcm(*(f.denominator for f in factors))
    parts, opposite = [], False
    for factor, (_, refs) in zip(factors, witness, strict=True):
        need(factor.numerator > 0, "the factors of a witness must be positive")
        if len(refs) > _FACTORS:
            raise CertificateError(f"a product of a witness must have at most {_FACTORS} factors")
        product = number(1)
        for ref in refs:
            if ref == -1 and goal is not None:
                opposite, fact = True, -goal - 1
            elif isinstance(ref, int):
                need(0 <= ref < len(facts), "a witness must refer to facts")
                fact = facts[ref]
            else:
                fact = _axiom(ref, facts, read, depth)
            product = product * fact
        parts.append((factor.numerator * (scale // factor.denominator), product))
    total = parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else combined(parts)
    direct = goal is not None and not opposite and total == (goal if scale == 1 else goal * scale)
    if not direct and total != number(-scale):
        raise CertificateError(f"a witness of {goal} >= 0 adds up to something else")


def _axiom(ref: Sequence[Any], facts: Sequence[Expr], read: Reader, depth: int) -> Expr:
    """What holds of a quotient by its definition; every divisor is at least 1."""
    value = read(ref[1])
    atom = as_quotient(value)
    n, d = atom.numerator, atom.divisor
    if ref[0] == "lo":
        return n - d * value
    if ref[0] == "hi":
        return d * value + d - 1 - n
    need(ref[0] == "pos", f"{str(ref[0])[:20]!r} is no fact about quotients")
    check_witness(ref[2], n, facts, read, depth + 1)
    return value


def check_division(atom: Quotient, value: Expr, low: Any, high: Any, facts: Sequence[Expr], read: Reader) -> None:
    """The quotient is ``value``: what that leaves is at least 0 and less than the divisor."""
    rest = atom.numerator - atom.divisor * value
    check_witness(low, rest, facts, read)
    check_witness(high, atom.divisor - 1 - rest, facts, read)


def as_quotient(expr: Expr) -> Quotient:
    """The one quotient that the polynomial is."""
    [(monomial, factor)] = expr.terms.items() if len(expr.terms) == 1 else [((), 0)]
    if factor != 1 or len(monomial) != 1 or not isinstance(monomial[0], Quotient):
        raise CertificateError(f"{str(expr)[:60]} must be a quotient")
    return monomial[0]


def swapped(expr: Expr, which: Quotient, by: Expr) -> Expr:
    """With ``by`` in place of the quotient, wherever that stands."""
    return walked(expr, lambda atom: by if atom == which else None)
