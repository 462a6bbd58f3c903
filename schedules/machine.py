"""What a CPU schedule needs to know of the machine, read from the TVM target alone.

TVM's targets have no attribute for caches, so their sizes travel in the free text ``model``, as
``l1=48K,l2=1024K,l3=32768K``: :func:`native_caches` is what a target for this very machine carries. A target without
them gets sizes that every machine with its instructions has, and so means the same wherever it is compiled for.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tvm

__all__ = ["CpuMachine", "cpu_machine", "native_caches", "native_last_level"]

_SYSFS = Path("/sys/devices/system/cpu")
_SYSCONF = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE", 3: "SC_LEVEL3_CACHE_SIZE"}
_LAST_LEVEL = 16 << 20  # bytes, where nothing is known
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class CpuMachine:
    """Sizes in bytes unless named otherwise: levels 1 (data) and 2 of one core, level 3 of all that share it."""

    cores: int
    vector_bytes: int  # width of one vector register: 16 (SSE, NEON), 32 (AVX2), 64 (AVX-512)
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int

    def lanes(self, dtype: str = "float32") -> int:
        """How many elements of ``dtype`` one vector register holds."""
        return max(1, self.vector_bytes * 8 // tvm.runtime.DataType(dtype).bits)


def native_caches(sysfs: Path = _SYSFS) -> str:
    """This machine's cache sizes as the text of a target's ``model``; empty where neither sysfs nor libc knows any."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sizes = _from_sysfs(sysfs / f"cpu{cpu}" / "cache") or _from_libc()
    return ",".join(f"l{level}={size >> 10}K" for level, size in sorted(sizes.items()))


def native_last_level() -> int:
    """Bytes of this machine's largest cache: what is read again after more than that comes from memory."""
    return max(_caches(native_caches(), {3: _LAST_LEVEL}).values())


def _from_sysfs(folder: Path) -> dict[int, int]:
    """Bytes of the data caches by level."""
    sizes: dict[int, int] = {}
    for index in folder.glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            if (index / "type").read_text().strip() in ("Data", "Unified"):
                level, size = int((index / "level").read_text()), _bytes((index / "size").read_text().strip())
                if level in _SYSCONF and size:
                    sizes[level] = size
    return sizes


def _from_libc() -> dict[int, int]:
    """The same from the C library, which asks the CPU itself: containers may hide sysfs."""
    sizes = {}
    for level, name in _SYSCONF.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if (size := os.sysconf(name)) > 0:
                sizes[level] = size
    return sizes


def _bytes(text: str) -> int:
    """``48K`` as bytes; raises ``ValueError`` for what is no size."""
    match = re.fullmatch(r"(\d+)([KM]?)", text)
    if not match:
        raise ValueError(f"a cache size must look like 48K, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _caches(model: str, default: Mapping[int, int]) -> dict[int, int]:
    """Cache sizes that a target's ``model`` names, over ``default``; what else it says is left alone."""
    found = re.findall(r"\bl([123])=(\d+[KM]?)\b", model)
    return {**default, **{int(level): _bytes(size) for level, size in found}}


@lru_cache(maxsize=64)
def _machine(target_json: str) -> CpuMachine:
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
    level2 = 1024 if width == 64 else 512  # kilobytes; cores with AVX-512 have larger ones
    caches = _caches(str(target.attrs.get("model", "")), {1: 32 << 10, 2: level2 << 10, 3: _LAST_LEVEL})
    cores = int(target.attrs.get("num-cores", 1))
    return CpuMachine(cores, width, registers, caches[1], caches[2], caches[3])


def cpu_machine(target: tvm.target.Target) -> CpuMachine:
    """The machine that an ``llvm`` target describes."""
    return _machine(str(target))
