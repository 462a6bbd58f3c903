"""Arithmetic of 16-bit floats that CUDA lacks: computed in float32, and rounded once.

TVM (0.27) names functions of 16-bit floats after those of CUDA's headers, of which some do not exist (``hnearbyint``,
``hsinh``, ``hfmod``), some are rounded in between, and for others it has no name at all. What CUDA's headers have and
is exact in 16 bits (signs, rounding down and up) stays.

TVM also splits vectors up at some functions (``erf``, so every GELU): loads and stores around them become those of
single numbers. CUDA has no functions of vectors, so what is written otherwise are the same calls, one for each number,
between loads and stores of vectors (:func:`vectorising`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op

from schedules.analysis import op_name

__all__ = ["WIDENED", "vectorising", "widened"]

_NARROW = ("float16", "bfloat16")

#: functions of floats, of one number or two, whose result is of the same type
WIDENED = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "erf", "exp", "exp10",
    "exp2", "fmod", "hypot", "log", "log10", "log1p", "log2", "nearbyint", "pow", "round", "rsqrt", "sigmoid", "sin",
    "sinh", "sqrt", "tan", "tanh",
})


#: what TVM asks before it makes a call one of vectors, and functions that it does not let through, but writes then
_VECTORIZABLE, _SCALAR = "TVectorizable", ("atan", "erf", "nearbyint")


@contextmanager
def vectorising() -> Iterator[None]:
    """Inside this context TVM's lowering lets those functions be of vectors too; elsewhere, where a CPU's library is
    called, it must not."""
    ops = [Op.get(f"tirx.{name}") for name in _SCALAR]
    for op in ops:
        op.set_attr(_VECTORIZABLE, True)
    try:
        yield
    finally:
        for op in ops:
            op.reset_attr(_VECTORIZABLE)


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
