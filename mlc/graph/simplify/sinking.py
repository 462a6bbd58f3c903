"""Reshapes and transposes sink towards the outputs, past everything that they commute with.

========================================  ====================================================
before                                    after
========================================  ====================================================
``f(permute_dims(x))``, elementwise       ``permute_dims(f(x))``
``f(reshape(x))``, elementwise            ``reshape(f(x))``
``reshape(x) + y``                        ``reshape(x + reshape(y))``
``x' * f(x')`` for ``x' = reshape(x)``    ``reshape(x * f(x))``, transposes likewise
``softmax(reshape(x))`` along whole rows  ``reshape(softmax(x))``
``matmul(x[.., K], W)`` for rank(x) > 2   ``reshape(matmul(reshape(x, [M, K]), W))``
========================================  ====================================================

``SinkQuantised`` counts quantising by one scale among the elementwise operators.

A reshape is a view and costs nothing, so the aim is to have none between operators that could be one kernel; a
transpose copies, so the aim is to have two meet and cancel. Both move only if nothing else uses their result.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import Rules, Scope, is_constant, op_name, rewrite_pass, shape_of
from mlc.graph.simplify.movement import RULES as MERGING
from mlc.operators import relax_where

__all__ = ["SinkMovement", "SinkQuantised"]

#: elementwise operators of one tensor; their other arguments, if any, are scalars
UNARY = relax_where(lambda each: each.pointwise and each.arity == 1)
BINARY = relax_where(lambda each: each.pointwise and each.arity == 2)
#: operators along the last axis, named by an attribute
ALONG_LAST = ("nn.softmax", "nn.log_softmax")
#: operators one after another that are looked at as one function, each quantised and dequantised where that counts
_DEPTH = 8


def _with_args(call: relax.Call, args: list[relax.Expr]) -> relax.Call:
    return relax.Call(call.op, args, call.attrs, call.ty_args)


def transpose_after_unary(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(permute_dims(x)) --> permute_dims(f(x))``."""
    move = scope.call(call.args[0], "permute_dims")
    if move is None or not scope.once(call.args[0]):
        return None
    return op.permute_dims(scope.emit(_with_args(call, [move.args[0], *call.args[1:]])), permutation(move))


def reshape_after_unary(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(reshape(x)) --> reshape(f(x))``."""
    move = scope.call(call.args[0], "reshape")
    if move is None or not scope.once(call.args[0]) or is_constant(move.args[0]):
        return None
    return op.reshape(scope.emit(_with_args(call, [move.args[0], *call.args[1:]])), shape_of(call))


def reshape_after_quantising(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(reshape(x)) --> reshape(quantize(x))``; ``dequantize`` likewise where the kernel that makes the
    bytes can end so: of others they are what is seen in another shape."""
    move = scope.call(call.args[0], "reshape")
    if move is None or shape_of(call.args[1]):
        return None
    source = move.args[0]
    if op_name(call) == "relax.dequantize" and not (scope.once(source) or _takes_epilogue(source, scope)):
        return None
    return reshape_after_unary(call, scope)


def transpose_after_binary(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims(x, p) + permute_dims(y, p) --> permute_dims(x + y, p)``; ``y`` may be a constant."""
    moves = [scope.call(arg, "permute_dims") if scope.once(arg) else None for arg in call.args]
    move = next((m for m in moves if m is not None), None)
    if move is None:
        return None
    order = permutation(move)
    args: list[relax.Expr] = []
    for arg, other in zip(call.args, moves, strict=True):
        if other is not None and permutation(other) == order:
            args.append(other.args[0])
            continue
        array = array_of(arg)
        if array is None or array.ndim > len(order):
            return None
        spread = array.reshape([1] * (len(order) - array.ndim) + list(array.shape))
        args.append(arg if array.size == 1 and array.ndim == 0 else constant(spread.transpose(np.argsort(order))))
    return op.permute_dims(scope.emit(_with_args(call, args)), order)


def reshape_after_binary(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``reshape(x) + y --> reshape(x + y')`` where ``y'`` is ``y`` seen in the shape of ``x``.

    A ``y`` that would need a reshape of its own moves only to make a kernel's epilogue of the sum.
    """
    shape = shape_of(call)
    for side, arg in enumerate(call.args):
        move = scope.call(arg, "reshape")
        if move is None or not scope.once(arg) or shape_of(arg) != shape or is_constant(move.args[0]):
            continue
        source, other = move.args[0], call.args[1 - side]
        if shape_of(other) == shape and not is_constant(other):
            twin = scope.call(other, "reshape")
            same = twin is not None and shape_of(twin.args[0]) == shape_of(source)
            if not same and (_takes_epilogue(other, scope) or not _takes_epilogue(source, scope)):
                continue
        seen = _seen_in(other, shape, shape_of(source), scope)
        if seen is not None:
            args = [source, seen] if side == 0 else [seen, source]
            return op.reshape(scope.emit(_with_args(call, args)), shape)
    return None


def move_after_shared(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``x' * f(x') --> move(x * f(x))`` where ``x' = move(x)`` and nothing else uses it."""
    found = _leaves(call, scope, _DEPTH if not _is_unary("quantize", scope) else 3 * _DEPTH)
    if not found or len(found) < 2 or any(not leaf.same_as(found[0]) for leaf in found):
        return None
    move, shape = scope.call(found[0], "permute_dims", "reshape"), shape_of(call)
    if move is None or scope.uses(found[0]) != len(found) or shape_of(found[0]) != shape or is_constant(move.args[0]):
        return None
    source = move.args[0]
    order = permutation(move) if scope.call(found[0], "permute_dims") is not None else None

    def before(expr: relax.Expr) -> relax.Expr | None:
        if expr.same_as(found[0]):
            return source
        array = array_of(expr)
        if array is None:
            return moved(scope.value(expr))
        if order is None:
            return _seen_in(expr, shape, shape_of(source), scope)
        if array.size == 1:
            return expr
        return constant(array.reshape([1] * (len(order) - array.ndim) + list(array.shape)).transpose(np.argsort(order)))

    def moved(each: relax.Call) -> relax.Expr | None:
        count = len(each.args) if op_name(each).removeprefix("relax.") in BINARY else 1
        args = [before(arg) for arg in each.args[:count]]
        if any(arg is None for arg in args):
            return None
        return scope.emit(_with_args(each, [*args, *each.args[count:]]))

    result = moved(call)
    if result is None:
        return None
    return op.reshape(result, shape) if order is None else op.permute_dims(result, order)


def reshape_before_outer_product(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``reshape(row * column, [M, N]) --> row * reshape(column, [M, 1])`` for a constant row, which a kernel's epilogue
    takes in."""
    product, shape = scope.call(call.args[0], "multiply"), shape_of(call)
    row = array_of(product.args[0]) if product is not None and len(shape) == 2 else None
    if product is None or row is None or row.size != shape[1] or not scope.once(call.args[0]):
        return None
    column = product.args[1]
    if row.shape[-1:] != (shape[1],) or shape_of(column)[-1:] != (1,) or math.prod(shape_of(column)) != shape[0]:
        return None
    return op.multiply(constant(row.reshape(-1)), scope.emit(op.reshape(column, (shape[0], 1))))


def _leaves(expr: relax.Expr, scope: Scope, depth: int) -> list[relax.Expr]:
    """The variables, as often as they occur, that elementwise operators which nothing else uses make ``expr`` of."""
    if is_constant(expr):
        return []
    value = scope.value(expr)
    name = op_name(value).removeprefix("relax.") if isinstance(value, relax.Call) else ""
    if depth == 0 or not (_is_unary(name, scope) or name in BINARY) or not (value.same_as(expr) or scope.once(expr)):
        return [expr]
    args = value.args if name in BINARY else value.args[:1]
    return [leaf for arg in args for leaf in _leaves(arg, scope, depth - 1)]


def _takes_epilogue(expr: relax.Expr, scope: Scope) -> bool:
    """Whether an elementwise operator on ``expr`` can become part of the kernel of a product before it."""
    value = scope.value(expr)
    if not scope.once(expr) or not isinstance(value, relax.Call):
        return False
    name = op_name(value).removeprefix("relax.")
    if _is_unary(name, scope) or name in BINARY:
        return any(_takes_epilogue(arg, scope) for arg in value.args)
    return name == "matmul" or name.startswith("nn.conv")


def _is_unary(name: str, scope: Scope) -> bool:
    """Whether movement sinks past the operator as past elementwise ones of one tensor."""
    return name in UNARY or reshape_after_quantising in scope.rules(name)


def _seen_in(expr: relax.Expr, shape: tuple[int, ...], new: tuple[int, ...], scope: Scope) -> relax.Expr | None:
    """``expr``, which broadcasts to ``shape``, as something that broadcasts to ``new`` in the same way."""
    own = shape_of(expr)
    if own == shape:
        number = scope.call(expr, "dequantize") if _is_unary("dequantize", scope) else None
        if number is not None and not shape_of(number.args[1]):  # bytes are read, not what they stand for
            return scope.emit(_with_args(number, [scope.emit(op.reshape(number.args[0], new)), *number.args[1:]]))
        return scope.emit(op.reshape(expr, new))
    trimmed = own[next((i for i, dim in enumerate(own) if dim != 1), len(own)) :]
    if not trimmed:
        return scope.emit(op.reshape(expr, ())) if own else expr
    unit = next((i for i in range(len(new)) if (*new[:i], *new[i + 1 :]) == shape and new[i] == 1), None)
    if unit is not None:  # one more axis
        spread = [1] * (len(shape) - len(own)) + list(own)
        return scope.emit(op.reshape(expr, (*spread[:unit], 1, *spread[unit:])))
    rank = len(trimmed)
    if rank <= len(new) and shape[-rank:] == new[-rank:]:
        return expr if own == trimmed else scope.emit(op.reshape(expr, trimmed))
    return None


def reshape_after_row_operator(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``softmax(reshape(x)) --> reshape(softmax(x))`` along a last axis that the reshape keeps."""
    move = scope.call(call.args[0], "reshape")
    if move is None or not scope.once(call.args[0]):
        return None
    old, new = shape_of(move.args[0]), shape_of(call)
    if not old or old[-1] != new[-1]:
        return None
    data = move.args[0]
    if scope.call(call, "nn.layer_norm") is not None:
        attrs = call.attrs
        if [int(a) % len(new) for a in attrs.axes] != [len(new) - 1]:
            return None
        result = op.nn.layer_norm(data, *call.args[1:], axes=[-1], epsilon=float(attrs.epsilon),
                                  center=bool(attrs.center), scale=bool(attrs.scale))
    else:
        if int(call.attrs.axis) % len(new) != len(new) - 1:
            return None
        build = op.nn.softmax if scope.call(call, "nn.softmax") is not None else op.nn.log_softmax
        result = build(data, axis=-1)
    return op.reshape(scope.emit(result), new)


def flat_dense(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``matmul(x[.., K], W) --> reshape(matmul(reshape(x, [M, K]), W))`` for constant weights of rank 2."""
    data, weight = call.args
    shape = shape_of(data)
    if len(shape) <= 2 or array_of(weight) is None or len(shape_of(weight)) != 2:
        return None
    flat = scope.emit(op.reshape(data, (math.prod(shape[:-1]), shape[-1])))
    product = relax.Call(call.op, [flat, weight], call.attrs, call.ty_args)
    return op.reshape(scope.emit(product), shape_of(call))


RULES: Rules = {
    **MERGING,
    "relax.matmul": (flat_dense,),
    "relax.nn.layer_norm": (reshape_after_row_operator,),
    **{f"relax.{name}": (reshape_after_row_operator,) for name in ALONG_LAST},
    **{f"relax.{name}": (transpose_after_unary, reshape_after_unary) for name in UNARY},
    **{f"relax.{name}": (transpose_after_binary, reshape_after_binary, move_after_shared) for name in BINARY},
}

SinkMovement = rewrite_pass("SinkMovement", RULES)
SinkQuantised = rewrite_pass("SinkQuantised", {
    **RULES, **dict.fromkeys(("relax.quantize", "relax.dequantize"), (reshape_after_quantising,)),
    "relax.reshape": (*RULES["relax.reshape"], reshape_before_outer_product)})
