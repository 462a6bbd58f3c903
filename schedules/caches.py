"""The caches of the CPU that this process runs on, as the system tells them.

Imports the standard library alone, so that a device that only measures can ask too.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

__all__ = ["USUAL_LAST_LEVEL", "native_caches", "native_last_level", "sizes_in"]

#: bytes of the last level of a CPU that nothing is known of
USUAL_LAST_LEVEL = 16 << 20
_SYSFS = Path("/sys/devices/system/cpu")
_SYSCONF = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE", 3: "SC_LEVEL3_CACHE_SIZE"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def native_caches(sysfs: Path = _SYSFS) -> str:
    """This machine's cache sizes as the text of a target's ``model``; empty where neither sysfs nor libc knows any."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sizes = _from_sysfs(sysfs / f"cpu{cpu}" / "cache") or _from_libc()
    return ",".join(f"l{level}={size >> 10}K" for level, size in sorted(sizes.items()))


def native_last_level() -> int:
    """Bytes of this machine's largest cache: what is read again after more than that comes from memory."""
    return max({3: USUAL_LAST_LEVEL, **sizes_in(native_caches())}.values())


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
    """The cache sizes from the C library, which asks the CPU itself, since containers may hide sysfs."""
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


def sizes_in(model: str) -> dict[int, int]:
    """Cache sizes by level that a target's ``model`` names; what else it says is left alone."""
    return {int(level): _bytes(size) for level, size in re.findall(r"\bl([123])=(\d+[KM]?)\b", model)}
