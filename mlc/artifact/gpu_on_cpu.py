"""Runs a graph lowered for a GPU on this machine's CPU with the GPU's rounding, to measure the error of a precision
without a GPU.

The tensor functions are those that were lowered for the GPU, laid out by the CPU's spaces. What is stored in 16 bits is
so here too, and sums of products are float32 on both; where a kernel rounds operands to tf32 as it fetches them, the
function that stands for it says so. What differs is the order of sums, and that a kernel of attention rounds weights
before they are divided by their total.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from mlc.target import Target
from schedules import registry
from schedules.analysis import describe, walk
from schedules.cuda.contraction import PRECISION
from schedules.space import InvalidDecision

__all__ = ["for_cpu"]

#: what CPUs compute block by block of queries, written otherwise: their space cannot lay out a GPU's
_WRITTEN_FOR, _ATTENTION = "mlc.op", "attention"
#: opcodes of products of tensor cores
_TENSOR_CORES = ("HMMA", "HGMMA")
#: bits of a float32 that tf32 has not, and half of their least one that it has
_DROPPED, _HALF = (1 << 13) - 1, 1 << 12


def for_cpu(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """The module that was lowered for a GPU ``target``, of functions that a CPU computes with the GPU's rounding."""
    made = {var: _stand_in(func, target) if isinstance(func, tirx.PrimFunc) else func
            for var, func in mod.functions_items()}
    return tvm.IRModule(made, attrs=mod.attrs, global_infos=mod.global_infos)


def _stand_in(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    rounds = _marked(func) and _on_tensor_cores(func, target)

    def plain(block: s_tir.SBlock) -> s_tir.SBlock:
        body = _rounded(block) if rounds and PRECISION in block.annotations else block.body
        kept = {key: value for key, value in block.annotations.items()
                if key != PRECISION and (key, str(value)) != (_WRITTEN_FOR, _ATTENTION)}
        return s_tir.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init,
                            block.alloc_buffers, block.match_buffers, kept)

    return func.with_body(tvm_ffi.structural_map(
        func.body, [(s_tir.SBlock, plain), (tirx.Cast, _to_bfloat)], order="post"))


def _to_bfloat(cast: tirx.Cast) -> Any:
    """A conversion from float32 to bfloat16, to nearest, ties to even, as bits: TVM's own fails (0.27) behind ``erf``,
    so behind every GELU."""
    if str(cast.ty) != "bfloat16" or str(cast.value.ty) != "float32":
        return cast
    bits = tirx.reinterpret("uint32", cast.value)

    def number(value: int) -> Any:
        return tirx.const(value, "uint32")

    rounded = (bits + number(0x7FFF) + ((bits >> number(16)) & number(1))) >> number(16)
    return tirx.reinterpret("bfloat16", rounded.astype("uint16"))


def _marked(func: tirx.PrimFunc) -> bool:
    found: list[bool] = []
    walk(func.body, (s_tir.SBlock, lambda block: found.append(PRECISION in block.annotations)))
    return any(found)


def _on_tensor_cores(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether the GPU's space for the function multiplies there: others compute what may be rounded exactly."""
    try:
        return any(opcode in _TENSOR_CORES for opcode in registry.find(func, target.tvm).opcodes)
    except InvalidDecision:
        return False


def _rounded(block: s_tir.SBlock) -> Any:
    """The block's sum of products of its operands as tf32, rounded to nearest, ties away from zero."""
    factors = describe(block).factors
    assert factors is not None, "only sums of products are marked"

    def tf32(load: TensorLoad) -> Any:
        if not any(load.same_as(factor) for factor in factors):
            return load
        bits = tirx.reinterpret("int32", load)
        return tirx.reinterpret("float32", (bits + _HALF) & tirx.const(~_DROPPED, "int32"))

    return tvm_ffi.structural_map(block.body, (TensorLoad, tf32), order="post")
