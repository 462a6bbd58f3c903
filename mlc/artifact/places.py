"""Where compiled code runs: this machine's CPU or its NVIDIA GPU, and how tensors get there and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mlc.artifact import runtime
from mlc.artifact.runtime import CPU, CUDA, array_of, empty_tensor, is_on_gpu, page_locked
from mlc.errors import ArtifactError
from mlc.frontend.model import TensorSpec

__all__ = ["CpuPlace", "CudaPlace", "Place", "is_out_of_memory", "no_room", "place_of"]

_POOLED_ALLOCATOR = 2


class Place(Protocol):
    """One of the two; made when an executable starts."""

    #: what ``vm_initialization`` takes: device type, device index and allocator of each device, the main one first
    devices: tuple[int, ...]

    def entered(self, index: int, tensor: Any) -> Any:
        """Input ``index`` as a tensor that the code can read."""

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The weights where the code reads them; one copy, however often they are asked for."""

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        """Memory that results of one shape are computed into, the same in each call; None where each call has its
        own."""

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the code as it is to be called."""

    def left(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        """The outputs as arrays; they share the tensors' memory where that is this machine's."""

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        """Copy output ``index`` of the code into a tensor of the caller's, and wait for the end of it."""

    def synchronise(self) -> None:
        """Wait until everything that was started has ended."""


class CpuPlace:
    """Compiled code reads and writes the memory that numpy does."""

    devices: tuple[int, ...] = (CPU, 0, _POOLED_ALLOCATOR)

    def entered(self, index: int, tensor: Any) -> Any:
        return tensor

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        return None

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def left(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        return [array_of(tensor) for tensor in tensors]

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        runtime.function("runtime.TVMTensorCopyFromTo")(tensor, out)

    def synchronise(self) -> None:
        pass


class CudaPlace:
    """Inputs and outputs have buffers on the GPU, the same in each call, which is what a graph of kernels asks for
    (:mod:`mlc.artifact.capture`).

    What lies in this machine's memory goes to the GPU and comes back by way of page-locked memory, which copies need
    not wait for; tensors of the GPU's are copied there. Everything runs on the default stream, where TVM's copies are.
    Of a tensor on the GPU, that stream waits for what the caller's current one (``tvm_ffi.use_torch_stream``) has to
    do; other memory, which that may still write to, is read here, and so it is awaited here. So are results.

    Raises :class:`mlc.errors.ArtifactError` where the machine has no GPU that runs code for ``archs``.
    """

    devices: tuple[int, ...] = (CUDA, 0, _POOLED_ALLOCATOR, CPU, 0, _POOLED_ALLOCATOR)

    def __init__(self, archs: tuple[str, ...]) -> None:
        runtime.load_cuda(f"cuda ({', '.join(archs)})")
        from mlc.artifact.cuda import require_gpu

        self._device = require_gpu(archs)
        self._buffers: dict[int, Any] = {}
        self._staged: dict[tuple[str, int], tuple[np.ndarray, Any]] = {}
        self._weights: list[Any] = []
        self._copy = runtime.function("runtime.TVMTensorCopyFromTo")
        self._wait = runtime.function("runtime.Device_StreamSyncFromTo")

    def entered(self, index: int, tensor: Any) -> Any:
        import tvm_ffi

        there = is_on_gpu(tensor)
        if stream := tvm_ffi.get_raw_stream(self._device):
            if there:
                self._wait(self._device, stream, 0)
            else:
                self._device.sync(stream)
        shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype)
        buffer = self._buffers.get(index)
        if buffer is None or tuple(buffer.shape) != shape:
            buffer = self._buffers[index] = _allocated(shape, dtype, self._device)
        if not there:
            array, locked = self._page_locked("input", index, tensor)
            np.copyto(array, array_of(tensor))  # the call before has ended, and so have its copies
            tensor = locked
        self._copy(tensor, buffer)
        return buffer

    def _page_locked(self, kind: str, index: int, tensor: Any) -> tuple[np.ndarray, Any]:
        """Memory for an input or output that the GPU reads and writes by itself, as an array and as a tensor; the same
        in each call."""
        staged = self._staged.get((kind, index))
        if staged is None or tuple(staged[1].shape) != tuple(tensor.shape):
            locked = _allocated(tuple(map(int, tensor.shape)), str(tensor.dtype), page_locked())
            staged = self._staged[kind, index] = array_of(locked), locked
        return staged

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        if not self._weights:
            there = [_allocated(tuple(map(int, each.shape)), str(each.dtype), self._device) for each in tensors]
            for tensor, copy in zip(tensors, there, strict=True):
                self._copy(tensor, copy)
            self.synchronise()  # whoever owns the arrays may let them go
            self._weights = there
        return self._weights

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        return [_allocated(spec.sized(), spec.dtype, self._device) for spec in specs]

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tvm_ffi

        def on_default_stream(*tensors: Any) -> Any:
            with tvm_ffi.use_raw_stream(self._device, 0):
                return function(*tensors)

        return on_default_stream

    def left(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        staged = [self._fetched(index, tensor) for index, tensor in enumerate(tensors)]
        arrays = [array_of(empty_tensor(tuple(map(int, each.shape)), str(each.dtype))) for each in tensors]
        self.synchronise()
        for array, held in zip(arrays, staged, strict=True):
            np.copyto(array, held)
        return arrays

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        if is_on_gpu(out):
            self._copy(tensor, out)
            self.synchronise()
            return
        held = self._fetched(index, tensor)
        self.synchronise()
        np.copyto(array_of(out), held)

    def _fetched(self, index: int, tensor: Any) -> np.ndarray:
        """Where an output is when what was started has ended."""
        array, locked = self._page_locked("output", index, tensor)
        self._copy(tensor, locked)
        return array

    def synchronise(self) -> None:
        self._device.sync()


def _allocated(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """A tensor's memory; raises :class:`ArtifactError` where there is none."""
    try:
        return empty_tensor(shape, dtype, device)
    except Exception as error:  # whatever TVM raises
        raise no_room(f"a tensor of {dtype} and shape {list(shape)}", error) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether it is CUDA's word, passed on by TVM's runtime, that the GPU has no memory left."""
    return "out of memory" in str(error)


def no_room(what: str, error: Exception) -> ArtifactError:
    """What does not fit the GPU's memory, in one line, and what to do."""
    reason = (str(error).strip().splitlines() or [""])[-1].strip()
    return ArtifactError(f"{what} must fit the GPU's memory, but CUDA refused it ({reason}); end what else uses the "
                         "GPU, or make the batch smaller")


def place_of(metadata: dict[str, Any]) -> Place:
    """The place that an artifact was built for; raises :class:`mlc.errors.ArtifactError` where it is not there."""
    if metadata["kind"] == "cuda":
        return CudaPlace(tuple(json.loads(metadata["target_attrs"])["arch"].split(",")))
    return CpuPlace()
