"""Keeps comparisons of floating-point numbers correct for NaN.

TVM takes ``not a < b`` for ``a >= b``, and ``a != b`` for what LLVM calls "less or greater": either is false where a
number is NaN, and should be true. :func:`keep_unordered` says so in terms that TVM's simplifier leaves alone.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from schedules.analysis import walk

__all__ = ["keep_unordered"]

_COMPARED = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def keep_unordered(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with what is not less, equal, ... to NaN true; the same object where nothing asks for that.

    ``not a < b   -->   int32(a < b) == 0``
    """
    changed = [False]

    def opposite(truth: Any) -> Any:
        changed[0] = True
        return tirx.EQ(tirx.Cast("int32", truth), tirx.const(0, "int32"))

    def differs(node: tirx.NE) -> Any:
        return opposite(tirx.EQ(node.a, node.b)) if _floats(node) else node

    def negation(node: tirx.Not) -> Any:
        return opposite(node.a) if _compares(node.a) else node

    body = tvm_ffi.structural_map(func.body, [(tirx.NE, differs), (tirx.Not, negation)])
    return func.with_body(body) if changed[0] else func


def _compares(truth: Any) -> bool:
    """Whether a truth value compares floating-point numbers somewhere."""
    found: list[bool] = []
    walk(truth, (_COMPARED, lambda node: found.append(_floats(node))))
    return any(found)


def _floats(node: Any) -> bool:
    return str(node.a.ty).startswith(("float", "bfloat"))
