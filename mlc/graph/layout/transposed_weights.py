"""Weights of int8 products on GPUs, transposed at build time.

Both operands of ``mma.sync`` run along the products of a sum, and ``ldmatrix``, which turns elements of 16 bits on the
way, does not turn bytes: of a weight ``[K, N]`` a copy to shared memory would take one byte.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.patterns import PRODUCT
from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.precision.integer import is_signed_product
from mlc.target import Target

__all__ = ["TransposeWeights"]


def TransposeWeights(target: Target) -> tvm.transform.Pass:
    """Module pass: on GPUs ``matmul(x: int8, constant [K, N])`` reads its weight as ``[N, K]``."""

    @tvm.transform.module_pass(opt_level=0, name="TransposeWeights")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        found = target.kind == "cuda" and any(_has_constant(each.value) for each in bindings(mod["main"]))
        return _Transposer(mod).run() if found else mod

    return run


def _has_constant(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or op_name(value) != "relax.matmul" or not is_signed_product(value):
        return False
    array = array_of(value.args[1])
    return array is not None and array.ndim == 2


def dense_by_columns(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Product of int8 ``[..., K]`` with int8 ``[N, K]`` to int32 ``[..., N]``."""
    columns, depth = weight.shape
    k = te.reduce_axis((0, depth), name="k")
    return te.compute(
        (*x.shape[:-1], columns),
        lambda *i: te.sum(x[(*i[:-1], k)].astype("int32") * weight[i[-1], k].astype("int32"), axis=k), name="dense")


@mutator
class _Transposer(PyExprMutator):
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._mod = mod

    def run(self) -> tvm.IRModule:
        gvar = self._mod.get_global_var("main")
        self.builder_.update_func(gvar, self.visit_expr(self._mod["main"]))
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not _has_constant(call):
            return call
        array = array_of(call.args[1])
        assert array is not None
        return self.builder_.call_te(dense_by_columns, call.args[0], constant(np.ascontiguousarray(array.T)),
                                     primfunc_name_hint="dense", primfunc_attrs={"op_pattern": PRODUCT})
