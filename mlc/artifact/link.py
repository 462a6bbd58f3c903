"""Object files to a shared library, with whatever linker the machine has."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from mlc.errors import BuildError

__all__ = ["find_linker", "link_shared"]

_DRIVERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")
#: linkers without a compiler around them: the code needs no start files, and its libc and libm are in the process
_LINKERS = ("ld", "ld.lld", "ld.gold", "ld.mold")


def find_linker() -> list[str]:
    """The command that links: ``$CXX`` or ``$CC``, a compiler driver, or a bare linker.

    Raises :class:`BuildError` where there is none.
    """
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


def link_shared(output: str, objects: Sequence[str], *, files: Sequence[int] = (), **_: object) -> None:
    """Link ``objects`` into the shared library ``output``; raises :class:`BuildError` with the linker's last words.

    ``files`` are descriptors that the linker inherits.
    """
    command = [*find_linker(), "-shared", "-o", str(output), *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False,
                          pass_fds=files)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("collect2:")] or lines  # which only says that ld failed
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise BuildError(f"{command[0]} must link the compiled code, but it refused: {reason}")
