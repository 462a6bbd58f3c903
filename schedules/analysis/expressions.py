"""Expressions of a tensor function: which variables and buffers occur in them, and their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

__all__ = [
    "branches", "choices", "evaluate", "expensive_calls", "expression_size", "loads", "op_name", "reads_wide_indices",
    "replaced", "stores_wide_positions", "uses", "walk",
]

#: TVM intrinsics, which tensor functions are made of whatever graph they come from; a use of one of these per element
#: outweighs a load, so that computing it twice is worth a buffer
_EXPENSIVE = frozenset({
    "exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "pow", "erf", "tanh", "sigmoid", "sin", "cos", "tan",
    "sinh", "cosh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "sqrt", "rsqrt", "fmod",
    "call_pure_extern", "call_extern", "call_llvm_pure_intrin",
})

_INTEGER_OPS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Div: lambda a, b: np.trunc(a / b).astype(np.int64),
    tirx.Mod: lambda a, b: np.fmod(a, b),
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b,
    tirx.EQ: lambda a, b: a == b,
    tirx.NE: lambda a, b: a != b,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}


def op_name(call: Call) -> str:
    """The operator's bare name: ``exp`` for a call to ``tirx.exp``; empty for a call of anything else."""
    return str(getattr(call.op, "name", "")).rpartition(".")[2]


def walk(node: Any, *entries: tuple[Any, Callable[[Any], Any]]) -> None:
    """Call ``entries`` = (type, callback) on every matching node below and including ``node``, children first."""
    tvm_ffi.structural_walk(node, [(kind, lambda value, f=f: (f(value), None)[1]) for kind, f in entries])


def replaced(node: Any, values: Mapping[Any, Any]) -> Any:
    """An expression or statement with ``values`` in place of the variables that are their keys."""
    return tvm_ffi.structural_map(node, (tirx.Var, lambda var: values.get(var, var)))


def loads(node: Any) -> list[TensorLoad]:
    """Every load in ``node``, inner ones first."""
    found: list[TensorLoad] = []
    walk(node, (TensorLoad, found.append))
    return found


def expression_size(body: Any) -> int:
    """The number of expression nodes in ``body``, as it would be printed."""
    count = [0]
    walk(body, (Expr, lambda _: count.__setitem__(0, count[0] + 1)))
    return count[0]


def choices(body: Any) -> int:
    """The number of ``Select`` and ``if_then_else`` in ``body``."""
    count = [0]

    def chosen(_: Any) -> None:
        count[0] += 1

    walk(body, (tirx.Select, chosen), (Call, lambda call: chosen(call) if op_name(call) == "if_then_else" else None))
    return count[0]


def uses(node: Any, variables: Sequence[tirx.Var]) -> frozenset[int]:
    """The positions of those ``variables`` that occur in ``node``."""
    free = tirx.analysis.undefined_vars(node)
    return frozenset(i for i, v in enumerate(variables) if any(v.same_as(f) for f in free))


def evaluate(expr: Any, values: Mapping[tirx.Var, Any]) -> Any:
    """An integer expression over numpy values of its variables; None where it reads memory or is no integer."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, tirx.IntImm):
        return int(expr.value)
    if isinstance(expr, tirx.Var):
        return values.get(expr)
    if isinstance(expr, tirx.Cast):
        return evaluate(expr.value, values)
    if isinstance(expr, tirx.Not):
        inner = evaluate(expr.a, values)
        return None if inner is None else np.logical_not(inner)
    choice = branches(expr)
    if choice is not None:
        condition, yes, no = (evaluate(e, values) for e in choice)
        return None if condition is None or yes is None or no is None else np.where(condition, yes, no)
    operation = _INTEGER_OPS.get(type(expr))
    if operation is None:
        return None
    a, b = evaluate(expr.a, values), evaluate(expr.b, values)
    return None if a is None or b is None else operation(a, b)


def branches(expr: Any) -> tuple[Any, Any, Any] | None:
    """Condition and both values of a choice; None for anything else."""
    if isinstance(expr, tirx.Select):
        return expr.condition, expr.true_value, expr.false_value
    if isinstance(expr, Call) and op_name(expr) == "if_then_else":
        return expr.args[0], expr.args[1], expr.args[2]
    return None


def reads_wide_indices(body: Any) -> bool:
    """Whether ``body`` loads where 64-bit integers that it has loaded say."""
    found = [False]

    def index(node: TensorLoad) -> None:
        found[0] = found[0] or str(node.source.dtype) == "int64"

    def load(node: TensorLoad) -> None:
        for position in node.indices:
            walk(position, (TensorLoad, index))

    walk(body, (TensorLoad, load))
    return found[0]


def stores_wide_positions(body: Any) -> bool:
    """Whether ``body`` makes 64-bit integers of its iteration variables, as an argmax does."""
    found = [False]

    def variable(node: tirx.Var) -> None:
        found[0] = found[0] or str(node.ty) == "int64"

    def value(node: tirx.BufferStore | tirx.Bind) -> None:
        skipped = (TensorLoad, lambda _load: tvm_ffi.WalkResult.SKIP)  # where it loads is no value
        tvm_ffi.structural_walk(node.value, [skipped, (tirx.Var, variable)], order="pre")

    walk(body, ((tirx.BufferStore, tirx.Bind), lambda node: value(node) if str(node.value.ty) == "int64" else None))
    return found[0]


def expensive_calls(body: Any) -> int:
    """How many transcendental or otherwise slow calls and divisions ``body`` makes."""
    count = [0]

    def call(node: Call) -> None:
        count[0] += op_name(node) in _EXPENSIVE

    def division(node: tirx.Div) -> None:
        count[0] += not isinstance(node.b, tirx.FloatImm | tirx.IntImm)

    walk(body, (Call, call), (tirx.Div, division))
    return count[0]
