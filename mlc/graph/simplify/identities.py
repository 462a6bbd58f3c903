"""Drop operators that change nothing: ``x + 0``, ``x * 1``, a cast to the same type, a reshape to the same shape, an
empty part of a concatenation.

Before::

    a = R.nn.dropout(x)[0]; b = R.reshape(a, x.shape); c = R.add(b, R.const(0.0))

After: ``x``.
"""

from __future__ import annotations

from tvm import relax

from mlc.graph.ir.constants import scalar_of
from mlc.graph.ir.rewrite import PROJECTION, Rules, Scope, dtype_of, is_constant, op_name, rewrite_pass, shape_of
from mlc.operators import OPERATORS

__all__ = ["DropIdentities"]


def _same_type(call: relax.Call, arg: relax.Expr) -> relax.Expr | None:
    same = shape_of(call) == shape_of(arg) and dtype_of(call) == dtype_of(arg)
    return arg if same else None


def same_shape(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(x) --> x`` for movers of whole tensors whose result has the argument's shape and order."""
    return _same_type(call, call.args[0])


def same_order(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims(x, (0, 1, ..)) --> x``."""
    rank = len(shape_of(call))
    axes = call.attrs.axes
    order = [int(a) % rank for a in axes] if axes is not None else list(range(rank))[::-1]
    return call.args[0] if order == list(range(rank)) else None


def neutral_scalar(neutral: int, commutes: bool):  # type: ignore[no-untyped-def]
    """``x op c --> x`` where every element of the constant ``c`` is the operator's neutral element."""

    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        left, right = call.args
        for value, other in ((left, right), (right, left)) if commutes else ((left, right),):
            if is_constant(other) and not is_constant(value):
                array = scope.array(other)
                if array is not None and array.size <= 1 << 16 and (array == neutral).all():
                    return _same_type(call, value)
        return None

    return rule


def first_power(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``power(x, 1) --> x``."""
    return _same_type(call, call.args[0]) if scalar_of(call.args[1]) == 1.0 else None


def no_pad(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``pad(x, 0) --> x``."""
    return call.args[0] if not any(int(p) for p in call.attrs.pad_width) else None


def empty_parts(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``concat((x, y[:, 5:5])) --> concat((x,)) --> x``."""
    parts = scope.value(call.args[0])
    if not isinstance(parts, relax.Tuple):
        return None
    held = [part for part in parts.fields if 0 not in shape_of(part)]
    if len(held) == 1:
        return held[0]
    return relax.op.concat(held, call.attrs.axis) if 0 < len(held) < len(parts.fields) else None


def idempotent(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(f(x)) --> f(x)``, as of relu."""
    return call.args[0] if scope.call(call.args[0], op_name(call).removeprefix("relax.")) is not None else None


def known_field(item: relax.TupleGetItem, scope: Scope) -> relax.Expr | None:
    """``(a, b)[1] --> b``; the data of a dropout, which inference leaves alone."""
    source = scope.value(item.tuple_value)
    if isinstance(source, relax.Tuple):
        return source.fields[item.index]
    dropout = scope.call(item.tuple_value, "nn.dropout")
    return dropout.args[0] if dropout is not None and item.index == 0 else None


RULES: Rules = {
    PROJECTION: (known_field,),
    **{f"relax.{each.relax.name}": (neutral_scalar(each.neutral, each.commutative),) for each in OPERATORS.values()
       if each.relax is not None and each.neutral is not None},
    **{f"relax.{each.relax.name}": (idempotent,) for each in OPERATORS.values()
       if each.relax is not None and each.laws is not None and each.laws.idempotent},
    "relax.power": (first_power,),
    "relax.astype": (same_shape,),
    "relax.reshape": (same_shape,),
    "relax.flatten": (same_shape,),
    "relax.nn.batch_flatten": (same_shape,),
    "relax.squeeze": (same_shape,),
    "relax.broadcast_to": (same_shape,),
    "relax.permute_dims": (same_order,),
    "relax.nn.pad": (no_pad,),
    "relax.concat": (empty_parts,),
}

DropIdentities = rewrite_pass("DropIdentities", RULES)
