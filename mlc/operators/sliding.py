"""Windows that slide over an axis: output sizes and paddings, for convolutions and poolings alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from mlc.operators.index import Condition, Poly, as_poly, at_least, less
from mlc.operators.scalar import Const, Scalar, Select
from mlc.operators.tensor import Requirements, ShapeError

__all__ = ["Padding", "WindowAxis", "check_window", "explicit", "inside", "pair", "window_axis"]

Padding: TypeAlias = "str | tuple[Poly | int, Poly | int, Poly | int, Poly | int]"
#: padding of one axis: a word, or the sizes before and after
AxisPadding: TypeAlias = "str | tuple[Poly, Poly]"


@dataclass(frozen=True)
class WindowAxis:
    """One axis of a sliding window.

    ``size`` is the number of windows; window ``y`` covers the places ``y*stride + r*dilation - before`` of an axis of
    ``extent`` elements. ``bounds`` says whether places can fall before the first and behind the last element.
    """

    extent: Poly
    size: Poly
    stride: Poly
    dilation: Poly
    before: Poly
    bounds: tuple[bool, bool]

    def place(self, window: Poly, offset: Poly) -> Poly:
        return window * self.stride + offset * self.dilation - self.before

    def conditions(self, place: Poly) -> tuple[Condition, ...]:
        """What holds where ``place`` is an element rather than padding."""
        low, high = self.bounds
        return (at_least(place, 0),) * low + (less(place, self.extent),) * high


def inside(axes: Sequence[WindowAxis], places: Sequence[Poly], value: Scalar) -> Scalar:
    """``value`` where all places are elements, 0 in the padding."""
    conditions = tuple(c for axis, place in zip(axes, places, strict=True) for c in axis.conditions(place))
    return Select(conditions, value, Const(Fraction(0))) if conditions else value


def pair(value: tuple[Poly | int, Poly | int]) -> tuple[Poly, Poly]:
    rows, columns = value
    return as_poly(rows), as_poly(columns)


def check_window(padding: Padding) -> tuple[AxisPadding, AxisPadding]:
    """The padding of rows and that of columns."""
    if isinstance(padding, str):
        if padding not in ("valid", "same"):
            raise ShapeError(f'padding is "valid", "same" or (top, left, bottom, right), but got "{padding}"')
        return padding, padding
    if len(padding) != 4:
        raise ShapeError(f'padding is "valid", "same" or (top, left, bottom, right), but got {padding}')
    top, left, bottom, right = map(as_poly, padding)
    return (top, bottom), (left, right)


def explicit(attributes: Mapping[str, Any], extents: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """``(top, left, bottom, right)`` of a window ``kernel`` over an image of ``extents``, all of them numbers."""
    padding = attributes.get("padding", "valid")
    if padding != "same":
        return (0, 0, 0, 0) if padding == "valid" else tuple(padding)
    before, after = [], []
    dilation = attributes.get("dilation", (1, 1))
    for extent, window, stride, apart in zip(extents, kernel, attributes["stride"], dilation, strict=True):
        needed = max(0, ((extent + stride - 1) // stride - 1) * stride + (window - 1) * apart + 1 - extent)
        before.append(needed // 2)
        after.append(needed - needed // 2)
    return (*before, *after)


def window_axis(
    require: Requirements, name: str, extent: Poly, kernel: Poly, stride: Poly, padding: AxisPadding, dilation: Poly
) -> WindowAxis:
    """An axis of ``extent`` elements under a window of ``kernel`` elements, ``dilation`` apart.

    "same" makes as many windows as the extent has strides, rounded up, and splits the padding that this takes with
    the smaller half first, as TensorFlow does and ONNX under SAME_UPPER.
    """
    require.require(at_least(stride, 1), f"{name} needs strides of at least 1, but got {stride}")
    require.require(at_least(dilation, 1), f"{name} needs dilations of at least 1, but got {dilation}")
    require.require(at_least(kernel, 1), f"{name} needs a window of at least 1 element, but got {kernel}")
    reach = (kernel - 1) * dilation + 1
    if padding == "same":
        size = (extent + stride - 1) // stride
        before = _same_before(extent, size, reach, stride)
        padded = reach != 1
        return WindowAxis(extent, size, stride, dilation, before, (before != 0, padded))
    before, after = (as_poly(0), as_poly(0)) if isinstance(padding, str) else padding
    for side in (before, after):
        require.require(at_least(side, 0), f"{name} needs paddings of at least 0, but got {side}")
    padded_extent = extent + before + after
    require.require(
        at_least(padded_extent, reach), f"{name} has a window of {reach} elements, but its axis has {padded_extent}"
    )
    size = (padded_extent - reach) // stride + 1
    return WindowAxis(extent, size, stride, dilation, before, (before != 0, after != 0))


def _same_before(extent: Poly, size: Poly, reach: Poly, stride: Poly) -> Poly:
    """Half of the padding that ``size`` windows need, rounded down, and 0 where they need none."""
    if stride == 1:
        return (reach - 1) // 2
    if reach.constant is not None and reach.constant <= 2:
        return as_poly(0)
    needed = (size - 1) * stride + reach - extent
    if needed.constant is not None:
        return as_poly(max(0, needed.constant) // 2)
    if reach.constant is not None and stride.constant is not None and reach.constant >= stride.constant:
        return needed // 2
    # needed lies between reach - stride and reach - 1, so that the quotient is 1 from 0 on and 0 below
    bound = reach + stride
    return (needed * ((needed + bound) // bound)) // 2
