"""What TVM's pipeline leaves out between a scheduled GPU function and machine code.

Fragments become registers, in the pipeline that :data:`PIPELINE` names (``tvm.compile(..., tir_pipeline=PIPELINE)``).
TVM's pass for memory of scope ``warp`` rewrites the first such buffer of a kernel and passes the others by (0.27),
which are then 32 times too large and lie in the stack. It is run until none is left, and what it leaves of an element's
thread in an index is worked out: an array whose index depends on the thread is no register.

CUDA's compiler keeps to 128 registers a thread where two blocks of 256 threads could then run on a multiprocessor, or
to 72 where seven of 128 could, and spills rather than take more, though the shared memory of such a block may leave no
room for a second, or the grid have none. There it is told.
"""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx import compilation_pipeline

from schedules import flatten_spatial, merged, pieces
from schedules.analysis import walk
from schedules.capped import opened
from schedules.cuda.arithmetic import vectorising, widened
from schedules.cuda.filled import FilledCopies
from schedules.cuda.halves import in_halves
from schedules.cuda.joined import joined
from schedules.cuda.lanes import with_common_guards
from schedules.cuda.written import written as written_out
from schedules.machine import gpu_machine

__all__ = ["LAST_PASS", "PIPELINE", "dynamic_shared"]

#: the name of the pipeline of GPU functions, for ``tir_pipeline``
PIPELINE = "mlc.cuda"
#: the name of the pass behind which a kernel's buffers are what the machine code's are
LAST_PASS = "mlc.LowerWarpMemory"

#: TVM's passes that insert barriers
_BARRIERS = frozenset({"s_tir.ThreadSync", "tirx.ThreadSync"})

#: TVM's attribute of a kernel: of how many blocks a multiprocessor's registers must have room
_LEAST_BLOCKS = "tirx.launch_bounds_min_blocks_per_sm"

#: fragments of a kernel: A's, B's and the sums', and some more
_MOST_FRAGMENTS = 8

#: registers that are enough for a thread of any kernel; and those that one may have where CUDA's compiler, which does
#: not know of dynamic shared memory, keeps to fewer for blocks that never come, and may spill
_PLENTY, _MANY = 200, 100


def _lower_warp_memory(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    for _ in range(_MOST_FRAGMENTS):
        lowered = tirx.transform.LowerWarpMemory()(mod)
        if tvm_ffi.structural_equal(lowered, mod):
            break
        mod = lowered
    functions = {
        var: _finished(func) if isinstance(func, tirx.PrimFunc) else func
        for var, func in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def _finished(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return _with_registers(_with_plain_quotients(_with_known_quotients(func)))


def _lower_written(mod: tvm.IRModule, ctx: tvm.transform.PassContext, lower: tvm.transform.Pass) -> tvm.IRModule:
    """TVM's ``lower``, with parts of cut sums added up in the kernels that make them, and kernels of attention, of
    warpgroups and of packed weights written out, which have the barriers that they need: TVM can't tell the stage that
    is copied to from the one that is read, and would put one between them."""
    written: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for var, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or not _has_kernels(func):
            rest[var] = _restored(func) if isinstance(func, tirx.PrimFunc) else func
            continue
        kernel = written_out(func)
        if kernel is func:
            rest[var] = _restored(widened(with_common_guards(in_halves(joined(opened(func))))))
        else:
            written[var] = _restored(widened(opened(kernel)))
    with vectorising():
        return _lower_both(rest, written, mod, ctx, lower)


def _restored(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with the parameters that its callers give."""
    return flatten_spatial.restored(merged.restored(func))


def _has_kernels(func: tirx.PrimFunc) -> bool:
    """Whether a function does anything but call those that do."""
    blocks: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, blocks.append))
    return bool(blocks)


def _lower_both(
    rest: dict[Any, Any], written: dict[Any, Any], mod: tvm.IRModule, ctx: tvm.transform.PassContext,
    lower: tvm.transform.Pass,
) -> tvm.IRModule:
    with tvm.transform.PassContext(
        opt_level=ctx.opt_level, config=dict(ctx.config), instruments=[*(ctx.instruments or ()), FilledCopies()]):
        lowered = lower(tvm.IRModule(rest, attrs=mod.attrs))
    if not written:
        return lowered
    once = tvm.IRModule(written, attrs=mod.attrs)
    with tvm.transform.PassContext(opt_level=ctx.opt_level, config=dict(ctx.config), instruments=[_OwnBarriers()]):
        once = lower(once)
    lowered.update(once)
    return lowered


@tvm.ir.instrument.pass_instrument
class _OwnBarriers:
    def should_run(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        return str(info.name) not in _BARRIERS


def _with_known_quotients(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with quotients that are the same for every thread and iteration as numbers."""
    analyzer = sym.Analyzer()

    def bind(variable: Any, extent: Any) -> None:
        if isinstance(extent, tirx.IntImm):
            analyzer.bind(variable, tvm.ir.Range.from_min_extent(tirx.const(0, variable.ty.dtype), extent))

    walk(
        func.body, (tirx.For, lambda loop: bind(loop.loop_var, loop.extent)),
        (tirx.AttrStmt, lambda stmt: bind(stmt.node.var, stmt.value) if stmt.attr_key == "thread_extent" else None),
    )

    def known(division: Any) -> Any:
        if not isinstance(division.b, tirx.IntImm) or int(division.b) <= 0:
            return division
        bound, divisor = analyzer.const_int_bound(division.a), int(division.b)
        low, high = bound.min_value, bound.max_value
        same = low >= 0 and low // divisor == high // divisor
        return tirx.const(low // divisor, division.ty.dtype) if same else division

    body = tvm_ffi.structural_map(func.body, (tirx.Div, known), order="post")
    return func.with_body(body)


def _with_plain_quotients(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with C's quotients where those of free sizes are the same: what is divided and what it is divided by
    are not negative. TVM would work out the sign of each anew."""
    sizes = [param for param in func.params if str(param.ty).startswith("int")]
    if not sizes:
        return func
    analyzer = sym.Analyzer()
    for size in sizes:  # a size, or what several make
        analyzer.bind(size, tvm.ir.Range.from_min_extent(tirx.const(0, str(size.ty)), tirx.max_value(str(size.ty))))

    def bind(variable: Any, least: Any, extent: Any) -> None:
        analyzer.bind(variable, tvm.ir.Range.from_min_extent(least, extent))

    walk(
        func.body, (tirx.For, lambda loop: bind(loop.loop_var, loop.min, loop.extent)),
        (tirx.AttrStmt, lambda stmt: bind(stmt.node.var, tirx.const(0, str(stmt.node.var.ty)), stmt.value)
         if stmt.attr_key == "thread_extent" else None))

    def natural(value: Any) -> bool:
        return not isinstance(value, tirx.Ramp | tirx.Broadcast) and analyzer.const_int_bound(value).min_value >= 0

    def plain(made: Any) -> Any:
        def change(division: Any) -> Any:
            return made(division.a, division.b) if natural(division.a) and natural(division.b) else division
        return change

    return func.with_body(tvm_ffi.structural_map(
        func.body, [(tirx.FloorDiv, plain(tirx.Div)), (tirx.FloorMod, plain(tirx.Mod))], order="post"))


def dynamic_shared(func: tirx.PrimFunc) -> int:
    """Bytes of dynamic shared memory that a kernel asks for when it is launched."""
    allocated: list[Any] = []
    walk(func.body, (tirx.AllocBuffer, allocated.append))
    return sum(_bytes(each.buffer) for each in allocated if each.buffer.scope() == "shared.dyn")


def _bytes(buffer: tirx.Buffer) -> int:
    dtype = tvm.runtime.DataType(str(buffer.dtype))
    return prod(int(extent) for extent in buffer.shape) * dtype.bits * dtype.lanes // 8


def _launched(func: tirx.PrimFunc, which: str) -> int | None:
    """How many blocks (``blockIdx``) or threads of a block (``threadIdx``) a kernel is launched with; None where the
    number is not known yet."""
    found: dict[str, Any] = {}
    walk(func.body, (tirx.AttrStmt, lambda stmt: found.update({stmt.node.thread_tag: stmt.value})
                     if stmt.attr_key == "thread_extent" else None))
    extents = [extent for tag, extent in found.items() if tag.startswith(which)]
    return prod(map(int, extents)) if all(isinstance(extent, tirx.IntImm) for extent in extents) else None


def _with_registers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with all registers of a multiprocessor, where no second block runs beside one: there are no more
    blocks than multiprocessors, or shared memory has no room; and with plenty of them where shared memory has room for
    so few blocks that they leave many to each."""
    target, shared = func.attrs.get("target"), dynamic_shared(func)
    if target is None or not shared:
        return func
    gpu, blocks, threads = gpu_machine(target), _launched(func, "blockIdx"), _launched(func, "threadIdx")
    alone = (blocks is not None and blocks <= gpu.multiprocessors) or gpu.resident(gpu.warp, 1, shared) == 1
    if alone:
        return func.with_attr(_LEAST_BLOCKS, 1)
    if threads is None:
        return func
    fitting, plenty = gpu.resident(threads, 1, shared), gpu.resident(threads, _PLENTY, shared)
    few = plenty > 1 and gpu.resident(threads, _MANY, shared) == fitting
    return func.with_attr(_LEAST_BLOCKS, plenty) if few else func


def _launch_blocks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A host's function that launches no kernel without blocks, which CUDA refuses: a free size may be 0."""
    def launched(step: tirx.Evaluate) -> tirx.Stmt:
        call = step.value
        named = [str(name) for name in getattr(getattr(call, "attrs", None), "launch_params", None) or ()]
        given = zip(named, call.args[len(call.args) - len(named) :], strict=True)
        free = [n for name, n in given if name.startswith("blockIdx") and not isinstance(n, tirx.IntImm)]
        some = tirx.all(*(n > tirx.const(0, n.ty.dtype) for n in free)) if free else None
        return step if some is None else tirx.IfThenElse(some, step, None)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Evaluate, launched), order="post"))


_LaunchBlocks = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: _launch_blocks(func), opt_level=0, name="mlc.LaunchBlocks"
)


def _pipeline() -> tuple[Any, Any, Any]:
    lower, finish_host, finish_device = default_s_tir_pipeline()
    fragments = tvm.transform.module_pass(_lower_warp_memory, opt_level=0, name=LAST_PASS)
    whole = tvm.transform.module_pass(
        lambda mod, ctx: _lower_written(pieces.expanded(mod), ctx, lower), opt_level=0, name="mlc.Lower")

    def host() -> tvm.transform.Pass:
        return tvm.transform.Sequential([_LaunchBlocks, finish_host()])

    def device() -> tvm.transform.Pass:
        return tvm.transform.Sequential([fragments, finish_device()])

    return whole, host, device


compilation_pipeline.register_tir_pipeline(PIPELINE, _pipeline)
