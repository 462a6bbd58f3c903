"""The memory hierarchy of the described machine, as the analytic model sees it.

All figures are those of :mod:`schedules.machine`; a ranking needs ratios between arithmetic, cache and memory that are
right within a factor of about two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import tvm

from schedules.machine import CpuMachine, GpuMachine, cpu_machine, gpu_machine, reference_machine

__all__ = ["Level", "Machine", "cold_weights", "machine", "reference"]


@dataclass(frozen=True)
class Level:
    """One level of the memory: what it holds (bytes) and how fast what lies below refills it (bytes/s, a core)."""

    size: float
    refill: float


@dataclass(frozen=True)
class Machine:
    """``levels`` run from the one nearest to the arithmetic outwards; the last one refills from main memory.

    ``flops`` is the float32 peak of the whole machine (a multiply-add counts 2), ``bandwidth`` main memory's
    bytes/s of the whole machine. On a GPU ``cores`` are multiprocessors and ``vector_registers`` the 32-bit
    registers of one thread. ``described`` has what only one kind of machine has.
    """

    cores: int
    hz: float
    vector_bytes: int
    vector_registers: int
    flops: float
    bandwidth: float
    levels: tuple[Level, ...]
    launch_seconds: float  # starting one parallel region or kernel
    call_seconds: float  # from one kernel's end to the next one's begin
    described: CpuMachine | GpuMachine
    #: products that a lane adds up in the time of one multiply-add, of 8-bit integers and of bfloat16
    dot: float = 1.0
    bfloat: float = 2.0
    #: the same of a matrix unit with tiles, of 8-bit integers, and half as many of bfloat16 (0: there is none)
    tiles: float = 0.0
    #: the same of instructions that multiply two rows by two columns
    pairs: float = 0.0

    def lanes(self, element_bytes: int) -> int:
        """Elements in one vector register (1 on a GPU, whose vectors are threads)."""
        return max(1, self.vector_bytes // max(1, element_bytes))


def machine(target: tvm.target.Target) -> Machine:
    """The machine that an ``llvm`` or ``cuda`` target describes."""
    return _machine(str(target), False)


def reference(target: tvm.target.Target) -> Machine:
    """The machine by which learned models describe programs: see :func:`schedules.machine.reference_machine`."""
    return _machine(str(target), True)


def cold_weights(target: tvm.target.Target, constants: Sequence[int], constant_bytes: int) -> tuple[int, ...]:
    """Those of the parameters ``constants`` that come from memory in every call: all, or none.

    They are weights of a model that reads ``constant_bytes`` of them in one run, which the last cache holds or not.
    """
    last = max((level.size for level in machine(target).levels), default=0.0)
    return tuple(constants) if constant_bytes > last else ()


@lru_cache(maxsize=64)
def _machine(target_json: str, nominal: bool) -> Machine:
    target = tvm.target.Target(target_json)
    if target.kind.name == "cuda":
        return _gpu(gpu_machine(target))
    return _cpu(reference_machine(target) if nominal else cpu_machine(target))


def _cpu(on: CpuMachine) -> Machine:
    return Machine(
        cores=on.cores, hz=on.hz, vector_bytes=on.vector_bytes, vector_registers=on.vector_registers, flops=on.flops,
        bandwidth=on.memory_rate,
        levels=(
            Level(on.l1_bytes, on.l2_rate * on.hz), Level(on.l2_bytes, on.l3_rate * on.hz),
            Level(on.l3_bytes, on.memory_rate / on.cores),
        ),
        launch_seconds=on.launch_seconds, call_seconds=on.call_seconds, described=on,
        # four with a dot product of bytes; two with one of 16-bit numbers and an addition, which takes 5/4 of the time
        # where it takes a slot of the multiplications, and none where one unit multiplies and others add
        dot=4.0 * on.dot_per_cycle / on.fma_per_cycle if on.dot_per_cycle
        else min(1.6, 2.0 * (on.words_per_cycle or on.fma_per_cycle) / on.fma_per_cycle),
        bfloat=2.0 * (on.bfloat_per_cycle or on.fma_per_cycle) / on.fma_per_cycle,
        tiles=on.tile_macs_per_cycle("int8") / on.macs_per_cycle(), pairs=8.0 * on.matrix_per_cycle / on.fma_per_cycle,
    )


def _gpu(on: GpuMachine) -> Machine:
    cores = on.multiprocessors
    return Machine(
        cores=cores, hz=on.hz, vector_bytes=4, vector_registers=on.registers_per_thread, flops=on.flops,
        bandwidth=on.memory_rate,
        levels=(Level(on.shared_bytes, on.l2_rate / cores), Level(on.l2_bytes, on.memory_rate / cores)),
        launch_seconds=on.launch_seconds, call_seconds=on.call_seconds, described=on,
    )
