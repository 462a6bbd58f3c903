"""Products with packed weights as two kernels, where that takes less time than one that reads them as they are.

``dense_few_bits(x, words, scales)``   -->   ``matmul(x, unpack_weights(words, scales))``

A kernel that unpacks weights in registers does so again for each block of rows; of many rows, unpacking them once into
memory, in 16 bits where activations are such, and the usual product cost less. Either is reckoned as its space does for
the target, for each product by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, te, tirx

from mlc.graph.ir.rewrite import bindings, op_name, rebuilt
from mlc.graph.kernels.few_bits import unpacked_weights
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target
from schedules.cuda.contraction import with_tf32
from schedules.cuda.few_bits import FewBitsProduct
from schedules.cuda.few_bits_form import FewBits, few_bits_of
from schedules.machine import gpu_machine
from schedules.registry import find
from schedules.space import InvalidDecision

__all__ = ["UnpackWeights"]


def UnpackWeights(target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> tvm.transform.Pass:
    """Module pass over tensor functions of GPUs: products with packed weights that are faster as two kernels are."""

    @tvm.transform.module_pass(opt_level=0, name="UnpackWeights")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return mod if target.kind == "llvm" else _unpacked(mod, target.tvm, options)

    return run


def _unpacked(mod: tvm.IRModule, target: tvm.target.Target, options: CompileOptions) -> tvm.IRModule:
    bound = {binding.var: binding.value for binding in bindings(mod["main"])}
    known: dict[str, bool] = {}
    chosen: dict[relax.Var, FewBits] = {}
    for var, value in bound.items():
        callee = value.args[0] if isinstance(value, relax.Call) and op_name(value) == "relax.call_tir" else None
        found = few_bits_of(mod[callee]) if callee is not None else None
        if callee is None or found is None:
            continue
        if callee.name_hint not in known:
            known[callee.name_hint] = _in_two(mod[callee], found, target, options)
        if known[callee.name_hint]:
            chosen[var] = found
    if not chosen:
        return mod

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var not in chosen:
            return value
        data, *packed = value.args[1].fields
        weights = builder.emit(builder.call_te(
            _unpacking(chosen[var]), *packed, primfunc_name_hint="unpack_weights"))
        return builder.call_te(_product, data, weights, primfunc_name_hint="matmul")

    return rebuilt(mod, bound, change)


def _unpacking(found: FewBits) -> Callable[..., te.Tensor]:
    def unpacked(words: te.Tensor, *scales: te.Tensor) -> te.Tensor:
        scale, zero = (scales[0], scales[1]) if len(scales) > 1 else (scales[0], None)
        return unpacked_weights(words, scale, zero, found.packing, found.dtype)

    return unpacked


def _product(data: te.Tensor, weights: te.Tensor) -> te.Tensor:
    """``[M, K] x [N, K]`` added up in float32."""
    k = te.reduce_axis((0, data.shape[1]), name="k")
    return te.compute((data.shape[0], weights.shape[0]), lambda i, j: te.sum(
        data[i, k].astype("float32") * weights[j, k].astype("float32"), axis=[k]), name="matmul")


def _in_two(
    func: tirx.PrimFunc, found: FewBits, target: tvm.target.Target, options: CompileOptions
) -> bool:
    """Whether a product is faster as two kernels, or has no kernel that takes packed weights."""
    space = FewBitsProduct()
    if not space.matches(func, target):
        return True
    two = sum(_seconds(each, target) for each in _kernels(found, options)) + gpu_machine(target).call_seconds
    return two < _seconds(func, target)


def _kernels(found: FewBits, options: CompileOptions = DEFAULT_OPTIONS) -> list[tirx.PrimFunc]:
    packing, held = found.packing, found.weights.parameters
    given = [te.placeholder([int(s) for s in each.shape], str(each.dtype), each.name) for each in held]
    data, weights = (te.placeholder(shape, found.dtype, name) for shape, name in (
        ((found.m, found.k), "data"), ((packing.columns, packing.depth), "weights")))
    tensors: list[list[Any]] = [[*given, _unpacking(found)(*given)], [data, weights, _product(data, weights)]]
    unpacking, product = (te.create_prim_func(each, index_dtype_override="int64") for each in tensors)
    return [unpacking, with_tf32(product) if options.precision == "tf32" else product]


def _seconds(func: tirx.PrimFunc, target: tvm.target.Target) -> float:
    """Of a function with its space's first seed; infinite where the space does not say."""
    space = find(func, target)
    for decisions in space.seeds(func, target):
        try:
            found = space.price(func, target, decisions)
        except InvalidDecision:
            continue
        return float("inf") if found is None else found
    return float("inf")
