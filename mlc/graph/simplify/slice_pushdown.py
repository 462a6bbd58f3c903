"""Elements that nothing reads are not computed: slices are pushed towards the inputs, past what commutes with them.

A classifier reads one token of an encoder, and of the last block's layers all tokens but this one are computed for
nothing. Going backwards through main, every tensor gets the *window* that is read of it: the smallest box of elements
that holds what each of its readers needs. An operator of which at most half is read is then computed for the window:

=========================================  =====================================================
before                                     after
=========================================  =====================================================
``f(x, y)[w]``, elementwise                ``f(x[w], y[w])``, whole along axes that broadcast
``matmul(x, y)[.., i:j, k:l]``             ``matmul(x[.., i:j, :], y[.., :, k:l])``
``conv(x, y)[i:j, k:l]``                   ``conv(x[i:j], y[k:l])``
``softmax(x)[w]``, norms, reductions       the same of ``x[w]``, all along their own axes
``permute_dims(x)[w]``, ``reshape(x)[w]``  the same of what these elements are in ``x``
``concat((x, y))[w]``                      the parts that ``w`` meets, what it meets of each
``take(x, i)[w]``                          ``take(x[w'], i[w''])``
=========================================  =====================================================

A window may be what is taken at places that each call decides, as the token is that ends a text of any length. What
commutes with the slice of one element at every place commutes with a take along that axis, which is a concatenation of
such slices: so the laws are the same, but for slices and concatenations along the axis itself, which know no place.

Where readers need different parts, what they do not share is computed as before: keys and values of all tokens, the
query of one. A window along an axis of free size has bounds in numbers, or is all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import SLICE, cuts, permutation
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, op_name, rebuilt, shape_of
from mlc.operators import relax_where
from mlc.operators.shapes import fixed
from mlc.sizes import UndecidedSizeError, usual_size

__all__ = ["DropUnread"]


@dataclass(frozen=True)
class Taken:
    """The elements of an axis at places that are known when the model runs: the ``count`` elements of a tensor
    ``indices``, in row-major order, in the way of a ``take`` with this ``mode``."""

    indices: relax.Var
    mode: str
    count: int


#: of an axis: ``(begin, end)``, or places that are not known yet; None is all of it
Cut: TypeAlias = "tuple[int, int] | Taken | None"
#: a cut along each axis
Window: TypeAlias = "tuple[Cut, ...]"
Shape: TypeAlias = Sequence[int]
#: part of an operator's elements that is read at most where it is computed for these alone: moving a slice of nearly
#: all saves little, and leaves odd sizes
_WORTH = 0.5
#: element by element as well: what masks are made and used by
_CHOOSING = ("where", "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and",
             "logical_or", "logical_not")


@dataclass(frozen=True)
class Part:
    """``window`` of an operator's result is to be computed of ``operands``: windows of its tensors, in their order,
    None of those that are not read at all. ``build(tensors)`` is the expression, of the operands' windows."""

    window: Window
    operands: tuple[Window | None, ...]
    build: Callable[[list[relax.Expr]], relax.Expr]


#: the part of a call that covers a window of its result; None where there is none but the whole
Law: TypeAlias = "Callable[[relax.Call, Window], Part | None]"


def _whole(rank: int) -> Window:
    return (None,) * rank


def _hull(one: Window, other: Window) -> Window:
    def both(a: Cut, b: Cut) -> Cut:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return min(a[0], b[0]), max(a[1], b[1])
        return a if a == b else None

    return tuple(map(both, one, other))


def _length(cut: tuple[int, int] | Taken) -> int:
    return cut.count if isinstance(cut, Taken) else cut[1] - cut[0]


def _known(window: Window, axes: Collection[int] | None = None) -> Window:
    """The window with all of ``axes`` (every one, if none are named) that are cut at places that are not known yet."""
    return tuple(None if isinstance(cut, Taken) and (axes is None or axis in axes) else cut
                 for axis, cut in enumerate(window))


def _normal(window: Window, shape: Shape) -> Window:
    """None along the axes of which it is all."""
    return tuple(None if cut is None or cut == (0, size) else cut for cut, size in zip(window, shape, strict=True))


def _sizes(window: Window, shape: Shape) -> tuple[int, ...]:
    return tuple(size if cut is None else _length(cut) for cut, size in zip(window, shape, strict=True))


def _worth(window: Window, shape: Shape) -> bool:
    parts = [_length(cut) / usual_size(size) for cut, size in zip(window, shape, strict=True) if cut is not None]
    return math.prod(parts) <= _WORTH


def _tensors(call: relax.Call) -> list[relax.Expr]:
    """The operands that are tensors, those of a tuple among them."""
    args = [field for arg in call.args for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    return [arg for arg in args if isinstance(arg.ty, relax.TensorType)]


def _again(call: relax.Call, tensors: list[relax.Expr]) -> relax.Expr:
    """The call with other tensors; its other arguments follow them."""
    return relax.Call(call.op, [*tensors, *call.args[len(tensors) :]], call.attrs, call.ty_args)


# -- laws


def _pointwise(call: relax.Call, window: Window) -> Part | None:
    def of(shape: Shape) -> Window:
        cut = window[len(window) - len(shape) :]
        return tuple(None if size == 1 else each for each, size in zip(cut, shape, strict=True))

    return Part(window, tuple(of(shape_of(each)) for each in _tensors(call)), lambda args: _again(call, args))


def _matmul(call: relax.Call, window: Window) -> Part | None:
    shapes = [shape_of(each) for each in call.args]
    if min(map(len, shapes)) < 2:
        return None
    window = _known(window, {len(window) - 1})  # weights are packed when the model is built
    *batch, rows, columns = window

    def of(shape: Shape, inner: Window) -> Window:
        outer = batch[len(batch) - len(shape) + 2 :]
        return (*(None if size == 1 else cut for cut, size in zip(outer, shape[:-2], strict=True)), *inner)

    operands = of(shapes[0], (rows, None)), of(shapes[1], (None, columns))
    return Part(window, operands, lambda args: _again(call, args))


def _convolution(call: relax.Call, window: Window) -> Part | None:
    """Windows over images of the batch and over filters; a window within an image is not pushed to the operand."""
    images, filters, *inside = _known(window, {1})
    plain = str(call.attrs.data_layout).startswith("NC") and str(call.attrs.kernel_layout).startswith("OI")
    if not plain or int(call.attrs.groups) > 1:
        filters = None
    made = (images if plain else None, filters, *_whole(len(inside)))
    operands = (made[0], *_whole(len(window) - 1)), (filters, *_whole(len(window) - 1))
    return Part(made, operands, lambda args: _again(call, args))


def _along(call: relax.Call, window: Window) -> Part | None:
    """Softmax and norms: every element depends on all along some axes. Their other tensors are as long as these."""
    axes = [call.attrs.axis] if hasattr(call.attrs, "axis") else call.attrs.axes
    whole = {int(axis) % len(window) for axis in axes}
    made = tuple(None if axis in whole else cut for axis, cut in enumerate(window))
    others = tuple(_whole(len(shape_of(each))) for each in _tensors(call)[1:])
    return Part(made, (made, *others), lambda args: _again(call, args))


def _reduction(call: relax.Call, window: Window) -> Part | None:
    rank = len(shape_of(call.args[0]))
    over = set(range(rank)) if call.attrs.axis is None else {int(axis) % rank for axis in call.attrs.axis}
    left = iter(window)
    operand: list[Cut] = []
    for axis in range(rank):
        cut = next(left) if axis not in over or call.attrs.keepdims else None
        operand.append(None if axis in over else cut)
    return Part(window, (tuple(operand),), lambda args: _again(call, args))


def _permute(call: relax.Call, window: Window) -> Part | None:
    order = permutation(call)
    operand = tuple(window[order.index(axis)] for axis in range(len(order)))
    return Part(window, (operand,), lambda args: _again(call, args))


def _slice(call: relax.Call, window: Window) -> Part | None:
    found = cuts(call)
    if found is None or 0 in shape_of(call):
        return None
    shape = shape_of(call.args[0])
    window = _known(window, {axis for axis, each in enumerate(found) if (each.begin, each.step) != (0, 1)
                             or each.end != shape[axis]})
    reads: list[Cut] = []
    for each, cut, size in zip(found, window, shape_of(call), strict=True):
        if isinstance(cut, Taken):
            reads.append(cut)
        else:
            first, last = cut or (0, size)
            reads.append((each.begin + first * each.step, each.begin + (last - 1) * each.step + 1))
    operand = _normal(tuple(reads), shape)
    stepped = [axis for axis, each in enumerate(found) if each.step > 1]

    def build(args: list[relax.Expr]) -> relax.Expr:
        if not stepped:
            return args[0]
        extents = shape_of(args[0])
        return op.strided_slice(args[0], stepped, [0] * len(stepped), [extents[axis] for axis in stepped],
                                [found[axis].step for axis in stepped])

    return Part(window, (operand,), build)


def _concat(call: relax.Call, window: Window) -> Part | None:
    axis = int(call.attrs.axis or 0) % len(window)
    window = _known(window, {axis})
    cut, begin = window[axis], 0
    assert not isinstance(cut, Taken)
    operands: list[Window | None] = []
    for each in _tensors(call):
        size = shape_of(each)[axis]
        first, last = (0, size) if cut is None else (max(cut[0] - begin, 0), min(cut[1] - begin, size))
        part = _normal((*window[:axis], (first, last), *window[axis + 1 :]), shape_of(each))
        operands.append(part if first < last else None)
        begin += size
    return Part(window, tuple(operands), lambda args: op.concat(args, axis) if len(args) > 1 else args[0])


def _take(call: relax.Call, window: Window) -> Part | None:
    """Known indices: the range that they span."""
    data, indices = map(shape_of, call.args)
    if call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(data)
    window = _known(window, range(axis, axis + len(indices)))
    inner = window[axis : axis + len(indices)]
    if isinstance(call.args[1], relax.Var) and not any(inner) and fixed(indices) and 0 not in indices:
        return _taken(call, window, axis)
    found = array_of(call.args[1])
    if found is not None:
        found = found[tuple(slice(*cut) if isinstance(cut, tuple) else slice(None) for cut in inner)]
    known = found is not None and found.size > 0 and found.min() >= 0 and bool(int(found.max()) < data[axis])
    reads = (int(found.min()), int(found.max()) + 1) if found is not None and known else None
    operand = _normal((*window[:axis], reads, *window[axis + len(indices) :]), data)

    def build(args: list[relax.Expr]) -> relax.Expr:
        if found is None or reads is None:
            return _again(call, args)
        shape = shape_of(args[0])
        if np.array_equal(found.ravel(), np.arange(*reads)):
            return op.reshape(args[0], (*shape[:axis], *found.shape, *shape[axis + 1 :]))
        begin = reads[0] if operand[axis] is not None else 0
        return _again(call, [args[0], constant(found - begin, dtype_of(call.args[1]))])

    return Part(window, (operand, _whole(len(indices)) if found is not None else inner), build)


def _taken(call: relax.Call, window: Window, axis: int) -> Part:
    """Indices known at run time: the elements that they select."""
    data, indices = map(shape_of, call.args)
    taken = Taken(call.args[1], str(call.attrs.mode), math.prod(indices))
    operand = (*window[:axis], taken, *window[axis + len(indices) :])

    def build(args: list[relax.Expr]) -> relax.Expr:
        shape = shape_of(args[0])
        return op.reshape(args[0], (*shape[:axis], *indices, *shape[axis + 1 :]))

    return Part(window, (_normal(operand, data), _whole(len(indices))), build)


def _reshape(call: relax.Call, window: Window) -> Part | None:
    """By groups of axes with equally many elements: all of one of which no box of the operand is what is read."""
    old, new = shape_of(call.args[0]), shape_of(call)
    operand, made = list(_whole(len(old))), list(_whole(len(new)))
    for before, after in _groups(old, new):
        if any(isinstance(window[axis], Taken) for axis in after):
            if len(before) == len(after) == 1:
                operand[before[0]] = made[after[0]] = window[after[0]]
            continue
        run = _run([cut for axis in after if not isinstance(cut := window[axis], Taken)], [new[axis] for axis in after])
        box = _box(run, [old[axis] for axis in before]) if run is not None else None
        if box is not None:
            for axis, cut in zip(before, box, strict=True):
                operand[axis] = cut
            for axis in after:
                made[axis] = window[axis]
    return Part(tuple(made), (tuple(operand),), lambda args: op.reshape(args[0], _sizes(tuple(made), new)))


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Axes of both shapes that are the same elements, the fewest at a time; those of length 1 are in none."""
    sides = [[axis for axis, size in enumerate(shape) if size != 1] for shape in (old, new)]
    found: list[tuple[list[int], list[int]]] = []
    while sides[0] and sides[1]:
        before, after = [sides[0].pop(0)], [sides[1].pop(0)]
        one, other = old[before[0]], new[after[0]]
        while one != other:
            if one < other:
                before.append(sides[0].pop(0))
                one *= old[before[-1]]
            else:
                after.append(sides[1].pop(0))
                other *= new[after[-1]]
        found.append((before, after))
    return found


def _run(window: Sequence[tuple[int, int] | None], shape: Shape) -> tuple[int, int] | None:
    """The elements of a window, counted in the order of memory; None for all, or where they are not in one piece."""
    axis, first, inner = 0, 0, math.prod(shape)
    if not any(window):
        return None
    while axis < len(shape):
        inner, cut = inner // shape[axis], window[axis]
        if cut is None or cut[1] - cut[0] > 1:
            begin, end = cut or (0, shape[axis])
            return (first + begin * inner, first + end * inner) if not any(window[axis + 1 :]) else None
        first, axis = first + cut[0] * inner, axis + 1
    return first, first + 1


def _box(run: tuple[int, int], shape: Shape) -> Window | None:
    """The window whose elements are a run of those of ``shape``; None where there is none."""
    (first, last), found = run, list[tuple[int, int] | None]()
    for axis in range(len(shape)):
        inner = math.prod(shape[axis + 1 :])
        if first % inner == 0 and last % inner == 0:
            rest = _whole(len(shape) - axis - 1)
            return _normal((*found, (first // inner, last // inner), *rest), shape)
        if first // inner != (last - 1) // inner:
            return None
        place = first // inner
        found.append((place, place + 1))
        first, last = first - place * inner, last - place * inner
    return None


_LAWS: Mapping[str, Law] = {
    **dict.fromkeys((*relax_where(lambda each: each.pointwise), *_CHOOSING), _pointwise),
    **dict.fromkeys(("nn.softmax", "nn.log_softmax", "nn.layer_norm", "nn.rms_norm"), _along),
    **dict.fromkeys(("sum", "mean", "max", "min", "prod"), _reduction),
    **dict.fromkeys(("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten"), _reshape),
    **dict.fromkeys(("nn.conv1d", "nn.conv2d", "nn.conv3d"), _convolution),
    "matmul": _matmul, "permute_dims": _permute, "strided_slice": _slice, "concat": _concat, "take": _take,
}


# -- the pass


def _part(value: relax.Expr, window: Window) -> Part | None:
    """The smallest supported part that covers a window of a binding's value, if that is worth it; None for all of it.
    """
    law = _LAWS.get(op_name(value).removeprefix("relax.")) if isinstance(value, relax.Call) else None
    if law is None or not any(window):
        return None
    try:
        part = law(value, _normal(window, shape_of(value)))
        return part if part is not None and any(part.window) and _worth(part.window, shape_of(value)) else None
    except UndecidedSizeError:
        return None


def _reads(value: relax.Expr) -> Part | None:
    """The window that a slice reads of its operand, although all of the slice is read."""
    if not isinstance(value, relax.Call) or op_name(value) not in (SLICE, "relax.take"):
        return None
    try:
        return _LAWS[op_name(value).removeprefix("relax.")](value, _whole(len(shape_of(value))))
    except UndecidedSizeError:
        return None


def _parts(func: relax.Function) -> tuple[dict[relax.Var, relax.Expr], dict[relax.Var, Part]]:
    """The bindings of which something is read, and what is computed of those of which not all is, and of slices."""
    read: dict[relax.Var, Window] = {}
    parts: dict[relax.Var, Part] = {}

    def note(expr: relax.Expr, window: Window | None) -> None:
        if isinstance(expr, relax.Var) and window is not None:
            read[expr] = _hull(read[expr], window) if expr in read else window

    def note_all(expr: relax.Expr) -> None:
        for var in leaves(expr):
            note(var, _whole(len(shape_of(var)) if _shaped(var) else 0))

    note_all(func.body.body)
    for binding in reversed(list(bindings(func))):
        var, value = binding.var, binding.value
        if var not in read:
            continue
        part = _part(value, read[var]) or _reads(value)
        if part is None:
            note_all(value)
            continue
        parts[var] = part
        for operand, window in zip(_tensors(value), part.operands, strict=True):
            note(operand, window)
    return {binding.var: binding.value for binding in bindings(func) if binding.var in read}, parts


def _shaped(var: relax.Var) -> bool:
    return isinstance(var.ty, relax.TensorType) and isinstance(var.ty.shape, relax.ShapeExpr)


def _in_order(bound: Mapping[relax.Var, relax.Expr], parts: Mapping[relax.Var, Part]) -> dict[relax.Var, relax.Expr]:
    """The bindings in an order in which places come before what is computed of the elements there.

    There is one: what places depend on is read as a whole for them, so that it is not cut by them.
    """
    order: dict[relax.Var, relax.Expr] = {}
    pending = [(var, False) for var in reversed(bound)]
    while pending:
        var, ready = pending.pop()
        if ready:
            order[var] = bound[var]
        elif var in bound and var not in order:
            part = parts.get(var)
            windows = () if part is None else part.operands
            places = [cut.indices for window in windows for cut in window or () if isinstance(cut, Taken)]
            pending.append((var, True))
            pending.extend((each, False) for each in (*places, *leaves(bound[var])))
    return order


def _run_pass(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    func = mod["main"]
    if not any(_reads(binding.value) for binding in bindings(func)):
        return mod
    bound, parts = _parts(func)
    made = {var: part.window for var, part in parts.items() if any(part.window)}
    if not made:
        return mod
    bound = _in_order(bound, parts)
    image: dict[relax.Var, relax.Expr] = {}
    pieces: dict[tuple[relax.Expr, Window], relax.Expr] = {}

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        part = parts.get(var)
        if part is None:
            return value
        tensors = _tensors(bound[var])
        if not any(part.window) and all(operand not in made for operand in tensors):
            return value  # a slice of what is all there
        args = [cut(builder, operand, window)
                for operand, window in zip(tensors, part.operands, strict=True) if window is not None]
        return part.build(args)

    def cut(builder: relax.BlockBuilder, operand: relax.Expr, window: Window) -> relax.Expr:
        """The window of an operand, of which more may be there."""
        there = made.get(operand, _whole(len(window)))
        if (operand, window) not in pieces:
            expr = image.get(operand, operand)
            pieces[operand, window] = taken(builder, sliced(builder, expr, there, window), there, window)
        return pieces[operand, window]

    def sliced(builder: relax.BlockBuilder, expr: relax.Expr, there: Window, window: Window) -> relax.Expr:
        begins = [cut[0] if isinstance(cut, tuple) else 0 for cut in there]
        wanted = _normal(tuple((cut[0] - begin, cut[1] - begin) if isinstance(cut, tuple) else None
                               for cut, begin in zip(window, begins, strict=True)), shape_of(expr))
        ends = {axis: cut for axis, cut in enumerate(wanted) if isinstance(cut, tuple)}
        if not ends:
            return expr
        return builder.emit(op.strided_slice(
            expr, list(ends), [begin for begin, _ in ends.values()], [end for _, end in ends.values()]))

    def taken(builder: relax.BlockBuilder, expr: relax.Expr, there: Window, window: Window) -> relax.Expr:
        for axis, cut in enumerate(window):
            if isinstance(cut, Taken) and cut != there[axis]:
                places = image.get(cut.indices, cut.indices)
                if len(shape_of(places)) != 1:
                    places = builder.emit(op.reshape(places, (cut.count,)))
                expr = builder.emit(op.take(expr, places, axis, mode=cut.mode))
        return expr

    return relax.transform.CanonicalizeBindings()(rebuilt(mod, bound, change, image=image))


DropUnread = tvm.transform.module_pass(_run_pass, opt_level=0, name="DropUnread")
