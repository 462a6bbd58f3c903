"""Operators that select some of their elements (``NonZero``, ``Compress``, ...): the data decide how many.

Each returns a tensor of the largest possible length, zeros behind the selected positions, and the actual count. Zero is
a valid position, so reading at the padding is safe; :mod:`mlc.frontend.onnx_dynamic_lengths` carries the count to the
model's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, dtype_of, input_at
from mlc.sizes import Size, bounds_of, renamed, size_of, variables_of

__all__ = ["PLACES", "SELECTIONS", "nonmax_suppression", "nonzero"]

#: how the names of functions begin that give places, which are never negative
PLACES = ("nonmax_suppression", "nonzero")
#: functions that nothing is fused with, TVM's kOpaque
_OPAQUE = 8


def nonzero(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, Any]:
    """``NonZero(X)`` --> places ``[axes, at most as many as elements]``, and how many there are."""
    from tvm import relax

    x = inputs[0]
    if not list(x.ty.shape):
        x = bb.normalize(relax.op.reshape(x, (1,)))
    shape = [size_of(size) for size in x.ty.shape]
    return _called(bb, "nonzero", [x], (len(shape), math.prod(shape)), shape, _places)


def nonmax_suppression(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, Any]:
    """``NonMaxSuppression(boxes, scores, most, iou_threshold, score_threshold)`` --> rows of an image, a class and a
    box, and how many."""
    from tvm import relax

    boxes, scores, most, overlap, least = (input_at(inputs, place) for place in range(5))
    filters = least is not None
    (images, count, sides), (others, classes, scored) = (
        [size_of(size) for size in each.ty.shape] for each in (boxes, scores))
    if sides != 4 or images != others or count != scored:
        raise ValueError(f"boxes must be [images, boxes, 4] and scores [images, classes, boxes], got "
                         f"{[images, count, sides]} and {[others, classes, scored]}")
    for each, what in ((boxes, "boxes"), (scores, "scores")):
        if dtype_of(each) != "float32":
            raise ValueError(f"{what} must be float32, got {dtype_of(each)}")
    known = np.zeros(1, "int64") if most is None else array_of(most)
    bound = count if known is None else _least(max(1, int(known.reshape(-1)[0])), count)
    given = [
        boxes, scores, _one(bb, most if most is not None else relax.const(np.zeros(1), "int64"), "int64"),
        *(_one(bb, each if each is not None else relax.const(np.zeros(1), "float32"), "float32")
          for each in (overlap, least)),
    ]
    centres = bool(attrs.get("center_point_box", 0))
    return _called(bb, "nonmax_suppression", given, (images * classes * bound, 3), [images, classes, count, bound],
                   partial(_suppressed, centres=centres, filters=filters))


#: ONNX's operator --> its converter, and the axis along which there are as many as the numbers say
SELECTIONS: Mapping[str, tuple[Callable[..., tuple[Any, Any]], int]] = {
    "NonMaxSuppression": (nonmax_suppression, 0), "NonZero": (nonzero, 1),
}


def _least(number: int, size: Any) -> Any:
    """The smaller of a number and a size, or what is never smaller than that."""
    most = bounds_of(size.expr)[1] if isinstance(size, Size) else size
    return number if number <= most else size


def _one(bb: Any, value: Any, dtype: str) -> Any:
    from tvm import relax

    value = bb.normalize(relax.op.reshape(value, (1,)))
    return value if dtype_of(value) == dtype else bb.normalize(relax.op.astype(value, dtype))


def _called(
    bb: Any, name: str, given: Sequence[Any], shape: Sequence[Any], sizes: Sequence[Any],
    body: Callable[[Sequence[Any], Any, Any, Sequence[Any]], None],
) -> tuple[Any, Any]:
    """A call of the function whose statements ``body`` writes, of ``(given, result, count, sizes)``, for a result of
    int64 in that shape and a count of what is in it."""
    from tvm import relax, tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as I

    tensors = [bb.emit(each) for each in given]
    dims = [[size_of(size) for size in each.ty.shape] for each in tensors]
    free = variables_of([*(size for each in dims for size in each), *shape, *sizes])
    alone = {size.expr for each in dims for size in each if isinstance(size, Size) and isinstance(size.expr, tirx.Var)}
    own = {var: tirx.Var(str(var.name), "int64") for var in free}

    def inside(values: Sequence[Any]) -> list[Any]:
        return [renamed(each, own).expr if isinstance(each, Size) else tirx.const(int(each), "int64")
                for each in values]

    extra = [var for var in free if var not in alone]
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name(name)
        I.func_attr({"tirx.noalias": True, "op_pattern": _OPAQUE})
        read = [I.arg(f"x{place}", I.buffer(tuple(inside(each)), dtype_of(tensor)))
                for place, (each, tensor) in enumerate(zip(dims, tensors, strict=True))]
        for var in extra:
            I.arg(str(var.name), own[var])
        result = I.arg("result", I.buffer(tuple(inside(shape)), "int64"))
        count = I.arg("count", I.buffer((1,), "int64"))
        with I.sblock(name):
            I.reads(*(_whole(each) for each in read))
            I.writes(_whole(result), _whole(count))
            I.buffer_store(count, tirx.const(0, "int64"), [0])
            body(read, result, count, inside(sizes))
    func = builder.get().without_attr("global_symbol")
    types = [relax.TensorType([getattr(size, "expr", size) for size in shape], "int64"),
             relax.TensorType([1], "int64")]
    arguments = relax.Tuple([*tensors, *extra])
    made = bb.emit(relax.op.call_tir(bb.add_func(func, name), arguments, types))
    return relax.TupleGetItem(made, 0), relax.TupleGetItem(made, 1)


def _whole(buffer: Any) -> Any:
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]


def _places(read: Sequence[Any], result: Any, count: Any, shape: Sequence[Any]) -> None:
    from tvm import tirx
    from tvm.script.ir_builder import tirx as I

    (x,) = read
    with I.grid(*shape) as loops:
        at = [loops] if isinstance(loops, tirx.Var) else list(loops)
        value = x[tuple(at)]
        with I.If(tirx.Cast("bool", value)), I.Then():  # comparing with 0 would leave out what is no number
            for axis, index in enumerate(at):
                I.buffer_store(result, tirx.Cast("int64", index), [axis, count[0]])
            I.buffer_store(count, count[0] + 1, [0])
    with I.serial(0, result.shape[1] - count[0]) as rest:
        for axis in range(len(shape)):
            I.buffer_store(result, tirx.const(0, "int64"), [axis, count[0] + rest])


def _suppressed(
    read: Sequence[Any], result: Any, count: Any, sizes: Sequence[Any], centres: bool, filters: bool
) -> None:
    """The best box of those that are left is taken, and those that it overlaps are not left any longer."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as I

    boxes, scores, most, overlap, least = read
    images, classes, extent, bound = sizes
    left = I.sblock_alloc_buffer((extent,), "int64")
    state = I.sblock_alloc_buffer((3,), "int64", scope="local")  # how many are left, the best, how many are kept
    zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")
    with I.grid(images, classes) as (image, kind):
        I.buffer_store(state, zero, [0])
        with I.serial(0, extent) as n, I.If(
                scores[image, kind, n] > least[0] if filters else tirx.const(True, "bool")), I.Then():
            I.buffer_store(left, tirx.Cast("int64", n), [state[0]])
            I.buffer_store(state, state[0] + one, [0])
        with I.serial(0, tirx.max(tirx.min(bound, most[0]), zero)), I.If(state[0] > zero), I.Then():
            I.buffer_store(state, zero, [1])
            with I.serial(0, state[0]) as j, I.If(
                    scores[image, kind, left[j]] > scores[image, kind, left[state[1]]]), I.Then():
                I.buffer_store(state, tirx.Cast("int64", j), [1])
            for place, value in enumerate((image, kind, left[state[1]])):
                I.buffer_store(result, tirx.Cast("int64", value), [count[0], place])
            I.buffer_store(state, zero, [2])
            best = result[count[0], 2]
            with I.serial(0, state[0]) as j, I.If(tirx.all(
                    tirx.Cast("int64", j) != state[1],
                    tirx.Not(_overlap(boxes, image, best, left[j], overlap[0], centres)))), I.Then():
                I.buffer_store(left, left[j], [state[2]])
                I.buffer_store(state, state[2] + one, [2])
            I.buffer_store(state, state[2], [0])
            I.buffer_store(count, count[0] + one, [0])
    with I.serial(0, result.shape[0] - count[0]) as rest:
        for place in range(3):
            I.buffer_store(result, zero, [count[0] + rest, place])


def _overlap(boxes: Any, image: Any, first: Any, second: Any, threshold: Any, centres: bool) -> Any:
    """Whether two boxes have more of the area of both in common than the threshold says."""
    from tvm import tirx

    def side(box: Any, axis: int) -> tuple[Any, Any]:
        """Where a box begins and ends along an axis."""
        a, b = boxes[image, box, axis], boxes[image, box, axis + 2]
        if centres:
            half = b / tirx.const(2.0, "float32")
            return a - half, a + half
        return tirx.min(a, b), tirx.max(a, b)

    sides = [(side(first, axis), side(second, axis)) for axis in (0, 1)]
    shared = [tirx.min(one[1], other[1]) - tirx.max(one[0], other[0]) for one, other in sides]
    common = shared[0] * shared[1]
    areas = [(sides[0][which][1] - sides[0][which][0]) * (sides[1][which][1] - sides[1][which][0])
             for which in (0, 1)]
    zero, union = tirx.const(0.0, "float32"), areas[0] + areas[1] - common
    return tirx.all(shared[0] > zero, shared[1] > zero, common > zero, areas[0] > zero, areas[1] > zero, union > zero,
                    common / union > threshold)
