"""``precision`` of the compile options on CPUs: operands of float32 products rounded to fewer bits.

``f32``
    Nothing is rounded.
``f16``
    Constant operands of products and tables that are looked up are rounded to float16; the arithmetic stays float32.
    An artifact stores them in half the bytes (:mod:`mlc.artifact.compact_weights`). The rounding error is at most
    2^-11 relative or 2^-25 absolute, whichever is larger; constants with a value beyond float16's range stay float32.
``bf16``
    Products with a constant operand multiply bfloat16 and add up in float32, by instructions that do so. Both operands
    are rounded, relative to 2^-9. :mod:`mlc.graph.layout`, which packs the constants, says which products.
``tf32``
    What GPUs' tensor cores make of float32 operands, rounded relative to 2^-11; no CPU has it.

On GPUs with tensor cores (sm_80 and later), ``f16`` and ``bf16`` round both operands of every product and of attention,
which are added up in float32 (:mod:`mlc.graph.precision.reduced_gpu`). What exceeds float16's range becomes infinite.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from mlc.errors import UsageError
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import Rules, Scope, rewrite
from mlc.graph.kernels.bfloat import has_bfloat_dot
from mlc.options import CompileOptions
from mlc.target import Target
from schedules.cuda.attention import available as has_tensor_cores

__all__ = ["RoundConstants", "check_precision"]

#: elements of a constant below which nothing is gained
_SMALLEST = 1024
_LARGEST = float(np.finfo(np.float16).max)


def check_precision(options: CompileOptions, target: Target) -> None:
    """Raises :class:`UsageError` where the target has no arithmetic of the precision that is asked for."""
    wanted = options.precision
    if wanted == "f32":
        return
    if target.kind == "cuda":
        if not has_tensor_cores(target.tvm):
            raise UsageError(f"a GPU target of precision {wanted} must be sm_80 or later, but {target.canonical} is "
                             "not; take f32")
        return
    if wanted == "tf32":
        raise UsageError(f"a target of precision tf32 must have tensor cores, but {target.canonical} is a CPU; take "
                         "f32, f16 or bf16")
    if wanted == "bf16" and not has_bfloat_dot(target):
        raise UsageError(f"a target of precision bf16 must multiply bfloat16 (avx512bf16, or bf16 of aarch64), but "
                         f"{target.canonical} does not; take f32 or f16")


def _rounded(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """The call with constants that are exact in float16."""
    args = [_in_float16(arg) for arg in call.args]
    if all(new is None for new in args):
        return None
    args = [old if new is None else new for old, new in zip(call.args, args, strict=True)]
    return relax.Call(call.op, args, call.attrs, call.ty_args)


def _in_float16(expr: relax.Expr) -> relax.Expr | None:
    array = array_of(expr) if isinstance(expr.ty, relax.TensorType) else None
    if array is None or array.dtype != np.float32 or array.size < _SMALLEST or not np.abs(array).max() <= _LARGEST:
        return None
    rounded = array.astype(np.float16).astype(np.float32)
    return None if np.array_equal(rounded, array) else constant(rounded)


_READERS = ("matmul", "nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv1d_transpose", "nn.conv2d_transpose", "take")
_RULES: Rules = {f"relax.{name}": (_rounded,) for name in _READERS}


def RoundConstants(options: CompileOptions) -> tvm.transform.Pass:
    """Module pass: with precision ``f16``, constant operands of products are numbers that float16 has."""

    @tvm.transform.module_pass(opt_level=0, name="RoundConstants")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite(mod, _RULES) if options.precision == "f16" else mod

    return run
