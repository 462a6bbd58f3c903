"""Compute equal things once.

Before: ``a = R.exp(x); b = R.exp(x); R.add(a, b)``. After: ``a = R.exp(x); R.add(a, a)``.
"""

from __future__ import annotations

from tvm import relax

__all__ = ["ShareCommon"]

ShareCommon = relax.transform.EliminateCommonSubexpr()
