"""Instructions that compiled code needs, and those that this machine's CPU has."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from mlc.cpu import FLAGS, host_flags

if TYPE_CHECKING:
    import tvm

__all__ = ["missing_features", "required_features"]


def required_features(target: tvm.target.Target) -> tuple[str, ...]:
    """The extensions, by their names in /proc/cpuinfo, that code for an ``llvm`` target may use."""
    import tvm

    if target.kind.name != "llvm":
        target = target.host or tvm.target.Target("llvm")
    flags = {feature: flag for names in FLAGS.values() for feature, flag in names.items()}
    enabled = tvm.target.codegen.llvm_get_cpu_features(target)
    return tuple(sorted(flags[str(f)] for f in enabled if str(f) in flags))


def missing_features(machine: str, needed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of ``needed`` this CPU lacks; the whole architecture where it differs from ``machine``."""
    if machine != platform.machine():
        return (machine,)
    have = host_flags()
    return () if have is None else tuple(name for name in needed if name not in have)
