"""Nodes that compute sizes: with free dimensions, the results of ``Shape``, ``Gather`` and ``Concat`` are symbolic
expressions.

While such a graph is imported, whole numbers that depend on a shape are :class:`Sizes`, never tensors. Arithmetic on
them happens here; what takes a shape reads it from them. With
static inputs nothing of this is reached: such values are folded before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from mlc.frontend.onnx_gather_nd import gather_nd
from mlc.frontend.onnx_resize import resize
from mlc.frontend.onnx_values import array_of
from mlc.sizes import Size, UndecidedSizeError, bounds_of, size_of

__all__ = ["Sizes", "as_tensor", "convert"]

#: integers and sizes, as objects; the operator's attributes
_Arithmetic = Callable[[Sequence[np.ndarray], Mapping[str, Any]], Any]


#: ONNX's types of whole numbers that sizes are: int32 and int64
_WHOLE = (6, 7)


@dataclass(frozen=True)
class Sizes:
    """A value of whole numbers some of which are free: ``values`` holds integers and :class:`mlc.sizes.Size`."""

    values: np.ndarray
    ty: Any = None  # what the importer asks of any value


def convert(bb: Any, name: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """A node's result where it is about sizes, else None: an expression, or :class:`Sizes`.

    Raises :class:`UndecidedSizeError` for sizes whose arithmetic is not known here.
    """
    if name == "Shape":
        return _shape(inputs, attrs)
    if name == "GatherND" and _is_free(inputs[0]):
        return gather_nd(bb, inputs, attrs)
    sized = any(isinstance(given, Sizes) for given in inputs)
    if not sized and not (name in _RESHAPING and len(inputs) > 1 and _is_free(inputs[0])):
        return _structure(name, inputs, attrs)
    if name in _CONSUMERS:
        made = _CONSUMERS[name](bb, inputs, attrs)
        if made is not None:
            return made
    if not sized:
        return None
    if name == "Cast" and int(attrs["to"]) not in _WHOLE:
        return _as_data(bb, inputs[0], int(attrs["to"]))
    values = [_values(given) for given in inputs if given is not None]
    if name in _ARITHMETIC and all(value is not None for value in values):
        return _expression(np.asarray(_ARITHMETIC[name]([v for v in values if v is not None], attrs), dtype=object))
    if name in _OPERATORS and all(given is not None for given in inputs):
        return _with_data(bb, name, inputs)
    raise UndecidedSizeError(f"{name} must not be given sizes that are free; fix them, as in --shape NAME=8,128")


def _structure(name: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """What is taken from and put together of the sizes of a shape that are numbers: TVM's converters would make tensors
    of them, and none of these is a shape."""
    if name not in _STRUCTURE:
        return None
    arrays = [array_of(given) for given in inputs if given is not None]
    small = [a.astype(object) for a in arrays if a is not None and a.dtype == np.int64 and a.size <= _LONGEST]
    return _expression(np.asarray(_ARITHMETIC[name](small, attrs))) if small and len(small) == len(arrays) else None


def _as_data(bb: Any, sizes: Sizes, to: int) -> Any:
    """Sizes as a tensor of ONNX's type ``to``, as of a length that data is divided by."""
    from onnx import helper
    from tvm import relax

    return relax.op.astype(_as_tensor(bb, sizes), helper.tensor_dtype_to_np_dtype(to).name)


def _with_data(bb: Any, name: str, inputs: Sequence[Any]) -> Any:
    """Arithmetic of data and sizes, such as the positions of tokens behind so many others."""
    from tvm import relax

    operator = getattr(relax.op, _OPERATORS[name])
    return operator(*(_as_tensor(bb, each) if isinstance(each, Sizes) else each for each in inputs))


def as_tensor(bb: Any, size: Size) -> Any:
    """A size as a tensor of int64 without axes."""
    return _as_tensor(bb, Sizes(_array([size]).reshape(())))


def _as_tensor(bb: Any, sizes: Sizes) -> Any:
    """Sizes as a tensor of int64: each is the only number of a range that begins with it."""
    from tvm import relax

    if sizes.values.size > _LONGEST:
        raise UndecidedSizeError(f"at most {_LONGEST} free sizes may meet data, got {sizes.values.size}; fix them, as "
                                 "in --shape NAME=8,128")
    begins = [size.expr if isinstance(size, Size) else int(size) for size in sizes.values.flat]
    numbers = [bb.normalize(relax.op.arange(begin, begin + 1, 1, "int64")) for begin in begins]
    whole = bb.normalize(relax.op.concat(numbers)) if len(numbers) > 1 else numbers[0]
    return bb.normalize(relax.op.reshape(whole, sizes.values.shape))


def _is_free(expr: Any) -> bool:
    """Whether a tensor has free dimensions."""
    return not isinstance(expr, Sizes) and any(isinstance(size_of(d), Size) for d in expr.ty.shape)


def _shape(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    dims = _array([size_of(d) for d in inputs[0].ty.shape])
    return _expression(dims[int(attrs.get("start", 0)):attrs.get("end")])


def _array(values: Sequence[Any]) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def _values(expr: Any) -> np.ndarray | None:
    """The whole numbers and sizes that a value holds; None where it is data."""
    if isinstance(expr, Sizes):
        return expr.values
    array = array_of(expr)
    return array.astype(object) if array is not None and array.dtype.kind in "biu" else None


def _expression(values: np.ndarray) -> Any:
    """A constant of whole numbers, or :class:`Sizes` where one is among them."""
    from tvm import relax

    if any(isinstance(v, Size) for v in values.flat):
        return Sizes(values)
    kind = "bool" if values.size and all(isinstance(v, bool | np.bool_) for v in values.flat) else "int64"
    return relax.const(values.astype(kind), kind)


# Arithmetic


def _gather(values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Any:
    return np.take(values[0], values[1].astype("int64"), axis=int(attrs.get("axis", 0)))


def _slice(values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Any:
    data, *rest = values
    before = [attrs[name] for name in ("starts", "ends", "axes") if name in attrs]  # opset 10
    starts, ends, *more = before or [v.astype("int64").reshape(-1).tolist() for v in rest]
    axes = more[0] if more else list(range(len(starts)))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end if end > -(1 << 31) else None, step)
    return data[tuple(index)]


def _unsqueeze(values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Any:
    axes = attrs["axes"] if "axes" in attrs else values[1].astype("int64").reshape(-1).tolist()
    return np.expand_dims(values[0], tuple(int(axis) for axis in axes))


def _squeeze(values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Any:
    if "axes" in attrs or len(values) > 1:
        axes = attrs["axes"] if "axes" in attrs else values[1].astype("int64").reshape(-1).tolist()
        return values[0].reshape([n for i, n in enumerate(values[0].shape)
                                  if i not in {int(axis) % values[0].ndim for axis in axes}])
    return values[0].reshape([n for n in values[0].shape if n != 1])


def _where(values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Any:
    condition, *cases = np.broadcast_arrays(*values)
    made = np.empty(condition.shape, dtype=object)
    for place in np.ndindex(*condition.shape):
        made[place] = cases[0 if bool(condition[place]) else 1][place]
    return made


def _elementwise(function: Callable[[Any, Any], Any]) -> _Arithmetic:
    def compute(values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Any:
        result = values[0]
        for other in values[1:]:
            left, right = np.broadcast_arrays(result, other)
            made = np.empty(left.shape, dtype=object)
            for place in np.ndindex(*left.shape):
                made[place] = function(left[place], right[place])
            result = made
        return result

    return compute


def _equal(a: Any, b: Any) -> bool:
    """Decided: not always equal is not the same as never equal."""
    low, high = _difference(a, b)
    if low == high == 0:
        return True
    if low > 0 or high < 0:
        return False
    raise UndecidedSizeError(f"whether {a} is {b} must not depend on a free size; fix it, as in --shape NAME=8,128")


def _divided(a: Any, b: Any) -> Any:
    if b < 0 or (a < 0):
        raise UndecidedSizeError(f"a division of sizes must be of positive ones, got {a} / {b}")
    return a // b


def _minimum(a: Any, b: Any) -> Any:
    return _smaller(a, b, tirx.min)[0]


def _maximum(a: Any, b: Any) -> Any:
    return _smaller(a, b, tirx.max)[1]


def _smaller(a: Any, b: Any, otherwise: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Both, the one first that is never larger; what each call computes of them where that depends on a size."""
    low, high = _difference(a, b)
    if high <= 0:
        return a, b
    if low >= 0:
        return b, a
    made = Size(otherwise(*(each.expr if isinstance(each, Size) else tirx.const(each, "int64") for each in (a, b))))
    return made, made


def _difference(a: Any, b: Any) -> tuple[int, int]:
    """The smallest and the largest value of ``a - b``."""
    difference = a - b
    return bounds_of(difference.expr) if isinstance(difference, Size) else (int(difference), int(difference))


_ARITHMETIC: dict[str, _Arithmetic] = {
    "Add": _elementwise(lambda a, b: a + b),
    "Cast": lambda values, attrs: values[0],
    "Concat": lambda values, attrs: np.concatenate(list(values), axis=int(attrs["axis"])),
    "Div": _elementwise(_divided),
    "Equal": _elementwise(_equal),
    "Gather": _gather,
    "Identity": lambda values, attrs: values[0],
    "Max": _elementwise(_maximum),
    "Min": _elementwise(_minimum),
    "Mod": _elementwise(lambda a, b: a % b),
    "Mul": _elementwise(lambda a, b: a * b),
    "ReduceProd": lambda values, attrs: _product(values[0], attrs),
    "Reshape": lambda values, attrs: values[0].reshape(values[1].astype("int64").tolist()),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(lambda a, b: a - b),
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}


def _product(values: np.ndarray, attrs: Mapping[str, Any]) -> Any:
    whole = np.empty((1,) if int(attrs.get("keepdims", 1)) else (), dtype=object)
    whole[...] = math.prod(values.flat)
    return whole


# What takes a shape


def _target(expr: Any) -> list[Any]:
    values = _values(expr)
    if values is None:
        raise UndecidedSizeError("a shape must follow from sizes and constants alone, but it depends on data")
    return list(values.reshape(-1))


def _reshape(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    from tvm import relax

    if isinstance(inputs[0], Sizes):
        return None
    source = [size_of(d) for d in inputs[0].ty.shape]
    shape = _target(inputs[1])
    for axis, size in enumerate(shape):
        if not isinstance(size, Size) and size == 0 and not int(attrs.get("allowzero", 0)):
            shape[axis] = source[axis]
    open_ = [axis for axis, size in enumerate(shape) if not isinstance(size, Size) and size == -1]
    if open_:
        shape[open_[0]] = _quotient(source, [s for axis, s in enumerate(shape) if axis != open_[0]])
    elif math.prod(source) != math.prod(shape):
        raise ValueError(f"a tensor of shape {source} must have as many elements as {shape} for every size")
    return relax.op.reshape(inputs[0], [s.expr if isinstance(s, Size) else int(s) for s in shape])


def _quotient(source: Sequence[Any], known: Sequence[Any]) -> Any:
    """The size that makes the product of ``known`` sizes that of ``source``, for every size of the free ones."""
    left, right = list(source), list(known)
    for size in known:
        if isinstance(size, Size) and (match := next((s for s in left if isinstance(s, Size) and s == size), None)):
            left.remove(match)
            right.remove(size)
    whole, part = math.prod(left), math.prod(right)
    found = whole // part
    if not found * part == whole:
        raise ValueError(f"the -1 of a reshape must be one size for every size that is free, but {whole} elements in "
                         f"{part} rows have none")
    return found


def _expand(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    from tvm import relax

    if isinstance(inputs[0], Sizes):
        return None
    source, shape = [size_of(d) for d in inputs[0].ty.shape], _target(inputs[1])
    rank = max(len(source), len(shape))
    source, shape = [1] * (rank - len(source)) + source, [1] * (rank - len(shape)) + shape
    whole = []
    for a, b in zip(source, shape, strict=True):
        if not (a == b or _is_one(a) or _is_one(b)):
            raise UndecidedSizeError(f"sizes that are broadcast must be equal or 1, got {a} and {b}; fix them")
        whole.append(b if _is_one(a) else a)
    return relax.op.broadcast_to(inputs[0], [s.expr if isinstance(s, Size) else int(s) for s in whole])


def _is_one(size: Any) -> bool:
    return not isinstance(size, Size) and size == 1


def _range(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    from tvm import relax

    start, end, step = (_target(each)[0] for each in inputs)
    if (_difference(start, 0)[0] < 0) or step != 1:
        raise UndecidedSizeError("a Range to a free size must start at a number that is not negative and go by 1; fix "
                                 "the size, as in --shape NAME=8,128")
    begin, end = (size.expr if isinstance(size, Size) else int(size) for size in (start, end))
    return relax.op.arange(begin, end, 1, "int64")


def _constant_of_shape(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    from onnx import numpy_helper
    from tvm import relax

    value = numpy_helper.to_array(attrs["value"]).reshape(()) if "value" in attrs else np.array(0, dtype="float32")
    shape = [s.expr if isinstance(s, Size) else int(s) for s in _target(inputs[0])]
    return relax.op.full(relax.ShapeExpr(shape), relax.const(value), str(value.dtype))


def _sorted(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """``TopK`` of as many as there are: the axis sorted."""
    from tvm import relax

    x, count = inputs
    if isinstance(x, Sizes) or not isinstance(count, Sizes) or count.values.size != 1:
        return None
    axis = int(attrs.get("axis", -1)) % len(x.ty.shape)
    if count.values.reshape(-1)[0] != size_of(x.ty.shape[axis]):
        return None
    order = bb.emit(relax.op.argsort(x, axis, bool(attrs.get("largest", 1)), "int64"))
    return relax.Tuple([bb.emit(relax.op.gather_elements(x, order, axis)), order])


def _cut(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """``Slice`` of data by sizes, of which the order must be known for all of their range."""
    from tvm import relax

    if isinstance(inputs[0], Sizes):
        return None
    extents = [size_of(d) for d in inputs[0].ty.shape]
    starts, ends, axes, steps = (
        _target(inputs[i]) if i < len(inputs) and inputs[i] is not None else None for i in range(1, 5))
    assert starts is not None and ends is not None
    axes = [int(axis) % len(extents) for axis in axes] if axes is not None else list(range(len(starts)))
    if not any(isinstance(size, Size) for size in (*starts, *ends, *(extents[axis] for axis in axes))):
        return None
    steps = [1] * len(axes) if steps is None else [int(step) for step in steps]
    if any(step < 0 for step in steps):
        return _backwards(bb, inputs[0], axes, starts, ends, steps)
    begins, stops = ([_clamped(v, extents[axis]) for v, axis in zip(values, axes, strict=True)]
                     for values in (starts, ends))
    words = [[v.expr if isinstance(v, Size) else int(v) for v in values] for values in (begins, stops)]
    return relax.op.strided_slice(inputs[0], axes, *words, steps, assume_inbound=True)


def _backwards(
    bb: Any, x: Any, axes: Sequence[int], starts: Sequence[Any], ends: Sequence[Any], steps: Sequence[int]
) -> Any:
    """``Slice`` some of whose steps are negative: each such axis is reversed, and cut by positive ones.

    From ``start`` down to, without it, ``end`` is from ``n - 1 - start`` up to ``n - 1 - end``.
    """
    from tvm import relax

    extents = [size_of(d) for d in x.ty.shape]
    begins, stops = [], []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        extent = extents[axis]
        if step > 0:
            begins.append(_clamped(start, extent))
            stops.append(_clamped(end, extent))
            continue
        x = bb.normalize(relax.op.flip(x, axis))
        begins.append(extent - 1 - _from_end(start, extent))
        stops.append(extent - 1 - _from_end(end, extent))
    words = [[v.expr if isinstance(v, Size) else int(v) for v in values] for values in (begins, stops)]
    return relax.op.strided_slice(x, list(axes), *words, [abs(step) for step in steps], assume_inbound=True)


def _from_end(position: Any, extent: Any) -> Any:
    """A position of a ``Slice`` that goes backwards, as one from -1 to ``extent - 1``."""
    if not isinstance(position, Size) and position < -(1 << 31):
        return -1
    if not isinstance(position, Size) and position < 0:
        return _maximum(position + extent, -1)
    if not isinstance(position, Size) and position >= 1 << 31:
        return extent - 1
    return _minimum(position, extent - 1)


def _clamped(position: Any, extent: Any) -> Any:
    """A position of ``Slice`` as one from 0 to ``extent``."""
    if not isinstance(position, Size) and position < 0:
        return _maximum(position + extent, 0)
    if not isinstance(position, Size) and position >= 1 << 31:
        return extent
    return _minimum(position, extent)


#: operators that take and put together what is there
_STRUCTURE = frozenset({"Concat", "Gather", "Slice", "Squeeze", "Unsqueeze"})
_LONGEST = 64  # elements of what may be a shape

#: operators of data and a size --> Relax's
_OPERATORS: dict[str, str] = {
    "Add": "add", "Equal": "equal", "Greater": "greater", "GreaterOrEqual": "greater_equal", "Less": "less",
    "LessOrEqual": "less_equal", "Max": "maximum", "Min": "minimum", "Mul": "multiply", "Sub": "subtract",
}

#: what TVM's converters know no shape of where data with free dimensions is given numbers
_RESHAPING = frozenset({"Expand", "Reshape", "Slice"})

_CONSUMERS: dict[str, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": resize,
    "Slice": _cut,
    "TopK": _sorted,
}
