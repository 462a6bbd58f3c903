"""Triangular systems of PyTorch, which ONNX lacks: the delta rule of linear attention solves one for each chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["solve_triangular"]


def solve_triangular(a: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """``torch.linalg.solve_triangular``, for ``torch.onnx.export(custom_translation_table=...)``: ``X`` of ``A X = B``,
    or of ``X A = B`` unless ``left``; the other triangle of ``A``, and its diagonal if ``unitriangular``, are not read.

    A product with the inverse ``V`` of ``A``, which is built up from those of the blocks on its diagonal: two that
    follow on one another and the block ``C`` between them make that of a block twice as large, ``V - V C V``. Raises
    ``ValueError`` where the size of ``A`` is free.
    """
    from onnxscript import opset18

    op: Any = opset18
    size, rank = a.shape[-1], len(a.shape)
    if not isinstance(size, int):
        raise ValueError("the matrix of a triangular system must have a fixed size")
    turn = [*range(rank - 2), rank - 1, rank - 2]
    lower, zero = op.Transpose(a, perm=turn) if upper else a, op.CastLike(0.0, a)
    row, column = np.indices((size, size))

    def where(chosen: np.ndarray, values: Any) -> Any:
        return op.Where(_constant(op, chosen), values, zero)

    if unitriangular:
        inverse = op.Expand(op.CastLike(_constant(op, np.eye(size)), a), op.Shape(a))
    else:
        inverse = where(row == column, op.Reciprocal(lower))
    width = 1
    while width < size:
        same, below = row // (2 * width) == column // (2 * width), row // width > column // width
        between = where(same & below, lower)
        if width > 1 or not unitriangular:
            between = op.MatMul(op.MatMul(inverse, between), inverse)
        inverse, width = op.Sub(inverse, between), 2 * width
    if upper:
        inverse = op.Transpose(inverse, perm=turn)
    return op.MatMul(inverse, b) if left else op.MatMul(b, inverse)


def _constant(op: Any, array: np.ndarray) -> Any:
    from onnxscript import ir

    return op.Constant(value=ir.tensor(array))
