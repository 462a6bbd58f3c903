"""What a convolution costs by arithmetic alone: the prices of the graph where nobody has measured.

Rates are those of :mod:`cost_model.machine`; only ratios between alternatives matter here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm

from cost_model.machine import machine

__all__ = ["Convolution", "Estimate"]

#: part of the peak that the direct kernel's products reach, and the products of Winograd's points
_DIRECT, _POINTS = 0.9, 0.8
#: part of the peak that convolutions of plain images reach at whole vectors, and of that with strides or groups
_PLAIN, _SCATTERED = 0.5, 0.3
#: part of the peak that depthwise convolutions reach in blocks, on plain images, and there with strides. Measured on
#: five layers of MobileNetV2 and EfficientNet, on both vector widths: plain images take 1.1 to 2.1 times as long as
#: blocks, 4.2 to 5.3 times with strides
_DEPTHWISE, _DEPTHWISE_PLAIN, _DEPTHWISE_SCATTERED = 0.3, 0.25, 0.04
#: part of the memory's bandwidth that kernels reach with weights
_STREAMED = 0.6
#: bytes that a copy moves for each byte that comes from main memory; images are mostly in a cache
_COPIES = 1.0
#: additions of Winograd's transforms for each point of a tile and channel, of the input and of the output
_TRANSFORMS = {2: (2.0, 1.5), 4: (4.0, 2.8)}
#: part of the peak that the transforms reach: no multiply-adds, and every value is loaded and stored
_ADDITIONS = 0.1


@dataclass(frozen=True)
class Convolution:
    """A convolution ``[n, channels, *size] -> [n, filters, ...]`` in blocks of ``block_in`` and ``block_out`` channels.

    ``pads`` is ``(top, left, bottom, right)``; channels that only fill a block are counted. ``element`` are the bytes
    of an activation: 1 where 8-bit integers are multiplied, which only the direct kernel does.
    """

    n: int
    channels: int
    filters: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    block_in: int
    block_out: int
    element: int = 4

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        (h, w), (kh, kw), (sh, sw), (dh, dw) = self.size, self.kernel, self.strides, self.dilation
        top, left, bottom, right = self.pads
        return (h + top + bottom - (kh - 1) * dh - 1) // sh + 1, (w + left + right - (kw - 1) * dw - 1) // sw + 1

    @property
    def image_bytes(self) -> float:
        """What is read and written, weights left out."""
        values = self.channels * math.prod(self.size) + self.filters * math.prod(self.out)
        return float(self.element * self.n * values)


class Estimate:
    """Seconds of kernels on a target. ``weights`` are the bytes of all the model's: what does not stay in the last
    cache from one run to the next is read from memory each time.
    """

    def __init__(self, target: tvm.target.Target, weights: float) -> None:
        self._on = machine(target)
        near, last = self._on.levels[-2:]
        self._cached, self._last = self._on.cores * near.refill, last.size
        self._weights = _STREAMED * self._on.bandwidth if weights > last.size / 2 else self._cached

    def direct(self, conv: Convolution) -> float:
        """The direct kernel."""
        depth = conv.channels // conv.groups * math.prod(conv.kernel)
        products = conv.n * math.prod(conv.out) * conv.filters * depth
        part = min(1.0, conv.block_out / self._on.lanes(4))  # of a vector that a block fills, in loads as in products
        rate = self._on.dot if conv.element == 1 else 1.0
        weights = (4.0 if conv.element > 1 else 1.0 if rate > 2 else 2.0) * conv.filters * depth  # pairs are of 16 bits
        return self._seconds(2.0 * products / rate / _DIRECT, weights, conv.image_bytes) / part

    def plain(self, conv: Convolution) -> float:
        """A convolution of plain images, whose vectors lie along a row."""
        depth = conv.channels // conv.groups * math.prod(conv.kernel)
        products = conv.n * math.prod(conv.out) * conv.filters * depth
        lanes, width = self._on.lanes(4), conv.out[1]
        if conv.groups == conv.channels == conv.filters:
            reached = _DEPTHWISE_SCATTERED if conv.strides[1] > 1 else _DEPTHWISE_PLAIN
        else:
            reached = _PLAIN * (_SCATTERED if conv.groups > 1 or conv.strides[1] > 1 else 1.0)
        reached *= width / (-(-width // lanes) * lanes)
        return self._seconds(2.0 * products / reached, 4.0 * conv.filters * depth, conv.image_bytes)

    def depthwise(self, conv: Convolution) -> float:
        """A convolution of each channel by itself, in blocks."""
        products = conv.n * math.prod(conv.out) * conv.filters * math.prod(conv.kernel)
        part = min(1.0, conv.block_out / self._on.lanes(4))
        return self._seconds(2.0 * products / _DEPTHWISE, 0.0, conv.image_bytes) / part

    def copy(self, touched: float) -> float:
        """A kernel that moves elements: ``touched`` bytes are read or written."""
        return touched / (_COPIES * self._on.bandwidth) + self._on.launch_seconds

    def winograd(self, conv: Convolution, m: int) -> float:
        """The kernel ``F(m x m, 3 x 3)``."""
        points = (m + 2) ** 2
        vectors = conv.n * math.prod(-(-extent // m) for extent in conv.out) * points
        inner, outer = _TRANSFORMS[m]
        additions = vectors * (conv.channels * inner + conv.filters * outer)
        products = vectors * conv.channels * conv.filters
        operations = 2.0 * products / _POINTS + additions / _ADDITIONS
        return self._seconds(operations, 4.0 * points * conv.filters * conv.channels, conv.image_bytes)

    def _seconds(self, operations: float, weights: float, images: float) -> float:
        """``operations`` are scaled to the peak; images that fit the last cache were written there just before."""
        memory = weights / self._weights + images / (self._on.bandwidth if images > self._last / 2 else self._cached)
        return max(operations / self._on.flops, memory) + self._on.launch_seconds
