"""Values of operators on arrays: quick ways for those that searches evaluate often, the interpreter for the others.

``evaluate(name, inputs, attributes)`` is over float64; ``evaluate(..., arithmetic=FIELD)`` is exact over the prime
field, with arrays of uint64 below p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mlc.operators.arithmetic import FIELD, REAL, STRICT, Arithmetic, Array
from mlc.operators.expansions import EXPANSIONS
from mlc.operators.index import Poly
from mlc.operators.interpret import interpret
from mlc.operators.operator import OPERATORS, Attributes
from mlc.operators.shapes import infer
from mlc.operators.tensor import Requirements, ShapeError, tensor_input

__all__ = ["FIELD", "REAL", "STRICT", "evaluate", "reference"]

Shape = tuple[int, ...]
Given = Mapping[str, Any]


def evaluate(name: str, inputs: Sequence[Array], attributes: Attributes, arithmetic: Arithmetic = REAL) -> list[Array]:
    """The results of an operator. Raises :class:`ShapeError` where operands do not fit it."""
    shape = shape_of(name, tuple(a.shape for a in inputs), attributes)
    given = {**OPERATORS[name].defaults, **attributes}
    if name in EXPANSIONS:
        return [EXPANSIONS[name](_apply(arithmetic), *inputs, **given)]
    return (
        [FAST[name](arithmetic, shape, inputs, given)]
        if name in FAST
        else reference(name, inputs, attributes, arithmetic)
    )


def _apply(arithmetic: Arithmetic) -> Callable[..., Array]:
    def apply(name: str, *operands: Array, **attributes: Any) -> Array:
        return evaluate(name, operands, attributes, arithmetic)[0]

    return apply


def reference(name: str, inputs: Sequence[Array], attributes: Attributes, arithmetic: Arithmetic = REAL) -> list[Array]:
    """The results by the specification itself, element by element over grids of indices."""
    named = {f"in{place}": array for place, array in enumerate(inputs)}
    symbolic = [tensor_input(key, array.shape) for key, array in named.items()]
    results = OPERATORS[name](Requirements(), symbolic, attributes)
    return [interpret(result, named, arithmetic) for result in results]


def shape_of(name: str, shapes: tuple[Shape, ...], attributes: Attributes) -> Shape:
    """The shape of the result for concrete shapes; remembered."""
    found = _shape_of(name, shapes, tuple(attributes.items()))
    if isinstance(found, ShapeError):
        raise ShapeError(*found.args)
    return found


@lru_cache(maxsize=1 << 16)
def _shape_of(name: str, shapes: tuple[Shape, ...], attributes: tuple[tuple[str, Any], ...]) -> Shape | ShapeError:
    try:
        (sizes,) = infer(name, shapes, dict(attributes))
    except ShapeError as error:
        return error
    concrete = tuple(size.constant for size in sizes)
    if None in concrete:
        raise ShapeError(f"{name} is evaluated at concrete sizes, but its result has the shape {sizes}")
    return concrete  # type: ignore[return-value]


def _int(value: Poly | int) -> int:
    return value if isinstance(value, int) else int(value.evaluate({}))


def _elementwise(combine: str) -> Callable[..., Array]:
    return lambda number, shape, inputs, given: getattr(number, combine)(*inputs)


def _function(function: str) -> Callable[..., Array]:
    return lambda number, shape, inputs, given: number.call(function, inputs[0])


def _slice(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    (x,) = inputs
    where = [slice(None)] * x.ndim
    where[given["axis"]] = slice(_int(given["begin"]), _int(given["end"]))
    return x[tuple(where)]


def _pad(x: Array, before: Sequence[int], shape: Shape, fill: Any = 0) -> Array:
    padded = np.full(shape, fill, dtype=x.dtype)
    padded[tuple(slice(low, low + size) for low, size in zip(before, x.shape, strict=True))] = x
    return padded


def _enlarge(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    (w,) = inputs
    return _pad(w, [(large - 1) // 2 - (small - 1) // 2 for large, small in zip(shape, w.shape, strict=True)], shape)


def _sum(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    return np.asarray(number.total(inputs[0], tuple(given["axes"]), bool(given["keepdims"])))


def _mean(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    total = _sum(number, shape, inputs, given)
    count = inputs[0].size // max(total.size, 1)
    return np.asarray(number.mul(total, number.reciprocal(number.integers(np.asarray(count)))))


def _max(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    return np.asarray(number.largest(inputs[0], tuple(given["axes"]), bool(given["keepdims"])))


def _key(value: Any) -> Any:
    return value if isinstance(value, str) else tuple(map(_int, value))


@lru_cache(maxsize=1 << 14)
def _windows(extent: Shape, kernel: Shape, size: Shape, stride: Shape, padding: Any, dilation: Shape) -> Any:
    """Flat places ``[windows, places of one]`` in a padded plane, the plane's size, the padding before its elements."""
    before, planes, axes = [], [], []
    for axis in (0, 1):
        reach = (kernel[axis] - 1) * dilation[axis] + 1
        span = (size[axis] - 1) * stride[axis] + reach
        explicit = 0 if isinstance(padding, str) else padding[axis]
        low = max(0, span - extent[axis]) // 2 if padding == "same" else explicit
        before.append(low)
        planes.append(max(span, low + extent[axis]))
        axes.append(np.arange(size[axis])[:, None] * stride[axis] + np.arange(kernel[axis]) * dilation[axis])
    flat = axes[0][:, None, :, None] * planes[1] + axes[1][None, :, None, :]
    return flat.reshape(size[0] * size[1], kernel[0] * kernel[1]), tuple(planes), tuple(before)


def _gather(x: Array, kernel: Shape, shape: Shape, given: Given, dilation: Shape, fill: Any) -> Array:
    """``[n, c, out rows * out columns, window]``."""
    places, planes, before = _windows(
        x.shape[2:], kernel, shape[2:], _key(given["stride"]), _key(given["padding"]), dilation
    )
    if planes != x.shape[2:]:
        x = _pad(x, (0, 0, *before), (*x.shape[:2], *planes), fill)
    return x.reshape(*x.shape[:2], -1)[:, :, places]


def _conv2d(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    x, w = inputs
    groups, (n, outputs) = _int(given["groups"]), shape[:2]
    windows = _gather(x, w.shape[2:], shape, given, _key(given["dilation"]), 0)
    spots, window = windows.shape[2:]
    # [group, n * spots, channels * window] by [group, channels * window, outputs]
    left = windows.reshape(n, groups, -1, spots, window).transpose(1, 0, 3, 2, 4).reshape(groups, n * spots, -1)
    right = w.reshape(groups, outputs // groups, -1).transpose(0, 2, 1)
    found = number.matmul(left, right).reshape(groups, n, spots, -1)
    return found.transpose(1, 0, 3, 2).reshape(shape)


def _max_pool2d(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    windows = _gather(inputs[0], _key(given["kernel"]), shape, given, (1, 1), number.lowest)
    return np.asarray(number.largest(windows, (3,))).reshape(shape)


def _avg_pool2d(number: Arithmetic, shape: Shape, inputs: Sequence[Array], given: Given) -> Array:
    (x,) = inputs
    kernel = _key(given["kernel"])
    total = np.asarray(number.total(_gather(x, kernel, shape, given, (1, 1), 0), (3,))).reshape(shape)
    if given["count_include_pad"]:
        count: Any = np.asarray(kernel[0] * kernel[1])
    else:
        elements = np.ones((1, 1, *x.shape[2:]), dtype=np.int64)
        count = _gather(elements, kernel, (1, 1, *shape[2:]), given, (1, 1), 0).sum(3).reshape(1, 1, *shape[2:])
    return number.mul(total, number.reciprocal(number.integers(count)))


#: ``(arithmetic, shape of the result, inputs, all attributes) -> array``
FAST: dict[str, Callable[..., Array]] = {
    "add": _elementwise("add"),
    "sub": _elementwise("sub"),
    "mul": _elementwise("mul"),
    "maximum": _elementwise("maximum"),
    "neg": _elementwise("neg"),
    "reciprocal": _elementwise("reciprocal"),
    "matmul": _elementwise("matmul"),
    "div": lambda number, shape, inputs, given: number.mul(inputs[0], number.reciprocal(inputs[1])),
    **{name: _function(name) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "erf")},
    "transpose": lambda number, shape, inputs, given: inputs[0].transpose(given["perm"]),
    "reshape": lambda number, shape, inputs, given: inputs[0].reshape(shape),
    "concat": lambda number, shape, inputs, given: np.concatenate(inputs, given["axis"]),
    "slice": _slice,
    "pad": lambda number, shape, inputs, given: _pad(inputs[0], [_int(size) for size in given["before"]], shape),
    "enlarge": _enlarge,
    "ones": lambda number, shape, inputs, given: np.ones(shape, dtype=number.dtype),
    "identity_matrix": lambda number, shape, inputs, given: np.eye(shape[0], dtype=number.dtype),
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "conv2d": _conv2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
}
