"""Constant weights of convolutions: floats, or integers that are dequantised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import Scope, shape_of

__all__ = ["Weight"]


@dataclass(frozen=True, eq=False)
class Weight:
    """The elements of a weight, and the ``dequantize`` that makes numbers of them, if one does: with one scale, or with
    one for each index of an axis."""

    array: np.ndarray
    dequantize: relax.Call | None

    @classmethod
    def of(cls, expr: relax.Expr, scope: Scope, axis: int = 0) -> Weight | None:
        """The weight that ``expr`` is; None where it is not constant or has scales along another axis than that."""
        call = scope.call(expr, "dequantize")
        array = array_of(call.args[0] if call is not None else expr)
        if array is None:
            return None
        if call is not None and shape_of(call.args[1]) and int(call.attrs.axis) % max(1, array.ndim) != axis:
            return None
        return cls(array, call)

    def with_elements(self, array: np.ndarray, scope: Scope) -> relax.Expr:
        """The weight of other elements, whose axis of scales is this one's."""
        call = self.dequantize
        if call is None:
            return constant(array)
        return scope.emit(relax.Call(call.op, [constant(array), *call.args[1:]], call.attrs, call.ty_args))
