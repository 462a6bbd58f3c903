"""Concatenations that begin or end with one that there is already are made of it.

``b = concat((x, y)); c = concat((x, y, z))   -->   c = concat((b, z))``

DenseNet joins all earlier layers before each one; made of each other, the joined tensors share one piece of memory
(:mod:`mlc.graph.concat`) instead of copying every layer again and again.
"""

from __future__ import annotations

import tvm
from tvm import relax

from mlc.graph.rewrite import bindings, op_name, replaced

__all__ = ["ShareConcats"]


def _share_concats(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    func = mod["main"]
    known: dict[tuple[int, tuple[relax.Expr, ...]], relax.Var] = {}
    shorter: dict[relax.Var, relax.Call] = {}
    for binding in bindings(func):
        call = binding.value
        if not isinstance(call, relax.Call) or op_name(call) != "relax.concat":
            continue
        parts = _parts(call)
        if parts is None:
            continue
        axis = int(call.attrs.axis or 0) % len(binding.var.ty.shape.values)
        fields = _shared(parts, {run[1]: var for run, var in known.items() if run[0] == axis})
        if fields is not None:
            shorter[binding.var] = relax.op.concat(fields, axis)
        known.setdefault((axis, parts), binding.var)
    return _with(mod, shorter) if shorter else mod


def _parts(call: relax.Call) -> tuple[relax.Expr, ...] | None:
    """The parts, where all of them are variables."""
    parts = call.args[0]
    if not isinstance(parts, relax.Tuple) or not all(isinstance(part, relax.Var) for part in parts.fields):
        return None
    return tuple(parts.fields)


def _shared(
    parts: tuple[relax.Expr, ...], known: dict[tuple[relax.Expr, ...], relax.Var]
) -> list[relax.Expr] | None:
    """The same with its longest beginning or end that is known in place of what that is made of."""
    for length in range(len(parts) - 1, 1, -1):
        if parts[:length] in known:
            return [known[parts[:length]], *parts[length:]]
        if parts[-length:] in known:
            return [*parts[:-length], known[parts[-length:]]]
    return None


def _with(mod: tvm.IRModule, calls: dict[relax.Var, relax.Call]) -> tvm.IRModule:
    func = mod["main"]
    builder = relax.BlockBuilder(tvm.IRModule({g: f for g, f in mod.functions.items() if g.name_hint != "main"}))
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", list(func.params), attrs=dict(func.attrs or {})):
        with builder.dataflow():
            for binding in bindings(func):
                value = calls.get(binding.var, binding.value)
                image[binding.var] = builder.emit(replaced(value, image), binding.var.name)
            result = builder.emit_output(replaced(func.body.body, image))
        builder.emit_func_output(result)
    return builder.finalize()


ShareConcats = tvm.transform.module_pass(_share_concats, opt_level=0, name="ShareConcats")
