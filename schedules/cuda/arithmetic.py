"""Arithmetic of 16-bit floats that CUDA lacks: computed in float32, and rounded once.

TVM (0.27) names functions of 16-bit floats after those of CUDA's headers, of which some do not exist (``hnearbyint``,
``hsinh``, ``hfmod``), some are rounded in between, and for others it has no name at all. What CUDA's headers have and
is exact in 16 bits (roots of numbers, signs, rounding down and up) stays.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from schedules.analysis import op_name

__all__ = ["WIDENED", "widened"]

_NARROW = ("float16", "bfloat16")

#: functions of floats, of one number or two, whose result is of the same type
WIDENED = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "erf", "exp", "exp10",
    "exp2", "fmod", "hypot", "log", "log10", "log1p", "log2", "nearbyint", "pow", "round", "rsqrt", "sigmoid", "sin",
    "sinh", "sqrt", "tan", "tanh",
})


def widened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with what 16-bit floats lack on CUDA as float32; the same object where there is none of it.

    ``T.nearbyint(x)   -->   T.Cast("float16", T.nearbyint(T.Cast("float32", x)))``
    """
    changed = [False]

    def wide(value: Any) -> Any:
        return tirx.Cast("float32", value)

    def call(node: Call) -> Any:
        if op_name(node) not in WIDENED or str(node.ty) not in _NARROW:
            return node
        changed[0] = True
        return tirx.Cast(str(node.ty), tirx.call_intrin("float32", node.op, *map(wide, node.args)))

    def remainder(node: tirx.Mod) -> Any:
        if str(node.ty) not in _NARROW:
            return node
        changed[0] = True
        return tirx.Cast(str(node.ty), tirx.Mod(wide(node.a), wide(node.b)))

    body = tvm_ffi.structural_map(func.body, [(Call, call), (tirx.Mod, remainder)], order="post")
    return func.with_body(body) if changed[0] else func
