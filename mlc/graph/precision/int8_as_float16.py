"""Products of two quantised activations on GPUs, as in attention: in float16, which represents their integers exactly.

``matmul(dequantize(q, s, z), dequantize(r, t, y))``   -->   ``matmul(half(q - z), half(r - y)) * (s * t)``, in float32

Differences of two bytes are exact in float16, and so are sums of their products in float32 below 2 ** 24, as those of
258 always are; longer ones round no more than float32 does anyway. As integers they would need a sum of each row and
each column at run time for the zero points, in kernels of their own, and tensor cores that read bytes across the sum
one by one; a byte more of each operand costs less. What makes the integers makes the halves.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.rewrite import Scope, rewrite_pass, shape_of
from mlc.graph.precision.affine import Dequantised, dequantised
from mlc.target import Target
from schedules.cuda.warp_tile import fills_tiles
from schedules.intrin import mma, select

__all__ = ["HalfProducts"]

_KIND = mma.KINDS[0]
_BYTES = ("int8", "uint8")


def HalfProducts(target: Target) -> tvm.transform.Pass:
    """Module pass: products of two dequantised activations that tensor cores take multiply halves."""
    available = select(mma.product(_KIND), target.tvm) is not None

    def product(call: relax.Call, scope: Scope) -> relax.Expr | None:
        operands = [_activation(arg, scope) for arg in call.args]
        left, right = operands
        if not available or left is None or right is None:
            return None
        if not fills_tiles(shape_of(call)[-2], shape_of(call)[-1], shape_of(call.args[0])[-1], _KIND):
            return None
        halves = [_halves(each, scope) for each in (left, right)]
        scale = (left.affine.scale.astype(np.float64) * right.affine.scale).astype(np.float32).reshape(())
        return op.multiply(scope.emit(op.matmul(*halves, out_dtype="float32")), constant(scale))

    return rewrite_pass("HalfProducts", {"relax.matmul": (product,)})


def _activation(expr: relax.Expr, scope: Scope) -> Dequantised | None:
    found = dequantised(expr, scope) if len(shape_of(expr)) > 1 else None
    return found if found is not None and found.dtype in _BYTES and found.affine.single else None


def _halves(operand: Dequantised, scope: Scope) -> relax.Expr:
    """The integers minus their zero point, as float16."""
    data, zero = operand.data, operand.affine.zero.astype(np.int32).reshape(())
    if zero:
        data = scope.emit(op.subtract(scope.emit(op.astype(data, "int32")), constant(zero)))
    return scope.emit(op.astype(data, "float16"))
