"""Common subexpression elimination.

Before: ``a = R.exp(x); b = R.exp(x); R.add(a, b)``. After: ``a = R.exp(x); R.add(a, a)``.
"""

from __future__ import annotations

import tvm
from tvm.relax import transform

__all__ = ["EliminateCommonSubexpressions"]

EliminateCommonSubexpressions = tvm.transform.Sequential(
    [transform.EliminateCommonSubexpr(), transform.CanonicalizeBindings()], name="EliminateCommonSubexpressions"
)
