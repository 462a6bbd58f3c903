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
    """The device of an executable: :class:`CpuDevice` or :class:`CudaDevice`."""

    #: what ``vm_initialization`` takes: device type, device index and allocator of each device, the main one first
    vm_devices: tuple[int, ...]
    #: the CUDA stream that the call under way runs on
    stream: int

    def begin(self, values: Sequence[Any], stream: Any = None) -> None:
        """Begin a call with these arrays and tensors of the caller's, on a stream of its choice; raises
        :class:`mlc.errors.InputError` for an invalid one."""

    def to_device(self, index: int, tensor: Any) -> Any:
        """Input ``index`` as a tensor that the code can read."""

    def state(self, spec: TensorSpec, tensor: Any) -> Any:
        """Memory of the caller that the code appends to, as it is given; raises :class:`mlc.errors.InputError` for
        memory of another device."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory for a state: an array, or a tensor on the GPU."""

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The weights in the device's memory; copied only once."""

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        """Buffers for outputs of these shapes, the same in each call; None if each call allocates its own."""

    def wrapped(self, function: Callable[..., Any], captured: bool) -> Callable[..., Any]:
        """Wrap a function of the code for this device; ``captured`` if it is one CUDA graph."""

    def to_host(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        """The outputs as arrays, which share the tensors' memory if that is host memory."""

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        """Copy output ``index`` of the code to the caller's tensor."""

    def end(self) -> None:
        """All copies of the call have been started: wait for them if the caller expects that."""

    def synchronise(self) -> None:
        """Wait until all work of the call has ended."""


class CpuDevice:
    """Compiled code reads and writes numpy's memory."""

    vm_devices: tuple[int, ...] = (CPU, 0, _POOLED_ALLOCATOR)
    stream = 0

    def begin(self, values: Sequence[Any], stream: Any = None) -> None:
        if stream is not None:
            raise InputError("a stream is a GPU's, but the model was compiled for a CPU; leave it out")

    def to_device(self, index: int, tensor: Any) -> Any:
        return tensor

    def state(self, spec: TensorSpec, tensor: Any) -> Any:
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        made = array_of(empty_tensor(shape, dtype))
        made[...] = 0  # what has never been written is never read; zeros all the same: pages are touched here
        return made

    def weights(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors

    def outputs(self, specs: Sequence[TensorSpec]) -> Sequence[Any] | None:
        return None

    def wrapped(self, function: Callable[..., Any], captured: bool) -> Callable[..., Any]:
        return function

    def to_host(self, tensors: Sequence[Any]) -> list[np.ndarray]:
        return [array_of(tensor) for tensor in tensors]

    def copy(self, index: int, tensor: Any, out: Any) -> None:
        runtime.function("runtime.TVMTensorCopyFromTo")(tensor, out)

    def end(self) -> None:
        pass

    def synchronise(self) -> None:
        pass


class CudaDevice:
    """Inputs and outputs have fixed buffers on the GPU, as a CUDA graph requires (:mod:`mlc.artifact.capture`).

    Host memory is copied to and from the GPU through page-locked memory, which makes the copies asynchronous; tensors
    on the GPU are copied there. All of it runs on the stream that the caller names
    (:func:`mlc.artifact.streams.chosen`), else on the default one, and so does a captured graph. Kernels that are
    launched one by one use memory that TVM allocates anew in the order of calls, so they stay on the default stream,
    between two events.

    Host memory that the caller's stream may still write to is read only after waiting for that stream. Results are
    waited for too, unless all tensors are on the GPU and the caller named a stream: then stream order is enough, and
    the next call on another stream waits for an event.

    Raises :class:`mlc.errors.ArtifactError` if the machine has no GPU that runs code for ``archs``.
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
        """Memory that kernels use must stay until they have ended."""
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

    def to_device(self, index: int, tensor: Any) -> Any:
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

    def state(self, spec: TensorSpec, tensor: Any) -> Any:
        if not is_on_gpu(tensor):  # what is appended to a copy would be lost
            raise InputError(f"state {spec.name} must be memory of the GPU, which the code appends to, got memory of "
                             "this machine; mlc.Generator keeps states there")
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        made = _allocated(shape, dtype, self._device)
        self._copy(runtime.tensor_of(np.zeros(shape, array_type(dtype))), made)
        self._device.sync()
        return made

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

    def wrapped(self, function: Callable[..., Any], captured: bool) -> Callable[..., Any]:
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

    def to_host(self, tensors: Sequence[Any]) -> list[np.ndarray]:
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
    """Allocate a tensor; raises :class:`ArtifactError` if there is no memory."""
    try:
        return empty_tensor(shape, dtype, device)
    except Exception as error:  # whatever TVM raises
        raise out_of_memory_error(f"a tensor of {dtype} and shape {list(shape)}", error) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of TVM's runtime is CUDA's out-of-memory error."""
    return "out of memory" in str(error)


def out_of_memory_error(what: str, error: Exception) -> ArtifactError:
    """The error that names what does not fit the GPU's memory, and what to do."""
    reason = (str(error).strip().splitlines() or [""])[-1].strip()
    return ArtifactError(f"{what} must fit the GPU's memory, but CUDA refused it ({reason}); end what else uses the "
                         "GPU, or make the batch smaller")


def device_of(metadata: dict[str, Any]) -> Device:
    """The device that an artifact was built for; raises :class:`mlc.errors.ArtifactError` if it is not present."""
    if metadata["kind"] == "cuda":
        return CudaDevice(tuple(json.loads(metadata["target_attrs"])["arch"].split(",")))
    return CpuDevice()
