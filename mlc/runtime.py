"""Loads TVM's runtime library alone, which is all that loading and running compiled code needs.

``import tvm`` brings the compiler along, 260 MB of it. Here the 3 MB runtime library is loaded through ``tvm_ffi``,
unless the whole of TVM is there already; both ways end in the same registry of functions. ``TVM_LIBRARY_PATH`` names a
folder with the library where TVM's Python package is not installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mlc.errors import InstallationError

__all__ = ["ALIGNMENT", "CPU", "CUDART", "empty_tensor", "function", "load_library", "version", "view"]

#: bytes; the code that TVM generates reads and writes tensors with aligned vector instructions
ALIGNMENT = 64
#: a device type of DLPack
CPU = 1
#: what the TVM wheel's runtime for CUDA is linked against
CUDART = "libcudart.so.13"


@cache
def function(name: str) -> Callable[..., Any]:
    """A global function of TVM's runtime; the library is loaded first where that has not happened yet."""
    load()
    import tvm_ffi

    found: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return found


@cache
def load() -> None:
    """Load TVM's runtime; raises :class:`InstallationError` where there is none."""
    import tvm_ffi

    if tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True) is None:
        load_library("tvm_runtime", "RTLD_GLOBAL")


def load_library(name: str, mode: str) -> None:
    """Load one of TVM's libraries."""
    from tvm_ffi.libinfo import load_lib_ctypes

    spec = importlib.util.find_spec("tvm")  # finds the package without running it
    folders = [Path(place) / "lib" for place in (spec.submodule_search_locations or ())] if spec is not None else []
    if os.environ.get("TVM_LIBRARY_PATH"):
        folders.insert(0, Path(os.environ["TVM_LIBRARY_PATH"]))
    if not folders:
        raise InstallationError("compiled code needs TVM's runtime, but there is none; run `pip install apache-tvm` or "
                                "name the folder of libtvm_runtime.so in TVM_LIBRARY_PATH")
    _KEPT.append(load_lib_ctypes("tvm", name, mode, extra_lib_paths=folders))


_KEPT: list[Any] = []  # handles of loaded libraries


@cache
def version() -> str:
    """The installed TVM's version, from its package's metadata."""
    from importlib import metadata

    try:
        return metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        return "unknown"


def empty_tensor(shape: tuple[int, ...], dtype: str, device: Any = None) -> Any:
    """An uninitialised tensor, aligned as compiled code wants it, on a device (this machine's memory if left out)."""
    import tvm_ffi

    place = device if device is not None else tvm_ffi.device("cpu", 0)
    return function("runtime.TVMTensorAllocWithScope")(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), place, None)


def view(tensor: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """The bytes of a tensor as one of another shape and type."""
    import tvm_ffi

    return function("runtime.TVMTensorCreateView")(tensor, tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), 0)
