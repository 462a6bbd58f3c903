"""Requantisation of 8-bit integers, and of sums of two, without a division.

====================================================================  ===============================================
before                                                                after
====================================================================  ===============================================
``quantize(dequantize(p, r, x), s, z)``                               ``integer(clip(int32(round(a * m)) + z))`` with
``quantize(dequantize(p, r, x) + dequantize(q, t, y), s, z)``         what is quantised for ``a``, ``1 / s`` for ``m``
====================================================================  ===============================================

A division takes as long as ten multiplications, but rounds once where ``a * m`` rounds twice. 8-bit operands have few
values: a rule applies where it gives the same integer for every one of them, or pair of them, and so is bit-exact.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass
from mlc.graph.precision.affine import Affine, Dequantised, affine_of, dequantised

__all__ = ["Rescale"]

_INTEGERS = ("uint8", "int8")
#: what a rounded quotient stays below, so that adding a zero point leaves it an int32
_LARGEST = 2.0**30


def rescale(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``quantize(a) --> integer(clip(int32(round(a * (1 / s))) + z))`` of a few 8-bit operands."""
    affine, operands = affine_of(call), _operands(call.args[0], scope)
    if affine is None or not affine.single or dtype_of(call) not in _INTEGERS or not operands:
        return None
    scale = affine.scale.reshape(())
    factor = (1 / scale.astype(np.float64)).astype(np.float32)
    sums = _sums(operands)
    with np.errstate(over="ignore"):
        expected, *rounded = (np.rint(each) for each in (sums[0] / scale, *(each * factor for each in sums)))
    if not all(np.array_equal(_clipped(each, call), _clipped(expected, call)) for each in rounded):
        return None
    if not max(float(np.abs(each).max()) for each in rounded) < _LARGEST:
        return None
    product = scope.emit(op.multiply(call.args[0], constant(factor)))
    whole = scope.emit(op.astype(scope.emit(op.round(product)), "int32"))
    if affine.zero.any():
        whole = scope.emit(op.add(whole, constant(affine.zero.astype(np.int32).reshape(()))))
    limits = np.iinfo(dtype_of(call))
    return op.astype(scope.emit(op.clip(whole, float(limits.min), float(limits.max))), dtype_of(call))


def _operands(expr: relax.Expr, scope: Scope) -> list[Dequantised]:
    """The integers whose numbers ``expr`` is, or the sum of; none where it is anything else."""
    total = scope.call(expr, "add")
    found = [dequantised(each, scope) for each in (total.args if total is not None else [expr])]
    known = [each for each in found if each is not None and each.affine.single and each.dtype in _INTEGERS]
    return known if len(known) == len(found) else []


def _numbers(operand: Dequantised) -> tuple[np.ndarray, np.ndarray]:
    """All integers less the zero point, and the scale."""
    limits, affine = np.iinfo(operand.dtype), operand.affine
    return (np.arange(limits.min, limits.max + 1) - affine.zero.item()).astype(np.float32), affine.scale.reshape(())


def _sums(operands: list[Dequantised]) -> list[np.ndarray]:
    """The possible float32 sums of all pairs of values: as written, or with either product in a fused multiply-add."""
    integers, scales = zip(*map(_numbers, operands), strict=True)
    exact = [each.astype(np.float64) * scale for each, scale in zip(integers, scales, strict=True)]
    single = [each.astype(np.float32) for each in exact]
    if len(operands) == 1:
        return single
    pairs = ((single[0], single[1]), (exact[0], single[1]), (single[0], exact[1]))
    return [(one[:, None] + other[None, :]).astype(np.float32) for one, other in pairs]


def _clipped(whole: np.ndarray, call: relax.Call) -> np.ndarray:
    affine, limits = affine_of(call), np.iinfo(dtype_of(call))
    assert isinstance(affine, Affine)
    return np.clip(whole + affine.zero.item(), limits.min, limits.max)


RULES: Rules = {"relax.quantize": (rescale,)}

Rescale = rewrite_pass("Rescale", RULES)
