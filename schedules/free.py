"""Functions with free sizes: the attributes that describe these, and the function for usual sizes by which spaces
decide (:mod:`schedules.lockstep`).

A function says which sizes it is for in an attribute, :data:`SIZES`: ``[low, high, usual]`` of each variable, in the
order in which its parameters name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.analysis.memo import remembered

__all__ = [
    "LEAST", "SIZES", "deciding", "free_function", "least_function", "shown_function", "specialised", "usual_function",
    "variables",
]

#: the attribute of a function with free sizes
SIZES = "mlc.sizes"
#: that of a function for usual sizes which stands for a range: the function for the smallest
LEAST = "mlc.least"
#: that of a function that a space is shown in place of one with free sizes: the latter
SHOWN = "mlc.shown"


def variables(func: tirx.PrimFunc) -> list[tirx.Var]:
    """The variables that stand for free sizes, in the order in which the parameters name them."""
    found: list[tirx.Var] = []
    for param in func.params:
        for expr in [param] if isinstance(param.ty, tvm.ir.PrimType) else param.shape:
            tvm_ffi.structural_walk(expr, [(tirx.Var, found.append)], order="pre")
    return list(dict.fromkeys(found))


def usual_function(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function for the usual sizes that its attribute says; the same object where nothing is free."""
    if not func.attrs or SIZES not in func.attrs:
        return func
    usual = [int(size[2]) for size in func.attrs[SIZES]]
    return specialised(func, dict(zip(variables(func), usual, strict=True)))


def shown_function(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """The function whose sizes a space of ``target`` is shown: the usual ones; the same object where nothing is free.

    Spaces of GPUs take vectors, copies and whole tiles by what divides a size. They are shown an odd size next to the
    usual one, so that what they find holds for every size.
    """
    if target.kind.name != "cuda" or not func.attrs or SIZES not in func.attrs:
        return usual_function(func)
    return _with_odd_sizes(func)


@remembered  # spaces remember what they found out of the function that they were shown
def _with_odd_sizes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sizes = [_odd(*map(int, size)) for size in func.attrs[SIZES]]
    return specialised(func, dict(zip(variables(func), sizes, strict=True))).with_attr(SHOWN, func)


def _odd(low: int, high: int, usual: int) -> int:
    """An odd size next to the usual one; 3 for few, since what has one element is another kind of function."""
    odd = usual - 1 if usual % 2 == 0 and usual > low else usual | 1
    return max(odd, 3)


def deciding(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """:func:`shown_function`, of which :func:`least_function` gives that for the smallest sizes on CPUs; the same
    object where nothing is free."""
    usual = shown_function(func, target)
    if usual is func or target.kind.name == "cuda":
        return usual
    lows = [int(size[0]) for size in func.attrs[SIZES]]
    return usual.with_attr(LEAST, specialised(func, dict(zip(variables(func), lows, strict=True))))


def free_function(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function with free sizes that :func:`shown_function` was made from; None for a function with fixed sizes."""
    return func.attrs[SHOWN] if func.attrs and SHOWN in func.attrs else None


def least_function(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function for the smallest sizes, as :func:`deciding` has noted it; None for a function with fixed sizes."""
    return func.attrs[LEAST] if func.attrs and LEAST in func.attrs else None


def specialised(func: tirx.PrimFunc, sizes: Mapping[tirx.Var, int]) -> tirx.PrimFunc:
    """The function for these sizes of its free variables; parameters that are sizes are gone."""
    values = {var: tirx.const(size, str(var.ty)) for var, size in sizes.items()}
    given: dict[Any, Any] = {}
    for param in func.params:
        if isinstance(param.ty, tvm.ir.PrimType):
            if param in values:
                given[param] = values[param]
        elif any(dim in values for dim in param.shape):
            shape = [values.get(dim, dim) for dim in param.shape]
            given[param] = tirx.decl_buffer(shape, str(param.dtype), name=str(param.name),
                                            data_alignment=int(param.data_alignment))
    return func.specialize(given).without_attr(SIZES)
