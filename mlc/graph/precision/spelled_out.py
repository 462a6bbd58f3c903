"""Quantising and dequantising as arithmetic, which becomes part of the kernels around it.

=======================================  ======================================================================
before                                   after
=======================================  ======================================================================
``dequantize(q, s, z)``                  ``(float(q) - z) * s``
``quantize(x, s, z)``                    ``integer(clip(round(x / s) + z, least, most))``, rounding half to even
... of what an integer product gave      ``integer(clip(round(x * (1 / s) + z), least, most))``
=======================================  ======================================================================

The first two are bit-exact. The third rounds ``x`` otherwise, by less than one quantisation step: what
comes from an integer product is as far from the model's float32 sums already, and a division takes as long as sixteen
multiplications. Zero points and scales are exact in float32, since they have 16 bits at most.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, leaves, rewrite_pass, shape_of
from mlc.graph.precision.affine import Affine, affine_of, spread

__all__ = ["SpellOutQuantisation"]

#: integers that float32 holds exactly, and those between which it rounds correctly
_NARROW = ("uint8", "int8", "uint16", "int16")
#: operators between a product and what quantises its result
_DEPTH = 12


def _constants(affine: Affine, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point as float32, shaped to broadcast along their axis."""
    zero = affine.zero.astype(np.float32)
    return spread(affine.scale, affine.axis, rank), spread(zero, affine.axis, rank)


def _scaled(x: relax.Expr, affine: Affine, scope: Scope) -> relax.Expr:
    """``(x - z) * s``."""
    scale, zero = _constants(affine, len(shape_of(x)))
    if zero.any():
        x = scope.emit(op.subtract(x, constant(zero)))
    return op.multiply(x, constant(scale))


def dequantise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``dequantize(q) --> (float(q) - z) * s``."""
    affine = affine_of(call)
    if affine is None or dtype_of(call) != "float32":
        return None
    data = call.args[0]
    if dtype_of(data) not in _NARROW and affine.zero.any():
        return None
    return _scaled(scope.emit(op.astype(data, "float32")), affine, scope)


def quantise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(x) --> integer(clip(round(x / s) + z))``."""
    affine, dtype = affine_of(call), dtype_of(call)
    if affine is None or dtype not in _NARROW or dtype_of(call.args[0]) != "float32":
        return None
    x = call.args[0]
    scale, zero = _constants(affine, len(shape_of(x)))
    if _of_integers(x, scope):
        x = scope.emit(op.multiply(x, constant((1 / scale.astype(np.float64)).astype(np.float32))))
        x = scope.emit(op.add(x, constant(zero))) if zero.any() else x
        x = scope.emit(op.round(x))
    else:
        x = scope.emit(op.round(scope.emit(op.divide(x, constant(scale)))))
        x = scope.emit(op.add(x, constant(zero))) if zero.any() else x
    limits = np.iinfo(dtype)
    return op.astype(scope.emit(op.clip(x, float(limits.min), float(limits.max))), dtype)


def _of_integers(expr: relax.Expr, scope: Scope, depth: int = _DEPTH) -> bool:
    """Whether an integer product lies few operators before."""
    value = scope.value(expr)
    if not isinstance(value, relax.Call) or not depth:
        return False
    if str(value.op.name) == "relax.astype" and dtype_of(value.args[0]) == "int32":
        return True
    return any(_of_integers(leaf, scope, depth - 1) for leaf in set(leaves(value)))


RULES: Rules = {"relax.dequantize": (dequantise,), "relax.quantize": (quantise,)}

SpellOutQuantisation = rewrite_pass("SpellOutQuantisation", RULES)
