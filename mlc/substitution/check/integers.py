"""The checker's own arithmetic: integer polynomials over names, floor quotients and elements of integer tensors, and
the reader of their texts.

Names that begin with a letter are sizes and stand for integers of at least 1; ``@0`` and ``$0`` are variables. A
quotient ``n // d`` is only ever made with a divisor that is at least 1 for all sizes, so that it means what it says
everywhere: nothing is concluded of a division by 0. An element ``i[p, q]`` may be any integer; all that is known of it
is that equal indices make equal ones. Whatever a certificate makes grow is bounded: digits, terms,
degrees, nesting and the multiplications of a whole check.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from mlc.errors import MlcError
from mlc.operators.index import Condition, FloorDiv, Lookup, Poly, Symbol

__all__ = ["Atom", "CertificateError", "Element", "Expr", "Guard", "Quotient", "bounded", "combined", "guard_of",
           "name", "need", "number", "parse", "positive", "quotient", "spend", "translated", "walked"]

#: what one check may look at: terms that are made, multiplied and compared, twenty times what the longest of a shipped
#: certificate takes (39,334); and what an expression may be at most
_WORK, _TERMS, _DEGREE, _DIGITS, _DEPTH, _LETTERS = 800_000, 2_000, 24, 60, 40, 4_000
_LARGEST = 10**_DIGITS
_LEAST = -_LARGEST
_TOKEN = re.compile(r"\s*(?:(\d{1,18})(?!\d)|([A-Za-z_$@][\w$@.]*)|(//|[-+*%(),\[\]]))")


class CertificateError(MlcError):
    """A certificate does not show that its rule holds: the step and the reason."""


def need(true: Any, reason: str) -> None:
    """Raises :class:`CertificateError` where it is not so."""
    if not true:
        raise CertificateError(reason)


class _Budget(threading.local):
    left: float = math.inf  # where nothing is checked: a search for proofs asks for the same arithmetic


_budget = _Budget()


@contextmanager
def bounded(work: int = _WORK) -> Iterator[None]:
    """What is checked inside may look at ``work`` terms."""
    before, _budget.left = _budget.left, work
    try:
        yield
    finally:
        _budget.left = before


def spend(work: int) -> None:
    """Raises :class:`CertificateError` where a check takes more work than any honest one."""
    _budget.left -= work
    if _budget.left < 0:
        raise CertificateError("it takes too long to check")


class Quotient:
    """``floor(numerator / divisor)``; made by :func:`quotient` alone."""

    __slots__ = ("divisor", "key", "numerator")

    def __init__(self, numerator: Expr, divisor: Expr) -> None:
        self.numerator, self.divisor = numerator, divisor
        self.key = f"(({numerator}) // ({divisor}))"
        need(len(self.key) <= _LETTERS, "a quotient is too long")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quotient) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Element:
    """The element of a tensor of integers at indices."""

    __slots__ = ("indices", "key", "tensor")

    def __init__(self, tensor: str, indices: Iterable[Expr]) -> None:
        need(tensor.isidentifier(), "a tensor of integers must be called by a word")
        self.tensor, self.indices = tensor, tuple(indices)
        self.key = f"{tensor}[{', '.join(map(str, self.indices))}]"
        need(len(self.key) <= _LETTERS, "an element is too long")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and self.tensor == other.tensor and self.indices == other.indices

    def __hash__(self) -> int:
        return hash(self.key)


#: a name, a quotient or an element
Atom: TypeAlias = "str | Quotient | Element"
Monomial: TypeAlias = "tuple[Atom, ...]"


def _key(atom: Atom) -> str:
    return atom if isinstance(atom, str) else atom.key


class Expr:
    """A polynomial with integer coefficients; immutable. ``terms`` maps sorted products of atoms to factors, none 0.

    Two are equal if they are the same polynomial in the same atoms. Whoever makes one leaves the ``terms`` to it.
    """

    __slots__ = ("_hash", "_names", "_negative", "_text", "terms")

    def __init__(self, terms: dict[Monomial, int]) -> None:
        self.terms = kept = terms if all(terms.values()) else {m: c for m, c in terms.items() if c}
        self._hash: int | None = None
        self._names: frozenset[str] | None = None
        self._negative: Expr | None = None
        self._text: str | None = None
        spend(1 + len(kept))
        wide = len(kept) > _TERMS
        for monomial, factor in kept.items():
            if not _LEAST < factor < _LARGEST or wide or len(monomial) > _DEGREE:
                raise CertificateError(f"a polynomial must have at most {_TERMS} terms of at most {_DEGREE} factors "
                                       f"and {_DIGITS} digits")

    @property
    def constant(self) -> int | None:
        """The integer that it is whatever the atoms are, else None."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def names(self) -> frozenset[str]:
        """All names in it, those inside quotients and of the indices of elements as well."""
        if self._names is None:
            found: set[str] = set()
            for monomial in self.terms:
                for atom in monomial:
                    if isinstance(atom, str):
                        found.add(atom)
                    else:
                        found.update(*(p.names for p in _inside(atom)))
            self._names = frozenset(found)
        return self._names

    def __add__(self, other: Expr | int) -> Expr:
        return self._plus(number(other) if isinstance(other, int) else other, 1)

    def __neg__(self) -> Expr:
        if self._negative is None:
            self._negative = Expr({m: -c for m, c in self.terms.items()})
            self._negative._negative = self
        return self._negative

    def __sub__(self, other: Expr | int) -> Expr:
        right = number(other) if isinstance(other, int) else other
        spend(1 + len(right.terms))
        return self._plus(right, -1)

    def _plus(self, other: Expr, sign: int) -> Expr:
        if not other.terms:
            spend(1)
            return self
        total = dict(self.terms)
        for monomial, factor in other.terms.items():
            total[monomial] = total.get(monomial, 0) + sign * factor
        return Expr(total)

    def __mul__(self, other: Expr | int) -> Expr:
        right = number(other) if isinstance(other, int) else other
        spend(1 + len(self.terms) * len(right.terms))
        if self.terms == _ONE or right.terms == _ONE:
            return right if self.terms == _ONE else self
        total: dict[Monomial, int] = {}
        for one, a in self.terms.items():
            for two, b in right.terms.items():
                monomial = tuple(sorted(one + two, key=_key)) if one and two else one or two
                total[monomial] = total.get(monomial, 0) + a * b
        return Expr(total)

    def substituted(self, values: Mapping[str, Expr]) -> Expr:
        """With polynomials in place of names, inside quotients and elements as well."""
        if self.names.isdisjoint(values):
            return self

        def of(atom: Atom) -> Expr | None:
            if isinstance(atom, str):
                return values.get(atom)
            parts = _inside(atom)
            if all(p.names.isdisjoint(values) for p in parts):
                return None
            return _with(atom, [p.substituted(values) for p in parts])

        return _rebuilt(self, of)

    def renamed(self, names: Mapping[str, str]) -> Expr:
        """With names that nothing else has in place of names."""
        if self.names.isdisjoint(names):
            return self
        spend(1 + len(self.terms))
        total: dict[Monomial, int] = {}
        for monomial, factor in self.terms.items():
            plain = tuple(sorted([names.get(a, a) for a in monomial if isinstance(a, str)]))
            if len(plain) < len(monomial):
                return self.substituted({old: name(new) for old, new in names.items()})
            total[plain] = factor
        return Expr(total)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def ordered(self) -> list[tuple[Monomial, int]]:
        """The terms in the order in which certificates count them: by degree, then by their texts."""
        return sorted(self.terms.items(), key=lambda term: (len(term[0]), [_key(a) for a in term[0]]))

    def __str__(self) -> str:
        if self._text is None:
            self._text = self._written()
        return self._text

    def _written(self) -> str:
        parts = []
        for monomial, factor in self.ordered():
            words = [_key(a) for a in monomial]
            if abs(factor) != 1 or not words:
                words.insert(0, str(abs(factor)))
            parts.append(("-" if factor < 0 else "+") + "*".join(words))
        return "".join(parts).removeprefix("+") or "0"


def combined(parts: Iterable[tuple[int, Expr]]) -> Expr:
    """The sum of multiples of polynomials."""
    total: dict[Monomial, int] = {}
    for factor, expr in parts:
        spend(1 + len(expr.terms))
        need(_LEAST < factor < _LARGEST, "a factor of a witness has too many digits")
        for monomial, c in expr.terms.items():
            total[monomial] = total.get(monomial, 0) + factor * c
    return Expr(total)


#: the terms of 1
_ONE: dict[Monomial, int] = {(): 1}


@lru_cache(maxsize=4096)
def number(value: int) -> Expr:
    return Expr({(): value})


@lru_cache(maxsize=4096)
def name(text: str) -> Expr:
    return Expr({(text,): 1})


def _rebuilt(expr: Expr, of: Callable[[Atom], Expr | None]) -> Expr:
    """With ``of`` each atom in its place; the atom itself where that is None."""
    work = 1 + len(expr.terms)
    total: dict[Monomial, int] = {}
    for monomial, factor in expr.terms.items():
        product: Expr | None = None
        kept: Monomial = ()
        for atom in monomial:
            found = of(atom)
            if found is None:
                kept += (atom,)
            else:
                product = found if product is None else product * found
        if product is None:
            total[monomial] = total.get(monomial, 0) + factor
            continue
        work += 1 + len(product.terms)
        for one, c in product.terms.items():
            both = tuple(sorted(kept + one, key=_key)) if kept and one else kept or one
            total[both] = total.get(both, 0) + factor * c
    spend(work)
    return Expr(total)


def _inside(atom: Quotient | Element) -> tuple[Expr, ...]:
    """The polynomials that an atom is of."""
    return (atom.numerator, atom.divisor) if isinstance(atom, Quotient) else atom.indices


def _with(atom: Quotient | Element, parts: Sequence[Expr]) -> Expr:
    """The atom of other polynomials."""
    return quotient(*parts) if isinstance(atom, Quotient) else Expr({(Element(atom.tensor, parts),): 1})


def walked(expr: Expr, of: Callable[[Quotient], Expr | None]) -> Expr:
    """With ``of`` each quotient in its place, or the quotient itself where that is None; inner ones first."""
    def atom(a: Atom) -> Expr | None:
        if isinstance(a, str):
            return None
        found = of(a) if isinstance(a, Quotient) else None
        return _with(a, [walked(p, of) for p in _inside(a)]) if found is None else found

    return expr if all(isinstance(a, str) for m in expr.terms for a in m) else _rebuilt(expr, atom)


@lru_cache(maxsize=4096)
def positive(expr: Expr) -> bool:
    """Whether it is plainly at least 1: a polynomial in sizes with no negative coefficient over sizes less 1."""
    if any(not isinstance(a, str) or a[0] in "$@" for m in expr.terms for a in m):
        return False
    if all(c > 0 for c in expr.terms.values()):
        return bool(expr.terms)
    above = expr.substituted({n: name(n) + 1 for n in expr.names})
    return all(c > 0 for c in above.terms.values()) and above.terms.get((), 0) >= 1


def quotient(numerator: Expr, divisor: Expr) -> Expr:
    """``numerator // divisor``, rounded down, of which a divisor of one term takes its multiples out:
    ``(d*q + r) // d = q + r // d``; one of several does so where nothing is left. Refuses a divisor that is not plainly
    at least 1."""
    spend(1)
    return _quotient(numerator, divisor)


@lru_cache(maxsize=4096)
def _quotient(numerator: Expr, divisor: Expr) -> Expr:
    if not positive(divisor):
        raise CertificateError(f"the divisor {str(divisor)[:60]} must be plainly at least 1")
    if len(divisor.terms) > 1:
        exact = _exact(numerator, divisor)
        return exact if exact is not None else Expr({(Quotient(numerator, divisor),): 1})
    whole: dict[Monomial, int] = {}
    rest = dict(numerator.terms)
    [(atoms, unit)] = divisor.terms.items()
    for monomial, factor in numerator.terms.items():
        left = _without(monomial, atoms)
        if left is not None:
            whole[left], rest[monomial] = divmod(factor, unit)
    left_over = Expr(rest)
    if not left_over.terms:
        return Expr(whole)
    return Expr(whole) + Expr({(Quotient(left_over, divisor),): 1})


def _exact(numerator: Expr, divisor: Expr) -> Expr | None:
    """The polynomial whose product with the divisor is ``numerator``, by long division, or None."""
    def leading(expr: Expr) -> tuple[Monomial, int]:
        return min(expr.terms.items(), key=lambda term: (-len(term[0]), [_key(a) for a in term[0]]))

    (lead, unit), found, rest = leading(divisor), number(0), numerator
    while rest.terms:
        monomial, factor = leading(rest)
        left = _without(monomial, lead)
        if left is None or factor % unit:
            return None
        step = Expr({left: factor // unit})
        found, rest = found + step, rest - step * divisor
    return found


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in part:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


# --- what comes from outside -------------------------------------------------------------------------------------


def parse(text: Any, values: Mapping[str, Expr], sizes: Iterable[str]) -> Expr:
    """What a text says: integers, names, ``+ - * // %`` and parentheses. A name must be in ``values`` or a size."""
    if isinstance(text, int):
        return number(int(text))
    need(isinstance(text, str) and len(text) <= _LETTERS, f"a text must have at most {_LETTERS} letters")
    if text in values:
        return values[text]
    reader = _Reader(_tokens(text), values, frozenset(sizes))
    value = reader.sum(0)
    need(reader.at == len(reader.tokens), f"{text[:60]!r} is no integer expression")
    return value


@lru_cache(maxsize=4096)
def _tokens(text: str) -> tuple[Any, ...]:
    """Digits, a word or a sign each."""
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise CertificateError(f"{text[:60]!r} is no integer expression")
        tokens.append(found.groups())
        place = found.end()
    return tuple(tokens)


class _Reader:
    def __init__(self, tokens: Sequence[Any], values: Mapping[str, Expr], sizes: frozenset[str]) -> None:
        self.tokens, self.values, self.sizes, self.at = tokens, values, sizes, 0

    def sign(self, *wanted: str) -> str | None:
        """The next token if it is one of ``wanted``, which is then read."""
        found = self.tokens[self.at][2] if self.at < len(self.tokens) else None
        if found not in wanted:
            return None
        self.at += 1
        return str(found)

    def sum(self, depth: int) -> Expr:
        need(depth <= _DEPTH, "parentheses stand too deep inside each other")
        value = self.product(depth)
        while sign := self.sign("+", "-"):
            value = value + self.product(depth) if sign == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Expr:
        value = self.factor(depth)
        while sign := self.sign("*", "//", "%"):
            right = self.factor(depth)
            value = (value * right if sign == "*" else quotient(value, right) if sign == "//"
                     else value - right * quotient(value, right))
        return value

    def factor(self, depth: int) -> Expr:
        if sign := self.sign("+", "-"):
            need(depth <= _DEPTH, "there are too many signs")
            value = self.factor(depth + 1)
            return value if sign == "+" else -value
        if self.sign("("):
            value = self.sum(depth + 1)
            need(self.sign(")"), "a parenthesis is not closed")
            return value
        need(self.at < len(self.tokens), "a text must not end with an operator")
        digits, word, _ = self.tokens[self.at]
        self.at += 1
        if digits:
            return number(int(digits))
        if word and self.sign("["):
            return self.element(word, depth)
        if word in self.values:
            return self.values[word]
        if word not in self.sizes:
            raise CertificateError(f"{word} is no variable and no size here")
        return name(word)

    def element(self, tensor: str, depth: int) -> Expr:
        """What follows ``tensor[``."""
        indices: list[Expr] = []
        while not self.sign("]"):
            need(not indices or self.sign(","), "indices are separated by commas")
            indices.append(self.sum(depth + 1))
        return Expr({(Element(tensor, indices),): 1})


@lru_cache(maxsize=1 << 14)
def translated(poly: Poly) -> Expr:
    """A polynomial of the specifications; a remainder ``n % d`` is ``n - d * (n // d)``."""
    plain: dict[Monomial, int] = {}
    others: list[tuple[int, Expr]] = []
    for monomial, factor in poly.terms:
        names = tuple(sorted([atom.name for atom in monomial if isinstance(atom, Symbol)]))
        if len(names) == len(monomial):
            plain[names] = plain.get(names, 0) + factor
            continue
        product = Expr({names: 1})
        for atom in monomial:
            if isinstance(atom, Lookup):
                product = product * Expr({(Element(atom.tensor, map(translated, atom.indices)),): 1})
            elif not isinstance(atom, Symbol):
                n, d = translated(atom.numerator), translated(atom.denominator)
                product = product * (quotient(n, d) if isinstance(atom, FloorDiv) else n - d * quotient(n, d))
        others.append((factor, product))
    return combined([*others, (1, Expr(plain))]) if others else Expr(plain)


class Guard(NamedTuple):
    """``expr >= 0`` (relation ``>=``) or ``expr == 0`` (``==``)."""

    expr: Expr
    relation: str

    def __str__(self) -> str:
        return f"{self.expr} {self.relation} 0"


def guard_of(condition: Condition) -> Guard:
    """A condition of the specifications."""
    return Guard(translated(condition.poly), condition.relation)
