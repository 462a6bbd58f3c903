"""What normalises rows on a GPU finds their extremes on the way, which quantising by the range of all asks for.

``y = layer_norm(x); e = extremes(y)``   -->   ``y, e = normalised(x)``
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import bindings, op_name, rebuilt, shape_of
from mlc.graph.kernels.dynamic import EXTREMES, normalised
from mlc.graph.precision.dynamic import is_normalised

__all__ = ["JoinExtremes"]


def _join(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    bound = {b.var: b.value for b in bindings(mod["main"])}

    def source(value: relax.Expr) -> relax.Var | None:
        """What is normalised whose rows these are the extremes of."""
        if not isinstance(value, relax.Call) or op_name(value) != "relax.call_tir" or (
            not str(value.args[0].name_hint).startswith(EXTREMES)):
            return None
        rows = data = value.args[1].fields[0]
        while isinstance(bound.get(data), relax.Call) and op_name(bound[data]) == "relax.reshape":
            data = bound[data].args[0]
        return data if is_normalised(bound.get(data)) and shape_of(data)[-1] == shape_of(rows)[-1] else None

    sources = {var: data for var, value in bound.items() if (data := source(value)) is not None}
    if not sources:
        return mod
    extremes: dict[relax.Var, relax.Expr] = {}

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var in sources:
            return op.reshape(extremes[sources[var]], shape_of(var))
        if var not in sources.values():
            return value
        attrs = value.attrs
        both = builder.emit(builder.call_te(
            normalised, *value.args, [int(axis) for axis in attrs.axes], float(attrs.epsilon),
            primfunc_name_hint="layer_norm"), var.name)
        extremes[var] = builder.emit(relax.TupleGetItem(both, 1), var.name)
        return relax.TupleGetItem(both, 0)

    return relax.transform.DeadCodeElimination()(rebuilt(mod, bound, change))


JoinExtremes = tvm.transform.module_pass(_join, opt_level=0, name="JoinExtremes")
