"""What a CPU schedule needs to know of the machine, read from the TVM target alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import tvm

__all__ = ["CpuMachine", "cpu_machine"]


@dataclass(frozen=True)
class CpuMachine:
    """Sizes in bytes unless named otherwise. Cache sizes are conservative where the target does not say."""

    cores: int
    vector_bytes: int  # width of one vector register: 16 (SSE, NEON), 32 (AVX2), 64 (AVX-512)
    vector_registers: int
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 512 * 1024
    l3_bytes: int = 16 * 1024 * 1024

    def lanes(self, dtype: str = "float32") -> int:
        """How many elements of ``dtype`` one vector register holds."""
        return max(1, self.vector_bytes * 8 // tvm.runtime.DataType(dtype).bits)


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
    return CpuMachine(int(target.attrs.get("num-cores", 1)), width, registers)


def cpu_machine(target: tvm.target.Target) -> CpuMachine:
    """The machine that an ``llvm`` target describes."""
    return _machine(str(target))
