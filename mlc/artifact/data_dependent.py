"""Outputs of data-dependent length: compiled code returns them at their maximum length beside the actual length.

Behind the last one stands anything; a caller sees what is before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlc.frontend.model import TensorSpec
from mlc.shapes import Free, Range

__all__ = ["truncated", "visible_outputs"]


def visible_outputs(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The outputs as a caller sees them: without the counts, and with free sizes for data-dependent lengths."""
    counts = {spec.length[1] for spec in specs if spec.length is not None}
    return tuple(_open(spec) for spec in specs if spec.name not in counts)


def _open(spec: TensorSpec) -> TensorSpec:
    if spec.length is None:
        return spec
    axis, count = spec.length
    most = spec.shape[axis]
    high = most.range.high if isinstance(most, Free) else most
    size = Free(count, Range(0, high), most.usual if isinstance(most, Free) else most)
    return replace(spec, shape=(*spec.shape[:axis], size, *spec.shape[axis + 1:]))


def truncated(arrays: Sequence[np.ndarray], specs: Sequence[TensorSpec]) -> list[np.ndarray]:
    """The arrays that a caller sees, each as long as the one that counts says; raises ``ValueError`` where that is
    longer than the array."""
    by_name = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
    counts = {spec.length[1] for spec in specs if spec.length is not None}
    found = []
    for spec, array in zip(specs, arrays, strict=True):
        if spec.length is not None:
            axis, count = spec.length
            number = int(by_name[count][0])
            if not 0 <= number <= array.shape[axis]:
                raise ValueError(f"{count} must be 0 to {array.shape[axis]}, got {number}")
            array = np.ascontiguousarray(array[(slice(None),) * axis + (slice(0, number),)])
        if spec.name not in counts:
            found.append(array)
    return found
