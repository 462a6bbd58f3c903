"""16-bit floats are widened: they are storage types, and arithmetic is float32.

CPUs convert float16 and bfloat16 in a cycle and add and multiply them slowly or not at all, and sums of many 16-bit
floats lose what the model needs. So every tensor of 16-bit floats becomes one of float32, but for the model's inputs
and outputs and for casts that the model itself asks for:

``f(x: f16, W: f16) -> f16``   -->   ``f16(f(float(x), float(W)))``, ``W`` a constant of float32 with 16-bit values

No intermediate result is rounded to 16 bits, so that the result is nearer to exact arithmetic than the model's own,
and what would overflow float16 does not. Constants keep the values that 16 bits can hold where nothing is folded into
them, so that an artifact may store those bits alone. That a model multiplies bfloat16 is noted
(:mod:`mlc.graph.precision.bfloats`).

GPUs multiply 16-bit floats faster than float32 and add the products up in float32 (:data:`WidenSums`). So there the
operands of the model's own products of 16-bit floats stay what they are, each rounded as the model rounds it, and
everything else, sums first of all, is float32:

``matmul(x: f16, W: f16) -> f16``   -->   ``matmul(f16(x), W, out_dtype=f32)``

What else reads such an operand (a residual sum) reads it rounded too, as it does in the model, so that one kernel makes
it and writes half the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from mlc.graph.ir.constants import constant, tensor_of
from mlc.graph.ir.rewrite import bindings, builder_of, dtype_of, emit_result, leaves, op_name
from mlc.graph.precision.bfloats import OF_BFLOATS, TENSOR_PRODUCTS, multiplies_bfloats

__all__ = ["WidenFloats", "WidenSums", "with_attrs"]

_NARROW = ("float16", "bfloat16")
_CAST = "relax.astype"


def _is_narrow(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and dtype_of(expr) in _NARROW


def _has_narrow(ty: Any) -> bool:
    if isinstance(ty, relax.TupleType):
        return any(map(_has_narrow, ty.fields))
    return isinstance(ty, relax.TensorType) and str(ty.dtype) in _NARROW


def _run(mod: tvm.IRModule, products: bool) -> tvm.IRModule:
    func = mod["main"]
    expressions = [*func.params, *(arg for b in bindings(func) for arg in _arguments(b.value))]
    if not any(map(_is_narrow, expressions)) and not any(_has_narrow(b.var.ty) for b in bindings(func)):
        return mod
    return _Widening(mod, products).run()


def _arguments(value: relax.Expr) -> list[relax.Expr]:
    if isinstance(value, relax.Call):
        return [field for arg in value.args for field in _arguments(arg)]
    if isinstance(value, relax.Tuple):
        return [field for arg in value.fields for field in _arguments(arg)]
    return [value]


def _multiplied_and_read(func: relax.Function) -> frozenset[relax.Var]:
    """Variables of 16-bit floats that products multiply and that other operators, which are not the result, read."""
    multiplied: set[relax.Var] = set()
    others: set[relax.Var] = set()
    for binding in bindings(func):
        value = binding.value
        call = isinstance(value, relax.Call) and op_name(value) in TENSOR_PRODUCTS
        product = call and all(map(_is_narrow, value.args))
        (multiplied if product else others).update(leaves(value))
    return frozenset((multiplied & others) - set(leaves(func.body.body)))


class _Widening:
    """Emits main again with 16-bit floats as float32, but for the operands of ``products`` where those stay."""

    def __init__(self, mod: tvm.IRModule, products: bool) -> None:
        self._mod, self._builder, self._products = mod, builder_of(mod), products
        self._given = frozenset(mod["main"].params)
        self._image: dict[relax.Var, relax.Expr] = {}
        self._rounded_once = _multiplied_and_read(mod["main"]) if products else frozenset()
        self._narrow: dict[relax.Var, relax.Expr] = {}  # as the model has them

    def run(self) -> tvm.IRModule:
        func, builder = self._mod["main"], self._builder
        attrs = dict(func.attrs or {})
        if not self._products and multiplies_bfloats(func):
            attrs[OF_BFLOATS] = 1
        with builder.function("main", list(func.params), attrs=attrs):
            with builder.dataflow():
                for param in func.params:
                    if _is_narrow(param):
                        self._image[param] = self._cast(param, "float32")
                for binding in bindings(func):
                    self._image[binding.var] = self._bound(binding.var, self._value(binding.value))
                result = emit_result(builder, self._result(func.body.body))
            builder.emit_func_output(result)
        return relax.transform.CanonicalizeBindings()(builder.finalize())

    def _bound(self, var: relax.Var, value: relax.Expr) -> relax.Expr:
        wide = self._builder.emit(value, var.name)
        if var not in self._rounded_once:
            return wide
        self._narrow[var] = self._cast(wide, dtype_of(var))
        return self._cast(self._narrow[var], "float32")

    def _cast(self, expr: relax.Expr, dtype: str) -> relax.Expr:
        return self._builder.emit(relax.op.astype(expr, dtype))

    def _result(self, expr: relax.Expr) -> relax.Expr:
        """The function's result, with its original types."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._result(field) for field in expr.fields])
        if isinstance(expr.ty, relax.TupleType):
            parts = [self._builder.emit(relax.TupleGetItem(self._wide(expr), i)) for i in range(len(expr.ty.fields))]
            narrow = [_has_narrow(ty) for ty in expr.ty.fields]
            return relax.Tuple([
                self._cast(part, str(ty.dtype)) if few else part
                for part, few, ty in zip(parts, narrow, expr.ty.fields, strict=True)
            ])
        return self._cast(self._wide(expr), dtype_of(expr)) if _is_narrow(expr) else self._wide(expr)

    def _wide(self, expr: relax.Expr) -> relax.Expr:
        """The expression with what it is made of in float32."""
        if isinstance(expr, relax.Var):
            return self._image.get(expr, expr)
        tensor = tensor_of(expr)
        if tensor is not None and _is_narrow(expr):
            return constant(tensor.numpy().astype(np.float32))
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._wide(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._wide(expr.tuple_value), expr.index)
        return expr

    def _value(self, value: relax.Expr) -> relax.Expr:
        if not isinstance(value, relax.Call):
            return self._wide(value)
        if op_name(value).startswith("relax.call_"):
            return self._called(value)
        if self._products and op_name(value) in TENSOR_PRODUCTS and all(map(_is_narrow, value.args)):
            return self._summed(value)
        args = [self._wide(arg) for arg in value.args]
        if op_name(value) == _CAST:
            return self._rounded(value, args[0])
        return relax.Call(value.op, args, _wide_attrs(value.attrs), value.ty_args)

    def _summed(self, call: relax.Call) -> relax.Expr:
        """A product of the operands as the model has them, added up in float32."""
        args = [self._as_it_was(arg) for arg in call.args]
        return relax.Call(call.op, args, with_attrs(call.attrs, {"out_dtype": "float32"}), call.ty_args)

    def _called(self, call: relax.Call) -> relax.Expr:
        """A tensor function that the importer made keeps its types."""
        args = [self._as_it_was(arg) for arg in call.args]
        result = self._builder.emit(relax.Call(call.op, args, call.attrs, call.ty_args))
        if _is_narrow(call):
            return relax.op.astype(result, "float32")
        if not _has_narrow(call.ty):
            return result
        parts = [self._builder.emit(relax.TupleGetItem(result, i)) for i in range(len(call.ty.fields))]
        return relax.Tuple([self._cast(part, "float32") if _is_narrow(part) else part for part in parts])

    def _as_it_was(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._as_it_was(field) for field in expr.fields])
        if expr in self._narrow:
            return self._narrow[expr]
        if isinstance(expr, relax.Var) and _is_narrow(expr):
            wide = self._wide(expr)
            return expr if wide is expr or expr in self._given else self._cast(wide, dtype_of(expr))
        return self._wide(expr) if isinstance(expr, relax.Var) else expr

    def _rounded(self, cast: relax.Call, x: relax.Expr) -> relax.Expr:
        """A cast that the model has: one to 16 bits rounds, but for integers of 8 bits, which both types hold."""
        dtype = dtype_of(cast)
        if dtype in _NARROW and dtype_of(cast.args[0]) not in (dtype, "int8", "uint8"):
            return relax.op.astype(self._cast(x, dtype), "float32")
        return relax.op.astype(x, "float32" if dtype in _NARROW else dtype)


def _wide_attrs(attrs: Any) -> Any:
    """Attributes with float32 wherever they name a type of 16-bit floats."""
    if attrs is None:
        return None
    fields = {field.name: getattr(attrs, field.name) for field in _fields(attrs)}
    changed = {name: "float32" for name, value in fields.items() if str(value) in _NARROW}
    return with_attrs(attrs, changed) if changed else attrs


def with_attrs(attrs: Any, changed: Mapping[str, str]) -> Any:
    """An operator's attributes with others in place of some."""
    fields = {field.name: getattr(attrs, field.name) for field in _fields(attrs)}
    return tvm.ir.make_node(type(attrs).__tvm_ffi_type_info__.type_key, **{**fields, **changed})


def _fields(attrs: Any) -> list[Any]:
    info: list[Any] = []
    for kind in type(attrs).__mro__:
        found = kind.__dict__.get("__tvm_ffi_type_info__")
        if found is not None:
            info.extend(found.fields or ())
    return info


WidenFloats = tvm.transform.module_pass(lambda mod, _ctx: _run(mod, False), opt_level=0, name="WidenFloats")
WidenSums = tvm.transform.module_pass(lambda mod, _ctx: _run(mod, True), opt_level=0, name="WidenSums")
