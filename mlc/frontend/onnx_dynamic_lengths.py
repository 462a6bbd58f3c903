"""Axes of data-dependent length, followed from the operator that counts their elements to the model's outputs.

Such a tensor has the size that it may have at most, and another one holds the number (:class:`Rows`). What works on
each place of the axis by itself is computed for all of them; a compiled model cuts its outputs off. What would mix
places, or ask how many there are, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.frontend.onnx_sizes import Sizes
from mlc.frontend.onnx_values import array_of, dtype_of
from mlc.sizes import size_of

__all__ = ["Rows", "follow", "inside"]


@dataclass(frozen=True)
class Rows:
    """Along ``axis`` of a tensor there are as many as the tensor ``count`` of one int64 says. ``operator`` counts."""

    axis: int
    count: Any
    operator: str


#: each input, and what is known of its rows
Given = Sequence[tuple[Any, Rows | None]]


def follow(
    operator: str, given: Given, attrs: Mapping[str, Any], made: Sequence[Any], opset: int
) -> list[Rows | None]:
    """For each of the results, of the types ``made``, its rows; some of the inputs have rows.

    Raises ``ValueError`` for an operator that does not work on each place by itself.
    """
    rule = _of_rows if operator in _OF_ROWS and opset < _OF_AN_AXIS else _RULES[operator]
    axis = rule(given, attrs, made)
    counted = next(rows for _, rows in given if rows is not None)
    if axis is None:
        raise _mixed(counted)
    return [Rows(axis, counted.count, counted.operator) for _ in made]


def _mixed(rows: Rows) -> ValueError:
    return ValueError(f"how many it is given, {rows.operator} counts in each call: it must work on each by itself; end "
                      "the model before it")


def inside(bb: Any, operator: str, inputs: list[Any], rows: Sequence[Rows | None]) -> list[Any]:
    """The inputs with 0 for indices behind the last of them, which what was computed of zeros might not be.

    Raises ``ValueError`` for an operator of which no rule is known, and for inputs that were counted apart.
    """
    from tvm import relax

    first, *others = [each for each in rows if each is not None]
    if operator not in _RULES:
        raise _mixed(first)
    if any(not each.count.same_as(first.count) for each in others):
        raise ValueError(f"it must take as many of each input, but {first.operator} counts them several times; end the "
                         "model before it")
    place = _INDICES.get(operator)
    if place is None or place >= len(rows) or (own := rows[place]) is None:
        return inputs
    indices = inputs[place]
    shape = [size_of(size) for size in indices.ty.shape]
    size = shape[own.axis]
    counted = bb.normalize(relax.op.arange(0, getattr(size, "expr", size), 1, "int64"))
    wide = [1] * len(shape)
    wide[own.axis] = getattr(size, "expr", size)
    there = bb.normalize(relax.op.less(bb.normalize(relax.op.reshape(counted, wide)), own.count))
    zero = relax.const(0, dtype_of(indices))
    masked = bb.emit(relax.op.where(there, indices, zero))
    return type(inputs)(masked if i == place else each for i, each in enumerate(inputs))


#: operators that read at places --> which input these are
_INDICES = {"Gather": 1, "GatherND": 1}


def _shape(value: Any) -> list[Any]:
    """The sizes of a tensor, or of its type."""
    return [size_of(size) for size in getattr(value, "ty", value).shape]


def _same(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """Elementwise, of inputs that are broadcast."""
    from_end = {len(_shape(value)) - rows.axis for value, rows in given if rows is not None}
    if len(from_end) != 1:
        return None
    (place,) = from_end
    for value, rows in given:
        if value is not None and rows is None and not _has_one(value, place):
            return None
    return len(_shape(made[0])) - place


def _has_one(value: Any, place: int) -> bool:
    """Whether a tensor, or sizes, has one index, or no axis, at a place counted from the end."""
    shape = list(value.values.shape) if isinstance(value, Sizes) else _shape(value)
    return len(shape) < place or (isinstance(shape[-place], int) and shape[-place] == 1)


def _divided(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """Whole numbers are divided by what is never 0 behind the last of them."""
    value, rows = given[1]
    return None if rows is not None and not dtype_of(value).startswith("float") else _same(given, attrs, made)


def _alone(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """The rows of the first input, whose positions do not change."""
    own = given[0][1]
    return own.axis if own is not None and all(rows is None for _, rows in given[1:]) else None


def _axes(given: Given, attrs: Mapping[str, Any]) -> list[int] | None:
    found = attrs.get("axes")
    if found is None and len(given) > 1 and given[1][0] is not None:
        found = array_of(given[1][0])
    return None if found is None else [int(axis) for axis in np.asarray(found).reshape(-1)]


def _unsqueezed(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    axis, axes = _alone(given, attrs, made), _axes(given, attrs)
    if axis is None or axes is None:
        return None
    rank = len(_shape(made[0]))
    new = {each % rank for each in axes}
    return [each for each in range(rank) if each not in new][axis]


def _squeezed(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    axis, axes = _alone(given, attrs, made), _axes(given, attrs)
    if axis is None or axes is None:  # without axes it would depend on whether there is one
        return None
    gone = {each % len(_shape(given[0][0])) for each in axes}
    return None if axis in gone else axis - sum(each < axis for each in gone)


def _transposed(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    axis = _alone(given, attrs, made)
    rank = len(_shape(given[0][0]))
    order = [int(each) for each in attrs["perm"]] if "perm" in attrs else list(range(rank))[::-1]
    return None if axis is None else order.index(axis)


def _gathered(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    (data, data_rows), (indices, index_rows) = given
    rank, more = len(_shape(data)), len(_shape(indices))
    axis = int(attrs.get("axis", 0)) % rank
    if data_rows is None and index_rows is not None:
        return axis + index_rows.axis
    if data_rows is None or index_rows is not None or data_rows.axis == axis:
        return None
    return data_rows.axis + (more - 1 if data_rows.axis > axis else 0)


def _gathered_places(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    (_, data_rows), (indices, rows) = given
    whole = data_rows is None and rows is not None and not int(attrs.get("batch_dims", 0))
    return rows.axis if whole and rows is not None and rows.axis < len(_shape(indices)) - 1 else None


def _other_axes(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """Along axes of which it is none, that stay."""
    axis = _alone(given, attrs, made)
    return None if axis is None or int(attrs.get("axis", -1)) % len(_shape(given[0][0])) == axis else axis


def _of_rows(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """Over an axis and all behind it."""
    axis = _alone(given, attrs, made)
    return axis if axis is not None and axis < int(attrs.get("axis", 1)) % len(_shape(given[0][0])) else None


def _split(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    return _other_axes(given, {"axis": attrs.get("axis", 0)}, made)


def _joined(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    axes = {None if rows is None else rows.axis for _, rows in given}
    axis = next(iter(axes))
    return axis if len(axes) == 1 and int(attrs["axis"]) % len(_shape(made[0])) != axis else None


def _sliced(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    axis = _alone(given, attrs, made)
    rank = len(_shape(given[0][0]))
    if "starts" in attrs:
        axes = attrs.get("axes", range(len(attrs["starts"])))
    else:
        known = array_of(given[3][0]) if len(given) > 3 and given[3][0] is not None else None
        axes = list(range(rank)) if known is None else known.reshape(-1)
    return None if axis in {int(each) % rank for each in axes} else axis


def _reduced(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    axis, axes = _alone(given, attrs, made), _axes(given, attrs)
    if axis is None or not axes:
        return None
    gone = {each % len(_shape(given[0][0])) for each in axes}
    if axis in gone:
        return None
    return axis if int(attrs.get("keepdims", 1)) else axis - sum(each < axis for each in gone)


def _best(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    return _reduced(given[:1], {"axes": [int(attrs.get("axis", 0))], "keepdims": attrs.get("keepdims", 1)}, made)


def _reshaped(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """An axis with as much before it and behind it as it had."""
    axis = _alone(given, attrs, made)
    if axis is None:
        return None
    old, new, wanted = _shape(given[0][0]), _shape(made[0]), given[1][0]
    values = wanted.values if isinstance(wanted, Sizes) else array_of(wanted)
    if values is None:
        return None
    said = list(values.reshape(-1))
    kept = axis < len(said) and said[axis] == 0
    return next((place for place, size in enumerate(new)
                 if size == old[axis] and math.prod(new[:place]) == math.prod(old[:axis])
                 and math.prod(new[place + 1:]) == math.prod(old[axis + 1:])
                 and (place == axis if kept else said[place] == -1)), None)


def _flattened(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """``Flatten`` to two axes; an axis of data-dependent length must not be merged with another one."""
    axis, old = _alone(given, attrs, made), _shape(given[0][0])
    if axis is None:
        return None
    cut = int(attrs.get("axis", 1))
    cut += len(old) if cut < 0 else 0
    place, first, end = (0, 0, cut) if axis < cut else (1, cut, len(old))
    alone = all(isinstance(size, int) and size == 1 for i, size in enumerate(old) if first <= i < end and i != axis)
    return place if alone else None


def _multiplied(given: Given, attrs: Mapping[str, Any], made: Sequence[Any]) -> int | None:
    """Rows of the first factor, with one row or none to add."""
    axis, rank = _alone(given, attrs, made), len(_shape(given[0][0]))
    if axis is None or rank < 2 or axis != rank - 2 or int(attrs.get("transA", 0)) or len(_shape(given[1][0])) != 2:
        return None
    return axis if all(value is None or _has_one(value, 2) for value, _ in given[2:]) else None


_ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual",
    "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
    "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
)
_REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
               "ReduceProd", "ReduceSum", "ReduceSumSquare")
_RULES: Mapping[str, Callable[[Given, Mapping[str, Any], Sequence[Any]], int | None]] = {
    **dict.fromkeys(_ELEMENTWISE, _same), **dict.fromkeys(_REDUCTIONS, _reduced),
    "ArgMax": _best, "ArgMin": _best, "Concat": _joined, "Div": _divided, "Flatten": _flattened, "Gather": _gathered,
    "GatherND": _gathered_places, "Gemm": _multiplied, "LogSoftmax": _other_axes, "MatMul": _multiplied,
    "Mod": _divided, "Reshape": _reshaped, "Slice": _sliced, "Softmax": _other_axes, "Split": _split,
    "Squeeze": _squeezed, "Transpose": _transposed, "Unsqueeze": _unsqueezed,
}
#: operators that worked on rows, of all axes from one on, before the opset from which on they work on an axis
_OF_ROWS, _OF_AN_AXIS = ("LogSoftmax", "Softmax"), 13
