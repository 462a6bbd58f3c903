"""Dynamic quantisation on GPUs: activations quantised by their range at run time, and the products of their bytes.

====================================================  ========================================================
before                                                after
====================================================  ========================================================
``quantize(x, scale, zero)`` with both made of        ``quantised(x, extremes(x))``, two kernels, to int8
``min(x)`` and ``max(x)`` (``DynamicQuantizeLinear``)
``matmul(x: uint8, W: int8) -> int32``                ``matmul(x - 128: int8, W) + 128 * sum(W)``, and
                                                      convolutions without a border
``sum(x: uint8)`` along the rows of such an ``x``     ``sum(x - 128: int8) + 128 * K``
``y - (zero * c: [1, N])``                            ``y - (zero * c: [N])``
====================================================  ========================================================

Every rule is bit-exact but for one rounding: ONNX divides the range by 255, which is done here as it says. Scales and
zero points stay on the device, single elements of what the kernel that quantises writes for each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import array_of, constant, scalar_of
from mlc.graph.ir.patterns import BROADCAST
from mlc.graph.ir.rewrite import Rule, Rules, Scope, bindings, dtype_of, op_name, rebuilt, rewrite, shape_of
from mlc.graph.kernels.dynamic import EXTREMES, extremes, first, quantised, row_sums
from mlc.graph.precision.integer_gpu import on_tensor_cores
from mlc.target import Target

__all__ = ["DynamicQuantisation", "is_normalised"]

#: how far int8 lies below uint8
_HALF = 128
#: rows that an activation is seen as, each of which reads the extremes of all, and the columns they have at least
_MOST_ROWS, _LEAST_COLUMNS = 512, 256
#: elements that one block of threads finds the extremes of and quantises
_ONE_BLOCK = 8192
#: what the importer makes of the range, ``x`` being what is quantised
_LEAST = "minimum(min(x),0)"
_EXTENT = f"subtract(maximum(max(x),0),{_LEAST})"
_SCALE = f"divide(where(equal({_EXTENT},0),1,{_EXTENT}),255)"
_ZERO = f"astype(round(minimum(maximum(divide(negative({_LEAST}),{_SCALE}),0),255)))"


def DynamicQuantisation(target: Target) -> tvm.transform.Pass:
    """Module pass: on GPUs, quantising by the range of what is quantised fills the GPU, and products of bytes take
    signed ones, as tensor cores do."""
    @tvm.transform.module_pass(opt_level=0, name="DynamicQuantisation")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "cuda":
            return mod
        takes = on_tensor_cores(target)
        rules: Rules = {"relax.matmul": (_signed_matmul(takes),), "relax.nn.conv2d": (_signed_convolution(takes),),
                        "relax.subtract": (_row,)}
        return rewrite(_with_kernels(mod), rules)

    return run


def _with_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    bound = {b.var: b.value for b in bindings(mod["main"])}
    scales: dict[relax.Var, relax.Expr] = {}
    zeros: dict[relax.Var, relax.Var] = {}
    results: dict[relax.Var, relax.Var] = {}
    for var, value in bound.items():
        if isinstance(value, relax.Call) and op_name(value) == "relax.quantize" and _is_dynamic(value, bound):
            x, scale, zero = value.args
            scales[scale], zeros[zero], results[var] = x, scale, scale
    if not results:
        return mod
    sums = {var: source for var, value in bound.items() if (source := _summed(value, bound)) in results}
    image: dict[relax.Var, relax.Expr] = {param: param for param in mod["main"].params}
    made: dict[relax.Var, tuple[relax.Expr, relax.Expr]] = {}

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var in scales:
            data, scale, zero = _quantised(builder, image[scales[var]], var.name)
            made[var] = data, zero
            return scale
        if var in zeros:
            moved = op.add(made[zeros[var]][1], constant(np.array(_HALF, "int32")))
            return op.astype(builder.emit(moved), "uint8")
        if var in sums:
            rows = op.reshape(made[results[sums[var]]][0], (-1, shape_of(sums[var])[-1]))
            total = builder.call_te(row_sums, builder.emit(rows), primfunc_name_hint="row_sums")
            return op.reshape(builder.emit(total), shape_of(var))
        if var in results:
            wide = builder.emit(op.astype(made[results[var]][0], "int16"))
            return op.astype(builder.emit(op.add(wide, constant(np.array(_HALF, "int16")))), "uint8")
        return value

    return rebuilt(mod, bound, change, image=image)


def _is_dynamic(call: relax.Call, bound: Mapping[relax.Var, relax.Expr]) -> bool:
    """Whether ``DynamicQuantizeLinear`` was imported as this ``quantize``."""
    x, scale, zero = call.args
    if not all(isinstance(each, relax.Var) for each in call.args) or dtype_of(call) != "uint8":
        return False
    known = all(isinstance(extent, int) for extent in shape_of(x))
    return known and prod(shape_of(x)) > 0 and len(shape_of(x)) > 0 and (
        _text(scale, x, bound) == _SCALE and _text(zero, x, bound) == _ZERO)


def _summed(value: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> relax.Expr | None:
    """The bytes whose rows are added up in int32."""
    if not isinstance(value, relax.Call) or op_name(value) != "relax.sum" or not shape_of(value.args[0]):
        return None
    wide, last = bound.get(value.args[0]), len(shape_of(value.args[0])) - 1
    if not isinstance(wide, relax.Call) or op_name(wide) != "relax.astype" or dtype_of(wide) != "int32":
        return None
    axes = value.attrs.axis
    return wide.args[0] if axes is not None and [int(axis) % (last + 1) for axis in axes] == [last] else None


def _text(expr: relax.Expr, x: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> str:
    """The expression as operators of ``x`` and numbers; scalars alone, but for ``x``."""
    if expr.same_as(x):
        return "x"
    value, number = bound.get(expr, expr), scalar_of(expr)
    if number is not None:
        return f"{number:g}"
    if not isinstance(value, relax.Call) or shape_of(value):
        return "?"
    parts = [_text(arg, x, bound) for arg in value.args if isinstance(arg.ty, relax.TensorType)]
    return f"{op_name(value).removeprefix('relax.')}({','.join(parts)})"


def _quantised(
    builder: relax.BlockBuilder, x: relax.Expr, name: str
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """int8 of the shape of ``x``, its scale and its zero point of int32, which int8 can hold, bound by ``name``."""
    def emit(value: relax.Expr) -> relax.Expr:
        return builder.emit(value, name)

    size = prod(shape_of(x))
    rows = _rows(size)
    matrix = emit(op.reshape(x, (rows, size // rows)))
    parts = None
    if rows > 1:
        columns = _normalised_columns(builder, x)
        of = matrix if columns is None or size > columns * _MOST_ROWS else emit(
            op.reshape(x, (size // columns, columns)))
        parts = emit(builder.call_te(extremes, of, primfunc_name_hint=EXTREMES))
    made = emit(builder.call_te(quantised, matrix, parts, primfunc_name_hint="dynamic_quantize"))
    data, *each = (emit(relax.TupleGetItem(made, i)) for i in range(3))
    scale, zero = (emit(builder.call_te(first, rows_of, primfunc_name_hint="first",
                                        primfunc_attrs={"op_pattern": BROADCAST})) for rows_of in each)
    return emit(op.reshape(data, shape_of(x))), scale, zero


def is_normalised(value: relax.Expr | None) -> bool:
    """Whether layer normalisation along the last axis makes the value."""
    if not isinstance(value, relax.Call) or op_name(value) != "relax.nn.layer_norm" or dtype_of(value) != "float32":
        return False
    rank, attrs = len(shape_of(value)), value.attrs
    return [int(axis) % rank for axis in attrs.axes] == [rank - 1] and bool(attrs.center) and bool(attrs.scale)


def _normalised_columns(builder: relax.BlockBuilder, x: relax.Expr) -> int | None:
    """The length of the rows that were normalised to make ``x``; None where it is anything else."""
    value = builder.lookup_binding(x)
    while isinstance(value, relax.Call) and op_name(value) == "relax.reshape":
        value = builder.lookup_binding(value.args[0]) if isinstance(value.args[0], relax.Var) else None
    return shape_of(value)[-1] if is_normalised(value) else None


def _rows(size: int) -> int:
    """How many rows, a block of threads for each, so many elements are dealt out to; one where they are few, or where
    no number divides them."""
    if size <= _ONE_BLOCK:
        return 1
    fitting = [rows for rows in range(2, _MOST_ROWS + 1) if size % rows == 0 and size // rows >= _LEAST_COLUMNS]
    vectors = [rows for rows in fitting if size // rows % 4 == 0]
    return max(vectors or fitting, default=1)


def _signed(expr: relax.Expr, scope: Scope) -> relax.Expr | None:
    """The int8 expression that ``expr`` is shifted to uint8 from, by 128."""
    cast = scope.call(expr, "astype")
    moved = scope.call(cast.args[0], "add") if cast is not None else None
    wide = scope.call(moved.args[0], "astype") if moved is not None else None
    if wide is None or moved is None or scalar_of(moved.args[1]) != _HALF or dtype_of(wide.args[0]) != "int8":
        return None
    return wide.args[0] if dtype_of(wide) == "int16" else None


def _moved(call: relax.Call, scope: Scope, worth: bool) -> relax.Expr | None:
    """The data of a product of uint8 with int8, as int8; where it must be made of uint8, only if that is ``worth``
    a kernel."""
    if dtype_of(call) != "int32" or [dtype_of(arg) for arg in call.args] != ["uint8", "int8"]:
        return None
    found = _signed(call.args[0], scope)
    if found is not None or not worth:
        return found
    wide = scope.emit(op.astype(call.args[0], "int16"))
    return scope.emit(op.astype(scope.emit(op.subtract(wide, constant(np.array(_HALF, "int16")))), "int8"))


def _signed_matmul(takes: Callable[[relax.Call], bool]) -> Rule:
    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        weight = array_of(call.args[1])
        if weight is None or weight.ndim != 2:
            return None
        data = _moved(call, scope, takes(call))
        if data is None:
            return None
        total = scope.emit(op.matmul(data, call.args[1], out_dtype="int32"))
        return op.add(total, constant(_HALF * weight.sum(axis=0, dtype=np.int32)))

    return rule


def _signed_convolution(takes: Callable[[relax.Call], bool]) -> Rule:
    def rule(call: relax.Call, scope: Scope) -> relax.Expr | None:
        weight, attrs = array_of(call.args[1]), call.attrs
        plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == "OIHW" and not any(map(int, attrs.padding))
        if weight is None or not plain:
            return None
        data = _moved(call, scope, takes(call))
        if data is None:
            return None
        total = scope.emit(relax.Call(call.op, [data, call.args[1]], attrs, call.ty_args))
        return op.add(total, constant(_HALF * weight.sum(axis=(1, 2, 3), dtype=np.int32).reshape(1, -1, 1, 1)))

    return rule


def _row(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``y - (zero * c: [1, N]) --> y - (zero * c: [N])``: no reshape stands between the product and the sum where the
    rows of ``y`` become those of a matrix."""
    times, rank = scope.call(call.args[1], "multiply"), len(shape_of(call.args[0]))
    row = array_of(times.args[1]) if times is not None else None
    if times is None or row is None or row.ndim != 2 or row.shape[0] != 1 or rank < 2 or shape_of(times.args[0]):
        return None
    return op.subtract(call.args[0], scope.emit(op.multiply(times.args[0], constant(row.reshape(-1)))))
