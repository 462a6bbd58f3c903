"""Reductions over axes: sum, mean, max."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlc.operators.index import Poly, as_poly
from mlc.operators.movement import axis_of
from mlc.operators.operator import operator
from mlc.operators.relax import Relax, Shape, Shapes
from mlc.operators.scalar import Max, Mul, Reciprocal, Scalar, Size, Sum
from mlc.operators.tensor import Requirements, ShapeError, Tensor, product, text

__all__: list[str] = []

Variables = tuple[tuple[str, Poly], ...]


def _read(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any]:
    """All axes where a call names none."""
    rank = len(shapes[0])
    axes = range(rank) if attrs.axis is None else sorted({int(axis) % rank for axis in attrs.axis})
    return {"axes": tuple(axes), "keepdims": int(attrs.keepdims)}


def _write(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"axis": list(given["axes"]), "keepdims": bool(given["keepdims"])}


def _enter(name: str, reduce: Callable[[Variables, Scalar], Scalar], quick: Callable[..., Any]) -> None:
    """``quick(arithmetic, x, axes, keepdims)`` is the value; Relax has the same name."""

    def value(number: Any, shape: Shape, inputs: Any, given: Mapping[str, Any]) -> Any:
        return np.asarray(quick(number, inputs[0], tuple(given["axes"]), bool(given["keepdims"])))

    @operator(name, 1, {"axes": None, "keepdims": 0}, relax=Relax(name, _read, _write), quick=value, reduction=True)
    def define(require: Requirements, x: Tensor, axes: tuple[int, ...], keepdims: int) -> Tensor:
        """Over ``axes``, which stay with size 1 if ``keepdims``, and else go."""
        if keepdims not in (0, 1):
            raise ShapeError(f"{name} needs keepdims of 0 or 1, but got {keepdims}")
        reduced = [axis_of(name, x, axis) for axis in axes]
        if not reduced or len(set(reduced)) < len(reduced):
            raise ShapeError(f"{name} needs distinct axes of {text(x)}, at least one, but got {tuple(axes)}")
        names = {axis: require.variable() for axis in sorted(reduced)}
        shape = [as_poly(1) if axis in names else size for axis, size in enumerate(x.shape)]

        def element(*indices: Poly) -> Scalar:
            kept = iter(index for axis, index in enumerate(indices) if axis not in names or not keepdims)
            places = tuple(Poly.symbol(names[axis]) if axis in names else next(kept) for axis in range(x.rank))
            return reduce(tuple((variable, x.shape[axis]) for axis, variable in names.items()), x[places])

        return Tensor(tuple(s for axis, s in enumerate(shape) if keepdims or axis not in names), element)


def _mean(variables: Variables, body: Scalar) -> Scalar:
    return Mul((Sum(variables, body), Reciprocal(Size(product([extent for _, extent in variables])))))


def _average(number: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    total = np.asarray(number.total(x, axes, keepdims))
    return number.mul(total, number.reciprocal(number.integers(np.asarray(x.size // max(total.size, 1)))))


_enter("sum", lambda variables, body: Sum(variables, body), lambda number, *of: number.total(*of))
_enter("mean", _mean, _average)
_enter("max", lambda variables, body: Max(variables, (), body), lambda number, *of: number.largest(*of))
