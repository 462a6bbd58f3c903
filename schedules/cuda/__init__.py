"""How tensor functions may be laid out on NVIDIA GPUs. Spaces are asked in this order; the last matches everything."""

from __future__ import annotations

from schedules.cuda.attention import Attention, ExactAttention, TensorFloatAttention, WarpgroupAttention
from schedules.cuda.columns import Columns
from schedules.cuda.conv import ImplicitGemm
from schedules.cuda.elementwise import Elementwise
from schedules.cuda.fallback import Fallback
from schedules.cuda.few_bits import FewBitsProduct
from schedules.cuda.few_bits_weights import FewBitsWeights
from schedules.cuda.gemm import TiledGemm
from schedules.cuda.mma import TensorCoreGemm
from schedules.cuda.reduction import Reduce, Rows
from schedules.cuda.wgmma import WarpgroupGemm
from schedules.space import Space

__all__ = ["SPACES"]

SPACES: tuple[Space, ...] = (
    WarpgroupAttention(), Attention(), TensorFloatAttention(), ExactAttention(), FewBitsProduct(), FewBitsWeights(),
    WarpgroupGemm(), TensorCoreGemm(), TiledGemm(), ImplicitGemm(), Rows(), Columns(), Reduce(), Elementwise(),
    Fallback(),
)
