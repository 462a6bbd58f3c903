"""Links object files into a shared library with whatever linker is installed, for another architecture with one that
supports it.

What TVM generates needs no start files, and its libc and libm are those of the process that loads it. So a bare linker
does, and LLVM's links for every architecture.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from mlc.errors import BuildError

__all__ = ["find_linker", "link_shared"]

_DRIVERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")
#: linkers without a compiler around them
_LINKERS = ("ld", "ld.lld", "ld.gold", "ld.mold")
#: of them those that link for any architecture, which they read from the object files
_MANY = ("ld.lld", "ld.mold", "mold")


def find_linker(architecture: str = "") -> list[str]:
    """The command that links for an architecture as ``platform.machine`` names it (left out: this machine's).

    Here that is ``$CXX`` or ``$CC``, a compiler driver, or a bare linker; for another architecture the GNU toolchain of
    that (``aarch64-linux-gnu-gcc``), LLVM's linker or mold, or the one that comes with Zig. Raises :class:`BuildError`
    where there is none.
    """
    if architecture not in ("", platform.machine()):
        return _cross_linker(architecture)
    for name in ("CXX", "CC"):
        words = shlex.split(os.environ.get(name, ""))
        if words and shutil.which(words[0]):
            return words
    for name in (*_DRIVERS, *_LINKERS):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "building an artifact needs a linker, but neither a C compiler nor ld was found; install one "
        "(`apt install gcc`, `conda install gxx`) or name it in CXX"
    )


def link_shared(
    output: str, objects: Sequence[str], *, files: Sequence[int] = (), architecture: str = "", **_: object
) -> None:
    """Link ``objects`` into the shared library ``output``; raises :class:`BuildError` with the linker's last words.

    ``files`` are descriptors that the linker inherits.
    """
    command = [*find_linker(architecture), "-shared", "-o", str(output), *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False,
                          pass_fds=files)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("collect2:")] or lines  # which only says that ld failed
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise BuildError(f"{command[0]} must link the compiled code, but it refused: {reason}")


def _cross_linker(architecture: str) -> list[str]:
    prefix = f"{architecture}-linux-gnu-"
    for name in (*(prefix + driver for driver in ("g++", "gcc", "ld")), *_MANY):
        if shutil.which(name):
            return [name]
    if shutil.which("zig"):
        return ["zig", "ld.lld"]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    raise BuildError(
        f"building for {architecture} on {platform.machine()} needs a linker for it, but neither {prefix}gcc nor "
        f"ld.lld was found; run `pip install ziglang` or `apt install gcc-{architecture.replace('_', '-')}-linux-gnu`"
    )
