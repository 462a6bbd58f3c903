"""Slices and concatenations that undo each other, or that can be merged.

===========================================  =======================================================
before                                       after
===========================================  =======================================================
``x[0:n]``, all of it                        ``x``
``x[a:b][c:d]``                              ``x[a+c:a+d]``
``concat((x, y))[..]`` within ``y``          ``y[..]``
``stack((x, y))[i]``                         ``y``, reshaped
``take(x, i)``, ``i`` a number                ``x[i:i+1]``, reshaped
``concat((x[0:k], x[k:n]))``                 ``x``
``concat((x, concat((y, z))))``              ``concat((x, y, z))``
``concat((x, c, d))``, constants             ``concat((x, c'))``
===========================================  =======================================================

A concatenation that something else reads too stays one: :mod:`mlc.graph.simplify.concat` makes longer ones of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import Cut, cuts, window
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of

__all__ = ["JoinPieces"]


def whole(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``x[0:n] --> x``."""
    found, source = cuts(call), call.args[0]
    same = found is not None and shape_of(call) == shape_of(source) and all(cut.step == 1 for cut in found)
    return source if same else None


def slice_of_slice(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``x[a:b:s][c:d:t] --> x[a+c*s:a+d*s:s*t]``."""
    inner = scope.call(call.args[0], "strided_slice")
    first, second = cuts(inner) if inner is not None else None, cuts(call)
    if inner is None or first is None or second is None:
        return None
    both = [
        Cut(one.begin + two.begin * one.step, min(one.begin + two.end * one.step, one.end), one.step * two.step)
        for one, two in zip(first, second, strict=True)
    ]
    return _sliced(inner.args[0], both)


def _sliced(source: relax.Expr, found: Sequence[Cut]) -> relax.Expr:
    axes = [axis for axis, cut in enumerate(found) if cut != Cut(0, shape_of(source)[axis])]
    return op.strided_slice(source, axes, *([getattr(found[axis], name) for axis in axes]
                                            for name in ("begin", "end", "step")))


def slice_of_concat(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``concat((x, y))[a:b] --> y[a-n:b-n]`` where that is within one part."""
    parts, found = _parts(call.args[0], scope), cuts(call)
    if parts is None or found is None:
        return None
    fields, axis = parts
    begin = 0
    for part in fields:
        end = begin + shape_of(part)[axis]
        if begin <= found[axis].begin and found[axis].end <= end:
            cut = Cut(found[axis].begin - begin, found[axis].end - begin, found[axis].step)
            return _sliced(part, [*found[:axis], cut, *found[axis + 1 :]])
        begin = end
    return None


def slice_of_stack(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``stack((x, y))[1:2] --> reshape(y)``."""
    stack, cut = scope.call(call.args[0], "stack"), window(call)
    fields = scope.value(stack.args[0]) if stack is not None else None
    if stack is None or cut is None or not isinstance(fields, relax.Tuple):
        return None
    axis, begin, end = cut
    if axis != int(stack.attrs.axis or 0) % len(shape_of(stack)) or end - begin != 1:
        return None
    return op.reshape(fields.fields[begin], shape_of(call))


def take_of_one(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``take(x, 3) --> reshape(x[3:4])``: a constant place inside of ``x`` is a slice, and fuses as one."""
    source, place = call.args[0], scope.array(call.args[1])
    if place is None or place.size != 1 or call.attrs.axis is None:
        return None
    axis, index = int(call.attrs.axis) % len(shape_of(source)), int(place.reshape(-1)[0])
    extent = shape_of(source)[axis]
    if not isinstance(extent, int) or not 0 <= index < extent:
        return None
    return op.reshape(op.strided_slice(source, [axis], [index], [index + 1]), shape_of(call))


def _parts(expr: relax.Expr, scope: Scope) -> tuple[Sequence[relax.Expr], int] | None:
    """The parts of a concatenation, and its axis."""
    call = scope.call(expr, "concat")
    fields = scope.value(call.args[0]) if call is not None else None
    if call is None or not isinstance(fields, relax.Tuple):
        return None
    return fields.fields, int(call.attrs.axis or 0) % len(shape_of(call))


_Joining = Callable[[Sequence[relax.Expr], int, Scope], list[relax.Expr]]


def _joined(join: _Joining):  # type: ignore[no-untyped-def]
    """A rule that makes a concatenation of fewer parts, or of none."""

    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        found = _parts(call, scope)
        if found is None:
            return None
        parts, axis = found
        fewer = join(parts, axis, scope)
        if all(any(new.same_as(old) for old in parts) for new in fewer):
            return None
        return fewer[0] if len(fewer) == 1 else op.concat(list(fewer), axis)

    return rule


def _flat(parts: Sequence[relax.Expr], axis: int, scope: Scope) -> list[relax.Expr]:
    """The parts of those parts that are concatenations of no other use."""
    found: list[relax.Expr] = []
    for part in parts:
        inner = _parts(part, scope) if scope.once(part) else None
        found += list(inner[0]) if inner is not None and inner[1] == axis else [part]
    return found


def _constants(parts: Sequence[relax.Expr], axis: int, scope: Scope) -> list[relax.Expr]:
    """Neighbours that are constants become one."""
    found: list[relax.Expr] = []
    for constants, group in groupby(parts, lambda part: array_of(part) is not None):
        run = list(group)
        if constants and len(run) > 1:
            run = [constant(np.concatenate([scope.array(part) for part in run], axis), dtype_of(run[0]))]
        found += run
    return found


def _slices(parts: Sequence[relax.Expr], axis: int, scope: Scope) -> list[relax.Expr]:
    """Neighbours that are neighbouring slices of one tensor along ``axis`` become one slice, or the tensor."""
    found: list[relax.Expr] = []
    last: tuple[relax.Expr, int, int] | None = None
    for part in parts:
        call = scope.call(part, "strided_slice")
        cut = window(call) if call is not None else None
        piece = (call.args[0], cut[1], cut[2]) if call is not None and cut is not None and cut[0] == axis else None
        if piece is not None and last is not None and piece[0].same_as(last[0]) and piece[1] == last[2]:
            source, begin, end = last = (last[0], last[1], piece[2])
            all_of_it = (begin, end) == (0, shape_of(source)[axis])
            found[-1] = source if all_of_it else scope.emit(op.strided_slice(source, [axis], [begin], [end]))
        else:
            found.append(part)
            last = piece
    return found


RULES: Rules = {
    "relax.strided_slice": (whole, slice_of_slice, slice_of_concat, slice_of_stack),
    "relax.take": (take_of_one,),
    "relax.concat": (_joined(_flat), _joined(_constants), _joined(_slices)),
}

JoinPieces = rewrite_pass("JoinPieces", RULES)
