"""ONNX ``Resize``: one image operator where its scale is that of the sizes, else rows taken by axis.

TVM's converter reads the scale off the sizes, which ``floor(size * scale)`` seldom has (7 pixels times 1.5 are 10), and
passes over the scales of batches and channels, ``axes``, ``antialias`` and ``keep_aspect_ratio_policy``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, text

__all__ = ["resize"]

#: coordinate transformations of ``relax.image.resize2d`` that need no region of interest
_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
_ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
}


def resize(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``Resize(x, roi, scales, sizes)``; None where the sizes are not constant or a region is cropped.

    Raises ``ValueError`` for what would be computed wrongly.
    """
    from tvm import relax

    x = inputs[0]
    old_form = len(inputs) == 2  # of opset 10: (x, scales)
    mode = text(attrs, "coordinate_transformation_mode", "asymmetric" if old_form else "half_pixel")
    rounding = text(attrs, "nearest_mode", "floor" if old_form else "round_prefer_floor")
    method = text(attrs, "mode", "nearest")
    if mode == "tf_crop_and_resize" or not isinstance(x.ty, relax.TensorType):
        return None
    old = [int(extent) for extent in x.ty.shape]
    found = _sizes(old, inputs[1:] if old_form else inputs[2:], attrs)
    if found is None:
        return None
    new, scales = found
    if attrs.get("antialias", 0) and any(scale < 1 for scale in scales):
        raise ValueError("antialias must be 0 where an axis becomes shorter")
    proportional = mode == "align_corners" or all(
        abs(scale * a - b) < 1e-6 * b for a, b, scale in zip(old, new, scales, strict=True)
    )
    if mode == "half_pixel_symmetric" and proportional:
        mode = "half_pixel"
    if len(old) == 4 and old[:2] == new[:2] and proportional and mode in _MODES:
        return relax.op.image.resize2d(
            x, relax.ShapeExpr(new[2:]), roi=(0.0,) * 4, layout="NCHW",
            method="nearest_neighbor" if method == "nearest" else method, coordinate_transformation_mode=mode,
            rounding_method=rounding, cubic_alpha=attrs.get("cubic_coeff_a", -0.75),
            cubic_exclude=attrs.get("exclude_outside", 0),
        )
    if method not in ("nearest", "linear"):
        raise ValueError(f"the mode must be nearest or linear where the scale is not that of the sizes, got {method}")
    if method == "linear" and not str(x.ty.dtype).startswith("float"):
        raise ValueError(f"elements must be of a float type to lie between two pixels, got {x.ty.dtype}")
    for axis, (a, b, scale) in enumerate(zip(old, new, scales, strict=True)):
        places = _places(a, b, scale, mode)
        if not np.array_equal(places, np.arange(a)):
            x = bb.normalize(_along(bb, x, axis, places, None if method == "linear" else rounding))
    return x


def _sizes(
    old: list[int], given: Sequence[Any], attrs: dict[str, Any]
) -> tuple[list[int], list[float]] | None:
    """The new extent and the scale of every axis, from ``scales`` or else ``sizes``; None where neither is constant."""
    axes = [int(axis) % len(old) for axis in attrs.get("axes", range(len(old)))]
    scales, sizes = ([*map(_numbers, given), None, None])[:2]
    new, factors = list(old), [1.0] * len(old)
    numbers = scales if scales is not None else sizes
    if numbers is None or len(numbers) != len(axes):
        return None
    if scales is None and text(attrs, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise ValueError("keep_aspect_ratio_policy must be stretch")
    for axis, number in zip(axes, numbers, strict=True):
        new[axis] = int(number) if scales is None else int(np.floor(old[axis] * number))
        factors[axis] = new[axis] / old[axis] if scales is None else float(number)
    return new, factors


def _numbers(expr: Any) -> np.ndarray | None:
    """The elements of a constant that has any."""
    from tvm import relax

    if isinstance(expr, relax.ShapeExpr):
        return np.array([int(value) for value in expr.values])
    array = array_of(expr)
    return array if array is not None and array.size else None


def _places(old: int, new: int, scale: float, mode: str) -> np.ndarray:
    """Where along an axis each of ``new`` outputs comes from, float64."""
    i = np.arange(new, dtype="float64")
    if mode == "align_corners":
        return i * (old - 1) / (new - 1) if new > 1 else 0 * i
    if mode == "asymmetric":
        return i / scale
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


def _along(bb: Any, x: Any, axis: int, places: np.ndarray, rounding: str | None) -> Any:
    """``x`` at ``places`` of an axis: the nearest elements, or where ``rounding`` is None, between two of them."""
    from tvm import relax

    last = int(x.ty.shape[axis]) - 1

    def taken(index: np.ndarray) -> Any:
        clipped = np.clip(index, 0, last).astype("int64")
        return bb.normalize(relax.op.take(x, relax.const(clipped, "int64"), axis, mode="clip"))

    if rounding is not None:
        return taken(_ROUNDED[rounding](places))
    places = np.clip(places, 0, last)
    before = np.floor(places)
    shape = [-1 if i == axis else 1 for i in range(len(x.ty.shape))]
    dtype = str(x.ty.dtype)
    part = relax.const((places - before).reshape(shape).astype(dtype), dtype)
    first = taken(before)
    step = bb.normalize(relax.op.subtract(taken(before + 1), first))
    return relax.op.add(first, bb.normalize(relax.op.multiply(step, part)))
