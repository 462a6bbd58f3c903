"""Arrays that a caller gives, checked and handed to compiled code without a copy wherever that can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlc.artifact.runtime import ALIGNMENT, array_of, empty_tensor, tensor_of
from mlc.errors import InputError
from mlc.frontend.model import TensorSpec, array_type
from mlc.shapes import Free, Range, shape_text

__all__ = ["Fit", "InputSlot", "check_sizes", "in_order"]


class Fit:
    """Whether an array is what a specification says, for many calls."""

    def __init__(self, spec: TensorSpec) -> None:
        self._shape, self._dtype = spec.shape, array_type(spec.dtype)
        self._ranges = spec.free and tuple(s.range if isinstance(s, Free) else Range.of(s) for s in spec.shape)

    def takes(self, array: np.ndarray) -> bool:
        if self._ranges is False or array.dtype != self._dtype:
            return array.shape == self._shape and array.dtype == self._dtype
        return len(array.shape) == len(self._ranges) and all(
            size in each for size, each in zip(array.shape, self._ranges, strict=True))


def check_sizes(specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise :class:`InputError` where inputs differ in what is one free size."""
    known: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(specs, shapes, strict=True):
        for free, size in zip(spec.shape, shape, strict=True):
            if isinstance(free, Free) and known.setdefault(free.name, (size, spec.name))[0] != size:
                other, first = known[free.name]
                raise InputError(f"inputs must agree on {free.name}, but it is {other} in {first} and {size} in "
                                 f"{spec.name}; give arrays of one size")


class InputSlot:
    """One input of a compiled model. Not safe for several threads: its owner holds a lock."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self._fit = Fit(spec)
        self._staged: tuple[np.ndarray, Any] | None = None

    def tensor(self, value: Any) -> Any:
        """``value`` as a tensor that compiled code may read during this call.

        An array that is contiguous, writable (DLPack asks for it) and aligned is shared; any other is copied into a
        buffer that is kept. Raises :class:`InputError`.
        """
        array = value if type(value) is np.ndarray else _as_array(value, self.spec)
        if not self._fit.takes(array):
            raise _mismatch(self.spec, array)
        flags = array.flags
        if flags.c_contiguous and flags.writeable and not array.ctypes.data % ALIGNMENT:
            return tensor_of(array)
        if self._staged is None or self._staged[0].shape != array.shape:
            tensor = empty_tensor(array.shape, self.spec.dtype)
            self._staged = array_of(tensor), tensor
        np.copyto(self._staged[0], array)
        return self._staged[1]


def _as_array(value: Any, spec: TensorSpec) -> np.ndarray:
    try:
        return np.asarray(value)
    except Exception as error:  # a tensor on a GPU, one that needs a gradient, a ragged list
        raise InputError(f"input {spec.name} must be an array in this machine's memory, got {type(value).__name__} "
                         f"({str(error).splitlines()[0]}); convert it to numpy") from error


def _mismatch(spec: TensorSpec, array: np.ndarray) -> InputError:
    if array.dtype != array_type(spec.dtype):
        name = "ml_dtypes.bfloat16" if spec.dtype == "bfloat16" else f"'{spec.dtype}'"
        return InputError(f"input {spec.name} must be {spec.dtype}, got {array.dtype}; convert it with .astype({name})")
    got = list(array.shape)
    if spec.free:
        return InputError(f"input {spec.name} must have a shape in [{shape_text(spec.shape)}], got {got}; compile the "
                          "model again for a range that has it")
    want = list(spec.shape)
    remedy = "reshape it" if array.size == int(np.prod(spec.sized())) else "compile the model again for this shape"
    return InputError(f"input {spec.name} must have shape {want}, got {got}; {remedy}")


def in_order(specs: Sequence[TensorSpec], arrays: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Positional arguments, then named ones, in the model's order; raises :class:`InputError` for a wrong set."""
    names = [spec.name for spec in specs]
    unknown = [name for name in named if name not in names]
    if unknown:
        raise InputError(f"an input's name must be one of {_listed(names)}, got {_listed(unknown)}")
    if len(arrays) > len(specs):
        raise InputError(f"the model takes {len(specs)} inputs ({_listed(names)}), got {len(arrays)} arrays")
    twice = [name for name in names[: len(arrays)] if name in named]
    if twice:
        raise InputError(f"each input must be given once, but {_listed(twice)} came by position and by name")
    missing = [name for name in names[len(arrays) :] if name not in named]
    if missing:
        raise InputError(f"every input must be given, but {_listed(missing)} is missing; the model takes "
                         f"{'; '.join(map(str, specs))}")
    return [*arrays, *(named[name] for name in names[len(arrays) :])]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
