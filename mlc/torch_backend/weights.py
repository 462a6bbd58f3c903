"""Parameters and buffers whose elements an artifact holds, and what tells that they have changed since."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Weight", "is_weight"]

#: elements of a weight that are compared at each call
_SAMPLES = 32


def is_weight(arg: Any) -> bool:
    """Parameters, and the buffers of modules, which Dynamo marks as lying at a static address; but for those made in
    inference mode, which do not count the changes in place."""
    return isinstance(arg, torch.Tensor) and not arg.is_inference() and (
        isinstance(arg, torch.nn.Parameter) or hasattr(arg, "_dynamo_static_input_type"))


class Weight:
    """A tensor as it is now.

    PyTorch counts changes in place, but not those by fused optimizers, through ``tensor.data`` and through arrays that
    share its memory. The steps of optimizers are counted here; of the others, those are seen that change one of
    :data:`_SAMPLES` elements, or another of a tensor that has no more.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), _version(tensor)
        self._counter = _steps.setdefault(tensor, [0])
        self._steps = self._counter[0]
        self._elements = _elements(tensor)
        self._sample = self._elements.tobytes()

    def is_of(self, arg: Any) -> bool:
        """Whether the argument is this tensor, changed or not."""
        return arg is self._tensor()

    def is_unchanged(self) -> bool:
        """Whether the tensor is still there, and as it was."""
        tensor = self._tensor()
        # the elements only where they still lie, which the version tells
        return (tensor is not None and self._counter[0] == self._steps and _version(tensor) == self._version
                and self._elements.tobytes() == self._sample)


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


def _elements(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Some of the elements, where they lie; reading them keeps nothing alive, so the tensor must be."""
    if not tensor.numel() or not tensor.data_ptr():
        return np.empty(0, np.uint8)
    size = tensor.element_size()
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (span * size)).from_address(tensor.data_ptr())
    step = -(-span // _SAMPLES) | 1  # odd, lest all lie in the first column of a matrix
    return np.frombuffer(memory, np.dtype((np.void, size)))[::step]
