"""A second judge of rules: their obligations put to Z3, from the operators' specifications and nothing of the prover.

The demands on sizes go to it for all sizes at once, and so do elements of rules that only move them or compute one of
one. Where sums are taken, sizes and the place in the output are numbers, and what is read are unknown reals: then the
question is for all values. Functions about which laws alone are known are uninterpreted, but for these laws at the
arguments that they have.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import numpy as np
import z3

from mlc.operators.index import LOOKUP, Condition, Lookup, Poly, Symbol
from mlc.operators.laws import BELOW, LAWS
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum, Within
from mlc.substitution.compose import compose
from mlc.substitution.indices import extents
from mlc.substitution.refute import at_sizes, draw_sizes
from mlc.substitution.rule import Rule

__all__ = ["Judgement", "judgement", "judgement_in_time"]

_MILLISECONDS = 2_000
#: for a rule, simplifications included, which the limit of a question does not bound
_SECONDS = 60


@dataclass
class Judgement:
    """How many questions Z3 answered, those that it gave up, and ``against``: what speaks against the rule."""

    answered: int = 0
    given_up: int = 0
    against: list[str] = field(default_factory=list)


def judgement(rule: Rule, seed: int = 0, assignments: int = 2, elements: int = 3) -> Judgement:
    """What Z3 says of sizes and elements of a rule."""
    found = Judgement()
    sizes = {s: z3.Int(s) for s in rule.symbols}
    source, given = compose(rule.source, rule.shapes)
    target, demands = compose(rule.target, rule.shapes)
    assumed = [s >= 1 for s in sizes.values()] + [_condition(c, sizes) for c in (*rule.conditions, *given)]
    shapes = [_index(a, sizes) == _index(b, sizes) for one, other in zip(source, target, strict=True)
              for a, b in zip(one.shape, other.shape, strict=True)]
    for demand in [*(_condition(c, sizes) for c in demands), *shapes]:
        _ask(found, [*assumed, z3.Not(demand)], "sizes")
    for one, other in zip(source, target, strict=True):
        names = [f"#{axis}" for axis in range(one.rank)]
        values = sizes | {n: z3.Int(n) for n in names}
        places = tuple(map(Poly.symbol, names))
        sides = one[places], other[places]
        if not any(map(_sums, sides)):
            inside = [c for n, s in zip(names, one.shape, strict=True)
                      for c in (values[n] >= 0, values[n] < _index(s, sizes))]
            known = _Values()
            left = known.of(sides[0], values)
            defined = known.defined()
            right = known.of(sides[1], values)
            _ask(found, [*assumed, *inside, *defined, *known.laws(), z3.Not(left == right)], "an element")
    rng = Random(seed)
    for numbers in draw_sizes(rule, assignments, seed):
        _at_numbers(found, rule, numbers, rng, elements)
    return found


def judgement_in_time(rule: Rule) -> Judgement:
    """What Z3 says within a minute, in a process of its own; a rule that takes longer is one question given up."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(judgement(rule)), daemon=True)
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(_SECONDS) else Judgement(given_up=1)
    finally:
        process.kill()
        process.join()


def _at_numbers(found: Judgement, rule: Rule, numbers: Mapping[str, int], rng: Random, elements: int) -> None:
    solved = at_sizes(rule, numbers)
    source, target = (compose(side, solved.shapes)[0] for side in (solved.source, solved.target))
    whole = set(rule.certificate["whole"]["forward"]) if rule.certificate else set()
    shapes = {name: tuple(int(s.constant or 0) for s in shape) for name, shape in solved.shapes.items()}
    drawn = {name: np.random.default_rng(extent).integers(0, extent, shapes[name])
             for name, extent in extents(solved.source, shapes).items()}
    values = {LOOKUP: lambda tensor, places: int(drawn[tensor][tuple(places)])}
    for one, other in zip(source, target, strict=True):
        for _ in range(elements):
            place = tuple(rng.randrange(int(s.constant or 0)) for s in one.shape)
            ours, theirs = _Values(), _Values()
            left, right = (side.of(tensor[place], values) for side, tensor in ((ours, one), (theirs, other)))
            if {r for r in theirs.reads - ours.reads if r[0] not in whole}:
                found.against.append(f"at {dict(numbers)} the target reads what the source does not")
            difference = z3.simplify(_real(left) - _real(right), som=True, blast_distinct=True)
            if z3.is_rational_value(difference) and difference.as_fraction() == 0:
                found.answered += 1
            else:
                claims = [*ours.defined(), *ours.laws(theirs), difference != 0]
                _ask(found, claims, f"element {place} at {dict(numbers)}")


def _ask(found: Judgement, claims: Sequence[Any], about: str) -> None:
    """The claims must exclude each other."""
    solver = z3.Solver()
    solver.set("timeout", _MILLISECONDS)
    solver.add(*claims)
    answer = solver.check()
    if answer == z3.unknown:
        found.given_up += 1
        return
    found.answered += 1
    if answer == z3.sat:
        found.against.append(f"{about}: {solver.model()}"[:400])


def _index(poly: Poly, values: Mapping[str, Any]) -> Any:
    """A number where all symbols have numbers, else an integer of Z3."""
    total: Any = 0
    for monomial, factor in poly.terms:
        part: Any = factor
        for atom in monomial:
            if isinstance(atom, Symbol):
                part = part * values[atom.name]
                continue
            if isinstance(atom, Lookup):
                places = [_index(i, values) for i in atom.indices]
                part = part * values.get(LOOKUP, _element)(atom.tensor, places)
                continue
            n, d = _index(atom.numerator, values), _index(atom.denominator, values)
            plain = isinstance(n, int) and isinstance(d, int)
            quotient = n // d if plain else z3.IntVal(n) / d if isinstance(n, int) else n / d
            part = part * (quotient if type(atom).__name__ == "FloorDiv" else n - d * quotient)
        total = total + part
    return total


def _element(tensor: str, places: Sequence[Any]) -> Any:
    """Of a tensor of integers, any; the same at the same indices."""
    if not places:
        return z3.Int(f"{tensor}[]")
    return z3.Function(f"{tensor}[]", *[z3.IntSort()] * len(places), z3.IntSort())(*places)


def _condition(condition: Condition, values: Mapping[str, Any]) -> Any:
    value = _index(condition.poly, values)
    holds = value == 0 if condition.relation == "==" else value >= 0
    return z3.BoolVal(holds) if isinstance(holds, bool) else holds


def _sums(value: Any) -> bool:
    if isinstance(value, (Sum, Max)):
        return True
    return isinstance(value, (Add, Mul, Call, Reciprocal, Select, Within)) and any(map(_sums, _parts(value)))


def _parts(value: Any) -> Iterator[Any]:
    for name in ("terms", "factors", "args"):
        yield from getattr(value, name, ())
    yield from (getattr(value, name) for name in ("value", "then", "otherwise") if hasattr(value, name))


def _real(value: Any) -> Any:
    return z3.RealVal(str(value)) if isinstance(value, Fraction) else value


class _Values:
    """Scalars as reals of Z3, and what they read where that is known."""

    def __init__(self) -> None:
        self.reads: set[tuple[Any, ...]] = set()
        #: functions of which laws alone are known, with their arguments
        self.calls: list[tuple[str, Any]] = []
        #: what is divided by wherever the expressions are defined
        self.divisors: list[Any] = []
        #: what is so of the numbers that stand for largest elements, and for reciprocals
        self._known: list[Any] = []

    def laws(self, *others: _Values) -> list[Any]:
        """What holds of the functions and maxima of these expressions and of others'."""
        sides = (self, *others)
        return [*_laws([call for side in sides for call in side.calls]), *(m for side in sides for m in side._known)]

    def defined(self) -> list[Any]:
        """What holds where the expressions are defined: nothing that is divided by is 0."""
        return [each != 0 for each in self.divisors]

    def of(self, value: Scalar, values: Mapping[str, Any]) -> Any:
        match value:
            case Const(number):
                return z3.RealVal(str(number))
            case Size(poly):
                found = _index(poly, values)
                return z3.RealVal(found) if isinstance(found, int) else z3.ToReal(found)
            case Read(tensor, indices):
                return self._read(tensor, [_index(i, values) for i in indices])
            case Add(parts):
                return z3.Sum([self.of(p, values) for p in parts])
            case Mul(parts):
                return z3.Product([self.of(p, values) for p in parts])
            case Reciprocal(divisor):
                found = z3.simplify(self.of(divisor, values))
                known = z3.is_rational_value(found) and found.as_fraction() != 0
                if known:
                    return z3.RealVal(str(1 / found.as_fraction()))
                self.divisors.append(found)
                self._known.append(z3.Implies(found != 0, found * _function("1/", found) == 1))
                return _function("1/", found)
            case Call("max", (one, other)):
                return _larger(self.of(one, values), self.of(other, values))
            case Call("relu", (argument,)):
                return _larger(self.of(argument, values), z3.RealVal(0))
            case Call(name, (argument,)):
                inner = z3.simplify(self.of(argument, values), som=True)
                self.calls.append((name, inner))
                return _function(name, inner)
            case Within(index, extent, inner):
                place, most = _index(index, values), _index(extent, values)
                self.reads.add(("an index of", str(most), str(place)))
                self._known += [z3.And(place >= 0, place < most)] if isinstance(place, z3.ExprRef) else []
                return self.of(inner, values)
            case Select(conditions, then, otherwise):
                chosen = z3.simplify(z3.And([_condition(c, values) for c in conditions]))
                if z3.is_true(chosen) or z3.is_false(chosen):
                    return self.of(then if z3.is_true(chosen) else otherwise, values)
                before = len(self.divisors)
                cases = self.of(then, values), self.of(otherwise, values)
                del self.divisors[before:]  # which of them is divided by is open
                return z3.If(chosen, *cases)
            case Sum(variables, body):
                return z3.Sum([self.of(body, v) for v in _all(variables, (), values)])
            case Max(variables, conditions, body):
                return self._largest([self.of(body, v) for v in _all(variables, conditions, values)])
        raise TypeError(f"{value} is no expression")

    def _largest(self, elements: Sequence[Any]) -> Any:
        """A number that is one of the elements and no less than any: cases in cases of many elements are too much for
        simplifications. The same elements have the same number."""
        elements = [z3.simplify(each, som=True) for each in elements]
        if len(elements) <= 2:
            return elements[0] if len(elements) == 1 else _larger(*elements)
        largest = z3.Real("max" + str(sorted(each.sexpr() for each in elements)))
        self._known += [largest >= each for each in elements] + [z3.Or([largest == each for each in elements])]
        return largest

    def _read(self, tensor: str, places: Sequence[Any]) -> Any:
        if all(isinstance(p, int) for p in places):
            self.reads.add((tensor, *places))
            return z3.Real(f"{tensor}{list(places)}")
        function = z3.Function(tensor, *[z3.IntSort()] * len(places), z3.RealSort())
        return function(*places)


def _function(name: str, argument: Any) -> Any:
    return z3.Function(name, z3.RealSort(), z3.RealSort())(z3.simplify(argument, som=True))


def _laws(calls: Sequence[tuple[str, Any]]) -> list[Any]:
    """What the laws of functions say of the arguments that they have."""
    said: list[Any] = []
    names = {name for name, _ in calls}
    for name, x in calls:
        laws, value = LAWS[name], _function(name, x)
        said += [value >= 0] * laws.nonnegative + [value > 0] * laws.positive + [value >= x] * laws.exceeds
        said += [z3.Implies(x == 0, value == 0)] * laws.zero + [value <= _larger(x, z3.RealVal(0))] * laws.contracts
        said += [_function(name, -x) == -value] * laws.odd
        said += [_function(f, x) <= _function(g, x) for f, g in BELOW if name in (f, g) and {f, g} <= names]
        if laws.grows:
            said += [z3.Implies(x <= y, value <= _function(name, y)) for other, y in calls if other == name]
            # 0 is an argument too where a maximum with it is one
            zero = z3.RealVal(0)
            said += [z3.Implies(x <= zero, value <= _function(name, zero)),
                     z3.Implies(x >= zero, value >= _function(name, zero))]
            said += [_function(name, zero) == 0] * laws.zero
    return said


def _larger(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b)


def _all(variables: Any, conditions: Any, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The values of bound variables for which conditions hold; extents are numbers."""
    for chosen in product(*(range(_index(extent, values)) for _, extent in variables)):
        found = {**values, **{name: v for (name, _), v in zip(variables, chosen, strict=True)}}
        if all(z3.is_true(z3.simplify(_condition(c, found))) for c in conditions):
            yield found
