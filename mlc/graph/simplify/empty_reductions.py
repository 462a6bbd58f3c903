"""Reductions and products over no elements (of an empty slice, say) become constants: the neutral element.

Before::

    empty = R.strided_slice(x, [1], [5], [5])     # (2, 0)
    y = R.max(empty, axis=1)

After: ``R.const([-inf, -inf])``.

A schedule would not do: what initialises a sum stands inside of the loop that adds, which runs zero times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax

from mlc.graph.ir.constants import constant
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of

__all__ = ["FoldEmptyReductions"]


def _lowest(dtype: np.dtype) -> object:
    return -np.inf if dtype.kind not in "iub" else np.iinfo(dtype).min if dtype.kind != "b" else False


def _highest(dtype: np.dtype) -> object:
    return np.inf if dtype.kind not in "iub" else np.iinfo(dtype).max if dtype.kind != "b" else True


#: what each makes of no elements; a mean divides zero by zero
_NEUTRAL: dict[str, Callable[[np.dtype], object]] = {
    "sum": lambda dtype: 0, "prod": lambda dtype: 1, "max": _lowest, "min": _highest, "mean": lambda dtype: np.nan,
    "variance": lambda dtype: np.nan, "std": lambda dtype: np.nan, "matmul": lambda dtype: 0,
}


def _filled(name: str) -> Callable[[relax.Call, Scope], relax.Expr | None]:
    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        """``f(x) --> c`` where ``x`` has no elements and the result some."""
        shape = shape_of(call)
        if 0 in shape or not any(0 in shape_of(arg) for arg in call.args):
            return None
        dtype = np.dtype(dtype_of(call))
        return constant(np.full(shape, _NEUTRAL[name](dtype), dtype))

    return rule


RULES: Rules = {f"relax.{name}": (_filled(name),) for name in _NEUTRAL}

FoldEmptyReductions = rewrite_pass("FoldEmptyReductions", RULES)
