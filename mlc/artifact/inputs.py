"""Checks the arrays that a caller passes and hands them to compiled code: inputs without a copy where possible, outputs
always. On GPUs, tensors of the first GPU are taken as well."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mlc.artifact.runtime import ALIGNMENT, CPU, CUDA, array_of, empty_tensor, is_on_gpu, tensor_of
from mlc.artifact.streams import dlpack_number
from mlc.errors import InputError
from mlc.frontend.model import TensorSpec, array_type
from mlc.shapes import Free, Linear, Range, shape_text

__all__ = ["Fit", "InputSlot", "OutputSlot", "check_apart", "check_sizes", "in_order"]


class Fit:
    """Whether an array is what a specification says, for many calls."""

    def __init__(self, spec: TensorSpec) -> None:
        self._shape, self._dtype = spec.shape, array_type(spec.dtype)
        self._ranges = spec.free and tuple(s.range if isinstance(s, Free) else Range(s, s) for s in spec.shape)

    def takes(self, array: np.ndarray) -> bool:
        return array.dtype == self._dtype and self.takes_shape(array.shape)

    def takes_shape(self, shape: tuple[int, ...]) -> bool:
        if self._ranges is False:
            return shape == self._shape
        return len(shape) == len(self._ranges) and all(
            size in each for size, each in zip(shape, self._ranges, strict=True))


def check_sizes(specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise :class:`InputError` where inputs differ in what is one free size, or in what follows from some."""
    known: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(specs, shapes, strict=True):
        for free, size in zip(spec.shape, shape, strict=True):
            if isinstance(free, Free) and known.setdefault(free.name, (size, spec.name))[0] != size:
                other, first = known[free.name]
                raise InputError(f"inputs must agree on {free.name}, but it is {other} in {first} and {size} in "
                                 f"{spec.name}; give arrays of one size")
    for name, (size, spec_name) in known.items():
        linear = _linear(name)
        if linear is not None and all(term in known for term, _ in linear.terms):
            sizes = {term: known[term][0] for term, _ in linear.terms}
            if linear.of(sizes) != size:
                listed = ", ".join(f"{term} is {each} in {known[term][1]}" for term, each in sizes.items())
                raise InputError(f"inputs must agree on {name}, but {listed} and this is {size} in {spec_name}, not "
                                 f"{linear.of(sizes)}; give arrays that fit together")


_linear = lru_cache(maxsize=256)(Linear.parse)


class InputSlot:
    """One input of a compiled model. Not safe for several threads: its owner holds a lock."""

    def __init__(self, spec: TensorSpec, gpu: bool = False, alignment: int = ALIGNMENT) -> None:
        """Compiled code reads what starts at a multiple of ``alignment`` bytes."""
        self.spec, self._gpu, self._alignment = spec, gpu, alignment
        self._fit, self._dtype = Fit(spec), array_type(spec.dtype)
        self._staged: tuple[np.ndarray, Any] | None = None

    def tensor(self, value: Any, stream: int = 0) -> Any:
        """``value`` as a tensor that compiled code may read during this call, on a GPU on ``stream``.

        What is contiguous and aligned is shared: a numpy array that is writable (DLPack asks for it), or whatever of
        another library has ``__dlpack__``. Any other is copied into a buffer that is kept. Raises :class:`InputError`.
        """
        if type(value) is not np.ndarray:
            tensor = None if isinstance(value, np.ndarray | np.generic) else _imported(
                value, self.spec, self._fit, stream=stream if self._gpu else None)
            if tensor is not None and is_on_gpu(tensor):
                if not tensor.is_contiguous():
                    raise InputError(f"input {self.spec.name} must be contiguous, in rows, where it is on a GPU, got "
                                     "other strides; make it so with .contiguous()")
                return tensor
            if tensor is not None:
                whole = self._is_readable(tensor) and 0 not in tensor.shape
                return tensor if whole else self._copied(_strided(tensor, self._dtype))
            value = _as_array(value, self.spec)
        if not self._fit.takes(value):
            raise _mismatch("input", self.spec, value.shape, value.dtype)
        flags = value.flags
        if flags.c_contiguous and flags.writeable and value.size:  # strides of no elements may be any
            tensor = tensor_of(value)
            if self._is_readable(tensor):
                return tensor
        return self._copied(value)

    def _is_readable(self, tensor: Any) -> bool:
        return tensor.is_contiguous() and not tensor.data_ptr() % self._alignment

    def _copied(self, array: np.ndarray) -> Any:
        if self._staged is None or self._staged[0].shape != array.shape:
            tensor = empty_tensor(array.shape, self.spec.dtype)
            self._staged = array_of(tensor), tensor
        np.copyto(self._staged[0], array)
        return self._staged[1]


class OutputSlot:
    """Memory of the caller's that a compiled model writes to: one of its outputs, or a state that it adds to, as
    ``kind`` says."""

    def __init__(self, spec: TensorSpec, kind: str = "output", gpu: bool = False) -> None:
        self.spec, self._kind, self._gpu = spec, kind, gpu
        self._fit = Fit(spec)

    def tensor(self, value: Any, stream: int = 0) -> Any:
        """``value`` as a tensor that compiled code may write to, on a GPU on ``stream``; raises :class:`InputError`
        where it may not."""
        spec = self.spec
        if isinstance(value, np.ndarray):
            if not self._fit.takes(value):
                raise _mismatch(self._kind, spec, value.shape, value.dtype)
            if not value.flags.writeable:
                raise InputError(f"{self._kind} {spec.name} must be writable, got an array that is read-only; "
                                 "give a copy")
            tensor = tensor_of(value) if value.flags.c_contiguous else None
        else:
            tensor = _imported(value, spec, self._fit, self._kind, stream if self._gpu else None)
            if tensor is None:
                raise InputError(f"{self._kind} {spec.name} must be an array or a tensor with __dlpack__, got "
                                 f"{type(value).__name__}; empty_outputs() makes what fits")
        if tensor is None or not tensor.is_contiguous():
            raise InputError(f"{self._kind} {spec.name} must be contiguous, in rows, got other strides; "
                             "empty_outputs() makes what fits")
        if tensor.data_ptr() % ALIGNMENT and not is_on_gpu(tensor):  # which is copied to
            raise InputError(f"{self._kind} {spec.name} must start at a multiple of {ALIGNMENT} bytes, got memory that "
                             f"starts {tensor.data_ptr() % ALIGNMENT} bytes after one; empty_outputs() makes what fits")
        return tensor


def check_apart(inputs: Sequence[tuple[TensorSpec, Any]], outputs: Sequence[tuple[TensorSpec, Any]]) -> None:
    """Raise :class:`InputError` where an output's memory is an input's or another output's: the code writes outputs
    before it has read all inputs."""
    used = [(tensor.data_ptr(), _bytes(spec, tensor), "input", spec) for spec, tensor in inputs]
    for spec, tensor in outputs:
        start, size = tensor.data_ptr(), _bytes(spec, tensor)
        for other_start, other_size, kind, other in used:
            if start < other_start + other_size and other_start < start + size:
                raise InputError(f"output {spec.name} must have memory of its own, got that of {kind} {other.name}; "
                                 "empty_outputs() makes what fits")
        used.append((start, size, "output", spec))


def _bytes(spec: TensorSpec, tensor: Any) -> int:
    return math.prod(tensor.shape) * spec.itemsize if spec.free else spec.nbytes


def _imported(value: Any, spec: TensorSpec, fit: Fit, kind: str = "input", stream: int | None = None) -> Any:
    """A tensor that shares the memory of a value of another library, checked; None where the value has no DLPack. One
    on a GPU is taken where there is a ``stream``, which its producer puts behind its own."""
    import tvm_ffi

    tensor = value
    if not isinstance(value, tvm_ffi.Tensor):
        if not hasattr(value, "__dlpack__"):
            return None
        if getattr(value, "requires_grad", False):
            raise InputError(f"{kind} {spec.name} must be a tensor that needs no gradient, since compiled code gives "
                             "none; pass tensor.detach()")
        try:
            tensor = tvm_ffi.from_dlpack(value if stream is None else _in_order_of_streams(value, stream))
        except Exception as error:  # a sparse tensor, one of a type that nobody else has, memory that is read-only
            if kind == "input" and hasattr(value, "__array__"):
                return None
            raise _not_here(kind, value, spec, str(error)) from error
    if tensor.device.dlpack_device_type() != CPU and not (
            stream is not None and is_on_gpu(tensor) and not tensor.device.index):
        raise _not_here(kind, value, spec, f"it is on {tensor.device}")
    try:
        dtype = tensor.dtype
    except ValueError:  # TVM knows no complex numbers
        dtype = value.dtype
    if dtype != spec.dtype or not fit.takes_shape(tuple(tensor.shape)):
        raise _mismatch(kind, spec, tuple(tensor.shape), dtype)
    return tensor


def _in_order_of_streams(value: Any, stream: int) -> Any:
    """Export a GPU tensor through DLPack, synchronising its producer's stream with ours."""
    where = getattr(value, "__dlpack_device__", None)
    return value.__dlpack__(stream=dlpack_number(stream)) if where is not None and where()[0] == CUDA else value


def _strided(tensor: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """The elements of a tensor of any strides; they are read before it goes."""
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    if 0 in shape:
        return np.empty(shape, dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(tensor.data_ptr())
    return np.ndarray(shape, dtype, memory, strides=[stride * dtype.itemsize for stride in strides])


def _as_array(value: Any, spec: TensorSpec) -> np.ndarray:
    try:
        return np.asarray(value)
    except Exception as error:  # a tensor on a GPU, a ragged list
        raise _not_here("input", value, spec, str(error)) from error


def _not_here(kind: str, value: Any, spec: TensorSpec, reason: str) -> InputError:
    lines = reason.strip().splitlines() or [type(value).__name__]
    return InputError(f"{kind} {spec.name} must be an array in this machine's memory, got {type(value).__name__} "
                      f"({lines[0]}); convert it to numpy")


def _mismatch(kind: str, spec: TensorSpec, shape: tuple[int, ...], dtype: Any) -> InputError:
    if str(dtype) != spec.dtype:
        name = "ml_dtypes.bfloat16" if spec.dtype == "bfloat16" else f"'{spec.dtype}'"
        remedy = f"convert it with .astype({name})" if kind == "input" else "empty_outputs() makes what fits"
        return InputError(f"{kind} {spec.name} must be {spec.dtype}, got {dtype}; {remedy}")
    if spec.free:
        return InputError(f"{kind} {spec.name} must have a shape in [{shape_text(spec.shape)}], got {list(shape)}; "
                          "compile the model again for a range that has it")
    same = math.prod(shape) == math.prod(spec.sized())
    remedy = "reshape it" if same else "compile the model again for this shape"
    return InputError(f"{kind} {spec.name} must have shape {list(spec.shape)}, got {list(shape)}; {remedy}")


def in_order(
    specs: Sequence[TensorSpec], arrays: Sequence[Any], named: Mapping[str, Any], kind: str = "input"
) -> list[Any]:
    """Positional arguments, then named ones, in the model's order; raises :class:`InputError` for a wrong set."""
    names, verb = [spec.name for spec in specs], "takes" if kind == "input" else "gives"
    unknown = [name for name in named if name not in names]
    if unknown:
        raise InputError(f"an {kind}'s name must be one of {_listed(names)}, got {_listed(unknown)}")
    if len(arrays) > len(specs):
        raise InputError(f"the model {verb} {len(specs)} {kind}s ({_listed(names)}), got {len(arrays)} arrays")
    twice = [name for name in names[: len(arrays)] if name in named]
    if twice:
        raise InputError(f"each {kind} must be given once, but {_listed(twice)} came by position and by name")
    missing = [name for name in names[len(arrays) :] if name not in named]
    if missing:
        raise InputError(f"every {kind} must be given, but {_listed(missing)} is missing; the model {verb} "
                         f"{'; '.join(map(str, specs))}")
    return [*arrays, *(named[name] for name in names[len(arrays) :])]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
