"""Lowering passes that TVM's pipeline lacks between a scheduled CPU function and machine code.

They are part of the pipeline that :data:`PIPELINE` names (``tvm.compile(mod, target, tir_pipeline=PIPELINE)``):

- Register tiles stay in registers. TVM allocates local buffers of more than 1 KiB in a workspace on the heap, where
  LLVM keeps them in registers only while it can prove that nothing aliases them; otherwise they go through memory once
  more before the epilogue. On the stack they are promoted to registers entirely.
- Weights are prefetched (:mod:`schedules.prefetch`).
- Local buffers of functions with free sizes are as large as their ranges need (:mod:`schedules.compact_buffers`).
- Reductions along free axes have vectors of partial results (:mod:`schedules.partial_sums`).
- Tail tiles along vectors of free extent are computed under a mask (:mod:`schedules.masked_tails`).
- AMX tiles are configured, once per thread (:mod:`schedules.amx_tiles`).
- Loops are not partitioned where a condition changes outside of them (:mod:`schedules.loop_partition`).
- Results that a kernel reads again are written where it reads them (:mod:`schedules.present`), large ones with
  non-temporal stores (:mod:`schedules.nontemporal`).
- Sums that are narrowed to bytes are stored several vectors at a time (:mod:`schedules.packed_stores`).
- Arguments that are known to fit are not checked again (:data:`FITS`), and those of a caller need only be aligned to 16
  bytes (:mod:`schedules.alignment`).
- Loop annotations that the code generator does not know are removed (:mod:`schedules.scopes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx import compilation_pipeline

from schedules.alignment import relax_alignment
from schedules.amx_tiles import with_helpers, with_tiles
from schedules.analysis import loads, op_name, replaced, walk
from schedules.compact_buffers import compacted
from schedules.flatten_spatial import FLAT, restored
from schedules.free import SIZES, variables
from schedules.loop_partition import hide_conditions
from schedules.masked_tails import with_masked_tails
from schedules.nontemporal import lower_nontemporal_stores
from schedules.packed_stores import with_packed_stores
from schedules.partial_sums import with_partial_sums
from schedules.pieces import FITS, expanded
from schedules.prefetch import insert_prefetches
from schedules.present import fuse_present_stores
from schedules.range_conditions import sizes_of, without_dead_extrema, without_true_conditions
from schedules.scopes import WithoutScopes

__all__ = ["FITS", "PIPELINE"]

#: the name of the pipeline of CPU functions, for ``tir_pipeline``
PIPELINE = "mlc"

#: bytes of a local buffer that may lie on the stack: twice the largest vector register file
_MAX_STACK = 4096
#: how the names of intrinsics begin whose 16-bit operands are bfloat16
_TAKE_BFLOATS = ("llvm.x86.avx512bf16.", "llvm.aarch64.neon.bf")


def _keep_on_stack(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Allocate small local buffers on LLVM's stack."""

    def mark(allocation: tirx.AllocBuffer) -> tirx.AllocBuffer:
        buffer = allocation.buffer
        dtype = tvm.runtime.DataType(str(buffer.dtype))
        known = all(isinstance(extent, tirx.IntImm) for extent in buffer.shape)
        if str(buffer.scope()) != "local" or not known:
            return allocation
        if prod(int(extent) for extent in buffer.shape) * dtype.bits * dtype.lanes // 8 > _MAX_STACK:
            return allocation
        kept = {**dict(allocation.annotations), "disable_lower_builtin": tirx.const(True, "bool")}
        return tirx.AllocBuffer(buffer, kept)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AllocBuffer, mark)))


def _with_bfloats(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Pass vectors of uint16 as bfloat16 to those of LLVM's intrinsics that take it.

    TVM's legalisation removes that type, and its code generator does not know it. The intrinsic is therefore called by
    a function in LLVM IR, which is inlined.
    """
    helpers: dict[str, str] = {}

    def mark(call: Call) -> Call:
        if op_name(call) != "call_llvm_pure_intrin":
            return call
        name = str(tvm.get_global_func("target.llvm_get_intrinsic_name")(int(call.args[0])))
        if not name.startswith(_TAKE_BFLOATS):
            return call
        helper = f"mlc_{name.replace('.', '_')}"
        helpers[helper] = _bfloat_helper(helper, name, str(call.ty), [str(a.ty) for a in call.args[1:]])
        return tirx.call_pure_extern(str(call.ty), helper, *call.args[1:])

    body = tvm_ffi.structural_map(func.body, (Call, mark))
    if not helpers:
        return func
    text = tvm.ir.StringImm("\n".join(helpers.values()))
    return func.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body))


def _bfloat_helper(helper: str, name: str, result: str, operands: Sequence[str]) -> str:
    """A function in LLVM IR that calls the intrinsic ``name`` with its uint16 operands as bfloat16."""

    def vector(dtype: str, word: str) -> str:
        kind, _, lanes = dtype.partition("x")
        return f"<{lanes} x {dict(float32='float', uint16=word)[kind]}>"

    result, given = vector(result, ""), [vector(t, "i16") for t in operands]
    taken = [vector(t, "bfloat") for t in operands]
    casts = [f"  %c{i} = bitcast {a} %a{i} to {b}" for i, (a, b) in enumerate(zip(given, taken, strict=True))]
    parameters = ", ".join(f"{dtype} %a{i}" for i, dtype in enumerate(given))
    arguments = ", ".join(f"{dtype} %c{i}" for i, dtype in enumerate(taken))
    return "\n".join([
        f"declare {result} @{name}({', '.join(taken)})",
        f"define linkonce_odr {result} @{helper}({parameters}) alwaysinline {{",
        *casts,
        f"  %r = call {result} @{name}({arguments})",
        f"  ret {result} %r",
        "}",
    ])


def _lower_free(mod: tvm.IRModule, ctx: tvm.transform.PassContext, lower: tvm.transform.Pass) -> tvm.IRModule:
    """TVM's ``lower`` pass, with the ranges of the sizes of functions with free ones."""
    free = {
        var: func for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and func.attrs and SIZES in func.attrs
    }
    if not free:
        return lower(mod)
    made = {var: restored(_bounded(without_dead_extrema(with_partial_sums(compacted(func)))))
            for var, func in free.items()}
    once = tvm.IRModule(made, attrs=mod.attrs)
    rest = tvm.IRModule({
        var: restored(func) if isinstance(func, tirx.PrimFunc) else func
        for var, func in mod.functions_items() if var not in free
    }, attrs=mod.attrs)
    config = {
        **ctx.config,
        "tirx.disable_cse_tir": True,  # what is put into variables is not seen through
        # of a loop of one step TVM leaves a 0 of 32 bits among sizes of 64, which later passes refuse
        "s_tir.LoopPartition": {"no_unroll_loop_with_extent_one": True},
    }
    with tvm.transform.PassContext(opt_level=ctx.opt_level, config=config, instruments=[_CompactedAlready()]):
        once = lower(once)
    known = {str(func.attrs["global_symbol"]): sizes_of(func) for func in free.values() if FLAT not in func.attrs}
    once = tvm.IRModule({var: _untested(func, known) for var, func in once.functions_items()}, attrs=once.attrs)
    once = tirx.transform.CommonSubexprElim()(once)
    once = tvm.IRModule({var: with_masked_tails(_with_numbers_in_place(func)) for var, func in once.functions_items()},
                        attrs=once.attrs)
    rest = lower(rest)
    rest.update(once)
    return rest


def _unchecked(mod: tvm.IRModule) -> tvm.IRModule:
    """The lowered module without argument checks in functions that are marked by :data:`FITS`."""
    fits = {var: func for var, func in mod.functions_items() if func.attrs and FITS in func.attrs}
    if fits:
        mod.update(tirx.transform.SkipAssert()(tvm.IRModule(fits, attrs=mod.attrs)))
    return mod


def _with_numbers_in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without variables for sizes as floating-point numbers: the code generator asks for their integer
    bounds, and fails.

        ``x = float32(n); .. y / x   -->   .. y / float32(n)``
    """
    image: dict[tirx.Var, Any] = {}

    def look(bound: tirx.Bind) -> None:
        value = replaced(bound.value, image)
        if str(bound.var.ty).startswith("float") and _is_cast(value):
            image[bound.var] = value

    walk(func.body, (tirx.Bind, look))
    if not image:
        return func
    nothing = tirx.Evaluate(0)
    return func.with_body(replaced(tvm_ffi.structural_map(
        func.body, (tirx.Bind, lambda bound: nothing if bound.var in image else bound)), image))


def _is_cast(value: Any) -> bool:
    """Whether the expression contains a cast of an integer that reads no memory."""
    casts: list[bool] = []
    walk(value, (tirx.Cast, lambda cast: casts.append("int" in str(cast.value.ty) and not loads(cast.value))))
    return any(casts)


def _untested(func: tirx.PrimFunc, known: Mapping[str, Sequence[tuple[tirx.Var, int, int]]]) -> tirx.PrimFunc:
    """A lowered function by the ``known`` sizes of the one that it was made of."""
    symbol = str(func.attrs["global_symbol"]).removeprefix("__tvm_ffi_")
    return without_true_conditions(func, known[symbol]) if symbol in known else func


def _bounded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Wrap the function's body in a condition that its sizes always fulfil, from which TVM's analyzers learn the
    ranges.

        ``for i: if 29 <= n: ..   -->   if 128 <= n <= 512: for i: ..``
    """
    ends = zip(variables(func), func.attrs[SIZES], strict=True)
    inside = [bound for var, (low, high, _) in ends for bound in (var >= int(low), var <= int(high))]
    root = func.body.block
    body = tirx.IfThenElse(tirx.all(*inside), root.body, None)
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
                         root.match_buffers, root.annotations)
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block))


@tvm.ir.instrument.pass_instrument
class _CompactedAlready:
    def should_run(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        return str(info.name) != "s_tir.CompactBufferAllocation"


_ExpandPieces = tvm.transform.module_pass(lambda mod, _ctx: expanded(mod), opt_level=0, name="mlc.ExpandPieces")
_RelaxAlignment = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: relax_alignment(func), opt_level=0, name="mlc.RelaxAlignment"
)
_FusePresentStores = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: fuse_present_stores(func), opt_level=0, name="mlc.FusePresentStores"
)
_InsertPrefetches = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: func if SIZES in (func.attrs or ()) else insert_prefetches(func), opt_level=0,
    name="mlc.InsertPrefetches"
)
_HideConditions = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: hide_conditions(func), opt_level=0, name="mlc.HideConditions"
)
_KeepOnStack = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: _keep_on_stack(func), opt_level=0, name="mlc.KeepOnStack"
)
_PackStores = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: with_packed_stores(func), opt_level=0, name="mlc.PackStores"
)
_NontemporalStores = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: lower_nontemporal_stores(func), opt_level=0, name="mlc.NontemporalStores"
)
_WithBfloats = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: _with_bfloats(func), opt_level=0, name="mlc.WithBfloats"
)
_WithTiles = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: with_tiles(func), opt_level=0, name="mlc.WithTiles"
)
_WithHelpers = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: with_helpers(func), opt_level=0, name="mlc.WithHelpers"
)


def _pipeline() -> tuple[Any, Any, Any]:
    lower, finish_host, finish_device = default_s_tir_pipeline()

    def host() -> tvm.transform.Pass:
        steps = [_NontemporalStores, _PackStores, _KeepOnStack, _WithBfloats, _WithHelpers, finish_host()]
        return tvm.transform.Sequential(steps)

    @tvm.transform.module_pass(opt_level=0, name="mlc.Lower")
    def lowered(mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _unchecked(_lower_free(mod, ctx, lower))

    steps = [WithoutScopes, _ExpandPieces, _RelaxAlignment, _FusePresentStores, _InsertPrefetches, _WithTiles,
             _HideConditions,
             lowered]
    return tvm.transform.Sequential(steps), host, finish_device


compilation_pipeline.register_tir_pipeline(PIPELINE, _pipeline)
