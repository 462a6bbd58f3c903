"""Float32 constants that are exactly representable in 16 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = ["exact_in", "is_narrow"]

#: elements that are looked at together; of most weights, the first ones tell
_PIECE = 1 << 16
#: elements of a constant below which nothing is gained
_SMALLEST = 1024


def exact_in(dtype: str, array: np.ndarray) -> bool:
    """Whether each of an array's float32 numbers is one of ``dtype``, ``float16`` or ``bfloat16``."""
    flat, kind = np.ascontiguousarray(array).reshape(-1), np.dtype(getattr(ml_dtypes, dtype, dtype))
    pieces = (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))
    with np.errstate(all="ignore"):
        return all(np.array_equal(piece.astype(kind).astype(np.float32), piece) for piece in pieces)


def is_narrow(array: np.ndarray) -> bool:
    """Whether a float32 weight is large, and of numbers that one type of 16 bits has."""
    large = array.dtype == np.float32 and array.size >= _SMALLEST
    return large and (exact_in("bfloat16", array) or exact_in("float16", array))
