"""Tensor functions with references, to test search spaces on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.measure.data import numpy_dtype

if TYPE_CHECKING:
    from tvm import te, tirx

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A tensor function, and what it must compute.

    ``build`` returns the function, or its tensors, inputs first. ``reference`` maps the inputs, floats as float64, to
    the result or results; floats may be ``rtol`` of themselves and of the largest one away, integers not at all.

    Inputs are random: floats from ``low`` to 2, integers below ``high`` of their position. ``data`` gives them instead,
    where others are needed. ``space`` is the name of the one that should take the function, where that is asked for,
    and ``index`` the type of the indices, left out as it comes.
    """

    name: str
    build: Callable[[], Sequence[te.Tensor] | tirx.PrimFunc]
    reference: Callable[..., object]
    rtol: float = 1e-5
    high: Mapping[int, int] = field(default_factory=dict)
    low: float = -2.0
    data: Callable[[], Sequence[np.ndarray]] | None = None
    space: str = ""
    index: str | None = None

    def __str__(self) -> str:
        return self.name

    def func(self) -> tirx.PrimFunc:
        from tvm import te, tirx

        built = self.build()
        if isinstance(built, tirx.PrimFunc):
            return built
        return te.create_prim_func(list(built), index_dtype_override=self.index)

    def arrays(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Inputs, and outputs filled with what no right result leaves there."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        given = list(self.data()) if self.data is not None else None
        count = self.reference.__code__.co_argcount if given is None else len(given)
        types = [([int(extent) for extent in p.shape], str(p.dtype)) for p in self.func().params]
        if given is None:
            given = [self._random(rng, i, *each) for i, each in enumerate(types[:count])]
        return given, [np.full(shape, np.nan if "float" in dtype else 99, numpy_dtype(dtype))
                       for shape, dtype in types[count:]]

    def _random(self, rng: np.random.Generator, position: int, shape: list[int], dtype: str) -> np.ndarray:
        if "float" in dtype:
            return rng.uniform(self.low, 2.0, shape).astype(numpy_dtype(dtype))
        if dtype == "int8":
            return rng.integers(-128, 128, shape).astype(dtype)
        return rng.integers(0, 2 if dtype == "bool" else self.high.get(position, 100), shape).astype(dtype)

    def error(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
        """How far the outputs are from the reference, to compare with ``rtol``; infinite where an integer differs or a
        result is not finite. Raises ``ValueError`` for outputs of another number or shape."""
        found = self.reference(*map(_exact, inputs))
        wanted = [np.asarray(each) for each in (found if isinstance(found, tuple | list) else [found])]
        if [a.shape for a in outputs] != [a.shape for a in wanted]:
            raise ValueError(f"results must have the reference's shapes {[a.shape for a in wanted]}, "
                             f"got {[a.shape for a in outputs]}")
        return max(map(_difference, outputs, wanted))


def _exact(array: np.ndarray) -> np.ndarray:
    """The same values in the widest type of their kind."""
    return array.astype("float64") if "float" in str(array.dtype) else array


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    if "float" not in str(got.dtype):
        return 0.0 if np.array_equal(got, want) else float("inf")
    if not got.size:
        return 0.0
    size = np.abs(want)
    worst: Any = (np.abs(got.astype("float64") - want) / np.maximum(size + size.max(), np.finfo("float64").tiny)).max()
    return float(worst) if np.isfinite(worst) else float("inf")
