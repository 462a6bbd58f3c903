"""Seeded random inputs of any model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from mlc.frontend.model import array_type
from mlc.shapes import Free, usual

__all__ = ["random_inputs"]


class _Spec(Protocol):
    """The part of ``mlc.frontend.TensorSpec`` that :func:`random_inputs` needs."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int | Free, ...]: ...
    @property
    def dtype(self) -> str: ...


def random_inputs(
    specs: Iterable[_Spec], seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """One array per input, the same for the same seed: standard normal floats, integers in [0, 100), random booleans.

    Masks and token types are 0 or 1. Integers are taken for token ids: a model that needs others is given its own.
    Free sizes are as ``sizes`` says by name, or the usual ones.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for spec in specs:
        dtype, shape = array_type(spec.dtype), usual(spec.shape, sizes)
        if "float" in spec.dtype:
            arrays[spec.name] = rng.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            arrays[spec.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            high = 2 if "mask" in spec.name or "type" in spec.name else 100
            arrays[spec.name] = rng.integers(0, high, shape).astype(dtype)
    return arrays
