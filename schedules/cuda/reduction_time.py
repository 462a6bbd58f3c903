"""How long the kernels of :mod:`schedules.cuda.reduction` take, and what they ask of a GPU, reckoned."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.cuda import memory_time
from schedules.cuda.common import ceil_div
from schedules.cuda.memory_time import SECTOR, Traffic, depth_of
from schedules.machine import GpuMachine
from schedules.space import Footprint

__all__ = ["ReduceKernel", "RowKernel"]

_WARP = 32
#: registers of a thread beside those that hold elements
_OTHER_REGISTERS = 14
#: cycles of an addition that waits for the one before, of one between threads of a warp, and of a barrier
_ADD, _SHUFFLE, _BARRIER = 4, 25, 40


def _meeting(threads: int, barrier: int, in_warps: bool = True) -> int:
    """Cycles until threads have added up what each has: in warps, then among these by way of shared memory, in blocks
    of ``barrier`` threads; or by halves in shared memory alone."""
    if not in_warps:
        return (threads - 1).bit_length() * (_BARRIER + barrier // _WARP)
    within = _SHUFFLE * (min(threads, _WARP).bit_length() - 1)
    warps = ceil_div(threads, _WARP)
    return within if warps == 1 else within + 2 * (_BARRIER + barrier // _WARP) + _SHUFFLE * (warps - 1).bit_length()


@dataclass(frozen=True)
class RowKernel:
    """A block for each of ``rows`` of so many ``columns``, which are reduced in ``stages``; at most ``most_held``
    elements of a row stay in a thread's registers from one to the next."""

    rows: int
    columns: int
    stages: int
    most_held: int
    threads: int
    vector: int
    unroll: int

    @property
    def steps(self) -> int:
        """Vectors of a thread, in each stage."""
        return ceil_div(self.columns, self.threads * self.vector)

    @property
    def held(self) -> bool:
        """Whether rows are fetched once."""
        return self.steps * self.vector <= min(self.unroll, self.most_held)

    def footprint(self, gpu: GpuMachine, traffic: Traffic) -> Footprint:
        depth = depth_of(self.steps, self.vector, self.unroll)
        registers = _OTHER_REGISTERS + self.vector * (self.steps if self.held else depth)
        under_way = min(self.columns, self.threads * depth * self.vector) * traffic.item
        return Footprint.of(gpu, self.threads, min(registers, gpu.registers_per_thread), 4 * _WARP * self.stages, 1,
                            under_way, tensor_cores=False)

    def seconds(self, gpu: GpuMachine, traffic: Traffic, resident: int = 0) -> float:
        """With so many blocks a multiprocessor, where a compiler has said so."""
        asked = self.footprint(gpu, traffic)
        resident = resident or asked.resident
        running = min(self.rows, gpu.multiprocessors * resident)
        own = _ADD * self.steps * self.vector
        return memory_time.seconds(
            gpu, blocks=self.rows, resident=resident, under_way=running * asked.under_way / asked.resident,
            memory=traffic.moved, cached=0 if self.held else traffic.read * self.stages,
            cycles=self.stages * (own + _meeting(self.threads, self.threads)) + own)


@dataclass(frozen=True)
class ReduceKernel:
    """``results`` of so many ``terms``, which are neighbours in memory if they ``run``, ``vector`` of them fetched at
    once; ``together`` threads add up a result, and a block has ``apart`` results."""

    results: int
    terms: int
    run: bool
    vector: int
    together: int
    apart: int
    unroll: int

    @property
    def steps(self) -> int:
        return ceil_div(self.terms, self.together * self.vector)

    def footprint(self, gpu: GpuMachine, traffic: Traffic) -> Footprint:
        threads, depth = self.together * self.apart, depth_of(self.steps, self.vector, self.unroll)
        fetched = min(self.terms, self.together * depth * self.vector) * min(self.apart, self.results) * traffic.item
        shared = 0
        if self.together > 1 and not self.run:
            shared = 4 * threads
        elif self.together > _WARP:
            shared = 4 * ceil_div(threads, _WARP)
        return Footprint.of(gpu, threads, min(_OTHER_REGISTERS + depth * self.vector, gpu.registers_per_thread),
                            shared, 1, fetched, tensor_cores=False)

    def seconds(self, gpu: GpuMachine, traffic: Traffic, resident: int = 0) -> float:
        """With so many blocks a multiprocessor, where a compiler has said so. Threads side by side share sectors, and
        what several results read comes from a cache the second time."""
        asked, blocks = self.footprint(gpu, traffic), ceil_div(self.results, self.apart)
        resident = resident or asked.resident
        running = min(blocks, gpu.multiprocessors * resident)
        beside = min(self.together * self.vector, self.terms) if self.run else min(self.apart, self.results)
        sectors = max(1.0, SECTOR / (beside * traffic.item))
        fetched = self.results * self.terms * traffic.item * sectors
        memory = min(fetched, traffic.read * sectors)
        met = _meeting(self.together, self.together * self.apart, self.run) if self.together > 1 else 0
        return memory_time.seconds(
            gpu, blocks=blocks, resident=resident, under_way=running * asked.under_way / asked.resident * sectors,
            memory=memory + traffic.written, cached=fetched - memory, cycles=_ADD * self.steps * self.vector + met)
