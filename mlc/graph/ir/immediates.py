"""Constants inside a function that its schedule does not depend on: scales, zero points, bounds.

Quantised models hold the scales and zero points of each layer as numbers, so that no two of their residual additions
are equal, and any schedule of one suits all. What decides where elements lie, which of them exist or what a sum begins
with is no such number: indices, extents, conditions, predicates, initial values and whatever a reduction computes stay
as they are. So do 0, 1, -1, infinities and NaN, of which code may be left out, and the sign of every number.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis import branches, op_name, walk

__all__ = ["without_immediates"]

#: operators whose operands may be mere data
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
#: calls that compute an element of elements; their own numbers stay, since code is made for some (powers)
_ELEMENTWISE = frozenset({
    "abs", "ceil", "cos", "erf", "exp", "exp2", "fabs", "floor", "log", "log1p", "log2", "nearbyint", "pow", "round",
    "rsqrt", "sigmoid", "sin", "sqrt", "tanh", "trunc",
})
#: what stands for all numbers of a type and a sign
_FLOAT, _INTEGER = 0.5, 3
_LEAST_BITS = 4  # of a type that holds both


def without_immediates(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with one number of each type and sign in place of those that are mere data; the same object where
    there are none.

    ``B[i] = max(A[i] * 0.037 + 12.0, 0.0)   -->   B[i] = max(A[i] * 0.5 + 0.5, 0.0)``

    It serves to be compared and hashed: what it computes means nothing.
    """
    maskable = _Maskable(func)

    def block(node: s_tir.SBlock, mutator: Any) -> Any:
        reduces = any(each.iter_type != tirx.IterVar.DataPar for each in node.iter_vars)
        return node if reduces or node.init is not None else mutator.default_mutate(node)

    def store(node: tirx.BufferStore, _mutator: Any) -> Any:
        value = _masked(node.value, maskable)
        return node if value.same_as(node.value) else tirx.BufferStore(node.buffer, value, node.indices)

    body = tvm_ffi.structural_mutate(func.body, [(s_tir.SBlock, block), (tirx.BufferStore, store)])
    return func if body.same_as(func.body) else func.with_body(body)


class _Maskable:
    """Which numbers of a function are mere data where they are operands."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._func = func

    def __call__(self, value: tirx.FloatImm | tirx.IntImm) -> bool:
        number = float(value.value)
        told = abs(number) in (0.0, 1.0) or not math.isfinite(number) or value.ty.dtype.bits < _LEAST_BITS
        return not told and (isinstance(value, tirx.FloatImm) or self._integers)

    @cached_property
    def _integers(self) -> bool:
        """Whether no number that the function loads says which element it reads or writes, nor whether: integers that
        it computes may be places otherwise."""
        found = [True]

        def place(index: Any) -> None:
            walk(index, (TensorLoad, lambda _load: found.__setitem__(0, False)))

        def access(node: TensorLoad | tirx.BufferStore) -> None:
            for index in node.indices:
                if not isinstance(index, tirx.Var | tirx.IntImm):
                    place(index)

        walk(self._func.body, ((TensorLoad, tirx.BufferStore), access))
        return found[0]


def _masked(value: Any, maskable: _Maskable) -> Any:
    """An element's value with its numbers masked; the same object where there are none."""
    if isinstance(value, _ARITHMETIC):
        if isinstance(value, tirx.Div) and not _is_float(value):  # code is made for some divisors
            return value
        a, b = _operand(value.a, maskable), _operand(value.b, maskable)
        return value if a.same_as(value.a) and b.same_as(value.b) else type(value)(a, b)
    if isinstance(value, tirx.Cast):
        inner = _masked(value.value, maskable)
        return value if inner.same_as(value.value) else tirx.Cast(str(value.ty), inner)
    choice = branches(value)
    if choice is not None:
        condition, yes, no = choice
        chosen = [_operand(each, maskable) for each in (yes, no)]
        if all(new.same_as(old) for new, old in zip(chosen, (yes, no), strict=True)):
            return value
        if isinstance(value, tirx.Select):
            return tirx.Select(condition, *chosen)
        return _call(value, [condition, *chosen])
    if isinstance(value, Call) and op_name(value) in _ELEMENTWISE:
        args = [_masked(each, maskable) for each in value.args]
        same = all(new.same_as(old) for new, old in zip(args, value.args, strict=True))
        return value if same else _call(value, args)
    return value


def _operand(value: Any, maskable: _Maskable) -> Any:
    if not isinstance(value, tirx.FloatImm | tirx.IntImm):
        return _masked(value, maskable)
    if not maskable(value):
        return value
    made, number = (tirx.FloatImm, _FLOAT) if isinstance(value, tirx.FloatImm) else (tirx.IntImm, _INTEGER)
    return made(str(value.ty), math.copysign(number, value.value) if made is tirx.FloatImm else
                number if value.value > 0 else -number)


def _call(like: Call, args: list[Any]) -> Call:
    return Call(like.op, args, like.attrs, like.ty_args, ret_ty=like.ty)


def _is_float(value: Any) -> bool:
    return str(value.ty).startswith(("float", "bfloat"))
