"""Direct convolution: one register-tiled sum over channels and window, or over the window alone where each channel is
convolved by itself."""

from __future__ import annotations

import math

import numpy as np
from tvm import te

from mlc.graph.algorithms.registry import Algorithm
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import BLOCK
from mlc.graph.kernels.blocked import conv2d_nchwc, depthwise_nchwc

__all__ = ["ALGORITHMS", "DEPTHWISE", "DIRECT", "unpacked"]

#: part of the peak that products reach
_REACHED = 0.9
#: and those of each channel by itself, measured on five layers of MobileNetV2 and EfficientNet, on both vector widths
_REACHED_DEPTHWISE = 0.3
#: of float32 (half a unit in the last place, relative)
_ROUNDING = 2.0**-24


class _Direct(Algorithm):
    direct = True

    def weight_shape(self, conv: Convolution) -> tuple[int, ...]:
        inner = 1 if conv.depthwise else conv.block_in
        return (conv.filters // conv.block_out, conv.channels // conv.groups // inner, *conv.kernel, inner,
                conv.block_out)

    def pack(self, weight: np.ndarray, conv: Convolution) -> np.ndarray:
        """``[O/o, I/groups/i, KH, KW, i, o]``; each group fills whole blocks on both sides."""
        blocks, depth, kh, kw, inner, outer = self.weight_shape(conv)
        groups = 1 if conv.depthwise else conv.groups
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        missing = (blocks * outer // groups - grouped.shape[1], depth * inner - grouped.shape[2])
        padded = np.pad(grouped, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0), (0, 0)))
        return padded.reshape(blocks, outer, depth, inner, kh, kw).transpose(0, 2, 4, 5, 3, 1)

    def error_bound(self, conv: Convolution) -> float:
        depth = conv.channels // conv.groups * math.prod(conv.kernel)
        return 6.0 * _ROUNDING * depth**0.5


class _Dense(_Direct):
    """Of all channels, or those of a group; ``element`` 1 and 2 are priced alike, though their kernels are
    :func:`mlc.graph.kernels.integer.conv2d_nchwc_integer` and ``bfloat.conv2d_nchwc_bfloat``."""

    name, family, op = "conv2d", "direct", "conv2d_nchwc"

    def applicable(self, conv: Convolution) -> bool:
        return not conv.depthwise

    def kernel(self, data: te.Tensor, weight: te.Tensor, conv: Convolution) -> te.Tensor:
        return conv2d_nchwc(data, weight, conv.strides, conv.pads, conv.dilation, conv.groups)

    def seconds(self, conv: Convolution, estimate: Estimate) -> float:
        depth = conv.channels // conv.groups * math.prod(conv.kernel)
        products = conv.n * math.prod(conv.out) * conv.filters * depth
        rate = {1: estimate.machine.dot, 2: estimate.machine.bfloat}.get(conv.element, 1.0)
        element = 2.0 if conv.element == 1 and rate <= 2 else conv.element  # pairs of integers are of 16 bits
        weights = element * conv.filters * depth
        operations = 2.0 * products / rate / _REACHED * _loading(conv, estimate)
        return estimate.kernel(operations, weights, conv.image_bytes) / _filled(conv, estimate)


class _Depthwise(_Direct):
    name, family, op = "depthwise", "direct", "depthwise_nchwc"

    def applicable(self, conv: Convolution) -> bool:
        return conv.depthwise

    def kernel(self, data: te.Tensor, weight: te.Tensor, conv: Convolution) -> te.Tensor:
        return depthwise_nchwc(data, weight, conv.strides, conv.pads, conv.dilation)

    def seconds(self, conv: Convolution, estimate: Estimate) -> float:
        products = conv.n * math.prod(conv.out) * conv.filters * math.prod(conv.kernel)
        return estimate.kernel(2.0 * products / _REACHED_DEPTHWISE, 0.0, conv.image_bytes) / _filled(conv, estimate)


def unpacked(weight: np.ndarray) -> np.ndarray:
    """Inverse of what direct algorithms pack, with the lanes that pad: ``[O/o, I/i, KH, KW, i, o] -> [O, I, KH, KW]``.
    """
    ob, ib, kh, kw, i, o = weight.shape
    return weight.transpose(0, 5, 1, 4, 2, 3).reshape(ob * o, ib * i, kh, kw)


def _filled(conv: Convolution, estimate: Estimate) -> float:
    """The part of a vector that a block fills, in loads as in products."""
    return min(1.0, conv.block_out / estimate.machine.lanes(4))


def _loading(conv: Convolution, estimate: Estimate) -> float:
    """How many times as long a register tile takes as one of whole blocks, where its loads are what takes the time.

    A step of a tile loads the vectors of a block and a value for each pixel: one vector and twelve values for twelve
    multiply-adds, or two and six. Measured on AVX2, 512 -> 1000 channels of 13x13: 63 blocks of 16 take 0.83 of the
    time of 125 blocks of 8.
    """
    machine = estimate.machine

    def slots(block: int) -> float:
        vectors = max(1, block // machine.lanes(4))
        pixels = max(1, machine.vector_registers * 3 // 4 // vectors)
        return max(1.0, estimate.loads * (1 / vectors + 1 / pixels))

    return slots(conv.block_out) / slots(BLOCK) if conv.element == 4 else 1.0


DIRECT, DEPTHWISE = _Dense(), _Depthwise()
ALGORITHMS = (DIRECT, DEPTHWISE)
