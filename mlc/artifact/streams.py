"""CUDA streams: which one a call runs on, and the copies and waits on foreign streams that TVM's runtime lacks.

A stream is a number here, as ``cudaStream_t`` is; 0 is the default one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mlc.errors import ArtifactError, InputError
from mlc.runtime import CUDART

__all__ = ["Event", "chosen", "copy", "dlpack_number"]

#: of ``cuda_runtime_api.h``: the runtime sees by itself where memory is; an event that nobody times
_ANY_DIRECTION, _UNTIMED = 4, 2
_LEGACY = 1


def chosen(given: Any, tensors: Sequence[Any], device: Any) -> int | None:
    """The stream that a call runs on: the one that is ``given`` (its number, or PyTorch's, CuPy's or any object with
    ``__cuda_stream__``), else the current one of ``tvm_ffi``, else PyTorch's where one of the tensors is PyTorch's and
    on a GPU. None where nobody names one.

    Raises :class:`mlc.errors.InputError` for what is no stream.
    """
    import tvm_ffi

    if given is not None:
        return _number(given)
    if current := int(tvm_ffi.get_raw_stream(device)):
        return current
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(each, torch.Tensor) and each.is_cuda for each in tensors):
        return int(torch.cuda.current_stream(0).cuda_stream)
    return None


def _number(given: Any) -> int:
    found = given
    if hasattr(given, "__cuda_stream__"):
        _, found = given.__cuda_stream__()
    elif hasattr(given, "cuda_stream"):
        found = given.cuda_stream
    elif hasattr(given, "ptr"):
        found = given.ptr
    if isinstance(found, bool | np.bool_) or not isinstance(found, int | np.integer) or found < 0:
        raise InputError(f"a stream must be the number of a cudaStream_t, or have __cuda_stream__ as PyTorch's and "
                         f"CuPy's do, got {' '.join(repr(given).split())}; take torch.cuda.current_stream(), or leave "
                         "it out")
    return int(found)


def dlpack_number(stream: int) -> int:
    """A stream as DLPack calls it, where 0 means nothing."""
    return stream or _LEGACY


def copy(source: Any, target: Any, size: int, stream: int) -> None:
    """Start to copy so many bytes from one tensor to another on ``stream``; either may be in page-locked memory."""
    _check("cudaMemcpyAsync", ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr()),
           ctypes.c_size_t(size), _ANY_DIRECTION, ctypes.c_void_p(stream))


class Event:
    """A place in a stream, which other streams and this machine can wait for; the stream itself may be gone by then."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        _check("cudaEventCreateWithFlags", ctypes.byref(self._handle), _UNTIMED)
        self._destroy = _library().cudaEventDestroy

    def record(self, stream: int) -> None:
        """Be where the stream is now."""
        _check("cudaEventRecord", self._handle, ctypes.c_void_p(stream))

    def hold_back(self, stream: int) -> None:
        """Let what comes on ``stream`` from now on wait."""
        _check("cudaStreamWaitEvent", ctypes.c_void_p(stream), self._handle, 0)

    def wait(self) -> None:
        """Wait here."""
        _check("cudaEventSynchronize", self._handle)

    def __del__(self) -> None:
        if self._handle:
            self._destroy(self._handle)


@cache
def _library() -> ctypes.CDLL:
    """CUDA's runtime, the one that TVM's has loaded."""
    library = ctypes.CDLL(CUDART)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _check(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's runtime; raises :class:`mlc.errors.ArtifactError` where that fails."""
    code = getattr(_library(), name)(*arguments)
    if code:
        reason = _library().cudaGetErrorString(code).decode("ascii", "replace")
        raise ArtifactError(f"{name} must succeed, but CUDA refused it ({reason}); give a stream of the first GPU that "
                            "still exists")
