"""CPU features: the instruction-set extensions that compiled code needs, and those that this machine has."""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING

from mlc.cpu import FLAGS, tiles_granted, usable_flags

if TYPE_CHECKING:
    import tvm

    from mlc.target import Target

__all__ = ["driver_missing", "lacking", "missing_features", "required_features"]


def required_features(target: tvm.target.Target) -> tuple[str, ...]:
    """The extensions, by their names in /proc/cpuinfo, that code for an ``llvm`` target may use."""
    import tvm

    if target.kind.name != "llvm":
        target = target.host or tvm.target.Target("llvm")
    flags = {feature: flag for names in FLAGS.values() for feature, flag in names.items()}
    enabled = tvm.target.codegen.llvm_get_cpu_features(target)
    return tuple(sorted(flags[str(f)] for f in enabled if str(f) in flags))


def missing_features(machine: str, needed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of ``needed`` this CPU lacks, or the kernel does not let this process use, which is asked for it here; the
    whole architecture where it differs from ``machine``."""
    if machine != platform.machine():
        return (machine,)
    have = usable_flags()
    if have is None:
        return tuple(name for name in needed if name.startswith("amx_") and not tiles_granted())
    return tuple(name for name in needed if name not in have)


def driver_missing() -> bool:
    """Whether this machine has no driver for NVIDIA GPUs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def lacking(target: Target) -> str:
    """What this machine lacks to run code for a target, in words; empty if nothing."""
    if target.kind == "cuda" and driver_missing():
        return "an NVIDIA driver"
    needed = target.tvm.host or target.tvm
    machine = str(needed.attrs.get("mtriple", "")).partition("-")[0] or platform.machine()
    missing = missing_features(machine, required_features(target.tvm))
    return "" if not missing else f"a CPU of {missing[0]}" if missing[0] == machine else (
        f"the instructions {', '.join(missing)}")
