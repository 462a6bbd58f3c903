"""New rows of what a model remembers: the kernel that makes them writes them where they stay."""

from __future__ import annotations

import tvm
from tvm import relax, topi

from mlc.graph.ir.rewrite import bindings, rebuilt
from mlc.graph.ir.states import is_append

__all__ = ["PlaceAppends"]


def _place_appends(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Gives each append rows of its own, by a copy that fuses into the kernel that makes them."""
    bound = {b.var: b.value for b in bindings(mod["main"])}
    if not any(map(is_append, bound.values())):
        return mod

    def placed(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if not is_append(value):
            return value
        name, rows, state = value.args
        copy = builder.emit(builder.call_te(topi.identity, rows, primfunc_name_hint="append"))
        return relax.Call(value.op, [name, copy, state], value.attrs, value.ty_args)

    return rebuilt(mod, bound, placed)


PlaceAppends = tvm.transform.module_pass(_place_appends, opt_level=0, name="PlaceAppends")
