"""How the channels of an activation are divided into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx

__all__ = ["BLOCK", "ChannelBlocks", "block_diagonal", "merged_groups"]

#: channels of one block: one AVX-512 or two AVX2 vectors of float32
BLOCK = 16


@dataclass(frozen=True)
class ChannelBlocks:
    """How ``channels`` are cut: each of ``groups`` equal groups fills whole blocks of ``size`` channels, the last
    padded with zeros."""

    channels: int
    groups: int = 1
    size: int = BLOCK

    @property
    def per_group(self) -> int:
        """Blocks that one group fills."""
        return -(-(self.channels // self.groups) // self.size)

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.groups * self.per_group

    @property
    def lanes(self) -> int:
        """Channels in all, those that only pad counted."""
        return self.blocks * self.size

    @property
    def padded(self) -> bool:
        """Whether some lanes are padding."""
        return self.lanes != self.channels

    def canonical(self) -> ChannelBlocks:
        """Groups that fill their blocks need no mention."""
        return self if self.padded else ChannelBlocks(self.channels, size=self.size)

    def place(self, part: tirx.Expr, index: tirx.Expr, size: int) -> tuple[tirx.Expr, tirx.Expr]:
        """Block and lane of channel ``part * size + index``, for ``index < size``."""
        each = self.channels // self.groups
        if each != size:  # else the parts are the groups
            channel = part * size + index
            part, index = tirx.floordiv(channel, each), tirx.floormod(channel, each)
        return part * self.per_group + tirx.floordiv(index, self.size), tirx.floormod(index, self.size)

    def cut(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Replace ``axis`` of length ``channels`` by two axes ``[blocks, size]``."""
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        each = self.channels // self.groups
        array = array.reshape(*before, self.groups, each, *after)
        widths = [(0, 0)] * array.ndim
        widths[axis + 1] = (0, self.per_group * self.size - each)
        return np.pad(array, widths).reshape(*before, self.blocks, self.size, *after)


def merged_groups(groups: int, inner: ChannelBlocks, out: ChannelBlocks) -> int:
    """How many of a convolution's groups together fill whole blocks of its inputs and outputs; 0 where none do."""
    each, made = inner.channels // groups, out.channels // groups
    ways = [m for m in range(1, groups + 1) if groups % m == m * each % inner.size == m * made % out.size == 0]
    return ways[0] if ways else 0


def block_diagonal(weight: np.ndarray, groups: int, merged: int) -> np.ndarray:
    """``[O, I/groups, ...] -> [O, I/groups * merged, ...]``: the kernel that convolves ``merged`` groups as one.

    It is zero where an output meets the channels of another group.
    """
    filters, each, *kernel = weight.shape
    parts = weight.reshape(groups // merged, merged, filters // groups, each, *kernel)
    whole = np.zeros((*parts.shape[:3], merged, each, *kernel), weight.dtype)
    for part in range(merged):
        whole[:, part, :, part] = parts[:, part]
    return whole.reshape(filters, merged * each, *kernel)
