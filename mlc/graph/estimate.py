"""What a convolution costs by arithmetic alone: the prices of the graph where nobody has measured.

Rates are those of :mod:`cost_model.machine`; only ratios between alternatives matter here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm

from cost_model.machine import Machine, machine

__all__ = ["Convolution", "direct_seconds", "winograd_seconds"]

#: part of the peak that register-tiled products reach
_PRODUCTS = 0.8
#: additions of Winograd's transforms for each point of a tile and channel, of the input and of the output
_TRANSFORMS = {2: (2.0, 1.5), 4: (4.0, 2.8)}
#: part of the peak that the transforms reach: no multiply-adds, and every value is loaded and stored
_ADDITIONS = 0.1


@dataclass(frozen=True)
class Convolution:
    """A convolution ``[n, channels, *size] -> [n, filters, ...]`` in blocks of ``block_in`` and ``block_out`` channels.

    ``pads`` is ``(top, left, bottom, right)``; channels that only fill a block are counted.
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

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        (h, w), (kh, kw), (sh, sw), (dh, dw) = self.size, self.kernel, self.strides, self.dilation
        top, left, bottom, right = self.pads
        return (h + top + bottom - (kh - 1) * dh - 1) // sh + 1, (w + left + right - (kw - 1) * dw - 1) // sw + 1

    @property
    def image_bytes(self) -> float:
        """What is read and written, weights left out."""
        return 4.0 * self.n * (self.channels * math.prod(self.size) + self.filters * math.prod(self.out))


def direct_seconds(conv: Convolution, target: tvm.target.Target) -> float:
    """Seconds of the direct kernel."""
    on = machine(target)
    products = conv.n * conv.filters * math.prod(conv.out) * conv.channels // conv.groups * math.prod(conv.kernel)
    weights = 4.0 * conv.filters * conv.channels // conv.groups * math.prod(conv.kernel)
    return _seconds(on, products, 0.0, conv.image_bytes + weights)


def winograd_seconds(conv: Convolution, m: int, target: tvm.target.Target) -> float:
    """Seconds of the kernel ``F(m x m, 3 x 3)``."""
    on = machine(target)
    tiles = conv.n * math.prod(-(-extent // m) for extent in conv.out)
    points = (m + 2) ** 2
    inner, outer = _TRANSFORMS[m]
    additions = tiles * points * (conv.channels * inner + conv.filters * outer)
    weights = 4.0 * points * conv.filters * conv.channels
    return _seconds(on, tiles * points * conv.channels * conv.filters, additions, conv.image_bytes + weights)


def _seconds(on: Machine, products: float, additions: float, touched: float) -> float:
    compute = 2.0 * products / (_PRODUCTS * on.flops) + additions / (_ADDITIONS * on.flops)
    return max(compute, touched / on.bandwidth) + on.launch_seconds
