"""Statements of a kernel that is written out as a whole, where no schedule leads to it: loops, registers, copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

__all__ = ["Registers", "barrier", "call", "commit", "copy_ahead", "count_of", "i32", "i64", "kernel", "loop",
           "over_lanes", "power_of_two", "sequence", "store_piece", "substituted", "wait", "when"]

#: what becomes of a loop over registers: straight code, so that every index is a number
_UNROLLED = tirx.ForKind.UNROLLED


def i32(value: Any) -> tirx.Expr:
    """A number that counts within a block of threads."""
    return tirx.const(value, "int32") if isinstance(value, int) else value.astype("int32")


def count_of(extent: Any, each: int) -> Any:
    """How many times ``each`` an extent has, rounded up: a number, or an expression of free sizes."""
    return -(-extent // each) if isinstance(extent, int) else (extent + (each - 1)) // each


def i64(value: Any) -> tirx.Expr:
    """A number that counts elements of tensors."""
    return tirx.const(value, "int64") if isinstance(value, int) else tirx.Cast("int64", value)


def loop(extent: Any, body: Callable[[Any], Any], kind: Any = _UNROLLED, start: Any = 0) -> tirx.Stmt:
    """``for i in range(start, start + extent): body(i)``; ``body`` gives one statement or several."""
    variable = tirx.Var("i", "int32")
    inner = sequence(body(variable))
    first = i32(start) if isinstance(start, int) else start
    count = i32(extent) if isinstance(extent, int) else extent
    return tirx.For(variable, first, count, kind, inner)


def sequence(body: tirx.Stmt | Sequence[tirx.Stmt]) -> tirx.Stmt:
    """One statement of one or several."""
    if isinstance(body, tirx.Stmt):
        return body
    return body[0] if len(body) == 1 else tirx.SeqStmt(list(body))


def when(condition: Any, body: tirx.Stmt) -> tirx.Stmt:
    """``if condition: body``."""
    return tirx.IfThenElse(condition, body, None)


def call(name: str, *arguments: Any, dtype: str = "int32") -> tirx.Stmt:
    """A call for its effect."""
    return tirx.Evaluate(tirx.call_intrin(dtype, name, *arguments))


def barrier() -> tirx.Stmt:
    """Until all threads of the block are here."""
    return call("tirx.tvm_storage_sync", "shared")


def copy_ahead(memory: tirx.Buffer, at: Any, source: Any, count: int) -> tirx.Stmt:
    """Begin to copy ``count`` neighbouring elements from where ``source`` is loaded to shared memory (``cp.async``)."""
    bits = count * _bits(str(memory.dtype))
    target = memory.access_ptr("w", offset=at, extent=count)
    return call("tirx.s_tir.cp_async_raw", target, 0, tirx.address_of(source), 0, bits // 8)


def store_piece(to: Any, held: tirx.Buffer) -> tirx.Stmt:
    """Store the 16 bytes that a thread holds to where ``to`` is loaded from, at once: CUDA's compiler takes vectors of
    registers apart at branches."""
    from tvm.backend.cuda.op import cuda_func_call

    source = """
__forceinline__ __device__ void mlc_store_piece(void* to, void* held) {
  unsigned* words = (unsigned*)held;
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
"""
    first = tirx.BufferLoad(held, [tirx.const(0, held.shape[0].ty.dtype)])
    return tirx.Evaluate(cuda_func_call(
        "mlc_store_piece", tirx.address_of(to), tirx.address_of(first), source_code=source))


def _bits(dtype: str) -> int:
    return int(tvm.runtime.DataType(dtype).bits)


def commit() -> tirx.Stmt:
    """Make a group of the thread's copies so far."""
    from tvm.script import tirx as T

    return tirx.Evaluate(T.ptx["cp.async.commit_group"]())


def wait(pending: int) -> tirx.Stmt:
    """Until at most so many of the thread's groups are under way."""
    from tvm.script import tirx as T

    return tirx.Evaluate(T.ptx["cp.async.wait_group"](pending))


def over_lanes(value: Any, distance: int) -> tirx.Expr:
    """The value of the lane whose number differs in one bit."""
    mask = tirx.call_intrin("uint32", "tirx.tvm_warp_activemask")
    return tirx.call_intrin(value.ty.dtype, "tirx.tvm_warp_shuffle_xor", mask, value, distance, 32, 32)


def power_of_two(exponent: Any) -> tirx.Expr:
    """Two to the power of a float32 in one instruction, within two units of its last place, and 0 instead of what is
    less than the least normal number; CUDA's ``exp2f`` takes three more instructions for these."""
    from tvm.backend.cuda.op import cuda_func_call

    source = """
__forceinline__ __device__ float mlc_power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}
"""
    return cuda_func_call("mlc_power_of_two", exponent, source_code=source, return_type="float32")


def substituted(expr: Any, variables: Mapping[Any, Any], loaded: Mapping[Any, Any] | None = None) -> Any:
    """The expression with values for variables, of their types, and for what is ``loaded`` from buffers."""
    def value_of(var: tirx.Var) -> Any:
        value = variables.get(var)
        return var if value is None else value.astype(var.ty.dtype)

    named = tvm_ffi.structural_map(expr, (tirx.Var, value_of), order="pre")
    if not loaded:
        return named

    def load(found: TensorLoad) -> Any:
        return next((value for buffer, value in loaded.items() if buffer.same_as(found.source)), found)

    return tvm_ffi.structural_map(named, (TensorLoad, load), order="post")


class Registers:
    """Makes a kernel's registers: buffers of which each thread has its own."""

    def __init__(self) -> None:
        self.buffers: list[tirx.Buffer] = []

    def __call__(self, count: int, dtype: str, name: str) -> tirx.Buffer:
        made = tirx.decl_buffer((count,), dtype, name, scope="local")
        self.buffers.append(made)
        return made

    def shared(self, count: int, dtype: str) -> tirx.Buffer:
        """The block's dynamic shared memory, all in one: TVM lays several over each other by when it thinks that each
        is used."""
        made = tirx.decl_buffer((count,), dtype, "tiles", scope="shared.dyn")
        self.buffers.append(made)
        return made


def kernel(
    func: tirx.PrimFunc, grid: Any, threads: int, buffers: Sequence[tirx.Buffer],
    body: Callable[[Any, Any], list[Any]], handed: Sequence[tirx.Buffer] = (),
) -> tirx.PrimFunc:
    """A function of the parameters of ``func``: one kernel, ``body`` of the numbers of a block and of its thread.
    ``handed`` are what blocks hand to each other, which the host allocates."""
    block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
    inner: tirx.Stmt = tirx.SeqStmt(body(block, thread))
    for variable, extent, axis in ((thread, threads, "threadIdx.x"), (block, grid, "blockIdx.x")):
        binding = tirx.IterVar(None, tirx.Var("", "int32"), tirx.IterVar.ThreadIndex, axis)
        inner = tirx.For(variable, i32(0), i32(extent), tirx.ForKind.THREAD_BINDING, inner, binding)
    root = s_tir.SBlock([], [], [], "root", inner, alloc_buffers=list(buffers))
    realize = s_tir.SBlockRealize([], tirx.const(True, "bool"), root)
    return func.with_body(tirx.SeqStmt([*map(tirx.AllocBuffer, handed), realize]) if handed else realize)
