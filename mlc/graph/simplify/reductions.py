"""Reductions of reductions, over axes of length 1, and of monotone functions.

=====================================  ================================================
before                                 after
=====================================  ================================================
``sum(x)`` over axes of length 1       ``reshape(x)``; mean, maximum, minimum, product likewise
``sum(sum(x, axis=2), axis=1)``        ``sum(x, axis=[1, 2])``, likewise
``max(tanh(x))``, ``min``, max pools   ``tanh(max(x))``: it is computed for fewer elements
``log(softmax(x))``                    ``log_softmax(x)``, which is finite where a probability underflows
=====================================  ================================================

What is moved past a maximum has no other use and is monotone on all reals. One that is a comparison itself (relu) stays
where it is, since the product that makes its argument takes it in.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import Rules, Scope, op_name, rewrite_pass, shape_of
from mlc.operators import OPERATORS

__all__ = ["MergeReductions"]

_REDUCTIONS = ("sum", "mean", "max", "min", "prod")
#: monotone functions that are worth computing for fewer elements
_GROWING = tuple(
    each.relax.name for each in OPERATORS.values()
    if each.relax is not None and each.laws is not None and each.laws.grows and not each.laws.idempotent
)


def _axes(call: relax.Call) -> list[int]:
    """The axes that a reduction is over, from 0."""
    rank = len(shape_of(call.args[0]))
    return list(range(rank)) if call.attrs.axis is None else sorted(int(axis) % rank for axis in call.attrs.axis)


def of_one(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``sum(x) --> reshape(x)`` where every element is a sum of one."""
    shape = shape_of(call.args[0])
    return op.reshape(call.args[0], shape_of(call)) if all(shape[axis] == 1 for axis in _axes(call)) else None


def of_reduction(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``sum(sum(x, axis=b), axis=a) --> sum(x, axis=a + b)``; equal numbers of elements go into each inner mean."""
    name = op_name(call).removeprefix("relax.")
    inner = scope.call(call.args[0], name)
    if inner is None or not scope.once(call.args[0]) or bool(inner.attrs.keepdims) != bool(call.attrs.keepdims):
        return None
    first, second = _axes(inner), _axes(call)
    kept = list(range(len(shape_of(inner.args[0]))))
    if not bool(inner.attrs.keepdims):
        kept = [axis for axis in kept if axis not in first]
    axes = sorted({*first, *(kept[axis] for axis in second)})
    return getattr(op, name)(inner.args[0], axis=axes, keepdims=bool(call.attrs.keepdims))


def of_growing(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``max(f(x)) --> f(max(x))`` for monotone ``f``."""
    inner = scope.call(call.args[0], *_GROWING)
    if inner is None or not scope.once(call.args[0]):
        return None
    if "pool" in op_name(call) and bool(call.attrs.ceil_mode):
        return None  # a window may be nothing but padding, whose maximum no element is
    reduced = scope.emit(relax.Call(call.op, [inner.args[0], *call.args[1:]], call.attrs, call.ty_args))
    return relax.Call(inner.op, [reduced], inner.attrs, inner.ty_args)


def log_softmax(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``log(softmax(x)) --> log_softmax(x)``."""
    softmax = scope.call(call.args[0], "nn.softmax")
    if softmax is None or not scope.once(call.args[0]):
        return None
    return op.nn.log_softmax(softmax.args[0], axis=int(softmax.attrs.axis))


RULES: Rules = {
    **{f"relax.{name}": (of_one, of_reduction) for name in _REDUCTIONS if name not in ("max", "min")},
    **{f"relax.{name}": (of_one, of_reduction, of_growing) for name in ("max", "min")},
    **{f"relax.nn.max_pool{rank}d": (of_growing,) for rank in (1, 2, 3)},
    "relax.log": (log_softmax,),
}

MergeReductions = rewrite_pass("MergeReductions", RULES)
