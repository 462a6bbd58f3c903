"""Weights of matrix products, rearranged at build time into the panels that the GEMM schedule reads."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import dtype_of, op_name, shape_of
from mlc.graph.kernels.blocked import PANEL, dense_packed
from mlc.graph.kernels.integer import STEP, dense_integer, dot_form, pack_dense
from mlc.graph.precision.integer import is_integer_product
from mlc.target import Target

__all__ = ["PackWeights"]


def PackWeights(target: Target) -> tvm.transform.Pass:
    """Module pass: ``matmul(x, constant [K, N])`` reads its weight as ``[N/16, K, 16]`` on CPU targets, or as
    :func:`mlc.graph.kernels.integer.pack_dense` packs 8-bit integers.

    ``N`` that is no multiple of the panel is padded with zero columns, and the result is sliced.
    """

    @tvm.transform.module_pass(opt_level=0, name="PackWeights")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Packer(mod, target).run() if target.kind == "llvm" else mod

    return run


def _pack(weight: np.ndarray) -> np.ndarray:
    """The panels ``[N/16, K, 16]`` as a view where no padding is needed: weights can be hundreds of megabytes."""
    depth, columns = weight.shape
    panels = -(-columns // PANEL)
    if columns % PANEL:
        weight = np.pad(weight, ((0, 0), (0, panels * PANEL - columns)))
    return weight.reshape(depth, panels, PANEL).transpose(1, 0, 2)


@mutator
class _Packer(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, target: Target) -> None:
        super().__init__(mod)
        self._mod, self._target = mod, target
        #: by the address of a weight: unrolled recurrences read one at every step
        self._packed: dict[tuple[int, tuple[int, ...]], relax.Expr] = {}

    def run(self) -> tvm.IRModule:
        gvar = self._mod.get_global_var("main")
        self.builder_.update_func(gvar, self.visit_expr(self._mod["main"]))
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if op_name(call) != "relax.matmul":
            return call
        data, weight = call.args
        array = array_of(weight)
        rank = len(shape_of(data))
        if array is None or array.ndim != 2 or rank < 2:
            return call
        integer = is_integer_product(call)
        if not integer and not array.dtype == dtype_of(data) == "float32":
            return call
        depth, columns = array.shape
        place = (array.ctypes.data, array.shape)
        if place not in self._packed:
            packed = pack_dense(array, dot_form(self._target)) if integer else _pack(array)
            self._packed[place] = constant(packed)
        if integer and depth % STEP:
            data = self.builder_.emit(relax.op.nn.pad(data, [0] * (2 * rank - 1) + [-depth % STEP]))
        kernel = dense_integer if integer else dense_packed
        product = self.builder_.call_te(kernel, data, self._packed[place], primfunc_name_hint="dense")
        if columns % PANEL == 0:
            return product
        return relax.op.strided_slice(self.builder_.emit(product), [rank - 1], [0], [columns])
