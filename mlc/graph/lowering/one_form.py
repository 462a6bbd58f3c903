"""One way to write a free size, wherever it stands in the tensors that functions take."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import relax, tirx

from mlc.graph.ir.rewrite import bindings, rebuilt
from schedules.analysis import replaced

__all__ = ["WriteSizesAlike"]


@tvm.transform.module_pass(opt_level=0, name="WriteSizesAlike")
def WriteSizesAlike(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Parameters of tensor functions, and what calls of them make, have simplified sizes.

    A concatenation makes ``n + 1`` elements where what reads them was made for ``1 + n``. To TVM, which compares how
    sizes are written where it fuses the two, those are different tensors. It also compares, part by part, the size
    that a function was made for with that of the call before: so both are written anew, or neither.
    """
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    made = {var: _alike(func) for var, func in functions.items()}
    changed = {var: func for var, func in made.items() if func is not functions[var]}
    if not changed:
        return mod
    result = mod.clone()
    for var, func in changed.items():
        result.update_func(var, func)
    bound = {binding.var: binding.value for binding in bindings(result["main"])}
    return rebuilt(result, bound, lambda _builder, _var, value: _typed(value))


def _simple(shape: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    analyzer = tvm.sym.Analyzer()
    return [size if isinstance(size, tirx.IntImm | tirx.Var) else analyzer.simplify(size) for size in shape]


def _typed(value: relax.Expr) -> relax.Expr:
    """The call of a tensor function with simplified sizes of what it makes; anything else as it is."""
    if not isinstance(value, relax.Call) or not value.ty_args:
        return value
    return relax.Call(value.op, value.args, value.attrs, [_simple_type(ty) for ty in value.ty_args])


def _simple_type(ty: tvm.ir.Type) -> tvm.ir.Type:
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([_simple_type(field) for field in ty.fields])
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return ty
    return relax.TensorType(relax.ShapeExpr(_simple(ty.shape.values)), ty.dtype, ty.vdevice)


def _alike(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with simplified sizes; the same object where they are."""
    image = {}
    for param in func.params:
        shape = list(getattr(param, "shape", ()))
        simple = _simple(shape)
        if not all(tvm_ffi.structural_equal(*pair) for pair in zip(shape, simple, strict=True)):
            image[param] = tirx.decl_buffer(simple, str(param.dtype), name=str(param.name), scope=str(param.scope()),
                                            layout=param.ty.layout)  # that of TVM's own functions is none
    if not image:
        return func
    params = [image.get(param, param) for param in func.params]
    made = tirx.PrimFunc(params, replaced(func.body, image), func.ret_type)
    return made.with_attrs(dict(func.attrs)) if func.attrs else made
