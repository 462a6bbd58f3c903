"""Peak rates and cache sizes behind the analytic model, read from the TVM target alone.

The figures are documented constants, not measurements: a ranking needs ratios between arithmetic, cache and
memory that are right within a factor of about two. Sources: Intel's and AMD's optimisation manuals for issue
widths and cache bandwidths, NVIDIA's white papers for the GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import tvm

__all__ = ["Level", "Machine", "cold_weights", "machine"]

#: sustained clock under vector load of current server and desktop cores, in Hz; deliberately on the high side,
#: since a bound that is too low would make the tuner stop too early
CPU_HZ = 4.2e9
#: fused multiply-adds issued each cycle
CPU_FMA_PER_CYCLE = 2
#: cycles from one fused multiply-add to the next one that needs its result
CPU_FMA_LATENCY = 4


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
    registers of one thread.
    """

    gpu: bool
    cores: int
    hz: float
    vector_bytes: int
    vector_registers: int
    flops: float
    bandwidth: float
    levels: tuple[Level, ...]
    launch_seconds: float  # starting one parallel region or kernel
    dot: float = 1.0  # products of 8-bit integers that a lane adds up in the time of one multiply-add

    def lanes(self, element_bytes: int) -> int:
        """Elements in one vector register (1 on a GPU, whose vectors are threads)."""
        return max(1, self.vector_bytes // max(1, element_bytes))


#: multiprocessors, float32 flop/s, memory bytes/s, level-2 bytes, by compute capability (the largest part of each)
_GPUS = {
    70: (80, 15.7e12, 0.90e12, 6 << 20),
    75: (72, 16.3e12, 0.67e12, 6 << 20),
    80: (108, 19.5e12, 1.55e12, 40 << 20),
    86: (84, 29.8e12, 0.77e12, 6 << 20),
    87: (16, 5.3e12, 0.20e12, 4 << 20),
    89: (128, 73.0e12, 0.86e12, 64 << 20),
    90: (132, 60.0e12, 3.35e12, 50 << 20),
}


def machine(target: tvm.target.Target) -> Machine:
    """The machine that an ``llvm`` or ``cuda`` target describes."""
    return _machine(str(target))


def cold_weights(target: tvm.target.Target, constants: Sequence[int], constant_bytes: int) -> tuple[int, ...]:
    """Those of the parameters ``constants`` that come from memory in every call: all, or none.

    They are weights of a model that reads ``constant_bytes`` of them in one run, which the last cache holds or not.
    """
    last = max((level.size for level in machine(target).levels), default=0.0)
    return tuple(constants) if constant_bytes > last else ()


@lru_cache(maxsize=64)
def _machine(target_json: str) -> Machine:
    target = tvm.target.Target(target_json)
    return _gpu(target) if target.kind.name == "cuda" else _cpu(target)


def _cpu(target: tvm.target.Target) -> Machine:
    with target:

        def feature(name: str) -> bool:
            return bool(tvm.target.codegen.llvm_cpu_has_features(name, target))

        fused = True
        if feature("avx512f"):
            width, registers = 64, 32
        elif feature("avx2"):
            width, registers = 32, 16
        elif feature("neon"):
            width, registers = 16, 32
        else:
            width, registers, fused = 16, 16, False
        # four with a dot product of bytes, two with one of 16-bit numbers and an addition
        dot = 4.0 if feature("avx512vnni") or feature("avxvnni") else 2.0 if feature("sse2") else 1.0
    cores = int(target.attrs.get("num-cores", 1))
    # without a fused instruction, one multiply and one add take the two ports
    per_cycle = CPU_FMA_PER_CYCLE * (2 if fused else 1)
    # one core of a current server draws 30 GB/s, and a few more saturate what a socket's channels give to all
    bandwidth = 30e9 * min(cores, 2) + 5e9 * max(0, cores - 2)
    return Machine(
        gpu=False, cores=cores, hz=CPU_HZ, vector_bytes=width, vector_registers=registers,
        flops=cores * CPU_HZ * per_cycle * (width // 4), bandwidth=bandwidth,
        levels=(
            Level(32 * 1024, width * CPU_HZ),  # one register a cycle from level 2
            Level(512 * 1024 if width < 64 else 1024 * 1024, 20 * CPU_HZ),
            Level(16 * 1024 * 1024, bandwidth / cores),
        ),
        launch_seconds=2e-6, dot=dot,
    )


def _gpu(target: tvm.target.Target) -> Machine:
    digits = "".join(c for c in str(target.attrs.get("arch", "sm_80")) if c.isdigit())
    cores, flops, bandwidth, l2 = _GPUS.get(int(digits or "80"), _GPUS[80])
    shared = float(target.attrs.get("max_shared_memory_per_block", 49152))
    return Machine(
        gpu=True, cores=cores, hz=1.6e9, vector_bytes=4, vector_registers=255, flops=flops, bandwidth=bandwidth,
        levels=(Level(shared, 3 * bandwidth / cores), Level(float(l2), bandwidth / cores)), launch_seconds=4e-6,
    )
