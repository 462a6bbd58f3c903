"""Everything that quantised models go through, in order."""

from __future__ import annotations

import tvm
from tvm import relax

from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.precision.integer import IntegerProducts
from mlc.graph.precision.moved import MoveQuantisation, UnsignedActivations
from mlc.graph.precision.spelled_out import SpellOutQuantisation

__all__ = ["Quantisation"]

_CALLS = ("relax.quantize", "relax.dequantize")


def Quantisation(*, integers: bool) -> tvm.transform.Pass:
    """Module pass: quantising moves and cancels, and with ``integers`` products of 8-bit operands add up integers.

    Models without a ``quantize`` or ``dequantize`` come back as they are, unsearched: most models have none.
    """

    @tvm.transform.module_pass(opt_level=0, name="Quantisation")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        values = (binding.value for binding in bindings(mod["main"]))
        if not any(isinstance(value, relax.Call) and op_name(value) in _CALLS for value in values):
            return mod
        products = (IntegerProducts, SpellOutQuantisation) if integers else ()
        for each in (UnsignedActivations, MoveQuantisation, *products):
            mod = each(mod)
        return mod

    return run
