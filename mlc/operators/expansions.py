"""Operators that other operators define: normalisations, softmax, GELU, SiLU.

An expansion is written once, over ``apply(name, *operands, **attributes)``: with symbolic tensors it gives the
specification, with arrays the values, with a graph builder the expanded graph. Operands have a ``shape``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from mlc.operators.index import Poly
from mlc.operators.operator import OPERATORS, operator
from mlc.operators.relax import Relax, Shape, Shapes
from mlc.operators.tensor import Requirements, ShapeError, Tensor, text

__all__ = ["EXPANSIONS", "Apply"]


class Apply(Protocol):
    """Applies an operator to operands of whatever kind the expansion is made for."""

    def __call__(self, name: str, *operands: Any, **attributes: Any) -> Any: ...


#: name → ``expand(apply, *operands, **attributes)``
EXPANSIONS: dict[str, Callable[..., Any]] = {}

EPSILON = Fraction(1, 100_000)
#: one by what layer and RMS norms add to a variance: a whole number, so that a rule can hold for all of them
INVERSE_EPSILON = 100_000


def _expansion(
    name: str, arity: int, defaults: Mapping[str, Any] | None = None, **traits: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(expand: Callable[..., Any]) -> Callable[..., Any]:
        EXPANSIONS[name] = expand

        @operator(name, arity, defaults, expansion=True, **traits)
        def define(require: Requirements, *inputs: Tensor, **attributes: Any) -> Tensor:
            def apply(op: str, *operands: Tensor, **given: Any) -> Tensor:
                return OPERATORS[op](require, operands, given)[0]

            return expand(apply, *inputs, **attributes)

        return expand

    return enter


def _number(apply: Apply, value: Fraction | int) -> Any:
    return apply("scalar", value=value)


def _inverse_root(apply: Apply, square: Any, inverse_epsilon: int | Poly) -> Any:
    """``1 / sqrt(square + 1 / inverse_epsilon)``."""
    epsilon = apply("reciprocal", apply("scalar", value=inverse_epsilon))
    return apply("rsqrt", apply("add", square, epsilon))


def _read_norm(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any] | None:
    """Over the last axis, with its parameters, where one by epsilon is a whole number up to float32's rounding."""
    epsilon, rank = float(attrs.epsilon), len(shape)
    plain = [int(axis) % rank for axis in attrs.axes] == [rank - 1] and all(
        bool(getattr(attrs, name, True)) for name in ("center", "scale"))
    inverse = round(1 / epsilon) if 0 < epsilon <= 1 else 0
    if not plain or not inverse or np.float32(1 / inverse) != np.float32(epsilon):
        return None
    return {"inverse_epsilon": inverse}


def _write_norm(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"axes": [-1], "epsilon": float(np.float32(1 / given["inverse_epsilon"]))}


def _read_axis(attrs: Any, shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"axis": int(attrs.axis) % len(shape)}


def _write_axis(given: Mapping[str, Any], shapes: Shapes, shape: Shape) -> dict[str, Any]:
    return {"axis": int(given["axis"])}


def _per_axis(apply: Apply, name: str, x: Any, vector: Any, axis: int) -> Any:
    """A vector as long as an axis of ``x``, shaped so that it broadcasts along the others."""
    rank = len(x.shape)
    if len(vector.shape) != 1:
        raise ShapeError(f"{name} takes parameters of rank 1, but got {text(vector.shape)}")
    return apply("reshape", vector, shape=tuple(vector.shape[0] if a == axis % rank else 1 for a in range(rank)))


@_expansion("batch_norm", 5, {"epsilon": EPSILON}, partial=True)
def batch_norm(apply: Apply, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, epsilon: Fraction) -> Any:
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias`` with the statistics of axis 1 given."""
    if len(x.shape) < 2:
        raise ShapeError(f"batch_norm takes an input of rank 2 or more, but got {text(x.shape)}")
    factor = apply("mul", scale, apply("rsqrt", apply("add", variance, _number(apply, epsilon))))
    centred = apply("sub", x, _per_axis(apply, "batch_norm", x, mean, 1))
    scaled = apply("mul", centred, _per_axis(apply, "batch_norm", x, factor, 1))
    return apply("add", scaled, _per_axis(apply, "batch_norm", x, bias, 1))


@_expansion("layer_norm", 3, {"inverse_epsilon": INVERSE_EPSILON},
            relax=Relax("nn.layer_norm", _read_norm, _write_norm))
def layer_norm(apply: Apply, x: Any, scale: Any, bias: Any, inverse_epsilon: int | Poly) -> Any:
    """Over the last axis: mean 0 and variance 1, then ``scale`` and ``bias``."""
    centred = apply("sub", x, apply("mean", x, axes=(-1,), keepdims=1))
    variance = apply("mean", apply("mul", centred, centred), axes=(-1,), keepdims=1)
    normal = apply("mul", centred, _inverse_root(apply, variance, inverse_epsilon))
    scaled = apply("mul", normal, _per_axis(apply, "layer_norm", x, scale, -1))
    return apply("add", scaled, _per_axis(apply, "layer_norm", x, bias, -1))


@_expansion("rms_norm", 2, {"inverse_epsilon": INVERSE_EPSILON},
            relax=Relax("nn.rms_norm", _read_norm, _write_norm))
def rms_norm(apply: Apply, x: Any, scale: Any, inverse_epsilon: int | Poly) -> Any:
    """Over the last axis: ``x / sqrt(mean(x * x) + 1 / inverse_epsilon) * scale``."""
    square = apply("mean", apply("mul", x, x), axes=(-1,), keepdims=1)
    normal = apply("mul", x, _inverse_root(apply, square, inverse_epsilon))
    return apply("mul", normal, _per_axis(apply, "rms_norm", x, scale, -1))


@_expansion("softmax", 1, {"axis": -1}, relax=Relax("nn.softmax", _read_axis, _write_axis))
def softmax(apply: Apply, x: Any, axis: int) -> Any:
    """``exp(x - max) / sum(exp(x - max))`` over an axis."""
    exponential = apply("exp", apply("sub", x, apply("max", x, axes=(axis,), keepdims=1)))
    return apply("div", exponential, apply("sum", exponential, axes=(axis,), keepdims=1))


@_expansion("gelu", 1, relax=Relax("nn.gelu"), pointwise=True, tame=True)
def gelu(apply: Apply, x: Any) -> Any:
    """``x/2 * (1 + erf(x / sqrt(2)))``."""
    inner = apply("erf", apply("mul", x, apply("rsqrt", _number(apply, 2))))
    return apply("mul", apply("mul", x, _number(apply, Fraction(1, 2))), apply("add", inner, _number(apply, 1)))


@_expansion("silu", 1, relax=Relax("nn.silu"), pointwise=True, tame=True)
def silu(apply: Apply, x: Any) -> Any:
    return apply("mul", x, apply("sigmoid", x))
