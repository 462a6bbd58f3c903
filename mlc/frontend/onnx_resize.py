"""ONNX ``Resize``: one image operator where its scale is the ratio of the sizes; otherwise axis by axis, as a gather of
rows or as a product with the constant matrix of the interpolation.

TVM's converter reads the scale off the sizes, which ``floor(size * scale)`` seldom has (7 pixels times 1.5 are 10), and
passes over the scales of batches and channels, ``axes``, ``antialias`` and ``keep_aspect_ratio_policy``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, input_at, text
from mlc.sizes import Size, size_of

__all__ = ["resize"]

#: coordinate transformations of ``relax.image.resize2d`` that need no region of interest
_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
#: the largest denominator of a scale of a free size
_FINEST = 4096
_ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
}


@dataclass(frozen=True)
class _Axis:
    """One axis: its extents before and after, the scale (new by old), the region of it (begin, end; in parts of the
    axis) that is cropped, if any, and whether the node gives the scale, in float32."""

    old: int
    new: int
    scale: float
    region: tuple[float, float] | None = None
    given: bool = False


def resize(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """``Resize(x, roi, scales, sizes)``; None where the sizes are not constant.

    Raises ``ValueError`` for what would be computed wrongly.
    """
    from tvm import relax

    x = inputs[0]
    old_form = len(inputs) == 2  # of opset 10: (x, scales)
    mode = text(attrs, "coordinate_transformation_mode", "asymmetric" if old_form else "half_pixel")
    rounding = text(attrs, "nearest_mode", "floor" if old_form else "round_prefer_floor")
    method = text(attrs, "mode", "nearest")
    if not isinstance(x.ty, relax.TensorType):
        return None
    old = [size_of(extent) for extent in x.ty.shape]
    given = [None, inputs[1]] if old_form else inputs[1:]
    if any(isinstance(n, Size) for each in (old, *map(_sizes, given)) for n in each):
        return _free(bb, x, old, given, attrs, (method, mode, rounding))
    axes = _axes(old, given, attrs, mode == "tf_crop_and_resize")
    if axes is None:
        return None
    proportional = mode == "align_corners" or all(abs(a.scale * a.old - a.new) < 1e-6 * a.new for a in axes)
    if mode == "half_pixel_symmetric" and proportional:
        mode = "half_pixel"
    smooth = bool(attrs.get("antialias", 0)) and any(a.scale < 1 for a in axes) and method != "nearest"
    plain = all(a.old == a.new for a in axes[:2])
    if len(old) == 4 and plain and proportional and method != "cubic" and not smooth and mode in _MODES:
        return relax.op.image.resize2d(
            x, relax.ShapeExpr([a.new for a in axes[2:]]), roi=(0.0,) * 4, layout="NCHW",
            method="nearest_neighbor" if method == "nearest" else method, coordinate_transformation_mode=mode,
            rounding_method=rounding,
        )
    if method != "nearest" and not str(x.ty.dtype).startswith("float"):
        raise ValueError(f"elements must be of a float type to lie between two pixels, got {x.ty.dtype}")
    for number, axis in enumerate(axes):
        # 17 / 1.7 is 10 in float32, and less than 10 in float64: that decides which element is nearest.
        places = _places(axis, mode, "float32" if method == "nearest" and axis.given else "float64")
        if np.array_equal(places, np.arange(axis.old)):
            continue
        if method == "nearest":
            x = bb.normalize(_taken(x, number, _ROUNDED[rounding](places)))
        elif method == "linear" and not smooth and not attrs.get("exclude_outside", 0):
            x = bb.normalize(_between(bb, x, number, places))
        elif smooth:
            x = _product(bb, x, number, _weights(axis, places, method, smooth, attrs))
        else:
            x = _mixed(bb, x, number, *_taps(axis, places, method, smooth, attrs))
        if axis.region:
            x = _beyond(bb, x, number, (places < 0) | (places > axis.old - 1), attrs)
    return x


def _sizes(expr: Any) -> list[Any]:
    """The numbers and free sizes of a shape; none of what is no shape."""
    values = getattr(expr, "values", None)
    return [] if values is None else [size_of(n) if not isinstance(n, int | np.integer) else int(n)
                                      for n in np.asarray(list(values), dtype=object).reshape(-1)]


def _free(
    bb: Any, x: Any, old: Sequence[Any], given: Sequence[Any], attrs: Mapping[str, Any], how: tuple[str, str, str]
) -> Any:
    """``Resize`` of free sizes, or to them: as one image operator where the scale is that of the sizes for all of them,
    else axis by axis, of which each element's place is computed by the call.

    Raises ``ValueError`` for what depends on a region or on the aspect ratio.
    """
    from tvm import relax

    method, mode, rounding = how
    plain = text(attrs, "keep_aspect_ratio_policy", "stretch") == "stretch"
    if method not in ("nearest", "linear", "cubic") or mode not in (*_MODES, "half_pixel_symmetric") or not plain:
        raise ValueError("an image of free size must be resized without a region or an aspect ratio, got mode "
                         f"{method} and {mode}; fix the size, as in --shape NAME=1,3,224,224")
    if method != "nearest" and not str(x.ty.dtype).startswith("float"):
        raise ValueError(f"elements must be of a float type to lie between two pixels, got {x.ty.dtype}")
    new, scales = _enlarged(old, given, attrs)
    changed = [axis for axis in range(len(old)) if not _same(new[axis], old[axis])]
    smooth = [axis for axis in changed if attrs.get("antialias", 0) and method != "nearest"
              and ((scale := scales[axis]) is None or scale < 1)]
    known = all(scale is not None and scale.denominator == 1 for scale in (scales[axis] for axis in changed))
    exact = known and mode != "align_corners" if method == "linear" else all(
        scale is None or scale.denominator == 1 for scale in (scales[axis] for axis in changed))
    if len(old) == 4 and set(changed) <= {2, 3} and exact and method != "cubic" and mode in _MODES and not smooth:
        size = relax.ShapeExpr([n.expr if isinstance(n, Size) else int(n) for n in new[2:]])
        return relax.op.image.resize2d(
            x, size, roi=(0.0,) * 4, layout="NCHW", method="nearest_neighbor" if method == "nearest" else method,
            coordinate_transformation_mode=mode, rounding_method=rounding,
        )
    for axis in changed:
        resized = _smoothed if axis in smooth else _along
        x = resized(bb, x, axis, (old[axis], new[axis]), scales[axis], how, attrs)
    return x


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all that is free."""
    return bool(a == b)


def _enlarged(
    old: Sequence[Any], given: Sequence[Any], attrs: Mapping[str, Any]
) -> tuple[list[Any], list[Fraction | None]]:
    """The new sizes, and the scales where these are given."""
    chosen = [int(axis) % len(old) for axis in attrs.get("axes", range(len(old)))]
    factors, sizes = _numbers(input_at(given, 1)), _sizes(input_at(given, 2))
    if not sizes and (constant := _numbers(input_at(given, 2))) is not None:
        sizes = [int(n) for n in constant]
    new, scales = list(old), [Fraction(1)] * len(old)
    found: list[Fraction | None] = list(scales)
    if factors is None:
        if len(sizes) != len(chosen):
            raise ValueError(f"sizes must be known for {len(chosen)} axes, got {len(sizes)}")
        for axis, n in zip(chosen, sizes, strict=True):
            new[axis], found[axis] = n, None
        return new, found
    for axis, factor in zip(chosen, factors, strict=True):
        scale = Fraction(float(factor)).limit_denominator(_FINEST)
        if np.float32(float(scale)) != np.float32(factor):
            raise ValueError(f"a scale of a free size must be a fraction with a denominator of at most {_FINEST}, got "
                             f"{float(factor):g}")
        new[axis], found[axis] = old[axis] * scale.numerator // scale.denominator, scale
    return new, found


def _along(
    bb: Any, x: Any, axis: int, extents: tuple[Any, Any], scale: Fraction | None, how: tuple[str, str, str],
    attrs: Mapping[str, Any],
) -> Any:
    """``x`` with one axis made as long as the second of ``extents``, by whole numbers: the place of element ``i`` is
    ``(i * step + start) / whole``. Elements beyond the ends are the last ones there. A ``scale`` that is not given is
    that of the sizes."""
    from tvm import te, tirx

    method, mode, rounding = how
    dtype, outside = str(x.ty.dtype), bool(attrs.get("exclude_outside", 0))

    def resized(tensor: te.Tensor, old: Any, new: Any) -> te.Tensor:
        step, start, whole = _steps(old, new, scale, mode)

        def element(*index: Any) -> Any:
            def at(place: Any) -> Any:
                inside = tirx.max(tirx.min(place, old - 1), 0)
                return tensor(*index[:axis], inside, *index[axis + 1 :])

            place = index[axis] * step + start
            if method == "nearest":
                return at(_rounded(place, whole, rounding))
            before = tirx.floordiv(place, whole)
            part = tirx.floormod(place, whole).astype("float32") / tirx.Cast("float32", whole)
            if method == "linear":
                first = at(before)
                return first + part.astype(dtype) * (at(before + 1) - first)
            near = [before - 1, before, before + 1, before + 2]
            parts = _cubic(part, float(attrs.get("cubic_coeff_a", -0.75)))
            if outside:
                zero = tirx.const(0.0, "float32")
                parts = [tirx.Select(tirx.all(n >= 0, n < old), p, zero) for n, p in zip(near, parts, strict=True)]
                total = functools.reduce(operator.add, parts)
                total = tirx.Select(tirx.EQ(total, zero), tirx.const(1.0, "float32"), total)
                parts = [p / total for p in parts]
            return functools.reduce(
                operator.add, (at(n) * p.astype(dtype) for n, p in zip(near, parts, strict=True)))

        shape = [*tensor.shape[:axis], new, *tensor.shape[axis + 1 :]]
        return te.compute(shape, element, name="resize")

    sizes = [each.expr if isinstance(each, Size) else tirx.const(int(each), "int64") for each in extents]
    return bb.emit_te(resized, x, *sizes, primfunc_name_hint="resize")


def _smoothed(
    bb: Any, x: Any, axis: int, extents: tuple[Any, Any], scale: Fraction | None, how: tuple[str, str, str],
    attrs: Mapping[str, Any],
) -> Any:
    """:func:`_along` with antialiasing: the kernel is wider by the factor by which the axis shrinks."""
    from tvm import te, tirx

    method, mode, _ = how
    dtype = str(x.ty.dtype)
    wide = dtype if dtype == "float64" else "float32"
    reach, outside = 1 if method == "linear" else 2, bool(attrs.get("exclude_outside", 0))

    def resized(tensor: te.Tensor, old: Any, new: Any) -> te.Tensor:
        step, start, whole = _steps(old, new, scale, mode)
        n, d = (new, old) if scale is None else (tirx.const(m, "int64") for m in (scale.numerator, scale.denominator))
        d = tirx.max(n, d)
        half = tirx.floordiv(reach * d + n - 1, n)
        squeeze = tirx.Cast(wide, n) / tirx.Cast(wide, d)

        def near(i: Any, tap: Any) -> Any:
            return tirx.floordiv(i * step + start - 1, whole) + 1 - half + tap  # of a place, the next below

        def part(i: Any, tap: Any) -> Any:
            place = near(i, tap)
            off = tirx.Cast(wide, place * whole - (i * step + start)) / tirx.Cast(wide, whole)
            found = _kernel(tirx.abs(off) * squeeze, method, float(attrs.get("cubic_coeff_a", -0.75)), wide)
            return tirx.Select(tirx.all(place >= 0, place < old), found, tirx.const(0.0, wide)) if outside else found

        def taken(*index: Any) -> Any:
            inside = tirx.max(tirx.min(near(index[axis], tap), old - 1), 0)
            value = tensor(*index[:axis], inside, *index[axis + 1 :]).astype(wide)
            return te.sum(value * parts(index[axis], tap), axis=tap)

        def divided(*index: Any) -> Any:
            total = totals(index[axis])
            one = tirx.const(1.0, wide)
            return (sums(*index) / tirx.Select(tirx.EQ(total, tirx.const(0.0, wide)), one, total)).astype(dtype)

        shape = [*tensor.shape[:axis], new, *tensor.shape[axis + 1 :]]
        tap, other = (te.reduce_axis((tirx.const(0, "int64"), 2 * half), name=name) for name in ("tap", "other"))
        parts = te.compute((new, 2 * half), part, name="parts")
        totals = te.compute((new,), lambda i: te.sum(parts(i, other), axis=other), name="totals")
        sums = te.compute(shape, taken, name="sums")
        return te.compute(shape, divided, name="resize")

    sizes = [each.expr if isinstance(each, Size) else tirx.const(int(each), "int64") for each in extents]
    return bb.emit_te(resized, x, *sizes, primfunc_name_hint="resize")


def _kernel(distance: Any, method: str, a: float, dtype: str) -> Any:
    """The interpolation weight at a distance."""
    from tvm import tirx

    def number(value: float) -> Any:
        return tirx.const(value, dtype)

    if method == "linear":
        return tirx.max(number(1.0) - distance, number(0.0))
    inner = (number(a + 2) * distance - number(a + 3)) * distance * distance + number(1.0)
    outer = ((number(a) * distance - number(5 * a)) * distance + number(8 * a)) * distance - number(4 * a)
    beyond = tirx.Select(distance < number(2.0), outer, number(0.0))
    return tirx.Select(distance <= number(1.0), inner, beyond)


def _steps(old: Any, new: Any, scale: Fraction | None, mode: str) -> tuple[Any, Any, Any]:
    """How far apart the places of new elements are, and where the first one is, as multiples of 1 by the last."""
    from tvm import tirx

    if mode == "align_corners":
        return old - 1, 0, tirx.max(new - 1, 1)
    n, d = (new, old) if scale is None else (scale.numerator, scale.denominator)
    if mode == "asymmetric":
        return d, 0, n
    if mode == "tf_half_pixel_for_nn":
        return 2 * d, d, 2 * n
    start = d - n
    if mode == "half_pixel_symmetric" and scale is not None:
        start = start + old * n - new * d
    if mode == "pytorch_half_pixel":  # the only element of an axis lies at its begin
        start = start * tirx.min(new - 1, 1)
    return 2 * d, start, 2 * n


def _rounded(place: Any, whole: Any, rounding: str) -> Any:
    """``place / whole`` as the number of an element."""
    from tvm import tirx

    if rounding.startswith("round"):  # of a half, up or down
        return tirx.floordiv(2 * place + whole - (rounding == "round_prefer_floor"), 2 * whole)
    return tirx.floordiv(place + whole - 1 if rounding == "ceil" else place, whole)


def _cubic(part: Any, a: float) -> list[Any]:
    """The cubic interpolation weights of the two elements before and the two after a position, at the fraction ``part``
    between the inner two."""
    def number(value: float) -> Any:
        from tvm import tirx

        return tirx.const(value, "float32")

    def inner(x: Any) -> Any:
        return ((number(a + 2) * x - number(a + 3)) * x) * x + number(1.0)

    def outer(x: Any) -> Any:
        return ((number(a) * x - number(5 * a)) * x + number(8 * a)) * x - number(4 * a)

    rest = number(1.0) - part
    return [outer(part + number(1.0)), inner(part), inner(rest), outer(rest + number(1.0))]


def _axes(old: list[int], given: Sequence[Any], attrs: Mapping[str, Any], cropped: bool) -> list[_Axis] | None:
    """Every axis, from ``roi, scales, sizes``; None where what says the sizes is not constant."""
    chosen = [int(axis) % len(old) for axis in attrs.get("axes", range(len(old)))]
    region, scales, sizes = (_numbers(input_at(given, i)) for i in range(3))
    numbers = scales if scales is not None else sizes
    if numbers is None or len(numbers) != len(chosen):
        return None
    if cropped and (region is None or len(region) != 2 * len(chosen)):
        raise ValueError("the region of interest must be a constant of a begin and an end for each axis")
    policy = text(attrs, "keep_aspect_ratio_policy", "stretch")
    shared = None
    if scales is None and policy != "stretch":
        pick = min if policy == "not_larger" else max
        shared = pick(float(n) / old[axis] for axis, n in zip(chosen, numbers, strict=True))
    found = [_Axis(n, n, 1.0) for n in old]
    for place, (axis, number) in enumerate(zip(chosen, numbers, strict=True)):
        part = (float(region[place]), float(region[place + len(chosen)])) if cropped and region is not None else None
        if scales is not None:
            new, scale = int(np.floor(old[axis] * number)), float(number)
        elif shared is not None:
            new, scale = int(np.floor(old[axis] * shared + 0.5)), shared
        else:
            new, scale = int(number), int(number) / old[axis]
        found[axis] = _Axis(old[axis], new, scale, part, scales is not None)
    return found


def _numbers(expr: Any) -> np.ndarray | None:
    """The elements of a constant that has any."""
    from tvm import relax

    if isinstance(expr, relax.ShapeExpr):
        return np.array([int(value) for value in expr.values])
    array = array_of(expr)
    return array if array is not None and array.size else None


def _places(axis: _Axis, mode: str, dtype: str) -> np.ndarray:
    """The source position of each new element along the axis, in the arithmetic of a type."""
    old, new, scale = axis.old, axis.new, np.dtype(dtype).type(axis.scale)
    i = np.arange(new, dtype=dtype)
    if mode == "align_corners":
        return i * (old - 1) / (new - 1) if new > 1 else 0 * i
    if mode == "asymmetric":
        return i / scale
    if mode == "tf_crop_and_resize":
        if axis.region is None:
            return i
        begin, end = axis.region
        if new == 1:
            return 0 * i + (begin + end) * (old - 1) / 2
        return (begin + i * (end - begin) / (new - 1)) * (old - 1)
    if mode == "pytorch_half_pixel" and new == 1:
        return 0 * i
    centred = (i + 0.5) / scale
    if mode == "tf_half_pixel_for_nn":
        return centred
    if mode == "half_pixel_symmetric":
        return old / 2 * (1 - new / (old * scale)) + centred - 0.5
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return centred - 0.5
    raise ValueError(f"the coordinate transformation must be one of ONNX's, got {mode}")


def _taken(x: Any, number: int, places: np.ndarray) -> Any:
    """The elements of an axis at whole places, those beyond its ends the last ones there."""
    from tvm import relax

    inside = np.clip(places, 0, int(x.ty.shape[number]) - 1).astype("int64")
    return relax.op.take(x, relax.const(inside, "int64"), number, mode="clip")


def _between(bb: Any, x: Any, number: int, places: np.ndarray) -> Any:
    """The elements between the two next to each of ``places``."""
    from tvm import relax

    places = np.clip(places, 0, int(x.ty.shape[number]) - 1)
    before = np.floor(places)
    shape = [-1 if i == number else 1 for i in range(len(x.ty.shape))]
    dtype = str(x.ty.dtype)
    part = relax.const((places - before).reshape(shape).astype(dtype), dtype)
    first = bb.normalize(_taken(x, number, before))
    step = bb.normalize(relax.op.subtract(bb.normalize(_taken(x, number, before + 1)), first))
    return relax.op.add(first, bb.normalize(relax.op.multiply(step, part)))


def _mixed(bb: Any, x: Any, number: int, near: np.ndarray, parts: np.ndarray) -> Any:
    """``x`` with an axis whose elements are sums of old ones, ``near``, by ``parts``; both (new, taps)."""
    from tvm import relax

    shape, dtype = [-1 if i == number else 1 for i in range(len(x.ty.shape))], str(x.ty.dtype)
    total = None
    for tap in range(near.shape[1]):
        weight = relax.const(parts[:, tap].reshape(shape).astype(dtype), dtype)
        term = bb.normalize(relax.op.multiply(bb.normalize(_taken(x, number, near[:, tap])), weight))
        total = term if total is None else bb.normalize(relax.op.add(total, term))
    return total


def _weights(axis: _Axis, places: np.ndarray, method: str, smooth: bool, attrs: Mapping[str, Any]) -> np.ndarray:
    """The interpolation matrix (new, old)."""
    near, parts = _taps(axis, places, method, smooth, attrs)
    matrix = np.zeros((axis.new, axis.old))
    rows = np.broadcast_to(np.arange(axis.new)[:, None], near.shape)
    np.add.at(matrix, (rows, np.clip(near, 0, axis.old - 1).astype(int)), parts)
    return matrix


def _taps(
    axis: _Axis, places: np.ndarray, method: str, smooth: bool, attrs: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The old elements that each of the new ones is made of, which may lie beyond the ends, and what it takes of each;
    both (new, taps).

    The kernel of a shrinking axis is as much wider where it is ``smooth``. At a place that is an element's own, that
    element is the second of the two in the middle.
    """
    squeeze = min(axis.scale, 1.0) if smooth else 1.0
    reach = 1 if method == "linear" else 2
    half = 1 - int(np.floor(-reach / squeeze) + 1)
    base = np.ceil(places) - 1
    near = base[:, None] + np.arange(1 - half, 1 + half)
    distance = np.abs(near - places[:, None]) * squeeze
    if method == "linear":
        parts = np.clip(1 - distance, 0, 1)
    else:
        a = float(attrs.get("cubic_coeff_a", -0.75))
        inner = ((a + 2) * distance - (a + 3)) * distance ** 2 + 1
        outer = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        parts = np.where(distance <= 1, inner, np.where(distance < 2, outer, 0.0))
    if attrs.get("exclude_outside", 0):
        parts = np.where((near < 0) | (near >= axis.old), 0.0, parts)
    total = parts.sum(axis=1, keepdims=True)
    return near, parts / np.where(total == 0, 1.0, total)


def _product(bb: Any, x: Any, number: int, matrix: np.ndarray) -> Any:
    """``x`` with the matrix applied along an axis."""
    from tvm import relax

    shape, dtype = [int(n) for n in x.ty.shape], str(x.ty.dtype)
    if number == len(shape) - 1:
        return bb.normalize(relax.op.matmul(x, relax.const(np.ascontiguousarray(matrix.T).astype(dtype))))
    before, behind = shape[:number], shape[number + 1:]
    rows = bb.normalize(relax.op.reshape(x, [*before, shape[number], int(np.prod(behind))]))
    result = bb.normalize(relax.op.matmul(relax.const(matrix.astype(dtype)), rows))
    return bb.normalize(relax.op.reshape(result, [*before, len(matrix), *behind]))


def _beyond(bb: Any, x: Any, number: int, outside: np.ndarray, attrs: Mapping[str, Any]) -> Any:
    """``extrapolation_value`` where a region reaches beyond the image."""
    from tvm import relax

    if not outside.any():
        return x
    mask = outside.reshape([-1 if i == number else 1 for i in range(len(x.ty.shape))])
    value = relax.const(float(attrs.get("extrapolation_value", 0.0)), str(x.ty.dtype))
    return bb.normalize(relax.op.where(relax.const(mask), value, x))
