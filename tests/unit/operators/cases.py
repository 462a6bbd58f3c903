"""Random instances of every operator: shapes, attributes, and values in either number system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from mlc.operators.arithmetic import Arithmetic, Array

Shapes = list[tuple[int, ...]]


@dataclass
class Case:
    """An operator with concrete shapes; ``positive`` names the inputs that must not be negative or zero, ``indices``
    those that are indices, with their extents."""

    op: str
    shapes: Shapes
    attributes: Mapping[str, Any]
    positive: tuple[int, ...] = ()
    indices: Mapping[int, int] = field(default_factory=dict)

    def inputs(self, arithmetic: Arithmetic, rng: np.random.Generator) -> list[Array]:
        arrays = [arithmetic.random(rng, shape) for shape in self.shapes]
        if arithmetic.dtype == np.float64:
            for place in self.positive:
                arrays[place] = np.abs(arrays[place]) + 0.1
        for place, extent in self.indices.items():
            arrays[place] = arithmetic.integers(rng.integers(0, extent, self.shapes[place]))
        return arrays


def _some(rng: np.random.Generator, low: int = 1, high: int = 6) -> int:
    return int(rng.integers(low, high + 1))


def _shape(rng: np.random.Generator, rank: int) -> tuple[int, ...]:
    return tuple(_some(rng, 1, 5) for _ in range(rank))


def _matmul(rng: np.random.Generator) -> Case:
    m, k, n = _some(rng), _some(rng), _some(rng)
    batch = () if rng.random() < 0.5 else (_some(rng, 1, 3),)
    return Case("matmul", [(*batch, m, k), (*batch, k, n)], {})


def _padding(rng: np.random.Generator, kernel: tuple[int, int]) -> Any:
    return [
        "valid",
        "same",
        tuple(int(rng.integers(0, kernel[axis % 2])) for axis in range(4)),
    ][int(rng.integers(3))]


def _conv2d(rng: np.random.Generator) -> Case:
    groups = int(rng.choice([1, 1, 2, 3]))
    channels, outputs, kernel = _some(rng, 1, 3), groups * _some(rng, 1, 3), (_some(rng, 1, 3), _some(rng, 1, 4))
    dilation, stride = (_some(rng, 1, 2), _some(rng, 1, 2)), (_some(rng, 1, 3), _some(rng, 1, 3))
    extent = tuple((k - 1) * d + 1 + _some(rng, 0, 5) for k, d in zip(kernel, dilation, strict=True))
    return Case(
        "conv2d",
        [(_some(rng, 1, 2), groups * channels, *extent), (outputs, channels, *kernel)],
        {"stride": stride, "padding": _padding(rng, kernel), "dilation": dilation, "groups": groups},
    )


def _pool(op: str) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        kernel = (_some(rng, 1, 3), _some(rng, 1, 4))
        attributes: dict[str, Any] = {
            "kernel": kernel,
            "stride": (_some(rng, 1, 3), _some(rng, 1, 3)),
            "padding": _padding(rng, kernel),
        }
        if op == "avg_pool2d":
            attributes["count_include_pad"] = int(rng.integers(2))
        extent = tuple(k + _some(rng, 0, 5) for k in kernel)
        return Case(op, [(_some(rng, 1, 2), _some(rng, 1, 3), *extent)], attributes)

    return make


def _binary(op: str) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        shape = _shape(rng, _some(rng, 1, 4))
        other = tuple(1 if rng.random() < 0.3 else size for size in shape) if rng.random() < 0.8 else ()
        shapes = [shape, other] if rng.random() < 0.5 else [other, shape]
        return Case(op, shapes, {}, positive=(1,) if op == "div" else ())

    return make


def _unary(op: str) -> Callable[[np.random.Generator], Case]:
    positive = (0,) if op in ("log", "sqrt", "rsqrt", "reciprocal") else ()
    return lambda rng: Case(op, [_shape(rng, _some(rng, 1, 4))], {}, positive)


def _reduction(op: str) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        rank = _some(rng, 1, 4)
        axes = rng.choice(rank, size=_some(rng, 1, rank), replace=False)
        chosen = tuple(int(axis) - rank * int(rng.integers(2)) for axis in axes)
        return Case(op, [_shape(rng, rank)], {"axes": chosen, "keepdims": int(rng.integers(2))})

    return make


def _transpose(rng: np.random.Generator) -> Case:
    rank = _some(rng, 1, 4)
    return Case("transpose", [_shape(rng, rank)], {"perm": tuple(map(int, rng.permutation(rank)))})


def _reshape(rng: np.random.Generator) -> Case:
    a, b, c = _some(rng), _some(rng), _some(rng)
    shapes = [(a, b, c), (a * b, c), (b, a * c), (c, a, b), (a * b * c,), (a, 1, b * c), (b, c, 1, a)]
    old, new = rng.choice(len(shapes), size=2)
    return Case("reshape", [shapes[old]], {"shape": shapes[new]})


def _expand(rng: np.random.Generator) -> Case:
    small = _shape(rng, _some(rng, 1, 4))
    return Case("expand", [small], {"shape": tuple(_some(rng) if size == 1 else size for size in small)})


def _concat(rng: np.random.Generator) -> Case:
    shape = _shape(rng, _some(rng, 1, 4))
    axis = int(rng.integers(len(shape)))
    return Case("concat", [shape, (*shape[:axis], _some(rng), *shape[axis + 1 :])], {"axis": axis})


def _slice(rng: np.random.Generator) -> Case:
    shape = _shape(rng, _some(rng, 1, 4))
    axis = int(rng.integers(len(shape)))
    begin = int(rng.integers(shape[axis]))
    return Case("slice", [shape], {"axis": axis, "begin": begin, "end": int(rng.integers(begin, shape[axis])) + 1})


def _pad(rng: np.random.Generator) -> Case:
    shape = _shape(rng, _some(rng, 1, 4))
    before, after = ([int(rng.integers(3)) for _ in shape] for _ in range(2))
    return Case("pad", [shape], {"before": tuple(before), "after": tuple(after)})


def _gather(rng: np.random.Generator) -> Case:
    shape, places = _shape(rng, _some(rng, 1, 3)), _shape(rng, _some(rng, 0, 2))
    axis = int(rng.integers(-len(shape), len(shape)))
    return Case("gather", [shape, places], {"axis": axis}, indices={1: shape[axis]})


def _enlarge(rng: np.random.Generator) -> Case:
    kernel = (_some(rng, 1, 3), _some(rng, 1, 3))
    large = tuple(k + _some(rng, 0, 3) for k in kernel)
    return Case("enlarge", [(_some(rng, 1, 3), _some(rng, 1, 3), *kernel)], {"kernel": large})


def _identity_kernel(rng: np.random.Generator) -> Case:
    groups = _some(rng, 1, 2)
    kernel = (_some(rng, 1, 4), _some(rng, 1, 4))
    return Case("identity_kernel", [], {"channels": groups * _some(rng, 1, 3), "kernel": kernel, "groups": groups})


def _normalisation(op: str, parameters: int) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        shape = _shape(rng, _some(rng, 2, 4))
        length = shape[1] if op == "batch_norm" else shape[-1]
        positive = (4,) if op == "batch_norm" else ()
        epsilon = {"epsilon": Fraction(1, 1000)} if op == "batch_norm" else {"inverse_epsilon": 1000}
        return Case(op, [shape, *[(length,)] * parameters], epsilon, positive)

    return make


#: for every operator of the table, what makes a random instance of it
MAKERS: dict[str, Callable[[np.random.Generator], Case]] = {
    "matmul": _matmul,
    "conv2d": _conv2d,
    "max_pool2d": _pool("max_pool2d"),
    "avg_pool2d": _pool("avg_pool2d"),
    **{op: _binary(op) for op in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{
        op: _unary(op)
        for op in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "erf", "neg", "reciprocal", "gelu", "silu")
    },
    **{op: _reduction(op) for op in ("sum", "mean", "max")},
    "transpose": _transpose,
    "reshape": _reshape,
    "expand": _expand,
    "concat": _concat,
    "slice": _slice,
    "gather": _gather,
    "pad": _pad,
    "enlarge": _enlarge,
    "scalar": lambda rng: Case("scalar", [], {"value": Fraction(_some(rng), _some(rng))}),
    "ones": lambda rng: Case("ones", [], {"shape": _shape(rng, _some(rng, 1, 4))}),
    "identity_matrix": lambda rng: Case("identity_matrix", [], {"size": _some(rng)}),
    "identity_kernel": _identity_kernel,
    "batch_norm": _normalisation("batch_norm", 4),
    "layer_norm": _normalisation("layer_norm", 2),
    "rms_norm": _normalisation("rms_norm", 1),
    "softmax": lambda rng: Case("softmax", [_shape(rng, 3)], {"axis": int(rng.integers(-3, 3))}),
}
