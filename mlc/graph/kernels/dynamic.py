"""Tensor expressions of bytes whose scale is found at run time, as ONNX ``DynamicQuantizeLinear`` makes them.

The range of all elements takes two kernels that fill a GPU: :func:`extremes` of each row, and :func:`quantised`, each
row of which puts the rows' extremes together again, for a few reads, and so needs no kernel between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import te, tirx

__all__ = ["extremes", "first", "gathered", "quantised"]

#: least and largest uint8, and how far int8 lies below it
_LEAST, _MOST, _HALF = 0.0, 255.0, 128


def extremes(x: te.Tensor, rows: int) -> te.Tensor:
    """float32 ``[2, R]``: the largest of ``-x`` and of ``x`` in each of ``R`` rows, which the first ``rows`` axes
    number."""
    lead, inner = _parted(x, rows)
    over = [te.reduce_axis((0, extent), name=f"k{i}") for i, extent in enumerate(inner)]

    def element(sign: tirx.Var, row: tirx.Var) -> tirx.PrimExpr:
        value = x(*_place(row, lead), *over)
        return te.max(tirx.Select(sign == 0, -value, value), axis=over)

    return te.compute((2, prod(lead)), element, name="extremes")


def gathered(parts: te.Tensor, groups: int) -> te.Tensor:
    """float32 ``[2, groups]``: of ``[2, R]``, the largest of each group of ``R / groups`` neighbours."""
    each = int(parts.shape[1]) // groups
    k = te.reduce_axis((0, each), name="k")
    return te.compute((2, groups), lambda sign, g: te.max(parts[sign, g * each + k], axis=k), name="extremes")


def quantised(x: te.Tensor, parts: te.Tensor, rows: int) -> list[te.Tensor]:
    """int8 of the shape of ``x``, and for each of its rows, as :func:`extremes` counts them, the scale (float32) and
    the zero point (int32), which are those of all rows.

    ``parts`` is ``[2, P]`` of :func:`extremes`. The integers and the zero point are ONNX's of uint8 less 128; the scale
    of zeros is 1/255.
    """
    lead, _ = _parted(x, rows)

    def of_all(sign: int, name: str) -> te.Tensor:
        p = te.reduce_axis((0, parts.shape[1]), name="p")
        return te.compute(lead, lambda *_: te.max(parts[sign, p], axis=p), name=name)

    least, largest = of_all(0, "least"), of_all(1, "largest")
    zero = tirx.const(0.0, "float32")

    def scale_of(row: Sequence[tirx.Var]) -> tirx.PrimExpr:
        extent = tirx.max(largest(*row), zero) + tirx.max(least(*row), zero)
        return tirx.Select(extent == zero, tirx.const(1.0, "float32"), extent) / tirx.const(_MOST, "float32")

    def zero_of(row: Sequence[tirx.Var]) -> tirx.PrimExpr:
        return tirx.round(_bounded(tirx.max(least(*row), zero) / scale_of(row)))

    def element(*i: tirx.Var) -> tirx.PrimExpr:
        row = i[:rows]
        whole = _bounded(tirx.round(x(*i) / scale_of(row)) + zero_of(row))
        return (whole - tirx.const(float(_HALF), "float32")).astype("int8")

    return [te.compute(x.shape, element, name="quantised"),
            te.compute(lead, lambda *row: scale_of(row), name="scale"),
            te.compute(lead, lambda *row: zero_of(row).astype("int32") - _HALF, name="zero_point")]


def first(rows: te.Tensor) -> te.Tensor:
    """The first element, without dimensions."""
    return te.compute((), lambda: rows(*[0] * len(rows.shape)), name="first")


def _bounded(value: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.min(tirx.max(value, tirx.const(_LEAST, "float32")), tirx.const(_MOST, "float32"))


def _parted(x: te.Tensor, rows: int) -> tuple[list[int], list[int]]:
    shape = [int(extent) for extent in x.shape]
    return shape[:rows], shape[rows:]


def _place(row: Any, lead: Sequence[int]) -> list[Any]:
    """The indices along the ``lead`` axes of a row's number."""
    found: list[Any] = []
    for extent in reversed(lead):
        found.insert(0, tirx.indexmod(row, extent) if len(found) < len(lead) - 1 else row)
        row = tirx.indexdiv(row, extent)
    return found
