"""ONNX ``RoiAlign`` as one tensor function: regions of images, cut into bins, with several samples per bin.

TVM's operator scales a half pixel with the region, takes the largest sample where ONNX takes the largest of what a
sample is made of, and has no schedule where the number of samples follows from a region's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc.frontend.onnx_values import dtype_of, text
from mlc.sizes import Size, size_of

__all__ = ["roi_align"]

#: functions that nothing is fused with, TVM's kOpaque
_OPAQUE = 8
#: the opset from which coordinates are those of pixels' middles unless a node says otherwise
_HALF_PIXEL = 16
_TYPES = ("float32", "float64")


@dataclass(frozen=True)
class _Bins:
    """The bins of a node: ``size`` bins per region, each with ``samples`` along an axis; 0 means as many as it has
    pixels."""

    size: tuple[int, int]
    samples: int
    scale: float
    half_pixel: bool
    largest: bool


def roi_align(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """``RoiAlign(X, rois, batch_indices)`` --> ``[regions, channels, height, width]``.

    Indices of images beyond the first and the last are these. Raises ``ValueError`` for modes that ONNX lacks.
    """
    from tvm import relax

    x, rois, images = inputs
    mode = text(attrs, "mode", "avg")
    usual = "half_pixel" if attrs["tvm_custom"]["opset"] >= _HALF_PIXEL else "output_half_pixel"
    coordinates = text(attrs, "coordinate_transformation_mode", usual)
    if mode not in ("avg", "max") or coordinates not in ("half_pixel", "output_half_pixel"):
        raise ValueError("mode must be avg or max and coordinate_transformation_mode half_pixel or output_half_pixel, "
                         f"got {mode} and {coordinates}")
    dtype = dtype_of(x)
    if dtype not in _TYPES:  # sums of 16-bit numbers in float32, as of all operators
        wide = [bb.normalize(relax.op.astype(each, "float32")) for each in (x, rois)]
        return relax.op.astype(bb.normalize(roi_align(bb, [*wide, images], attrs)), dtype)
    bins = _Bins((int(attrs.get("output_height", 1)), int(attrs.get("output_width", 1))),
                 int(attrs.get("sampling_ratio", 0)), float(attrs.get("spatial_scale", 1.0)),
                 coordinates == "half_pixel", mode == "max")
    func = _function([size_of(n) for n in x.ty.shape], size_of(rois.ty.shape[0]), dtype, bins)
    shape = [rois.ty.shape[0], x.ty.shape[1], *bins.size]
    given = [x, rois, bb.normalize(relax.op.astype(images, "int64"))]
    return relax.op.call_tir(bb.add_func(func, "roi_align"), relax.Tuple([bb.emit(each) for each in given]),
                             relax.TensorType(shape, dtype))


def _function(shape: Sequence[Any], regions: Any, dtype: str, bins: _Bins) -> Any:
    """The function of ``x [images, channels, height, width]``, ``rois [regions, 4]`` and ``images [regions]``."""
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as I

    own: dict[str, Any] = {}  # variables of the function, by what they are outside

    def inside(size: Any) -> Any:
        return own.setdefault(str(size), tirx.Var(str(size), "int64")) if isinstance(size, Size) else size

    count, channels, height, width = map(inside, shape)
    whole = (inside(regions), channels, *bins.size)
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name("roi_align")
        I.func_attr({"tirx.noalias": True, "op_pattern": _OPAQUE})
        x = I.arg("x", I.buffer((count, channels, height, width), dtype))
        rois = I.arg("rois", I.buffer((whole[0], 4), dtype))
        images = I.arg("images", I.buffer((whole[0],), "int64"))
        y = I.arg("y", I.buffer(whole, dtype))
        with I.grid(*whole) as loops, I.sblock("roi_align"):
            r, c, row, column = (I.axis.spatial(n, loop) for n, loop in zip(whole, loops, strict=True))
            I.reads(x[0:count, c, 0:height, 0:width], rois[r, 0:4], images[r])
            I.writes(y[r, c, row, column])
            found, at = (I.sblock_alloc_buffer((n,), dtype, scope="local") for n in (1, 2))
            begin, step, samples = zip(*(_axis(rois, r, place, axis, dtype, bins)
                                         for axis, place in enumerate((row, column))), strict=True)
            image = tirx.max(tirx.min(images[r], tirx.Cast("int64", count - 1)), tirx.const(0, "int64"))
            zero = tirx.const(0.0, dtype)
            I.buffer_store(found, zero, [0])
            with I.serial(0, samples[0]) as i, I.serial(0, samples[1]) as j:
                for axis, n in enumerate((i, j)):
                    place = begin[axis] + (tirx.Cast(dtype, n) + tirx.const(0.5, dtype)) * step[axis]
                    I.buffer_store(at, place, [axis])
                parts = _sample(x, image, c, [at[0], at[1]], (height, width), dtype)
                outside = tirx.any(*(test for place, n in ((at[0], height), (at[1], width))
                                     for test in (place < tirx.const(-1.0, dtype), place > tirx.Cast(dtype, n))))
                if bins.largest:
                    best = tirx.if_then_else(outside, zero, tirx.max(tirx.max(*parts[:2]), tirx.max(*parts[2:])))
                    better = tirx.if_then_else(tirx.all(i == 0, j == 0), best, tirx.max(found[0], best))
                    I.buffer_store(found, better, [0])
                else:
                    total = parts[0] + parts[1] + parts[2] + parts[3]
                    I.buffer_store(found, found[0] + tirx.if_then_else(outside, zero, total), [0])
            number = tirx.Cast(dtype, tirx.max(samples[0] * samples[1], tirx.const(1, "int32")))
            I.buffer_store(y, found[0] if bins.largest else found[0] / number, [r, c, row, column])
    return builder.get().without_attr("global_symbol")


def _axis(rois: Any, region: Any, place: Any, axis: int, dtype: str, bins: _Bins) -> tuple[Any, Any, Any]:
    """Along an axis (0: rows) where a bin begins, how far apart its samples are, and how many there are."""
    from tvm import tirx

    first, last = (rois[region, end + 1 - axis] * tirx.const(bins.scale, dtype)
                   - tirx.const(0.5 * bins.half_pixel, dtype) for end in (0, 2))
    extent = last - first
    if not bins.half_pixel:
        extent = tirx.max(extent, tirx.const(1.0, dtype))
    length = extent / tirx.const(float(bins.size[axis]), dtype)
    samples = tirx.const(bins.samples, "int32") if bins.samples > 0 else \
        tirx.max(tirx.Cast("int32", tirx.ceil(length)), tirx.const(0, "int32"))
    return first + tirx.Cast(dtype, place) * length, length / tirx.Cast(dtype, samples), samples


def _sample(x: Any, image: Any, channel: Any, at: Sequence[Any], sizes: Sequence[Any], dtype: str) -> list[Any]:
    """Bilinear interpolation weights of a position between four pixels; beyond an edge, of the pixels at the edge."""
    from tvm import tirx

    near = []
    for place, size in zip(at, sizes, strict=True):
        last = tirx.Cast("int64", size - 1)
        inside = tirx.min(tirx.max(place, tirx.const(0.0, dtype)), tirx.Cast(dtype, last))
        low = tirx.min(tirx.Cast("int64", inside), last)  # which is below 0 of no number
        low = tirx.max(low, tirx.const(0, "int64"))
        part = inside - tirx.Cast(dtype, low)
        near.append([(low, tirx.const(1.0, dtype) - part), (tirx.min(low + 1, last), part)])
    return [rows * columns * x[image, channel, row, column] for row, rows in near[0] for column, columns in near[1]]
