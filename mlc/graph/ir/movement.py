"""Data movement as index arithmetic: where the elements of transposes and slices come from."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx

from mlc.graph.ir.rewrite import op_name, shape_of

__all__ = ["SLICE", "Cut", "cuts", "permutation", "window"]

SLICE = "relax.strided_slice"


def permutation(call: relax.Call) -> list[int]:
    """The axes of a ``permute_dims``, each from 0 to rank - 1."""
    rank = len(shape_of(call))
    axes = call.attrs.axes
    return [int(a) % rank for a in axes] if axes is not None else list(range(rank))[::-1]


@dataclass(frozen=True)
class Cut:
    """The elements ``begin, begin + step, ...`` below ``end`` of an axis; ``0 <= begin, end <= extent``."""

    begin: int
    end: int
    step: int = 1


def cuts(value: relax.Expr) -> list[Cut] | None:
    """One :class:`Cut` for each axis of what a slice is taken of; None for any other expression, for bounds that are no
    numbers, and for steps backwards."""
    if not isinstance(value, relax.Call) or op_name(value) != SLICE:
        return None
    given = [_numbers(arg) for arg in value.args[1:]]
    shape = shape_of(value.args[0])
    found = [Cut(0, extent) for extent in shape]
    if any(numbers is None for numbers in given):
        return None
    axes, begins, ends, *strides = (numbers or [] for numbers in given)
    steps = strides[0] if strides else [1] * len(axes)
    if min(steps, default=1) < 1:
        return None
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        extent = shape[axis]
        first, last = (min(max(v + extent if v < 0 else v, 0), extent) for v in (begin, end))
        found[axis] = Cut(first, last, step)
    return found


def window(value: relax.Expr) -> tuple[int, int, int] | None:
    """``(axis, begin, end)`` of a slice along one axis without gaps; None for any other expression."""
    found = cuts(value)
    if found is None or any(cut.step > 1 for cut in found):
        return None
    shape = shape_of(value.args[0])
    narrowed = [
        (axis, cut.begin, cut.end) for axis, cut in enumerate(found) if (cut.begin, cut.end) != (0, shape[axis])
    ]
    return narrowed[0] if len(narrowed) == 1 else None


def _numbers(expr: relax.Expr) -> list[int] | None:
    """The elements of a tuple of numbers."""
    values = [getattr(field, "value", None) for field in getattr(expr, "fields", [None])]
    numbers = [int(v) for v in values if isinstance(v, int | tirx.IntImm)]
    return numbers if len(numbers) == len(values) else None
