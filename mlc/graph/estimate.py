"""Analytic cost estimates of kernels: the prices that graph passes use where nothing was measured.

Rates are those of :mod:`cost_model.machine`; only ratios between alternatives matter here. What a convolution in blocks
costs is its algorithm's to say (:mod:`mlc.graph.algorithms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm

from cost_model.machine import machine
from mlc.graph.kernels.blocked import windows
from schedules.intrin import select
from schedules.intrin.dot import WORDS, dot, dot_form
from schedules.machine import cpu_machine

__all__ = ["Convolution", "Estimate"]

#: part of the peak that convolutions of plain images reach at whole vectors, and of that with strides or groups
_PLAIN, _SCATTERED = 0.5, 0.3
#: part of the peak that depthwise convolutions reach on plain images, and there with strides. Measured on five layers
#: of MobileNetV2 and EfficientNet, on both vector widths: plain images take 1.1 to 2.1 times as long as blocks, 4.2 to
#: 5.3 times with strides
_DEPTHWISE_PLAIN, _DEPTHWISE_SCATTERED = 0.25, 0.04
#: part of the memory's bandwidth that kernels reach with weights
_STREAMED = 0.6
#: bytes that a copy moves for each byte that comes from main memory; images are mostly in a cache
_COPIES = 1.0


@dataclass(frozen=True)
class Convolution:
    """A convolution ``[n, channels, *size] -> [n, filters, ...]`` in blocks of ``block_in`` and ``block_out`` channels.

    ``pads`` is ``(top, left, bottom, right)``; channels that only fill a block are counted, among the groups too where
    each channel is one. ``element`` are the bytes of an activation: 1 where 8-bit integers are multiplied, 2 where
    bfloat16 is.
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
    def fixed(self) -> bool:
        """Whether no call decides the height and the width of images."""
        return all(isinstance(size, int) for size in self.size)

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups == self.channels == self.filters > 1

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        (h, w), (kh, kw), (sh, sw), (dh, dw) = self.size, self.kernel, self.strides, self.dilation
        top, left, bottom, right = self.pads
        return windows(h + top + bottom, kh, sh, dh), windows(w + left + right, kw, sw, dw)

    @property
    def image_bytes(self) -> float:
        """The bytes read and written, without weights."""
        values = self.channels * math.prod(self.size) + self.filters * math.prod(self.out)
        return float(self.element * self.n * values)


class Estimate:
    """Seconds of kernels on a target. ``weights`` are the bytes of all the model's: what does not stay in the last
    cache from one run to the next is read from memory each time.
    """

    def __init__(self, target: tvm.target.Target, weights: float) -> None:
        self.machine = machine(target)
        #: multiply-adds of whole vectors that a core begins in the time of a load
        self.loads = 1.0
        if target.kind.name == "llvm":
            cpu = cpu_machine(target)
            self.loads = cpu.fma_per_cycle / cpu.loads_per_cycle
        near, last = self.machine.levels[-2:]
        #: whether products of 8-bit integers are those of 16-bit ones, by an instruction for them
        self.words = dot_form(target) == WORDS and any(select(dot(WORDS, lanes), target) for lanes in (4, 8, 16))
        self._cached, self._last = self.machine.cores * near.refill, last.size
        self._weights = _STREAMED * self.machine.bandwidth if weights > last.size / 2 else self._cached

    def plain(self, conv: Convolution) -> float:
        """A convolution of plain images, whose vectors lie along a row."""
        depth = conv.channels // conv.groups * math.prod(conv.kernel)
        products = conv.n * math.prod(conv.out) * conv.filters * depth
        lanes, width = self.machine.lanes(4), conv.out[1]
        if conv.groups == conv.channels == conv.filters:
            reached = _DEPTHWISE_SCATTERED if conv.strides[1] > 1 else _DEPTHWISE_PLAIN
        else:
            reached = _PLAIN * (_SCATTERED if conv.groups > 1 or conv.strides[1] > 1 else 1.0)
        reached *= width / (-(-width // lanes) * lanes)
        return self.kernel(2.0 * products / reached, 4.0 * conv.filters * depth, conv.image_bytes)

    def copy(self, touched: float) -> float:
        """A kernel that moves elements: ``touched`` bytes are read or written."""
        return touched / (_COPIES * self.machine.bandwidth) + self.machine.launch_seconds

    def kernel(self, operations: float, weights: float, images: float) -> float:
        """A kernel of so many ``operations``, scaled to the peak, that reads ``weights`` and reads or writes ``images``
        bytes; images that fit the last cache were written there just before."""
        rate = self.machine.bandwidth if images > self._last / 2 else self._cached
        memory = weights / self._weights + images / rate
        return max(operations / self.machine.flops, memory) + self.machine.launch_seconds
