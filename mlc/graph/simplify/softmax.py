"""Recognises softmax in the form that exporters write.

Before: ``e = R.exp(x - R.max(x, axis, keepdims=True)); e / R.sum(e, axis, keepdims=True)``

After: ``R.nn.softmax(x, axis)``, which subtracts the maximum also where the exporter did not.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import Rules, Scope, rewrite_pass, shape_of

__all__ = ["RecogniseSoftmax"]


def _along(expr: relax.Expr, scope: Scope, name: str) -> tuple[relax.Expr, int] | None:
    """``(x, axis)`` of a reduction of ``x`` along one axis that it keeps."""
    reduction = scope.call(expr, name)
    if reduction is None or not bool(reduction.attrs.keepdims) or reduction.attrs.axis is None:
        return None
    axes = [int(a) % len(shape_of(reduction)) for a in reduction.attrs.axis]
    return (reduction.args[0], axes[0]) if len(axes) == 1 else None


def recognise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``e / sum(e)`` for ``e`` the exponential of something."""
    exponential, total = scope.call(call.args[0], "exp"), _along(call.args[1], scope, "sum")
    if exponential is None or total is None or not total[0].same_as(call.args[0]):
        return None
    data = exponential.args[0]
    shifted = scope.call(data, "subtract")
    if shifted is not None:
        peak = _along(shifted.args[1], scope, "max")
        if peak is not None and peak[0].same_as(shifted.args[0]) and peak[1] == total[1]:
            data = shifted.args[0]
    return op.nn.softmax(data, axis=total[1])


RULES: Rules = {"relax.divide": (recognise,)}

RecogniseSoftmax = rewrite_pass("RecogniseSoftmax", RULES)
