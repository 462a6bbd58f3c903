"""Windows of arrays: all places that slide over an image, gathered for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from mlc.operators.index import integer
from mlc.operators.movement import padded

__all__ = ["gathered", "numbers"]

Shape = tuple[int, ...]


def numbers(value: Any) -> Any:
    """A tuple of sizes, which are numbers, as integers; a word as it is."""
    return value if isinstance(value, str) else tuple(map(integer, value))


@lru_cache(maxsize=1 << 14)
def _windows(extent: Shape, kernel: Shape, size: Shape, stride: Shape, padding: Any, dilation: Shape) -> Any:
    """Flat places ``[places of a window, windows]`` in a padded plane, its size, the padding before its elements;
    no places where windows are the elements themselves."""
    before, planes, axes = [], [], []
    for axis in (0, 1):
        reach = (kernel[axis] - 1) * dilation[axis] + 1
        span = (size[axis] - 1) * stride[axis] + reach
        explicit = 0 if isinstance(padding, str) else padding[axis]
        low = max(0, span - extent[axis]) // 2 if padding == "same" else explicit
        before.append(low)
        planes.append(max(span, low + extent[axis]))
        axes.append(np.arange(kernel[axis])[:, None] * dilation[axis] + np.arange(size[axis]) * stride[axis])
    flat = axes[0][:, None, :, None] * planes[1] + axes[1][None, :, None, :]
    plain = kernel == (1, 1) and size == extent == tuple(planes)
    return None if plain else flat.reshape(kernel[0] * kernel[1], size[0] * size[1]), tuple(planes), tuple(before)


def gathered(x: Any, kernel: Shape, shape: Shape, given: Mapping[str, Any], dilation: Shape, fill: Any) -> Any:
    """The elements under each window of ``x`` for a result of ``shape``, ``fill`` in the padding:
    ``[n, c, window, out rows * out columns]``."""
    places, planes, before = _windows(
        x.shape[2:], kernel, shape[2:], numbers(given["stride"]), numbers(given["padding"]), dilation
    )
    if planes != x.shape[2:]:
        x = padded(x, (0, 0, *before), (*x.shape[:2], *planes), fill)
    flat = x.reshape(*x.shape[:2], -1)
    return flat[:, :, None] if places is None else np.take(flat, places, axis=2)
