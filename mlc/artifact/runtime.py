"""What artifacts need of TVM's runtime beyond :mod:`mlc.runtime`: its CUDA part, and tensors that share arrays' memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlc.errors import ArtifactError
from mlc.runtime import ALIGNMENT, CPU, empty_tensor, function, load, load_library, version, view

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ALIGNMENT", "CAPTURED", "CPU", "CUDA", "array_of", "empty_tensor", "function", "is_on_gpu", "load_cuda",
    "page_locked", "tensor_of", "version", "view",
]

#: what TVM adds to the name of a function for the part of it that is captured as a CUDA graph
CAPTURED = "_cuda_graph_capture"

#: a device type of DLPack
CUDA = 2
_CUDA_HOST = 3


def load_cuda(built_for: str) -> None:
    """Load TVM's CUDA runtime; raises :class:`ArtifactError` where the machine has no NVIDIA driver."""
    load()
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is not None:
        return
    try:
        load_library("tvm_runtime_cuda", "RTLD_LOCAL")
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ArtifactError(
            f"the module was built for {built_for}, but this machine has no NVIDIA driver or CUDA runtime ({reason}); "
            "load it where `nvidia-smi` lists a GPU, or compile with --target native"
        ) from error


def is_on_gpu(tensor: Any) -> bool:
    """Whether a tensor's memory is an NVIDIA GPU's."""
    return bool(tensor.device.dlpack_device_type() == CUDA)


def page_locked() -> Any:
    """The device that is this machine's memory, as CUDA locks it for copies."""
    import tvm_ffi

    return tvm_ffi.device(_CUDA_HOST, 0)


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
