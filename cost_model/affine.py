"""Affine analysis of index expressions, enough for footprints and strides.

An :class:`Affine` is a sum of terms, each a linear combination of loops. A ``floormod`` caps a term's range. A
``floordiv`` divides coefficients, which may become fractions (over ``n`` steps of a loop with coefficient 1/4 the
value moves by n/4, which is what a footprint needs) while the term's values stay whole multiples of its unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tvm import tirx

__all__ = ["Affine", "Environment", "Term", "evaluate"]

_INFINITE = float("inf")


@dataclass(frozen=True)
class Term:
    """``unit`` divides every value of the term; 0 where each coefficient speaks for itself."""

    coefficients: Mapping[int, float]  # by loop number
    cap: float = _INFINITE
    unit: float = 0.0

    def scaled(self, factor: float) -> Term:
        coefficients = {i: c * factor for i, c in self.coefficients.items()}
        return Term(coefficients, self.cap * abs(factor), self.unit * abs(factor))

    def split(self, divisor: float) -> tuple[Term | None, Term | None]:
        """The part whose values are multiples of ``divisor``, and the rest."""
        if self.unit:
            return (self, None) if self.unit % divisor == 0 else (None, self)
        multiples = {i: c for i, c in self.coefficients.items() if c % divisor == 0}
        others = {i: c for i, c in self.coefficients.items() if c % divisor}
        return (
            replace(self, coefficients=multiples) if multiples else None,
            replace(self, coefficients=others) if others else None,
        )


@dataclass(frozen=True)
class Affine:
    """The sum of ``terms`` and ``constant``."""

    terms: tuple[Term, ...] = ()
    constant: float = 0.0

    @staticmethod
    def loop(index: int) -> Affine:
        return Affine((Term({index: 1.0}),))

    def __add__(self, other: Affine) -> Affine:
        merged: dict[int, float] = {}
        kept = []
        for term in self.terms + other.terms:
            if term.cap == _INFINITE and not term.unit:
                for loop, c in term.coefficients.items():
                    merged[loop] = merged.get(loop, 0.0) + c
            else:
                kept.append(term)
        merged = {loop: c for loop, c in merged.items() if c}
        return Affine((*kept, Term(merged)) if merged else tuple(kept), self.constant + other.constant)

    def scaled(self, factor: float) -> Affine:
        if not factor:
            return Affine()
        return Affine(tuple(t.scaled(factor) for t in self.terms), self.constant * factor)

    def divided(self, divisor: float, extents: list[int]) -> Affine:
        """``floordiv``: a part that stays within one step of the quotient does not move it."""
        whole, rest = self._split(divisor)
        total = whole.scaled(1.0 / divisor)
        if rest.range_over(rest.loops, extents) + self.constant % divisor >= divisor:
            floored = tuple(replace(t.scaled(1.0 / divisor), unit=1.0) for t in rest.terms)
            total = Affine(total.terms + floored)
        return Affine(total.terms, self.constant // divisor)

    def modulo(self, divisor: float, extents: list[int]) -> Affine:
        """``floormod``: multiples of the divisor vanish, and what wraps around is capped."""
        _, rest = self._split(divisor)
        constant = self.constant % divisor
        if rest.range_over(rest.loops, extents) + constant < divisor:
            return Affine(rest.terms, constant)
        return Affine(tuple(replace(t, cap=min(t.cap, divisor - 1)) for t in rest.terms), constant)

    def _split(self, divisor: float) -> tuple[Affine, Affine]:
        """The terms that are multiples of the divisor, and the others."""
        parts = [term.split(divisor) for term in self.terms]
        return Affine(tuple(w for w, _ in parts if w)), Affine(tuple(r for _, r in parts if r))

    @cached_property
    def loops(self) -> frozenset[int]:
        """The loops this value moves with."""
        return frozenset(i for term in self.terms for i in term.coefficients)

    def range_over(self, loops: Collection[int], extents: list[int]) -> float:
        """The distance between the smallest and the largest value while ``loops`` run and the others stand."""
        total = 0.0
        for term in self.terms:
            moved = sum(abs(c) * (extents[i] - 1) for i, c in term.coefficients.items() if i in loops)
            total += min(term.cap, moved)
        return total

    def positions(self, loops: Collection[int], extents: list[int]) -> float:
        """An upper bound of the distinct values while ``loops`` run: no more than they have iterations."""
        iterations = 1.0
        for i in self.loops:
            if i in loops:
                iterations *= extents[i]
        return min(iterations, 1.0 + self.range_over(loops, extents))

    def step(self, loop: int) -> float:
        """How far one step of ``loop`` moves the value, on average."""
        return sum(term.coefficients.get(loop, 0.0) for term in self.terms)


@dataclass
class Environment:
    """The context of an expression: the affine forms of variables, and the extents of the loops around it."""

    values: dict[tirx.Var, Affine] = field(default_factory=dict)
    extents: list[int] = field(default_factory=list)


def evaluate(expr: tirx.Expr, env: Environment) -> Affine:
    """The affine form of an integer expression; where it is not affine, one that moves with the same loops."""
    handler = _HANDLERS.get(type(expr).__name__)
    if handler is not None:
        return handler(expr, env)
    return _opaque(expr, env)


def _sum(expr: tirx.Expr, env: Environment) -> Affine:
    return evaluate(expr.a, env) + evaluate(expr.b, env)


def _difference(expr: tirx.Expr, env: Environment) -> Affine:
    return evaluate(expr.a, env) + evaluate(expr.b, env).scaled(-1.0)


def _product(expr: tirx.Expr, env: Environment) -> Affine:
    a, b = evaluate(expr.a, env), evaluate(expr.b, env)
    if not b.terms:
        return a.scaled(b.constant)
    return b.scaled(a.constant) if not a.terms else a + b


def _quotient(expr: tirx.Expr, env: Environment) -> Affine:
    a, b = evaluate(expr.a, env), evaluate(expr.b, env)
    return a.divided(b.constant, env.extents) if not b.terms and b.constant > 0 else a


def _remainder(expr: tirx.Expr, env: Environment) -> Affine:
    a, b = evaluate(expr.a, env), evaluate(expr.b, env)
    return a.modulo(b.constant, env.extents) if not b.terms and b.constant > 0 else a


def _bounded(expr: tirx.Expr, env: Environment) -> Affine:
    """Min and max with a constant clamp at a border: the value moves as its other side does."""
    a, b = evaluate(expr.a, env), evaluate(expr.b, env)
    return a if len(a.loops) >= len(b.loops) else b


def _select(expr: tirx.Expr, env: Environment) -> Affine:
    return evaluate(expr.true_value, env)


def _opaque(expr: tirx.Expr, env: Environment) -> Affine:
    # a gather or a call: unknown, but it moves with whatever its arguments move with
    parts = getattr(expr, "args", None) or getattr(expr, "indices", None) or ()
    total = Affine()
    for part in parts:
        if isinstance(part, tirx.Expr):
            total = total + evaluate(part, env)
    return total


_HANDLERS: dict[str, Callable[[tirx.Expr, Environment], Affine]] = {
    "Var": lambda expr, env: env.values.get(expr, Affine()),
    "IntImm": lambda expr, _: Affine((), float(int(expr.value))),
    "Add": _sum,
    "Sub": _difference,
    "Mul": _product,
    "FloorDiv": _quotient,
    "Div": _quotient,
    "FloorMod": _remainder,
    "Mod": _remainder,
    "Min": _bounded,
    "Max": _bounded,
    "Select": _select,
    "Cast": lambda expr, env: evaluate(expr.value, env),
}
