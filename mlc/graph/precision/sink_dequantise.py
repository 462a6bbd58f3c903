"""Dequantisation sinks towards the outputs, past data movement, and cancels with the quantisation that undoes it.

Every rule is bit-exact:

====================================================  ========================================================
before                                                after
====================================================  ========================================================
``dequantize(q: int8, s, z)``                         ``dequantize(q + 128: uint8, s, z + 128)``, or on GPUs the
                                                      other way round
``f(dequantize(q))``, ``f`` moves or picks elements   ``dequantize(f(q))``
``max_pool(dequantize(q))``                           ``dequantize(max_pool(q))``
``clip(dequantize(q), a, b)``, ``relu`` likewise      ``dequantize(clip(q, k, l))`` where the bounds are what integers
                                                      ``k`` and ``l`` stand for, or lie beyond them all
``concat(dequantize(a), dequantize(b))``, alike       ``dequantize(concat(a, b))``
``quantize(concat(a, b))``                            ``concat(quantize(a), quantize(b))``
``quantize(dequantize(q, s, z), s, z)``               ``q``
``quantize(clip(x, a, b))``, ``relu`` likewise        ``clip(quantize(x), quantize(a), quantize(b))``; bounds that
                                                      are the ends of the integers' type vanish
====================================================  ========================================================

``(k * s) / s`` with two roundings of float32 is within half of ``k`` for all integers of 16 bits, so that a pair
cancels. Quantising never turns the order of two numbers round, whatever it rounds halves to: so the lesser of two
quantised numbers is the lesser one quantised.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant, number_of, scalar_of
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, is_constant, rewrite_pass, shape_of
from mlc.graph.precision.affine import Affine, affine_of, dequantised, quantised, spread
from mlc.operators import relax_where

__all__ = ["MoveQuantisation", "SignedActivations", "UnsignedActivations"]

#: operators that only move elements of their first argument
_MOVERS = {*relax_where(lambda each: each.movement), "expand_dims", "flatten", "squeeze"} - {"concat", "nn.pad"}
_BYTES = ("uint8", "int8")
#: half of what 8 bits tell apart
_HALF = 128


def _dequantise(data: relax.Expr, affine: Affine, dtype: str) -> relax.Expr:
    """``dequantize`` of ``data`` whose zero points are of the type ``dtype``."""
    scale, zero = (a.reshape(()) if affine.single else a for a in (affine.scale, affine.zero))
    return op.dequantize(data, constant(scale), constant(zero, dtype), affine.axis, "float32")


def _quantise(data: relax.Expr, affine: Affine, dtype: str) -> relax.Expr:
    scale, zero = (a.reshape(()) if affine.single else a for a in (affine.scale, affine.zero))
    return op.quantize(data, constant(scale), constant(zero, dtype), affine.axis, dtype)


def _shifted(call: relax.Call, scope: Scope, dtype: str) -> relax.Expr | None:
    """``dequantize`` of an activation of the other type of 8 bits, of integers of ``dtype``."""
    found, by = dequantised(call, scope), _HALF if dtype == "uint8" else -_HALF
    if found is None or found.dtype not in {"int8", "uint8"} - {dtype}:
        return None
    if is_constant(found.data) or not found.affine.single:
        return None
    shifted = Affine(found.affine.scale, found.affine.zero + by, found.affine.axis)
    source = quantised(found.data, scope)
    if source is not None:
        data = _quantise(source[0], Affine(source[1].scale, source[1].zero + by, source[1].axis), dtype)
    else:
        wide = scope.emit(op.astype(found.data, "int16"))
        data = op.astype(scope.emit(op.add(wide, constant(np.array(by, "int16")))), dtype)
    return _dequantise(scope.emit(data), shifted, dtype)


def unsigned(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``dequantize(q: int8) --> dequantize(q + 128: uint8)``: CPUs' dot products take unsigned activations."""
    return _shifted(call, scope, "uint8")


def signed(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``dequantize(q: uint8) --> dequantize(q - 128: int8)``: tensor cores take both operands alike."""
    return _shifted(call, scope, "int8")


def after_movement(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(dequantize(q)) --> dequantize(f(q))``."""
    found = dequantised(call.args[0], scope)
    if found is None or dtype_of(call) != "float32":
        return None
    affine = found.affine
    if not affine.single:
        if str(call.op.name) != "relax.permute_dims":
            return None
        affine = Affine(affine.scale, affine.zero, permutation(call).index(affine.axis))
    moved = relax.Call(call.op, [found.data, *call.args[1:]], call.attrs, call.ty_args)
    return _dequantise(scope.emit(moved), affine, found.dtype)


def after_maximum(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``max_pool2d(dequantize(q)) --> dequantize(max_pool2d(q))``: scales are positive."""
    found = dequantised(call.args[0], scope)
    if found is None or not found.affine.single or found.dtype not in _BYTES:
        return None
    pooled = relax.Call(call.op, [found.data], call.attrs, call.ty_args)
    return _dequantise(scope.emit(pooled), found.affine, found.dtype)


def _clipped(expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, float, float] | None:
    """``(x, low, high)`` where ``expr`` is ``x`` of float32, confined to that range of numbers."""
    call = scope.call(expr, "clip", "maximum", "minimum", "nn.relu")
    if call is None or dtype_of(call) != "float32":
        return None
    name, x = str(call.op.name), call.args[0]
    if name == "relax.nn.relu":
        return x, 0.0, float("inf")
    if name == "relax.clip":
        low, high = map(number_of, call.args[1:])
        return (x, low, high) if low is not None and high is not None and low <= high else None
    x, bound = call.args if scalar_of(call.args[1]) is not None else call.args[::-1]
    number = scalar_of(bound)
    if number is None or np.isnan(number) or shape_of(x) != shape_of(call):
        return None
    return (x, number, float("inf")) if name == "relax.maximum" else (x, float("-inf"), number)


def _confined(integers: relax.Expr, low: np.ndarray, high: np.ndarray, scope: Scope) -> relax.Expr:
    """The integers from ``low`` to ``high``, in shapes that broadcast; the ends of their type bound nothing."""
    dtype = dtype_of(integers)
    limits = np.iinfo(dtype)
    for bound, end, operator in ((low, limits.min, op.maximum), (high, limits.max, op.minimum)):
        if (bound != end).any():
            integers = operator(scope.emit(integers), constant(bound, dtype))
    return integers


def after_clip(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``clip(dequantize(q)) --> dequantize(clip(q))`` where that is the same for each of the few integers."""
    clipped = _clipped(call, scope)
    found = dequantised(clipped[0], scope) if clipped is not None else None
    if clipped is None or found is None or not found.affine.single or found.dtype not in _BYTES:
        return None
    limits = np.iinfo(found.dtype)
    integers = np.arange(limits.min, limits.max + 1)
    numbers = (integers - found.affine.zero.item()).astype(np.float32) * found.affine.scale
    expected = np.clip(numbers, np.float32(clipped[1]), np.float32(clipped[2]))
    kept = integers[expected == numbers]
    if not kept.size or not np.array_equal(numbers[np.clip(integers, kept[0], kept[-1]) - limits.min], expected):
        return None
    return _dequantise(scope.emit(_confined(found.data, kept[0], kept[-1], scope)), found.affine, found.dtype)


def after_padding(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``pad(dequantize(q), 0) --> dequantize(pad(q, zero))``."""
    found = dequantised(call.args[0], scope)
    if found is None or not found.affine.single or str(call.attrs.pad_mode) != "constant":
        return None
    if float(call.attrs.pad_value) != 0.0:
        return None
    widths = [int(width) for width in call.attrs.pad_width]
    padded = op.nn.pad(found.data, widths, pad_value=float(found.affine.zero.item()))
    return _dequantise(scope.emit(padded), found.affine, found.dtype)


def after_concat(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``concat(dequantize(a), dequantize(b)) --> dequantize(concat(a, b))`` where both are read alike."""
    parts = scope.value(call.args[0])
    if not isinstance(parts, relax.Tuple):
        return None
    found = [dequantised(part, scope) for part in parts.fields]
    if not found or any(each is None for each in found):
        return None
    first, *others = [each for each in found if each is not None]
    if not all(each.dtype == first.dtype and each.affine.same(first.affine) for each in others) or (
        not first.affine.single
    ):
        return None
    whole = scope.emit(op.concat([first.data, *(each.data for each in others)], call.attrs.axis))
    return _dequantise(whole, first.affine, first.dtype)


def before_concat(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(concat(a, b)) --> concat(quantize(a), quantize(b))``: the parts are made in few bits."""
    found, concat = quantised(call, scope), scope.call(call.args[0], "concat")
    if found is None or concat is None or not found[1].single or not scope.once(call.args[0]):
        return None
    parts = scope.value(concat.args[0])
    if not isinstance(parts, relax.Tuple):
        return None
    made = [scope.emit(_quantise(part, found[1], dtype_of(call))) for part in parts.fields]
    return op.concat(made, concat.attrs.axis)


def undone(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(dequantize(q, s, z), s, z) --> q``."""
    here, before = affine_of(call), dequantised(call.args[0], scope)
    if here is None or before is None or before.dtype != dtype_of(call):
        return None
    return before.data if here.same(before.affine) else None


def before_clip(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(clip(x, a, b)) --> clip(quantize(x), quantize(a), quantize(b))``; where others read the clipped
    numbers too, only if nothing is left to clip."""
    here, clipped, dtype = affine_of(call), _clipped(call.args[0], scope), dtype_of(call)
    if here is None or clipped is None or dtype not in _BYTES:
        return None
    limits = np.iinfo(dtype)
    with np.errstate(over="ignore"):
        low, high = (np.clip(np.rint(np.float32(bound) / here.scale) + here.zero, limits.min, limits.max)
                     for bound in clipped[1:])
    if not scope.once(call.args[0]) and ((low != limits.min).any() or (high != limits.max).any()):
        return None
    integers = scope.emit(relax.Call(call.op, [clipped[0], *call.args[1:]], call.attrs, call.ty_args))
    rank = len(shape_of(call))
    return _confined(integers, spread(low, here.axis, rank), spread(high, here.axis, rank), scope)


def constant_moved(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims`` of constant integers is done at once, so that a product sees its weight."""
    array = array_of(call.args[0])
    if array is None or array.dtype.kind not in "iu" or array.dtype.itemsize > 1:
        return None
    return constant(array.transpose(permutation(call)))


UnsignedActivations = rewrite_pass("UnsignedActivations", {"relax.dequantize": (unsigned,)})
SignedActivations = rewrite_pass("SignedActivations", {"relax.dequantize": (signed,)})

RULES: Rules = {
    **{f"relax.{name}": (after_movement,) for name in _MOVERS if name != "permute_dims"},
    "relax.permute_dims": (constant_moved, after_movement),
    "relax.nn.max_pool2d": (after_maximum,),
    **dict.fromkeys(("relax.clip", "relax.maximum", "relax.minimum", "relax.nn.relu"), (after_clip,)),
    "relax.nn.pad": (after_padding,),
    "relax.concat": (after_concat,),
    "relax.quantize": (undone, before_clip, before_concat),
}

MoveQuantisation = rewrite_pass("MoveQuantisation", RULES)
