"""How an index expression moves with the loops around it: enough of affine analysis for footprints and strides.

An :class:`Affine` is a sum of terms, each a linear combination of loops whose range may be capped by a
``floormod``. ``floordiv`` by a constant divides coefficients, which may become fractions: over ``n`` steps of a
loop with coefficient 1/4 the value moves by n/4, which is what a footprint needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tvm import tirx

__all__ = ["Affine", "Environment", "evaluate"]

_INFINITE = float("inf")


@dataclass(frozen=True)
class Affine:
    """``terms`` are (coefficient by loop number, cap on the range of the term)."""

    terms: tuple[tuple[Mapping[int, float], float], ...] = ()
    constant: float = 0.0

    @staticmethod
    def loop(index: int) -> Affine:
        return Affine((({index: 1.0}, _INFINITE),))

    def __add__(self, other: Affine) -> Affine:
        merged: dict[int, float] = {}
        kept = []
        for coefficients, cap in self.terms + other.terms:
            if cap == _INFINITE:
                for loop, c in coefficients.items():
                    merged[loop] = merged.get(loop, 0.0) + c
            else:
                kept.append((coefficients, cap))
        merged = {loop: c for loop, c in merged.items() if c}
        terms = tuple(kept) + (((merged, _INFINITE),) if merged else ())
        return Affine(terms, self.constant + other.constant)

    def scaled(self, factor: float) -> Affine:
        if not factor:
            return Affine()
        terms = tuple(({i: c * factor for i, c in cs.items()}, cap * abs(factor)) for cs, cap in self.terms)
        return Affine(terms, self.constant * factor)

    def divided(self, divisor: float, extents: list[int]) -> Affine:
        """``floordiv``: a part that stays within one step of the quotient does not move it."""
        whole, rest = self._split(divisor)
        within = rest.range_over(rest.loops, extents) + self.constant % divisor < divisor
        total = whole.scaled(1.0 / divisor) + (Affine() if within else rest.scaled(1.0 / divisor))
        return Affine(total.terms, self.constant // divisor)

    def modulo(self, divisor: float, extents: list[int]) -> Affine:
        """``floormod``: multiples of the divisor vanish, and what wraps around is capped."""
        _, rest = self._split(divisor)
        constant = self.constant % divisor
        if rest.range_over(rest.loops, extents) + constant < divisor:
            return Affine(rest.terms, constant)
        return Affine(tuple((cs, min(cap, divisor - 1)) for cs, cap in rest.terms), constant)

    def _split(self, divisor: float) -> tuple[Affine, Affine]:
        """The terms that are multiples of the divisor, and the others."""
        whole, rest = [], []
        for coefficients, cap in self.terms:
            multiples = {i: c for i, c in coefficients.items() if c % divisor == 0}
            others = {i: c for i, c in coefficients.items() if c % divisor}
            if multiples:
                whole.append((multiples, cap))
            if others:
                rest.append((others, cap))
        return Affine(tuple(whole)), Affine(tuple(rest))

    @property
    def loops(self) -> set[int]:
        """The loops this value moves with."""
        return {i for coefficients, _ in self.terms for i in coefficients}

    def range_over(self, loops: Collection[int], extents: list[int]) -> float:
        """The distance between the smallest and the largest value while ``loops`` run and the others stand."""
        total = 0.0
        for coefficients, cap in self.terms:
            moved = sum(abs(c) * (extents[i] - 1) for i, c in coefficients.items() if i in loops)
            total += min(cap, moved)
        return total

    def positions(self, loops: Collection[int], extents: list[int]) -> float:
        """An upper bound of the distinct values while ``loops`` run: no more than they have iterations."""
        iterations = 1.0
        for i in self.loops:
            if i in loops:
                iterations *= extents[i]
        return min(iterations, 1.0 + self.range_over(loops, extents))

    def step(self, loop: int) -> float:
        """How far one step of ``loop`` moves the value."""
        return sum(coefficients.get(loop, 0.0) for coefficients, _ in self.terms)


@dataclass
class Environment:
    """What is known where an expression stands: the variables' forms and the extents of the loops around it."""

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
