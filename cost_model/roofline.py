"""The roofline of a function: a bound from its arithmetic and compulsory traffic, at the machine's peak rates.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx

from cost_model.features import describe
from cost_model.machine import Machine, machine
from cost_model.nests import Buffer, Function, Nest, read_function
from schedules.machine import GpuMachine

__all__ = ["Roofline", "analyse", "estimate", "prior"]


@dataclass(frozen=True)
class Roofline:
    """``flops`` are operations of one call, ``bytes`` of the arguments what it reads and writes at least once."""

    flops: float
    bytes: float
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """A time that no schedule beats by much."""
        return max(self.compute_seconds, self.memory_seconds)


def analyse(
    func: tirx.PrimFunc | tvm.IRModule, target: tvm.target.Target, constants: Sequence[int] = (),
    constant_bytes: int = 0,
) -> Roofline:
    """The bound of an unscheduled (or scheduled) function.

    Arguments that fit the last cache are taken to be there: a function that is timed again and again finds them. The
    parameters at the positions ``constants`` are weights of a model that reads ``constant_bytes`` of them in one run;
    where that is more than the last cache holds, they come from memory.
    """
    on = machine(target)
    function = read_function(func)
    flops = sum(nest.flops for nest in function.nests)
    touched = _touched(function)
    nearest = max((level.size for level in on.levels), default=0.0)
    rate = on.bandwidth if touched > nearest else max(on.bandwidth, on.cores * on.levels[-2].refill)
    cold = _bytes(func, constants) if constant_bytes > nearest and isinstance(func, tirx.PrimFunc) else 0
    compute = sum(nest.flops / _peak(nest, on) for nest in function.nests)
    return Roofline(flops, touched, compute, max(touched / rate, min(cold, touched) / on.bandwidth))


def _touched(function: Function) -> float:
    """Bytes of the arguments that are read and written: of a table only the rows that are gathered. What an opaque
    statement reads cannot be seen; then all of it counts."""
    positions: dict[Buffer, float] = {}
    for nest in function.nests:
        for access in nest.accesses:
            distinct = math.prod(access.elements(range(len(nest.loops)), nest.extents))
            positions[access.buffer] = positions.get(access.buffer, 0.0) + min(distinct, nest.iterations)
    opaque = any(nest.opaque for nest in function.nests)
    return sum(buffer.bytes if opaque else min(buffer.bytes, buffer.element * positions.get(buffer, math.inf))
               for buffer in function.arguments)


def _peak(nest: Nest, on: Machine) -> float:
    """Operations a second that a machine does at most of a nest's kind: a GPU's tensor cores multiply operands of 16
    and 8 bits, and to widen these is a part of the instruction."""
    operands = [access.buffer.element for access in nest.accesses[1:] if access.buffer is not nest.accesses[0].buffer]
    if isinstance(on.described, GpuMachine) and nest.reduction and len(operands) == 2 and max(operands) < 4:
        widened = max(1.0, (nest.arithmetic + nest.special) / 2)
        return max(on.flops, on.described.tensor_flops(8 * max(operands)) * widened)
    # over that of float32, by the bytes of an operand
    most = max(on.tiles, on.pairs)
    rates = {1: max(on.dot, most), 2: max(on.bfloat, most / 2)}
    return on.flops * rates.get(nest.short, 1.0)


def _bytes(func: tirx.PrimFunc, positions: Sequence[int]) -> int:
    params = [func.params[i] for i in positions]
    return sum(math.prod(map(int, p.shape)) * ((tvm.runtime.DataType(str(p.dtype)).bits + 7) // 8) for p in params)


def estimate(func: tirx.PrimFunc | tvm.IRModule, target: tvm.target.Target) -> float:
    """Seconds of one call at the roofline; never zero."""
    return max(analyse(func, target).seconds, 1e-9)


def prior(candidate: tvm.IRModule, target: tvm.target.Target, cold: Sequence[int] = ()) -> float:
    """Seconds that the analytic model gives a *scheduled* function; what ranks candidates before any is measured.

    ``cold`` are the positions of parameters that no cache holds (see :func:`cost_model.machine.cold_weights`).
    """
    return max(describe(read_function(candidate, cold), machine(target)).seconds, 1e-9)
