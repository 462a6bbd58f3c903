"""The description of a machine, read from the TVM target alone: all that seeds, estimates and rooflines know of it.

A description comes with the target: its instructions give vectors and registers, the CPU's family what is peculiar to
it, and a GPU's architecture its data sheet. TVM's targets have no attributes for caches and rates, so what is known
better travels in the free text ``model``, as ``l1=48K,l2=1024K,l3=32768K,ghz=3.6,l2rate=30``: a target for this very
machine carries its cache sizes (:func:`native_caches`), and the rates that were measured on it (:data:`FACTS`), where
they were. A target without them gets what machines with its instructions have, and so means the same wherever it is
compiled for.

Sources of the figures: Intel's and AMD's optimisation manuals, NVIDIA's white papers and CUDA C++ Programming Guide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tvm

from schedules.caches import USUAL_LAST_LEVEL, native_caches, sizes_in

__all__ = [
    "FACTS", "GPUS", "LINE_BYTES", "TILE_LANES", "CpuMachine", "Fact", "GpuMachine", "cpu_machine", "gpu_machine",
    "gpu_of", "native_caches", "reference_machine",
]

#: bytes of a cache line of every CPU that code is generated for
LINE_BYTES = 64
#: 32-bit sums of a row of a matrix unit's tile
TILE_LANES = 16


@dataclass(frozen=True)
class CpuMachine:
    """A CPU. Cache sizes are in bytes: levels 1 (data) and 2 of one core, level 3 of all that share it.

    ``l1_rate`` to ``l3_rate`` are bytes a cycle that one core reads from each level, ``core_rate`` and ``memory_rate``
    bytes a second that one core and all cores together read from memory. ``fma_per_cycle`` counts multiply-adds of
    whole vectors that begin in a cycle, ``dot_per_cycle`` likewise instructions that add four products of 8 bits to
    each 32-bit lane, ``bfloat_per_cycle`` those that add two products of bfloat16 (0: there are none), and
    ``matrix_per_cycle`` those of two rows by two columns, of twice as many products each. ``words_per_cycle`` counts
    those that multiply 16-bit numbers and add two products (0: as many as multiply-adds).
    ``tile_per_cycle`` counts rows of a matrix unit's tile, of 16 sums to each of which it adds 64 bytes of products
    (0: there is no such unit), and ``tile_latency`` is when a tile of 16 rows can be added to again.
    """

    cores: int
    vector_bytes: int  # width of one vector register: 16 (SSE, NEON), 32 (AVX2), 64 (AVX-512)
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    l1_rate: float
    l2_rate: float
    l3_rate: float = 20.0
    core_rate: float = 30e9
    memory_rate: float = 60e9
    #: sustained under vector load; on the high side, since a bound on a time that is too high ends tuning too early
    hz: float = 4.2e9
    fma_per_cycle: float = 2.0
    fma_latency: float = 4.0  # cycles until the next one that needs the result can begin
    dot_per_cycle: float = 0.0
    bfloat_per_cycle: float = 0.0
    matrix_per_cycle: float = 0.0
    words_per_cycle: float = 0.0
    tile_per_cycle: float = 0.0
    tile_latency: float = 52.0  # cycles (Intel's optimisation manual, instructions of AMX)
    l3_latency: float = 60.0  # cycles that a read waits which comes from the third level
    mispredict_cycles: float = 15.0
    window: int = 320  # micro-operations in flight
    way_bytes: int = 4096  # lines so far apart share a set of the first cache
    launch_seconds: float = 2e-6  # handing a parallel loop to threads that are awake, and waiting for them
    call_seconds: float = 1e-6  # from one kernel's end to the begin of the next

    def lanes(self, dtype: str = "float32") -> int:
        """How many elements of ``dtype`` one vector register holds."""
        return max(1, self.vector_bytes * 8 // tvm.runtime.DataType(dtype).bits)

    def macs_per_cycle(self, dtype: str = "float32") -> float:
        """Multiply-adds of elements of ``dtype`` that one core's vectors begin in a cycle; types that are only stored
        are multiplied as float32."""
        bits = tvm.runtime.DataType(dtype).bits
        if bits == 8 and self.dot_per_cycle:
            return self.dot_per_cycle * self.vector_bytes
        return self.fma_per_cycle * self.lanes("float64" if bits == 64 else "float32")

    def tile_macs_per_cycle(self, dtype: str) -> float:
        """Multiply-adds per cycle of the matrix unit, for ``dtype`` of 8 and 16 bits; 0 without one."""
        return self.tile_per_cycle * TILE_LANES * LINE_BYTES * 8 / tvm.runtime.DataType(dtype).bits

    @property
    def busy_accumulators(self) -> float:
        """Vectors of independent sums that keep the multiply-add units busy: as many as begin while one is computed,
        and one that makes up for what an out-of-order core schedules late. Measured on AVX2, two units of four
        cycles: direct convolutions with tiles of 8 run at 0.88 of those of 10 and 12, matrix products of 128 rows at
        0.91."""
        return self.fma_per_cycle * self.fma_latency + 1

    @property
    def loads_per_cycle(self) -> float:
        """Whole vectors that are read from the first level in a cycle."""
        return self.l1_rate / self.vector_bytes

    @property
    def launch_cycles(self) -> float:
        """Cycles of handing out a parallel loop."""
        return self.launch_seconds * self.hz

    @property
    def flops(self) -> float:
        """float32 operations a second of all cores; a multiply-add counts 2."""
        return 2.0 * self.cores * self.hz * self.macs_per_cycle()


@dataclass(frozen=True)
class Fact:
    """A figure that calibration measures: ``what`` it is, the ``field`` of :class:`CpuMachine` that it gives, its
    ``unit`` in a target's text, and ``scale`` of the field's units in one of those."""

    what: str
    field: str
    unit: str
    scale: float = 1.0


#: by the name in a target's ``model``
FACTS: Mapping[str, Fact] = {
    "ghz": Fact("clock under vector load", "hz", "GHz", 1e9),
    "fma": Fact("multiply-adds", "fma_per_cycle", "vectors/cycle"),
    "latency": Fact("latency of a multiply-add", "fma_latency", "cycles"),
    "dot": Fact("8-bit dot products", "dot_per_cycle", "vectors/cycle"),
    "bfloat": Fact("bfloat16 dot products", "bfloat_per_cycle", "vectors/cycle"),
    "matrix": Fact("8-bit products of pairs of rows", "matrix_per_cycle", "vectors/cycle"),
    "words": Fact("16-bit products of pairs", "words_per_cycle", "vectors/cycle"),
    "l1rate": Fact("reading level 1, a core", "l1_rate", "bytes/cycle"),
    "l2rate": Fact("reading level 2, a core", "l2_rate", "bytes/cycle"),
    "l3rate": Fact("reading level 3, a core", "l3_rate", "bytes/cycle"),
    "core": Fact("reading memory, one core", "core_rate", "GB/s", 1e9),
    "memory": Fact("reading memory, all cores", "memory_rate", "GB/s", 1e9),
    "launch": Fact("starting a parallel loop", "launch_seconds", "us", 1e-6),
    "tile": Fact("matrix unit, products of tiles", "tile_per_cycle", "rows/cycle"),
    "tilelatency": Fact("latency of a tile's product", "tile_latency", "cycles"),
}

#: 64-bit Arm: units, caches (a second level that cores share is described as a third, and a core's part of it as its
#: second) and memory as common chips have them. Sources: Arm's Software Optimization Guides and Technical Reference
#: Manuals; the data sheets of BCM2837, BCM2711, BCM2712 and of Graviton 2 to 4.
_ARM: Mapping[str, Mapping[str, float]] = {
    # two units of 64 bits, in order; 128 bits are read in two cycles
    "cortex-a53": {
        "hz": 1.5e9, "fma_per_cycle": 1.0, "fma_latency": 8.0, "l1_bytes": 32 << 10, "l2_bytes": 128 << 10,
        "l3_bytes": 512 << 10, "l1_rate": 8.0, "l2_rate": 8.0, "l3_rate": 4.0, "core_rate": 2e9, "memory_rate": 2.5e9,
        "mispredict_cycles": 8.0, "window": 8,
    },
    "cortex-a72": {
        "hz": 1.8e9, "fma_per_cycle": 1.0, "fma_latency": 7.0, "l1_bytes": 32 << 10, "l2_bytes": 256 << 10,
        "l3_bytes": 1 << 20, "l1_rate": 16.0, "l2_rate": 16.0, "l3_rate": 8.0, "core_rate": 4e9, "memory_rate": 5e9,
        "window": 128, "way_bytes": 16 << 10,
    },
    "cortex-a76": {
        "hz": 2.4e9, "l1_bytes": 64 << 10, "l2_bytes": 512 << 10, "l3_bytes": 2 << 20, "l1_rate": 32.0, "l2_rate": 32.0,
        "l3_rate": 16.0, "core_rate": 10e9, "memory_rate": 14e9, "mispredict_cycles": 11.0, "window": 128,
        "way_bytes": 16 << 10,
    },
    "neoverse-n1": {
        "hz": 3.0e9, "l1_bytes": 64 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20, "l1_rate": 32.0, "l2_rate": 32.0,
        "l3_rate": 16.0, "mispredict_cycles": 11.0, "window": 128, "way_bytes": 16 << 10,
    },
    # four units; the fast ones for dot products are as many
    "neoverse-v1": {
        "hz": 2.6e9, "fma_per_cycle": 4.0, "l1_bytes": 64 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20,
        "l1_rate": 48.0, "l2_rate": 32.0, "l3_rate": 16.0, "mispredict_cycles": 11.0, "window": 256,
        "way_bytes": 16 << 10,
    },
    "neoverse-v2": {
        "hz": 3.4e9, "fma_per_cycle": 4.0, "l1_bytes": 64 << 10, "l2_bytes": 2 << 20, "l3_bytes": 36 << 20,
        "l1_rate": 48.0, "l2_rate": 32.0, "l3_rate": 16.0, "mispredict_cycles": 11.0, "window": 320,
        "way_bytes": 16 << 10,
    },
}

#: What families of CPUs have beside the default of their vectors' width, by LLVM's name and that width in bytes. Where
#: vectors are twice as wide as the units, each takes two passes; client cores have one unit of 512 bits. The first two
#: Zens have one unit that multiplies 16-bit numbers beside two for floats (Agner Fog's tables; measured on a Zen 2, 40
#: products of ``pmaddwd`` a nanosecond, 45 of ``pmaddubsw``, 52 of float32).
_FAMILIES: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("znver1", 32): {"fma_per_cycle": 1.0, "words_per_cycle": 0.5, "l1_rate": 32.0, "l2_rate": 32.0},
    ("znver2", 32): {"words_per_cycle": 1.0, "l2_rate": 32.0},
    **{(name, 32): {"l2_rate": 32.0} for name in ("znver3", "znver4")},
    ("znver4", 64): {"fma_per_cycle": 1.0, "l1_rate": 64.0, "l2_rate": 32.0},
    **{  # a dot product of bfloat16 begins in every other cycle (measured on a Xeon with AMX), at any width
        (name, 64): {"hz": 3.0e9, "l1_bytes": 48 << 10, "l2_bytes": 2 << 20, "bfloat_per_cycle": 0.5}
        for name in ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d")
    },
    **{(name, 64): {"fma_per_cycle": 1.0} for name in ("icelake-client", "tigerlake", "rocketlake")},
    **{(name, 16): facts for name, facts in _ARM.items()},
}


def _facts(model: str) -> dict[str, float]:
    """Fields that a target's ``model`` gives."""
    found = re.findall(rf"\b({'|'.join(FACTS)})=(\d+(?:\.\d+)?)(?![\w.])", model)
    return {FACTS[name].field: float(value) * FACTS[name].scale for name, value in found if float(value)}


def _default(cores: int, width: int, registers: int) -> CpuMachine:
    """The defaults for machines with vectors of ``width`` bytes."""
    level2 = (1024 if width == 64 else 512) << 10  # cores with AVX-512 have larger ones
    return CpuMachine(
        cores, width, registers, 32 << 10, level2, USUAL_LAST_LEVEL, 2.0 * width, min(64.0, 2.0 * width),
        # a few cores saturate what a socket's channels give to all
        memory_rate=30e9 * min(cores, 2) + 5e9 * max(0, cores - 2),
    )


def reference_machine(target: tvm.target.Target) -> CpuMachine:
    """The description of an average machine with the instructions of an ``llvm`` target: learned cost models describe
    programs by it, so that their knowledge carries over between machines."""
    return _reference(str(target))


def cpu_machine(target: tvm.target.Target) -> CpuMachine:
    """The machine that an ``llvm`` target describes."""
    return _machine(str(target))


@lru_cache(maxsize=64)
def _reference(target_json: str) -> CpuMachine:
    target = tvm.target.Target(target_json)
    with target:
        has = tvm.target.codegen.llvm_cpu_has_features

        def feature(name: str) -> bool:
            return bool(has(name, target))

        if feature("avx512f"):
            width, registers = 64, 32
        elif feature("avx2"):
            width, registers = 32, 16
        elif feature("neon"):
            width, registers = 16, 32
        else:
            width, registers = 16, 16
        found = _default(int(target.attrs.get("num-cores", 1)), width, registers)
        if feature("neon"):
            found = replace(found, hz=3e9)
        if not (feature("fma") or feature("avx512f") or feature("neon")):
            found = replace(found, fma_per_cycle=1.0)  # a multiplication and an addition take the two units
        dots = feature("avx512vnni") if width == 64 else feature("avxvnni") or feature("dotprod")
        bfloats = feature("avx512bf16") if width == 64 else feature("neon") and feature("bf16")
        pairs = feature("neon") and feature("i8mm")
        rate = found.fma_per_cycle  # dot products are issued like multiply-adds
        tiles = feature("amx-tile") and (feature("amx-int8") or feature("amx-bf16"))
        return replace(found, dot_per_cycle=rate if dots else 0.0, bfloat_per_cycle=rate if bfloats else 0.0,
                       matrix_per_cycle=rate if pairs else 0.0, tile_per_cycle=float(tiles))


@lru_cache(maxsize=64)
def _machine(target_json: str) -> CpuMachine:
    target, found = tvm.target.Target(target_json), _reference(target_json)
    family = _FAMILIES.get((str(target.attrs.get("mcpu", "")), found.vector_bytes), {})
    model = str(target.attrs.get("model", ""))
    caches = {f"l{level}_bytes": size for level, size in sizes_in(model).items()}
    facts: dict[str, Any] = {**family, **_facts(model), **caches}
    for rate in ("dot_per_cycle", "bfloat_per_cycle", "matrix_per_cycle"):
        if "fma_per_cycle" in family and getattr(found, rate):
            facts.setdefault(rate, family["fma_per_cycle"])
    if "core_rate" in facts and "memory_rate" in facts:  # fewer cores than were measured draw less
        facts["memory_rate"] = min(facts["core_rate"] * found.cores, facts["memory_rate"])
    return replace(found, **facts)


@dataclass(frozen=True)
class GpuMachine:
    """A GPU: its multiprocessors, and what one of them and one block of threads have, in bytes and threads.

    ``lanes`` and ``tensor_lanes`` are the multiply-adds that a multiprocessor does in a cycle: of float32 without
    tensor cores, and of 16-bit floats with them, which are added up in float32 (0: it has none). ``memory_rate`` and
    ``l2_rate`` are bytes a second that all multiprocessors together read from memory and from the second level.
    """

    multiprocessors: int
    hz: float
    lanes: int
    tensor_lanes: int
    memory_rate: float
    l2_bytes: int
    shared_bytes: int  # that a block may ask for
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    registers_per_multiprocessor: int = 65536  # of 32 bits
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    warp: int = 32
    launch_seconds: float = 4e-6
    call_seconds: float = 1e-6

    @property
    def flops(self) -> float:
        """float32 operations a second of the whole GPU without tensor cores; a multiply-add counts 2."""
        return 2.0 * self.lanes * self.multiprocessors * self.hz

    def tensor_flops(self, bits: int = 16) -> float:
        """Operations a second of the tensor cores on operands of so many bits: the fewer, the more (tf32 counts 32)."""
        return 2.0 * self.tensor_lanes * self.multiprocessors * self.hz * 16 / bits

    @property
    def l2_rate(self) -> float:
        """Taken as three times the memory's."""
        return 3.0 * self.memory_rate

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """How many blocks of so many threads, registers a thread and bytes of shared memory run on a multiprocessor
        at once; 0 where one does not fit. Registers are handed out to warps by eight for each thread, and a block's
        shared memory takes a kilobyte more than it asks for (CUDA C++ Programming Guide, compute capabilities)."""
        held = -(-registers // 8) * 8 * -(-threads // self.warp) * self.warp
        return min(
            self.blocks_per_multiprocessor, self.threads_per_multiprocessor // threads,
            self.registers_per_multiprocessor // held, (self.shared_bytes + _RESERVED) // (shared + _RESERVED),
        ) if registers <= self.registers_per_thread else 0


#: bytes of shared memory that the system takes for each block
_RESERVED = 1024

#: by compute capability, the largest part of each
GPUS: Mapping[str, GpuMachine] = {
    "70": GpuMachine(80, 1.53e9, 64, 512, 0.90e12, 6 << 20, 98304, 2048, 32),
    "75": GpuMachine(72, 1.77e9, 64, 512, 0.67e12, 6 << 20, 65536, 1024, 16),
    "80": GpuMachine(108, 1.41e9, 64, 1024, 1.55e12, 40 << 20, 166912, 2048, 32),
    "86": GpuMachine(84, 1.74e9, 128, 512, 0.77e12, 6 << 20, 101376, 1536, 16),
    "87": GpuMachine(16, 1.30e9, 128, 1024, 0.20e12, 4 << 20, 166912, 1536, 16),
    "89": GpuMachine(142, 2.52e9, 128, 512, 0.96e12, 96 << 20, 101376, 1536, 24),
    "90": GpuMachine(132, 1.78e9, 128, 2048, 3.35e12, 50 << 20, 232448, 2048, 32),
    "100": GpuMachine(148, 1.85e9, 128, 4096, 8.00e12, 126 << 20, 232448, 2048, 32),
    "120": GpuMachine(188, 2.62e9, 128, 512, 1.79e12, 128 << 20, 101376, 1536, 24),
}
_UNKNOWN_GPU = "80"

#: figures of a GPU that a target's ``model`` may state: ``sms=114,ghz=1.75,memory=2000,l2=50M``
_GPU_FACTS: Mapping[str, tuple[str, float]] = {
    "sms": ("multiprocessors", 1), "ghz": ("hz", 1e9), "memory": ("memory_rate", 1e9),
}


def gpu_of(arch: str) -> GpuMachine | None:
    """The largest GPU of an architecture (``sm_90``, ``sm_90a``), None for one that is not known."""
    return GPUS.get(arch.removeprefix("sm_").rstrip("af"))


def gpu_machine(target: tvm.target.Target) -> GpuMachine:
    """The machine that a ``cuda`` target describes: of several architectures the first, with what the target's
    ``model`` says of it; limits of a block that the target states go first."""
    attrs = target.attrs
    found = gpu_of(str(attrs.get("arch", "")).split(",")[0]) or GPUS[_UNKNOWN_GPU]
    model = str(attrs.get("model", ""))
    stated: dict[str, Any] = {
        field: type(getattr(found, field))(float(value) * scale)
        for name, (field, scale) in _GPU_FACTS.items()
        for value in re.findall(rf"\b{name}=(\d+(?:\.\d+)?)(?![\w.])", model)[:1] if float(value)
    }
    if caches := sizes_in(model).get(2):
        stated["l2_bytes"] = caches
    return replace(
        found, **stated, shared_bytes=int(attrs.get("max_shared_memory_per_block", found.shared_bytes)),
        threads_per_block=int(attrs.get("max_threads_per_block", found.threads_per_block)),
        warp=int(attrs.get("thread_warp_size", found.warp)),
    )
