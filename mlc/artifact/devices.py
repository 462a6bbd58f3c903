"""The device that compiled code runs on, this machine's CPU or its NVIDIA GPU, and transfers to and from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from mlc.artifact import runtime, streams
from mlc.artifact.runtime import CPU, CUDA, array_of, empty_tensor, is_on_gpu, page_locked
from mlc.errors import ArtifactError, InputError
from mlc.frontend.model import TensorSpec, array_type

__all__ = ["CpuDevice", "CudaDevice", "Device", "device_of", "is_out_of_memory", "out_of_memory_error"]

_POOLED_ALLOCATOR = 2


class Device(Protocol):
    """One of the two; made when an executable starts."""

    #: what ``vm_initialization`` takes: device type, device index and allocator of each device, the main one first
    vm_devices: tuple[int, ...]
    #: the CUDA stream that the call under way runs on
    stream: int

    def begin(self, values: Sequence[Any], stream: Any = None) -> None:
        """A call begins, with these arrays and tensors of its caller's, on a stream of its choice; raises
        :class:`mlc.errors.InputError` where that is none."""

    def entered(self, index: int, tensor: Any) -> Any:
        """Input ``index`` as a tensor that the code can read."""

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The weights where the code reads them; one copy, however often they are asked for."""

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        """Memory that results of one shape are computed into, the same in each call; None where each call has its
        own."""

    def called(self, function: Callable[..., Any], captured: bool) -> Callable[..., Any]:
        """A function of the code as it is to be called; ``captured`` where it is one CUDA graph."""

    def left(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        """The outputs as arrays; they share the tensors' memory where that is this machine's."""

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        """Copy output ``index`` of the code into a tensor of the caller's."""

    def end(self) -> None:
        """The call's last copy was asked for: wait for it where that is what the caller expects."""

    def synchronise(self) -> None:
        """Wait until everything that the call has started has ended."""


class CpuDevice:
    """Compiled code reads and writes the memory that numpy does."""

    vm_devices: tuple[int, ...] = (CPU, 0, _POOLED_ALLOCATOR)
    stream = 0

    def begin(self, values: Sequence[Any], stream: Any = None) -> None:
        if stream is not None:
            raise InputError("a stream is a GPU's, but the model was compiled for a CPU; leave it out")

    def entered(self, index: int, tensor: Any) -> Any:
        return tensor

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        return None

    def called(self, function: Callable[..., Any], captured: bool) -> Callable[..., Any]:
        return function

    def left(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        return [array_of(tensor) for tensor in tensors]

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        runtime.function("runtime.TVMTensorCopyFromTo")(tensor, out)

    def end(self) -> None:
        pass

    def synchronise(self) -> None:
        pass


class CudaDevice:
    """Inputs and outputs have buffers on the GPU, the same in each call, which is what a graph of kernels asks for
    (:mod:`mlc.artifact.capture`).

    What lies in this machine's memory goes to the GPU and comes back by way of page-locked memory, which copies need
    not wait for; tensors of the GPU's are copied there. All of it runs on the stream that the caller names
    (:func:`mlc.artifact.streams.chosen`), else on the default one. A graph does too. Code that is none has memory that
    TVM hands out anew in the order of calls, so its kernels stay on the default stream, between two events.

    Memory of this machine's that the caller's stream may still write to is read here, and so it is awaited here. So are
    results, but where all that was given is on the GPU and the caller named a stream: then its order is enough, and the
    next call on another stream waits for an event.

    Raises :class:`mlc.errors.ArtifactError` where the machine has no GPU that runs code for ``archs``.
    """

    vm_devices: tuple[int, ...] = (CUDA, 0, _POOLED_ALLOCATOR, CPU, 0, _POOLED_ALLOCATOR)

    def __init__(self, archs: tuple[str, ...]) -> None:
        runtime.load_cuda(f"cuda ({', '.join(archs)})")
        from mlc.artifact.cuda import require_gpu

        self.stream = 0
        self._device = require_gpu(archs)
        self._buffers: dict[int, Any] = {}
        self._staged: dict[tuple[str, int], tuple[np.ndarray, Any]] = {}
        self._fetching: list[tuple[np.ndarray, np.ndarray]] = []
        self._weights: list[Any] = []
        self._copy = runtime.function("runtime.TVMTensorCopyFromTo")
        self._wait = runtime.function("runtime.Device_StreamSyncFromTo")
        self._named = self._awaited = False
        #: where the call before ends, and on which stream, if that was not awaited
        self._before: tuple[streams.Event, int] | None = None

    def __del__(self) -> None:
        """What kernels read and write must stay until they have ended."""
        before = getattr(self, "_before", None)
        if before is not None:
            with suppress(ArtifactError):  # CUDA has ended before
                before[0].wait()

    def begin(self, values: Sequence[Any], stream: Any = None) -> None:
        named = streams.chosen(stream, values, self._device)
        self.stream, self._named, self._awaited = named or 0, named is not None, False
        self._fetching = []  # of a call that was given up
        if self._before is not None and self._before[1] != self.stream:
            self._before[0].hold_back(self.stream)

    def entered(self, index: int, tensor: Any) -> Any:
        shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype)
        buffer = self._buffers.get(index)
        if buffer is None or tuple(buffer.shape) != shape:
            buffer = self._buffers[index] = _allocated(shape, dtype, self._device)
        if not is_on_gpu(tensor):
            if not self._awaited:
                self._read_here()
            array, locked = self._page_locked("input", index, tensor)
            np.copyto(array, array_of(tensor))
            tensor = locked
        self._start(tensor, buffer)
        return buffer

    def _read_here(self) -> None:
        """Wait until this machine may read the caller's memory and write to its own that is page-locked."""
        if self._before is not None:
            self._before[0].wait()
        if self.stream:
            self._device.sync(self.stream)
        self._awaited = True

    def _start(self, source: Any, target: Any) -> None:
        streams.copy(source, target, _nbytes(source), self.stream)

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
            self._device.sync()  # whoever owns the arrays may let them go
            self._weights = there
        return self._weights

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        return [_allocated(spec.sized(), spec.dtype, self._device) for spec in specs]

    def called(self, function: Callable[..., Any], captured: bool) -> Callable[..., Any]:
        import tvm_ffi

        def on_stream(*tensors: Any) -> Any:
            with tvm_ffi.use_raw_stream(self._device, self.stream):
                return function(*tensors)

        def on_default_stream(*tensors: Any) -> Any:
            named, self.stream = self.stream, 0
            try:
                if named:
                    self._wait(self._device, named, 0)
                return on_stream(*tensors)
            finally:
                self.stream = named
                if named:
                    self._wait(self._device, 0, named)

        return on_stream if captured else on_default_stream

    def left(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        arrays = [array_of(empty_tensor(tuple(map(int, each.shape)), str(each.dtype))) for each in tensors]
        for index, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
            self._fetch(index, tensor, array)
        self.end()
        return arrays

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        if is_on_gpu(out):
            self._start(tensor, out)
        else:
            self._fetch(index, tensor, array_of(out))

    def _fetch(self, index: int, tensor: Any, array: np.ndarray) -> None:
        """Start to copy an output into this machine's memory, where it is when the call has ended."""
        held, locked = self._page_locked("output", index, tensor)
        self._start(tensor, locked)
        self._fetching.append((array, held))

    def end(self) -> None:
        if self._fetching or self._awaited or not self._named:
            self.synchronise()
            for array, held in self._fetching:
                np.copyto(array, held)
            self._fetching = []
        else:
            event = self._before[0] if self._before is not None else streams.Event()
            event.record(self.stream)
            self._before = event, self.stream

    def synchronise(self) -> None:
        self._device.sync(self.stream)
        self._before = None


def _nbytes(tensor: Any) -> int:
    return math.prod(map(int, tensor.shape)) * array_type(str(tensor.dtype)).itemsize


def _allocated(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """A tensor's memory; raises :class:`ArtifactError` where there is none."""
    try:
        return empty_tensor(shape, dtype, device)
    except Exception as error:  # whatever TVM raises
        raise out_of_memory_error(f"a tensor of {dtype} and shape {list(shape)}", error) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether it is CUDA's word, passed on by TVM's runtime, that the GPU has no memory left."""
    return "out of memory" in str(error)


def out_of_memory_error(what: str, error: Exception) -> ArtifactError:
    """What does not fit the GPU's memory, in one line, and what to do."""
    reason = (str(error).strip().splitlines() or [""])[-1].strip()
    return ArtifactError(f"{what} must fit the GPU's memory, but CUDA refused it ({reason}); end what else uses the "
                         "GPU, or make the batch smaller")


def device_of(metadata: dict[str, Any]) -> Device:
    """The device that an artifact was built for; raises :class:`mlc.errors.ArtifactError` where it is not there."""
    if metadata["kind"] == "cuda":
        return CudaDevice(tuple(json.loads(metadata["target_attrs"])["arch"].split(",")))
    return CpuDevice()
