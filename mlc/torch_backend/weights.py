"""Parameters and buffers that are constants of an artifact, and the detection of changes to them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Weights", "is_weight"]

#: elements of a weight that are compared at each call
_SAMPLES = 8


def is_weight(arg: Any) -> bool:
    """Parameters, and the buffers of modules, which Dynamo marks as lying at a static address; but for those made in
    inference mode, which do not count the changes in place."""
    return isinstance(arg, torch.Tensor) and not arg.is_inference() and (
        isinstance(arg, torch.nn.Parameter) or hasattr(arg, "_dynamo_static_input_type"))


class Weights:
    """Tensors as they are now, by their places among a graph's arguments.

    PyTorch counts changes in place, but not those by fused optimizers, through ``tensor.data`` and through arrays that
    share its memory. The steps of optimizers are counted here; of the others, those are seen that change one of
    :data:`_SAMPLES` elements, or another of a tensor that has no more.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = {place: _Weight(tensor) for place, tensor in tensors.items()}
        self._sample = _Sample([address for weight in self._tensors.values() for address in weight.addresses])

    @property
    def places(self) -> Collection[int]:
        return self._tensors.keys()

    def are(self, args: Sequence[Any]) -> bool:
        """Whether they are what stands at their places, unchanged."""
        return all(weight.is_now(args[i]) for i, weight in self._tensors.items()) and self._sample.is_same()

    def are_unchanged(self) -> bool:
        """Whether all are still there, and as they were."""
        tensors = [(weight, weight.tensor()) for weight in self._tensors.values()]  # held until they are read
        return all(tensor is not None and weight.is_now(tensor) for weight, tensor in tensors
                   ) and self._sample.is_same()

    def changed(self, args: Sequence[Any]) -> list[int]:
        """The places where they stand, but have been written to."""
        return [i for i, weight in self._tensors.items()
                if args[i] is weight.tensor() and not (weight.is_now(args[i]) and weight.sample.is_same())]


class _Weight:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._version = weakref.ref(tensor), _version(tensor)
        self._counter = _steps.setdefault(tensor, [0])
        self._steps = self._counter[0]
        self.addresses = _addresses(tensor)
        self.sample = _Sample(self.addresses)

    def is_now(self, arg: Any) -> bool:
        """Whether the argument is this tensor, where it was, and no change of it was counted."""
        return arg is self.tensor() and self._counter[0] == self._steps and _version(arg) == self._version


class _Sample:
    """What lies at some addresses, one byte each: read at once, since calls of small models take a millisecond.

    Nothing is kept alive: whoever asks knows that what lay there still does."""

    def __init__(self, addresses: Sequence[int]) -> None:
        low, high = min(addresses, default=0), max(addresses, default=-1)
        memory: Any = (ctypes.c_ubyte * (high + 1 - low)).from_address(low) if addresses else b""
        self._memory = np.frombuffer(memory, np.uint8)  # no byte of which is read but at the addresses
        self._places = np.array(addresses, np.int64) - low
        self._bytes = self._memory[self._places]

    def is_same(self) -> bool:
        return bool((self._memory[self._places] == self._bytes).all())


_steps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # how often an optimizer has changed a tensor, in a list


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    """After a step of any optimizer; one that is compiled shows in the elements alone."""
    if torch.compiler.is_compiling():
        return
    for tensor in (each for group in optimizer.param_groups for each in group["params"]):
        counter = _steps.get(tensor)
        if counter is not None and tensor.grad is not None:
            counter[0] += 1


register_optimizer_step_post_hook(_count_step)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after each change in place that PyTorch counts, and after ``tensor.data = ...``."""
    return tensor._version, tensor.data_ptr()


def _addresses(tensor: torch.Tensor) -> list[int]:
    """The addresses of the bytes of some of the elements."""
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.data_ptr():
        return []
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    step = -(-span // _SAMPLES) | 1  # odd, lest all lie in the first column of a matrix
    size = tensor.element_size()
    return [tensor.data_ptr() + size * place + byte for place in range(0, span, step) for byte in range(size)]
