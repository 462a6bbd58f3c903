"""Sizes and indices: integer polynomials over named symbols, with floor division, remainder and elements of integer
tensors as further atoms.

A size such as ``2*c + 1`` and an index such as ``y*stride + r - pad`` are both a :class:`Poly`. Equal polynomials are
equal objects in the sense of ``==`` and hash alike, so that they serve as keys; what is equal only under conditions is
for the prover.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add, mul
from typing import Any, TypeAlias

__all__ = ["LOOKUP", "Atom", "Condition", "FloorDiv", "Lookup", "Mod", "Poly", "Symbol", "as_poly", "at_least",
           "divides", "equal", "integer", "less"]

#: among the values of symbols, what gives elements of integer tensors: ``(tensor, indices) -> integers``
LOOKUP = "[]"


@dataclass(frozen=True, order=True)
class Symbol:
    """A named integer: a size (at least 1) or an index variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FloorDiv:
    """``floor(numerator / denominator)``, the denominator being at least 1."""

    numerator: Poly
    denominator: Poly

    def __str__(self) -> str:
        return f"(({self.numerator}) // ({self.denominator}))"


@dataclass(frozen=True)
class Mod:
    """``numerator - denominator * floor(numerator / denominator)``, the denominator being at least 1."""

    numerator: Poly
    denominator: Poly

    def __str__(self) -> str:
        return f"(({self.numerator}) % ({self.denominator}))"


@dataclass(frozen=True)
class Lookup:
    """The element of a tensor of integers at indices: any integer, of which equal indices make equal ones."""

    tensor: str
    indices: tuple[Poly, ...]

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(map(str, self.indices))}]"


Atom: TypeAlias = Symbol | FloorDiv | Mod | Lookup
#: atoms with repetition, in the order of their texts
Monomial: TypeAlias = tuple[Atom, ...]


class Poly:
    """An integer polynomial; immutable, hashable, with ``+ - * // %``."""

    __slots__ = ("_hash", "_symbols", "_text", "terms")

    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        kept = [(monomial, factor) for monomial, factor in terms.items() if factor]
        if len(kept) > 1:
            kept.sort(key=_place)
        self.terms = tuple(kept)
        self._hash: int | None = None
        self._symbols: frozenset[str] | None = None
        self._text: str | None = None

    @staticmethod
    @lru_cache(maxsize=4096)
    def symbol(name: str) -> Poly:
        return Poly({(Symbol(name),): 1})

    @staticmethod
    def atom(atom: Atom) -> Poly:
        return Poly({(atom,): 1})

    @property
    def constant(self) -> int | None:
        """The integer that this is, None if it depends on a symbol."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def symbols(self) -> frozenset[str]:
        """The names of all symbols, those inside divisions and of the indices of elements as well."""
        if self._symbols is None:
            found: set[str] = set()
            for monomial, _ in self.terms:
                for atom in monomial:
                    if isinstance(atom, Symbol):
                        found.add(atom.name)
                    elif isinstance(atom, Lookup):
                        found.update(*(index.symbols for index in atom.indices))
                    else:
                        found |= atom.numerator.symbols | atom.denominator.symbols
            self._symbols = frozenset(found)
        return self._symbols

    def __add__(self, other: Poly | int) -> Poly:
        return self._plus(as_poly(other), 1)

    def _plus(self, other: Poly, sign: int) -> Poly:
        if not other.terms:
            return self
        total = dict(self.terms)
        for monomial, factor in other.terms:
            total[monomial] = total.get(monomial, 0) + sign * factor
        return Poly(total)

    def __mul__(self, other: Poly | int) -> Poly:
        total: dict[Monomial, int] = {}
        terms = as_poly(other).terms
        if terms == _ONE:
            return self
        for left, a in self.terms:
            for right, b in terms:
                monomial = tuple(sorted(left + right, key=_word)) if left and right else left or right
                total[monomial] = total.get(monomial, 0) + a * b
        return Poly(total)

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms})

    def __sub__(self, other: Poly | int) -> Poly:
        return self._plus(as_poly(other), -1)

    def __rsub__(self, other: int) -> Poly:
        return as_poly(other) - self

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: Poly | int) -> Poly:
        """The quotient, rounded down; the divisor is taken to be at least 1."""
        divisor = as_poly(other)
        if divisor.constant == 1:
            return self
        quotient, rest = self._multiples(divisor)
        if rest.constant is not None and divisor.constant is not None:
            return quotient + rest.constant // divisor.constant
        return quotient + Poly.atom(FloorDiv(rest, divisor)) if rest.terms else quotient

    def __mod__(self, other: Poly | int) -> Poly:
        """The remainder, from 0 to the divisor less one; the divisor is taken to be at least 1."""
        divisor = as_poly(other)
        if divisor.constant == 1:
            return as_poly(0)
        _, rest = self._multiples(divisor)
        if rest.constant is not None and divisor.constant is not None:
            return as_poly(rest.constant % divisor.constant)
        return Poly.atom(Mod(rest, divisor)) if rest.terms else rest

    def _multiples(self, divisor: Poly) -> tuple[Poly, Poly]:
        """``quotient, rest`` with ``self == quotient * divisor + rest``: what a divisor of one term takes out, and all
        or nothing for a divisor of several."""
        if len(divisor.terms) != 1:
            exact = self._exact(divisor)
            return (as_poly(0), self) if exact is None else (exact, as_poly(0))
        if divisor.terms[0][1] < 1:
            return as_poly(0), self
        (atoms, unit), quotient, rest = divisor.terms[0], {}, {}
        for monomial, factor in self.terms:
            left = list(monomial)
            for atom in atoms:
                if atom not in left:
                    rest[monomial] = factor
                    break
                left.remove(atom)
            else:
                quotient[tuple(left)], rest[monomial] = divmod(factor, unit)
        return Poly(quotient), Poly(rest)

    def _exact(self, divisor: Poly) -> Poly | None:
        """The polynomial whose product with the divisor this is, None if there is none: long division, whose leading
        terms are those of the highest degree and then of the first texts."""
        if not divisor.terms:
            return None
        (lead, unit), quotient, rest = _leading(divisor), as_poly(0), self
        while rest.terms:
            monomial, factor = _leading(rest)
            left = list(monomial)
            for atom in lead:
                if atom not in left:
                    return None
                left.remove(atom)
            if factor % unit:
                return None
            step = Poly({tuple(left): factor // unit})
            quotient, rest = quotient + step, rest - step * divisor
        return quotient

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The value where symbols have ``values``: integers, or integer arrays that broadcast; :data:`LOOKUP` among
        them gives elements of tensors."""

        def of(atom: Atom) -> Any:
            if isinstance(atom, Symbol):
                return values[atom.name]
            if isinstance(atom, Lookup):
                return values[LOOKUP](atom.tensor, [index.evaluate(values) for index in atom.indices])
            numerator, denominator = atom.numerator.evaluate(values), atom.denominator.evaluate(values)
            return numerator // denominator if isinstance(atom, FloorDiv) else numerator % denominator

        return reduce(add, (reduce(mul, map(of, m), c) for m, c in self.terms), 0)

    def substitute(self, values: Mapping[str, Poly]) -> Poly:
        """The polynomial with symbols replaced by polynomials."""
        if not values or self.symbols.isdisjoint(values):
            return self

        def of(atom: Atom) -> Poly:
            if isinstance(atom, Symbol):
                return as_poly(values[atom.name])
            if isinstance(atom, Lookup):
                return Poly.atom(Lookup(atom.tensor, tuple(index.substitute(values) for index in atom.indices)))
            numerator, denominator = atom.numerator.substitute(values), atom.denominator.substitute(values)
            return numerator // denominator if isinstance(atom, FloorDiv) else numerator % denominator

        total: dict[Monomial, int] = {}
        for monomial, factor in self.terms:
            kept = tuple(a for a in monomial if isinstance(a, Symbol) and a.name not in values)
            if len(kept) == len(monomial):
                total[monomial] = total.get(monomial, 0) + factor
                continue
            product = reduce(mul, (of(a) for a in monomial if not isinstance(a, Symbol) or a.name in values))
            for one, c in product.terms:
                both = tuple(sorted(kept + one, key=_word)) if kept and one else kept or one
                total[both] = total.get(both, 0) + factor * c
        return Poly(total)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.constant == other
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.terms)
        return self._hash

    def __str__(self) -> str:
        if self._text is None:
            self._text = self._written()
        return self._text

    def _written(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, factor in self.terms:
            names = [str(atom) for atom in monomial]
            if abs(factor) != 1 or not names:
                names.insert(0, str(abs(factor)))
            parts.append(("-" if factor < 0 else "+") + "*".join(names))
        text = "".join(parts)
        return text.removeprefix("+")

    __repr__ = __str__


#: the terms of 1
_ONE: tuple[tuple[Monomial, int], ...] = (((), 1),)


def _word(atom: Atom) -> str:
    return atom.name if isinstance(atom, Symbol) else str(atom)


def _place(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    """In what order terms stand."""
    return len(term[0]), list(map(_word, term[0]))


def _leading(poly: Poly) -> tuple[Monomial, int]:
    return min(poly.terms, key=lambda term: (-len(term[0]), list(map(_word, term[0]))))


def integer(value: Poly | int) -> int:
    """A size that is a number."""
    return value if isinstance(value, int) else int(value.evaluate({}))


def as_poly(value: Poly | int) -> Poly:
    """An integer as a constant polynomial; polynomials as they are."""
    return value if isinstance(value, Poly) else _number(int(value))


@lru_cache(maxsize=4096)
def _number(value: int) -> Poly:
    return Poly({(): value})


@dataclass(frozen=True)
class Condition:
    """``poly >= 0`` (relation ``>=``) or ``poly == 0`` (``==``)."""

    poly: Poly
    relation: str

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Whether it holds, elementwise where values are arrays."""
        value = self.poly.evaluate(values)
        return value == 0 if self.relation == "==" else value >= 0

    def substitute(self, values: Mapping[str, Poly]) -> Condition:
        return Condition(self.poly.substitute(values), self.relation)

    def __str__(self) -> str:
        return f"{self.poly} {self.relation} 0"


def equal(a: Poly | int, b: Poly | int) -> Condition:
    return Condition(as_poly(a) - b, "==")


def at_least(a: Poly | int, b: Poly | int) -> Condition:
    return Condition(as_poly(a) - b, ">=")


def less(a: Poly | int, b: Poly | int) -> Condition:
    return Condition(as_poly(b) - a - 1, ">=")


def divides(divisor: Poly | int, dividend: Poly | int) -> Condition:
    """The divisor, at least 1, divides the dividend."""
    return Condition(as_poly(dividend) % divisor, "==")
