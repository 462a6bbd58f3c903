"""How long kernels take that wait for memory, reckoned from data sheets: as many bytes come as are under way in the
time that a fetch takes (Little's law), but no more than the memory and a multiprocessor's way to it give."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import tvm
from tvm import tirx

from schedules.machine import GpuMachine

__all__ = ["LATENCY", "SECTOR", "Traffic", "depth_of", "seconds", "traffic_of"]

#: bytes of memory that are fetched at once, at least
SECTOR = 32
#: seconds from a fetch of memory until it is there
LATENCY = 0.7e-6
#: bytes that a multiprocessor fetches in a cycle
_PORT = 32
#: steps of a loop that CUDA's compiler lets overlap where it is not told to unroll it
_OVERLAPPED = 4


@dataclass(frozen=True)
class Traffic:
    """What tensors of a function's hold: bytes that are ``read`` and ``written``, each once, and the bytes of an
    ``item`` of the largest."""

    read: int
    written: int
    item: int

    @property
    def moved(self) -> int:
        return self.read + self.written


def traffic_of(func: tirx.PrimFunc, results: int = 1) -> Traffic:
    """Of a function whose last ``results`` parameters are what it writes."""
    sizes = [(prod(int(s) for s in p.ty.shape), _bytes(p.ty)) for p in func.params]
    total = [count * item for count, item in sizes]
    return Traffic(sum(total[:-results]), sum(total[-results:]), max(sizes)[1])


def _bytes(buffer: Any) -> int:
    return (int(tvm.runtime.DataType(str(buffer.dtype)).bits) + 7) // 8


def depth_of(steps: int, at_once: int, unroll: int) -> int:
    """How many steps of a loop a thread has under way, each of so many elements, where loops of ``unroll`` statements
    are unrolled."""
    return steps if steps * at_once <= unroll else min(steps, _OVERLAPPED)


def seconds(
    gpu: GpuMachine, *, blocks: int, resident: int, under_way: float, memory: float, cached: float = 0.0,
    cycles: float = 0.0,
) -> float:
    """Of ``blocks``, of which a multiprocessor holds ``resident``; those that run have ``under_way`` bytes on the way.
    So many bytes come from and go to ``memory``, others from the second level (``cached``); ``cycles`` go by in each
    block with nothing on the way."""
    at_once = gpu.multiprocessors * resident
    waves = ceil(blocks / at_once)
    uneven = ceil(blocks / gpu.multiprocessors) * gpu.multiprocessors / blocks if blocks > gpu.multiprocessors else 1.0
    ports = min(blocks, gpu.multiprocessors) * _PORT * gpu.hz
    rates = max(memory * uneven / gpu.memory_rate + cached / gpu.l2_rate,
                (memory + cached) * max(LATENCY / under_way, 1.0 / ports))
    return waves * (LATENCY + cycles / gpu.hz) + rates
