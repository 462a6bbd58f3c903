"""Drop operators that change nothing: ``x + 0``, ``x * 1``, a cast to the same type, a reshape to the same shape, an
empty part of a concatenation, what is done twice (``relu(relu(x))``, ``max(x, x)``) or undone (``-(-x)``).

Before::

    a = R.nn.dropout(x)[0]; b = R.reshape(a, x.shape); c = R.add(b, R.const(0.0))

After: ``x``.
"""

from __future__ import annotations

from tvm import relax

from mlc.graph.ir.constants import number_of, scalar_of
from mlc.graph.ir.rewrite import PROJECTION, Rules, Scope, dtype_of, is_constant, op_name, rewrite_pass, shape_of
from mlc.graph.kernels.resize import is_exact
from mlc.operators import OPERATORS, relax_where

__all__ = ["DropIdentities"]

_NOT_NEGATIVE = tuple(each.relax.name for each in OPERATORS.values()
                      if each.relax is not None and each.laws is not None and each.laws.nonnegative)
#: pairs of types of which the second one holds every value of the first
_WIDER = frozenset(
    [("float16", "float32"), ("bfloat16", "float32")] +
    [(narrow, "float64") for narrow in ("float16", "bfloat16", "float32", "int32", "int16", "int8", "uint8")] +
    [(f"int{few}", f"int{many}") for few in (8, 16, 32) for many in (16, 32, 64) if few < many] +
    [("uint8", f"int{many}") for many in (16, 32, 64)] + [("int8", "float32"), ("uint8", "float32")]
)


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


def same_size(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``resize2d(x, size of x) --> x``."""
    whole = call.attrs.coordinate_transformation_mode != "tf_half_pixel_for_nn"  # from half a pixel further on
    return _same_type(call, call.args[0]) if whole and is_exact(call) else None


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
    """``f(f(x)) --> f(x)``, as of relu; ``f(x, x) --> x``, as of a maximum."""
    if len(call.args) == 2:
        return call.args[0] if call.args[0].same_as(call.args[1]) else None
    return call.args[0] if scope.call(call.args[0], op_name(call).removeprefix("relax.")) is not None else None


def involution(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(f(x)) --> x``, as of negation."""
    inner = scope.call(call.args[0], op_name(call).removeprefix("relax."))
    return inner.args[0] if inner is not None else None


def reversed_twice(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``flip(flip(x)) --> x`` along the same axis."""
    inner = scope.call(call.args[0], "flip")
    return inner.args[0] if inner is not None and int(inner.attrs.axis) == int(call.attrs.axis) else None


def not_negative(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``relu(f(x)) --> f(x)``, ``abs(f(x)) --> f(x)`` where no value of ``f`` is negative."""
    return call.args[0] if scope.call(call.args[0], *_NOT_NEGATIVE) is not None else None


def magnitude(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``abs(-x) --> abs(x)``."""
    inner = scope.call(call.args[0], "negative")
    return relax.op.abs(inner.args[0]) if inner is not None else None


def clipped_twice(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``clip(clip(x, a, b), c, d) --> clip(x, clip(a, c, d), clip(b, c, d))``."""
    inner = scope.call(call.args[0], "clip")
    bounds = [number_of(bound) for each in (inner, call) if each is not None for bound in each.args[1:]]
    numbers = [bound for bound in bounds if bound is not None]
    if inner is None or len(numbers) != 4 or numbers[0] > numbers[1] or numbers[2] > numbers[3]:
        return None
    return relax.op.clip(inner.args[0], *(min(max(bound, numbers[2]), numbers[3]) for bound in numbers[:2]))


def chosen(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``where(c, x, y) --> x`` where all elements of the constant ``c`` are true, ``y`` where none is, and
    ``where(c, x, x) --> x``."""
    condition, *values = call.args
    array = scope.array(condition)
    if values[0].same_as(values[1]):
        return _same_type(call, values[0])
    if array is None or not array.size or array.all() != array.any():
        return None
    return _same_type(call, values[0 if array.all() else 1])


def widened(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``astype(astype(x, wider), type of x) --> x``."""
    inner = scope.call(call.args[0], "astype")
    if inner is None or dtype_of(inner.args[0]) != dtype_of(call):
        return None
    return inner.args[0] if (dtype_of(call), dtype_of(inner)) in _WIDER else None


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
    **{f"relax.{name}": (idempotent,) for name in relax_where(lambda each: each.idempotent)},
    **{f"relax.{name}": (involution,) for name in relax_where(lambda each: each.involution)},
    "relax.nn.relu": (idempotent, not_negative),
    "relax.abs": (idempotent, not_negative, magnitude),
    "relax.clip": (clipped_twice,),
    "relax.where": (chosen,),
    "relax.flip": (reversed_twice,),
    "relax.power": (first_power,),
    "relax.astype": (same_shape, widened),
    "relax.reshape": (same_shape,),
    "relax.flatten": (same_shape,),
    "relax.nn.batch_flatten": (same_shape,),
    "relax.squeeze": (same_shape,),
    "relax.broadcast_to": (same_shape,),
    "relax.tile": (same_shape,),
    "relax.repeat": (same_shape,),
    "relax.permute_dims": (same_order,),
    "relax.nn.pad": (no_pad,),
    "relax.concat": (empty_parts,),
    "relax.image.resize2d": (same_size,),
}

DropIdentities = rewrite_pass("DropIdentities", RULES)
