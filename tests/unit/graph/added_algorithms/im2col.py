"""Convolution as one matrix product of all windows: an algorithm that the product does not have."""

from __future__ import annotations

import math

import numpy as np
from tvm import te, tirx

from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.algorithms.registry import Algorithm
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.kernels.blocked import pad_spatial


class Im2col(Algorithm):
    name, family, op = "im2col", "gemm", "conv2d_im2col"
    #: how many times as fast as the direct algorithm it is estimated to be
    faster = 2.0

    def applicable(self, conv: Convolution) -> bool:
        return conv.groups == 1 and conv.element == 4 and math.prod(conv.kernel) > 1

    def weight_shape(self, conv: Convolution) -> tuple[int, ...]:
        return conv.filters // conv.block_out, conv.channels * math.prod(conv.kernel), conv.block_out

    def pack(self, weight: np.ndarray, conv: Convolution) -> np.ndarray:
        return DIRECT.pack(weight, conv).reshape(self.weight_shape(conv))

    def kernel(self, data: te.Tensor, weight: te.Tensor, conv: Convolution) -> te.Tensor:
        (height, width), (kh, kw), (sh, sw), (dh, dw) = conv.out, conv.kernel, conv.strides, conv.dilation
        blocks, depth, lanes = self.weight_shape(conv)
        padded = pad_spatial(data, conv.pads)

        def window(n: tirx.Var, y: tirx.Var, x: tirx.Var, k: tirx.Var) -> tirx.Expr:
            lane, rest = k % conv.block_in, k // conv.block_in
            return padded[n, rest // (kh * kw), y * sh + rest // kw % kh * dh, x * sw + rest % kw * dw, lane]

        columns = te.compute((conv.n, height, width, depth), window, name="columns")
        k = te.reduce_axis((0, depth), name="k")
        return te.compute(
            (conv.n, blocks, height, width, lanes),
            lambda n, b, y, x, lane: te.sum(columns[n, y, x, k] * weight[b, k, lane], axis=k),
            name="im2col", attrs={"mlc.op": self.op},
        )

    def seconds(self, conv: Convolution, estimate: Estimate) -> float:
        return DIRECT.seconds(conv, estimate) / self.faster

    def error_bound(self, conv: Convolution) -> float:
        return DIRECT.error_bound(conv)


ALGORITHMS = (Im2col(),)
