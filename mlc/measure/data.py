"""Random inputs for candidates, and the comparison of their outputs with the reference. Needs only numpy."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["STYLES", "Param", "draws", "mismatch", "poison", "random_arrays"]

#: how floats are drawn: ``normal`` first; ``positive`` for functions with logarithms, roots and quotients
STYLES = ("normal", "positive")
_SEED = 20_240_229
_HALF_BITS_TOLERANCE = 16  # units of the last place that a sum in a 16-bit type may be off, relative to the largest
_SMALL = 8  # bound of integers that mean nothing in particular
_ORDINARY = 1e3  # times the median magnitude: larger values (masks, say) must not widen the others' tolerance


@dataclass(frozen=True)
class Param:
    """A buffer parameter; ``output`` when the function writes it.

    ``limits`` bounds integers that the function indexes with: one bound for all, or one for each place of the last
    axis, as where coordinates lie side by side. Empty where it does not.
    """

    shape: tuple[int, ...]
    dtype: str
    output: bool
    limits: tuple[int, ...] = ()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's type for TVM's name of it, through ml_dtypes for the small floats."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def random_arrays(params: Sequence[Param], style: str) -> list[np.ndarray]:
    """One array for each parameter, the same in every process: random inputs, poisonless zeros for outputs.

    Floats are standard normal, or uniform in [0.1, 1.1] in the style ``positive``. Bytes are any, and so are those of
    16 bits that weights are widened to, and the bits of uint32, words of several weights. Other integers are small and
    never negative; where the function indexes with them, they are valid indices.
    """
    arrays = []
    for position, param in enumerate(params):
        dtype = numpy_dtype(param.dtype)
        rng = np.random.Generator(np.random.SFC64([_SEED, position]))
        if param.output:
            arrays.append(np.zeros(param.shape, dtype))
        elif dtype.kind == "b":
            arrays.append(rng.random(param.shape) < 0.5)
        elif dtype.kind in "iu":
            low, high = (0, np.array(param.limits)) if param.limits else _values(dtype)
            arrays.append(rng.integers(low, high, param.shape).astype(dtype))
        else:
            floats = _floats(rng, param.shape, style, np.float64 if dtype == np.float64 else np.float32)
            arrays.append(floats.astype(dtype, copy=False))
    return arrays


def draws() -> int:
    """Equal in processes whose numpy draws the same, which its versions do not promise; differences in the last places
    of floats, as between architectures, do not matter."""
    params = [Param((64,), "float32", False), Param((64,), "int8", False), Param((64,), "int32", False, (1000,)),
              Param((64,), "bool", False)]
    arrays = [array for style in STYLES for array in random_arrays(params, style)]
    return zlib.crc32(b"".join(np.rint(array.astype("float64") * 100).astype("<i8").tobytes() for array in arrays))


def _values(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least of the integers to draw, and one more than the largest."""
    if dtype == np.uint32:
        return 0, 1 << 32
    if dtype.itemsize > 2:
        return 0, _SMALL
    signed = dtype.kind == "i"
    return (-128, 128) if signed else (0, 256)


def poison(reference: np.ndarray) -> np.ndarray:
    """An array that differs from ``reference`` everywhere: an output that is never written cannot pass for it."""
    if reference.dtype.kind == "b":
        return ~reference
    if reference.dtype.kind in "iu":
        return reference ^ reference.dtype.type(1)
    return np.full(reference.shape, np.nan, reference.dtype)


def mismatch(output: np.ndarray, reference: np.ndarray, rtol: float) -> str:
    """Empty where ``output`` is as good as ``reference``, else what is wrong with it.

    Floats may differ by ``rtol`` times the larger of their own magnitude and the largest ordinary magnitude of the
    reference; infinities must agree, and NaN never passes. Everything else must be equal. Types of 16 bits and
    less get the tolerance that their own precision needs.
    """
    if output.dtype.kind in "biu":
        wrong = np.flatnonzero(output.ravel() != reference.ravel())
        return _describe(wrong, output, reference)
    if output.dtype.itemsize < 4 or output.dtype.kind not in "f":
        rtol = max(rtol, _HALF_BITS_TOLERANCE * _epsilon(output.dtype))
    got, want = (a.astype(np.float32, copy=False).ravel() for a in (output, reference))
    if output.dtype == np.float64:
        got, want = output.ravel(), reference.ravel()
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = np.abs(want)
        close = np.abs(got - want) <= rtol * np.maximum(magnitude, _scale(magnitude))
        fine = np.where(np.isfinite(want), close, (got == want) & ~np.isnan(want))
    return _describe(np.flatnonzero(~fine), output, reference)


def _floats(rng: np.random.Generator, shape: tuple[int, ...], style: str, dtype: Any) -> np.ndarray:
    if style == "positive":
        return rng.random(shape, dtype=dtype) + dtype(0.1)
    return rng.standard_normal(shape, dtype=dtype)


def _epsilon(dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps)
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


def _scale(magnitude: np.ndarray) -> float:
    """The largest ordinary magnitude: the largest of all, but not over 1000 times the median of the nonzero ones."""
    nonzero = magnitude[(magnitude > 0) & np.isfinite(magnitude)]
    if not nonzero.size:
        return 0.0
    largest = float(nonzero.max())
    sample = nonzero[:: max(1, nonzero.size // 65536)]  # the median of a sample says as much
    return min(largest, _ORDINARY * float(np.median(sample)))


def _describe(wrong: np.ndarray, output: np.ndarray, reference: np.ndarray) -> str:
    if not wrong.size:
        return ""
    at = int(wrong[0])
    place = ", ".join(str(int(i)) for i in np.unravel_index(at, output.shape)) if output.shape else ""
    return (f"{wrong.size} of {output.size} elements differ from the reference, the first at [{place}]: "
            f"{output.ravel()[at]} instead of {reference.ravel()[at]}")
