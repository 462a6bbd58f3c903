"""Image resizing in any layout, with integer index arithmetic.

The place that an output comes from is a fraction of whole numbers, so its pixel is an exact quotient and its weight an
exact remainder: no float rounds to the wrong neighbour, and nothing depends on the channel, along which vectors lie in
blocked layouts.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import tvm
from tvm import relax, te, tirx

__all__ = ["is_exact", "resize2d"]

_EXACT_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
#: times that an image of free size is enlarged, of which each is known
_MOST = 8
_EXACT_ROUNDING = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")


def is_exact(call: relax.Call) -> bool:
    """Whether :func:`resize2d` computes a ``relax.image.resize2d``: nearest or linear, with no region of interest."""
    attrs = call.attrs
    if attrs.coordinate_transformation_mode not in _EXACT_MODES:
        return False
    if attrs.method == "linear":
        return str(call.args[0].ty.dtype) == "float32"
    return attrs.method == "nearest_neighbor" and attrs.rounding_method in _EXACT_ROUNDING


def resize2d(
    data: te.Tensor, size: tuple[Any, Any], layout: str, method: str, mode: str, rounding: str
) -> te.Tensor:
    """``data`` with the axes ``H`` and ``W`` of ``layout`` (``NCHW``, ``NHWC``, ``NCHW16c``) made ``size`` long.

    ``method`` is ``nearest_neighbor``, which takes the pixel that ``rounding`` says, or ``linear``; ``mode`` is ONNX's
    coordinate transformation, where the scale is that of the sizes. Places outside the image count as its edge. Sizes
    may be expressions of free ones.
    """
    axes = layout.index("H"), layout.index("W")
    old = [_known(data.shape[axis]) for axis in axes]
    size = _known(size[0]), _known(size[1])
    shape = list(data.shape)
    for axis, extent in zip(axes, size, strict=True):
        shape[axis] = extent

    def at(index: tuple[tirx.Var, ...], row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        place = list(index)
        place[axes[0]], place[axes[1]] = row, column
        return data(*place)

    def nearest(*index: tirx.Var) -> tirx.Expr:
        row, column = (_nearest(index[a], o, s, mode, rounding) for a, o, s in zip(axes, old, size, strict=True))
        return at(index, row, column)

    def linear(*index: tirx.Var) -> tirx.Expr:
        (top, bottom, down), (left, right, across) = (
            _neighbours(index[a], o, s, mode) for a, o, s in zip(axes, old, size, strict=True)
        )
        above = _between(at(index, top, left), at(index, top, right), across)
        return _between(above, _between(at(index, bottom, left), at(index, bottom, right), across), down)

    return te.compute(shape, nearest if method == "nearest_neighbor" else linear, name="resize")


def _known(extent: Any) -> Any:
    """A number, or the expression of a free size."""
    return int(extent) if isinstance(extent, int | tirx.IntImm) else extent


def _scale(old: Any, new: Any) -> tuple[Any, Any]:
    """Two sizes, or smaller numbers of the same quotient: a free size and a multiple of it are as 1 to a number."""
    if isinstance(old, int) and isinstance(new, int):
        return old, new
    analyzer = tvm.sym.Analyzer()
    multiple = next((n for n in range(1, _MOST + 1) if analyzer.can_prove_equal(new, old * n)), None)
    return (old, new) if multiple is None else (1, multiple)


def _source(i: tirx.Expr, old: Any, new: Any, mode: str) -> tuple[tirx.Expr, Any]:
    """Numerator and denominator of the place among ``old`` pixels that the ``i``-th of ``new`` comes from."""
    one = new == 1 if isinstance(new, int) else None  # None: for some sizes
    if mode in ("align_corners", "pytorch_half_pixel") and one:
        return i * 0, 1
    a, b = _scale(old, new)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        step, start, whole = 2 * a, a - b, 2 * b
        if mode == "pytorch_half_pixel" and one is None and not isinstance(b, int):
            start = start * tirx.min(new - 1, 1)
    elif mode == "tf_half_pixel_for_nn":
        step, start, whole = 2 * a, a, 2 * b
    elif mode == "align_corners":
        step, start = old - 1, 0
        whole = new - 1 if isinstance(new, int) else tirx.max(new - 1, 1)
    else:
        step, start, whole = a, 0, b
    if all(isinstance(each, int) for each in (step, start, whole)):
        common = gcd(step, start, whole)
        return i * (step // common) + start // common, whole // common
    return i * step + start, whole


def _nearest(i: tirx.Expr, old: Any, new: Any, mode: str, rounding: str) -> tirx.Expr:
    place, whole = _source(i, old, new, mode)
    if rounding.startswith("round"):  # of a half, up or down
        place, whole = 2 * place + whole - (rounding == "round_prefer_floor"), 2 * whole
    elif rounding == "ceil":
        place = place + whole - 1
    return te.min(tirx.floordiv(te.max(place, 0), whole), old - 1)


def _neighbours(i: tirx.Expr, old: Any, new: Any, mode: str) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr | None]:
    """The pixels before and after a place, and its distance from the former; None where it is always a pixel."""
    place, whole = _source(i, old, new, mode)
    place = te.min(te.max(place, 0), (old - 1) * whole)
    before = tirx.floordiv(place, whole)
    if isinstance(whole, int) and whole == 1:
        return before, before, None
    assert isinstance(whole, int), "linear interpolation between free sizes has a scale that is a number"
    part = tirx.floormod(place, whole).astype("float32") * tirx.const(1.0 / whole, "float32")
    return before, te.min(before + 1, old - 1), part


def _between(a: tirx.Expr, b: tirx.Expr, part: tirx.Expr | None) -> tirx.Expr:
    return a if part is None else a + part * (b - a)
