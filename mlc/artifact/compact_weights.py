"""Lossless storage of float32 weights in 16 bits: half the bytes in the file, float32 when loaded.

A float16 or bfloat16 model is computed in float32 (:mod:`mlc.graph.precision.widened`), so its float32 weights are
exactly representable in 16 bits unless something was folded into them. Whether that is so is decided by a weight's
values, not by what the model declares, and loading restores every bit. Filters of an algorithm that transforms them
(Winograd) are stored untransformed (:func:`transformed`), which also saves up to three quarters of the elements.

Restored weights share one allocation (:func:`buffers`), as do weights that are stored the way they are used. The
kernel backs only large allocations with huge pages: with one allocation per weight, in pages of 4 KiB, kernels that
read cold weights took 3% to 12% longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mlc.artifact.runtime import ALIGNMENT
from mlc.graph.algorithms.filters import FILTER, TRANSFORMED, transform_weight

__all__ = ["NARROW", "buffer", "buffers", "narrowed", "stored_type", "transformed", "transformed_bytes", "widened"]

#: types that float32 weights may be stored as
NARROW = ("bfloat16", "float16")
#: bytes of a weight below which nothing is gained
_SMALLEST = 1 << 12
#: elements that are looked at together; of most models, the first ones tell that a weight is no such
_PIECE = 1 << 16


def stored_type(dtype: str, data: np.ndarray) -> str:
    """The type that a weight's bytes, elements of ``dtype``, may be stored as: ``dtype`` or one of :data:`NARROW`."""
    if dtype != "float32" or data.nbytes < _SMALLEST:
        return dtype
    return next((kind for kind in NARROW if _holds(kind, data.view(np.float32))), dtype)


def _holds(kind: str, values: np.ndarray) -> bool:
    """Whether every value, signed zeros, infinities and payloads of NaN included, is one of ``kind``."""
    pieces = (values[i : i + _PIECE] for i in range(0, values.size, _PIECE))
    return all(np.array_equal(_widened(_narrowed(piece, kind), kind), piece.view(np.uint32)) for piece in pieces)


def _narrowed(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits of 16-bit floats, which are exact where the values are among them."""
    if kind == "bfloat16":  # the upper half of a float32
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bits of the float32 numbers."""
    if kind == "bfloat16":
        return np.left_shift(bits, 16, dtype=np.uint32)
    return bits.view(np.float16).astype(np.float32).view(np.uint32)


def narrowed(data: np.ndarray, kind: str) -> np.ndarray:
    """The bytes to store for float32 weights of which :func:`stored_type` has said ``kind``."""
    return _narrowed(data.view(np.float32), kind).view(np.uint8)


def widened(data: np.ndarray, kind: str, result: np.ndarray) -> np.ndarray:
    """``result``, twice the bytes of ``data``, with the bytes of float32 weights that were stored as ``kind``."""
    bits = data.view(np.uint16)
    if kind == "bfloat16":
        np.left_shift(bits, 16, out=result.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(result.view(np.float32), bits.view(np.float16))
    return result


def transformed_bytes(shape: Sequence[int], algorithm: str) -> int:
    """The bytes that ``algorithm`` reads of float32 filters ``[O, I, 3, 3]`` with whole blocks of channels."""
    return 4 * math.prod(shape) // FILTER**2 * (TRANSFORMED[algorithm] + FILTER - 1) ** 2


def transformed(filters: np.ndarray, algorithm: str, result: np.ndarray) -> tuple[int, ...]:
    """Fill ``result``, of :func:`transformed_bytes`, with what ``algorithm`` reads of float32 filters ``[O, I, 3, 3]``;
    the shape of that."""
    return transform_weight(filters, TRANSFORMED[algorithm], result.view(np.float32)).shape


def buffer(size: int) -> np.ndarray:
    """Memory for so many bytes, aligned as compiled code wants it."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def buffers(sizes: Sequence[int]) -> list[np.ndarray]:
    """Memory for so many bytes each, aligned as compiled code wants it, one after the other in one piece."""
    *starts, end = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    memory = buffer(end)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
