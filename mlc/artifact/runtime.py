"""TVM's runtime library alone: all that loading and running an artifact needs.

``import tvm`` brings the compiler along, 260 MB of it. Here the 3 MB runtime library is loaded through ``tvm_ffi``,
unless the whole of TVM is there already; both ways end in the same registry of functions.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.errors import ArtifactError, InstallationError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ALIGNMENT", "CPU", "CUDA", "array_of", "function", "load_cuda", "tensor_of", "version"]

#: bytes; the code that TVM generates reads and writes tensors with aligned vector instructions
ALIGNMENT = 64
#: device types of DLPack
CPU, CUDA = 1, 2


@cache
def function(name: str) -> Callable[..., Any]:
    """A global function of TVM's runtime; the library is loaded first where that has not happened yet."""
    _load()
    import tvm_ffi

    found: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return found


@cache
def _load() -> None:
    import tvm_ffi

    if tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True) is None:
        _load_library("tvm_runtime", "RTLD_GLOBAL")


def _load_library(name: str, mode: str) -> None:
    from tvm_ffi.libinfo import load_lib_ctypes

    spec = importlib.util.find_spec("tvm")  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise InstallationError("running an artifact needs TVM's runtime, which is missing; pip install apache-tvm")
    folders = [Path(place) / "lib" for place in spec.submodule_search_locations]
    if os.environ.get("TVM_LIBRARY_PATH"):
        folders.insert(0, Path(os.environ["TVM_LIBRARY_PATH"]))
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


def load_cuda(built_for: str) -> None:
    """Load TVM's CUDA runtime; raises :class:`ArtifactError` where the machine has no NVIDIA driver."""
    _load()
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is not None:
        return
    try:
        _load_library("tvm_runtime_cuda", "RTLD_LOCAL")
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ArtifactError(
            f"the module was built for {built_for}, but this machine has no NVIDIA driver or CUDA runtime ({reason}); "
            "load it where `nvidia-smi` lists a GPU, or compile with --target native"
        ) from error


def empty_tensor(shape: tuple[int, ...], dtype: str, device: Any = None) -> Any:
    """An uninitialised tensor, aligned as compiled code wants it, on a device (this machine's memory if left out)."""
    import tvm_ffi

    place = device if device is not None else tvm_ffi.device("cpu", 0)
    return function("runtime.TVMTensorAllocWithScope")(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), place, None)


def view(tensor: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """The bytes of a tensor as one of another shape and type."""
    import tvm_ffi

    return function("runtime.TVMTensorCreateView")(tensor, tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), 0)


def tensor_of(array: np.ndarray) -> Any:
    """A tensor that shares the memory of a contiguous, writable array. DLPack of numpy knows no bfloat16."""
    import tvm_ffi

    if array.dtype.kind != "V":  # ml_dtypes' kind; a type's name takes numpy a microsecond
        return tvm_ffi.from_dlpack(array)
    return view(tvm_ffi.from_dlpack(array.view("uint16")), array.shape, "bfloat16")


def array_of(tensor: Any) -> np.ndarray:
    """An array that shares the memory of a tensor of this machine's."""
    import numpy as np

    if str(tensor.dtype) != "bfloat16":
        return np.from_dlpack(tensor)
    import ml_dtypes

    return np.from_dlpack(view(tensor, tuple(tensor.shape), "uint16")).view(ml_dtypes.bfloat16)
