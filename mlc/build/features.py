"""Instructions that compiled code needs, and those that this machine's CPU has."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm

__all__ = ["host_features", "missing_features", "required_features"]

#: LLVM's name of an extension that code generation uses -> its name in /proc/cpuinfo
_X86 = {
    "sse3": "pni", "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "popcnt": "popcnt", "lzcnt": "abm",
    "movbe": "movbe", "bmi": "bmi1", "bmi2": "bmi2", "f16c": "f16c", "fma": "fma", "avx": "avx", "avx2": "avx2",
    "avxvnni": "avx_vnni", "gfni": "gfni", "vaes": "vaes", "vpclmulqdq": "vpclmulqdq",
    "avx512f": "avx512f", "avx512cd": "avx512cd", "avx512bw": "avx512bw", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni", "avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "amx-tile": "amx_tile", "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}
_ARM = {
    "neon": "asimd", "fullfp16": "asimdhp", "dotprod": "asimddp", "lse": "atomics", "sve": "sve", "sve2": "sve2",
    "bf16": "bf16", "i8mm": "i8mm",
}


def required_features(target: tvm.target.Target) -> tuple[str, ...]:
    """The extensions, by their names in /proc/cpuinfo, that code for an ``llvm`` target may use."""
    import tvm

    if target.kind.name != "llvm":
        target = target.host or tvm.target.Target("llvm")
    names = {**_X86, **_ARM}
    enabled = tvm.target.codegen.llvm_get_cpu_features(target)
    return tuple(sorted(names[str(f)] for f in enabled if str(f) in names))


@cache
def host_features() -> frozenset[str] | None:
    """What /proc/cpuinfo lists for this machine's CPU; None where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def missing_features(machine: str, needed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of ``needed`` this CPU lacks; the whole architecture where it differs from ``machine``."""
    if machine != platform.machine():
        return (machine,)
    have = host_features()
    return () if have is None else tuple(name for name in needed if name not in have)
