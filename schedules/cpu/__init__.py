"""The CPU spaces, most specific first; the last one matches everything."""

from __future__ import annotations

from schedules.cpu.attention import ATTENTION
from schedules.cpu.attention_few import ATTENTION_FEW
from schedules.cpu.contraction import CONTRACTION
from schedules.cpu.conv import CONV2D, CONV2D_BFLOAT, CONV2D_BYTES, CONV2D_INTEGER, DEPTHWISE_INTEGER
from schedules.cpu.depthwise import DEPTHWISE
from schedules.cpu.elementwise import ELEMENTWISE
from schedules.cpu.fallback import FALLBACK
from schedules.cpu.gemm import GEMM, GEMM_BFLOAT, GEMM_BYTES, GEMM_INTEGER
from schedules.cpu.gemm_digits import GEMM_DIGITS
from schedules.cpu.gemm_lookup import GEMM_LOOKUP
from schedules.cpu.gemm_matrix import GEMM_MATRIX
from schedules.cpu.gemm_rounded import GEMM_ROUNDED
from schedules.cpu.gemm_tiles import GEMM_TILES
from schedules.cpu.gemm_weight_only import GEMM_WEIGHT_ONLY
from schedules.cpu.pooling import POOLING
from schedules.cpu.recurrent import RECURRENT
from schedules.cpu.reduction import REDUCTION
from schedules.cpu.remainder import REMAINDER
from schedules.cpu.winograd import WINOGRAD, WINOGRAD_INTEGER
from schedules.space import Space

__all__ = ["SPACES"]

SPACES: tuple[Space, ...] = (
    ATTENTION_FEW, ATTENTION, RECURRENT, REMAINDER, CONV2D, CONV2D_INTEGER, CONV2D_BYTES, CONV2D_BFLOAT,
    DEPTHWISE_INTEGER, WINOGRAD, WINOGRAD_INTEGER, GEMM_WEIGHT_ONLY, GEMM_LOOKUP, GEMM_ROUNDED, GEMM_DIGITS, GEMM,
    GEMM_TILES, GEMM_MATRIX, GEMM_INTEGER, GEMM_BYTES, GEMM_BFLOAT, DEPTHWISE, POOLING, CONTRACTION, REDUCTION,
    ELEMENTWISE, FALLBACK,
)
