"""Runs AMX code on any x86-64 CPU. A CPU without AMX emulates it, which shows that code computes the right numbers and
which tile instructions it executes, but says nothing about speed; a CPU with AMX runs the code itself and counts
nothing.

``amx.c`` executes the tile instructions, which such a CPU refuses. :func:`install` makes this process answer them, and
what :func:`environment` says makes a child do so, which also reads that its CPU has AMX and must ask the kernel for
permission. All other instructions of a target are this CPU's to run: :func:`target` names one that it can.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mlc.cpu import host_cpu
from mlc.testing.preloading import compiled

if TYPE_CHECKING:
    from mlc.target import Target

__all__ = ["FEATURES", "counted", "environment", "install", "library", "missing", "target"]

_SOURCE = Path(__file__).with_suffix(".c")
#: the instructions, in the order in which they are counted
_INSTRUCTIONS = (
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored", "tdpbssd", "tdpbsud",
    "tdpbusd", "tdpbuud", "tdpbf16ps",
)
#: LLVM's names of what is emulated, and the kernel's
FEATURES = {"amx-tile": "amx_tile", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16"}


def missing() -> str:
    """What is not there of what emulation needs; empty where it can run."""
    if platform.machine() != "x86_64" or not os.path.exists("/proc/self/maps"):
        return "Linux on an x86-64 CPU"
    return "" if shutil.which("cc") else "cc"


def library() -> Path:
    """``amx.c``, compiled once for this process and its children, as long as this process lives."""
    return compiled(_SOURCE)


@lru_cache(maxsize=1)
def install() -> ctypes.CDLL:
    """Execute tile instructions in this process from now on; in a child that has :func:`environment`, once it has asked
    the kernel."""
    preloaded = "AMX_EMULATED" in os.environ
    loaded = ctypes.CDLL(os.environ["LD_PRELOAD"] if preloaded else str(library()))
    loaded.amx_counts.restype = ctypes.POINTER(ctypes.c_uint64)
    if not preloaded:
        loaded.amx_install()
    return loaded


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often this process executes each tile instruction meanwhile, by its name; filled at the end."""
    loaded, counts = install(), dict.fromkeys(_INSTRUCTIONS, 0)
    loaded.amx_reset()
    yield counts
    counts.update(zip(_INSTRUCTIONS, loaded.amx_counts()[: len(_INSTRUCTIONS)], strict=True))


def environment(folder: Path, granted: bool = True) -> Mapping[str, str]:
    """Variables for a child on a CPU that shows AMX, whose kernel has ``granted`` its use or refuses. What must stand
    in a file is written into ``folder``. A CPU that has AMX needs none where it is granted: the emulator answers
    instructions that the CPU refuses, and without the kernel's permission such a CPU refuses some only."""
    if granted and host_cpu().shows("amx-tile"):
        return {}
    described = folder / "cpuinfo"
    flags = " ".join(FEATURES.values())
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    described.write_text("\n".join(f"{line} {flags}" if line.startswith("flags") else line for line in lines) + "\n",
                         encoding="utf-8")
    return {"MLC_CPUINFO": str(described.resolve()), "LD_PRELOAD": str(library()),
            "AMX_EMULATED": "granted" if granted else "denied"}


def target(threads: int = 1) -> Target:
    """This machine's CPU, with AMX."""
    from mlc.target import resolve

    here = json.loads(resolve("native", threads=threads).attrs)
    added = [f"+{name}" for name in FEATURES]
    kept = [feature for feature in here.get("mattr", ()) if str(feature)[1:] not in FEATURES]
    return resolve({**here, "mattr": [*kept, *added]})
