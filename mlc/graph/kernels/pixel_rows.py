"""Convolutions of images whose height or width a call decides, for tensor cores: of rows of channels, one a pixel.

TVM's analysis of tiles knows no place among the pixels of several axes whose extents are free. So the pixels of all
images are numbered, ``[N*H*W, C]``, a window's pixels are found by dividing a result's number, and a kernel has one
free extent that it cuts into tiles: how many results there are. A thread finds where its results lie once, before it
adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from mlc.graph.kernels.transposed import Phases

__all__ = ["conv2d_pixel_rows", "interleave_phases", "phases_of_pixel_rows"]


def _windows(
    data: te.Tensor, results: tirx.Expr, size: Sequence[tirx.Expr], window: Sequence[int], out: Sequence[tirx.Expr],
    place: Sequence[tuple[int, int, int]],
) -> te.Tensor:
    """``[results, KH, KW, C]``: the pixels of each result's window, zeros outside of the image.

    ``place`` is, along rows and columns, ``(stride, dilation, first)``: where the window of result 0 begins.
    """
    (h, w), (oh, ow), channels = size, out, data.shape[-1]

    def pixel(m, rh, rw, ci):  # type: ignore[no-untyped-def]
        line = tirx.floormod(tirx.floordiv(m, ow), oh) * place[0][0] + rh * place[0][1] + place[0][2]
        column = tirx.floormod(m, ow) * place[1][0] + rw * place[1][1] + place[1][2]
        inside = tirx.all(line >= 0, line < h, column >= 0, column < w)
        number = (tirx.floordiv(m, oh * ow) * h + line) * w + column
        return tirx.if_then_else(inside, data[number, ci], tirx.const(0, data.dtype))

    return te.compute((results, *window, channels), pixel, name="windows")


def conv2d_pixel_rows(
    data: te.Tensor, weight: te.Tensor, results: tirx.Expr, height: tirx.Expr, width: tirx.Expr, out_height: tirx.Expr,
    out_width: tirx.Expr, strides: Sequence[int], pads: Sequence[int], dilation: Sequence[int],
) -> te.Tensor:
    """2-D convolution ``[N*H*W, I] -> [results, O]``, of ``N*OH*OW`` results, with a weight ``[O, KH, KW, I]``, added
    up in float32, or of int8 in int32. ``pads`` begins with the lines above an image and the columns left of it.

    How many rows there are is an expression of its own in each kernel, as it is written where rows are made and read:
    TVM fuses only what is written alike.
    """
    filters, *window, channels = weight.shape
    wide = "int32" if data.dtype == "int8" else "float32"
    rc = te.reduce_axis((0, channels), name="rc")
    if [int(k) for k in window] == [1, 1] and tuple(strides) == (1, 1) and not any(pads):
        return te.compute((results, filters), lambda m, f: te.sum(
            data[m, rc].astype(wide) * weight[f, 0, 0, rc].astype(wide), axis=[rc]), name="conv2d")
    place = [(stride, step, -before) for stride, step, before in zip(strides, dilation, pads[:2], strict=True)]
    pixels = _windows(data, results, (height, width), window, (out_height, out_width), place)
    rh, rw = te.reduce_axis((0, window[0]), name="rh"), te.reduce_axis((0, window[1]), name="rw")
    return te.compute((results, filters), lambda m, f: te.sum(
        pixels[m, rh, rw, rc].astype(wide) * weight[f, rh, rw, rc].astype(wide), axis=[rh, rw, rc]), name="conv2d")


def phases_of_pixel_rows(
    data: te.Tensor, weight: te.Tensor, results: tirx.Expr, height: tirx.Expr, width: tirx.Expr, steps_down: tirx.Expr,
    steps_right: tirx.Expr, rows: Phases, columns: Phases,
) -> te.Tensor:
    """The phases of a transposed convolution ``[N*H*W, I]``, in one group along each axis, by a weight of
    :func:`mlc.graph.kernels.transposed.pack_phases`: ``[results, PH, PW, O]`` of ``N*steps_down*steps_right``."""
    *_, down, right, filters, th, tw, channels = weight.shape
    wide = "int32" if data.dtype == "int8" else "float32"
    place = [(1, 1, rows.first), (1, 1, columns.first)]
    pixels = _windows(data, results, (height, width), (th, tw), (steps_down, steps_right), place)
    rh, rw = te.reduce_axis((0, th), name="rh"), te.reduce_axis((0, tw), name="rw")
    rc = te.reduce_axis((0, channels), name="rc")
    return te.compute((results, down, right, filters), lambda m, p, q, f: te.sum(
        pixels[m, rh, rw, rc].astype(wide) * weight[0, 0, p, q, f, rh, rw, rc].astype(wide), axis=[rh, rw, rc]),
        name="conv2d")


def interleave_phases(
    phases: te.Tensor, results: tirx.Expr, out_height: tirx.Expr, out_width: tirx.Expr, steps_down: tirx.Expr,
    steps_right: tirx.Expr,
) -> te.Tensor:
    """``[results, O]`` of ``N*OH*OW``, of :func:`phases_of_pixel_rows` without what lies beyond the last row and
    column."""
    _, down, right, filters = phases.shape

    def pixel(m, f):  # type: ignore[no-untyped-def]
        line, column = tirx.floormod(tirx.floordiv(m, out_width), out_height), tirx.floormod(m, out_width)
        step = tirx.floordiv(m, out_height * out_width) * steps_down + tirx.floordiv(line, down)
        step = step * steps_right + tirx.floordiv(column, right)
        return phases[step, tirx.floormod(line, down), tirx.floormod(column, right), f]

    return te.compute((results, filters), pixel, name="interleaved")
