"""Sizes that are expressions in free dimensions, and that behave like numbers for code that was written for numbers.

A :class:`Size` adds, multiplies and divides as numbers do. What it is compared with is decided for all sizes that the
free dimensions' ranges admit: ``==`` holds only where both are always equal, and an order that some sizes fulfil and
others don't raises :class:`UndecidedSizeError`, as does taking a size for a number. Whoever changes a graph then leaves
that part of it alone. Estimates divide and take floats: they see the usual sizes.

The ranges are those of the module that is worked on (:func:`free_sizes`), in force inside :func:`scope`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from mlc.errors import ModelError
from mlc.shapes import Free, Range

__all__ = ["Size", "UndecidedSizeError", "at_most", "attributes", "bounds_of", "depends_on", "evaluated", "free_sizes",
           "in_scope", "may_come", "renamed", "scope", "size_of", "usual_size", "variables_of"]

#: main's attribute: the usual size of each free dimension by the name of its variable. Beside it are TVM's own two
_USUAL, _LOWER, _UPPER = "mlc.usual_size", "tir_var_lower_bound", "tir_var_upper_bound"

_NUMBER = re.compile(r"T\.int64\((-?\d+)\)")

_scope: contextvars.ContextVar[Mapping[str, Free]] = contextvars.ContextVar("free sizes")
_together: contextvars.ContextVar[tuple[tuple[str, ...], int]] = contextvars.ContextVar("together", default=((), 0))


class UndecidedSizeError(ModelError):
    """A size is free where it must be a number, or both answers to a question are possible."""


def attributes(free: Mapping[str, Free]) -> dict[str, dict[str, int]]:
    """Attributes of ``main`` that say what is free, by the variables' names; none where nothing is."""
    if not free:
        return {}
    return {
        _UPPER: {name: each.range.high for name, each in free.items()},
        _LOWER: {name: each.range.low for name, each in free.items()},
        _USUAL: {name: each.usual for name, each in free.items()},
    }


def free_sizes(mod: tvm.IRModule) -> dict[str, Free]:
    """The free dimensions of a module's ``main``, as :func:`attributes` said."""
    attrs = mod["main"].attrs
    if not attrs or _USUAL not in attrs:
        return {}
    lower, upper = attrs[_LOWER], attrs[_UPPER]
    return {
        str(name): Free(str(name), Range(int(lower[name]), int(upper[name])), int(usual))
        for name, usual in attrs[_USUAL].items()
    }


@contextlib.contextmanager
def scope(free: Mapping[str, Free]) -> Iterator[None]:
    """The free dimensions by the names of their variables, for whatever is compared inside."""
    token = _scope.set(free)
    try:
        yield
    finally:
        _scope.reset(token)


def in_scope() -> Mapping[str, Free]:
    """The free dimensions that :func:`scope` has put in force."""
    return _scope.get({})


@contextlib.contextmanager
def at_most(total: int, *names: str) -> Iterator[None]:
    """While this lasts, the free dimensions of these names come to no more than ``total`` together."""
    token = _together.set((names, total))
    try:
        yield
    finally:
        _together.reset(token)


def may_come(sizes: Mapping[str, int]) -> bool:
    """Whether a call may have these sizes, as far as :func:`at_most` says."""
    names, total = _together.get()
    return sum(sizes.get(name, 0) for name in names) <= total


def size_of(dim: Any) -> Any:
    """A dimension as a number, or a :class:`Size` where it is free."""
    if isinstance(dim, tirx.IntImm):
        return int(dim.value)
    return dim if isinstance(dim, int | Size) else Size(dim)


def usual_size(size: Any) -> int:
    """A number as it is; of a :class:`Size` the usual one."""
    return size.usual if isinstance(size, Size) else int(size)


def depends_on(expr: Any) -> set[str]:
    """The names of the free dimensions in an integer expression."""
    return set() if isinstance(expr, tirx.IntImm) else {str(var.name) for var in _variables(expr)}


def variables_of(values: Iterable[Any]) -> list[tirx.Var]:
    """The variables of free dimensions in numbers, sizes and TVM's expressions."""
    exprs = [each.expr if isinstance(each, Size) else each for each in values if not isinstance(each, int)]
    return list(dict.fromkeys(
        var for expr in exprs for var in _variables(expr) if str(var.name) in in_scope()))


def renamed(value: Any, image: Mapping[Any, Any]) -> Any:
    """A number, size or expression in terms of other variables; a function has variables of its own for free sizes."""
    if isinstance(value, int) or not image:
        return value
    return Size(_substituted(value.expr, image)) if isinstance(value, Size) else _substituted(value, image)


def bounds_of(expr: Any) -> tuple[int, int]:
    """The smallest and the largest value of an integer expression of free dimensions, or bounds of these."""
    with _analyzer(expr) as analyzer:
        found = analyzer.const_int_bound(expr)
    return int(found.min_value), int(found.max_value)


def evaluated(expr: Any, sizes: Mapping[str, int]) -> int:
    """The value of an integer expression for free dimensions of these sizes."""
    values = {var: tirx.const(sizes[str(var.name)], str(var.ty)) for var in _variables(expr)}
    value = tvm.sym.Analyzer().simplify(_substituted(expr, values))
    if not isinstance(value, tirx.IntImm):
        raise UndecidedSizeError(f"a size must be a number once the free ones are known, but {expr} is not")
    return int(value.value)


class Size:
    """An integer expression of free dimensions, simplified; never a number."""

    __slots__ = ("__dict__", "expr")

    def __init__(self, expr: Any) -> None:
        self.expr = expr

    def __tvm_ffi_object__(self) -> Any:
        return self.expr

    @cached_property
    def usual(self) -> int:
        """The value at the usual sizes of the free dimensions."""
        return evaluated(self.expr, {name: free.usual for name, free in in_scope().items()})

    def __add__(self, other: Any) -> Any:
        return _made(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _made(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _made(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _made(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _made(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _made(operator.mul, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _made(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _made(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return _made(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _made(operator.mod, other, self)

    def __neg__(self) -> Any:
        return self * -1

    def __truediv__(self, other: Any) -> float:
        return self.usual / usual_size(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other / self.usual)

    def __float__(self) -> float:
        return float(self.usual)

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, str | tuple | list):
            return False
        if isinstance(other, Size) and other._text == self._text:
            return True
        return _proves(self.expr == _operand(other))

    def __hash__(self) -> int:
        return hash(self._text)

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, float):
            return self.usual < other
        return _decided(self.expr < _operand(other), self.expr >= _operand(other))

    def __le__(self, other: Any) -> bool:
        if isinstance(other, float):
            return self.usual <= other
        return _decided(self.expr <= _operand(other), self.expr > _operand(other))

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __bool__(self) -> bool:
        return _decided(self.expr > 0, self.expr == 0)

    def __int__(self) -> int:
        raise UndecidedSizeError(f"the size {self} must be a number here; fix it, as in --shape NAME=8,128")

    __index__ = __int__

    @cached_property
    def _text(self) -> str:
        return _NUMBER.sub(r"\1", " ".join(str(self.expr).split()))

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def _operand(value: Any) -> Any:
    if isinstance(value, Size):
        return value.expr
    return tirx.const(int(value), "int64") if hasattr(value, "__index__") else value


_ON_EXPRESSIONS: dict[Any, Callable[[Any, Any], Any]] = {
    operator.floordiv: tirx.floordiv, operator.mod: tirx.floormod,
}


def _made(combine: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Simplified, as a number or :class:`Size`; an estimate (a float) where one is, and TVM's expression where one is.
    """
    if isinstance(a, float) or isinstance(b, float):
        return combine(*(value.usual if isinstance(value, Size) else value for value in (a, b)))
    if isinstance(a, list | tuple | str) or isinstance(b, list | tuple | str):
        raise UndecidedSizeError(f"a list must be repeated a number of times, got the size {b}; fix it, as in --shape "
                                 "NAME=8,128")
    expr = _ON_EXPRESSIONS.get(combine, combine)(_operand(a), _operand(b))
    if not all(isinstance(each, Size) or hasattr(each, "__index__") for each in (a, b)):
        return expr
    with _analyzer(expr) as analyzer:
        return size_of(_upward(analyzer.simplify(expr)))


def _upward(expr: Any) -> Any:
    """``a // -b``, to which the analyzer simplifies ``-a // b``, as ``-((a - 1) // b + 1)``: of that TVM knows that
    ``i // b`` is less for every ``i < a``."""
    if isinstance(expr, tirx.FloorDiv) and isinstance(expr.b, tirx.IntImm) and int(expr.b.value) < 0:
        by = -int(expr.b.value)
        return (tirx.floordiv(expr.a - 1, tirx.const(by, "int64")) + 1) * -1
    return expr


def _variables(expr: Any) -> list[tirx.Var]:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, [(tirx.Var, found.append)], order="pre")
    return list(dict.fromkeys(found))


def _substituted(expr: Any, values: Mapping[Any, Any]) -> Any:
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)), order="pre")


@contextlib.contextmanager
def _analyzer(expr: Any) -> Iterator[Any]:
    """One that knows the ranges of the free dimensions in ``expr``, and what they come to together."""
    analyzer, free, (names, total) = tvm.sym.Analyzer(), in_scope(), _together.get()
    variables = _variables(expr)
    for var in variables:
        known = free.get(str(var.name))
        if known is not None:
            low, high = (tirx.const(bound, str(var.ty)) for bound in (known.range.low, known.range.high + 1))
            analyzer.bind(var, tvm.ir.Range(low, high))
    together = [var for var in variables if str(var.name) in names]
    if len(together) < 2:
        yield analyzer
        return
    sizes, rest = sum(together[1:], together[0]), functools.reduce(operator.sub, together, total)
    with analyzer.constraint_scope(tirx.all(sizes <= total, rest >= 0)):  # it knows but what is written the same way
        yield analyzer


def _proves(condition: Any) -> bool:
    if isinstance(condition, bool):
        return condition
    if hasattr(condition, "asobject"):  # what `==` makes
        condition = condition.asobject()
    with _analyzer(condition) as analyzer:
        return bool(analyzer.can_prove(condition))


def _decided(condition: Any, opposite: Any) -> bool:
    if _proves(condition):
        return True
    if _proves(opposite):
        return False
    raise UndecidedSizeError(f"whether {condition} must not depend on a free size; fix it, as in --shape NAME=8,128")
