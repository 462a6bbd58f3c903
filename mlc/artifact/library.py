"""Shared libraries that are loaded from memory, each for itself."""

from __future__ import annotations

import itertools
import os
import tempfile
from contextlib import suppress
from typing import IO, Any, cast

from mlc.artifact import runtime

__all__ = ["loaded"]

_libraries: list[Any] = []  # never unloaded, since memory that they allocated may outlive the executable
_places = itertools.count(1)


def loaded(code: bytes) -> Any:
    """Load the shared library as a module of TVM's runtime, from a private copy that nothing can overwrite.

    Each copy has a unique name: the dynamic loader identifies libraries by name and would return one that is loaded
    already, and two modules must not share a library's variables.
    """
    runtime.function("runtime.NumThreads")  # loads the runtime library before code that calls it
    with _private_file() as file:
        file.write(code)
        file.flush()
        module = runtime.function("ffi.Module.load_from_file.so")(_name(file), "so")
    _libraries.append(module)
    return module


def _private_file() -> IO[bytes]:
    """A file in memory, which needs no writable and executable folder, else a temporary file."""
    if os.path.isdir("/proc/self/fd"):
        with suppress(AttributeError, OSError):
            return os.fdopen(os.memfd_create("mlc"), "wb")
    return cast(IO[bytes], tempfile.NamedTemporaryFile(prefix="mlc-", suffix=".so"))


def _name(file: IO[bytes]) -> str:
    if isinstance(file.name, str):
        return file.name
    # descriptors are reused, but names must be unique: "./" and ".//", which do not change a path, encode a counter
    unique = "".join(".//" if bit == "1" else "./" for bit in f"{next(_places):b}")
    return f"/proc/self/fd/{unique}{file.fileno()}"
