"""The passes over quantised models, in order."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.precision.int8_as_float16 import HalfProducts
from mlc.graph.precision.integer import IntegerProducts, priced
from mlc.graph.precision.requantise import ExpandRequantisation
from mlc.graph.precision.rescaled import Rescale
from mlc.graph.precision.sink_dequantise import MoveQuantisation, SignedActivations, UnsignedActivations
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target

__all__ = ["Quantisation"]

_CALLS = ("relax.quantize", "relax.dequantize")


def Quantisation(
    target: Target, options: CompileOptions = DEFAULT_OPTIONS, tidy: Sequence[tvm.transform.Pass] = ()
) -> tvm.transform.Pass:
    """Module pass: quantising moves and cancels, and products of 8-bit operands add up integers, unless the
    ``options`` forbid it, where that is priced to be faster. Activations are uint8 on CPUs and int8 on GPUs. ``tidy``
    are passes that make convolutions of images, which integer products are for, of others.

    Models without a ``quantize`` or ``dequantize`` come back as they are, unsearched: most models have none.
    """

    @tvm.transform.module_pass(opt_level=0, name="Quantisation")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        values = (binding.value for binding in bindings(mod["main"]))
        if not any(isinstance(value, relax.Call) and op_name(value) in _CALLS for value in values):
            return mod
        gpu, products = target.kind == "cuda", tuple[tvm.transform.Pass, ...]()
        if options.integers:
            halves = (HalfProducts(target),) if gpu else ()
            products = (IntegerProducts(priced(target, options)), *halves, ExpandRequantisation, Rescale)
        activations = SignedActivations if gpu else UnsignedActivations
        for each in (activations, *tidy, MoveQuantisation, *products):
            mod = each(mod)
        return mod

    return run
