"""Non-temporal stores of results that are larger than the caches, which would otherwise be read first and then evict
what is needed next (Intel 64 and IA-32 Optimization Reference Manual, "Non-temporal stores").

TVM has no such store, and LLVM has it as metadata of one, so it is called as a function of LLVM's own language that is
inlined. Such stores are not in order with others: each thread waits for its own at its end.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from schedules.analysis import op_name, replaced, walk

__all__ = ["lower_nontemporal_stores", "nontemporal_store", "with_store_fence"]

_MARK = "mlc.streamed"
_WAIT = "mlc_stream_wait"
_HEADER = "!0 = !{i32 1}"


def nontemporal_store(store: tirx.Stmt) -> tirx.Stmt:
    """Mark the vector stores of a statement as non-temporal."""
    return tirx.AttrStmt(tirx.const(0, "int32"), _MARK, tirx.const(1, "int32"), store)


def with_store_fence(body: tirx.Stmt) -> tirx.Stmt:
    """A thread's work, followed by a fence for its non-temporal stores."""
    return tirx.SeqStmt([body, tirx.Evaluate(tirx.call_extern("void", _WAIT))])


def lower_nontemporal_stores(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace marked vector stores by calls that LLVM compiles to non-temporal stores. Returns the same object if
    nothing is marked. Vectors that may not be aligned to their size are stored normally."""
    helpers: dict[str, str] = {}
    values: dict[Any, Any] = {}
    walk(func.body, (tirx.Bind, lambda bound: values.update({bound.var: replaced(bound.value, values)})))

    def called(store: tirx.BufferStore) -> tirx.Stmt:
        place = store.indices[0]
        whole = len(store.indices) == 1 and isinstance(place, tirx.Ramp) and _is_one(place.stride)
        if not whole or str(store.buffer.dtype) != "float32" or getattr(store, "predicate", None) is not None:
            return store
        lanes, known = int(place.lanes), tvm.sym.Analyzer().modular_set(replaced(place.base, values))
        if lanes & (lanes - 1) or int(known.coeff) % lanes or int(known.base) % lanes:
            return store
        name = f"mlc_stream_float32x{lanes}"
        helpers[name] = _store(name, lanes)
        address = tirx.address_of(tirx.BufferLoad(store.buffer, [place.base]))
        return tirx.Evaluate(tirx.call_extern("void", name, address, store.value))

    def inside(statement: tirx.AttrStmt) -> tirx.Stmt:
        if statement.attr_key != _MARK:
            return statement
        return tvm_ffi.structural_map(statement.body, (tirx.BufferStore, called))

    def waited(statement: tirx.Evaluate) -> tirx.Evaluate:
        return statement if helpers or not _is_wait(statement) else tirx.Evaluate(0)

    marked: list[bool] = []
    walk(func.body, (tirx.AttrStmt, lambda statement: marked.append(statement.attr_key == _MARK)),
         (tirx.Evaluate, lambda statement: marked.append(_is_wait(statement))))
    if not any(marked):
        return func
    body = tvm_ffi.structural_map(func.body, (tirx.AttrStmt, inside))
    body = tvm_ffi.structural_map(body, (tirx.Evaluate, waited))  # what was small for all sizes is gone by now
    if not helpers:
        return func.with_body(body)
    text = "\n".join([*helpers.values(), _WAITING, _HEADER])
    return func.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", tvm.ir.StringImm(text), body))


def _is_wait(statement: tirx.Evaluate) -> bool:
    call = statement.value
    return isinstance(call, Call) and op_name(call) == "call_extern" and str(call.args[0].value) == _WAIT


def _is_one(number: Any) -> bool:
    return isinstance(number, tirx.IntImm) and int(number) == 1


def _store(name: str, lanes: int) -> str:
    return "\n".join([
        f"define linkonce_odr void @{name}(ptr %p, <{lanes} x float> %v) alwaysinline {{",
        f"  store <{lanes} x float> %v, ptr %p, align {4 * lanes}, !nontemporal !0",
        "  ret void",
        "}",
    ])


_WAITING = "\n".join([
    f"define linkonce_odr void @{_WAIT}() alwaysinline {{", "  fence seq_cst", "  ret void", "}",
])
