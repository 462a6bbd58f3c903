"""``precision`` of the compile options on GPUs: operands of float32 products rounded to fewer bits.

Tensor cores multiply operands of fewer bits and add the products up in float32. With ``f16`` or ``bf16`` both operands
become tensors of that type, which half the bytes pass to and from:

``matmul(x, W)``   -->   ``matmul(f16(x), f16(W), out_dtype=f32)``

What a convolution of images reads rounded is rounded for everybody, so that it is stored once; so is a normalised
tensor, which a residual sum reads beside the products.
Conversions move before the transposes and reshapes of an operand, and before several slices of one tensor, where the
kernel that computes it can end with one.
With ``tf32`` tensors stay float32, and tensor functions say that the operands of their products may be rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, tirx

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import Rules, Scope, bindings, dtype_of, leaves, op_name, rebuilt, rewrite, shape_of
from mlc.graph.precision.bfloats import TENSOR_PRODUCTS
from mlc.graph.precision.widened import with_attrs
from mlc.options import CompileOptions
from mlc.target import Target
from schedules.cuda.contraction import with_tf32

__all__ = ["AllowTensorFloat", "NarrowOperands"]

#: whose operands what else reads them reads rounded too, and whose results, which are about 1
_IMAGES = ("relax.nn.conv2d", "relax.nn.conv2d_transpose")
_NORMS = ("relax.nn.layer_norm", "relax.nn.rms_norm")
_TYPES = {"f16": "float16", "bf16": "bfloat16"}
_NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def NarrowOperands(
    target: Target, options: CompileOptions, tidy: Sequence[tvm.transform.Pass] = ()
) -> tvm.transform.Pass:
    """Module pass: on GPUs, with precision ``f16`` or ``bf16``, products of float32 take operands of that type.

    Depthwise convolutions do not, which no tensor core computes, nor products with a constant beyond the type's range.
    ``tidy`` are passes that share equal conversions and move them before the movement of what they convert.
    """
    tidied = tvm.transform.Sequential([*tidy])

    @tvm.transform.module_pass(opt_level=0, name="NarrowOperands")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        dtype = _TYPES.get(options.precision) if target.kind == "cuda" else None
        if dtype is None:
            return mod
        rules: Rules = {name: (lambda call, scope: _narrow(call, scope, dtype),) for name in TENSOR_PRODUCTS}
        narrowed = rewrite(mod, rules)
        if narrowed.same_as(mod):
            return mod
        narrowed = _held_rounded(narrowed, dtype)
        slices: Rules = {"relax.astype": (lambda call, scope: _before_slices(call, scope, dtype),)}
        return tidied(rewrite(tidied(narrowed), slices))

    return run


def _narrow(call: relax.Call, scope: Scope, dtype: str) -> relax.Expr | None:
    if any(dtype_of(arg) != "float32" for arg in call.args) or dtype_of(call) != "float32" or _depthwise(call):
        return None
    arrays = [array_of(arg) for arg in call.args]
    largest = float(ml_dtypes.finfo(_NUMPY[dtype]).max)
    if any(array is not None and not np.abs(array).max(initial=0.0) <= largest for array in arrays):
        return None
    args = [
        scope.emit(relax.op.astype(arg, dtype)) if array is None else constant(array.astype(_NUMPY[dtype]))
        for arg, array in zip(call.args, arrays, strict=True)
    ]
    return relax.Call(call.op, args, with_attrs(call.attrs, {"out_dtype": "float32"}), call.ty_args)


def _held_rounded(mod: tvm.IRModule, dtype: str) -> tvm.IRModule:
    """What a convolution reads in ``dtype`` and others as it is, is rounded for all of them: the sum of a residual
    block is then written once, in half the bytes, by the kernel that makes it. So is what a norm makes."""
    func = mod["main"]
    bound = {b.var: b.value for b in bindings(func)}
    readers: dict[relax.Var, list[relax.Var | None]] = defaultdict(list)
    for var, value in [*bound.items(), (None, func.body.body)]:
        for leaf in leaves(value):
            readers[leaf].append(var)

    def narrow(reader: relax.Var | None) -> bool:
        value = bound.get(reader)
        return isinstance(value, relax.Call) and op_name(value) == "relax.astype" and dtype_of(value) == dtype

    convolved = {arg for value in bound.values() if isinstance(value, relax.Call) and op_name(value) in _IMAGES
                 for arg in value.args if narrow(arg)}

    def rounded(var: relax.Var, value: relax.Expr) -> bool:
        if isinstance(value, relax.Call) and op_name(value) in _NORMS:
            return any(map(narrow, readers[var]))
        return any(r in convolved for r in readers[var])

    held = {var for var, value in bound.items() if rounded(var, value) and None not in readers[var]
            and not all(map(narrow, readers[var]))}

    def changed(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var not in held:
            return value
        return relax.op.astype(builder.emit(relax.op.astype(builder.emit(value), dtype)), "float32")

    return rebuilt(mod, bound, changed) if held else mod


def _before_slices(call: relax.Call, scope: Scope, dtype: str) -> relax.Expr | None:
    """``astype(strided_slice(x)) --> strided_slice(astype(x))`` of an ``x`` that is read more than once."""
    part = scope.call(call.args[0], "strided_slice") if dtype_of(call) == dtype else None
    whole = part.args[0] if part is not None and scope.once(call.args[0]) else None
    if part is None or not isinstance(whole, relax.Var) or scope.uses(whole) < 2 or dtype_of(whole) != "float32":
        return None
    return relax.Call(part.op, [scope.emit(relax.op.astype(whole, dtype)), *part.args[1:]], part.attrs)


def _depthwise(call: relax.Call) -> bool:
    """Whether each output channel is made from one input channel."""
    if op_name(call) == "relax.matmul" or shape_of(call.args[1])[1] != 1:
        return False
    return "transpose" not in op_name(call) or int(call.attrs.groups) > 1


def AllowTensorFloat(options: CompileOptions) -> tvm.transform.Pass:
    """Module pass over tensor functions: with precision ``tf32``, products of float32 may round their operands."""

    @tvm.transform.module_pass(opt_level=0, name="AllowTensorFloat")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if options.precision != "tf32":
            return mod
        marked = {
            var: with_tf32(func) if isinstance(func, tirx.PrimFunc) else func for var, func in mod.functions_items()
        }
        return tvm.IRModule(marked, attrs=mod.attrs, global_infos=mod.global_infos)

    return run
