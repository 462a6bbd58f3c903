"""Tensor expressions of dynamic quantisation (ONNX ``DynamicQuantizeLinear``): bytes whose scale is found at run time.

The range of all elements takes two kernels that fill a GPU: :func:`extremes` of each row, and :func:`quantised`, each
row of which puts the rows' extremes together again, for a few reads, and so needs no kernel between them. What
normalises rows finds their extremes on the way (:func:`normalised`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

__all__ = ["EXTREMES", "extremes", "first", "normalised", "quantised", "row_sums"]

#: the name of the function that finds :func:`extremes`
EXTREMES = "extremes"

#: largest uint8, and how far int8 lies below it
_MOST, _HALF = 255.0, 128


def extremes(x: te.Tensor) -> te.Tensor:
    """float32 ``[R, 2]``: the largest of ``-x`` and of ``x`` in each row of ``[R, C]``."""
    rows, columns = x.shape
    k = te.reduce_axis((0, columns), name="k")
    return te.compute((rows, 2), lambda row, sign: te.max(tirx.Select(sign == 0, -x[row, k], x[row, k]), axis=k),
                      name="extremes")


def normalised(
    x: te.Tensor, scale: te.Tensor, shift: te.Tensor, axes: Sequence[int], epsilon: float
) -> list[te.Tensor]:
    """Layer normalisation of float32 ``[..., C]`` along its last axis, and :func:`extremes` of the rows of what it
    gives, ``[..., 2]``, which find it themselves: nothing waits for what another thread has written."""
    made = topi.nn.layer_norm(x, scale, shift, list(axes), epsilon)
    rows = x.shape[:-1]

    def of_row(sign: int, name: str) -> te.Tensor:
        k = te.reduce_axis((0, x.shape[-1]), name="k")
        return te.compute(rows, lambda *i: te.max(made(*i, k) if sign else -made(*i, k), axis=k), name=name)

    least, largest = of_row(0, "least"), of_row(1, "largest")
    return [te.compute(x.shape, lambda *i: made(*i), name="normalised"),
            te.compute((*rows, 2), lambda *i: tirx.Select(i[-1] == 0, least(*i[:-1]), largest(*i[:-1])),
                       name="extremes")]


def quantised(x: te.Tensor, parts: te.Tensor | None) -> list[te.Tensor]:
    """Of float32 ``[R, C]``: int8 ``[R, C]``, and for each row the scale (float32) and the zero point (int32), which
    are those of all rows.

    ``parts`` are the :func:`extremes` of as many parts of ``x`` as one likes; None where ``x`` is one row, which finds
    its own. The integers and the zero point are ONNX's of uint8 less 128; the scale of zeros is 1/255.
    """
    rows, columns = x.shape
    zero = tirx.const(0.0, "float32")

    def of_all(sign: int, name: str) -> te.Tensor:
        k = te.reduce_axis((0, columns if parts is None else parts.shape[0]), name="k")
        found = parts[k, sign] if parts is not None else x[0, k] if sign else -x[0, k]
        return te.compute((rows,), lambda _: te.max(found, axis=k), name=name)

    least, largest = of_all(0, "least"), of_all(1, "largest")

    def scale_of(row: tirx.Var) -> tirx.PrimExpr:
        extent = tirx.max(largest[row], zero) + tirx.max(least[row], zero)
        return tirx.Select(extent == zero, tirx.const(1.0, "float32"), extent) / tirx.const(_MOST, "float32")

    def zero_of(row: tirx.Var) -> tirx.PrimExpr:
        return tirx.round(_bounded(tirx.max(least[row], zero) / scale_of(row)))

    def element(row: tirx.Var, column: tirx.Var) -> tirx.PrimExpr:
        whole = _bounded(tirx.round(x[row, column] / scale_of(row)) + zero_of(row))
        return (whole - tirx.const(float(_HALF), "float32")).astype("int8")

    return [te.compute(x.shape, element, name="quantised"),
            te.compute((rows,), scale_of, name="scale"),
            te.compute((rows,), lambda row: zero_of(row).astype("int32") - _HALF, name="zero_point")]


def row_sums(x: te.Tensor) -> te.Tensor:
    """int32 ``[M, 1]``: the sums of the rows of uint8 ``[M, K]`` that int8 ``x`` lies 128 below."""
    rows, depth = x.shape
    k = te.reduce_axis((0, depth), name="k")
    total = te.compute((rows, 1), lambda row, _: te.sum(x[row, k].astype("int32"), axis=k), name="row_sums")
    return te.compute((rows, 1), lambda *i: total(*i) + _HALF * int(depth), name="moved_sums")


def first(rows: te.Tensor) -> te.Tensor:
    """The first element, without dimensions."""
    return te.compute((), lambda: rows[0], name="first")


def _bounded(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A number of uint8."""
    return tirx.min(tirx.max(value, tirx.const(0.0, "float32")), tirx.const(_MOST, "float32"))
