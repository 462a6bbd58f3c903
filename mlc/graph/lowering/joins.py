"""Sums of two dequantised tensors read both as integers.

Two products whose results are quantised, dequantised and added meet in one kernel, the epilogue of one of them. The
other's kernel would end as late as it can, after dequantising, and write four times the bytes. So the sum is made one
tensor function with the dequantising of its operands::

    a = float(p) * s; b = float(q) * t; y = a + b   -->   y = call_tir(lambda p, q: float(p) * s + float(q) * t, (p, q))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tvm
from tvm import relax, te, tirx

from mlc.graph.ir.constants import scalar_of
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, op_name, rebuilt, shape_of

__all__ = ["JoinDequantised"]

_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "relax.add": lambda a, b: a + b, "relax.subtract": lambda a, b: a - b, "relax.multiply": lambda a, b: a * b,
    "relax.maximum": tirx.max, "relax.minimum": tirx.min,
}
#: scale and zero point
_Affine = tuple[float, int]
#: integers, and what they stand for
_Operand = tuple[relax.Var, _Affine]


class _Joins:
    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._bound = {b.var: b.value for b in bindings(mod["main"])}
        self._uses = Counter(leaf for value in [*self._bound.values(), mod["main"].body.body] for leaf in leaves(value))

    def run(self) -> tvm.IRModule:
        found = {var: join for var, value in self._bound.items() if (join := self._join(value)) is not None}
        if not found:
            return self._mod

        def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
            if var not in found:
                return value
            name, ((one, first), (other, second)) = op_name(value), found[var]
            function = partial(_joined, name=name, first=first, second=second)
            hint = name.removeprefix("relax.")
            return builder.call_te(function, image[one], image[other], primfunc_name_hint=hint)

        image: dict[relax.Var, relax.Expr] = {param: param for param in self._mod["main"].params}
        return relax.transform.DeadCodeElimination()(rebuilt(self._mod, self._bound, change, image=image))

    def _join(self, value: relax.Expr) -> tuple[_Operand, _Operand] | None:
        """Both operands, if they are dequantised from integers."""
        if not isinstance(value, relax.Call) or op_name(value) not in _BINARY or dtype_of(value) != "float32":
            return None
        if any(not isinstance(arg, relax.Var) or shape_of(arg) != shape_of(value) for arg in value.args):
            return None
        first, second = map(self._operand, value.args)
        return None if first is None or second is None else (first, second)

    def _operand(self, var: relax.Var) -> _Operand | None:
        """The integers that ``var`` is dequantised from, with scale and zero point, if nothing else reads either."""
        value = self._bound.get(var)
        if not isinstance(value, relax.Call) or op_name(value) != "relax.dequantize" or self._uses[var] != 1:
            return None
        integers, scale, zero = value.args[0], *map(scalar_of, value.args[1:])
        if not isinstance(integers, relax.Var) or self._uses[integers] != 1 or scale is None or zero is None:
            return None
        return integers, (scale, int(zero))


def _joined(one: te.Tensor, other: te.Tensor, name: str, first: _Affine, second: _Affine) -> te.Tensor:
    def number(integer: Any, affine: _Affine) -> Any:
        scale, zero = affine
        return (integer.astype("int32") - zero).astype("float32") * tirx.const(scale, "float32")

    function = _BINARY[name]
    shape, label = one.shape, name.removeprefix("relax.")
    return te.compute(shape, lambda *i: function(number(one(*i), first), number(other(*i), second)), name=label)


JoinDequantised = tvm.transform.module_pass(lambda mod, _ctx: _Joins(mod).run(), opt_level=0, name="JoinDequantised")
