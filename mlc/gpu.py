"""The NVIDIA GPU of this machine, as its driver describes it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Gpu", "driver", "find_gpu", "gpus"]

_DRIVER = "libcuda.so.1"
#: ``CUdevice_attribute`` of cuda.h
_CLOCK_KHZ, _MULTIPROCESSORS, _MEMORY_KHZ, _BUS_BITS, _L2_BYTES, _MAJOR, _MINOR = 13, 16, 36, 37, 38, 75, 76


@dataclass(frozen=True)
class Gpu:
    """A GPU that answers. ``hz`` is its highest clock, ``memory_rate`` bytes a second, ``memory_bytes`` all that it
    has; 0 where the driver does not say."""

    name: str
    arch: str  # sm_80, and of Hopper sm_90a, with the instructions that it alone has
    multiprocessors: int
    hz: float
    memory_rate: float
    l2_bytes: int
    memory_bytes: int = 0

    @property
    def model(self) -> str:
        """The GPU's figures as part of a target's ``model``, which :func:`schedules.machine.gpu_machine` reads."""
        return (f"sms={self.multiprocessors},ghz={self.hz / 1e9:.3f},memory={self.memory_rate / 1e9:.0f},"
                f"l2={self.l2_bytes >> 10}K")


def driver() -> Any:
    """The driver's library; None on a machine that has none, whatever stands in for it (:mod:`mlc.codegen.cuda`)."""
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return library if hasattr(library, "cuInit") else None


def gpus(library: Any) -> list[Gpu]:
    """Every GPU that the driver shows."""
    count = ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_described(library, index) for index in range(count.value)]


@lru_cache(maxsize=1)
def find_gpu() -> Gpu | None:
    """This machine's first GPU, which is what code runs on; None without one."""
    library = driver()
    return next(iter(gpus(library)), None) if library is not None else None


def _described(library: Any, index: int) -> Gpu:
    name = ctypes.create_string_buffer(128)
    library.cuDeviceGetName(name, 128, index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return 0 if library.cuDeviceGetAttribute(ctypes.byref(value), number, index) else value.value

    number, memory = f"{attribute(_MAJOR)}{attribute(_MINOR)}", ctypes.c_size_t()
    if library.cuDeviceTotalMem_v2(ctypes.byref(memory), index):
        memory.value = 0
    return Gpu(
        name.value.decode(errors="replace"), f"sm_{number}{'a' if number == '90' else ''}", attribute(_MULTIPROCESSORS),
        # memory moves data at both edges of its clock
        attribute(_CLOCK_KHZ) * 1e3, 2e3 * attribute(_MEMORY_KHZ) * attribute(_BUS_BITS) / 8, attribute(_L2_BYTES),
        memory.value,
    )
