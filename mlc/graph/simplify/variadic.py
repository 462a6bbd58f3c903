"""Sums and other folds of a fixed number of tensors, which importers write as a reduction of their stack.

Before: ``R.sum(R.stack((a, b, c), axis=0), axis=0)``. After: ``(a + b) + c``, which a kernel takes as its epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import Rule, Rules, Scope, dtype_of, rewrite_pass, shape_of

__all__ = ["UnstackReductions"]


def _fold(build: Callable[..., relax.Expr], divide: bool = False) -> Rule:
    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        stack = scope.call(call.args[0], "stack")
        if stack is None or call.attrs.axis is None or bool(call.attrs.keepdims):
            return None
        rank = len(shape_of(stack))
        axis = int(stack.attrs.axis) if stack.attrs.axis is not None else 0
        if [int(a) % rank for a in call.attrs.axis] != [axis % rank]:
            return None
        parts = scope.value(stack.args[0])
        if not isinstance(parts, relax.Tuple):
            return None
        total = reduce(lambda left, right: scope.emit(build(left, right)), parts.fields)
        return op.divide(total, relax.const(float(len(parts.fields)), dtype_of(call))) if divide else total

    return rule


RULES: Rules = {
    "relax.sum": (_fold(op.add),),
    "relax.prod": (_fold(op.multiply),),
    "relax.max": (_fold(op.maximum),),
    "relax.min": (_fold(op.minimum),),
    "relax.mean": (_fold(op.add, divide=True),),
}

UnstackReductions = rewrite_pass("UnstackReductions", RULES)
