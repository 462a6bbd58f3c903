"""Where compiled code runs: this machine's CPU or its NVIDIA GPU, and how tensors get there and back."""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np

from mlc.artifact import runtime
from mlc.artifact.runtime import CPU, CUDA, array_of, empty_tensor

__all__ = ["CpuPlace", "CudaPlace", "Place", "place_of"]

_POOLED_ALLOCATOR = 2


class Place(Protocol):
    """One of the two; made when an executable starts."""

    #: what ``vm_initialization`` takes: device type, device index and allocator of each device, the main one first
    devices: tuple[int, ...]

    def entered(self, index: int, tensor: Any) -> Any:
        """Input ``index`` (a tensor on the CPU) as a tensor that the code can read."""

    def left(self, tensor: Any) -> np.ndarray:
        """An output as an array; it shares the tensor's memory where that is this machine's."""

    def copy(self, tensor: Any, out: Any) -> None:
        """Copy an output of the code into a tensor on the CPU, and wait for the end of it."""

    def synchronise(self) -> None:
        """Wait until everything that was started has ended."""


class CpuPlace:
    """Compiled code reads and writes the memory that numpy does."""

    devices: tuple[int, ...] = (CPU, 0, _POOLED_ALLOCATOR)

    def entered(self, index: int, tensor: Any) -> Any:
        return tensor

    def left(self, tensor: Any) -> np.ndarray:
        return array_of(tensor)

    def copy(self, tensor: Any, out: Any) -> None:
        runtime.function("runtime.TVMTensorCopyFromTo")(tensor, out)

    def synchronise(self) -> None:
        pass


class CudaPlace:
    """Each input has a buffer on the GPU; outputs are copied back.

    Raises :class:`mlc.errors.ArtifactError` where the machine has no GPU that runs code for ``archs``.
    """

    devices: tuple[int, ...] = (CUDA, 0, _POOLED_ALLOCATOR, CPU, 0, _POOLED_ALLOCATOR)

    def __init__(self, archs: tuple[str, ...]) -> None:
        runtime.load_cuda(f"cuda ({', '.join(archs)})")
        from mlc.artifact.cuda import require_gpu

        self._device = require_gpu(archs)
        self._buffers: dict[int, Any] = {}
        self._copy = runtime.function("runtime.TVMTensorCopyFromTo")

    def entered(self, index: int, tensor: Any) -> Any:
        if index not in self._buffers:
            self._buffers[index] = empty_tensor(tuple(tensor.shape), str(tensor.dtype), self._device)
        self._copy(tensor, self._buffers[index])
        return self._buffers[index]

    def left(self, tensor: Any) -> np.ndarray:
        host = empty_tensor(tuple(tensor.shape), str(tensor.dtype))
        self._copy(tensor, host)
        self._device.sync()
        return array_of(host)

    def copy(self, tensor: Any, out: Any) -> None:
        self._copy(tensor, out)
        self._device.sync()

    def synchronise(self) -> None:
        self._device.sync()


def place_of(metadata: dict[str, Any]) -> Place:
    """The place that an artifact was built for; raises :class:`mlc.errors.ArtifactError` where it is not there."""
    if metadata["kind"] == "cuda":
        return CudaPlace(tuple(json.loads(metadata["target_attrs"])["arch"].split(",")))
    return CpuPlace()
