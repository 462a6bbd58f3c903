"""ONNX ``Resize``: one image operator where its scale is that of the sizes, else axis by axis: rows taken, or a product
with the constant matrix that an interpolation along an axis is.

TVM's converter reads the scale off the sizes, which ``floor(size * scale)`` seldom has (7 pixels times 1.5 are 10), and
passes over the scales of batches and channels, ``axes``, ``antialias`` and ``keep_aspect_ratio_policy``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, input_at, text

__all__ = ["resize"]

#: coordinate transformations of ``relax.image.resize2d`` that need no region of interest
_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
_ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
}


@dataclass(frozen=True)
class _Axis:
    """One axis: its extents before and after, the scale (new by old, as the node gives it), and the region of it
    (begin, end; in parts of the axis) that is cropped, if any."""

    old: int
    new: int
    scale: float
    region: tuple[float, float] | None = None


def resize(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
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
    old = [int(extent) for extent in x.ty.shape]
    axes = _axes(old, [None, inputs[1]] if old_form else inputs[1:], attrs, mode == "tf_crop_and_resize")
    if axes is None:
        return None
    proportional = mode == "align_corners" or all(abs(a.scale * a.old - a.new) < 1e-6 * a.new for a in axes)
    if mode == "half_pixel_symmetric" and proportional:
        mode = "half_pixel"
    smooth = bool(attrs.get("antialias", 0)) and any(a.scale < 1 for a in axes) and method != "nearest"
    plain = all(a.old == a.new for a in axes[:2])
    if len(old) == 4 and plain and proportional and not smooth and mode in _MODES:
        return relax.op.image.resize2d(
            x, relax.ShapeExpr([a.new for a in axes[2:]]), roi=(0.0,) * 4, layout="NCHW",
            method="nearest_neighbor" if method == "nearest" else method, coordinate_transformation_mode=mode,
            rounding_method=rounding, cubic_alpha=attrs.get("cubic_coeff_a", -0.75),
            cubic_exclude=attrs.get("exclude_outside", 0),
        )
    if method != "nearest" and not str(x.ty.dtype).startswith("float"):
        raise ValueError(f"elements must be of a float type to lie between two pixels, got {x.ty.dtype}")
    for number, axis in enumerate(axes):
        places = _places(axis, mode)
        if np.array_equal(places, np.arange(axis.old)):
            continue
        if method == "nearest":
            x = bb.normalize(_taken(x, number, _ROUNDED[rounding](places)))
        elif method == "linear" and not smooth and not attrs.get("exclude_outside", 0):
            x = bb.normalize(_between(bb, x, number, places))
        else:
            x = _product(bb, x, number, _weights(axis, places, method, smooth, attrs))
        if axis.region:
            x = _beyond(bb, x, number, (places < 0) | (places > axis.old - 1), attrs)
    return x


def _axes(old: list[int], given: Sequence[Any], attrs: dict[str, Any], cropped: bool) -> list[_Axis] | None:
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
        found[axis] = _Axis(old[axis], new, scale, part)
    return found


def _numbers(expr: Any) -> np.ndarray | None:
    """The elements of a constant that has any."""
    from tvm import relax

    if isinstance(expr, relax.ShapeExpr):
        return np.array([int(value) for value in expr.values])
    array = array_of(expr)
    return array if array is not None and array.size else None


def _places(axis: _Axis, mode: str) -> np.ndarray:
    """Where along the axis each of the new elements comes from, float64."""
    old, new, scale = axis.old, axis.new, axis.scale
    i = np.arange(new, dtype="float64")
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


def _weights(axis: _Axis, places: np.ndarray, method: str, smooth: bool, attrs: dict[str, Any]) -> np.ndarray:
    """What each of the new elements takes of each old one, (new, old).

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
    matrix = np.zeros((axis.new, axis.old))
    rows = np.broadcast_to(np.arange(axis.new)[:, None], near.shape)
    np.add.at(matrix, (rows, np.clip(near, 0, axis.old - 1).astype(int)), parts / np.where(total == 0, 1.0, total))
    return matrix


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


def _beyond(bb: Any, x: Any, number: int, outside: np.ndarray, attrs: dict[str, Any]) -> Any:
    """``extrapolation_value`` where a region reaches beyond the image."""
    from tvm import relax

    if not outside.any():
        return x
    mask = outside.reshape([-1 if i == number else 1 for i in range(len(x.ty.shape))])
    value = relax.const(float(attrs.get("extrapolation_value", 0.0)), str(x.ty.dtype))
    return bb.normalize(relax.op.where(relax.const(mask), value, x))
