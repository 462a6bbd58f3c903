"""Copies of bytes that are zeros beyond a bound, as TVM's pass for asynchronous copies takes them.

``shared[..] = if_then_else(c, x[..], 0)`` becomes a ``cp.async`` that fills with zeros where ``c`` is false, for float
zeros alone (0.27): of int8 it would be an ordinary copy, for which threads wait. For that pass's time the zeros of a
vector of int8 are floats, which it drops. Whole vectors of zeros, where ``c`` is never true, are stored four bytes at a
time: TVM writes no longer ones of int8 that CUDA's compiler reads.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis import op_name

__all__ = ["FilledCopies"]

_PASS = "s_tir.InjectPTXAsyncCopy"
#: what TVM calls the part of a pipeline whose copies are asynchronous
_ASYNCHRONOUS = "async_scope"
#: bytes of a cp.async
_COPIED = (4, 8, 16)
#: int8 that TVM writes zeros of at a time
_WRITTEN = 4


@tvm.ir.instrument.pass_instrument
class FilledCopies:
    """Changes the functions that TVM's pass is about to see; an instrument, since that is one of a sequence."""

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        if str(info.name) != _PASS:
            return
        for var, func in list(mod.functions_items()):
            if isinstance(func, tirx.PrimFunc) and (changed := _filled(func)) is not func:
                mod.update_func(var, changed)


def _filled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    found = False

    def change(store: tirx.BufferStore) -> Any:
        nonlocal found
        value, lanes = store.value, _vector(store)
        if lanes <= 1:
            return store
        if lanes in _COPIED and isinstance(value, Call) and _is_guarded(value):
            found = True
            zeros = tirx.Broadcast(tirx.const(0.0, "float32"), lanes)
            copied = Call(value.op, [*value.args[:2], zeros], ret_ty=value.ty)
            return tirx.BufferStore(store.buffer, copied, store.indices)
        if lanes > _WRITTEN and _is_zero(value):
            found = True
            (ramp,) = store.indices
            zeros = tirx.Broadcast(tirx.const(0, "int8"), _WRITTEN)
            return tirx.SeqStmt([
                tirx.BufferStore(store.buffer, zeros, [tirx.Ramp(ramp.base + first, ramp.stride, _WRITTEN)])
                for first in range(0, lanes, _WRITTEN)])
        return store

    def inside(attr: tirx.AttrStmt) -> Any:
        if attr.attr_key != _ASYNCHRONOUS:
            return attr
        body = tvm_ffi.structural_map(attr.body, (tirx.BufferStore, change), order="post")
        return tirx.AttrStmt(attr.node, attr.attr_key, attr.value, body)

    body = tvm_ffi.structural_map(func.body, (tirx.AttrStmt, inside), order="post")
    return func.with_body(body) if found else func


def _vector(store: tirx.BufferStore) -> int:
    """Neighbouring int8 that a copy to shared memory takes; 0 for any other store."""
    ramp = store.indices[-1]
    shared = store.buffer.scope().startswith("shared") and str(store.buffer.dtype) == "int8"
    return int(ramp.lanes) if shared and len(store.indices) == 1 and isinstance(ramp, tirx.Ramp) else 0


def _is_guarded(value: Call) -> bool:
    """Whether a vector is neighbours in memory, or zeros."""
    if op_name(value) != "if_then_else" or not isinstance(load := value.args[1], TensorLoad):
        return False
    plain = load.source.scope() in ("", "global") and isinstance(load.indices[-1], tirx.Ramp)
    return plain and _is_zero(value.args[2])


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.Broadcast) and isinstance(value.value, tirx.IntImm) and int(value.value) == 0
