"""Proves conditions on loops for all values of the free sizes, by trying every size of their ranges, and removes them.

Each size has an array axis of its own, so that an expression is only evaluated for combinations of the sizes that it
depends on: a tile's rows depend on the height of an image, not on its width.

TVM's analyzer only knows bounds of single expressions: it cannot prove ``ceil(n / 16) <= 2 * ceil(n / 32)``, and a
predicate that remains is a branch for each element of a register tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Var

from schedules.analysis import op_name, walk
from schedules.free import SIZES, variables

__all__ = ["Ranges", "sizes_of", "without_dead_extrema", "without_true_conditions"]

#: combinations of sizes that are tried; a condition on more of them is not known to hold
_MOST = 1 << 18

#: the least and the largest value of an expression, for each combination of the sizes in it
_Ends = tuple[np.ndarray, np.ndarray]


class Ranges:
    """What free sizes and loops range over: ``sizes`` are the variables with their least and largest value, ``loops``
    those of loops with their extents, all of which begin at 0."""

    def __init__(self, sizes: Sequence[tuple[Var, int, int]], loops: Sequence[tuple[Var, Any]]) -> None:
        self._values = {
            var: np.arange(low, high + 1, dtype=np.int64).reshape([-1, *[1] * (len(sizes) - 1 - axis)])
            for axis, (var, low, high) in enumerate(sizes) if high - low < _MOST
        }
        self._loops = dict(loops)
        self._known: dict[Any, _Ends | None] = {}

    @classmethod
    def of(cls, func: tirx.PrimFunc, sizes: Sequence[tuple[Var, int, int]] | None = None) -> Ranges:
        """Those of a function with free sizes, which are ``sizes`` where its parameters say so no more."""
        loops: list[tuple[Var, Any]] = []

        def note(loop: tirx.For) -> None:
            if isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0:
                loops.append((loop.loop_var, loop.extent))

        walk(func.body, (tirx.For, note))
        return cls(sizes_of(func) if sizes is None else sizes, loops)

    def hold(self, condition: Any) -> bool:
        """Whether ``a < b`` or ``a <= b`` holds for all sizes and all iterations; False for what cannot be told."""
        if isinstance(condition, tirx.LT):
            return self._ordered(condition.a, condition.b, np.less)
        return isinstance(condition, tirx.LE) and self._ordered(condition.a, condition.b, np.less_equal)

    def chosen(self, expr: tirx.Max | tirx.Min) -> Any:
        """Which side of a maximum or minimum it is for all sizes and all iterations; itself where that depends."""
        least, most = (expr.a, expr.b) if isinstance(expr, tirx.Max) else (expr.b, expr.a)
        if self._ordered(least, most, np.less_equal):
            return expr.b
        return expr.a if self._ordered(most, least, np.less_equal) else expr

    def _ordered(self, one: Any, other: Any, test: Any) -> bool:
        both = _both(self._ends(one), self._ends(other))
        return both is not None and bool(np.all(test(both[0][1], both[1][0])))

    def _ends(self, expr: Any) -> _Ends | None:
        if isinstance(expr, tirx.IntImm):
            return np.array(int(expr)), np.array(int(expr))
        if isinstance(expr, Var):
            if expr not in self._known:
                self._known[expr] = self._variable(expr)
            return self._known[expr]
        if isinstance(expr, tirx.Cast):
            return self._ends(expr.value)
        rule = next((rule for kind, rule in _RULES.items() if isinstance(expr, kind)), None)
        if rule is None:
            return None
        both = _both(self._ends(expr.a), self._ends(expr.b))
        return None if both is None else rule(*both)

    def _variable(self, var: Var) -> _Ends | None:
        if var in self._loops:
            extent = self._ends(self._loops[var])
            return None if extent is None else (np.zeros_like(extent[1]), np.maximum(extent[1] - 1, 0))
        return None if var not in self._values else (self._values[var], self._values[var])


def _both(left: _Ends | None, right: _Ends | None) -> tuple[_Ends, _Ends] | None:
    """Both, where both are known and there are few enough combinations of the sizes in them."""
    if left is None or right is None:
        return None
    shape = np.broadcast_shapes(*(each.shape for each in (*left, *right)))
    return (left, right) if math.prod(shape) <= _MOST else None


def without_dead_extrema(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove maxima and minima of which one side is never taken.

    Positions in a register tile then become constants: TVM, which does not know the ranges, has ``max(0, i)`` for its
    begin.
    """
    ranges = Ranges.of(func)
    kinds = [(kind, lambda expr: ranges.chosen(expr)) for kind in (tirx.Max, tirx.Min)]
    return func.with_body(tvm_ffi.structural_map(func.body, kinds))


def sizes_of(func: tirx.PrimFunc) -> list[tuple[Var, int, int]]:
    """The free sizes of a function with the least and the largest value of each."""
    return [(var, int(low), int(high)) for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True)]


def without_true_conditions(func: tirx.PrimFunc, sizes: Sequence[tuple[Var, int, int]]) -> tirx.PrimFunc:
    """Remove conditions on elements from a lowered function that hold for all ``sizes`` and iterations.

    Windows at the edge of an image are tested for each pixel of a register tile, most of which are inside for all
    sizes: TVM's analyzer cannot prove ``min(8 * i, (n - 1) // 2 - 7) * 2 + 9 < n``.
    """
    ranges = Ranges.of(func, sizes)
    always = tirx.const(True, "bool")

    def known(condition: Any) -> Any:
        return always if ranges.hold(condition) else condition

    def both(condition: tirx.And) -> Any:
        held = [_is_true(part) for part in (condition.a, condition.b)]
        return condition.b if held[0] else condition.a if held[1] else condition

    def chosen(call: Call) -> Any:
        return call.args[1] if op_name(call) == "if_then_else" and _is_true(call.args[0]) else call

    kinds = [(tirx.LT, known), (tirx.LE, known), (tirx.And, both), (Call, chosen)]

    def tested(call: Call) -> Any:
        return tvm_ffi.structural_map(call, kinds) if op_name(call) == "if_then_else" else call

    return func.with_body(tvm_ffi.structural_map(func.body, (Call, tested)))


def _is_true(condition: Any) -> bool:
    return isinstance(condition, tirx.IntImm) and int(condition) == 1


def _product(left: _Ends, right: _Ends) -> _Ends | None:
    if (left[0] < 0).any() or (right[0] < 0).any():
        return None
    return left[0] * right[0], left[1] * right[1]


def _quotient(left: _Ends, right: _Ends) -> _Ends | None:
    if (left[0] < 0).any() or (right[0] < 1).any():
        return None
    return left[0] // right[1], left[1] // right[0]


def _remainder(left: _Ends, right: _Ends) -> _Ends | None:
    if (left[0] < 0).any() or (right[0] < 1).any():
        return None
    return np.zeros_like(left[0]), np.minimum(left[1], right[1] - 1)


_RULES: dict[Any, Any] = {
    tirx.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    tirx.Sub: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    tirx.Mul: _product,
    tirx.FloorDiv: _quotient,
    tirx.FloorMod: _remainder,
    tirx.Min: lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    tirx.Max: lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
}
