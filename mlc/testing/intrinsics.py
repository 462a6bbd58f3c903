"""The self-test of a tensor intrinsic, from what its entry says of itself.

The loops that it describes and the function that stands for them are built and run on the same data, random with
extremes, and compared with the entry's numpy; so any entry is tested, and on whatever can run its instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import tvm

    from schedules.intrin import Intrinsic

__all__ = ["largest_errors"]

#: builds the one function of a module, calls it on arrays, and returns them as they are afterwards
Run = Callable[["tvm.IRModule", list[np.ndarray]], list[np.ndarray]]

#: sums start within this, so that none of them overflows
_SUMS = 1 << 20


def largest_errors(intrinsic: Intrinsic, run: Run, seed: int = 0) -> tuple[float, float]:
    """How far the description's and the implementation's results are from the specification, relative to the largest
    element. Raises ``ValueError`` where the description has other types than the entry."""
    import tvm

    description = intrinsic.description()
    types = tuple(str(buffer.dtype) for buffer in description.params)
    if types != intrinsic.types:
        raise ValueError(f"{intrinsic.name} must describe a function of its types {intrinsic.types}, got {types}")
    rng = np.random.default_rng(seed)
    shapes = [[int(extent) for extent in buffer.shape] for buffer in description.params]
    arrays = [_data(rng, shape, dtype, sums=False) for shape, dtype in zip(shapes[:-1], types[:-1], strict=True)]
    arrays.append(_data(rng, shapes[-1], types[-1], sums=True))
    exact = [a.astype("int64" if a.dtype.kind in "iu" else "float64") for a in arrays]
    expected = np.asarray(intrinsic.specification(*exact))
    found = []
    for func in (description, intrinsic.implementation(description)):
        got = run(tvm.IRModule({"main": func}), [a.copy() for a in arrays])[-1]
        if got.shape != expected.shape:
            raise ValueError(f"{intrinsic.name} must specify a result of the shape {got.shape}, got {expected.shape}")
        found.append(float(np.abs(got.astype(expected.dtype) - expected).max() / np.abs(expected).max()))
    return found[0], found[1]


def _data(rng: np.random.Generator, shape: list[int], dtype: str, sums: bool) -> np.ndarray:
    if "int" not in dtype:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    low, high = (-_SUMS, _SUMS) if sums else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    extremes = rng.choice([low, high], shape)
    return np.where(rng.random(shape) < 1 / 3, extremes, rng.integers(low, high + 1, shape)).astype(dtype)
