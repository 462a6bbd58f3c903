"""Arithmetic is moved before broadcasts, to the smaller tensor.

=====================================  ===========================================
before                                 after
=====================================  ===========================================
``f(broadcast_to(x))``, elementwise    ``broadcast_to(f(x))``
``broadcast_to(broadcast_to(x))``      ``broadcast_to(x)``
``broadcast_to(x) + y`` of the shape   ``x + y``
``(x * s) * t``, both smaller          ``x * (s * t)``; sums likewise
=====================================  ===========================================
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import Rules, Scope, is_constant, op_name, rewrite_pass, shape_of
from mlc.graph.simplify.arithmetic import is_float
from mlc.operators import relax_where

__all__ = ["ShrinkBroadcasts"]


_FUNCTIONS = relax_where(lambda each: each.pointwise and each.arity == 1)
_COMBINATIONS = relax_where(lambda each: each.pointwise and each.arity == 2)


def function_of_broadcast(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(broadcast_to(x)) --> broadcast_to(f(x))``."""
    spread = scope.call(call.args[0], "broadcast_to")
    if spread is None or not scope.once(call.args[0]):
        return None
    small = scope.emit(relax.Call(call.op, [spread.args[0], *call.args[1:]], call.attrs, call.ty_args))
    return op.broadcast_to(small, shape_of(call))


def broadcast_of_broadcast(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``broadcast_to(broadcast_to(x)) --> broadcast_to(x)``."""
    inner = scope.call(call.args[0], "broadcast_to")
    return op.broadcast_to(inner.args[0], shape_of(call)) if inner is not None else None


def implied(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``broadcast_to(x) + y --> x + y`` where the operator broadcasts as far."""
    args = list(call.args)
    for place, arg in enumerate(args):
        spread = scope.call(arg, "broadcast_to")
        if spread is None:
            continue
        shapes = [shape_of(spread.args[0] if i == place else other) for i, other in enumerate(args)]
        if np.broadcast_shapes(*shapes) == shape_of(call):
            args[place] = spread.args[0]
            return relax.Call(call.op, args, call.attrs, call.ty_args)
    return None


def smaller_first(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``(x * s) * t --> x * (s * t)`` where that has fewer elements. Constants are left to
    :mod:`mlc.graph.simplify.affine`, which has products take them in."""
    name = op_name(call).removeprefix("relax.")
    if not is_float(call):
        return None
    for outer, small in (tuple(call.args), tuple(reversed(call.args))):
        inner = scope.call(outer, name) if scope.once(outer) else None
        if inner is None or is_constant(small) or any(is_constant(arg) for arg in inner.args):
            continue
        for large, other in (tuple(inner.args), tuple(reversed(inner.args))):
            both = np.broadcast_shapes(shape_of(other), shape_of(small))
            if math.prod(both) < math.prod(shape_of(inner)) and shape_of(large) == shape_of(call):
                build = getattr(op, name)
                return build(large, scope.emit(build(other, small)))
    return None


RULES: Rules = {
    **{f"relax.{name}": (function_of_broadcast,) for name in _FUNCTIONS},
    **{f"relax.{name}": (implied,) for name in _COMBINATIONS if name not in ("add", "multiply")},
    **{f"relax.{name}": (implied, smaller_first) for name in ("add", "multiply")},
    "relax.broadcast_to": (broadcast_of_broadcast,),
}

ShrinkBroadcasts = rewrite_pass("ShrinkBroadcasts", RULES)
