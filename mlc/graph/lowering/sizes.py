"""Functions with free sizes name them as their callers do.

Equal functions are one in a module: what is made for ``batch`` may be called for ``seq``. Ranges go with names, and a
schedule may count on them, so that each free size gets a function of its own.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from mlc.graph.ir.rewrite import bindings, builder_of, op_name, rebuilt
from mlc.sizes import UndecidedSizeError, in_scope
from schedules.analysis import replaced
from schedules.free import variables

__all__ = ["NameSizes"]

#: an attribute of functions that are equal but for the names of their free sizes
_NAMES = "mlc.names"


def _name_sizes(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    if not in_scope():
        return mod
    made: dict[tuple[str, ...], tvm.ir.GlobalVar] = {}

    def named(builder: relax.BlockBuilder, _var: relax.Var, value: relax.Expr) -> relax.Expr:
        if not isinstance(value, relax.Call) or op_name(value) != "relax.call_tir":
            return value
        gvar = value.args[0]
        func = mod[gvar]
        sizes = _bound(func, value)
        wrong = {var: sizes[var] for var in variables(func) if str(var.name) != _name(sizes.get(var))}
        if not wrong:
            return value
        key = (gvar.name_hint, *(f"{var.name}={_name(size)}" for var, size in wrong.items()))
        if key not in made:
            image = {var: tirx.Var(_name(size), str(var.ty)) for var, size in wrong.items()}
            copy = replaced(func, image)
            # names alone would not keep the builder from taking an equal function for it
            made[key] = builder.add_func(copy.with_attr(_NAMES, [str(var.name) for var in image.values()]),
                                         gvar.name_hint)
        return relax.Call(value.op, [made[key], *value.args[1:]], value.attrs, value.ty_args)

    return rebuilt(mod, {b.var: b.value for b in bindings(mod["main"])}, named, builder_of(mod))


def _bound(func: tirx.PrimFunc, call: relax.Call) -> dict[tirx.Var, Any]:
    """What each variable of the function is in a call of it, where a parameter or an axis is that variable alone."""
    out = call.ty_args[0]
    types = [arg.ty for arg in call.args[1].fields] + (list(out.fields) if isinstance(out, relax.TupleType) else [out])
    given = [*call.args[1].fields, *[None] * (len(types) - len(call.args[1].fields))]
    found: dict[tirx.Var, Any] = {}
    for param, arg, ty in zip(func.params, given, types, strict=True):
        if isinstance(param.ty, tvm.ir.PrimType):
            found[param] = arg
            continue
        for axis, size in zip(param.shape, ty.shape.values, strict=True):
            if isinstance(axis, tirx.Var):
                found.setdefault(axis, size)
    return found


def _name(size: Any) -> str:
    """The name of the free size that an expression is; raises :class:`UndecidedSizeError` for any other."""
    if isinstance(size, tirx.Var) and str(size.name) in in_scope():
        return str(size.name)
    names = ", ".join(in_scope())
    raise UndecidedSizeError(f"a function's size must be one of the free ones, {names}, got {size}; fix the sizes, as "
                             "in --shape NAME=8,128")


NameSizes = tvm.transform.module_pass(_name_sizes, opt_level=0, name="NameSizes")
