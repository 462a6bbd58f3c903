"""Entailment of polynomial inequalities over the integers, with witnesses that can be checked by multiplication.

A witness that ``goal >= 0`` follows from facts ``f_i >= 0`` is a list of ``[factor, [i, ...]]`` with positive factors:
the sum of ``factor * f_i * ...`` is the goal itself, or it is -1 with ``1 + goal <= 0`` (reference -1) among the facts.
The search eliminates, one after the other, the monomials that keep the goal from being a sum of products of facts
(Handelman's representation); what it does not find is not claimed. References other than integers are to what holds
of a quotient ``q = n // d`` by definition: ``["lo", q]`` is ``n - d*q >= 0``, ``["hi", q]`` is ``d*q + d - 1 - n >= 0``
and ``["pos", q, witness that n >= 0]`` is ``q >= 0``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from mlc.operators.index import LOOKUP, Condition, FloorDiv, Lookup, Mod, Poly, Symbol

__all__ = ["Facts", "Witness", "quotients", "without_remainders"]

Witness: TypeAlias = "list[list[Any]]"
#: polynomial over shifted symbols: sorted numbers of symbols → factor
Shifted: TypeAlias = "dict[tuple[int, ...], Fraction | int]"

_NODES, _DEPTH, _POINTS = (25, 150), 14, 384
#: terms and degree at which a branch of the search is given up
_TERMS, _DEGREE = 40, 5
#: products that linear programming chooses from
_COLUMNS = 700


def without_remainders(poly: Poly) -> Poly:
    """``n % d`` written as ``n - d * (n // d)`` everywhere."""
    if not any(not isinstance(a, Symbol) for m, _ in poly.terms for a in m):
        return poly
    total = Poly({})
    for monomial, factor in poly.terms:
        product = Poly({(): factor})
        for atom in monomial:
            if isinstance(atom, Symbol):
                product = product * Poly.atom(atom)
            elif isinstance(atom, Lookup):
                product = product * Poly.atom(Lookup(atom.tensor, tuple(map(without_remainders, atom.indices))))
            else:
                n, d = without_remainders(atom.numerator), without_remainders(atom.denominator)
                product = product * (n - d * (n // d) if isinstance(atom, Mod) else n // d)
        total = total + product
    return total


def quotients(polys: Iterable[Poly]) -> list[FloorDiv]:
    """All quotients in the polynomials, inner ones first."""
    found: dict[FloorDiv, None] = {}

    def visit(poly: Poly) -> None:
        for monomial, _ in poly.terms:
            for atom in monomial:
                if isinstance(atom, FloorDiv):
                    visit(atom.numerator)
                    visit(atom.denominator)
                    found[atom] = None
                elif isinstance(atom, Lookup):
                    for index in atom.indices:
                        visit(index)

    for poly in polys:
        visit(poly)
    return list(found)


class Facts:
    """Inequalities ``poly >= 0`` between integers, numbered in order."""

    def __init__(self, polys: Sequence[Poly]) -> None:
        self.polys = tuple(polys)
        self._numbers: dict[Any, int] = {}
        self._lower: dict[int, tuple[int, Any]] = {}
        self._known: dict[tuple[Poly, bool], Witness | None] = {}
        self._samples: dict[str, Any] | None = None
        for place, poly in enumerate(self.polys):
            self._bound(poly, place)
        self._extra: list[tuple[Poly, Any]] = []
        self._quotients: set[FloorDiv] = set()
        self._add_quotients(self.polys)

    def _bound(self, poly: Poly, place: Any) -> None:
        """Takes note of ``symbol - constant >= 0``."""
        terms = poly.terms
        if terms and len(terms[-1][0]) == 1 and terms[-1][1] == 1 and len(terms) <= 2:
            if len(terms) == 2 and terms[0][0]:
                return
            number = self._numbers.setdefault(terms[-1][0][0], len(self._numbers))
            low = -terms[0][1] if len(terms) == 2 else 0
            if number not in self._lower or low > self._lower[number][0]:
                self._lower[number] = (low, place)

    def _add_quotients(self, polys: Iterable[Poly]) -> None:
        new = [q for q in quotients(polys) if q not in self._quotients]
        for q in new:
            self._quotients.add(q)
            n, d, value = q.numerator, q.denominator, Poly.atom(q)
            if not _plainly_positive(d):
                continue
            self._extra += [(n - d * value, ["lo", value]), (d * value + d - 1 - n, ["hi", value])]
            witness = self._direct(self._shift(n), [], _NODES[0])
            if witness is not None:
                number = self._numbers.setdefault(q, len(self._numbers))
                self._lower.setdefault(number, (0, ["pos", value, witness]))
        if new or not hasattr(self, "_usable"):
            facts = [*((p, i) for i, p in enumerate(self.polys)), *self._extra]
            lower = {str(ref) for _, ref in self._lower.values()}
            self._usable = [(self._shift(p), ref) for p, ref in facts if str(ref) not in lower]

    def _shift(self, poly: Poly) -> Shifted:
        """Substitute every symbol with a lower bound by that bound plus a new nonnegative symbol."""
        total: Shifted = {}
        for monomial, factor in poly.terms:
            parts: Shifted = {(): factor}
            for atom in monomial:
                number = self._numbers.setdefault(atom, len(self._numbers))
                low = self._lower.get(number, (0, None))[0]
                grown: Shifted = {}
                for names, c in parts.items():
                    key = tuple(sorted((*names, number)))
                    grown[key] = grown.get(key, 0) + c
                    if low:
                        grown[names] = grown.get(names, 0) + c * low
                parts = grown
            for names, c in parts.items():
                total[names] = total.get(names, 0) + c
        return {m: c for m, c in total.items() if c}

    def entails(self, goal: Poly) -> Witness | None:
        """A witness of ``goal >= 0``, or None where none was found."""
        if goal.constant is not None and goal.constant >= 0:
            return [[str(goal.constant), []]] if goal.constant else []
        key = (goal, True)
        if key not in self._known:
            self._known[key] = None if self.refuted(goal) else self._entails(goal)
        return self._known[key]

    def holds(self, condition: Condition) -> list[Witness] | None:
        """Witnesses of a condition: one for ``>=``, two for ``==``."""
        wanted = [condition.poly] if condition.relation == ">=" else [condition.poly, -condition.poly]
        found = []
        for goal in wanted:
            witness = self.entails(goal)
            if witness is None:
                return None
            found.append(witness)
        return found

    def tightened(self, part: Poly, size: Poly, place: int) -> Witness | None:
        """A witness of ``part >= 0`` from fact number ``place``, which is ``size*part + rest >= 0``, where
        ``rest < size``: else ``(-part - 1)*size + (size*part + rest) + (size - 1 - rest)`` is -1."""
        if (part, True) in self._known:
            return self._known[part, True]
        low = next((i for i, p in enumerate(self.polys) if p == size - 1), None)
        rest = self.entails(size - 1 - (self.polys[place] - size * part))
        if low is None or rest is None or any(ref == -1 for _, refs in rest for ref in refs):
            return None
        found: Witness = [["1", [-1, low]], ["1", [-1]], ["1", [place]], *rest]
        self._known[part, True] = found
        return found

    def factors(self, product: Poly) -> list[tuple[int, list[Any]]] | None:
        """A product of sizes as a sum of products of facts ``size - low >= 0``: factors and references. None for what
        is no such product."""
        found: list[tuple[int, list[Any]]] = [(1, [])]
        if len(product.terms) != 1 or product.terms[0][1] != 1:
            return None
        for atom in product.terms[0][0]:
            if not isinstance(atom, Symbol) or atom.name[0] in "$@" or atom not in self._numbers:
                return None
            low, ref = self._lower.get(self._numbers[atom], (0, None))
            if low < 1:
                return None
            found = [(factor * more, refs + added) for factor, refs in found for more, added in ((1, [ref]), (low, []))]
        return found

    def contradictory(self) -> Witness | None:
        """A witness that no integers satisfy the facts: a sum of products of them that is -1."""
        key = (Poly({}), False)
        if key not in self._known:
            sample = self.samples()
            self._known[key] = None if sample is not None else self._search({(): -1}, [])
        return self._known[key]

    def _entails(self, goal: Poly) -> Witness | None:
        self._add_quotients([goal])
        shifted, negated = self._shift(goal), self._shift(-goal - 1)
        found = self._direct(shifted, [], _NODES[0]) or self._direct({(): -1}, [(negated, -1)], _NODES[0])
        return found or self._linear(shifted, []) or self._search({(): -1}, [(negated, -1)])

    def _search(self, goal: Shifted, more: list[tuple[Shifted, Any]]) -> Witness | None:
        """Quick ways first; a witness is never empty here."""
        return (self._direct(goal, more, _NODES[0]) or self._linear(goal, more)
                or self._direct(goal, more, _NODES[1]))

    def _linear(self, goal: Shifted, more: list[tuple[Shifted, Any]]) -> Witness | None:
        """A sum of facts, each once multiplied by at most one symbol, by exact linear programming."""
        usable = [*more, *self._usable]
        columns: list[tuple[Shifted, list[Any]]] = [(fact, [ref]) for fact, ref in usable]
        nonlinear = sorted({s for fact, _ in [(goal, 0), *usable] for m in fact if len(m) > 1 for s in m})
        for symbol in [s for s in nonlinear if s in self._lower][:6]:
            columns += [({tuple(sorted((*m, symbol))): c for m, c in fact.items()}, [ref, self._lower[symbol][1]])
                        for fact, ref in usable if len(fact) <= 6 and max(map(len, fact), default=0) <= 2]
        for monomial in dict.fromkeys(m for fact, _ in columns for m in fact):
            if all(s in self._lower for s in monomial):
                columns.append(({monomial: 1}, [self._lower[s][1] for s in monomial]))
        if len(columns) > _COLUMNS:
            return None
        factors = _combination([fact for fact, _ in columns], goal)
        return None if factors is None else [[str(value), columns[k][1]] for k, value in sorted(factors.items())]

    def _direct(self, goal: Shifted, more: list[tuple[Shifted, Any]], nodes: int) -> Witness | None:
        usable = [*more, *getattr(self, "_usable", [])]
        index: dict[tuple[int, ...], list[tuple[int, Fraction | int]]] = {}
        for place, (fact, _) in enumerate(usable):
            for monomial, factor in fact.items():
                index.setdefault(monomial, []).append((place, factor))
        budget = [nodes]
        seen: set[frozenset[tuple[tuple[int, ...], Any]]] = set()

        def bad(poly: Shifted) -> list[tuple[int, ...]]:
            return [m for m, c in poly.items() if c < 0 or any(s not in self._lower for s in m)]

        def search(poly: Shifted, wrong: list[tuple[int, ...]], depth: int) -> list[Any] | None:
            if not wrong:
                return [[str(c), [self._lower[s][1] for s in m]] for m, c in poly.items()]
            state = frozenset(poly.items())
            if depth == 0 or budget[0] <= 0 or state in seen:
                return None
            seen.add(state)
            budget[0] -= 1
            monomial = max(wrong, key=lambda m: (len(m), m))
            options: list[Any] = []
            for part, rest in _divisors(monomial):
                if any(s not in self._lower for s in rest):
                    continue
                for place, factor in index.get(part, ()):
                    if (factor < 0) == (poly[monomial] < 0):
                        scale = _quotient(poly[monomial], factor)
                        left = dict(poly)
                        for names, c in usable[place][0].items():
                            key = tuple(sorted(names + rest))
                            value = left.get(key, 0) - scale * c
                            if value:
                                left[key] = value
                            else:
                                left.pop(key, None)
                        if len(left) > _TERMS or any(len(m) > _DEGREE for m in left):
                            continue
                        wrong_left = bad(left)
                        options.append((len(wrong_left), len(left), len(options), scale, place, rest, left, wrong_left))
            for *_, scale, place, rest, left, wrong_left in sorted(options, key=lambda o: o[:3])[:8]:
                found = search(left, wrong_left, depth - 1)
                if found is not None:
                    refs = [usable[place][1], *(self._lower[s][1] for s in rest)]
                    return [[str(scale), refs], *found]
            return None

        return search(goal, bad(goal), _DEPTH)

    def refuted(self, goal: Poly) -> bool:
        """Whether a sampled point satisfies the facts but not the goal."""
        sample = self.samples()
        if sample is None or not goal.symbols <= sample.keys():
            return False
        return bool(np.any(goal.evaluate({**sample, LOOKUP: _drawn}) < 0))

    def samples(self) -> Mapping[str, Any] | None:
        """Points that satisfy all facts, as arrays by symbol; None if random search met none."""
        if self._samples is None:
            self._samples = _sampled(self.polys)
        return self._samples or None


@lru_cache(maxsize=1 << 9)
def _sampled(polys: tuple[Poly, ...]) -> dict[str, Any]:
    """Points at which all polynomials are at least 0, by symbol; none if random search met none."""
    return _draw(polys, _POINTS, 4) or _draw(polys, 4 * _POINTS, 6)


def _draw(polys: tuple[Poly, ...], points: int, largest: int) -> dict[str, Any]:
    names = sorted({s for p in polys for s in p.symbols})
    rng = np.random.default_rng(len(polys))
    values: dict[str, Any] = {n: rng.integers(1, largest + 1, points) for n in names if n[0] not in "$@"}
    waiting = [n for n in names if n[0] in "$@"]
    while waiting:
        for name in waiting:
            bounds = [b for p in polys if name in p.symbols for b in _upper(p, name) if b.symbols <= values.keys()]
            if bounds:
                given = {**values, LOOKUP: _drawn}
                top = np.minimum.reduce([b.evaluate(given) + np.zeros(points, int) for b in bounds])
                values[name] = np.floor(rng.random(points) * (np.maximum(top, 0) + 1)).astype(int)
                waiting.remove(name)
                break
        else:
            return {}
    holds = np.ones(points, bool)
    for poly in polys:
        holds &= poly.evaluate({**values, LOOKUP: _drawn}) >= 0
    return {n: v[holds] for n, v in values.items()} if holds.any() else {}


def _drawn(tensor: str, indices: Sequence[Any]) -> Any:
    """Elements of a tensor of small integers, for samples: the same at equal indices."""
    mixed = zlib.crc32(tensor.encode()) % 1009
    for index in indices:
        mixed = (mixed * 37 + index) * 101 % 1009
    return mixed % 7


def _quotient(number: Fraction | int, divisor: Fraction | int) -> Fraction | int:
    """An integer where it is one, with which Python computes many times faster."""
    if isinstance(number, int) and isinstance(divisor, int) and number % divisor == 0:
        return number // divisor
    return Fraction(number) / divisor


def _combination(columns: Sequence[Shifted], goal: Shifted) -> dict[int, Fraction] | None:
    """Factors above 0 of some of the columns, whose sum with these is the goal, None where none were found."""
    rows: dict[tuple[int, ...], dict[int, Fraction | int]] = {monomial: {} for monomial in goal}
    for k, column in enumerate(columns):
        for monomial, c in column.items():
            rows.setdefault(monomial, {})[k] = c
    if not _presolved(rows, columns, goal):
        return None
    names = sorted({k for row in rows.values() for k in row})
    text = [f"(declare-const f{k} Real)(assert (>= f{k} 0))" for k in names]
    for monomial, row in rows.items():
        if row:
            unit = math.lcm(*(Fraction(c).denominator for c in (*row.values(), goal.get(monomial, 0))))
            terms = " ".join(f"(* {_number(c * unit)} f{k})" for k, c in row.items())
            text.append(f"(assert (= (+ 0 {terms}) {_number(goal.get(monomial, 0) * unit)}))")
    import z3

    solver = z3.SolverFor("QF_LRA")
    solver.set("timeout", 2000)
    solver.from_string("\n".join(text))  # a hundred times as fast as z3's Python classes are at saying it
    if solver.check() != z3.sat:
        return None
    model = solver.model()
    found = {int(each.name()[1:]): model[each].as_fraction() for each in model.decls()}
    return {k: value for k, value in found.items() if value}


def _presolved(
    rows: dict[tuple[int, ...], dict[int, Fraction | int]], columns: Sequence[Shifted], goal: Shifted
) -> bool:
    """Takes columns out of the rows whose factors must be 0: where all factors of a row that is to be 0 have one sign.
    False where a row cannot be met."""
    pending = list(rows)
    while pending:
        monomial = pending.pop()
        row, wanted = rows[monomial], goal.get(monomial, 0)
        above, below = any(c > 0 for c in row.values()), any(c < 0 for c in row.values())
        if (wanted > 0 and not above) or (wanted < 0 and not below):
            return False
        if wanted == 0 and above != below:
            for k in list(row):
                for other in columns[k]:
                    del rows[other][k]
                    pending.append(other)
    return True


def _number(value: Fraction | int) -> str:
    """An integer as SMT-LIB writes it."""
    return str(value) if value >= 0 else f"(- {-value})"


def _plainly_positive(divisor: Poly) -> bool:
    """Whether a divisor is a sum of products of sizes, which are at least 1."""
    return bool(divisor.terms) and all(
        c > 0 and all(isinstance(a, Symbol) and a.name[0] not in "$@" for a in m) for m, c in divisor.terms)


def _upper(poly: Poly, name: str) -> list[Poly]:
    """The bound that ``poly >= 0`` puts on a symbol in the form ``bound - symbol >= 0``."""
    symbol = (Symbol(name),)
    if dict(poly.terms).get(symbol) != -1:
        return []
    bound = poly + Poly({symbol: 1})
    return [] if name in bound.symbols else [bound]


@lru_cache(maxsize=1 << 14)
def _divisors(monomial: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every part of a monomial with the rest, largest parts first."""
    found = {}
    for mask in range(1 << len(monomial)):
        part = tuple(s for i, s in enumerate(monomial) if mask >> i & 1)
        found[part] = tuple(s for i, s in enumerate(monomial) if not mask >> i & 1)
    return sorted(found.items(), key=lambda pair: -len(pair[0]))
