"""Concatenation without a copy: whoever makes a part writes it where the whole keeps it.

Where every axis before the concatenated one has length 1, the parts are contiguous pieces of the result: in
``NCHW[c]c`` at batch 1, say. Such a ``concat`` is left in ``main``, and :mod:`mlc.artifact.memory` makes the results of
its parts' kernels views of one tensor. Concatenations of concatenations (DenseNet's) nest: the inner one is a view of
the outer one. All others become kernels that copy, and fuse with the data movement around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import tvm
from tvm import relax, topi

from mlc.graph.ir.rewrite import bindings, dtype_of, op_name, rebuilt, shape_of
from mlc.graph.lowering.epilogues import Epilogues
from mlc.sizes import Size
from mlc.target import Target

__all__ = ["ALIGNMENT", "PlaceConcats", "origin", "parts_of"]

#: bytes; what compiled code assumes of every tensor's address
ALIGNMENT = 64

_Bound = Mapping[relax.Var, relax.Expr]


def parts_of(concat: relax.Call) -> Iterator[tuple[relax.Expr, int]]:
    """The parts of a concatenation along its first axis that is not 1, each with its offset in bytes."""
    offset = 0
    for part in concat.args[0].fields:
        yield part, offset
        offset += _bytes(part)


def origin(expr: relax.Expr, bound: _Bound) -> relax.Expr:
    """What ``expr`` is a view of, through reshapes and other names."""
    while isinstance(expr, relax.Var) and expr in bound:
        value = bound[expr]
        if isinstance(value, relax.Var):
            expr = value
        elif isinstance(value, relax.Call) and op_name(value) == "relax.reshape":
            expr = value.args[0]
        else:
            break
    return expr


def PlaceConcats(target: Target) -> tvm.transform.Pass:
    """Module pass over lowered operators: leaves the concatenations that need no copy, lowers the others.

    What of a part has to be copied after all (an input, a constant, an output of the model, a tensor that is part of
    two wholes) gets a copying kernel.
    """

    @tvm.transform.module_pass(opt_level=0, name="PlaceConcats")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not any(_is_concat(b.value) for b in bindings(mod["main"])):
            return mod
        return _Placement(mod, target.kind == "llvm").rewritten()

    return run


def _is_concat(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and op_name(value) == "relax.concat"


def _bytes(expr: relax.Expr) -> int:
    return math.prod(shape_of(expr)) * tvm.DataType(dtype_of(expr)).itemsize


class _Placement:
    """Decides, from the last concatenation to the first, which stay and which of their parts are copied."""

    def __init__(self, mod: tvm.IRModule, views: bool) -> None:
        self._mod, self._func = mod, mod["main"]
        self._bound: dict[relax.Var, relax.Expr] = {b.var: b.value for b in bindings(self._func)}
        self._places = Epilogues(mod)
        self._outputs = {origin(leaf, self._bound) for leaf in self._result_leaves()}
        self._placed: set[relax.Expr] = set()  # origins that have their place in a whole
        #: for each concatenation that stays, which parts are copied into it
        self._kept: dict[relax.Var, list[bool]] = {}
        for var, value in reversed(list(self._bound.items())) if views else ():
            if _is_concat(value):
                self._decide(var, value)

    def _result_leaves(self) -> Iterator[relax.Expr]:
        pending: list[relax.Expr] = [self._func.body.body]
        while pending:
            expr = self._bound.get(pending[-1], pending[-1])
            var = pending.pop()
            if isinstance(expr, relax.Tuple):
                pending.extend(expr.fields)
            elif isinstance(expr, relax.TupleGetItem):
                pending.append(expr.tuple_value)
            else:
                yield var

    def _decide(self, var: relax.Var, concat: relax.Call) -> None:
        axis = int(concat.attrs.axis) % len(shape_of(var))
        if math.prod(shape_of(var)[:axis]) != 1 or not isinstance(concat.args[0], relax.Tuple):
            return
        if any(isinstance(size, Size) for size in shape_of(var)):  # a view begins at a number
            return
        parts = list(parts_of(concat))
        if any(offset % ALIGNMENT for _, offset in parts) or not all(_bytes(part) for part, _ in parts):
            return
        origins: list[relax.Expr] = []
        copied = []
        for part, _ in parts:
            source = origin(part, self._bound)
            copied.append(not self._free(source) or source in origins)
            origins.append(source)
        saved = sum(
            _bytes(part) for (part, _), source, copy in zip(parts, origins, copied, strict=True)
            if not copy and not self._merges(source)
        )
        if 2 * saved > _bytes(var):
            self._kept[var] = copied
            self._placed.update(source for source, copy in zip(origins, copied, strict=True) if not copy)

    def _free(self, source: relax.Expr) -> bool:
        """Whether the tensor is made by a kernel that may write it anywhere."""
        value = self._bound.get(source)
        if source in self._placed or source in self._outputs or not isinstance(source, relax.Var):
            return False
        return isinstance(value, relax.Call) and op_name(value) in ("relax.call_tir", "relax.concat")

    def _merges(self, source: relax.Expr) -> bool:
        """Whether the kernel that makes the part would be one with a kernel that concatenates."""
        return not _is_concat(self._bound[source]) and self._places.once(source) and self._places.injective(source)

    def rewritten(self) -> tvm.IRModule:
        """The module with copies of parts, and kernels for the concatenations that do not stay."""
        return rebuilt(self._mod, self._bound, self._placed_concat)

    def _placed_concat(self, builder: relax.BlockBuilder, var: relax.Var, concat: relax.Expr) -> relax.Expr:
        if not _is_concat(concat):
            return concat
        axis = int(concat.attrs.axis) % len(shape_of(var))
        if var not in self._kept:
            parts = list(concat.args[0].fields)
            return builder.call_te(topi.concatenate, parts, axis=axis, primfunc_name_hint="concatenate")
        fields = [
            builder.emit(builder.call_te(topi.identity, part, primfunc_name_hint="copy")) if copy else part
            for part, copy in zip(concat.args[0].fields, self._kept[var], strict=True)
        ]
        return relax.op.concat(fields, axis)
