"""Resizing of images, in any layout, by integer arithmetic.

The place that an output comes from is a fraction of whole numbers, so its pixel is an exact quotient and its weight an
exact remainder: no float rounds to the wrong neighbour, and nothing depends on the channel, along which vectors lie in
blocked layouts.
"""

from __future__ import annotations

from math import gcd

from tvm import relax, te, tirx

__all__ = ["is_exact", "resize2d"]

_EXACT_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
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
    data: te.Tensor, size: tuple[int, int], layout: str, method: str, mode: str, rounding: str
) -> te.Tensor:
    """``data`` with the axes ``H`` and ``W`` of ``layout`` (``NCHW``, ``NHWC``, ``NCHW16c``) made ``size`` long.

    ``method`` is ``nearest_neighbor``, which takes the pixel that ``rounding`` says, or ``linear``; ``mode`` is ONNX's
    coordinate transformation, where the scale is that of the sizes. Places outside the image count as its edge.
    """
    axes = layout.index("H"), layout.index("W")
    old = [int(data.shape[axis]) for axis in axes]
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


def _source(i: tirx.Expr, old: int, new: int, mode: str) -> tuple[tirx.Expr, int]:
    """Numerator and denominator of the place among ``old`` pixels that the ``i``-th of ``new`` comes from."""
    if mode in ("half_pixel", "pytorch_half_pixel"):
        step, start, whole = 2 * old, old - new, 2 * new
    elif mode == "tf_half_pixel_for_nn":
        step, start, whole = 2 * old, old, 2 * new
    elif mode == "align_corners":
        step, start, whole = old - 1, 0, new - 1
    else:
        step, start, whole = old, 0, new
    if new == 1 and mode in ("align_corners", "pytorch_half_pixel"):
        step, start, whole = 0, 0, 1
    common = gcd(step, start, whole)
    return i * (step // common) + start // common, whole // common


def _nearest(i: tirx.Expr, old: int, new: int, mode: str, rounding: str) -> tirx.Expr:
    place, whole = _source(i, old, new, mode)
    if rounding.startswith("round"):  # of a half, up or down
        place, whole = 2 * place + whole - (rounding == "round_prefer_floor"), 2 * whole
    elif rounding == "ceil":
        place = place + whole - 1
    return te.min(tirx.floordiv(te.max(place, 0), whole), old - 1)


def _neighbours(i: tirx.Expr, old: int, new: int, mode: str) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr | None]:
    """The pixels before and after a place, and its distance from the former; None where it is always a pixel."""
    place, whole = _source(i, old, new, mode)
    place = te.min(te.max(place, 0), (old - 1) * whole)
    before = tirx.floordiv(place, whole)
    if whole == 1:
        return before, before, None
    part = tirx.floormod(place, whole).astype("float32") * tirx.const(1.0 / whole, "float32")
    return before, te.min(before + 1, old - 1), part


def _between(a: tirx.Expr, b: tirx.Expr, part: tirx.Expr | None) -> tirx.Expr:
    return a if part is None else a + part * (b - a)
