"""Weight-only quantisation on GPUs: which weights are packed, and in which type activations are multiplied.

``matmul(float(x), dequantise(W))``   -->   ``dense_few_bits(x, words of W, scales, zero points)``

Activations that a model has in 16 bits are multiplied as such, whatever it converts them to before: it does so for a
weight of float32, which here is none. Those of float32 stay float32 unless the options allow less.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.rewrite import dtype_of, op_name, shape_of
from mlc.graph.kernels.few_bits import dense_few_bits, middle, pack_integers, pack_scales
from mlc.options import CompileOptions
from schedules.cuda.packed import Packing

__all__ = ["activations", "multiplied", "multiplied_as", "packing_of", "uncast"]

_NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_ALLOWED = {"f16": "float16", "bf16": "bfloat16"}


def activations(
    expr: relax.Expr, bound: Mapping[relax.Var, relax.Expr]
) -> tuple[relax.Expr, relax.Call | None]:
    """The 16-bit floats that a conversion to float32 converts, and the ``take`` that puts them in order behind it, if
    one does; anything else as it is."""
    value = bound.get(expr) if isinstance(expr, relax.Var) else None
    taken = value if isinstance(value, relax.Call) and op_name(value) == "relax.take" else None
    found = uncast(expr if taken is None else taken.args[0], bound)
    return (found, taken) if dtype_of(found) in _NUMPY else (expr, None)


def uncast(expr: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """The operand of a conversion between float32 and 16-bit floats; anything else unchanged."""
    value = bound.get(expr) if isinstance(expr, relax.Var) else None
    if not isinstance(value, relax.Call) or op_name(value) != "relax.astype":
        return expr
    types = {dtype_of(value), dtype_of(value.args[0])}
    return value.args[0] if len(types) == 2 and "float32" in types and types <= {"float32", *_NUMPY} else expr


def packing_of(integers: np.ndarray, bits: int, block: int) -> Packing | None:
    """How a GPU has integers ``[K, N]`` of which every ``block`` of rows has a scale; None where it can't."""
    depth, columns = integers.shape
    packing = Packing(bits, min(block, depth), columns, depth)
    return None if packing.misfit else packing


def multiplied_as(data: relax.Expr, weight: Any, bits: int, options: CompileOptions) -> str | None:
    """The type that activations are multiplied in: of 16 bits where they are such or may be, and weights are within
    its range. None where zero points are not what that type can hold."""
    dtype = dtype_of(data) if dtype_of(data) in _NUMPY else _ALLOWED.get(options.precision, "float32")
    if dtype == "float32":
        return dtype
    with np.errstate(over="ignore"):
        largest = np.abs(weight.scale * (np.abs(weight.zero) + np.abs(weight.integers.astype(np.int32)).max())).max()
    if not largest <= float(ml_dtypes.finfo(_NUMPY[dtype]).max):
        return "float32"
    return dtype if _holds(_NUMPY[dtype], weight.zero + middle(bits)) else None


def multiplied(
    builder: relax.BlockBuilder, data: relax.Expr, shape: tuple[int, ...], weight: Any, packing: Packing, dtype: str
) -> relax.Expr:
    """The product, of that shape and of float32, of ``data`` with a packed weight; batches are more rows."""
    if dtype_of(data) != dtype:
        data = builder.emit(op.astype(data, dtype))
    if len(shape_of(data)) != 2:
        data = builder.emit(op.reshape(data, (prod(shape[:-1]), packing.depth)))
    if weight.order[0] is not None:
        data = builder.emit(op.take(data, constant(weight.order[0]), axis=1))
    scale = _stored(weight.scale, packing, dtype)
    zero = _stored(weight.zero + middle(packing.bits), packing, dtype) if weight.zero.any() else None
    words = constant(pack_integers(weight.integers, packing))
    result = builder.emit(builder.call_te(
        dense_few_bits, data, words, scale, zero, packing.columns, packing.bits, packing.block,
        primfunc_name_hint="dense_few_bits",
    ))
    return op.reshape(result, shape) if len(shape) != 2 else result


def _stored(array: np.ndarray, packing: Packing, dtype: str) -> relax.Expr:
    """Packed numbers in 16 bits, those of ``dtype`` first, where no digit is lost; else as float32."""
    array = array.astype(np.float32)
    types = [_NUMPY[dtype]] if dtype in _NUMPY else []
    kind = next((each for each in [*types, _NUMPY["float16"]] if _holds(each, array)), np.dtype(np.float32))
    return constant(pack_scales(array.astype(kind), packing))


def _holds(kind: np.dtype[Any], array: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(array.astype(kind).astype(np.float32), array.astype(np.float32)))
