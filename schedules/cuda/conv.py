"""Convolutions as implicit matrix products over the plain NCHW layout.

The im2col matrix is never built: a tile of it is gathered from the image, padding included, straight into shared
memory. Grouped convolutions are a batch of such products, one for each group. Convolutions with only a few channels in
a group (depthwise above all) have nothing to tile and are left to ``cuda.reduce``.
"""

from __future__ import annotations

from schedules.cuda.contraction import Contraction, K, M, N
from schedules.cuda.gemm import TiledContraction

__all__ = ["ImplicitGemm"]

_LEAST_CHANNELS = 8


class ImplicitGemm(TiledContraction):
    """Convolutions with at least eight output channels in a group; any stride, dilation, padding, dimension."""

    name = "cuda.conv"

    def accepts(self, contraction: Contraction) -> bool:
        if not contraction.windowed and contraction.group is None:
            return False
        return contraction.size(M) >= _LEAST_CHANNELS and contraction.size(N) >= 4 and contraction.size(K) >= 4
