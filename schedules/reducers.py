"""Reductions that TVM's ``rfactor`` accepts in addition to its own: minima and maxima that may be infinite.

TVM's own begin with the largest finite number, which is the result where every element is infinite.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm_ffi.libinfo import load_lib_ctypes

__all__ = ["EXTREMA", "register"]

#: name --> what combines two elements, and what it leaves as they are
EXTREMA: dict[str, tuple[Callable[..., tirx.PrimExpr], float]] = {
    "max": (tirx.max, -math.inf), "min": (tirx.min, math.inf),
}


@cache
def register() -> None:
    """Make the reductions known to TVM, once in each process that schedules or replays a trace."""
    known = tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")
    for combine, identity in EXTREMA.values():
        known(1, _lasting(_combiner(combine)), _lasting(_identity(identity)))


def _combiner(combine: Callable[..., tirx.PrimExpr]) -> Callable[..., list[tirx.PrimExpr]]:
    return lambda left, right: [combine(a, b) for a, b in zip(left, right, strict=True)]


def _identity(identity: float) -> Callable[[Sequence[tirx.PrimExpr]], list[tirx.PrimExpr]]:
    return lambda values: [tirx.const(identity, value.ty.dtype) for value in values]


def _lasting(function: Callable[..., Any]) -> Any:
    """A function of TVM's that is never freed: its registry goes at the end of the process, after Python has."""
    found = tvm_ffi.convert(function)
    library = load_lib_ctypes("apache-tvm-ffi", "tvm_ffi", "RTLD_GLOBAL")
    library.TVMFFIObjectIncRef(ctypes.c_void_p(found.__chandle__()))
    return found
