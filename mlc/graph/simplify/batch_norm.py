"""Batch normalisation at inference as one scale and one shift per channel.

Before: ``R.nn.batch_norm(x, gamma, beta, mean, variance, training=False)[0]``

After: ``R.add(R.multiply(x, s), t)`` with the constants ``s = gamma / sqrt(variance + epsilon)`` and
``t = beta - mean * s``, which :mod:`mlc.graph.simplify.affine` folds into a convolution before it, if there is one.
In training mode, or with parameters that are no constants, the operator stays as it is.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import PROJECTION, Rules, Scope, dtype_of, rewrite_pass, shape_of

__all__ = ["SimplifyBatchNorm"]


def scale_and_shift(item: relax.TupleGetItem, scope: Scope) -> relax.Expr | None:
    """The normalised data as ``x * s + t``; the running statistics, which inference hands through."""
    norm = scope.call(item.tuple_value, "nn.batch_norm")
    if norm is None or bool(norm.attrs.training):
        return None
    if item.index in (1, 2):
        return norm.args[item.index + 2]
    arrays = [array_of(arg) for arg in norm.args[1:]]
    if any(array is None for array in arrays):
        return None
    gamma, beta, mean, variance = (np.asarray(array, "float64") for array in arrays)
    scale = 1.0 / np.sqrt(variance + float(norm.attrs.epsilon))
    if bool(norm.attrs.scale):
        scale = scale * gamma
    shift = -mean * scale
    if bool(norm.attrs.center):
        shift = shift + beta
    data = norm.args[0]
    axis = int(norm.attrs.axis) % len(shape_of(data))
    spread = [-1] + [1] * (len(shape_of(data)) - axis - 1)
    scaled = scope.emit(op.multiply(data, constant(scale.reshape(spread), dtype_of(data))))
    return op.add(scaled, constant(shift.reshape(spread), dtype_of(data)))


RULES: Rules = {PROJECTION: (scale_and_shift,)}

SimplifyBatchNorm = rewrite_pass("SimplifyBatchNorm", RULES)
