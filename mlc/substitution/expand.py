"""Expands the scalars of specifications to sums of terms, and collects what must be defined for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import count
from typing import Any

from mlc.operators.index import Condition, Poly
from mlc.operators.laws import LAWS
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum, Within
from mlc.substitution.check.elements import WITHIN
from mlc.substitution.check.integers import positive, translated
from mlc.substitution.entailment import without_remainders
from mlc.substitution.maxima import largest, made
from mlc.substitution.normal import Function, Member, Normal, Number, Term, make_term, negations, reciprocal, times

__all__ = ["Expander"]


class Expander:
    """Expands scalars; hands out names of variables that nothing else uses."""

    def __init__(self) -> None:
        self._names = count()
        #: what the search has spent on the terms made here
        self.work = 0
        #: whether more is tried than what mostly suffices, and how many bounds and steps were
        self.thorough, self.bounds, self.steps = False, 0, 0
        #: goals that the search did not get to their end
        self.stuck: set[Any] = set()
        #: whether maxima are looked at as the values of their members
        self.attains = False

    def fresh(self) -> str:
        return f"$v{next(self._names)}"

    def expand(self, value: Scalar, names: Mapping[str, Poly] | None = None) -> Normal:
        """The terms whose sum is ``value``, in the order of distribution; ``names`` renames variables."""
        names = names or {}
        if isinstance(value, Const):
            return (Term(value.value),) if value.value else ()
        if isinstance(value, Read):
            return (Term(Fraction(1), atoms=(Read(value.tensor, tuple(self._poly(i, names) for i in value.indices)),)),)
        if isinstance(value, Size):
            poly = self._poly(value.poly, names)
            return tuple(make_term(Fraction(c), (), (), [Number(Poly.atom(a)) for a in m]) for m, c in poly.terms)
        if isinstance(value, Add):
            return tuple(t for part in value.terms for t in self.expand(part, names))
        if isinstance(value, Mul):
            product: Normal = (Term(Fraction(1)),)
            for part in value.factors:
                right = self.expand(part, names)
                product = tuple(times(a, b) for a in product for b in right)
            return product
        if isinstance(value, Select):
            guards = tuple(Condition(self._poly(c.poly, names), c.relation) for c in value.conditions)
            found = [self._guarded(t, guards) for t in self.expand(value.then, names)]
            for case in negations(guards):
                found += [self._guarded(t, case) for t in self.expand(value.otherwise, names)]
            return tuple(found)
        if isinstance(value, Within):
            return self.expand(value.value, names)
        if isinstance(value, (Sum, Max)):
            inner, variables, ranges = self._bind(value.variables, names)
            if isinstance(value, Sum):
                return tuple(make_term(t.factor, (*variables, *t.variables), (*ranges, *t.guards), t.atoms)
                             for t in self.expand(value.body, inner))
            ranges += [Condition(self._poly(c.poly, inner), c.relation) for c in value.conditions]
            return largest([Member(tuple(variables), tuple(ranges), self.expand(value.body, inner))], self.fresh)
        if isinstance(value, Reciprocal):
            return reciprocal(self.expand(value.value, names), self.fresh)
        args = [self.expand(arg, names) for arg in value.args]
        if value.function == "max":
            return largest([Member((), (), arg) for arg in args], self.fresh)
        return made(value.function, args[0], self.fresh)

    def demands(self, value: Scalar, names: Mapping[str, Poly] | None = None) -> Normal:
        """What has to be defined for ``value`` to be: the reads and partial functions of it, before anything cancels,
        each the one atom of a term (:mod:`mlc.substitution.check.defined` says what that means)."""
        return tuple(dict.fromkeys(self._demands(value, names or {})))

    def _demands(self, value: Scalar, names: Mapping[str, Poly]) -> Iterator[Term]:
        if isinstance(value, Read):
            yield from self.expand(value, names)
        elif isinstance(value, (Add, Mul)):
            for part in value.terms if isinstance(value, Add) else value.factors:
                yield from self._demands(part, names)
        elif isinstance(value, Select):
            guards = tuple(Condition(self._poly(c.poly, names), c.relation) for c in value.conditions)
            yield from (self._guarded(t, guards) for t in self._demands(value.then, names))
            for case in negations(guards):
                yield from (self._guarded(t, case) for t in self._demands(value.otherwise, names))
        elif isinstance(value, Within):
            yield from self.expand(Read(WITHIN, (value.index, value.extent)), names)
            yield from self._demands(value.value, names)
        elif isinstance(value, (Sum, Max)):
            inner, variables, ranges = self._bind(value.variables, names)
            if isinstance(value, Max):
                ranges += [Condition(self._poly(c.poly, inner), c.relation) for c in value.conditions]
            for t in self._demands(value.body, inner):
                yield make_term(t.factor, (*variables, *t.variables), (*ranges, *t.guards), t.atoms)
        elif isinstance(value, Reciprocal):
            yield from self._demands(value.value, names)
            divisor = value.value
            sized = isinstance(divisor, Size) and positive(translated(self._poly(divisor.poly, names)))
            if not sized and not (isinstance(divisor, Const) and divisor.value):
                yield self._calls("1/", divisor, names)
        elif isinstance(value, Call):
            for part in value.args:
                yield from self._demands(part, names)
            if value.function != "max" and LAWS[value.function].domain:
                yield self._calls(value.function, value.args[0], names)

    def _calls(self, function: str, argument: Scalar, names: Mapping[str, Poly]) -> Term:
        return Term(Fraction(1), atoms=(Function(function, self.expand(argument, names)),))

    @staticmethod
    def _poly(poly: Poly, names: Mapping[str, Poly]) -> Poly:
        return without_remainders(poly.substitute(names))

    def _bind(self, variables: Iterable[tuple[str, Poly]], names: Mapping[str, Poly]
              ) -> tuple[dict[str, Poly], list[str], list[Condition]]:
        inner, fresh, guards = dict(names), [], []
        for name, extent in variables:
            new = self.fresh()
            inner[name] = Poly.symbol(new)
            fresh.append(new)
            guards += [Condition(inner[name], ">="), Condition(self._poly(extent, names) - inner[name] - 1, ">=")]
        return inner, fresh, guards

    @staticmethod
    def _guarded(term: Term, guards: tuple[Condition, ...]) -> Term:
        return make_term(term.factor, term.variables, (*guards, *term.guards), term.atoms)
