"""Shares common parts of concatenations: one that begins or ends with another is built from it.

``b = concat((x, y)); c = concat((x, y, z))   -->   c = concat((b, z))``

DenseNet joins all earlier layers before each one; made of each other, the joined tensors share one piece of memory
(:mod:`mlc.graph.lowering.concat`) instead of copying every layer again and again.
"""

from __future__ import annotations

import tvm
from tvm import relax

from mlc.graph.ir.rewrite import bindings, op_name, rebuilt

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
    if not shorter:
        return mod
    return rebuilt(mod, {b.var: shorter.get(b.var, b.value) for b in bindings(func)})


def _parts(call: relax.Call) -> tuple[relax.Expr, ...] | None:
    """The parts, where all of them are variables."""
    parts = call.args[0]
    if not isinstance(parts, relax.Tuple) or not all(isinstance(part, relax.Var) for part in parts.fields):
        return None
    return tuple(parts.fields)


def _shared(
    parts: tuple[relax.Expr, ...], known: dict[tuple[relax.Expr, ...], relax.Var]
) -> list[relax.Expr] | None:
    """The same concatenation, with its longest known prefix or suffix in place of that one's parts."""
    for length in range(len(parts) - 1, 1, -1):
        if parts[:length] in known:
            return [known[parts[:length]], *parts[length:]]
        if parts[-length:] in known:
            return [*parts[:-length], known[parts[-length:]]]
    return None


ShareConcats = tvm.transform.module_pass(_share_concats, opt_level=0, name="ShareConcats")
