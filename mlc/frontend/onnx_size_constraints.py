"""Constraints of nodes on free sizes: sizes that models name differently must be equal, or must not be too small.

TVM takes the depth of a product from one operand and reads the other as far: with two free sizes that a call may give
different numbers, it would read what is not there. Here a node says which sizes must agree. Two free dimensions that
must are made one, and one that must be a number becomes it; what follows from other sizes must agree for all of them.
A convolution without padding has no result of an image that is smaller than its filter: such sizes begin later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlc.frontend.onnx_sizes import Sizes
from mlc.sizes import Size, UndecidedSizeError, bounds_of, depends_on, evaluated, in_scope, may_come, size_of

__all__ = ["SizeTooSmallError", "SizesMustAgreeError", "check", "check_result"]

#: a size for each axis; None where that is unknown
Dims = list[Any] | None


class SizesMustAgreeError(Exception):
    """A free dimension, by its name, must be another one, or a number."""

    def __init__(self, name: str, other: str | int) -> None:
        super().__init__(f"{name} must be {other}")
        self.name, self.other = name, other


class SizeTooSmallError(Exception):
    """A free dimension, by its name, must be at least ``least`` for a node of ``operator`` to have a result."""

    def __init__(self, name: str, least: int, operator: str) -> None:
        super().__init__(f"{name} must be at least {least}")
        self.name, self.least, self.operator = name, least, operator


def check(operator: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    """Raise :class:`SizesMustAgreeError` where free dimensions among the inputs' must be made one,
    :class:`UndecidedSizeError` where sizes that must be equal are not for every size that the ranges admit."""
    demand = _DEMANDS.get(operator)
    if demand is None:
        return
    dims = [_dims(given) for given in inputs]
    if any(isinstance(size, Size) for each in dims for size in each or ()):
        for one, other in demand(dims, attrs):
            if isinstance(one, Size) or isinstance(other, Size):
                _agree(operator, one, other)


def check_result(operator: str, result: Any) -> None:
    """Raise :class:`SizeTooSmallError` where a free dimension may be so small that a size of the result is negative, or
    that nothing is left of an image, and :class:`UndecidedSizeError` where it always is."""
    types = getattr(getattr(result, "ty", None), "fields", None) or [getattr(result, "ty", None)]
    needed = 1 if operator in _WINDOWS else 0
    for shape in (getattr(each, "shape", None) for each in types):
        for size in map(size_of, getattr(shape, "values", ())):
            if isinstance(size, Size) and bounds_of(size.expr)[0] < needed:
                _long_enough(operator, size, needed)


def _long_enough(operator: str, size: Size, needed: int) -> None:
    names = sorted(depends_on(size.expr) & in_scope().keys())
    if len(names) != 1:
        return  # bounds of what follows from several are no sizes that come
    (name,) = names
    low, high = in_scope()[name].range.low, in_scope()[name].range.high
    if evaluated(size.expr, {name: low}) >= needed:
        return
    if evaluated(size.expr, {name: high}) < needed:
        raise UndecidedSizeError(f"{operator} must leave something for every size that is free, but of {name}={high} "
                                 f"it leaves {evaluated(size.expr, {name: high})}; give larger sizes")
    while low < high:  # sizes grow with what they follow from
        middle = (low + high) // 2
        low, high = (low, middle) if evaluated(size.expr, {name: middle}) >= needed else (middle + 1, high)
    raise SizeTooSmallError(name, low, operator)


def _dims(value: Any) -> Dims:
    if value is None or isinstance(value, Sizes):
        return None
    shape: Any = getattr(getattr(value, "ty", None), "shape", None)
    return [size_of(size) for size in shape.values] if hasattr(shape, "values") else None


def _agree(operator: str, one: Any, other: Any) -> None:
    if one == other or not (differs := _where_different(one, other)):
        return
    names = [str(size) if isinstance(size, Size) and str(size) in in_scope() else None for size in (one, other)]
    if names[1] and (names[0] or not isinstance(one, Size)):
        raise SizesMustAgreeError(names[1], names[0] or int(one))
    if names[0] and not isinstance(other, Size):
        raise SizesMustAgreeError(names[0], int(other))
    raise UndecidedSizeError(f"the sizes {one} and {other} that {operator} takes must be equal for every size that is "
                             f"free, but are not at {differs}; fix them, as in --shape NAME=8,128")


def _where_different(one: Any, other: Any) -> str:
    """Free sizes for which both differ; nothing where they are equal at the ends and in the middle of all ranges, as
    sizes that are computed in two ways are, though not provably."""
    exprs = [size.expr if isinstance(size, Size) else size for size in (one, other)]
    names = sorted({name for size in exprs if not isinstance(size, int) for name in depends_on(size)})
    tried = []
    for free in map(in_scope().__getitem__, names):
        low, high = free.range.low, free.range.high
        tried.append(sorted({low, min(low + 1, high), free.usual, high}))
    for sizes in itertools.product(*tried):
        given = dict(zip(names, sizes, strict=True))
        if not may_come(given):
            continue
        a, b = (expr if isinstance(expr, int) else evaluated(expr, given) for expr in exprs)
        if a != b:
            return ", ".join(f"{name}={size}" for name, size in given.items())
    return ""


# What nodes need

Pairs = Iterator[tuple[Any, Any]]


def _broadcast(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    known = [each for each in dims if each is not None]
    for sizes in itertools.zip_longest(*(reversed(each) for each in known), fillvalue=1):
        wide = [size for size in sizes if isinstance(size, Size) or size != 1]
        yield from ((wide[0], size) for size in wide[1:])


def _matmul(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    x, y = dims[:2]
    if x and y:
        yield x[-1], y[max(len(y) - 2, 0)]
        yield from _broadcast([x[:-2], y[:-2]], attrs)


def _gemm(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    x, y = dims[:2]
    if x and y:
        (rows, depth), (other, columns) = (
            each[::-1] if int(attrs.get(turned, 0)) else each for each, turned in ((x, "transA"), (y, "transB")))
        yield depth, other
        yield from _broadcast([[rows, columns], *dims[2:]], attrs)


def _concat(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    first, *rest = (each for each in dims if each is not None)
    for each in rest:
        yield from (pair for axis, pair in enumerate(zip(first, each, strict=False))
                    if axis != int(attrs["axis"]) % len(first))


def _einsum(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    equation = attrs["equation"]
    terms = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "").split("->")[0].split(",")
    seen: dict[str, Any] = {}
    for term, each in zip(terms, dims, strict=False):
        left, dots, right = term.partition("...")
        sizes = each or []
        labels = [*zip(left, sizes, strict=False), *(zip(right[::-1], sizes[::-1], strict=False) if dots else ())]
        yield from ((seen.setdefault(label, size), size) for label, size in labels)


def _attention(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    """Queries, keys and values ``[batch, heads, tokens, features]`` or without an axis of heads."""
    query, key, value = dims[:3]
    if query and key and value and len(query) == len(key) == len(value):
        yield query[0], key[0]
        yield key[0], value[0]
        yield key[-2], value[-2]
        if len(query) == 4:
            yield query[3], key[3]


def _of_channels(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    x, *weights = dims
    if x and len(x) > 1:
        yield from ((x[1], each[0]) for each in weights if each and len(each) == 1)


def _convolution(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    x, weight = dims[:2]
    if x and weight:
        yield x[1], weight[1] * int(attrs.get("group", 1))


def _transposed(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    x, weight = dims[:2]
    if x and weight:
        yield x[1], weight[0]


def _at_places(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    """Indices must be as long as the data, or shorter for all sizes."""
    data, places = dims[:2]
    if data and places:
        for axis, (whole, part) in enumerate(zip(data, places, strict=False)):
            if axis != int(attrs.get("axis", 0)) % len(data) and not _never_larger(part, whole):
                yield whole, part


def _never_larger(part: Any, whole: Any) -> bool:
    try:
        return bool(part <= whole)
    except UndecidedSizeError:
        return False


def _boxes(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    boxes, scores = dims[:2]
    if boxes and scores:
        yield boxes[0], scores[0]
        yield boxes[1], scores[2]


def _split(dims: Sequence[Dims], attrs: Mapping[str, Any]) -> Pairs:
    """The axis must be divisible into equal parts, unless their sizes are given."""
    count = int(attrs["tvm_custom"]["num_outputs"])
    if dims[0] and len(dims) < 2 and "split" not in attrs:
        size = dims[0][int(attrs.get("axis", 0))]
        yield size, size // count * count


#: whose results are images
_WINDOWS = frozenset({"AveragePool", "Conv", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv"})
_BROADCAST = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual",
    "LayerNormalization", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow",
    "RMSNormalization", "Sub", "Sum", "Where", "Xor",
)
_DEMANDS: dict[str, Callable[[Sequence[Dims], Mapping[str, Any]], Pairs]] = {
    **dict.fromkeys(_BROADCAST, _broadcast),
    "Attention": _attention, "BatchNormalization": _of_channels, "Concat": _concat, "Conv": _convolution,
    "ConvTranspose": _transposed, "Einsum": _einsum, "GatherElements": _at_places, "Gemm": _gemm,
    "InstanceNormalization": _of_channels, "MatMul": _matmul, "MatMulInteger": _matmul, "NonMaxSuppression": _boxes,
    "ScatterElements": _at_places, "Split": _split,
}
